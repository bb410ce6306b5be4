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
from meshtrain.errors import ConfigError
from meshtrain.models import packed
from meshtrain.models.adapters import is_adapted, is_adapter_parameter
from meshtrain.models.build import load_hf_config
from meshtrain.training.resolve import resolve_run
from meshtrain.verify import parallel, prove
from meshtrain.verify.case import ProofCase, Trace
from meshtrain.verify.parallel import train_plan
from meshtrain.verify.verify_run import make_case, make_cases
from tests.training.lora_runs import lora_run, write_base

LORA = LoraConfig(rank=16, alpha=32, dora=True, modules_to_save=["norm", "lm_head"])
PACKED = LoraConfig(rank=16, alpha=32, base="nf4")


def case_of(mesh: MeshPlan, lora: LoraConfig = LORA, kind: str = "qwen3") -> ProofCase:
    hf_config = load_hf_config(ModelConfig(type=kind))
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


def pack_nothing() -> None:
    """Keep the full weights of the model."""
    build = parallel.build_pipeline
    parallel.build_pipeline = lambda *args, **kwargs: build(*args, **{**kwargs, "packs_base": False})


def unpack_less() -> None:
    """Multiply by weights that are a little smaller."""
    unpack = packed.unpack
    packed.unpack = lambda *args: unpack(*args) * (1 - 1e-9)


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


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (MeshPlan(pp=2, dp_shard=2), "qwen3"),
        (MeshPlan(cp=2, dp_replicate=2, dp_shard=1), "qwen3"),
        (MeshPlan(pp=2, tp=2, dp_shard=2), "qwen3"),
        # Fused projections, which are packed in parts.
        (MeshPlan(dp_shard=2), "phi3"),
        (MeshPlan(tp=2, dp_shard=1), "phi3"),
    ],
)
def test_adapters_are_proven_beside_four_bits(mesh: MeshPlan, kind: str) -> None:
    case = case_of(mesh, PACKED, kind)
    assert case.lora.base == "nf4"
    proof = prove.prove(case)
    assert proof.holds, proof.difference


@pytest.mark.parametrize("damage", [pack_nothing, unpack_less])
def test_wrong_four_bits_are_not_proven(damage: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "train_plan", functools.partial(train_damaged, damage))
    proof = prove.prove(case_of(MeshPlan(dp_shard=2), PACKED))
    assert not proof.holds
    assert "loss" in {finding.what for finding in proof.findings if not finding.holds}


def test_tiny_copy_that_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    # Half of the heads of this model are too few for a block.
    write_base(tmp_path, hidden_size=64, num_attention_heads=8, head_dim=8, intermediate_size=64)
    resolved = resolve_run(lora_run(tmp_path, (1, 1, 2, 1), lora=PACKED))
    with pytest.raises(ConfigError, match=r"a tiny copy: lora\.base = 'nf4': model\.layers\.0\.\S+ has 32 inputs"):
        make_cases(resolved)


def test_adapters_of_single_layers_are_proven_on_all(tmp_path: Path) -> None:
    write_base(tmp_path)
    lora = LoraConfig(rank=64, alpha=32, dropout=0.1, target_modules=["3.self_attn.q_proj", "layers.1.mlp.up_proj"])
    (case,) = make_cases(resolve_run(lora_run(tmp_path, (1, 1, 1, 2), lora=lora)))
    assert case.lora == LoraConfig(rank=4, alpha=2, target_modules=["self_attn.q_proj", "mlp.up_proj"])
