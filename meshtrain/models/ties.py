"""Check tied weights: single parameters with several names.

The class and the configuration declare ties, and a program may make ties of its own.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations

from torch import nn
from transformers import PreTrainedModel

from meshtrain.compat.transformers import declarable_ties
from meshtrain.errors import ModelError

Group = frozenset[str]


def check_ties(model: PreTrainedModel) -> None:
    """Check that the tied parameters of a model are exactly those that the configuration declares.

    The cut, the files and every rank use the declared ties. A weight that only the program has tied
    would be filled under one of its names, and one that it has untied would be tied again.

    Args:
        model: a stock model, on meta or with values. Its table of ties is updated from its
            configuration, which may have been changed since the model was built.

    Raises:
        ModelError: naming the first two names that disagree.
    """
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted, found = _declared_groups(declared, names), _real_groups(model)
    if apart := _pair(wanted, found):
        raise ModelError(
            f"{apart[0]} and {apart[1]} are two parameters, but the configuration ties them",
            "set model.config.tie_word_embeddings = False before, or call model.tie_weights()",
        )
    if together := _pair(found, wanted):
        raise ModelError(
            f"{together[0]} and {together[1]} are one parameter, but {_why_not(model, together)} assign each its own, "
            "such as module.weight = nn.Parameter(other.weight.detach().clone())"
        )
    model.all_tied_weights_keys = declared


def _pair(groups: Iterable[Group], others: Iterable[Group]) -> tuple[str, str] | None:
    """Return the first two names that share one of `groups`, but none of `others`."""
    pairs = (pair for group in groups for pair in combinations(sorted(group), 2))
    return min((pair for pair in pairs if not any({*pair} <= other for other in others)), default=None)


def _why_not(model: PreTrainedModel, pair: tuple[str, str]) -> str:
    declarable = declarable_ties(model)
    if {*pair} <= {*declarable, *declarable.values()}:
        return "the configuration does not tie them; set model.config.tie_word_embeddings = True before, or"
    return f"{type(model).__name__} does not declare this tie, which would be lost when the model is cut or saved;"


def _declared_groups(declared: Mapping[str, str], names: set[str]) -> set[Group]:
    groups: dict[str, set[str]] = {}
    for copy_name, source in declared.items():
        if {copy_name, source} <= names:
            groups.setdefault(source, {source}).add(copy_name)
    return _of_several(groups.values())


def _real_groups(model: nn.Module) -> set[Group]:
    """Return the groups of names that stand for one parameter, or for parameters in one memory."""
    groups: dict[object, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        has_memory = not parameter.is_meta and parameter.numel() > 0
        groups.setdefault(parameter.data_ptr() if has_memory else parameter, set()).add(name)
    return _of_several(groups.values())


def _of_several(groups: Iterable[set[str]]) -> set[Group]:
    return {frozenset(group) for group in groups if len(group) > 1}
