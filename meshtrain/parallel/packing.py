"""A frozen model in four bits under a plan: whether it can be, and its weights from files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtrain.config.lora import LoraConfig
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import ConfigError, Problem
from meshtrain.models.layout import local_tensor
from meshtrain.models.packed import pack, packable, packed_projections, packing_problems, row_bytes
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import sharded_dim


def check_packing(model: PreTrainedModel, lora: LoraConfig, plan: ParallelPlan) -> None:
    """Check that the frozen model of adapters can be kept in the format that a run asks for.

    Args:
        model: stock, on the meta device, with the adapters taken off.
        lora: of the run.
        plan: resolved.

    Raises:
        ConfigError: with one line for each reason.
    """
    if lora.base == "parameters":
        return
    problems = packing_problems(model)
    if plan.mesh.tp > 1:
        found = f"lora.base = 'nf4' and plan.mesh.tp = {plan.mesh.tp}: packed weights are not cut"
        problems.append(Problem(found, "set plan.mesh.tp = 1, and shard over dp_shard"))
    degree = plan.mesh.fsdp_degree
    for name, module in packable(model):
        if sharded_dim([module.out_features, row_bytes(module.in_features)], degree) != 0:
            found = (
                f"lora.base = 'nf4': {name} has {module.out_features} rows, which are too few for {degree} processes"
            )
            problems.append(Problem(found, "set a smaller plan.mesh.dp_shard"))
            break
    if plan.precision.compute == "float8":
        found = "lora.base = 'nf4' and plan.precision.compute = 'float8': packed weights are unpacked to bfloat16"
        problems.append(Problem(found, "set plan.precision.compute = 'bfloat16'"))
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class Packing:
    """A projection to pack, and memory for its rows.

    Attributes:
        name: FQN of the weight.
        weight: (rows, in) of this process, to fill; a DTensor if the packed weight is one.
    """

    name: str
    weight: Tensor
    _packed: Tensor

    def finish(self) -> None:
        """Pack what is in `weight`."""
        pack(local_tensor(self.weight), local_tensor(self._packed))


def packed_layers(pipeline: Pipeline) -> Iterator[list[tuple[str, Any]]]:
    """Yield FQN of the weight and module of the projections to pack, those of a layer at once."""
    for stage in pipeline.stages:
        layers: dict[str, list[tuple[str, Any]]] = {}
        for name, module in packed_projections(stage.model):
            layers.setdefault(".".join(name.split(".")[:3]), []).append((name, module))
        yield from layers.values()


def make_packing(name: str, module: Any) -> Packing:
    """Return memory for the rows of a projection that this process holds."""
    packed = module.weight.detach()
    local = local_tensor(packed)
    rows = torch.empty(local.shape[0], module.in_features, dtype=torch.float32, device=local.device)
    if not isinstance(packed, DTensor):
        return Packing(name, rows, packed)
    shape = torch.Size([module.out_features, module.in_features])
    whole = DTensor.from_local(
        rows, packed.device_mesh, packed.placements, run_check=False, shape=shape, stride=(module.in_features, 1)
    )
    return Packing(name, whole, packed)
