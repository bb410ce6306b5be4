"""The report: prints tables of what happened to the documents, and has the page written."""

from collections import defaultdict
from pathlib import Path

from meshtrain import console
from meshtrain.config.corpus import CorpusConfig
from meshtrain.config.reading import shown_path
from meshtrain.console import BYTES_PER_MB
from meshtrain.corpus.report.page import Example, StepReport, write_page
from meshtrain.corpus.steps.step import StepDirectory, read_dropped, step_directories
from meshtrain.errors import DataError

EXAMPLES = 3
"""Number of dropped documents that are shown for each reason of a step, from the first on."""
SHOWN_CHARACTERS = 100


def report(config: CorpusConfig) -> None:
    """Print what the complete steps of a corpus file did, and write `report.html` beside them.

    Raises:
        DataError: if no step is complete.
    """
    directory = Path(config.directory)
    steps = [
        StepReport(name, counts, _examples(step_directory))
        for name, step_directory in step_directories(config)
        if (counts := step_directory.counts()) is not None
    ]
    if not steps:
        raise DataError(f"no step is complete in {directory}", "run `meshtrain corpus run` first")
    _show_counts(directory, steps)
    _show_dropped(steps)
    page = directory / "report.html"
    write_page(page, shown_path(directory), steps)
    console.line(f"Charts: {shown_path(page)}")


def _show_counts(directory: Path, steps: list[StepReport]) -> None:
    rows = [
        (
            step.name,
            f"{step.counts.entered:,}",
            f"{step.counts.kept:,}",
            f"{sum(step.counts.dropped.values()):,}",
            f"{step.counts.num_bytes / BYTES_PER_MB:,.1f} MB",
            f"{step.counts.documents_per_second:,.0f}",
        )
        for step in steps
    ]
    console.table(shown_path(directory), ("step", "in", "out", "dropped", "size out", "documents/s"), rows)
    for step in steps:
        if step.counts.parts:
            parts = ", ".join(f"{part} {number:,}" for part, number in step.counts.parts.items())
            console.line(f"{step.name}: {parts}\n")


def _show_dropped(steps: list[StepReport]) -> None:
    rows = []
    for step in steps:
        for reason, number in step.counts.dropped.items():
            for position, example in enumerate(step.examples[reason]):
                heading = (step.name, reason, f"{number:,}") if position == 0 else ("", "", "")
                rows.append((*heading, example.name, _beginning(example.detail or example.text)))
    if rows:
        console.table("Dropped", ("step", "reason", "documents", "example", "detail or text"), rows)


def _beginning(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text[: 2 * SHOWN_CHARACTERS].split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def _examples(step_directory: StepDirectory) -> dict[str, list[Example]]:
    examples: defaultdict[str, list[Example]] = defaultdict(list)
    for record in read_dropped(step_directory):
        if len(found := examples[record["reason"]]) < EXAMPLES:
            name = record.get("url", record["id"])
            found.append(Example(str(name), record["text"], str(record.get("detail", ""))))
    return examples
