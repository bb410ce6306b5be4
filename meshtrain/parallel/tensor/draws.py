"""Which random stream a part of a decoder layer draws from: the shared one for what is whole, its own for what is cut.

A block (attention, an MLP) whose column-wise projections leave each process its part works on that part until its one
row-wise projection sums the parts. What it drops before that is cut: attention probabilities of this process's heads.
All else that a layer drops is whole, or with sequence parallelism a part of the sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from meshtrain.config.plan import Style
from meshtrain.parallel.cut.stage import Stage
from meshtrain.parallel.randomness import Streams
from meshtrain.parallel.tensor.region import stream_in_parts
from meshtrain.parallel.tensor.rules import name_of

# Styles whose outputs stay cut, until a row-wise projection sums them.
CUT_OUTPUTS = ("colwise", "colwise_blocks", "replicated_heads")


def separate_streams(stage: Stage, styles: Mapping[str, Style], streams: Streams, *, sequence_parallel: bool) -> None:
    """Let every part of the layers of a stage draw from the right stream in training.

    Args:
        stage: with its modules sharded.
        styles: module name -> style, of the whole model.
        streams: of this process.
        sequence_parallel: whether the stream between the blocks lies in parts of the sequence.
    """
    stage.model.register_forward_pre_hook(lambda *_: streams.begin())
    modules = dict(stage.model.named_modules())
    if sequence_parallel:
        for layer in stage.own_layers():
            _Section(streams, is_cut=stream_in_parts).cover(layer, layer)
        for name, style in styles.items():
            if style == "whole_sequence" and name in modules:
                _Section(streams, is_cut=lambda: False).cover(modules[name], modules[name])
    for name, end in cut_blocks(styles, name_of(stage.model, stage.layers)):
        if name in modules:
            _Section(streams, is_cut=lambda: True).cover(modules[name], modules[end])


def cut_blocks(styles: Mapping[str, Style], layers: str) -> Iterator[tuple[str, str]]:
    """Yield the blocks whose inside is cut, each with its row-wise projection.

    A block lies inside a layer. Where several row-wise projections end what begins in a block, it is none: between them
    the stream is whole.
    """
    cut = [name for name, style in styles.items() if style in CUT_OUTPUTS]
    ends = [name for name, style in styles.items() if style == "rowwise" and name.startswith(f"{layers}.")]
    for end in ends:
        block = end.rpartition(".")[0]
        # A layer is called by its number in the list.
        while block.count(".") > layers.count(".") + 1:
            prefix = f"{block}."
            if any(name.startswith(prefix) for name in cut):
                if sum(name.startswith(prefix) for name in ends) == 1:
                    yield block, end
                break
            block = block.rpartition(".")[0]


class _Section:
    """What draws from one stream: from the start of a module to its end, or to the start of a module inside."""

    def __init__(self, streams: Streams, *, is_cut: Callable[[], bool]) -> None:
        self.streams, self.is_cut = streams, is_cut
        self.is_open = False

    def cover(self, start: nn.Module, end: nn.Module) -> None:
        """Begin with the forward pass of `start`; end before that of `end`, and with that of `start` at the latest."""
        start.register_forward_pre_hook(self.open)
        if end is not start:
            end.register_forward_pre_hook(self.close)
        start.register_forward_hook(self.close)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def open(self, module: nn.Module, _: Any) -> None:
        # A recomputation may have ended inside, so what was open then is not looked at.
        self.is_open = module.training
        if self.is_open:
            self.streams.enter(is_cut=self.is_cut())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def close(self, *_: Any) -> None:
        if self.is_open:
            self.streams.leave()
            self.is_open = False
