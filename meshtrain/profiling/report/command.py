"""What `meshtrain report` does."""

from pathlib import Path

from meshtrain import console
from meshtrain.config.reading import shown_path
from meshtrain.data.cache import write_atomically
from meshtrain.errors import UserError, reason_of
from meshtrain.profiling.report.comparison import comparison
from meshtrain.profiling.report.page import report_page
from meshtrain.profiling.report.recorded import read_run_directory
from meshtrain.profiling.report.tables import key_figures, tables


def show_report(directory: Path, html: Path | None) -> None:
    """Print what a run did, and write a page of it.

    Args:
        directory: the run directory.
        html: the page to write, if any.

    Raises:
        UserError: if the run directory cannot be read, or the page cannot be written.
    """
    run = read_run_directory(directory)
    console.table("Run", ("directory", shown_path(directory)), key_figures(run).items())
    if run.failure is not None:
        for text in run.failure.lines():
            console.line(text)
    for table in [*tables(run), *comparison(run)]:
        console.table(table.title, table.columns, table.rows)
    if html is not None:
        try:
            write_atomically(html, report_page(run))
        except OSError as error:
            raise UserError(f"--html: {html} cannot be written: {reason_of(error)}", "choose another file") from error
        console.line(f"Page: {shown_path(html)}")
