"""Rules that are known before `derive` completes them, and those that are derived from values."""

from collections.abc import Mapping
from dataclasses import asdict

from transformers import PreTrainedModel

from meshtrain.config.plan import TensorPlan
from meshtrain.errors import ModelError
from meshtrain.models.patterns import compile_pattern
from meshtrain.parallel.tensor.dataflow import RuleTables, derive_rules
from meshtrain.parallel.tensor.memory import remembered
from meshtrain.parallel.tensor.rules import rule_names
from meshtrain.parallel.tensor.styles import STYLES

# Style name of transformers -> our style.
FROM_TRANSFORMERS = {theirs: ours for ours, row in STYLES.items() for theirs in row.transformers}


def own_rules(tensor: TensorPlan) -> RuleTables:
    """Return the rules that a plan itself has."""
    return RuleTables(tensor.styles, tensor.fused, tensor.local_attributes, tensor.local_inputs)


def _derived(model: PreTrainedModel) -> RuleTables:
    return RuleTables(**remembered("derived rules", model, None, lambda: asdict(derive_rules(model))))


def without_gathering(words: Mapping[str, str], model: PreTrainedModel) -> RuleTables | None:
    """Return rules that cut what a plan of transformers gathers again; None if there are none.

    Such a plan computes the complete attention on every process (Phi-3), although each could
    compute its own heads.

    Args:
        words: pattern -> name of a style in transformers.
        model: stock, on the meta device.
    """
    styles = [FROM_TRANSFORMERS.get(word) for word in words.values()]
    if not any(style is not None and STYLES[style].gives == "gathered" for style in styles):
        return None
    try:
        derived = _derived(model)
    except ModelError:
        # Without a tiny copy nothing is better than the plan, which is checked next.
        return None
    names = rule_names(model)
    own = [*derived.styles, *derived.fused]
    for pattern in words:
        regex = compile_pattern(pattern)
        if not all(any(compile_pattern(it).fullmatch(name) for it in own) for name in names if regex.fullmatch(name)):
            return None
    return derived


def from_values(model: PreTrainedModel, tp: int) -> RuleTables:
    """Return rules derived from what a tiny copy of the model computes.

    Raises:
        ModelError: if there is no such copy, and tp needs rules.
    """
    try:
        derived = _derived(model)
    except ModelError:
        if tp > 1:
            raise
        # Rules only name what is fused here, and without rules nothing is, on any mesh.
        return RuleTables()
    return derived
