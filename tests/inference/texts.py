"""Texts of tiny models, by the stock model and from a mesh, for the tests of generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import CompilePlan, ParallelPlan, PipelinePlan, PrecisionPlan, TensorPlan
from meshtrain.inference.generation import generate_on_mesh
from meshtrain.models.build import build_meta_model
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.mesh import axis_rank, init_mesh
from tests.parallel.families import VOCABULARY, Family, Float64, copy_buffers
from tests.parity import fill

NEW_TOKENS, PROMPT, SEED = 7, 6, 3
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.95},
    "beams": {"do_sample": False, "num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
}
DEEP = {"num_hidden_layers": 4}
FAMILIES = {
    "gpt2": Family("gpt2", DEEP),
    "llama": Family("llama", DEEP),
    "qwen3": Family("qwen3", DEEP),
    "mixtral": Family("mixtral", DEEP | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The window is shorter than the prompt, so it is full from the first token on.
    "gemma2": Family("gemma2", DEEP | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "opt": Family("opt", DEEP),
    "gpt_neox": Family("gpt_neox", DEEP),
}

# The caches of these models hold more than keys and values.
OTHERS = {
    "mamba": Family("mamba", DEEP | {"state_size": 4}),
    "lfm2": Family("lfm2", DEEP | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}),
}


@dataclass(frozen=True)
class Text:
    """The generated tokens, and the number of positions in each forward pass of the first layer."""

    tokens: list[list[int]]
    widths: list[int]


@dataclass(frozen=True)
class MeshModel:
    """A model on a mesh."""

    family: str
    mesh: tuple[int, int, int, int]
    """pp, dp_replicate, dp_shard, tp"""
    pipeline: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False


def stock_model(family: str) -> PreTrainedModel:
    """Build a model whose text is more than a few repeated tokens."""
    model = AutoModelForCausalLM.from_config(
        (FAMILIES | OTHERS)[family].hf_config(), dtype=torch.float64, attn_implementation="eager"
    )
    stream = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1, generator=stream)
            elif parameter.dim() == 1:
                parameter.normal_(1.0, 0.3, generator=stream)
            else:
                # With larger embeddings, the last token would always be the most likely.
                is_end = parameter.shape[0] == VOCABULARY
                parameter.normal_(0.0, 0.1 if is_end else 1.0, generator=stream)
    return model.eval()


def prompts(seed: int = 5) -> dict[str, Tensor]:
    """Return three prompts of different lengths, left-padded."""
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (3, PROMPT), generator=stream)
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[2, :3] = 0
    return {"inputs": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def stock_texts(families: list[str], modes: Sequence[str] = tuple(MODES)) -> dict[tuple[str, str], Text]:
    """Generate with the stock models, one after the other."""
    texts = {}
    for family in families:
        model = stock_model(family)
        widths = watch(model)
        for mode in modes:
            torch.manual_seed(SEED)
            with Float64():
                tokens = model.generate(**prompts(), **MODES[mode], max_new_tokens=NEW_TOKENS, pad_token_id=0)
            texts[family, mode] = Text(tokens.tolist(), list(widths))
            widths.clear()
    return texts


def build(case: MeshModel) -> Pipeline:
    """Build a model on a mesh with the values of the stock model."""
    pp, dp_replicate, dp_shard, tp = case.mesh
    plan = ParallelPlan(
        mesh=MeshPlan(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
        pipeline=PipelinePlan(**case.pipeline),
        tensor=TensorPlan(**{"loss_parallel": pp > 1} | case.tensor),
        precision=PrecisionPlan(parameters="float64", compute="float64", reduce="float64"),
        compile=CompilePlan(enabled=case.compiled, backend="aot_eager"),
    )
    model = build_meta_model((FAMILIES | OTHERS)[case.family].hf_config(), dtype=torch.float64, attention="eager")
    plan = resolve_plan(plan, model, BatchShape(8 * dp_replicate * dp_shard, 1, 12), pp * dp_replicate * dp_shard * tp)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    stock = stock_model(case.family)
    fill(pipeline, {name: value.detach() for name, value in stock.named_parameters(remove_duplicate=False)})
    copy_buffers(stock, pipeline)
    return pipeline


def watch(model: PreTrainedModel) -> list[int]:
    """Record the number of positions in each pass of the first layer."""
    widths: list[int] = []

    def note(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        widths.append((args[0] if args else kwargs["hidden_states"]).shape[-2])

    find_layers(model)[1][0].register_forward_pre_hook(note, with_kwargs=True)
    return widths


def mesh_texts(cases: list[MeshModel], modes: Sequence[str]) -> list[dict[str, Text]]:
    """Generate with models on this mesh, one after the other."""
    answers = []
    for case in cases:
        pipeline = build(case)
        widths = watch(pipeline.stages[0].model)
        texts = {}
        for mode in modes:
            # The first process of a model decides for the others.
            is_first = axis_rank(pipeline.mesh, "tp") == axis_rank(pipeline.mesh, "pp") == 0
            torch.manual_seed(SEED if is_first else 50 + dist.get_rank())
            options = {**MODES[mode], "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
            with Float64():
                tokens = generate_on_mesh(pipeline, **prompts(), **options)
            texts[mode] = Text(tokens.tolist(), list(widths))
            widths.clear()
        answers.append(texts)
    return answers


def cases(mesh: tuple[int, int, int, int], families: Sequence[str] = tuple(FAMILIES), **what: Any) -> list[MeshModel]:
    """Return a case for each family on one mesh."""
    return [replace(MeshModel(family, mesh), **what) for family in families]
