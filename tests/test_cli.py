"""The commands in real processes: output, exit codes and CPU time."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.cli import SECONDS_FOR_RANK_0

RUN = 'run_directory = "out"\nsteps = 1\nglobal_batch_size = 1\nmodel.type = "gpt2"\n'
# A start takes at most this many times the CPU time of the imports that no command can avoid.
MOST_TIMES = 4.0
VERBS = (
    "train",
    "sweep",
    "learning-rate",
    "check",
    "plan",
    "export",
    "corpus",
    "tokenize",
    "generate",
    "report",
    "schema",
)


def meshtrain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshtrain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments):
    shown = meshtrain(*arguments)

    assert shown.returncode == 0
    assert all(f"\n  {verb} " in shown.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_has_help(verb):
    shown = meshtrain(verb, "--help")

    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: meshtrain {verb} ")


def test_version_is_printed():
    assert meshtrain("--version").stdout == "meshtrain 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'? (see meshtrain --help)\n"),
        (["train"], "error: Missing argument 'RUN'. (see meshtrain --help)\n"),
        (["check", "run.toml"], "error: Missing option '--world-size'. (see meshtrain --help)\n"),
        (
            ["plan", "run.toml", "--tml"],
            "error: No such option: --tml (Possible options: --html, --toml) (see meshtrain --help)\n",
        ),
    ],
)
def test_wrong_command_line_is_a_one_line_error(arguments, line):
    shown = meshtrain(*arguments)

    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", line)


@pytest.mark.parametrize("verb", [["train"], ["check", "--world-size", "2"], ["plan", "--toml"]])
def test_each_mistake_in_a_run_is_one_line(verb):
    shown = meshtrain(*verb, "run.toml", "plan.mesh.tq=2", "step=3")

    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.splitlines() == [
        "error: command line: plan.mesh.tq: unknown key; did you mean 'tp'?",
        "error: command line: step: unknown key; did you mean 'steps'?",
    ]


def test_other_rank_prints_an_error_only_if_rank_0_does_not():
    start = time.monotonic()
    shown = meshtrain("train", "run.toml", "step=3", RANK="1", WORLD_SIZE="2")

    assert time.monotonic() - start > SECONDS_FOR_RANK_0
    assert shown.stderr == "error: rank 1: command line: step: unknown key; did you mean 'steps'?\n"
    assert (shown.returncode, shown.stdout) == (2, "")


def test_unknown_corpus_step_is_refused():
    shown = meshtrain("corpus", "cleen", "corpus.toml")

    assert shown.returncode == 2
    assert "'cleen' is not one of 'run', 'urls', 'download', 'clean', 'deduplicate', 'shuffle', " in shown.stderr


def test_corpus_report_refuses_redo(tmp_path):
    (tmp_path / "corpus.toml").write_text('directory = "out"\nsources = ["a.txt"]\n[clean]\n')
    shown = meshtrain("corpus", "report", "corpus.toml", "--redo", "clean")

    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "error: --redo is for steps, and report runs no step; leave it out\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["run.toml", "--tokenizer", "t"],
            "--tokenizer belongs to a token file; override data.tokenizer.path of a run",
        ),
        (["tokens", "--part", "train"], "--part belongs to a run file (.toml), and tokens is not one; leave it out"),
        (["tokens", "a=1"], "the override a=1 belongs to a run file (.toml), and tokens is not one; leave it out"),
    ],
)
def test_inspect_refuses_options_it_does_not_use(arguments, line):
    shown = meshtrain("data", "inspect", *arguments)

    assert (shown.returncode, shown.stderr) == (2, f"error: {line}\n")


def test_missing_checkpoint_is_a_user_error():
    shown = meshtrain("export", "nowhere", "folder")

    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert len(shown.stderr.splitlines()) == 1


def test_bug_shows_its_traceback():
    shown = meshtrain("train", "run.toml", RANK="one")

    assert shown.returncode == 1
    assert shown.stderr.startswith("Traceback")


def test_ctrl_c_has_its_own_exit_code(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    process = subprocess.Popen(
        [sys.executable, "-m", "meshtrain", "train", "pipe.toml"],
        stderr=subprocess.PIPE,
        # A shell starts background processes with this signal ignored, and these tests would
        # inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # Opening blocks until the other process reads the run, and then waits for the content.
    with (tmp_path / "pipe.toml").open("w"):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)

    assert (process.returncode, error) == (130, b"")


@pytest.mark.parametrize(
    ("kind", "title"), [("run", "RunConfig"), ("plan", "ParallelPlan"), ("corpus", "CorpusConfig")]
)
def test_schemas_are_printed(kind, title):
    assert json.loads(meshtrain("schema", kind).stdout)["title"] == title


def test_unknown_schema_is_refused():
    shown = meshtrain("schema", "rnu")

    assert shown.returncode == 2
    assert "'rnu' is not one of 'run', 'plan', 'corpus'" in shown.stderr


def run_timed(*arguments):
    """Return the CPU seconds of a Python process, and the process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["corpus", "--help"],
        ["train", "run.toml", "plan.mesh.tq=4", "plan=families/gpt2"],
        ["corpus", "run", "run.toml"],
    ],
)
def test_help_and_user_errors_are_fast(arguments):
    fewest, _ = run_timed("-X", "importtime", "-c", "import pydantic, rich.console, typer")
    seconds, shown = run_timed("-X", "importtime", "-m", "meshtrain", *arguments)

    print(f"meshtrain {' '.join(arguments)}: {seconds:.2f} s of CPU, its libraries alone: {fewest:.2f} s")
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "meshtrain.cli" in loaded
    assert not {"torch", "transformers", "numpy", "datatrove", "ftfy", "aiohttp"}.intersection(loaded)
    assert seconds < MOST_TIMES * fewest
