"""The most memory that a process uses at once, from what torch's profiler saw."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from torch import Tensor

from meshtrain.compat.fake import storage_key
from meshtrain.models.layout import local_tensor
from meshtrain.profiling.trace import Event, Section, interval


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory of tensors on this process; shared memory counts once."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def peaks_on_cpu(events: Sequence[Event], sections: Sequence[Section], *, held_bytes: int = 0) -> list[int]:
    """Return the most bytes that the allocator of the CPU had handed out in each section.

    The memory of gloo does not count. It allocates copies in its threads and inside the operators
    of c10d.

    Args:
        events: of a trace with memory.
        sections: of the main thread.
        held_bytes: memory that was there before the trace, and stays.
    """
    (thread,) = {section.thread for section in sections}
    calls = (event for event in events if event.get("ph") == "X" and event["name"].startswith("c10d::"))
    sends = sorted(map(interval, calls))
    # Operators are nested, so the one that began last may have ended before the one around it.
    ends = list(accumulate((end for _, end in sends), max))
    held: dict[int, int] = {}
    total, peaks = held_bytes, [held_bytes] * len(sections)
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda event: event["ts"]):
        num_bytes, address, time = event["args"]["Bytes"], event["args"]["Addr"], event["ts"]
        before = bisect_right(sends, (time, inf)) - 1
        is_of_gloo = event["tid"] != thread or (before >= 0 and time <= ends[before])
        if num_bytes > 0 and not is_of_gloo:
            held[address] = num_bytes
            total += num_bytes
        elif num_bytes < 0:
            total -= held.pop(address, 0)
        for index, section in enumerate(sections):
            if section.begin <= time <= section.end:
                peaks[index] = max(peaks[index], total)
    return peaks
