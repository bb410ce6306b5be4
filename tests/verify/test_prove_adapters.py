"""`meshtrain verify` proves the adapters of a run together with its plan."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config.lora import LoraConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan
from meshtrain.config.run import ModelConfig
from meshtrain.models.adapters import is_adapted, is_adapter_parameter
from meshtrain.models.build import load_hf_config
from meshtrain.training.resolve import resolve_run
from meshtrain.verify import parallel, prove
from meshtrain.verify.case import ProofCase, Trace
from meshtrain.verify.parallel import train_plan
from meshtrain.verify.verify_run import make_case, make_cases
from tests.training.lora_runs import lora_run, write_base

LORA = LoraConfig(rank=16, alpha=32, dora=True, modules_to_save=["norm", "lm_head"])


def case_of(mesh: MeshPlan, lora: LoraConfig = LORA) -> ProofCase:
    hf_config = load_hf_config(ModelConfig(type="qwen3"))
    return make_case(hf_config, ParallelPlan(mesh=mesh), mesh, pretrained=True, lora=lora)


def double_scaling() -> None:
    """Add twice what the adapters add, which changes nothing if their products are zero."""
    build = parallel.build_pipeline

    def doubled(*args: Any, **kwargs: Any) -> Any:
        pipeline = build(*args, **kwargs)
        for stage in pipeline.stages:
            for module in filter(is_adapted, stage.model.modules()):
                module.scaling = {name: 2 * factor for name, factor in module.scaling.items()}  # type: ignore[union-attr]
        return pipeline

    parallel.build_pipeline = doubled


def skip_sums_of_adapters() -> None:
    """Do not sum the gradients of adapters over tp."""
    build = parallel.build_pipeline

    def without_sums(*args: Any, **kwargs: Any) -> Any:
        pipeline = build(*args, **kwargs)
        kept = frozenset(name for name in pipeline.summed_over_tp if not is_adapter_parameter(name))
        assert kept < pipeline.summed_over_tp
        object.__setattr__(pipeline, "summed_over_tp", kept)
        return pipeline

    parallel.build_pipeline = without_sums


def train_damaged(damage: Callable[[], None], case: ProofCase, initial: Any) -> Trace:
    damage()
    return train_plan(case, initial)


def test_adapters_are_proven() -> None:
    proof = prove.prove(case_of(MeshPlan(pp=2, tp=2, dp_shard=1)))
    assert proof.holds, proof.difference
    embeddings = case_of(MeshPlan(tp=2, dp_shard=2), LoraConfig(rank=2, target_modules=["q_proj", "o_proj"]))
    assert prove.prove(embeddings).holds


@pytest.mark.parametrize(
    ("damage", "difference"), [(double_scaling, "loss by "), (skip_sums_of_adapters, "gradient by ")]
)
def test_wrong_adapters_are_not_proven(
    damage: Callable[[], None], difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "train_plan", functools.partial(train_damaged, damage))
    proof = prove.prove(case_of(MeshPlan(tp=2, dp_shard=1)))
    assert not proof.holds
    wrong = [f"{finding.what} by " for finding in proof.findings if not finding.holds]
    assert difference in wrong


def test_adapters_of_single_layers_are_proven_on_all(tmp_path: Path) -> None:
    write_base(tmp_path)
    lora = LoraConfig(rank=64, alpha=32, dropout=0.1, target_modules=["3.self_attn.q_proj", "layers.1.mlp.up_proj"])
    (case,) = make_cases(resolve_run(lora_run(tmp_path, (1, 1, 1, 2), lora=lora)))
    assert case.lora == LoraConfig(rank=4, alpha=2, target_modules=["self_attn.q_proj", "mlp.up_proj"])
