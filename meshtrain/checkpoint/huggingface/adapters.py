"""LoRA adapters, gathered from a mesh: written as peft writes them, or merged into the weights."""

import warnings
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from meshtrain.checkpoint.huggingface.description import Tokenizer, save_tokenizer
from meshtrain.checkpoint.huggingface.stock_tensors import StockTensor
from meshtrain.checkpoint.storage.named_folder import locked_folder
from meshtrain.config.mesh import STAGE_AXES
from meshtrain.errors import CheckpointError, ModelError, Problem, name_some, reason_of
from meshtrain.models.adapters import adapters_of, embedding_adapters_of, is_adapted, is_adapter_parameter, stock_name
from meshtrain.models.dora import KIND, magnitudes_of
from meshtrain.models.fused import join_parts
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.agreement import failing_together, gather_objects, is_first_rank
from meshtrain.runtime.mesh import axis_rank

PREFIX = "base_model.model."
"""What peft puts before the names of the model that it adapts."""


@dataclass(frozen=True)
class Adapter:
    """What one adapter adds to a weight or a bias, scaled.

    To a weight it adds the product B A; magnitudes then set the lengths of the rows. To a bias it
    adds the bias of B (`lora_bias`).

    Attributes:
        factors: FQNs of A (rank, in) and B (out, rank), and of magnitudes (out) if there are any;
            or of the bias (out) of B.
        scaling: factor.
        transposed: whether the weight is (in, out), as that of a Conv1D or an Embedding.
    """

    factors: tuple[str, ...]
    scaling: float
    transposed: bool

    def added_to(self, stock: Tensor, *factors: Tensor) -> Tensor:
        """Return the weight or bias with the adapter added, computed as peft merges.

        Args:
            stock: full tensor on the CPU, in the shape of the stock model. It may be changed.
            factors: full tensors.
        """
        if len(factors) == 1:
            return stock.add_(factors[0] * self.scaling)
        down, up, *magnitudes = factors
        # peft also multiplies half precision on the CPU in float32.
        wide = torch.float32 if up.dtype in (torch.float16, torch.bfloat16) else up.dtype
        product = up.to(wide) @ down.to(wide)
        delta = (product.T if self.transposed else product) * self.scaling
        if not magnitudes:
            return stock.add_(delta.to(up.dtype))
        whole = stock.to(wide) + delta
        dim = 0 if self.transposed else 1
        lengths = torch.linalg.vector_norm(whole, dim=dim)
        return whole * (magnitudes[0].to(wide) / lengths).unsqueeze(dim)


@dataclass(frozen=True)
class Merging:
    """The adapters of the tensors that a process holds.

    Attributes:
        adapters: FQN of a weight or bias -> what is added to it, in order.
        factors: FQN of a parameter of A or B -> how it is made of our parameters.
    """

    adapters: Mapping[str, Sequence[Adapter]]
    factors: Mapping[str, StockTensor]


def active_adapters(pipeline: Pipeline) -> dict[str, list[Adapter]]:
    """Return what the active adapters add to the tensors that this process holds.

    Returns:
        FQN of a weight or bias -> what is added to it.
    """
    found: dict[str, list[Adapter]] = {}
    for stage in pipeline.stages:
        for name, layer in stage.model.named_modules():
            if is_adapted(layer):
                for kind, adapter in _additions(stock_name(name), layer):
                    found.setdefault(f"{stock_name(name)}.{kind}", []).append(adapter)
    return found


def _additions(fqn: str, layer: Any) -> Iterator[tuple[str, Adapter]]:
    for adapter, _, _ in adapters_of(layer):
        if adapter in layer.active_adapters:
            scaling, transposed = layer.scaling[adapter], layer.fan_in_fan_out
            kinds = ("lora_A", "lora_B", *([KIND] if adapter in dict(magnitudes_of(layer)) else []))
            factors = [f"{fqn}.{kind}.{adapter}" for kind in kinds]
            yield "weight", Adapter(tuple(f"{factor}.weight" for factor in factors), scaling, transposed)
            if layer.lora_bias[adapter]:
                yield "bias", Adapter((f"{factors[1]}.bias",), scaling, transposed)
    yield from (("weight", adapter) for adapter in _embedding_additions(fqn, layer))


def _embedding_additions(fqn: str, layer: Any) -> Iterator[Adapter]:
    for adapter, _, _ in embedding_adapters_of(layer):
        if adapter in layer.active_adapters:
            factors = tuple(f"{fqn}.{kind}.{adapter}" for kind in ("lora_embedding_A", "lora_embedding_B"))
            # A table is (vocab, hidden), and the product is (hidden, vocab).
            yield Adapter(factors, layer.scaling[adapter], transposed=True)


def find_lost_biases(adapters: Mapping[str, object], stock: Container[str]) -> list[Problem]:
    """Return a problem if adapters have biases that cannot be merged because the model has none."""
    lost = [name for name in adapters if name not in stock]
    if not lost:
        return []
    return [
        Problem(
            f"the adapters have biases (lora_bias) where the model has none ({lost[0]}), so they cannot be merged",
            "save the adapters alone, without merge_adapters",
        )
    ]


def gather_adapters(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return all adapters, and what trains beside them, on the first rank. Collective.

    All are gathered at once, because they are small.

    Returns:
        FQN -> full tensor on the CPU, in the shape of peft. Empty on all other ranks.
    """
    owned = pipeline.owned_parameters()
    mine = {name: it for name, it in owned.items() if is_adapter_parameter(name) or it.requires_grad}
    full = {name: full_tensor(parameter.detach()).cpu() for name, parameter in mine.items()}
    full = join_parts(full, pipeline.fused)
    holds_alone = all(axis_rank(pipeline.mesh, axis) == 0 for axis in STAGE_AXES)
    answers: list[Any] | None = [None] * dist.get_world_size() if is_first_rank() else None
    dist.gather_object(full if holds_alone else {}, answers)
    return {name: value for answer in answers or () for name, value in answer.items()}


def save_adapters(
    adapted: Any, pipeline: Pipeline, folder: str | Path, *, tokenizer: Tokenizer = None, **options: Any
) -> None:
    """Write the adapters of a parallel model as peft writes those of a stock one. Collective.

    Args:
        adapted: the PeftModel.
        pipeline: of the model inside.
        folder: receives adapter_config.json and adapter_model.safetensors, which
            `PeftModel.from_pretrained` loads.
        tokenizer: written beside the adapters. None: no tokenizer is written, as in peft.
        options: of `PeftModel.save_pretrained`.

    Raises:
        CheckpointError: the same on all ranks, if the folder cannot be written or the tokenizer
            does not exist.
        ModelError: if there is no PeftModel, or parameters that are not adapters are trained.
    """
    if adapted is None:
        raise ModelError(
            "the adapters were put on the model by its own add_adapter, which cannot save them from several ranks",
            "use peft.get_peft_model(model, config), or meshtrain.save_pretrained(model, folder, merge_adapters=True)",
        )
    wrapped = _wrapped_parameters(adapted)
    _check_nothing_else_trains(pipeline, {*wrapped.values()})
    tensors = gather_adapters(pipeline)
    with failing_together(CheckpointError):
        if not is_first_rank():
            return
        state = {f"{PREFIX}{name}": value for name, value in tensors.items() if is_adapter_parameter(name)}
        # Both ends of a tie have a tensor of their own in the file.
        state |= {key: tensors[name].clone() for key, name in wrapped.items()}
        try:
            with locked_folder(Path(folder)), warnings.catch_warnings():
                # peft warns that a local model has no files on the hub to compare with.
                warnings.simplefilter("ignore")
                type(adapted).save_pretrained(
                    adapted, str(folder), state_dict=state, save_embedding_layers=False, **options
                )
                if tokenizer is not None:
                    save_tokenizer(Path(folder), tokenizer, Path())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                Problem(f"cannot write adapters into {folder}: {reason_of(error)}", "make room or save elsewhere")
            ) from error


def _wrapped_parameters(adapted: Any) -> dict[str, str]:
    """Return peft's key of each parameter that trains in full -> its stock FQN."""
    base = adapted.get_base_model()
    ties = {stock_name(copy): stock_name(source) for copy, source in base.all_tied_weights_keys.items()}
    found = {}
    for name, module in base.named_modules():
        if {"original_module", "modules_to_save"} == {kind for kind, _ in module.named_children()}:
            for kind, _ in module.original_module.named_parameters():
                stock = f"{name}.{kind}"
                found[f"{PREFIX}{name}.modules_to_save.default.{kind}"] = ties.get(stock, stock)
    return found


def _check_nothing_else_trains(pipeline: Pipeline, saved: Collection[str]) -> None:
    # peft would leave out other trained parameters without a warning.
    joined = {part: entry.name for entry in pipeline.fused for part in entry.parts}
    canonical = pipeline.canonical_names()
    names = [canonical[name] for name, _ in pipeline.trainable_parameters() if not is_adapter_parameter(name)]
    mine = [name for name in names if joined.get(name, name) not in saved]
    if others := list(dict.fromkeys(name for names in gather_objects(mine) for name in names)):
        raise ModelError(
            f"{name_some(others)} would not be saved: these parameters are trained, but are not adapters",
            "write the full model with meshtrain.save_pretrained(model, folder, merge_adapters=True), or call "
            "requires_grad_(False) on it first",
        )
