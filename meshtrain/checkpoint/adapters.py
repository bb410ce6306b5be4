"""LoRA adapters, gathered from a mesh: written as peft writes them, or added to the weights they stand beside."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from meshtrain.errors import CheckpointError
from meshtrain.models.adapters import adapters_of, is_adapted, is_adapter_parameter, stock_name
from meshtrain.models.fused import join_parts
from meshtrain.parallel.pipeline import Pipeline, full_tensor
from meshtrain.runtime.agreement import is_first_rank, raise_together
from meshtrain.runtime.mesh import axis_rank


@dataclass(frozen=True)
class Adapter:
    """What one adapter adds to a weight: B A, scaled.

    Attributes:
        name: under which peft knows it.
        weight: FQN of the weight.
        scaling: factor.
        transposed: whether the weight is (in, out), that of a Conv1D.
    """

    name: str
    weight: str
    scaling: float
    transposed: bool

    def added_to(self, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the whole weight with the adapter in it, computed as peft merges: a new tensor on the CPU.

        Args:
            weight: whole, as the stock model shapes it.
            tensors: of `gather_adapters`.
        """
        module = self.weight.rpartition(".")[0]
        down, up = (tensors[f"{module}.{kind}.{self.name}.weight"] for kind in ("lora_A", "lora_B"))
        # peft too multiplies half precision on the CPU in float32.
        wide = torch.float32 if up.dtype in (torch.float16, torch.bfloat16) else up.dtype
        product = up.to(wide) @ down.to(wide)
        delta = (product.T if self.transposed else product) * self.scaling
        return weight.cpu().clone().add_(delta.to(up.dtype))


def gather_adapters(pipeline: Pipeline) -> tuple[dict[str, Tensor], list[Adapter]]:
    """Return the adapters of a whole model on the first rank, and nothing elsewhere. Collective.

    Returns:
        FQN -> whole tensor on the CPU, as peft shapes it; and the active adapters, in the order in which they add up.
    """
    owned = pipeline.owned_parameters()
    whole = {name: full_tensor(value.detach()).cpu() for name, value in owned.items() if is_adapter_parameter(name)}
    whole = join_parts(whole, pipeline.fused)
    active = [adapter for stage in pipeline.stages for adapter in _active(stage.model)]
    holds_alone = all(axis_rank(pipeline.mesh, axis) == 0 for axis in ("dp_replicate", "dp_shard", "tp"))
    mine = (whole, active) if holds_alone else ({}, [])
    if not dist.is_initialized():
        return mine
    answers: list[Any] | None = [None] * dist.get_world_size() if is_first_rank() else None
    dist.gather_object(mine, answers)
    tensors: dict[str, Tensor] = {}
    adapters: list[Adapter] = []
    for found, names in answers or ():
        tensors |= found
        adapters += names
    return tensors, adapters


def save_adapters(adapted: Any, pipeline: Pipeline, folder: str | Path, **options: Any) -> None:
    """Write the adapters of a parallel model as peft writes those of a stock one. Collective.

    Args:
        adapted: the PeftModel.
        pipeline: of the model inside.
        folder: gets adapter_config.json and adapter_model.safetensors, which `PeftModel.from_pretrained` loads.
        options: of `PeftModel.save_pretrained`.

    Raises:
        CheckpointError: on all ranks alike, if the folder cannot be written.
    """
    tensors, _ = gather_adapters(pipeline)
    problems = []
    if is_first_rank():
        state = {f"base_model.model.{name}": value for name, value in tensors.items()}
        try:
            with warnings.catch_warnings():
                # A local model has no files on the hub to compare with.
                warnings.simplefilter("ignore")
                type(adapted).save_pretrained(
                    adapted, str(folder), state_dict=state, save_embedding_layers=False, **options
                )
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            problems.append(f"cannot write adapters into {folder}: {reason}; make room or save elsewhere")
    raise_together(problems, CheckpointError)


def _active(model: nn.Module) -> list[Adapter]:
    adapters = []
    for name, layer in model.named_modules():
        if is_adapted(layer):
            known: Any = layer
            names = [adapter for adapter, _, _ in adapters_of(layer) if adapter in known.active_adapters]
            adapters += [
                Adapter(adapter, f"{stock_name(name)}.weight", known.scaling[adapter], known.fan_in_fan_out)
                for adapter in names
            ]
    return adapters
