"""Fake tensors and a fake process group."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What torch raises for an operator that does not run on fake tensors; `func` is the operator.

Why: torch has these classes in a private module.
Holds: torch 2.11 to 2.13.
"""


# The position of dropout_p among the arguments of attention.
_DROPOUT = 4
_PROPAGATIONS = ("_propagate_tensor_meta", "_propagate_tensor_meta_cached", "_propagate_tensor_meta_non_cached")


@functools.cache
def fake_tensors() -> AbstractContextManager[Any]:
    """Return the mode in which new tensors of this process have a shape and no memory.

    Why: torch documents the mode, but keeps it in a private module.
    Holds: torch 2.11 to 2.13.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Be one process of many while the block runs. Collectives return at once, without values.

    Why: torch ships this backend for its own tests, in a private module.
    Holds: torch 2.11 to 2.13.
    """
    level, hook = dist.get_debug_level(), sys.excepthook
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch would compare collectives with real processes.
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)
        # torch has put the rank in front of every line of a traceback.
        sys.excepthook = hook


@contextmanager
def propagation_marked(inside: Callable[[int], None]) -> Iterator[None]:
    """Call `inside` with 1 when DTensor begins to infer a layout, and with -1 when it ends.

    Why: DTensor runs each new operator once with the shapes of the full tensors. These runs
    allocate and compute nothing, and torch does not mark them.
    Holds: torch 2.11 to 2.13.
    """
    names = [name for name in _PROPAGATIONS if hasattr(ShardingPropagator, name)]
    originals = {name: ShardingPropagator.__dict__[name] for name in names}

    def marked(original: Callable[..., Any]) -> Callable[..., Any]:
        def propagate(*args: Any, **kwargs: Any) -> Any:
            inside(1)
            try:
                return original(*args, **kwargs)
            finally:
                inside(-1)

        return propagate

    for name, original in originals.items():
        setattr(ShardingPropagator, name, marked(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ShardingPropagator, name, original)


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `seen` after each change of the size of a storage.

    Why: FSDP2 frees gathered parameters by setting the size of their storage to 0. This is no
    operator of torch, so no mode sees it.
    Holds: torch 2.11 to 2.13.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def attention_as_on_gpus() -> Iterator[None]:
    """Let attention ignore dropout while the block runs.

    Why: with dropout, torch has no kernel for the CPU and keeps all attention weights, but those
    for GPUs draw the mask again in the backward pass, and keep nothing of it.
    Holds: torch 2.11 to 2.13.
    """
    original = F.scaled_dot_product_attention

    def attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        if len(args) > _DROPOUT:
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        return original(*args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


@contextmanager
def rows_joined() -> Iterator[None]:
    """Let transformers find no documents in the rows of a batch while the block runs.

    Why: it looks for them in the values of positions, which fake tensors lack. Then it makes a mask
    of all pairs of a row, which the same step with values does not.
    Holds: transformers 5.17 to 5.23.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def votes_skipped() -> Iterator[None]:
    """Let the stages of a pipeline skip their vote on how shapes become known.

    Why: torch votes once, in the first step with a schedule, and no other step does. `StaticStage`
    ignores the result.
    Holds: torch 2.11 to 2.13; the vote is new in 2.13.
    """

    def skip(stage: Any, *args: Any, **kwargs: Any) -> Tensor:
        return torch.ones(())

    names = [name for name in ("_warmup_forward_vote", "_warmup_backward_result") if hasattr(PipelineStage, name)]
    originals = {name: getattr(PipelineStage, name) for name in names}
    for name in names:
        setattr(PipelineStage, name, skip)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(PipelineStage, name, original)


def is_on_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device.

    Why: a fake tensor answers the public question with an operator, and the class is private.
    Holds: torch 2.11 to 2.13.
    """
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "meta"


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values that can be read: it is neither fake nor on meta.

    Why: the class of fake tensors is private.
    Holds: torch 2.11 to 2.13.
    """
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage as long as it exists.

    Why: the address of fake memory is always 0.
    Holds: torch 2.11 to 2.13.
    """
    return storage._cdata
