"""The coverage table as HTML with a filter, from what `meshtrain verify --models` has written."""

import html
import re


def rows_of(table: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the first table of a Markdown text."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    wrong = [row for row in rows if len(row) != len(header)]
    if wrong:
        raise ValueError(f"a row of the coverage table has {len(wrong[0])} cells, its header {len(header)}: {wrong[0]}")
    return [cell.strip() for cell in header], [[cell.strip() for cell in row] for row in rows]


def page(table: str) -> str:
    """Return the text before the table, and the table with a field that filters its rows."""
    header, rows = rows_of(table)
    before = table.partition("\n|")[0].partition("\n")[2].strip()
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"""{before}

<div class="filter">
<input type="search" id="coverage-filter" placeholder="Filter: a type, a class, or a word such as refused"
 aria-label="Filter the table">
<span id="coverage-count" role="status">{len(rows)} of {len(rows)}</span>
</div>
<table id="coverage">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>"""


def _cell(text: str) -> str:
    verdict, _, reason = text.partition(": ")
    if not reason:
        kind = "yes" if text.startswith("proven") else "name"
        return f'<td class="{kind}">{_soft_breaks(html.escape(text))}</td>'
    shown = html.escape(verdict)
    return f'<td class="no"><details><summary>{shown}</summary>{_code(html.escape(reason))}</details></td>'


def _soft_breaks(name: str) -> str:
    # A long class name may break before a capital.
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "<wbr>", name)


def _code(reason: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", reason)
