"""Set up once, before anything imports torch."""

import os
import signal
from collections.abc import Generator

import pytest

from tests.crashes import has_stacks, without_waiting_threads
from tests.suite.choose import FULL_ONLY, read_full_only

# The ranks of the tests are CPU processes with gloo, also on a machine with GPUs, because bits are
# compared. CUDA_VISIBLE_DEVICES=0 runs the tests that need a GPU, which are skipped otherwise.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# With tiny tensors on a busy machine, threads would wait for each other forty times longer than
# they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The files that take longest, which begin first, so that no core waits for the last of them.
BEGIN = (
    "tests/planning/test_simulation.py",
    "tests/host_cuda/",
    "tests/runtime/test_guard.py",
    "tests/docs/test_recipes.py",
    "tests/training/test_lora",
    "tests/training/test_optimizers.py",
    "tests/parallel/test_tensor_rules.py",
    "tests/test_bad_input.py",
    "tests/test_processes.py",
    "tests/verify/",
)
# A shell starts background processes with ctrl-C ignored, and child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all, the full suite."""
    parser.addoption(
        "--all", action="store_true", help=f"run the tests of {FULL_ONLY.name} too, and compare all collectives"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make torch check the collectives of the full suite."""
    if config.getoption("--all"):
        # DETAIL compares the fingerprint of every collective between ranks: a mismatch is then an
        # error, not garbage or a hang. It doubles the time of a test on ranks. torch reads it at
        # import.
        os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the full suite runs, and order the files.

    Nothing changes if arguments name tests, files or folders.
    """
    if config.args != config.getini("testpaths"):
        return
    full_only = read_full_only()
    if unknown := sorted(full_only - {item.nodeid for item in items}):
        raise pytest.UsageError(f"{FULL_ONLY} lists tests that do not exist: {', '.join(unknown)}; correct their names")
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in full_only])
        items[:] = [item for item in items if item.nodeid not in full_only]
    items.sort(key=lambda item: [not item.nodeid.startswith(begin) for begin in BEGIN])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the stacks of a crash next to the traceback: only this is shown of a rerun test."""
    report = yield
    if report.failed:
        for name, text in report.sections:
            if has_stacks(text):
                report.longrepr.addsection(name, without_waiting_threads(text))
        report.sections = [(name, text) for name, text in report.sections if not has_stacks(text)]
    return report
