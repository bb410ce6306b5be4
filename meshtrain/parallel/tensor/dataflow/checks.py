"""Find out what rules over several processes would compute, and which projections have heads."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from transformers import PreTrainedModel

from meshtrain.compat.casts import float32_casts_lifted
from meshtrain.models.fused import Parts, unfuse
from meshtrain.models.patterns import as_pattern
from meshtrain.models.tiny import HEAD_SIZE
from meshtrain.parallel.tensor.dataflow.blocks import find_cuts
from meshtrain.parallel.tensor.dataflow.head_labels import HeadLabel, labels_of
from meshtrain.parallel.tensor.dataflow.parts import WAYS, where_parts_differ
from meshtrain.parallel.tensor.dataflow.reach import reach_of, record, returned_directly
from meshtrain.parallel.tensor.head_share import heads_of
from meshtrain.parallel.tensor.rules import TensorRules
from meshtrain.parallel.tiny_model import copies_must_run, inputs_of, on_meta, tiny_model

MANY_HEADS = 12


def head_labels(model: PreTrainedModel) -> dict[str, tuple[HeadLabel, ...]]:
    """Return pattern of a projection -> what its outputs are in attention, part by part.

    Args:
        model: stock, on the meta device; it is not changed.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
    """
    of_model = heads_of(model.config)
    if of_model is None:
        return {}
    # As many heads as features in a head would not be told apart.
    few = of_model.queries <= MANY_HEADS and of_model.queries != HEAD_SIZE
    tiny = tiny_model(model, 1, heads=of_model.queries if few else MANY_HEADS, keys=of_model.keys if few else None)
    heads = heads_of(tiny.config)
    assert heads is not None, "a copy has heads as the model has"
    with float32_casts_lifted(), copies_must_run(tiny):
        recording = record(tiny, inputs_of(tiny))
        reached = {name: reach_of(recording, name) for name in recording.calls}
        cuts = [*find_cuts(reached, returned_directly(recording), ways=1)]
    found: dict[str, set[tuple[HeadLabel, ...]]] = defaultdict(set)
    for cut in cuts:
        for name, labels in labels_of(cut, reached, heads).items():
            found[as_pattern(name)].add(labels)
    return {pattern: next(iter(labels)) for pattern, labels in found.items() if len(labels) == 1}


def where_shares_differ(
    model: PreTrainedModel,
    tp: int,
    fused: Mapping[str, Parts],
    rules_of: Callable[[PreTrainedModel], TensorRules],
) -> str | None:
    """Do `where_rules_fail` with as many heads as the model has, and as many processes."""
    heads = heads_of(model.config)
    assert heads is not None, "the layers differ in their numbers of heads"
    tiny = tiny_model(model, 1, heads=heads.queries, keys=heads.keys)
    return _where_rules_fail(tiny, tp, fused, rules_of)


def where_rules_fail(
    model: PreTrainedModel,
    tp: int,
    fused: Mapping[str, Parts],
    rules_of: Callable[[PreTrainedModel], TensorRules],
) -> str | None:
    """Return the module of a tiny copy that rules from elsewhere would compute wrongly.

    Args:
        model: stock, on the meta device; it is not changed.
        tp: number of processes that will share a layer.
        fused: pattern -> parts, of the rules.
        rules_of: unfused copy on the meta device -> its rules over two processes.

    Returns:
        None if two processes compute what one computes.

    Raises:
        ModelError: if there is no tiny copy with all kinds of its layers.
        PlanError: if the rules cannot be followed.
    """
    return _where_rules_fail(tiny_model(model, tp), WAYS, fused, rules_of)


def _where_rules_fail(
    tiny: PreTrainedModel,
    tp: int,
    fused: Mapping[str, Parts],
    rules_of: Callable[[PreTrainedModel], TensorRules],
) -> str | None:
    meta = on_meta(type(tiny), tiny.config)
    for copied in (tiny, meta):
        unfuse(copied, fused)
    rules = rules_of(meta)
    with float32_casts_lifted(), copies_must_run(tiny):
        return where_parts_differ(tiny, inputs_of(tiny), rules, tp)
