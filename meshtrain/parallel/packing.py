"""A frozen model in four bits under a plan: whether it can be, its layers, weights from files."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from meshtrain.compat.nn import mix_in, own_class
from meshtrain.config.lora import LoraConfig
from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.errors import ConfigError, Problem
from meshtrain.models.copying import copy_module
from meshtrain.models.fused import unfuse
from meshtrain.models.layout import local_tensor
from meshtrain.models.packed import (
    BLOCK,
    PackedLinear,
    PackedWeight,
    pack,
    packable,
    packed_projections,
    packed_width,
    packing_problems,
    unpack,
    unpacked_width,
)
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.parallel.shard import sharded_dim
from meshtrain.parallel.tensor.head_share import heads_of
from meshtrain.parallel.tensor.modules import OwnInputs, OwnOutputs, ShardedLinear
from meshtrain.parallel.tensor.rules import TensorRules, resolve_rules
from meshtrain.parallel.tensor.styles import STYLES

KEY = "lora.base = 'nf4'"


def check_packing(model: PreTrainedModel, lora: LoraConfig, plan: ParallelPlan) -> None:
    """Check that the frozen model of adapters can be kept in the format that a run asks for.

    Args:
        model: stock, on the meta device, with the adapters taken off. It is not changed.
        lora: of the run.
        plan: resolved.

    Raises:
        ConfigError: with one line for each reason.
    """
    if lora.base == "parameters":
        return
    problems = packing_problems(model) or _problems_of_cuts(model, plan)
    if plan.precision.compute == "float8":
        found = f"{KEY} and plan.precision.compute = 'float8': packed weights are unpacked to bfloat16"
        problems.append(Problem(found, "set plan.precision.compute = 'bfloat16'"))
    if problems:
        raise ConfigError(problems)


def _problems_of_cuts(model: PreTrainedModel, plan: ParallelPlan) -> list[Problem]:
    """Return one line for each kind of projection that the plan would cut inside of a block."""
    unfused: PreTrainedModel = copy_module(model, {})
    unfuse(unfused, plan.tensor.fused)
    rules = resolve_rules(unfused, plan.tensor) if plan.mesh.tp > 1 else TensorRules()
    problems = (
        chain(
            _problems_over_tp(as_pattern(name), module, rules.styles.get(name), unfused, plan.mesh.tp),
            _problems_of_rows(as_pattern(name), module, rules.sharded_dims.get(f"{name}.weight"), plan),
        )
        for name, module in packable(unfused)
    )
    return [*dict.fromkeys(chain.from_iterable(problems))]


def _problems_over_tp(
    what: str, module: nn.Linear, style: Style | None, model: PreTrainedModel, tp: int
) -> Iterator[Problem]:
    """Yield why a packed weight cannot have the style of its projection (None: tp cuts nothing)."""
    if style is None:
        return
    row, width, asked = STYLES[style], module.in_features, f"{KEY} and plan.mesh.tp = {tp}"
    if row.own_heads or row.has_parameter_rules:
        yield Problem(f"{asked}: {what} is {style!r}, which packed weights cannot be", "set plan.mesh.tp = 1")
    elif row.shards == "inputs" and width % (BLOCK * tp):
        each = f"each process would have {width // tp} of the {width} inputs of {what}"
        advice = f"set a plan.mesh.tp that divides {width // BLOCK}, or shard over plan.mesh.dp_shard"
        yield Problem(f"{asked}: {each}, which is no multiple of {BLOCK}", advice)
    elif row.takes == "own heads":
        heads = heads_of(model.config.get_text_config())
        assert heads is not None, "the plan is not checked"
        if (width // heads.queries) % BLOCK:
            each = f"the processes share the heads of {what} unevenly, and a head has {width // heads.queries} inputs"
            fitting = math.gcd(heads.queries, width // BLOCK)
            advice = f"set a plan.mesh.tp that divides {fitting}, or shard over plan.mesh.dp_shard"
            yield Problem(f"{asked}: {each}, which is no multiple of {BLOCK}", advice)


def _problems_of_rows(what: str, module: nn.Linear, tp_dim: int | None, plan: ParallelPlan) -> Iterator[Problem]:
    """Yield why FSDP2 would not shard a packed weight by its rows."""
    degree, compute = plan.mesh.fsdp_degree, getattr(torch, plan.precision.activations)
    rows = -(-module.out_features // plan.mesh.tp) if tp_dim == 0 else module.out_features
    cut = set() if tp_dim is None else {tp_dim}
    if sharded_dim([rows, packed_width(module.in_features, compute)], degree, cut) != 0:
        where = " on each process of tp" if tp_dim == 0 else ""
        found = f"{KEY}: {what} has {rows} rows{where}, which are too few for {degree} processes"
        yield Problem(found, "set a smaller plan.mesh.dp_shard")


def apply_packing(stage: Stage, names: Collection[str], dtype: torch.dtype) -> None:
    """Let frozen projections of a stage on the meta device keep packed weights, in place.

    Args:
        stage: already cut by tensor parallelism, and without adapters.
        names: of the `packable` projections of the full model.
        dtype: number format of the computation.
    """
    modules = dict(stage.model.named_modules())
    for name in names:
        module: Any = modules.get(name)
        if module is None or not any(True for _ in module.parameters(recurse=False)):
            # It is on another stage.
            continue
        full = module.weight
        rows, width = local_tensor(full).shape
        packed = torch.empty(rows, packed_width(width, dtype), dtype=dtype, device="meta")
        layout = _laid_out_as(full, packed, packed_width(full.shape[1], dtype))
        module.weight = nn.Parameter(layout, requires_grad=False)
        if isinstance(module, OwnInputs):
            start, stop = module.inputs.start, module.inputs.stop
            module.inputs = slice(packed_width(start, dtype), packed_width(stop, dtype))
        takes_product = isinstance(module, ShardedLinear | OwnOutputs | OwnInputs)
        assert takes_product or own_class(module) is type(module) is nn.Linear, f"{name} cannot be packed"
        mix_in(module, PackedWeight if takes_product else PackedLinear)


def _laid_out_as(tensor: Tensor, local: Tensor, width: int) -> Tensor:
    """Return the local part of a tensor (rows, width) that is cut as `tensor` (rows, any) is."""
    if not isinstance(tensor, DTensor):
        return local
    shape = torch.Size([tensor.shape[0], width])
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(width, 1))


@dataclass(frozen=True)
class Packing:
    """A projection to pack, and memory for its numbers.

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
    """Return memory for the part of a projection that this process holds."""
    packed = module.weight.detach()
    local = local_tensor(packed)
    own = torch.empty(local.shape[0], unpacked_width(local), dtype=torch.float32, device=local.device)
    return Packing(name, _laid_out_as(packed, own, module.in_features), packed)


def unpacked(module: Any) -> Tensor:
    """Return the weight (out, in) of a projection; a DTensor if the packed weight is one."""
    packed = module.weight.detach()
    return _laid_out_as(packed, unpack(local_tensor(packed), packed.dtype), module.in_features)
