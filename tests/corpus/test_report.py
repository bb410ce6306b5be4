"""The report shows what happened to every document, on the screen and on a page."""

import re
from html.parser import HTMLParser

import pytest

from meshtrain.config.toml import load_corpus
from meshtrain.corpus.report.tables import report
from meshtrain.errors import DataError
from tests.corpus.preparations import prepare, texts, write_corpus_file, write_records


class Page(HTMLParser):
    """Records what a browser would load and draw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.bars = 0
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "rect"):
            self.open.append(tag)
        self.bars += tag == "rect"
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture
def file(tmp_path):
    good = [{"text": text} for text in texts(20)]
    bad = [
        {"text": f"<script>alert({number})</script> & [bold]", "url": "http://a.example/?<b>"} for number in range(5)
    ]
    write_records(tmp_path / "in.jsonl", good + bad)
    return write_corpus_file(tmp_path, sources=["in.jsonl"], clean={"minimum_tokens": 10}, split={"validation": 0.3})


def test_the_tables_show_counts_and_examples(tmp_path, file, capsys):
    prepare(file)
    capsys.readouterr()
    report(load_corpus(file))

    shown = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    assert ["read", "25", "25", "0"] in [row[:4] for row in rows]
    assert ["clean", "25", "20", "5"] in [row[:4] for row in rows]
    assert ["clean", "too short", "5", "http://a.example/?<b>", "<script>alert(0)</script> & [bold]"] in rows
    assert ["http://a.example/?<b>", "<script>alert(2)</script> & [bold]"] in rows
    assert "alert(3)" not in shown
    assert shown.splitlines()[-1] == f"Charts: {tmp_path}/out/report.html"


def test_the_page_is_valid_escaped_and_loads_nothing(tmp_path, file):
    prepare(file)
    report(load_corpus(file))

    text = (tmp_path / "out" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.links == []
    # There are four bars for the documents (the start and three steps), and one for the reason.
    assert page.bars == 5
    assert "<script>alert(0)</script> & [bold]" in page.words
    assert "<script>" not in text
    assert "clean: too short (5)" in page.words


def test_the_report_covers_only_complete_steps(tmp_path, file, capsys):
    with pytest.raises(DataError, match=f"^no step is complete in {tmp_path}/out; run `meshtrain corpus run` first$"):
        report(load_corpus(file))
    with pytest.raises(DataError):
        prepare(file, "clean.minimum_tokens=1000")
    report(load_corpus(file))

    assert "split" not in capsys.readouterr().out
