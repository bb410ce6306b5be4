"""One training step of any model type under a plan, beside the stock model.

The tests of tensor rules use it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from meshtrain.config.mesh import MeshPlan
from meshtrain.config.plan import ParallelPlan, PrecisionPlan, TensorPlan
from meshtrain.models.build import build_meta_model
from meshtrain.models.dtypes import DTYPES
from meshtrain.models.fused import join_parts
from meshtrain.parallel import build_pipeline
from meshtrain.parallel.check import BatchShape, resolve_plan
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.mesh import axis_size, data_rank, init_mesh
from meshtrain.training.gradients import complete_gradients
from meshtrain.training.loss import build_loss
from tests.parity import fill

VOCABULARY, SEQUENCE, BATCH = 61, 12, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "word_embed_proj_dim": 32,
}
NO_DROPOUT = dict.fromkeys(
    (
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout",
        "resid_dropout",
        "embed_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "activation_dropout",
        "layerdrop",
    ),
    0.0,
)


@dataclass(frozen=True)
class Family:
    """A tiny model of one type, the options of its plan, and its number format.

    Attributes:
        experts: implementation of transformers: a loop for float64, that of runs for float32.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, Any] = field(default_factory=dict)
    experts: str = "eager"
    dtype: str = "float64"

    def hf_config(self) -> PretrainedConfig:
        stock = AutoConfig.for_model(self.model_type)
        known = {*stock.to_dict(), *stock.attribute_map}
        sizes = {name: value for name, value in (SIZES | NO_DROPOUT).items() if name in known}
        config = AutoConfig.for_model(self.model_type, **sizes | self.config)
        config._experts_implementation = self.experts
        return config


class Float64(TorchFunctionMode):
    """Keeps a model in float64: transformers casts norms, softmax and routers to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func.__name__ == "float":
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def resolve_family(family: Family, mesh: tuple[int, int, int, int]) -> tuple[ParallelPlan, PreTrainedModel]:
    """Return the resolved plan, and the model on meta.

    Args:
        mesh: pp, dp_replicate, dp_shard, tp.
    """
    pp, dp_replicate, dp_shard, tp = mesh
    model = build_meta_model(family.hf_config(), dtype=DTYPES[family.dtype], attention="eager")
    plan = ParallelPlan(
        mesh=MeshPlan(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
        tensor=TensorPlan(**family.tensor),
        precision=PrecisionPlan(parameters=family.dtype, compute=family.dtype, reduce=family.dtype),
    )
    return resolve_plan(plan, model, BatchShape(BATCH, 1, SEQUENCE), pp * dp_replicate * dp_shard * tp), model


def errors_of(families: list[Family], mesh: tuple[int, int, int, int]) -> list[dict[str, float]]:
    """Return, for each family, the errors of loss and gradients on this process, by stock name."""
    with Float64():
        return [_errors(family, mesh) for family in families]


def _errors(family: Family, mesh: tuple[int, int, int, int]) -> dict[str, float]:
    stock, ids, labels = _stock(family), *_batch()
    logits = stock(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / (labels != -100).sum()
    loss.backward()
    plan, model = resolve_family(family, mesh)
    pipeline = build_pipeline(
        model, init_mesh(plan.mesh, "cpu"), plan, micro_batch_size=1, seed=0, device=torch.device("cpu")
    )
    fill(pipeline, {name: parameter.detach() for name, parameter in stock.named_parameters(remove_duplicate=False)})
    copy_buffers(stock, pipeline)
    found = _train(pipeline, ids, labels) / plan.mesh.tp
    # Some parameters are not used, as keys of layers that read those of other layers.
    gradients = {
        name: full_tensor(p.grad if p.grad is not None else torch.zeros_like(p)).detach()
        for name, p in pipeline.owned_parameters().items()
    }
    errors = {"loss": abs(found.item() / loss.item() - 1)}
    wanted = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in stock.named_parameters()
    }
    for name, gradient in join_parts(gradients, pipeline.fused).items():
        # Softmax ignores the bias of keys: its gradient is zero, up to rounding noise on both
        # sides.
        largest = wanted[name].abs().max().clamp(min=1e-6)
        errors[name] = ((gradient - wanted[name]).abs().max() / largest).item()
    return errors


def copy_buffers(stock: PreTrainedModel, pipeline: Pipeline) -> None:
    """Copy the buffers of the stock model, which a default dtype of float64 makes more exact."""
    tables = dict(stock.named_buffers())
    for stage in pipeline.stages:
        for name, buffer in stage.model.named_buffers():
            # The stock model does not count the tokens of its experts.
            if name in tables:
                buffer.copy_(tables[name])


def _stock(family: Family) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        family.hf_config(), dtype=DTYPES[family.dtype], attn_implementation="eager"
    )
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05, generator=stream)
            if parameter.dim() == 1:
                parameter.add_(0.5)
    return model.train()


def _batch() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=stream)
    labels = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=stream)
    labels[torch.rand(labels.shape, generator=stream) < 0.3] = -100
    return ids, labels


def _train(pipeline: Pipeline, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over all processes of the loss, after forward and backward."""
    loss = build_loss(pipeline).mean_over((labels != -100).sum())
    size = BATCH // axis_size(pipeline.mesh, "dp_replicate", "dp_shard")
    rows = slice(data_rank(pipeline.mesh) * size, (data_rank(pipeline.mesh) + 1) * size)
    total = pipeline.forward_backward({"input_ids": ids[rows], "labels": labels[rows]}, loss)
    complete_gradients(pipeline)
    dist.all_reduce(total)
    return total
