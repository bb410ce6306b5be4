"""The code blocks of README.md and of the docs pages."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = {"python", "toml", "bash", "console", "text", "yaml"}
_BLOCK = re.compile(r"(?:<!-- toml: (?P<kind>[a-z ]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    `kind` is, for TOML, the file that the block is or is part of.
    """

    location: str
    language: str
    kind: str
    text: str


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in the languages, or in all languages."""
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in _BLOCK.finditer(content):
            line = content.count("\n", 0, match.start()) + 1
            location = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(location, match["language"], match["kind"] or "", match["text"]))
    return [block for block in found if not languages or block.language in languages]


def page_blocks(page: Path) -> list[tuple[str, Block]]:
    """Return the blocks of a page in order, each with the text between it and the one before."""
    content, found, end = page.read_text(), [], 0
    for match in _BLOCK.finditer(content):
        block = Block(str(page), match["language"], match["kind"] or "", match["text"])
        found.append((content[end : match.start()], block))
        end = match.end()
    return found


def commands(block: Block) -> list[list[str]]:
    """Return the commands of a block as words, without comments, variables and redirections."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language != "bash":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def output_lines(block: Block) -> list[str]:
    """Return the lines that a command has printed."""
    return [line for line in block.text.splitlines() if not line.startswith("$ ")]
