"""Load the CUDA device on the host, and give torch's Python code of CUDA what it calls.

torch.cuda itself is not replaced: its functions check their arguments and call the C functions that
a torch without CUDA lacks. Those are here.
"""

import ctypes
import importlib
import os
from types import SimpleNamespace
from typing import Any

from tests.host_cuda.build import CAPABILITY, DEVICES, LIBRARY, torch_folder

MEMORY_BYTES = 80 * 2**30
NAME = "NVIDIA H100 80GB HBM3"
"""The name of the device: that of a GPU of which meshtrain knows the speed."""


def load() -> None:
    """Make `torch.cuda.is_available()` true in this process. torch must not be imported yet."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        # Global, so that the library of the device finds their symbols.
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ[LIBRARY])
    import torch

    for name, function in _functions(torch).items():
        setattr(torch._C, name, function)
    _replace_streams(torch)
    _replace_nccl()
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign,assignment]
    cuda: Any = torch.cuda
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=lambda device: (MEMORY_BYTES, MEMORY_BYTES))
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._has_cuda = True  # type: ignore[misc]
    cuda._device_count_nvml = lambda: -1
    # Two functions, because torch.compile knows each of them.
    cuda._exchange_device, cuda._maybe_exchange_device = _exchange_device, lambda index: _exchange_device(index)


def _functions(torch: Any) -> dict[str, Any]:
    """Return the C functions that torch.cuda calls."""
    device, history = torch.ops.host_cuda, _MemoryHistory()

    def start() -> None:
        number = int(os.environ[DEVICES])
        torch.cuda.default_generators = (device.default_generator(),) * number
        torch.cuda._get_device_properties = _properties

    return {
        "_cuda_init": start,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: int(os.environ[DEVICES]),
        "_cuda_getDevice": torch._C._accelerator_getDeviceIndex,
        "_cuda_setDevice": torch._C._accelerator_setDeviceIndex,
        "_cuda_synchronize": lambda: None,
        "_cuda_canDeviceAccessPeer": lambda index, peer: False,
        "_cuda_getCurrentStream": lambda index: _numbers(torch._C._accelerator_getStream(index)),
        "_cuda_getCurrentRawStream": lambda index: torch._C._accelerator_getStream(index).stream_id,
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_setStream": _set_stream,
        "_cuda_emptyCache": lambda: None,
        "_cuda_memoryStats": lambda index: _memory(device),
        "_cuda_resetPeakMemoryStats": lambda index: device.reset_peak(),
        "_cuda_record_memory_history": history.record,
        "_cuda_memorySnapshot": history.snapshot,
        "_cuda_getArchFlags": lambda: "sm_90",
    }


def _properties(index: int) -> SimpleNamespace:
    major, minor = map(int, os.environ.get(CAPABILITY, "9.0").split("."))
    return SimpleNamespace(name=NAME, total_memory=MEMORY_BYTES, major=major, minor=minor, multi_processor_count=132)


def _memory(device: Any) -> dict[str, Any]:
    current, peak = device.allocated_bytes(), device.peak_bytes()
    numbers = {"all": {"current": current, "peak": peak}}
    return {"allocated_bytes": numbers, "reserved_bytes": numbers, "num_alloc_retries": 0, "num_ooms": 0}


def _numbers(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    import torch

    stream = torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    torch._C._accelerator_setStream(stream)


def _exchange_device(index: int) -> int:
    import torch

    before = torch._C._accelerator_getDeviceIndex()
    if index >= 0:
        torch._C._accelerator_setDeviceIndex(index)
    return before


class _MemoryHistory:
    """The record of an allocator that allocates nothing: empty, but only while it is on."""

    def __init__(self) -> None:
        self._is_on = False

    def record(
        self,
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool = False,
        compile_context: bool = False,
        *more: Any,
    ) -> None:
        assert stacks in ("python", "all"), stacks
        assert context in (None, "state", "alloc", "all"), context
        self._is_on = enabled is not None

    def snapshot(self, pool: Any, *more: Any) -> dict[str, Any]:
        assert self._is_on, "the memory history is not recorded"
        return {"segments": [], "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}


def _replace_streams(torch: Any) -> None:
    """Define torch.cuda.Stream and torch.cuda.Event again, over the streams of the device."""

    class StreamBase(torch.Stream):
        def __new__(cls, priority: int = 0, stream_ptr: int = 0, **numbers: int) -> Any:
            given = numbers or {"device": "cuda", "priority": priority}
            return super().__new__(cls, **given)

        cuda_stream = property(lambda self: self.stream_id)

    class EventBase:
        """Holds a torch.Event, because torch compares only events of exactly this class."""

        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            self.is_timed, self.event = enable_timing, torch.Event(device="cuda", enable_timing=enable_timing)

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            return super().__new__(cls)

        def record(self, stream: Any) -> None:
            self.event.record(stream)

        def wait(self, stream: Any) -> None:
            self.event.wait(stream)

        def query(self) -> bool:
            return self.event.query()

        def synchronize(self) -> None:
            self.event.synchronize()

        def elapsed_time(self, end_event: Any) -> float:
            # The device of the host would not refuse it.
            if not (self.is_timed and end_event.is_timed):
                raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
            return self.event.elapsed_time(end_event.event)

    torch._C._CudaStreamBase, torch._C._CudaEventBase = StreamBase, EventBase
    streams = importlib.reload(torch.cuda.streams)
    torch.cuda.Stream, torch.cuda.Event = streams.Stream, streams.Event


def _replace_nccl() -> None:
    """Let groups of NCCL be created. Their collectives run in the group of the host, by gloo."""
    from torch._C import _distributed_c10d
    from torch.distributed import distributed_c10d as c10d

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):  # type: ignore[misc]
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, options._timeout)

    names: Any = c10d
    names.ProcessGroupNCCL, names._NCCL_AVAILABLE = ProcessGroupNCCL, True
    compiled: Any = _distributed_c10d
    compiled._dump_nccl_trace = compiled._dump_fr_trace


def _resize_storage(storage: Any, num_bytes: int) -> Any:
    import torch

    if storage.device.type != "cuda":
        return torch._C.StorageBase.resize_(storage, num_bytes)
    bytes_of = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.host_cuda.resize_storage(bytes_of, num_bytes)
    return storage
