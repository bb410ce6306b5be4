"""Running the steps of a corpus file, one after another, each on what the one before has written."""

import json
import re
import shutil
import time
from pathlib import Path

from meshtrain import console
from meshtrain.config.corpus import CorpusConfig
from meshtrain.config.reading import shown
from meshtrain.corpus.steps.chain import build_chain
from meshtrain.corpus.steps.executors import WORKERS, run_pass, total_counts
from meshtrain.corpus.steps.shards import remove_partials
from meshtrain.corpus.steps.shuffle import PARTS
from meshtrain.corpus.steps.step import READ, Counts, Step, counting_pass
from meshtrain.errors import DataError
from meshtrain.runtime.lifetime import wait_for_holders
from meshtrain.runtime.lock import locked

DIRECTORY_OF_A_STEP = re.compile(r"\d\d-\w+")


def run_chain(config: CorpusConfig, *, only: str | None = None, redo: str | None = None) -> None:
    """Run the steps of a corpus file, or one of them; what is complete already is skipped.

    Args:
        config: with absolute paths.
        only: the step to run; what it reads must be complete. The sources are read before the first step.
        redo: a step whose directory is removed first, with all that follow.

    Raises:
        UserError: what is wrong with the configuration, the sources or a step.
    """
    directory = Path(config.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"directory: cannot write into {directory}: {error.strerror}; choose another place") from error
    with locked(directory, f"directory = {shown(directory)}", "choose another place", DataError):
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
                counts = _complete(step)
            entered = counts.kept
            if step.name == only:
                break
    following = next((later.name for later in steps[steps.index(step) + 1 :]), None)
    console.line(_next_command(step, counts, following))


def _run_step(step: Step, entered: int | None, config: CorpusConfig) -> Counts:
    step.place.begin(step.name, step.words)
    counts = step.place.counts()
    if counts is not None:
        console.line(f"{summary(step.name, counts)}  (done before)")
    else:
        counts = _work(step, entered, config)
        console.line(summary(step.name, counts))
    if not counts.kept:
        raise DataError(f"{step.name} kept none of {counts.entered:,} documents; look at {step.place.dropped}")
    return counts


def _work(step: Step, entered: int | None, config: CorpusConfig) -> Counts:
    place = step.place
    wait_for_holders(place.logs(WORKERS))
    remove_partials(place.directory)
    began = time.monotonic()
    stages = step.stages()
    logs = [place.logs(f"{number}-{stage.name}") for number, stage in enumerate(stages)]
    for stage, log in zip(stages, logs, strict=True):
        run_pass(stage, log, config, step.name if len(stages) == 1 else f"{step.name}: {stage.name}")
    step.check_unchanged()
    seconds = place.add_seconds(time.monotonic() - began)
    counting = counting_pass(place)
    run_pass(counting, place.logs("count"), config, f"{step.name}: count", is_shown=False)
    found = total_counts(place.logs("count"))
    if entered is None:
        entered = total_counts(logs[0])["in"]
    dropped = {label.removeprefix("dropped: "): found[label] for label in found if label.startswith("dropped: ")}
    parts = {part: found[f"kept: {part}"] for part in PARTS if f"kept: {part}" in found}
    kept = found["kept: "] + sum(parts.values())
    if entered != kept + sum(dropped.values()):
        raise DataError(
            f"{step.name}: {entered:,} documents came in, but {kept:,} are kept and {sum(dropped.values()):,} dropped; "
            f"something else writes into {place.directory}, or a disk lost files: add --redo {step.name}"
        )
    by_number = dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))
    counts = Counts(entered, kept, by_number, parts, found["bytes"], seconds)
    place.write_counts(counts)
    return counts


def summary(name: str, counts: Counts) -> str:
    """Say in a line what a step did."""
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in counts.dropped.items())
    parts = ", ".join(f"{part} {number:,}" for part, number in counts.parts.items())
    lines = (
        f"{name:<12}{counts.entered:>12,} in {counts.kept:>12,} out",
        f"{sum(counts.dropped.values()):>10,} dropped{f' ({reasons})' if reasons else ''}",
        *([parts] if parts else []),
        f"{counts.documents_per_second:,.0f} documents/s",
    )
    return "  ".join(lines)


def _complete(step: Step) -> Counts:
    counts = step.place.counts()
    if counts is None:
        raise DataError(f"{step.place.directory} is not complete; run `meshtrain corpus {step.name}` first")
    step.place.begin(step.name, step.words)
    return counts


def _check_known(steps: list[Step], what: str, name: str | None) -> None:
    names = [step.name for step in steps]
    if name is not None and name not in names:
        raise DataError(f"cannot {what} {name}: the file has no such step; it has {', '.join(names)}")


def _remove_from(steps: list[Step], redo: str) -> None:
    first = next(step for step in steps if step.name == redo).place.directory
    for path in sorted(first.parent.iterdir()):
        if DIRECTORY_OF_A_STEP.fullmatch(path.name) and path.name[:2] >= first.name[:2]:
            console.line(f"Removing {shown(path)}")
            shutil.rmtree(path)


def _check_no_others(directory: Path, steps: list[Step]) -> None:
    known = {step.place.directory.name for step in steps}
    others = sorted(path.name for path in directory.iterdir() if DIRECTORY_OF_A_STEP.fullmatch(path.name))
    for other in others:
        if other not in known:
            raise DataError(
                f"{directory} holds {other}, which is no step of this file (it has {', '.join(sorted(known))}); "
                "remove it, or set directory to a new place"
            )


def _next_command(step: Step, counts: Counts, following: str | None) -> str:
    directory = Path(shown(step.place.directory))
    if following is not None:
        return f"Done. The next step: meshtrain corpus {following} FILE"
    if step.name == "urls":
        return f"Done. The links are in {directory}; add a table [download] to fetch them"

    def source(part: str) -> str:
        endings = {path.name.partition(".")[2] for path in step.place.shards()}
        return json.dumps([str(directory / part / f"*.{ending}") for ending in sorted(endings)])

    if not counts.parts:
        return f"Done. Train on it: meshtrain train RUN 'data.train={source('')}' data.validation=0.01"
    validation = f"'data.validation={source('validation')}'" if "validation" in counts.parts else ""
    return f"Done. Train on it: meshtrain train RUN 'data.train={source('train')}' {validation}".rstrip()
