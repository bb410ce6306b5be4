"""Description of an optimizer in a manifest, besides its tensors: class, options and groups."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from meshtrain.checkpoint.manifest import SavedGroup, SavedOptimizer
from meshtrain.errors import CheckpointError, Problem, name_some
from meshtrain.parallel.pipeline import Pipeline
from meshtrain.runtime.agreement import gather_objects
from meshtrain.training.optimizer_state import kinds_of_states, slots_of, unsupported_states

# Options of a group that are not saved: how this machine computes, and what is saved elsewhere.
NOT_KEPT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")

KINDS = {
    "number": "a number",
    "scalar": "a tensor of one element",
    "reduced": "a tensor of rows or columns",
    "blocks": "a tensor of blocks",
    "parameter": "a tensor of the parameter's shape",
}


class _RankOptimizer(NamedTuple):
    """The optimizer of one process."""

    name: str
    options: tuple[str, ...]
    """The options of each group, as JSON."""
    parameters: tuple[tuple[str, int | None, tuple[str, ...]], ...]
    """FQN, group, and the names of the states; both ends of a tied weight have one FQN."""
    kinds: set[tuple[str, str]]
    """Each state and its kind, as `kinds_of_states` names it."""


def describe_optimizer(pipeline: Pipeline, optimizer: Optimizer) -> SavedOptimizer:
    """Describe an optimizer. Collective.

    Raises:
        CheckpointError: on all processes alike: a checkpoint cannot hold a state or an option, the
            optimizer is not the model's, or the processes have different optimizers.
    """
    fqns = pipeline.canonical_names()
    problems = unsupported_states(optimizer, {id(p): fqns[name] for name, p in pipeline.named_parameters()})
    here = None
    try:
        here = _here(pipeline, optimizer)
    except CheckpointError as error:
        problems += error.problems
    for problem in (problem for answer in gather_objects(problems) for problem in answer):
        raise CheckpointError(problem)
    ranks = [one for one in gather_objects(here) if one is not None]
    _check_alike(ranks)
    return _merge(ranks)


def optimizer_problems(there: SavedOptimizer, here: SavedOptimizer) -> list[Problem]:
    """Return what prevents loading a saved optimizer into this one."""
    if there.name != here.name:
        found = f"the optimizer is {there.name} in the checkpoint and {here.name} in this program"
        return [Problem(found, "continue with the same one")]
    groups_there, groups_here = (
        {name: index for index, group in enumerate(saved.groups) for name in group.parameters}
        for saved in (there, here)
    )
    moved = [
        f"{name} ({_place(groups_there.get(name))} in the checkpoint, {_place(groups_here.get(name))} in this program)"
        for name in sorted({*groups_there, *groups_here})
        if groups_there.get(name) != groups_here.get(name)
    ]
    advice = "make the groups as they were when it was saved"
    if moved:
        what = f"{len(moved)} parameters are in other groups" if len(moved) > 1 else "1 parameter is in another group"
        return [Problem(f"{what} than in the checkpoint: {name_some(moved, 3)}", advice)]
    numbers = len(there.groups), len(here.groups)
    if numbers[0] != numbers[1]:
        found = f"the optimizer has {numbers[0]} groups in the checkpoint and {numbers[1]} in this program"
        return [Problem(found, advice)]
    return []


def restore_options(optimizer: Optimizer, saved: SavedOptimizer) -> None:
    """Set the options of an optimizer's groups to those that were saved."""
    for group, there in zip(optimizer.param_groups, saved.groups, strict=True):
        for name, value in json.loads(there.options).items():
            current = group.get(name)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(current, tuple) else value


def not_json(value: object, where: str) -> Iterator[str]:
    """Yield a message for each part of a value that would not come back from JSON unchanged."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from not_json(inner, f"{where}[{key!r}]")
            else:
                yield f"{where} has the key {key!r}, and JSON has strings only"
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from not_json(inner, f"{where}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield f"{where} is a {type(value).__name__}, which JSON does not have"
    elif value != value:
        yield f"{where} is nan, which JSON does not have"


def _here(pipeline: Pipeline, optimizer: Optimizer) -> _RankOptimizer:
    slots, fqns = slots_of(optimizer), pipeline.canonical_names()
    parameters = []
    for name, parameter in pipeline.named_parameters():
        slot = slots.get(id(parameter))
        states = () if slot is None else tuple(sorted(optimizer.state.get(slot.parameter, {})))
        parameters.append((fqns[name], None if slot is None else slot.group, states))
    return _RankOptimizer(
        type(optimizer).__name__,
        tuple(_options(index, group) for index, group in enumerate(optimizer.param_groups)),
        tuple(parameters),
        kinds_of_states(optimizer),
    )


def _options(index: int, group: Mapping[str, Any]) -> str:
    """Return the options of a group as JSON.

    Raises:
        CheckpointError: for an option that JSON cannot hold.
    """
    options = {
        name: value.item() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
        for name, value in group.items()
        if name not in NOT_KEPT
    }
    for problem in not_json(options, f"param_groups[{index}]"):
        raise CheckpointError(f"an option of the optimizer cannot be saved: {problem}")
    return json.dumps(options, sort_keys=True)


def _check_alike(ranks: list[_RankOptimizer]) -> None:
    advice = "make the same optimizer on every process, with the same groups in the same order, empty ones included"
    for rank, one in enumerate(ranks):
        for mine, first in _optimizer_differences(one, ranks[0]):
            raise CheckpointError(f"the optimizer of rank {rank} {mine}, that of rank 0 {first}", advice)
    seen: dict[str, tuple[int, tuple[int | None, tuple[str, ...]]]] = {}
    for rank, one in enumerate(ranks):
        for fqn, *entry in one.parameters:
            other, first_entry = seen.setdefault(fqn, (rank, tuple(entry)))  # type: ignore[arg-type]
            if tuple(entry) != first_entry:
                raise CheckpointError(
                    f"the optimizer of rank {other} has {fqn} {_shown(first_entry)}, that of rank {rank} "
                    f"{_shown(tuple(entry))}",  # type: ignore[arg-type]
                    f"{advice}, and both ends of a tied weight in one group",
                )


def _optimizer_differences(one: _RankOptimizer, first: _RankOptimizer) -> Iterator[tuple[str, str]]:
    """Yield how the optimizers of two ranks differ: both sides of each difference."""
    if one.name != first.name:
        yield f"is {one.name}", f"is {first.name}"
    if len(one.options) != len(first.options):
        yield f"has {len(one.options)} groups", f"has {len(first.options)}"
    for index, pair in enumerate(zip(one.options, first.options, strict=False)):
        mine, other = map(json.loads, pair)
        for name in sorted({*mine, *other}):
            if mine.get(name) != other.get(name):
                yield f"has {name} = {mine.get(name)} in group {index}", f"has {other.get(name)}"


def _merge(ranks: Iterable[_RankOptimizer]) -> SavedOptimizer:
    kinds: dict[str, str] = {}
    groups: dict[str, int] = {}
    for one in ranks:
        for state, kind in sorted(one.kinds):
            if kinds.setdefault(state, kind) != kind:
                raise CheckpointError(
                    f"{one.name} keeps {state!r} as {KINDS[kinds[state]]} of one parameter and as {KINDS[kind]} of "
                    "another",
                    "use an optimizer that keeps one kind for all parameters",
                )
        groups |= {fqn: group for fqn, group, _ in one.parameters if group is not None}
        name, options = one.name, one.options
    return SavedOptimizer(
        name=name,
        groups=tuple(
            SavedGroup(options=option, parameters=tuple(sorted(fqn for fqn, at in groups.items() if at == index)))
            for index, option in enumerate(options)
        ),
        scalars=tuple(sorted(state for state, kind in kinds.items() if kind in ("scalar", "number"))),
        numbers=tuple(sorted(state for state, kind in kinds.items() if kind == "number")),
    )


def _place(group: int | None) -> str:
    return "in none" if group is None else f"in group {group}"


def _shown(entry: tuple[int | None, tuple[str, ...]]) -> str:
    group, states = entry
    return f"{_place(group)} with {', '.join(states) or 'no state'}"
