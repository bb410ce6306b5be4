"""Choose the styles of attention where tp does not divide the heads."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from transformers import PreTrainedModel

from meshtrain.config.plan import ParallelPlan, Style
from meshtrain.models.fused import Parts
from meshtrain.models.patterns import as_pattern
from meshtrain.parallel.tensor.dataflow.checks import head_labels
from meshtrain.parallel.tensor.dataflow.head_labels import HeadLabel
from meshtrain.parallel.tensor.head_share import Heads, uneven_heads
from meshtrain.parallel.tensor.styles import STYLES

HeadLabels = Mapping[str, tuple[HeadLabel, ...]]
"""Pattern of a projection -> what its outputs are in attention, part by part."""


def labels_once(model: PreTrainedModel) -> Callable[[], HeadLabels]:
    """Return a function that finds the labels of a stock model at its first call."""
    return functools.cache(functools.partial(head_labels, model))


def with_shared_heads(plan: ParallelPlan, model: PreTrainedModel) -> ParallelPlan:
    """Return a plan with written rules, and full projections where tp does not divide the heads.

    Args:
        plan: with rules.
        model: the stock model on the meta device; it is not changed.
    """
    tensor = plan.tensor
    styles = styles_of_shared_heads(tensor.styles, tensor.fused, model, plan.mesh.tp, labels_once(model))
    return plan.model_copy(update={"tensor": tensor.model_copy(update={"styles": styles})})


def styles_of_shared_heads(
    styles: Mapping[str, Style],
    fused: Mapping[str, Parts],
    model: PreTrainedModel,
    tp: int,
    labels: Callable[[], HeadLabels],
) -> dict[str, Style]:
    """Return styles by name or pattern, changed where tp does not divide the heads.

    Args:
        styles: name or pattern -> style.
        fused: pattern -> parts.
        model: for its configuration.
        tp: number of processes that share the heads.
        labels: returns what the projections of attention give and take.
    """
    heads = uneven_heads(model.config, tp)
    if heads is None:
        return dict(styles)
    changed = {name: _style_of(label, styles[name], heads, tp) for name, label in _labelled(styles, fused, labels())}
    return {**styles, **changed}


def divides_uneven_heads(plan: ParallelPlan, model: PreTrainedModel) -> bool:
    """Return whether processes would have equal parts of heads that tp does not divide.

    It is assumed if nothing tells which projections give and take heads.

    Args:
        plan: with rules.
        model: the stock model on the meta device; it is not changed.
    """
    heads, tp, tensor = uneven_heads(model.config, plan.mesh.tp), plan.mesh.tp, plan.tensor
    if heads is None:
        return False
    labels = head_labels(model)
    labelled = [*_labelled(tensor.styles, tensor.fused, labels)]
    counts = {"queries": heads.queries, "keys": heads.keys, "taken": heads.queries}
    rows = [(STYLES[tensor.styles[name]], counts[label]) for name, label in labelled if label in counts]
    is_cut = any(count % tp and "part" in (row.gives, row.takes) for row, count in rows)
    too_few = heads.queries < tp and any(row.gives_cut for row, _ in rows)
    # One key-value head is not cut, so it is enough that tp divides the query heads.
    is_unknown = not labels and (heads.queries % tp != 0 or heads.keys > 1)
    return is_cut or too_few or is_unknown


def _labelled(styles: Iterable[str], fused: Mapping[str, Parts], labels: HeadLabels) -> Iterator[tuple[str, HeadLabel]]:
    """Yield the names or patterns of projections in attention, or of their parts, and the label."""
    parts = {f"{pattern}.{part}": (pattern, index) for pattern, of in fused.items() for index, part in enumerate(of)}
    for name in styles:
        owner, index = parts.get(as_pattern(name), (as_pattern(name), 0))
        found = labels.get(owner, ())
        if len(found) > index:
            yield name, found[index]


def _style_of(label: HeadLabel, style: Style, heads: Heads, tp: int) -> Style:
    if label == "keys" and heads.keys % tp and style == "colwise":
        return "replicated_heads"
    if label == "queries" and heads.queries % tp and style == "colwise":
        return "colwise_heads"
    if label == "taken" and heads.queries % tp and style == "rowwise":
        return "rowwise_heads"
    return style
