"""Random streams without state: every draw is a function of (seed, step, microbatch, stage, data rank).

A resumed run draws what the uninterrupted one draws, with nothing saved. The processes of a tp group share one stream.
What is whole on all of them is dropped by the shared stream, so it stays the same on all. What is cut (attention heads,
parts of the sequence) is dropped by a stream of each process, which is derived from the shared one. Seeding by rank
would make replicated weights drift apart, silently.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def stream_key(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on all parts."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ForwardStreams:
    """Seeds torch's generators at the start of every forward pass of a stage.

    Args:
        seed: of the run.
        data_rank: which part of the global batch this process reads.
    """

    def __init__(self, seed: int, data_rank: int) -> None:
        self.seed, self.data_rank = seed, data_rank
        self.step = 0
        self.microbatches: dict[int, int] = {}

    def begin_step(self, step: int) -> None:
        """Forget the microbatches of the step before."""
        self.step = step
        self.microbatches.clear()

    def watch(self, model: nn.Module, stage: int) -> None:
        """Seed before each training forward of `model`; schedules run the microbatches of a stage in order."""

        def seed_forward(module: nn.Module, _: Any) -> None:
            if module.training:
                microbatch = self.microbatches.get(stage, 0)
                self.microbatches[stage] = microbatch + 1
                torch.manual_seed(stream_key(self.seed, self.step, microbatch, stage, self.data_rank))

        model.register_forward_pre_hook(seed_forward)


class Streams:
    """The two random streams of a process under tensor parallelism: the shared one, and its own.

    torch's generators hold one of them, and the state of the other is kept here. A recomputation must replay both:
    checkpointing restores what the generators held, and `replayed` the rest.

    Args:
        coordinate: of the process in its tp group.
    """

    def __init__(self, coordinate: int) -> None:
        self._coordinate = coordinate
        self._is_own = False
        self._shared = _States(torch.empty(0), None)
        self._outer: list[_States | None] = []

    def begin(self) -> None:
        """Take what torch's generators hold for the shared stream, as it is at the start of a model.

        A recomputation may have ended in the middle of a layer, and left the other.
        """
        self._is_own = False
        self._outer.clear()

    def replayed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes `forward` with the streams of now, whenever it is called."""
        is_own, shared, outer = self._is_own, self._shared, [*self._outer]

        def replay(*args: Any, **kwargs: Any) -> Any:
            self._is_own, self._shared, self._outer = is_own, shared, [*outer]
            return forward(*args, **kwargs)

        return replay

    def enter(self, *, is_cut: bool) -> None:
        """Draw for what is cut (from the own stream), or for what is whole (from the shared one), until `leave`."""
        if is_cut == self._is_own:
            self._outer.append(None)
            return
        self._outer.append(_get_states())
        self._is_own = is_cut
        if is_cut:
            # All processes draw the key, so the shared stream moves on equally.
            key = int(torch.randint(2**62, ()))
            self._shared = _get_states()
            torch.manual_seed(stream_key(key, self._coordinate))
        else:
            _set_states(self._shared)

    def leave(self) -> None:
        """Go back to the stream before the last `enter`."""
        before = self._outer.pop()
        if before is None:
            return
        if self._is_own:
            # What was whole inside has moved the shared stream on.
            before = self._shared
        else:
            self._shared = _get_states()
        self._is_own = not self._is_own
        _set_states(before)

    @contextmanager
    def of(self, *, is_cut: bool) -> Iterator[None]:
        """Draw for what is cut, or for what is whole, inside the block."""
        self.enter(is_cut=is_cut)
        try:
            yield
        finally:
            self.leave()


class _States(NamedTuple):
    cpu: Tensor
    cuda: Tensor | None


def _get_states() -> _States:
    return _States(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)


def _set_states(states: _States) -> None:
    torch.set_rng_state(states.cpu)
    if states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda)


def has_dropout(model: PreTrainedModel) -> bool:
    """Return whether anything random happens in training, as far as configuration and modules say."""
    values = _with_nested(model.config.get_text_config().to_dict())
    # Routers add noise to what they see ("jitter").
    names = [name for name, value in values if isinstance(value, float) and value > 0]
    return any("drop" in name or "jitter" in name for name in names) or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )


def _with_nested(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a table and of the tables in it: MPT keeps its attention dropout one deeper."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _with_nested({str(key): inner for key, inner in value.items()})
        else:
            yield str(name), value
