"""Draw docs/pictures/terminal-*.svg from the captured output of the quickstart.

Run `python -m docs.generate.terminal` after docs/pictures/quickstart.ansi has changed. That file
has lines of a real run, with the colors of the terminal.
"""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "pictures"
COLUMNS = 112
BASIC = [
    (0, 0, 0),
    (170, 0, 0),
    (0, 128, 0),
    (150, 110, 0),
    (0, 80, 180),
    (150, 0, 150),
    (0, 130, 130),
    (110, 110, 110),
]
THEMES = {
    "light": TerminalTheme((255, 255, 255), (31, 41, 55), BASIC, [(160, 160, 160), (190, 24, 93), *BASIC[2:]]),
    "dark": TerminalTheme((22, 27, 34), (201, 209, 217), BASIC, [(72, 79, 88), (249, 38, 114), *BASIC[2:]]),
}
# Of the template of rich: its font would be loaded from another host.
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", flags=re.DOTALL)
FONT = 'font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def draw(output: str, theme: TerminalTheme) -> str:
    """Return the output of a terminal as SVG, without anything from another host."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(output), overflow="fold")
    svg = console.export_svg(title="meshtrain", theme=theme, unique_id="terminal")
    svg = WEB_FONT.sub("", svg).replace("font-family: Fira Code, monospace", FONT)
    return re.sub(r"font-family: (?!ui-monospace)[^;]+;", f"{FONT};", svg)


def main() -> None:
    """Write a picture for each theme."""
    output = (PICTURES / "quickstart.ansi").read_text()
    for name, theme in THEMES.items():
        (PICTURES / f"terminal-{name}.svg").write_text(draw(output, theme))


if __name__ == "__main__":
    main()
