"""Preparation of a corpus: the steps of a corpus file run one after another.

Each step reads the shards that the step before has written.
"""

import json
import re
import shutil
import time
from pathlib import Path

from meshtrain import console
from meshtrain.config.corpus import CorpusConfig
from meshtrain.config.reading import shown_path
from meshtrain.corpus.steps.chain import build_chain
from meshtrain.corpus.steps.executors import WORKERS, run_pass, total_counts
from meshtrain.corpus.steps.shards import remove_partials
from meshtrain.corpus.steps.shuffle import PARTS
from meshtrain.corpus.steps.step import READ, Counts, Step, counting_pass
from meshtrain.errors import DataError
from meshtrain.runtime.lifetime import wait_for_holders
from meshtrain.runtime.lock import locked

STEP_DIRECTORY = re.compile(r"\d\d-\w+")


def run_chain(config: CorpusConfig, *, only: str | None = None, redo: str | None = None) -> None:
    """Run the steps of a corpus file, or one of them. Complete steps are skipped.

    Args:
        config: the corpus file, with absolute paths.
        only: the step to run. The steps before it must be complete, except `read`, which runs too.
        redo: the step whose directory is removed first, with those of the steps after it.

    Raises:
        UserError: if the settings, the sources or a step are wrong.
    """
    directory = Path(config.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"directory: cannot write into {directory}: {error.strerror}", "choose another location"
        ) from error
    with locked(directory, f"directory = {shown_path(directory)}", "choose another location", DataError):
        steps = build_chain(config)
        _check_known(steps, "run", only)
        _check_known(steps, "redo", redo)
        if redo is not None:
            _remove_from(steps, redo)
        _check_no_others(directory, steps)
        entered: int | None = None
        for step in steps:
            if only in (None, step.name) or step.name == READ:
                counts = _run_step(step, entered, config)
            else:
                counts = _read_counts(step)
            entered = counts.kept
            if step.name == only:
                break
    following = next((later.name for later in steps[steps.index(step) + 1 :]), None)
    console.line(_next_command(step, counts, following))


def _run_step(step: Step, entered: int | None, config: CorpusConfig) -> Counts:
    step.directory.begin(step.name, step.settings)
    counts = step.directory.counts()
    if counts is not None:
        console.line(f"{summary(step.name, counts)}  (done before)")
    else:
        counts = _run_passes(step, entered, config)
        console.line(summary(step.name, counts))
    if not counts.kept:
        raise DataError(
            f"{step.name} kept none of {counts.entered:,} documents", f"see the reasons in {step.directory.dropped}"
        )
    return counts


def _run_passes(step: Step, entered: int | None, config: CorpusConfig) -> Counts:
    directory = step.directory
    wait_for_holders(directory.logs(WORKERS))
    remove_partials(directory.path)
    began = time.monotonic()
    passes = step.passes()
    logs = [directory.logs(f"{number}-{shard_pass.name}") for number, shard_pass in enumerate(passes)]
    for shard_pass, log in zip(passes, logs, strict=True):
        description = step.name if len(passes) == 1 else f"{step.name}: {shard_pass.name}"
        run_pass(shard_pass, log, config, description)
    step.check_unchanged()
    seconds = directory.add_seconds(time.monotonic() - began)
    if entered is None:
        entered = total_counts(logs[0])["in"]
    counts = _count_documents(step, entered, seconds, config)
    directory.write_counts(counts)
    return counts


def _count_documents(step: Step, entered: int, seconds: float, config: CorpusConfig) -> Counts:
    """Return the counts of what a step wrote, and check that no document is missing."""
    directory = step.directory
    counting = counting_pass(directory)
    run_pass(counting, directory.logs("count"), config, f"{step.name}: count", is_shown=False)
    found = total_counts(directory.logs("count"))
    dropped = {label.removeprefix("dropped: "): found[label] for label in found if label.startswith("dropped: ")}
    parts = {part: found[f"kept: {part}"] for part in PARTS if f"kept: {part}" in found}
    kept = found["kept: "] + sum(parts.values())
    if entered != kept + sum(dropped.values()):
        raise DataError(
            f"{step.name}: {entered:,} documents came in, but {kept:,} are kept and {sum(dropped.values()):,} "
            f"dropped; something else writes into {directory.path}, or a disk lost files",
            f"run again with --redo {step.name}",
        )
    by_number = dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))
    return Counts(entered, kept, by_number, parts, found["bytes"], seconds)


def summary(name: str, counts: Counts) -> str:
    """Return a line that says what a step did."""
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in counts.dropped.items())
    parts = ", ".join(f"{part} {number:,}" for part, number in counts.parts.items())
    lines = (
        f"{name:<12}{counts.entered:>12,} in {counts.kept:>12,} out",
        f"{sum(counts.dropped.values()):>10,} dropped{f' ({reasons})' if reasons else ''}",
        *([parts] if parts else []),
        f"{counts.documents_per_second:,.0f} documents/s",
    )
    return "  ".join(lines)


def _read_counts(step: Step) -> Counts:
    counts = step.directory.counts()
    if counts is None:
        raise DataError(f"{step.directory.path} is not complete", f"run `meshtrain corpus {step.name}` first")
    step.directory.begin(step.name, step.settings)
    return counts


def _check_known(steps: list[Step], what: str, name: str | None) -> None:
    names = [step.name for step in steps]
    if name is not None and name not in names:
        raise DataError(f"cannot {what} {name}: the file has no such step; it has {', '.join(names)}")


def _remove_from(steps: list[Step], redo: str) -> None:
    first = next(step for step in steps if step.name == redo).directory.path
    for path in sorted(first.parent.iterdir()):
        if STEP_DIRECTORY.fullmatch(path.name) and path.name[:2] >= first.name[:2]:
            console.line(f"Removing {shown_path(path)}")
            shutil.rmtree(path)


def _check_no_others(directory: Path, steps: list[Step]) -> None:
    known = {step.directory.path.name for step in steps}
    others = sorted(path.name for path in directory.iterdir() if STEP_DIRECTORY.fullmatch(path.name))
    for other in others:
        if other not in known:
            raise DataError(
                f"{directory} holds {other}, which is not a step of this file (it has {', '.join(sorted(known))})",
                "remove it, or set directory to a new location",
            )


def _next_command(step: Step, counts: Counts, following: str | None) -> str:
    directory = Path(shown_path(step.directory.path))
    if following is not None:
        return f"Done. The next step: meshtrain corpus {following} FILE"
    if step.name == "urls":
        return f"Done. The links are in {directory}; add a table [download] to fetch them"

    def source(part: str) -> str:
        endings = {path.name.partition(".")[2] for path in step.directory.shards()}
        return json.dumps([str(directory / part / f"*.{ending}") for ending in sorted(endings)])

    if not counts.parts:
        return f"Done. Train on it: meshtrain train RUN 'data.train={source('')}' data.validation=0.01"
    validation = f"'data.validation={source('validation')}'" if "validation" in counts.parts else ""
    return f"Done. Train on it: meshtrain train RUN 'data.train={source('train')}' {validation}".rstrip()
