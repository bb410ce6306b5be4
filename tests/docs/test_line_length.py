"""Lines of prose have at most 100 characters, also where ruff does not look (its rule is W505)."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

LONGEST = 100
COMMENTED = sorted(
    path
    for place in ("*", "launch/**/*", "parallel_plans/**/*")
    for path in ROOT.glob(place)
    if path.suffix in (".toml", ".sh", ".yaml", ".yml")
)
# Tables, pictures, HTML and options of mkdocstrings cannot be wrapped, nor a line that is one link.
NOT_PROSE = re.compile(r"\||!\[|\s*<|\s{4,}(members|options):|(\S+ )?\[[^]]*\]\([^)]*\)\S*$")


def long_comments(text: str) -> Iterator[str]:
    """Yield the comments of a line of their own that are too long."""
    yield from (line for line in text.splitlines() if len(line) > LONGEST and line.lstrip().startswith("#"))


def long_prose(text: str) -> Iterator[str]:
    """Yield the lines of Markdown that are too long and could be wrapped."""
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and len(line) > LONGEST and not NOT_PROSE.match(line):
            yield line


@pytest.mark.parametrize("path", COMMENTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_are_short(path: Path) -> None:
    assert [*long_comments(path.read_text())] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_is_short(path: Path) -> None:
    assert [*long_prose(path.read_text())] == []


def test_long_lines_are_found() -> None:
    words, link = "word " * 20 + "end", f"[a page](https://example.com/{'x' * LONGEST})"
    assert [*long_comments(f"# {words}\nx = 1\n  # {words}\ny = '{words}'")] == [f"# {words}", f"  # {words}"]
    assert [*long_prose(f"{words}\n```text\n{words}\n```\n| {words} |\n- {words}\n{link}\n- {link}.")] == [
        words,
        f"- {words}",
    ]
