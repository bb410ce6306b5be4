"""Which linear layers of a model compute in float8, and why others do not."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meshtrain.compat.nn import own_class, own_forward
from meshtrain.compat.transformers import router_recorder
from meshtrain.config.plan import ParallelPlan
from meshtrain.errors import Problem
from meshtrain.models.fused import unfuse
from meshtrain.models.patterns import as_pattern, compile_pattern, nearest
from meshtrain.parallel.cut.probe import find_layers
from meshtrain.parallel.experts.stacks import expert_stacks
from meshtrain.parallel.float8.product import RECIPES
from meshtrain.parallel.routers.formulas import find_routers
from meshtrain.parallel.tensor.modules import width_of
from meshtrain.parallel.tensor.rules import TensorRules, resolve_rules
from meshtrain.parallel.tensor.styles import STYLES

KEY = "precision.float8.skip"
SKIPPED = "skipped"
# What projections with full weights compute on a process, if these are not all outputs.
_HEADS = ("own heads", "own keys")
# Words in the names of routers. Not every class says which of its modules route tokens.
_ROUTER_WORDS = ("router", "gate")


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers in the decoder layers of a model.

    Attributes:
        chosen: names of those that compute in float8.
        others: name -> why the layer computes in bfloat16.
        unused: patterns of `skip` that match no module, each as a problem.
    """

    chosen: tuple[str, ...]
    others: Mapping[str, str]
    unused: tuple[Problem, ...]

    def reasons(self) -> dict[str, list[str]]:
        """Return why layers compute in bfloat16 -> patterns of the names of these layers."""
        found: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            patterns = found.setdefault(reason, [])
            if (pattern := as_pattern(name)) not in patterns:
                patterns.append(pattern)
        return found


def float8_layers_of(model: PreTrainedModel, plan: ParallelPlan) -> Float8Layers:
    """Return which linear layers of a stock model compute in float8.

    Args:
        model: on the meta device. It is not changed.
        plan: with the degrees of its mesh and its tensor rules.

    Raises:
        PlanError: for tensor rules that do not fit the model.
    """
    unfused = copy.deepcopy(model)
    unfuse(unfused, plan.tensor.fused)
    rules = resolve_rules(unfused, plan.tensor) if plan.mesh.tp > 1 else TensorRules()
    return find_float8_layers(unfused, plan, rules)


def find_float8_layers(model: PreTrainedModel, plan: ParallelPlan, rules: TensorRules) -> Float8Layers:
    """Return which linear layers of an unfused model compute in float8.

    Args:
        model: not cut yet.
        plan: with the degrees of its mesh.
        rules: of the model, if tp > 1.
    """
    patterns = skip_patterns(model, plan)
    skipped = _skipped(model, patterns)
    routers = {*_routers(model)}
    multiple = RECIPES[plan.precision.float8.recipe].multiple
    chosen, others = [], {}
    for name, layer in _linear_layers(model):
        if _is_inside(name, skipped):
            others[name] = SKIPPED
        elif _is_inside(name, routers):
            others[name] = "routes tokens"
        elif (reason := _misfit(name, layer, rules, plan.mesh.tp, multiple)) is not None:
            others[name] = reason
        else:
            chosen.append(name)
    return Float8Layers(tuple(chosen), others, tuple(_unused(model, patterns)))


def skip_patterns(model: PreTrainedModel, plan: ParallelPlan) -> list[str]:
    """Return the patterns of a plan; without any, those of the first and the last decoder layer."""
    if plan.precision.float8.skip is not None:
        return plan.precision.float8.skip
    name, layers = find_layers(model)
    return [f"{name}.{index}" for index in sorted({0, len(layers) - 1})]


def _unused(model: nn.Module, patterns: Sequence[str]) -> Iterator[Problem]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(map(compile_pattern(pattern).fullmatch, names)):
            yield Problem(f"{KEY}: {pattern!r} matches no module of the model{nearest(pattern, names)}")


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each linear layer in the decoder layers with its stock forward."""
    inside = f"{find_layers(model)[0]}."
    for name, module in model.named_modules():
        is_stock = own_class(module) in (nn.Linear, Conv1D) and own_forward(module) is None
        if is_stock and name.startswith(inside):
            yield name, module


def _skipped(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    compiled = [compile_pattern(pattern) for pattern in patterns]
    return [name for name, _ in model.named_modules() if any(regex.fullmatch(name) for regex in compiled)]


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    return any(name == it or name.startswith(f"{it}.") for it in outer)


def _routers(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of routers: those that the class records, and those beside its experts."""
    recorder = router_recorder(model)
    if recorder is not None:
        yield from (name for name, _ in find_routers(model, recorder))
    for stack in expert_stacks(model):
        block = stack.rpartition(".")[0]
        beside = (kind for kind, _ in model.get_submodule(block).named_children())
        yield from (f"{block}.{kind}" for kind in beside if any(word in kind for word in _ROUTER_WORDS))


def _misfit(name: str, layer: nn.Module, rules: TensorRules, tp: int, multiple: int) -> str | None:
    """Return why the kernels cannot multiply with the weight that a process has, or None."""
    style = rules.styles.get(name)
    row = None if style is None else STYLES[style]
    if row is not None and (row.gives in _HEADS or row.takes in _HEADS):
        return "computes with the heads of a process"
    sharded = None if row is None else row.shards
    for side in ("inputs", "outputs"):
        width, ways = width_of(layer, side), tp if sharded == side else 1
        if width % (multiple * ways):
            where = f" over tp = {ways}" if ways > 1 else ""
            return f"{width}{where} {side}, not a multiple of {multiple}"
    return None
