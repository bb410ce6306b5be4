"""LoRA adapters, gathered from a mesh: written as peft writes them, or added to the weights they stand beside."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from meshtrain.checkpoint.description import Tokenizer, write_tokenizer
from meshtrain.checkpoint.stock_tensors import StockTensor
from meshtrain.errors import CheckpointError, ModelError
from meshtrain.models.adapters import adapters_of, is_adapted, is_adapter_parameter, stock_name
from meshtrain.models.fused import join_parts
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.agreement import is_first_rank, raise_together
from meshtrain.runtime.mesh import axis_rank


@dataclass(frozen=True)
class Adapter:
    """What one adapter adds to a weight: B A, scaled.

    Attributes:
        down: FQN of A (rank, in).
        up: FQN of B (out, rank).
        scaling: factor.
        transposed: whether the weight is (in, out), that of a Conv1D.
    """

    down: str
    up: str
    scaling: float
    transposed: bool

    def added_to(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the weight with the adapter in it, computed as peft merges.

        Args:
            weight: whole, on the CPU, as the stock model shapes it; changed in place.
            down: A, whole.
            up: B, whole.
        """
        # peft too multiplies half precision on the CPU in float32.
        wide = torch.float32 if up.dtype in (torch.float16, torch.bfloat16) else up.dtype
        product = up.to(wide) @ down.to(wide)
        delta = (product.T if self.transposed else product) * self.scaling
        return weight.add_(delta.to(up.dtype))


@dataclass(frozen=True)
class Merging:
    """The adapters of what lies on a process.

    Attributes:
        adapters: FQN of a weight -> what is added to it, in order.
        factors: FQN of A or B -> how it is made of our parameters.
    """

    adapters: Mapping[str, Sequence[Adapter]]
    factors: Mapping[str, StockTensor]


def active_adapters(pipeline: Pipeline) -> dict[str, list[Adapter]]:
    """Return FQN of a weight -> the active adapters beside it, for what lies on this process."""
    found: dict[str, list[Adapter]] = {}
    for stage in pipeline.stages:
        for name, layer in stage.model.named_modules():
            if is_adapted(layer):
                known: Any = layer
                fqn = stock_name(name)
                found[f"{fqn}.weight"] = [
                    Adapter(
                        f"{fqn}.lora_A.{adapter}.weight",
                        f"{fqn}.lora_B.{adapter}.weight",
                        known.scaling[adapter],
                        known.fan_in_fan_out,
                    )
                    for adapter, _, _ in adapters_of(layer)
                    if adapter in known.active_adapters
                ]
    return found


def gather_adapters(pipeline: Pipeline) -> dict[str, Tensor]:
    """Return FQN -> whole tensor on the CPU, as peft shapes it, of all adapters: on the first rank. Collective.

    Adapters are small, and all of them come at once; elsewhere it is empty.
    """
    owned = pipeline.owned_parameters()
    whole = {name: full_tensor(value.detach()).cpu() for name, value in owned.items() if is_adapter_parameter(name)}
    whole = join_parts(whole, pipeline.fused)
    holds_alone = all(axis_rank(pipeline.mesh, axis) == 0 for axis in ("dp_replicate", "dp_shard", "tp"))
    answers: list[Any] | None = [None] * dist.get_world_size() if is_first_rank() else None
    dist.gather_object(whole if holds_alone else {}, answers)
    return {name: value for answer in answers or () for name, value in answer.items()}


def save_adapters(
    adapted: Any, pipeline: Pipeline, folder: str | Path, *, tokenizer: Tokenizer = None, **options: Any
) -> None:
    """Write the adapters of a parallel model as peft writes those of a stock one. Collective.

    Args:
        adapted: the PeftModel.
        pipeline: of the model inside.
        folder: gets adapter_config.json and adapter_model.safetensors, which `PeftModel.from_pretrained` loads.
        tokenizer: to write beside them; None: none, as peft.
        options: of `PeftModel.save_pretrained`.

    Raises:
        CheckpointError: on all ranks alike, if the folder cannot be written, or there is no such tokenizer.
        ModelError: if there is no PeftModel.
    """
    if adapted is None:
        raise ModelError(
            "the adapters were put on the model by its own add_adapter, which cannot save them from several ranks; use "
            "peft.get_peft_model(model, config), or meshtrain.save_pretrained(model, folder, merge_adapters=True)"
        )
    tensors = gather_adapters(pipeline)
    problems: list[str] = []
    if is_first_rank():
        state = {f"base_model.model.{name}": value for name, value in tensors.items()}
        try:
            with warnings.catch_warnings():
                # A local model has no files on the hub to compare with.
                warnings.simplefilter("ignore")
                type(adapted).save_pretrained(
                    adapted, str(folder), state_dict=state, save_embedding_layers=False, **options
                )
            if tokenizer is not None:
                write_tokenizer(Path(folder), tokenizer, Path())
        except CheckpointError as error:
            problems += error.problems
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            problems.append(f"cannot write adapters into {folder}: {reason}; make room or save elsewhere")
    raise_together(problems, CheckpointError)
