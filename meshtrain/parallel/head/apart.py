"""The head of a frozen model, which runs later than its base model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshtrain.compat.nn import mix_in
from meshtrain.parallel.cut.stubs import Channel
from meshtrain.parallel.head.chunks import WatchedBase, logits_without_base, states_of, with_states
from meshtrain.parallel.shard import fsdp_modules


class HeadApart:
    """The head of one model in evaluation mode, which runs when its logits are needed.

    In a pass of the model only one token goes through the head. `take` returns what the base model
    has computed, which is far smaller than all logits, and `logits` makes them of it.

    Args:
        model: the stock model, or the last stage of it. It is changed in place.
        base: name of its base model.
        channel: of the stage, which counts the calls of its parts.
        keeps_gathered: whether FSDP2 keeps the head gathered between the passes of a step.
    """

    def __init__(self, model: PreTrainedModel, base: str, channel: Channel, *, keeps_gathered: bool) -> None:
        self._model, self._channel, self._keeps_gathered = model, channel, keeps_gathered
        self._forward = type(model).forward
        self._taken: Any = None
        self._given: Any = None
        self._next_call = 0
        inner = model.get_submodule(base)
        # transformers knows by the names of module and class which outputs it records.
        mix_in(inner, WatchedBase, head=self, __module__=type(inner).__module__)

    def call_base(self, compute: Callable[[], Any]) -> Any:
        """Return what the base model returns to the class.

        Args:
            compute: calls the base model itself.
        """
        if self._given is not None:
            self._channel.position = self._next_call
            return self._given
        self._taken, self._next_call = compute(), self._channel.position
        # The class goes on with one token. Its result is not used.
        return with_states(self._taken, states_of(self._taken)[:1, :1])

    def take(self) -> Any:
        """Return the output of the base model in the latest pass, and let go of it."""
        taken, self._taken = self._taken, None
        return taken

    @torch.no_grad()
    def logits(self, taken: Any, *, is_last: bool) -> Tensor:
        """Return the logits of a pass. Collective over the processes that share the head.

        Args:
            taken: what `take` returned after it.
            is_last: whether it is the last pass of a step.

        Returns:
            (batch, seq, vocab) or this process's (batch, seq, vocab/tp).
        """
        self._given, self._channel.position = taken, 0
        # The hooks of the model are for whole passes, so FSDP2 does not gather the head by itself.
        roots = fsdp_modules(self._model)[:1]
        for root in roots:
            root.unshard()
        try:
            return logits_without_base(self._forward, self._model, states_of(taken))
        finally:
            self._given = None
            for root in roots if is_last or not self._keeps_gathered else ():
                root.reshard()
