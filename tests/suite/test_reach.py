"""What a test reaches in other processes counts."""

import inspect
import subprocess
import sys
from pathlib import Path

from meshtrain.parallel.sent_messages import SentMessages
from tests.suite.mutants import Reached

ROOT = Path(__file__).parents[2]
TEST = "tests/parallel/test_sent_messages.py::test_only_messages_that_have_arrived_are_awaited_in_a_step"


def test_lines_of_ranks_are_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.suite.reach", str(tmp_path), TEST, "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines, first = inspect.getsourcelines(SentMessages.add)
    reached = Reached(tmp_path)
    assert reached.tests("meshtrain/parallel/sent_messages.py", first + 1, first + len(lines) - 1) == [TEST]
    assert reached.seconds[TEST] > 0
