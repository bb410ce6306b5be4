"""A process that trains on a CPU keeps freed memory, unless the user has chosen otherwise."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, resource
from meshtrain.runtime.process import process_group

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sizes = json.loads(os.environ["MEGABYTES"])
with process_group():
    for size in sizes:
        bytearray(size << 20)
    before = page_faults()
    for _ in range(4):
        for size in sizes:
            bytearray(size << 20)
    print(page_faults() - before)
"""


# As a glibc that has a limit for this threshold.
OLD_GLIBC = """
#define _GNU_SOURCE
#include <dlfcn.h>
int mallopt(int parameter, int value) {
  if (parameter == -3) return 0;
  return ((int (*)(int, int))dlsym(RTLD_NEXT, "mallopt"))(parameter, value);
}
"""
LARGE, SMALL = [48, 80, 112], [1, 4, 16]
glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries stay as they are")


def page_faults(sizes: list[int], **variables: str) -> int:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MEGABYTES": json.dumps(sizes)} | variables
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def num_pages(sizes: list[int]) -> int:
    return 4 * sum(sizes) * 256


@glibc_only
def test_freed_memory_is_kept_for_the_next_tensor() -> None:
    assert page_faults(LARGE) < num_pages(LARGE) / 100
    # Without the setting, each tensor gets new pages.
    for variable, value in (
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ):
        assert page_faults(LARGE, **{variable: value}) > num_pages(LARGE) / 2


@glibc_only
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_a_glibc_that_refuses_keeps_its_own_thresholds(tmp_path: Path) -> None:
    source, library = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text(OLD_GLIBC)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    # It learns to keep tensors of these sizes by itself, unless a threshold is set.
    assert page_faults(SMALL, LD_PRELOAD=str(library)) < num_pages(SMALL) / 2
