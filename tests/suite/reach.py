"""Record which lines of meshtrain each test of the full suite reaches, and its seconds.

    python -m tests.suite.reach FOLDER [arguments of pytest]

All processes of a test count. FOLDER then holds coverage.py's data, whose contexts are the tests,
and `seconds.json`. Processes that are killed leave nothing behind.
"""

import json
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

CONFIGURATION = """
[run]
source_pkgs = meshtrain
data_file = {folder}/lines
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST-none}}
disable_warnings = no-data-collected,module-not-measured,module-not-imported,couldnt-parse
"""


class Reach:
    """A plugin of pytest: the context of coverage.py is the test that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.seconds = folder, dict[str, float]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        running = coverage.Coverage.current()
        assert running is not None
        running.switch_context(item.nodeid)
        answer = yield
        running.switch_context("none")
        return answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        (self._folder / "seconds.json").write_text(json.dumps(self.seconds, indent=1))


def be_rank(environment: dict[str, str], *others: Any) -> None:
    """Run a rank as meshtrain.runtime.ranks does, measured, after a fork of a measured process."""
    from meshtrain.runtime import ranks

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()
    os.environ.update(environment)
    measured = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"], data_suffix=True)
    measured.start()
    try:
        ranks._run_rank(environment, *others)
    finally:
        measured.stop()
        measured.save()


def _measure_ranks() -> None:
    from meshtrain.runtime import ranks
    from tests.suite import reach  # not __main__, which tests replace

    collect: Callable[..., Any] = ranks._collect

    def collect_with_test(environments: list[dict[str, str]], *others: Any) -> Any:
        for environment in environments:
            environment["PYTEST_CURRENT_TEST"] = os.environ.get("PYTEST_CURRENT_TEST", "none")
        return collect(environments, *others)

    ranks._collect, ranks._run_rank = collect_with_test, reach.be_rank


def main() -> int:
    """Run pytest and return its exit status."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "coveragerc"
    configuration.write_text(CONFIGURATION.format(folder=folder))
    os.environ["COVERAGE_PROCESS_START"] = str(configuration)
    # The seconds are those of the quick suite, which does not compare collectives.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    measured = coverage.Coverage(config_file=str(configuration), data_suffix=True)
    measured.start()
    _measure_ranks()
    status = pytest.main(["--all", *sys.argv[2:]], plugins=[Reach(folder)])
    measured.stop()
    measured.save()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
