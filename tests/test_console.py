"""Console output on a terminal, in a log, and on other ranks."""

import os
import pty
import re
import subprocess
import sys

import pytest

from meshtrain import console

LONG = "/a/very/long/path/" * 20
METRICS = {"loss": 4.8123, "learning_rate": 3e-4, "grad_norm": 0.914, "tokens_per_second": 2310.4, "epoch": 0.5}


@pytest.fixture(autouse=True)
def reset_console(capsys):
    console.configure()
    yield
    console.configure()


def on_a_terminal(program: str) -> str:
    """Run a program on a pseudo-terminal and return its output."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=its, stderr=its, env=environment)
    os.close(its)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # Linux reports the closed end of a terminal this way
            break
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


def test_line_is_printed_without_markup_or_wrapping(capsys):
    console.line(f"[bold]{LONG}[/bold] :smile:")

    assert capsys.readouterr().out == f"[bold]{LONG}[/bold] :smile:\n"


def test_errors_and_warnings_are_unwrapped_lines_on_standard_error(capsys):
    console.error_lines([f"[red]{LONG}", "two\nlines"])
    console.warning("[/x] is odd")

    assert capsys.readouterr() == ("", f"error: [red]{LONG}\nerror: two lines\nwarning: [/x] is odd\n")


def test_table_in_a_log_does_not_wrap_its_cells(capsys):
    console.table("Who [holds] what", ["stage", "layers"], [["transformer.h.[0-11]", 12], ["x" * 100, "1,234 MB"]])

    out = capsys.readouterr().out
    assert out.splitlines()[0].rstrip() == "Who [holds] what"
    assert re.search(r"transformer\.h\.\[0-11\] +12 *\n", out)
    assert re.search(rf"{'x' * 100} +1,234 MB *\n", out)


def test_other_ranks_print_nothing(capsys):
    console.configure(rank=1)

    console.line("a")
    console.table("b", ["c"], [["d"]])
    console.warning("e")
    with console.progress("g", total=10) as advance:
        advance(10)
    with console.TrainingProgress(2) as training:
        training.update(2, METRICS)

    assert capsys.readouterr() == ("", "")


def test_error_of_another_rank_names_the_rank(capsys):
    console.configure(rank=3)

    console.error_lines(["the disk is full"])

    assert capsys.readouterr() == ("", "error: rank 3: the disk is full\n")


def test_progress_in_a_log_is_an_occasional_line(capsys):
    with console.progress("Tokenizing [x]", total=2_500_000, unit="MB") as advance:
        for _ in range(25):
            advance(100_000)

    assert capsys.readouterr().out == "Tokenizing [x]  0.1/2.5 MB\nTokenizing [x]  2.5/2.5 MB\n"


def test_progress_may_count_steps(capsys):
    with console.progress("Evaluating", total=1) as advance:
        advance(1)

    assert capsys.readouterr().out == "Evaluating  1/1 steps\n"


def test_training_in_a_log_is_a_line_per_interval_and_at_the_last_step(capsys):
    with console.TrainingProgress(7, every=3) as training:
        for step in range(1, 8):
            training.update(step, METRICS)

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert lines[0] == "step 3/7  loss 4.812  lr 3.0e-04  norm 0.91  2,310 tok/s  eta 0:00"
    assert lines[-1] == "step 7/7  loss 4.812  lr 3.0e-04  norm 0.91  2,310 tok/s"


def test_evaluation_is_always_a_line(capsys):
    with console.TrainingProgress(7, every=3) as training:
        training.update(1, METRICS)
        training.update(1, {"eval_loss": 4.5})

    assert capsys.readouterr().out == "step 1/7  eval loss 4.500\n"


def test_remaining_time_is_estimated_from_the_first_report():
    program = """
import time
from meshtrain import console
with console.TrainingProgress(4001) as training:
    time.sleep(0.5)
    training.update(1, {})
    time.sleep(1.0)
    training.update(2, {})
"""
    lines = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.splitlines()

    assert lines[0] == "step 1/4001"
    hours, minutes, _ = lines[1].removeprefix("step 2/4001  eta ").split(":")
    assert hours == "1"
    assert 6 <= int(minutes) <= 20


def test_training_on_a_terminal_is_a_bar_with_lines_above():
    written = on_a_terminal("""
from meshtrain import console
with console.TrainingProgress(2) as training:
    training.update(1, {"loss": 4.0, "tokens_per_second": 100.0})
    console.line("saved [a]")
    console.warning("hot [b]")
    training.update(1, {"eval_loss": 3.5})
    training.update(2, {"loss": 3.0, "tokens_per_second": 1234.0})
""")

    assert written.count("saved [a]\r\n") == 1
    assert written.count("warning: hot [b]") == 1
    assert written.count("step 1/2  eval loss 3.500\r\n") == 1
    last_frame = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", written.split("\r")[-2])
    assert re.fullmatch(r"step 2/2 ━+ loss 3\.000  1,234 tok/s  eval loss 3\.500", last_frame)


def test_progress_on_a_terminal_is_a_bar():
    written = on_a_terminal("""
from meshtrain import console
with console.progress("Hashing [x]", 2_000_000, unit="MB") as advance:
    advance(2_000_000)
""")

    assert re.search(r"Hashing \[x\] .*━.* 2\.0/2\.0 MB", written)
