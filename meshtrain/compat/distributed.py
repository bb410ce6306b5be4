"""torch.distributed: process groups and their backends, the flight recorder, pipelines and DDP."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as pipelining_utils
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _batch_p2p, _PipelineSchedule
from torch.nn.parallel import DistributedDataParallel

TorchSchedule = _PipelineSchedule
"""The class of every schedule of a pipeline.

Why: `get_schedule_class` returns subclasses of this class, which has no public name.
Holds: torch 2.11 to 2.13.
"""

REDISTRIBUTION_LOG = "torch.distributed.tensor._redistribute"
"""Name of the logger that warns when a DTensor is gathered in several steps.

Why: torch names its loggers after its private modules.
Holds: torch 2.11 to 2.13.
"""


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather the parts of all processes into one tensor.

Why: torch 2.13 has renamed the function, and warns about the old name.
Holds: torch 2.11 to 2.13.
"""

reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Sum a tensor over all processes, and leave its part to each.

Why: torch 2.13 has renamed the function, and warns about the old name.
Holds: torch 2.11 to 2.13.
"""


def device_types(group: dist.ProcessGroup) -> set[str]:
    """Return the kinds of devices that a process group has a backend for, such as {"cpu", "cuda"}.

    Why: `torch.distributed.get_backend` returns the backend of one kind only.
    Holds: torch 2.11 to 2.13.
    """
    return {device.type for device in group._device_types}


def backend_of(device: torch.device, group: dist.ProcessGroup) -> str:
    """Return the name of the backend with which a process group sends tensors of a device.

    Why: `torch.distributed.get_backend` returns what the program asked for, such as "cpu:gloo".
    Holds: torch 2.11 to 2.13.
    """
    return _unwrapped(group._get_backend(device)).name()


def default_store() -> dist.Store:
    """Return the store with which the default process group was joined.

    Why: the program may have joined the group, and torch has no public access to its store.
    Holds: torch 2.11 to 2.13.
    """
    return dist.distributed_c10d._get_default_store()


def set_timeouts(timeout: timedelta) -> None:
    """Set the time after which a collective fails, in every process group of this process.

    Why: torch takes a timeout when a group is made, and DeviceMesh makes groups without one.
    Holds: torch 2.11 to 2.13.
    """
    for backend in _backends():
        _unwrapped(backend)._set_default_timeout(timeout)


def _unwrapped(backend: Any) -> Any:
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend.
    return getattr(backend, "wrapped_pg", backend)


def _backends() -> Iterator[Any]:
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            yield group._get_backend(device)


def flight_records() -> bytes:
    """Return the latest collectives of this process, in the form that torch's `torchfrtrace` reads.

    Why: torch writes them by itself only when its own watchdog fires, and only for NCCL.
    Holds: torch 2.11 to 2.13.
    """
    c10d: Any = torch._C._distributed_c10d
    return c10d._dump_nccl_trace() if torch.cuda.is_available() else c10d._dump_fr_trace()


def joined_axes(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """Return some neighboring axes of a mesh as one axis.

    Why: FSDP2 shards over one axis, and joining axes is private.
    Holds: torch 2.11 to 2.13.
    """
    return mesh[tuple(axes)]._flatten(name)


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh with the axes of some parts of the same mesh.

    Why: a joined axis can be combined with others by its name too, but torch warns of that.
    Holds: torch 2.11 to 2.13.
    """
    return DeviceMesh._concatenate([*meshes])


def is_inside_ddp() -> bool:
    """Return whether the running forward pass is inside DistributedDataParallel.

    Why: the gradients of a parallel model inside it would be reduced twice, and torch has no public
    query.
    Holds: torch 2.11 to 2.13.
    """
    return DistributedDataParallel._get_active_ddp_module() is not None


class StaticStage(PipelineStage):
    """A pipeline stage whose shapes are given, not inferred.

    Why: for every new shape torch cleans up after the inference of shapes. Under FSDP2 that removes
    the gradients of all parameters, including those of earlier batches. Nothing was inferred here,
    so there is nothing to clean up. The stages also vote whether to infer, and a simulated process
    cannot read the result. And torch allocates the memory for the messages of all microbatches at
    once; here it is allocated when a message is awaited, and freed after its use. Its backward pass
    leaves parameters gathered, even if the next forward pass of the stage frees them, and it never
    reduces gradients before the last one is done. The schedules wait for what they have sent after
    the last pass, and until then each message keeps its tensor.
    Holds: torch 2.11 to 2.13; the vote is new in 2.13.

    Args:
        args: of torch's stage.
        frees_gathered: whether each backward pass frees gathered parameters.
        reduces_each: whether each backward pass reduces its gradients.
        sent: takes the messages that the stage sends; None: the schedule waits for them.
        kwargs: of torch's stage.
    """

    _MODES: Any = getattr(pipelining_utils, "InferenceMode", None)

    def __init__(
        self,
        *args: Any,
        frees_gathered: bool,
        reduces_each: bool,
        sent: Callable[[list[dist.Work]], None] | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._frees_gathered, self._reduces_each, self._sent = frees_gathered, reduces_each, sent

    @property
    def _inference_mode(self) -> Any:
        return self._MODES.STATIC if self._MODES else None

    @_inference_mode.setter
    def _inference_mode(self, mode: Any) -> None:
        pass

    def _post_metadata_inference_cleanup(self) -> None:
        pass

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._buffers_on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _buffers_on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._posted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._posted(super().get_bwd_send_ops(bwd_chunk_id))

    def _posted(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        """Send messages, and return those that the schedule has to send."""
        if self._sent is None:
            return messages
        if messages:
            self._sent(_batch_p2p(messages))
        return []

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        # A gradient that is missing is filled with zeros.
        pairs = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        self._allocate(received for received, gradient in pairs if gradient is None)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._release(self.args_recv_info[fwd_chunk_id])
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        self._release(self.grad_recv_info.get(bwd_chunk_id, ()))
        if loss is not None and not loss._is_view():
            # The schedule keeps all losses, and through their graphs what the stage has received.
            loss.detach_()
        return result

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        keeps_all = not (self._frees_gathered or self._reduces_each)
        if keeps_all or not isinstance(self.submod, FSDPModule) or backward_type != "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        ends = last_backward and self._reduces_each
        self.submod.set_is_last_backward(ends)
        self.submod.set_requires_gradient_sync(self._reduces_each)
        # The parts of gradients are summed over dp_replicate once.
        self.submod.set_requires_all_reduce(ends)
        self.submod.set_reshard_after_backward(self._frees_gathered or ends)
        return stage_backward(*(bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # The last backward pass has reduced all gradients.
        if not self._reduces_each:
            super().perform_reduce_grad(grad_scale_factor)

    def _allocate(self, received: Iterable[Any]) -> None:
        for it in received:
            # An input of the model has no buffer.
            buffer = getattr(it, "buffer", None)
            if buffer is not None and buffer.is_meta:
                it.buffer = torch.empty_like(buffer, device=self.device, requires_grad=buffer.requires_grad)

    def _release(self, received: Iterable[Any]) -> None:
        for it in received:
            buffer = getattr(it, "buffer", None)
            if buffer is not None:
                it.buffer = torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
