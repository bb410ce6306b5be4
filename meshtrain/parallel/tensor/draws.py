"""Select the random stream that each part of a decoder layer draws from.

Dropout on full tensors draws from the shared stream, dropout on cut tensors from the process's own.
A block (attention, MLP) with column-wise projections works on this process's part until its one
row-wise projection sums the parts. Dropout before that projection is on cut tensors: the attention
probabilities of this process's heads. All other dropout of a layer is on full tensors, or on a part
of the sequence with sequence parallelism.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshtrain.config.plan import Style
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.randomness import Streams
from meshtrain.parallel.tensor.region import sequence_is_split
from meshtrain.parallel.tensor.rules import name_of
from meshtrain.parallel.tensor.styles import STYLES


def separate_streams(stage: Stage, styles: Mapping[str, Style], streams: Streams, *, sequence_parallel: bool) -> None:
    """Register hooks so that each part of the layers draws from its random stream in training.

    Args:
        stage: with its modules sharded.
        styles: module name -> style, of the complete model.
        streams: random streams of this process.
        sequence_parallel: whether hidden states between the blocks are split along the sequence.
    """
    stage.model.register_forward_pre_hook(lambda *_: streams.begin())
    modules = dict(stage.model.named_modules())
    if sequence_parallel:
        for layer in stage.own_layers():
            _Section(streams, is_cut=sequence_is_split).cover(layer, layer)
        for name, style in styles.items():
            if STYLES[style].kind == "full sequence" and name in modules:
                _Section(streams, is_cut=lambda: False).cover(modules[name], modules[name])
    for name, end in cut_blocks(styles, name_of(stage.model, stage.layers)):
        if name in modules:
            _Section(streams, is_cut=lambda: True).cover(modules[name], modules[end])


def cut_blocks(styles: Mapping[str, Style], layers: str) -> Iterator[tuple[str, str]]:
    """Yield the blocks that work on cut tensors, each with its row-wise projection.

    A block is a module inside a layer. A module that contains several row-wise projections is not
    such a block, because the hidden states between the projections are full.

    Args:
        styles: module name -> style.
        layers: name of the list of decoder layers.
    """
    # These outputs stay cut until a row-wise projection sums them.
    cut = [name for name, style in styles.items() if STYLES[style].gives_cut]
    inside = [name for name in styles if name.startswith(f"{layers}.")]
    ends = [name for name in inside if STYLES[styles[name]].takes_cut]
    for end in ends:
        block = end.rpartition(".")[0]
        # The name of a layer is that of the list plus its index, and a block is inside a layer.
        while block.count(".") > layers.count(".") + 1:
            prefix = f"{block}."
            if any(name.startswith(prefix) for name in cut):
                if sum(name.startswith(prefix) for name in ends) == 1:
                    yield block, end
                break
            block = block.rpartition(".")[0]


class _Section:
    """A section of the forward pass that draws from one random stream.

    It begins with a module, and ends with the same module or before a module inside.
    """

    def __init__(self, streams: Streams, *, is_cut: Callable[[], bool]) -> None:
        self.streams, self.is_cut = streams, is_cut
        self.is_open = False

    def cover(self, start: nn.Module, end: nn.Module) -> None:
        """Begin the section before the forward pass of `start`, and end it before that of `end`.

        At the latest it ends after the forward pass of `start`. This is its end if both modules are
        the same.
        """
        start.register_forward_pre_hook(self.open)
        if end is not start:
            end.register_forward_pre_hook(self.close)
        start.register_forward_hook(self.close)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def open(self, module: nn.Module, _: Any) -> None:
        # A recomputation may have ended inside the section, so the old value does not matter.
        self.is_open = module.training
        if self.is_open:
            self.streams.enter(is_cut=self.is_cut())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def close(self, *_: Any) -> None:
        if self.is_open:
            self.streams.leave()
            self.is_open = False
