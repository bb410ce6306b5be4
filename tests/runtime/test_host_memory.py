"""A process that trains on a CPU keeps freed memory, unless the user has chosen otherwise."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from meshtrain.runtime.process import process_group

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sizes = [48, 80, 112]
with process_group():
    for size in sizes:
        bytearray(size << 20)
    before = page_faults()
    for _ in range(4):
        for size in sizes:
            bytearray(size << 20)
    print(page_faults() - before)
"""


def page_faults(**variables: str) -> int:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | variables
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries stay as they are")
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    pages = 4 * (48 + 80 + 112) * 256
    assert page_faults() < pages / 100
    # Without the setting, each tensor gets new pages.
    for variable, value in (
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ):
        assert page_faults(**{variable: value}) > pages / 2
