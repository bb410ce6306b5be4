"""The page: one file without scripts and foreign resources, in which every text is escaped."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import mkdocs_hooks
from meshtrain.pictures.colors import GROUNDS, HUES, INKS, MUTED_INKS, contrast, ink_on
from meshtrain.pictures.page import Section, key_values, paragraph, table
from tests.pictures.pages import HOSTILE, page


class Elements(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_loads_and_runs_nothing() -> None:
    html = page().html()
    tags = {tag for tag, _ in Elements(html).found}
    assert not tags & {"script", "link", "img", "iframe", "b"}
    assert mkdocs_hooks.foreign_resources(html) == []
    assert "http" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) == {"#blue-hatch", "#amber-hatch", "#grey-hatch"}


def test_contents_link_to_the_sections() -> None:
    elements = Elements(page().html()).found
    links = [attributes["href"] for tag, attributes in elements if tag == "a"]
    anchors = [f"#{attributes['id']}" for tag, attributes in elements if tag == "h2"]
    assert links == anchors
    assert len(set(links)) == 6
    assert Section("Ünï", ()).anchor == "n"
    assert Section("…", ()).anchor == "section"


def test_drawings_are_accessible() -> None:
    elements = Elements(page().html()).found
    drawings = [attributes for tag, attributes in elements if tag == "svg"]
    assert len(drawings) > 10
    assert all(one.get("role") == "img" or one.get("aria-hidden") == "true" for one in drawings)
    scrolling = [attributes for _, attributes in elements if attributes.get("class") == "box"]
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in scrolling)


def test_texts_are_escaped() -> None:
    assert HOSTILE not in page().html()
    assert paragraph("`a <b>` and ` c") == "<p><code>a &lt;b&gt;</code> and ` c</p>"
    made = [table(HOSTILE, [HOSTILE], [[HOSTILE]]), key_values({HOSTILE: HOSTILE})]
    for html in made:
        root = ElementTree.fromstring(f"<p>{html}</p>")
        assert not [*root.iter("script"), *root.iter("b")]
        assert "".join(root.itertext()).count(HOSTILE) >= 2


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    html = table("T", ["name", "number", "size"], [("a", 1, "1.5 GiB"), ("b", "2,000", "")])
    assert '<th scope="col" class="text">name' in html
    assert '<th scope="col" class="number">number' in html
    assert '<td class="number">1.5 GiB</td>' in html
    assert "<td>a</td>" in html
    assert "number" not in table("T", ["checksum", "list"], [("9cc2d326", "0, 1, 2, ..."), ("12", "3")])


def test_colors_contrast_with_their_ground() -> None:
    for index, ground in enumerate(GROUNDS):
        assert contrast(INKS[index], ground) > 12
        assert contrast(MUTED_INKS[index], ground) > 4.5
        for name, values in HUES.items():
            if name != "faint":
                assert contrast(values[index], ground) >= 2.9, name
            assert contrast(values[index], ink_on(values[index])) >= 4.5, name
