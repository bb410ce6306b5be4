"""Give the traces of a cut model the shapes of one process of tp.

Most tensors that cross borders are full on every process. Keys and values that later layers read
are not: they have the heads of the process.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshtrain.compat.autograd import tensors_in
from meshtrain.compat.nn import set_forward
from meshtrain.parallel.cut.borders import Place, StageRoutes
from meshtrain.parallel.cut.probe import Structure
from meshtrain.parallel.tensor.head_share import heads_of, uneven_heads
from meshtrain.parallel.tensor.heads import apply_local_heads, local_widths, take_own_parameters
from meshtrain.parallel.tensor.modules import see_own_heads
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tensor.styles import STYLES


def may_cut_borders(structure: Structure, routes: Sequence[StageRoutes]) -> bool:
    """Return whether stages send something that tensor parallelism may cut."""
    places = [value.captured_at for route in routes for value in route.received]
    places += [place for route in routes for place in route.sent if isinstance(place, Place)]
    return any(place.follows_sequence(structure.trace) is None for place in places)


def localize(structure: Structure, rules: TensorRules, rank: int, tp: int) -> None:
    """Let the further traces of a structure have the shapes of one process, in place.

    Args:
        structure: of an unfused model.
        rules: of the model.
        rank: of the process, among the `tp` that share a layer.
        tp: number of these processes.
    """
    model = structure.model
    heads, modules = heads_of(model.config), dict(model.named_modules())
    for name, style in rules.styles.items():
        row, module = STYLES[style], modules[name]
        if row.kind == "projection":
            _, outputs = local_widths(module, row, heads, rank, tp)
            set_forward(module, partial(_project, outputs))
        elif row.kind == "experts":
            set_forward(module, _pass_on)
        elif row.has_parameter_rules:
            take_own_parameters(name, module, rules.sharded_dims, rank, tp)
        elif row.own_heads:
            see_own_heads(module, rank, tp, uneven_heads(model.config, tp))
    apply_local_heads(model, rules, rank=rank, tp=tp)


def _project(outputs: int, x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _pass_on(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(tensors_in((args, kwargs))[0])
