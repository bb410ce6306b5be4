"""Memory pages that are allocated before they are written."""

import mmap
import os
import resource
import sys
from collections.abc import Iterator

import pytest
import torch

from meshtrain.runtime.fresh_memory import _advise, populate_pages

NUM_PAGES = 8192
KNOWS_HOW = sys.platform == "linux" and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14)


def fresh_tensor() -> torch.Tensor:
    """Return memory that is not yet written to, and that begins within a page."""
    return torch.frombuffer(mmap.mmap(-1, NUM_PAGES * mmap.PAGESIZE), dtype=torch.uint8)[100:-100]


def faults_of_filling(tensor: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor.fill_(7)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not KNOWS_HOW, reason="a Linux from 5.14 on does it")
def test_populated_pages_cause_no_page_faults() -> None:
    tensor = fresh_tensor()
    populate_pages(tensor)
    assert faults_of_filling(tensor) < NUM_PAGES / 100


def test_populating_pages_keeps_values() -> None:
    tensor = torch.arange(1000, 9000)
    for part in (tensor, tensor[3:], tensor[:0]):
        populate_pages(part)
    assert tensor.equal(torch.arange(1000, 9000))


@pytest.fixture
def other_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _advise.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    yield
    _advise.cache_clear()


@pytest.mark.usefixtures("other_system")
def test_other_systems_skip_the_call() -> None:
    tensor = fresh_tensor()
    populate_pages(tensor)
    assert faults_of_filling(tensor) > 0
    assert bool((tensor == 7).all())
