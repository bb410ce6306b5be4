"""A table, which the screen and a page show alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what it shows.
        columns: their names.
        rows: with a text for each column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without_empty_columns(self) -> Self:
        """Return the table without the columns that have no value in any row."""
        kept = [index for index in range(len(self.columns)) if any(row[index] for row in self.rows)]

        def chosen(row: Sequence[str]) -> tuple[str, ...]:
            return tuple(row[index] for index in kept)

        return replace(self, columns=chosen(self.columns), rows=tuple(map(chosen, self.rows)))
