"""The tables of schedules and of tensor styles, from the rows in the code."""

from meshtrain.config.schedules import SCHEDULES, Need
from meshtrain.parallel.tensor.styles import STYLES

MICROBATCHES: dict[Need, str] = {
    "any number": "any number",
    "one per stage": "at least as many as stages",
    "equal rounds": "equal rounds of at least pp each",
}


def schedules() -> str:
    """Return the table of pipeline schedules in Markdown."""
    lines = ["| Schedule | Stages per rank | Microbatches | Zero bubble |", "|---|---|---|---|"]
    for name, row in SCHEDULES.items():
        stages = "any number" if row.stages_per_rank is None else f"{row.stages_per_rank}{', in a V' * row.is_v}"
        bubble = "yes" if row.splits_backward else "no"
        lines.append(f"| `{name}` | {stages} | {MICROBATCHES[row.microbatches]} | {bubble} |")
    return "\n".join(lines)


def styles() -> str:
    """Return the table of tensor styles in Markdown."""
    lines = ["| Style | For | What happens |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.used_for} | {row.effect} |" for name, row in STYLES.items()]
    return "\n".join(lines)
