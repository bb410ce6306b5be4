"""Match the module patterns of a plan, in which `*` stands for one layer number."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from meshtrain.errors import PlanError, Problem

Rule = TypeVar("Rule")


def match_modules(model: nn.Module, rules: Mapping[str, Rule], key: str) -> dict[str, Rule]:
    """Return module name -> rule for every module that a pattern matches, in the model's order.

    Args:
        model: its modules are matched.
        rules: pattern -> rule, of any type.
        key: the plan's key of these rules, for messages.

    Raises:
        PlanError: for each pattern that matches no module, and each module that several patterns
            match.
    """
    names = [name for name, _ in model.named_modules() if name]
    return match_names(names, rules, key)


def match_names(names: Iterable[str], rules: Mapping[str, Rule], key: str) -> dict[str, Rule]:
    """Return name -> rule as `match_modules` does, for a list of names."""
    names = list(names)
    compiled = {pattern: compile_pattern(pattern) for pattern in rules}
    matches = {name: [pattern for pattern, regex in compiled.items() if regex.fullmatch(name)] for name in names}
    problems = [
        Problem(f"{key}: {name} is matched by two rules, {found[0]!r} and {found[1]!r}", "remove one")
        for name, found in matches.items()
        if len(found) > 1
    ]
    used = {pattern for found in matches.values() for pattern in found}
    problems += [
        Problem(f"{key}: {pattern!r} matches no module of the model{nearest(pattern, names)}")
        for pattern in rules
        if pattern not in used
    ]
    if problems:
        raise PlanError(problems)
    return {name: rules[found[0]] for name, found in matches.items() if found}


def as_pattern(name: str) -> str:
    """Return the pattern of a module name, in which every number is replaced by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression that matches the names of a pattern."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def nearest(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a message: which pattern of the names is nearest to one, if any is."""
    near = difflib.get_close_matches(pattern, sorted({as_pattern(name) for name in names}), n=1, cutoff=0.5)
    return f"; the nearest is {near[0]!r}" if near else ""
