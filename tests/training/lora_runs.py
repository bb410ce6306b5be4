"""Small runs with LoRA adapters, and what stock peft computes for them in one process."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from meshtrain.config.lora import LoraConfig
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import CompilePlan, RecomputePlan
from meshtrain.config.run import ModelConfig, RunConfig
from meshtrain.errors import UserError
from meshtrain.inference.lora import export
from meshtrain.models.adapters import initialize_adapters, is_adapted
from meshtrain.models.layout import local_tensor
from meshtrain.parallel import build_pipeline
from meshtrain.runtime.mesh import init_mesh
from meshtrain.runtime.ranks import RankError
from meshtrain.training.resolve import ResolvedRun, resolve_run
from tests.casts import lift_float32_casts
from tests.ranks import run_on_ranks
from tests.training.runs import QWEN3, VOCABULARY, Mesh, build_plan, build_run, steps_of, train_here
from tests.training.stock_optimizer import stock_adamw

LORA = LoraConfig(rank=4, alpha=8)
CONTEXT = MeshPlan(cp=2, dp_shard=1)
MESHES: list[Mesh] = [(1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (2, 1, 1, 1), (2, 1, 1, 2)]


def write_base(directory: Path, *, seed: int = 0, **changes: Any) -> None:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**QWEN3, "vocab_size": VOCABULARY, **changes})).double()
    model.save_pretrained(directory / "base")


def lora_run(directory: Path, mesh: Mesh, *, name: str = "run", lora: LoraConfig = LORA, **changes: Any) -> RunConfig:
    run = build_run(directory / name, "qwen3", build_plan(mesh), **changes)
    model = ModelConfig(path=str(directory / "base"), weights="pretrained")
    return run.model_copy(update={"model": model, "lora": lora})


def train(run: RunConfig) -> list[float]:
    """Train on as many ranks as the plan needs, and return the losses."""
    run_on_ranks(run.plan.mesh.world_size, train_here, run, joins=False)
    return [metrics["loss"] for metrics in steps_of(Path(run.run_directory))]


def stock_losses(run: RunConfig, options: Mapping[str, Any] = MappingProxyType({})) -> list[float]:
    """Train peft's own model as the run does, on the tokens that the run sees, in one process.

    Args:
        run: on one process.
        options: of peft's configuration, beside or instead of those of `LORA`.
    """
    seen = train_here(run)
    base = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=torch.float64)
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(base, PeftConfig(**values)).double()
    layers = {name: module for name, module in base.named_modules() if is_adapted(module)}
    initialize_adapters(base, layers, seed=run.seed)
    config = run.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = stock_adamw(trained, config)
    found = []
    for step in seen:
        logits = model(input_ids=torch.tensor(step["tokens"])).logits
        loss = cross_entropy(logits.flatten(0, 1), torch.tensor(step["labels"]).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_gradient_norm)
        optimizer.step()
        found.append(loss.item())
    return found


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(2, 34)[None]).logits


def refusal(run: RunConfig) -> UserError:
    with pytest.raises(RankError) as caught:
        train(run)
    assert isinstance(caught.value.original, UserError)
    return caught.value.original


def prove(directory: Path, lora: LoraConfig, **options: Any) -> None:
    """Compare the losses of runs on every mesh with those of stock peft in one process."""
    one = lora_run(directory, (1, 1, 1, 1), name="one", lora=lora, steps=3)
    (wanted,) = run_on_ranks(1, stock_losses, one, options, joins=False)
    for number, mesh in enumerate(MESHES):
        found = train(lora_run(directory, mesh, name=f"run{number}", lora=lora, steps=3))
        assert found == pytest.approx(wanted, rel=1e-12), mesh
    frozen = train(lora_run(directory, (1, 1, 1, 1), name="frozen", lora=LoraConfig(rank=4, alpha=8), steps=3))
    assert abs(frozen[2] - wanted[2]) > 1e-6


def _held_bytes(run: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer state on this rank."""
    lift_float32_casts()
    resolved = resolve_run(run)
    mesh = init_mesh(resolved.plan.mesh, "cpu")
    pipeline = build_pipeline(
        resolved.model,
        mesh,
        resolved.plan,
        micro_batch_size=1,
        seed=0,
        device=torch.device("cpu"),
        adapters=resolved.adapters,
        packs_base=run.lora.base == "nf4",
    )
    sizes = [local_tensor(p).nbytes for _, p in pipeline.named_parameters()]
    gradients = sum(local_tensor(p).nbytes for _, p in pipeline.trainable_parameters())
    return sum(sizes), gradients, 2 * gradients


def check_counts(run: RunConfig) -> ResolvedRun:
    """Compare what is counted of a run on one stage with what a process holds."""
    resolved = resolve_run(run)
    (share,) = resolved.shares()
    held = run_on_ranks(run.plan.mesh.world_size, _held_bytes, run)[0]
    assert (share.parameter_bytes, share.gradient_bytes, share.optimizer_bytes) == held
    return resolved


def check_exports(directory: Path, base: Any) -> None:
    """Compare the two exports of a run, both loaded by stock libraries."""
    export(str(directory / "run"), directory / "adapters")
    export(str(directory / "run"), directory / "merged", merge_adapters=True)
    before = logits_of(base)
    adapted = PeftModel.from_pretrained(base, str(directory / "adapters")).double().eval()
    merged = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float64).eval()
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-12, atol=1e-12)
    assert (before - logits_of(merged)).abs().max() > 0.01


def compiled_losses(directory: Path, lora: LoraConfig, mesh: Mesh, *, is_compiled: bool) -> list[float]:
    """Return the losses of a run whose layers are compiled and recomputed, or neither."""
    run = lora_run(directory, mesh, name=f"compiled-{is_compiled}", lora=lora, steps=2)
    if not is_compiled:
        return train(run)
    changes = {"compile": CompilePlan(enabled=True, backend="aot_eager"), "recompute": RecomputePlan(mode="full")}
    return train(run.model_copy(update={"plan": run.plan.model_copy(update=changes)}))
