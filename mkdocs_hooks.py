"""Hooks of mkdocs: fill generated parts and drawings into the pages.

A page marks the place with `<!-- generated: NAME -->` or `<!-- drawing: NAME -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

from docs.generate import commands, configuration, coverage, plan_tables

ROOT = Path(__file__).parent
DOCS = ROOT / "docs"
GENERATED: dict[str, Callable[[], str]] = {
    "run": lambda: configuration.page("run"),
    "plan": lambda: configuration.page("plan"),
    "corpus": lambda: configuration.page("corpus"),
    "commands": commands.page,
    "schedules": plan_tables.schedules,
    "styles": plan_tables.styles,
    "coverage": lambda: coverage.page((ROOT / "parallel_plans" / "coverage.md").read_text()),
    "changes": lambda: (ROOT / "CHANGELOG.md").read_text().partition("\n")[2],
}
RESOURCES = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\b(?:src|srcset)=["'](?P<tag>(?:https?:)?//[^"']+)"""
    r"""|<link\b(?=[^>]*\brel=["'](?:stylesheet|preload|preconnect|icon))[^>]*?\bhref=["'](?P<link>(?:https?:)?//[^"']+)"""
    r"""|@import\s+["'](?P<sheet>(?:https?:)?//[^"']+)|url\(["']?(?P<url>(?:https?:)?//[^"')]+)"""
)
PLACE = re.compile(r"^<!-- (generated|drawing): ([\w-]+) -->$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill the marked places of a page."""
    return PLACE.sub(_content, markdown)


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    """Refuse a site that loads anything from another host.

    It would not work offline, and it would tell who reads.

    Raises:
        PluginError: naming the file and the address.
    """
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for address in foreign_resources(path.read_text()):
                raise PluginError(f"{path.relative_to(config.site_dir)} loads {address}; put it into docs/assets")


def foreign_resources(text: str) -> list[str]:
    """Return the addresses of other hosts from which HTML or CSS loads something. Links do not."""
    return [match[match.lastgroup or 0] for match in RESOURCES.finditer(text)]


def _content(place: re.Match[str]) -> str:
    kind, name = place.groups()
    if kind == "drawing":
        return _drawing(name)
    if name not in GENERATED:
        raise PluginError(f"nothing generates {name!r}; there are {', '.join(GENERATED)}")
    return GENERATED[name]()


def _drawing(name: str) -> str:
    # Inline, so that the colors of the page reach it: they differ between light and dark.
    svg = (DOCS / "drawings" / f"{name}.svg").read_text().strip()
    return f'<figure class="drawing">\n{svg}\n</figure>'
