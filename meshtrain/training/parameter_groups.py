"""The parameters of an optimizer in groups: those that a run names, and the rest."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from meshtrain.config.optimizer import GroupConfig, OptimizerConfig
from meshtrain.errors import Problem
from meshtrain.models.patterns import compile_pattern, nearest
from meshtrain.training.muon import IS_MATRIX

FACTOR = "learning_rate_factor"
"""The option of a group that says how high its learning rate is, relative to that of the run."""


# A group of a run, and the sort of its parameters.
_Sort = tuple[int | None, Literal["by muon", "matrices", "others"]]


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, by_muon: Collection[Tensor] = ()
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: two or three for the rest and for each group of a run.

    The first one has the matrices, which weight decay applies to, and the second one has norms and
    biases. With Muon there is one before them, of the matrices that it updates. Each process has
    all groups, also those of which it has no parameter. Frozen groups are left out.

    Args:
        parameters: stock FQN and local part of each. The parts of a fused one have one FQN.
        config: of the run.
        by_muon: those that Muon updates, if it is the optimizer.
    """
    has_muon = config.name == "muon"
    sorts: dict[_Sort, list[nn.Parameter]] = {}
    trained = [number for number, group in enumerate(config.groups) if not group.frozen]
    for number in (None, *trained):
        sorts |= {(number, "by muon"): []} if has_muon else {}
        sorts |= {(number, "matrices"): [], (number, "others"): []}
    for name, parameter in parameters:
        number = group_of(name, config.groups)
        if has_muon and parameter in by_muon:
            sorts[number, "by muon"].append(parameter)
        else:
            sorts[number, "matrices" if parameter.dim() >= 2 else "others"].append(parameter)
    return [{"params": members, **_options(sort, config)} for sort, members in sorts.items()]


def _options(sort: _Sort, config: OptimizerConfig) -> dict[str, Any]:
    number, kind = sort
    group = None if number is None else config.groups[number]
    decay, rate = config.weight_decay if kind != "others" else 0.0, config.learning_rate
    if kind != "by muon" and config.adamw_learning_rate is not None:
        rate = config.adamw_learning_rate
    if group is not None and group.weight_decay is not None:
        decay = group.weight_decay
    if group is not None and group.learning_rate is not None:
        rate = group.learning_rate
    options: dict[str, Any] = {"weight_decay": decay, FACTOR: rate / config.learning_rate}
    return options | {IS_MATRIX: kind == "by muon"} if config.name == "muon" else options


def group_of(name: str, groups: Sequence[GroupConfig]) -> int | None:
    """Return the number of the first group that names a parameter; None if none does."""
    for number, group in enumerate(groups):
        if any(_names(pattern, name) for pattern in group.parameters):
            return number
    return None


def freeze(model: PreTrainedModel, config: OptimizerConfig) -> None:
    """Freeze the parameters of frozen groups, in place. A tied weight has the name of the original.

    Args:
        model: a stock model, on the meta device.
        config: of the run.
    """
    if not any(group.frozen for group in config.groups):
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = group_of(model.all_tied_weights_keys.get(name, name), config.groups)
        if number is not None and config.groups[number].frozen:
            parameter.requires_grad = False


def _names(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter, or a module around it."""
    regex = compile_pattern(pattern)
    return any(map(regex.fullmatch, _with_modules(name)))


def _with_modules(name: str) -> Iterator[str]:
    yield from accumulate(name.split("."), lambda outer, inner: f"{outer}.{inner}")


def group_problems(config: OptimizerConfig, names: Collection[str], ties: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each pattern that matches nothing, or for each group that gets nothing.

    Args:
        config: of the run.
        names: of the parameters of the model.
        ties: name of a tied weight -> the one of these that it is.
    """
    known = list(dict.fromkeys(it for name in names for it in _with_modules(name)))
    patterns = [pattern for group in config.groups for pattern in group.parameters]
    unmatched = [it for it in patterns if not any(_names(it, name) for name in names)]
    if unmatched:
        return [_unmatched(pattern, known, ties) for pattern in unmatched]
    used = {group_of(name, config.groups) for name in names}
    if all(number is not None and config.groups[number].frozen for number in used):
        return [Problem("optimizer.groups: every parameter is frozen, so there is nothing to train", "leave one out")]
    return [
        Problem(
            f"optimizer.groups: groups before it have all parameters of {group.parameters}",
            "put it first, or leave it out",
        )
        for number, group in enumerate(config.groups)
        if number not in used
    ]


def _unmatched(pattern: str, known: Collection[str], ties: Mapping[str, str]) -> Problem:
    tied = next((name for name in ties if _names(pattern, name)), None)
    if tied is not None:
        return Problem(f"optimizer.groups: {pattern!r}: {tied} is tied to {ties[tied]}", "name that one")
    return Problem(f"optimizer.groups: {pattern!r} matches no parameter of the model{nearest(pattern, known)}")
