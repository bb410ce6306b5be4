"""Numbers from the events of a trace."""

from typing import Any

import pytest

from meshtrain.profiling.files import ProfiledMessages
from meshtrain.profiling.messages import exposed_seconds, nccl_messages, summed
from meshtrain.profiling.peak import peaks_on_cpu
from meshtrain.profiling.trace import Section, busy_on_gpu, uncovered

STEP = Section(0.0, 1000.0, 1)


@pytest.mark.parametrize(
    ("intervals", "others", "expected"),
    [
        ([], [(0, 1)], 0),
        ([(0, 10)], [], 10),
        ([(0, 10), (5, 12)], [(2, 3), (2, 4)], 10),
        ([(0, 2), (4, 6)], [(1, 5)], 2),
        ([(0, 2), (4, 6)], [(0, 6)], 0),
        ([(0, 10)], [(-5, 1), (9, 20), (3, 4)], 7),
    ],
)
def test_time_that_others_do_not_cover(intervals: Any, others: Any, expected: float) -> None:
    assert uncovered(intervals, others) == expected


def event(category: str, name: str, begin: float, seconds: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    found = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": seconds, "tid": thread, "args": found}


def nccl_call(begin: float, number: int, group: str, elements: tuple[int, int], dtype: str) -> dict[str, Any]:
    """Return the event of a call of NCCL as torch writes it."""
    call = event("cpu_op", "record_param_comms", begin, 5, External_id=number, Process_Group_Name=group, dtype=dtype)
    call["args"] |= {"In msg nelems": elements[0], "Out msg nelems": elements[1]}
    return call


# Made by hand after traces of torch on GPUs.
ON_GPU = [
    event("cpu_op", "_c10d_functional::all_reduce", 10, 20),
    event("cpu_op", "c10d::allreduce_", 12, 15),
    nccl_call(14, 7, "5", (100, 100), "BFloat16"),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 100, 50, 7, External_id=7),
    event("cpu_op", "_c10d_functional::wait_tensor", 40, 2),
    event("cpu_op", "c10d::_allgather_base_", 50, 20, 2),
    {**nccl_call(52, 8, "3", (10, 40), "Float"), "tid": 2},
    event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 160, 40, 8, External_id=8),
    event("cpu_op", "c10d::barrier", 80, 2),
    nccl_call(81, 9, "0", (1, 1), "Float"),
    event("cpu_op", "c10d::allreduce_", 2000, 15),
    event("kernel", "gemm", 120, 100, 6, External_id=10),
]


def test_messages_of_nccl_have_axis_bytes_and_seconds_of_their_kernels() -> None:
    messages = nccl_messages(ON_GPU, STEP, {"3": "dp_shard", "5": "tp"})
    assert summed(messages) == (
        ProfiledMessages("dp_shard", "allgather", 1, 160, pytest.approx(40e-6)),
        ProfiledMessages("tp", "all_reduce", 1, 200, pytest.approx(50e-6)),
    )
    # The product of matrices begins at 120.
    assert exposed_seconds(messages, busy_on_gpu(ON_GPU)) == {"dp_shard": 0.0, "tp": pytest.approx(20e-6)}


def memory(time: float, num_bytes: int, address: int, thread: int = 1) -> dict[str, Any]:
    return {"name": "[memory]", "ts": time, "tid": thread, "args": {"Bytes": num_bytes, "Addr": address}}


def test_peak_counts_what_was_there_before_and_not_what_gloo_holds() -> None:
    events = [
        memory(1, 100, 1),
        memory(20, 1000, 2),
        memory(30, 50, 3, thread=2),
        event("cpu_op", "c10d::send", 40, 10),
        memory(45, 70, 4),
        memory(60, -1000, 2),
        memory(70, -70, 4),
        memory(200, 300, 5),
    ]
    sections = [Section(10, 100, 1), Section(150, 250, 1)]
    assert peaks_on_cpu(events, sections, held_bytes=5) == [1105, 405]
