"""`meshtrain check` accepts or refuses 10,000 damaged runs, with one line per problem."""

import io
import math
import os
import re
import resource
import signal
import sys
import traceback
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config.data import DataConfig
from meshtrain.config.run import RunConfig
from meshtrain.config.schema import json_schema, keys_of
from meshtrain.config.toml import dump_toml, load_run
from meshtrain.errors import UserError
from meshtrain.training.beginning import check_beginning
from meshtrain.training.directory import check_directory
from meshtrain.training.optim import build_learning_rate
from meshtrain.training.report import show_run
from meshtrain.training.resolve import ANY_NUMBER, resolve_run
from tests.mutations import Case, make_case
from tests.ranks import run_on_ranks

WORKERS = 2
SECONDS_FOR_ONE = 5.0
BYTES_FOR_ALL = 4 * 2**30
# The keys that `meshtrain check` does not use, once the file is read.
UNREAD = (
    *("optimizer", "learning_rate", "evaluation", "checkpoint", "logging", "watchdog", "bad_steps"),
    *("self_checks", "seed", "stop_after"),
)
READ_OF_DATA = ("sequence_length", "tokenizer", "documents", "pad_to_multiple_of", "cache_directory")
CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")
CONNECTIONS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "subprocess.Popen")
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.symlink", "os.link", "shutil.rmtree")
LONGEST_LINE = 2_000
PATHS = ("run_directory", "directory", "path", "train", "validation", "cache_directory")


class Watch:
    """Records forbidden events of a check (connect, write, start a process), and ends a hang."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)
        signal.signal(signal.SIGALRM, self._hang)
        signal.signal(signal.SIGPROF, self._hang)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CONNECTIONS or event in CHANGES or writes:
            self.seen.append(f"{event}{args!r:.200}")

    def _hang(self, *_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS_FOR_ONE} s")

    def __enter__(self) -> None:
        self.seen = []
        self.is_on = True
        # The limit is CPU time, because other work on the machine takes time, too.
        signal.setitimer(signal.ITIMER_PROF, SECONDS_FOR_ONE)
        signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS_FOR_ONE)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.is_on = False


@cache
def known_names() -> re.Pattern[str]:
    """Return a pattern that finds a key of a run, or the position in a file."""
    names = {key[-1] for kind in ("run", "plan") for key in keys_of(json_schema(kind))}
    return re.compile(
        "|".join([*sorted(map(re.escape, names)), "run\\.toml", "plan\\.toml", "command line", "tokenizer"])
    )


def faults_of(problems: tuple[str, ...]) -> list[str]:
    """Return the faults of message lines that a user would read."""
    faults = [] if problems else ["no problem is reported"]
    for line in problems:
        if CONTROL.search(line):
            faults.append(f"not one plain line: {line!r}")
        if len(line) > LONGEST_LINE:
            faults.append(f"{len(line)} characters: {line[:200]!r}")
        if not known_names().search(line):
            faults.append(f"names no key: {line!r}")
    return faults


checked: dict[str, tuple[str, ...]] = {}


def check_once(config: RunConfig, num_processes: int) -> tuple[str, ...]:
    """Return the result of `meshtrain check`; equal runs are checked once."""
    read: dict[str, Any] = {name: RunConfig.model_fields[name].default for name in UNREAD}
    read["data"] = DataConfig(**{name: getattr(config.data, name) for name in READ_OF_DATA})
    text = f"{num_processes} {dump_toml(config.model_copy(update=read))}"
    if text not in checked:
        try:
            check_directory(config)
            check_beginning(config)
            show_run(resolve_run(config, num_processes))
        except UserError as error:
            checked[text] = error.lines
        else:
            checked[text] = ()
    if checked[text] == ():
        build_learning_rate(config.learning_rate, config.optimizer.learning_rate, config.steps or ANY_NUMBER)
    return checked[text]


def try_case(case: Case, watch: Watch) -> tuple[str, list[str]]:
    """Return the result of a damaged run, and its faults."""
    for name, content in case.files().items():
        Path(name).write_bytes(content)
    try:
        with watch, redirect_stdout(io.StringIO()):
            config = load_run("run.toml", case.overrides)
            problems = check_once(config, case.num_processes)
    except UserError as error:
        return "refused", [*faults_of(error.lines), *watch.seen]
    except BaseException:  # noqa: BLE001 - the test looks for any exception
        return "crashed", [traceback.format_exc()]
    if problems:
        return "contradiction", [*faults_of(problems), *watch.seen]
    return "fits", [*absurdities(config.model_dump()), *watch.seen]


def absurdities(value: Any, key: tuple[str, ...] = ()) -> list[str]:
    """Return the keys of an accepted run with values out of any sensible range."""
    if isinstance(value, dict):
        return [fault for name, below in value.items() for fault in absurdities(below, (*key, str(name)))]
    if isinstance(value, list):
        return [fault for below in value for fault in absurdities(below, key)]
    if key == ("optimizer", "max_gradient_norm") and value > 0:
        # Infinity disables clipping, and so does any large number.
        return []
    is_absurd = isinstance(value, float) and not math.isfinite(value)
    is_absurd |= isinstance(value, int | float) and abs(value) > 2**63
    is_absurd |= isinstance(value, int | float) and any(part in key[-1] for part in ("dropout", "pdrop")) and value >= 1
    is_absurd |= isinstance(value, str) and key[-1] in PATHS and bool(CONTROL.search(value))
    is_absurd |= isinstance(value, str) and key[-1] in PATHS and "nosuch://" in value
    return [f"accepted: {key} = {value!r}"] if is_absurd else []


def try_cases(root: Path, number: int) -> tuple[dict[str, int], list[str]]:
    """Try the cases of this rank.

    Returns:
        How many ended how, and what was wrong.
    """
    place = root / os.environ["RANK"]
    place.mkdir()
    os.chdir(place)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + BYTES_FOR_ALL
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    watch, counts, faults = Watch(), dict.fromkeys(("fits", "contradiction", "refused", "crashed"), 0), []
    for seed in range(int(os.environ["RANK"]), number, WORKERS):
        case = make_case(seed)
        ending, found = try_case(case, watch)
        counts[ending] += 1
        faults += [f"{seed} ({case.name}; {case.what}): {fault}" for fault in found]
    return counts, faults


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [2_000, 10_000])
def test_damaged_runs_are_accepted_or_refused_with_plain_messages(tmp_path: Path, number: int) -> None:
    answers = run_on_ranks(WORKERS, try_cases, tmp_path, number, joins=False, timeout=900.0)
    faults = [fault for _, found in answers for fault in found]
    assert not faults, f"{len(faults)} of {number}, such as\n" + "\n".join(faults[:10])
    # Each kind of result occurs often enough to be significant.
    for ending in ("fits", "contradiction", "refused"):
        assert sum(counts[ending] for counts, _ in answers) > number // 100
