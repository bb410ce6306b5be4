"""The page of a trial: the loss over the learning rate, with what is proposed."""

from functools import partial

from meshtrain.pictures.line_chart import Event, LineChart, Series, draw_line_chart, events_legend
from meshtrain.pictures.page import Page, Section, figure, paragraph, shown_table
from meshtrain.pictures.tables import Table
from meshtrain.profiling.report.tables import MOST_ROWS
from meshtrain.tuning.rates.proposal import Proposal, Trial


def rates_table(trial: Trial, proposal: Proposal) -> Table:
    """Return a few of the rates, spread evenly, with their losses."""
    number = len(trial.rates)
    rows = min(number, MOST_ROWS)
    places = [round(row * (number - 1) / max(1, rows - 1)) for row in range(rows)]
    averages = {place: f"{loss:.4f}" for place, loss in enumerate(proposal.smooth)}
    return Table(
        "Learning rates",
        ("learning rate", "loss", "averaged"),
        tuple((f"{trial.rates[it]:.1e}", f"{trial.losses[it]:.4f}", averages.get(it, "")) for it in places),
    )


def rates_page(trial: Trial, proposal: Proposal, name: str) -> str:
    """Return the page as HTML, in ASCII.

    Args:
        trial: what was tried.
        proposal: what it proposes.
        name: of the run.
    """
    chart = _chart(trial, proposal)
    first, *others = proposal.sentences()
    sections = (
        Section(
            "Loss",
            (
                paragraph(first, style="verdict" if proposal.steepest is not None else "verdict alarm"),
                *(paragraph(other, style="advice") for other in others),
                figure(partial(draw_line_chart, chart), note=events_legend(chart)),
            ),
        ),
        Section("Values", (shown_table(rates_table(trial, proposal)),)),
    )
    lead = f"{len(trial.rates)} steps with learning rates from {trial.rates[0]:.1e} to {trial.rates[-1]:.1e}."
    return Page(f"Learning rates of {name}", lead, sections).html().encode("ascii", "xmlcharrefreplace").decode()


def _chart(trial: Trial, proposal: Proposal) -> LineChart:
    proposed = {"Falls fastest": proposal.steepest, "A tenth of where it rises": proposal.below_rising}
    return LineChart(
        "Loss by learning rate",
        (
            Series("loss of a step", tuple(zip(trial.rates, trial.losses, strict=True))),
            Series("averaged", tuple(zip(trial.rates, proposal.smooth, strict=False))),
        ),
        unit="nats per token",
        position_name="learning rate",
        is_position_log=True,
        events=tuple(Event(rate, "proposal", f"{text}: {rate:.1e}") for text, rate in proposed.items() if rate),
    )
