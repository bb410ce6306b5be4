"""Set up once, before anything imports torch."""

import os
import signal
from collections.abc import Generator

import pytest

from tests.crashes import has_stacks, without_waiting_threads

# DETAIL compares the fingerprint of every collective between ranks: a mismatch is an error and not garbage or a hang.
# torch reads it when it is imported. The benchmarks, which are not started by pytest, go without.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
# The ranks of the tests are processes on the CPU, on a machine with GPUs too: bits are compared, and gloo is meant.
# What needs a GPU is skipped; CUDA_VISIBLE_DEVICES=0 runs it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Tiny tensors: on a busy machine threads would wait for each other forty times as long as they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it sends to the background with ctrl-C ignored, and every process begins as its parent does.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what a crash left next to the traceback: of a test that is run once more nothing else is shown."""
    report = yield
    if report.failed:
        for name, text in report.sections:
            if has_stacks(text):
                report.longrepr.addsection(name, without_waiting_threads(text))
        report.sections = [(name, text) for name, text in report.sections if not has_stacks(text)]
    return report
