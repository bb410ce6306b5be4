"""What the parts have found: rows, a Markdown table and a JSON file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Row:
    """One check of a part.

    Attributes:
        part: its name.
        case: what was checked.
        status: whether it is as it should be.
        numbers: what was measured: name -> number, with its unit in the name.
        reason: why it failed or was skipped, in one line.
    """

    part: str
    case: str
    status: Status
    numbers: dict[str, float] = field(default_factory=dict)
    reason: str = ""


def write_report(folder: Path, machine: dict[str, Any], rows: list[Row]) -> None:
    """Write results.md and results.json."""
    content = {"machine": machine, "rows": [asdict(row) for row in rows]}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    lines += ["| part | case | result | measured |", "|---|---|---|---|"]
    lines += [f"| {row.part} | {row.case} | {shown_result(row)} | {shown_numbers(row)} |" for row in rows]
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def shown_result(row: Row) -> str:
    """Return the status with its reason."""
    # A bar would end the cell.
    return f"{row.status}: {row.reason}".replace("|", "/") if row.reason else row.status


def shown_numbers(row: Row) -> str:
    """Return the numbers, in four digits."""
    return ", ".join(f"{name} {value:,.4g}" for name, value in row.numbers.items())
