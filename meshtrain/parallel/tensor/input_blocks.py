"""Choose the blocks of a layer that share an input, or get the full sequence.

Blocks that work on the parts of one process alone share the collective of their input.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

from torch import nn

from meshtrain.config.plan import Style
from meshtrain.parallel.tensor.behavior import works_on_positions
from meshtrain.parallel.tensor.requirements import is_projection
from meshtrain.parallel.tensor.rules import blocks_of, is_for_part, is_module
from meshtrain.parallel.tensor.styles import STYLES

LOCAL: Style = "local_params"
SUMMED: Style = "replicated_with_grad_allreduce"


def alone_on_parts(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[str]:
    """Yield projections whose outputs all shards use, and whose input no block makes full once."""
    for name, style in styles.items():
        blocks = chain(blocks_of(name, styles, "shared input"), blocks_of(name, styles, "experts"))
        alone = style == SUMMED and not any(blocks)
        if alone and is_module(model, name) and is_projection(model.get_submodule(name)):
            yield name


def blocks_inside(name: str, module: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, Style]]:
    """Yield the style of a part of a layer, and of the blocks inside it that share an input."""
    found = _block(name, module, styles)
    if found.get(name) == "whole_sequence" and name not in styles:
        apart = _apart(name, module, styles)
        found = found if apart is None else apart
    yield from found.items()
    if found.get(name) == "whole_sequence" and styles.get(name) in (None, LOCAL):
        for child, inside in module.named_children():
            for below, style in blocks_inside(f"{name}.{child}", inside, styles):
                if style == "shared_input":
                    yield below, style


def _apart(name: str, module: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style] | None:
    """Return the styles of the parts of a block that combines them on a part of the sequence.

    BERT's output, for example, has a row-wise projection, and a norm on the sum of its result and
    the hidden states.

    Returns:
        None if a part needs the full sequence.
    """
    if any(True for _ in module.parameters(recurse=False)):
        return None
    found: dict[str, Style] = {}
    for child, inside in module.named_children():
        below, is_ruled = f"{name}.{child}", f"{name}.{child}" in styles
        if not any(True for _ in inside.parameters()) or (is_ruled and STYLES[styles[below]].takes_cut):
            continue
        # A block with full projections may compute anything between them, such as attention.
        of_child = {} if is_projection(inside) else _block(below, inside, styles)
        if of_child.get(below) not in ("sequence_parallel", "shared_input"):
            apart = None if is_ruled else _apart(below, inside, styles)
            if apart is None:
                return None
            of_child = apart
        found |= of_child
    return found


def _block(name: str, module: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style of a part of a layer, by name: a norm, a projection, or a block of these."""
    style = styles.get(name)
    if not any(True for _ in module.parameters()) or style not in (None, "replicate", LOCAL):
        return {}
    if style == "replicate":
        # A norm or a projection works on each position alone, so a part of the sequence suffices.
        if not any(True for _ in module.children()):
            alone = is_projection(module) or works_on_positions(module)
            return {name: "sequence_parallel"} if alone else {}
        return {name: "whole_sequence"}
    own = [f"{name}.{kind}" for kind, _ in module.named_parameters(recurse=False)]
    inside = [STYLES[it] for below, it in styles.items() if below.startswith(f"{name}.") and below not in own]
    works_on_parts = all(row.works_on_part for row in inside) and all(is_for_part(styles.get(it)) for it in own)
    if works_on_parts and any(row.shards == "outputs" for row in inside):
        return {name: "shared_input"}
    return {name: "whole_sequence"}
