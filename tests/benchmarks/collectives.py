"""Count the collectives of one layer and microbatch over tp 2: rules in use, and derived ones.

python -m tests.benchmarks.collectives

Rules in use come from a shipped family, from transformers, or are derived. The last column has
rules that come only from what a tiny copy computes. `before` is the number with the rules of the
time when they were written by hand for Falcon and MPT. The models are tiny, because the numbers do
not depend on the size.

Derived rules cut no stacked experts. They cut the attention of DeepSeek V3, which the plan of
transformers leaves whole on every process.
"""

import argparse
from typing import Any, Literal

import torch
from torch import Tensor

from meshtrain.compat.autograd import OperatorMode
from meshtrain.config.families import with_family
from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PrecisionPlan, TensorPlan
from meshtrain.models.build import build_meta_model
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.tensor.dataflow import derive_rules
from meshtrain.runtime.mesh import init_mesh
from meshtrain.training.loss import build_loss
from tests.parallel.families import VOCABULARY, Family
from tests.ranks import run_on_ranks

Kind = Literal["in use", "derived"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
OLD_FALCON = {"multi_query": False, "parallel_attn": False, "alibi": True, "num_kv_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "GPT-2": ("gpt2", {"n_embd": 32, "n_head": 4}, 4),
    "Llama": ("llama", {}, 4),
    "Qwen3": ("qwen3", {}, 4),
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, 5),
    "DeepSeek V3": ("deepseek_v3", {**EXPERTS, **LATENT, **GROUPS}, 5),
    "Falcon, old": ("falcon", {**OLD_FALCON, "ffn_hidden_size": 48}, 4),
    "Falcon, multi-query": ("falcon", {"ffn_hidden_size": 48}, 4),
    "Falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}, 4),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4}, 4),
}
SEQUENCE = 12


class _Count(OperatorMode):
    """Counts the collectives of a block.

    `CommDebugMode` of torch has hooks on all modules, and fails with a loop over experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, name = func.name().partition("::")
        self.total += kind.endswith("c10d_functional") and not name.startswith("wait_tensor")
        return func(*args, **(kwargs or {}))


def layer_counts(names: list[str]) -> dict[str, dict[Kind, tuple[int, int]]]:
    """Return the collectives of a layer, forward and backward; call it on two ranks."""
    kinds: tuple[Kind, ...] = ("in use", "derived")
    return {name: {kind: _per_layer(name, kind) for kind in kinds} for name in names}


def _per_layer(name: str, kind: Kind) -> tuple[int, int]:
    # The first layer of some models is of another kind, so it is in both.
    two, four = (_counts(name, kind, layers) for layers in (2, 4))
    forward, total = ((more - fewer) // 2 for fewer, more in zip(two, four, strict=True))
    return forward, total - forward


def _counts(name: str, kind: Kind, layers: int) -> tuple[int, int]:
    """Return the number of collectives of an evaluation, and of a forward and backward pass."""
    pipeline = _pipeline(name, kind, layers)
    ids = torch.randint(3, VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids}
    with _Count() as forward:
        pipeline.evaluate(batch, build_loss(pipeline))
    with _Count() as both:
        pipeline.forward_backward(batch, build_loss(pipeline))
    return forward.total, both.total


def _pipeline(name: str, kind: Kind, layers: int) -> Pipeline:
    model_type, changes, _ = MODELS[name]
    changes = {**changes, "num_hidden_layers": layers}
    model = build_meta_model(Family(model_type, changes).hf_config(), dtype=torch.float32, attention="eager")
    plan = ParallelPlan(mesh=MeshPlan(tp=2), precision=PrecisionPlan(compute="float32"))
    if kind == "in use":
        plan = with_family(plan, model_type)
    else:
        plan = plan.model_copy(update={"tensor": TensorPlan(auto=True, **vars(derive_rules(model)))})
    plan = resolve_plan(plan, model, BatchShape(1, 1, SEQUENCE), 2)
    mesh = init_mesh(plan.mesh, "cpu")
    pipeline = build_pipeline(model, mesh, plan, micro_batch_size=1, seed=0, device=torch.device("cpu"))
    pipeline.initialize(0)
    return pipeline


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one model, to see that the benchmark works")
    names = [*MODELS][:1] if parser.parse_args().small else [*MODELS]
    found, _ = run_on_ranks(2, layer_counts, names)
    print(f"{'model':22}{'before':>10}{'in use':>16}{'derived':>16}   (forward + backward)")
    for name, counts in found.items():
        print(f"{name:22}{MODELS[name][2]:>10}" + "".join(f"{f'{a} + {b} = {a + b}':>16}" for a, b in counts.values()))


if __name__ == "__main__":
    main()
