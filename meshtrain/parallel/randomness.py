"""Random streams without state: a draw depends on (seed, step, microbatch, stage, data rank) only.

A resumed run draws the same numbers as an uninterrupted one, although no state is saved. The
processes of a tp group share one stream. Dropout uses the shared stream for tensors that all of
them hold in full, so these stay equal. For tensors that are cut (attention heads, parts of the
sequence), each process uses its own stream, which is derived from the shared one. Seeds by rank
would make replicated weights drift apart without an error.
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
    """Seeds for torch's generators, set at the start of every forward pass of a stage.

    Args:
        seed: of the run.
        data_rank: the part of the global batch that this process reads.
    """

    def __init__(self, seed: int, data_rank: int) -> None:
        self.seed, self.data_rank = seed, data_rank
        self.step = 0
        self.microbatches: dict[int, int] = {}

    def begin_step(self, step: int) -> None:
        """Set the step, and forget the microbatches of the previous one."""
        self.step = step
        self.microbatches.clear()

    def watch(self, model: nn.Module, stage: int) -> None:
        """Seed the generators before each forward pass of `model` in training mode.

        Passes are counted, because schedules run the microbatches of a stage in order.
        """

        def seed_forward(module: nn.Module, _: Any) -> None:
            if module.training:
                microbatch = self.microbatches.get(stage, 0)
                self.microbatches[stage] = microbatch + 1
                torch.manual_seed(stream_key(self.seed, self.step, microbatch, stage, self.data_rank))

        model.register_forward_pre_hook(seed_forward)


class Streams:
    """The two random streams of a process under tensor parallelism: the shared one and its own.

    torch's generators hold one of them, and this class holds the state of the other. A
    recomputation must replay both: checkpointing restores the state of the generators, and
    `replayed` restores the rest.

    Args:
        coordinate: of the process in its tp group.
    """

    def __init__(self, coordinate: int) -> None:
        self._coordinate = coordinate
        self._is_own = False
        self._shared = RandomStates(torch.empty(0), None)
        self._outer: list[RandomStates | None] = []

    def begin(self) -> None:
        """Treat the state of torch's generators as the shared stream, at the start of a model.

        The reason is that a recomputation may have ended in the middle of a layer, with the
        process's own stream active.
        """
        self._is_own = False
        self._outer.clear()

    def replayed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `forward` with the streams as they are at this moment."""
        is_own, shared, outer = self._is_own, self._shared, [*self._outer]

        def replay(*args: Any, **kwargs: Any) -> Any:
            self._is_own, self._shared, self._outer = is_own, shared, [*outer]
            return forward(*args, **kwargs)

        return replay

    def enter(self, *, is_cut: bool) -> None:
        """Choose the stream to draw from until `leave` is called.

        Args:
            is_cut: whether the values are cut over tp, and so drawn from the process's own stream.
                Full ones are drawn from the shared stream.
        """
        if is_cut == self._is_own:
            self._outer.append(None)
            return
        self._outer.append(get_random_states())
        self._is_own = is_cut
        if is_cut:
            # All processes draw the key, so the shared stream advances equally on all of them.
            key = int(torch.randint(2**62, ()))
            self._shared = get_random_states()
            torch.manual_seed(stream_key(key, self._coordinate))
        else:
            set_random_states(self._shared)

    def leave(self) -> None:
        """Return to the stream that was active before the last `enter`."""
        before = self._outer.pop()
        if before is None:
            return
        if self._is_own:
            # Draws for full values inside this section have advanced the shared stream.
            before = self._shared
        else:
            self._shared = get_random_states()
        self._is_own = not self._is_own
        set_random_states(before)

    @contextmanager
    def of(self, *, is_cut: bool) -> Iterator[None]:
        """Draw for values that are cut, or for full ones, inside the block."""
        self.enter(is_cut=is_cut)
        try:
            yield
        finally:
            self.leave()


class RandomStates(NamedTuple):
    """The states of torch's generators; `cuda` is None if this process does not use CUDA."""

    cpu: Tensor
    cuda: Tensor | None


def get_random_states() -> RandomStates:
    """Return the states of the generators of this process."""
    return RandomStates(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)


def set_random_states(states: RandomStates) -> None:
    """Set the generators of this process to states that `get_random_states` returned."""
    torch.set_rng_state(states.cpu)
    if states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda)


def has_dropout(model: PreTrainedModel) -> bool:
    """Return whether configuration or modules of a model show random operations in training."""
    values = _with_nested(model.config.get_text_config().to_dict())
    # Routers may add noise ("jitter") to their input.
    names = [name for name, value in values if isinstance(value, float) and value > 0]
    return any("drop" in name or "jitter" in name for name in names) or any(
        module.p > 0 for module in model.modules() if isinstance(module, nn.Dropout)
    )


def _with_nested(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a table and of the tables inside it.

    MPT stores its attention dropout in an inner table.
    """
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _with_nested({str(key): inner for key, inner in value.items()})
        else:
            yield str(name), value
