"""Downloading from a local site that has every kind of page."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from meshtrain.config.corpus import DownloadConfig
from meshtrain.corpus.web.download import Journal
from meshtrain.corpus.web.extractor import Extractor
from meshtrain.corpus.web.fetch import Fetcher
from meshtrain.corpus.web.responses import Page, PageError, parse_retry_after
from meshtrain.errors import DataError
from tests.corpus.preparations import counts_of, prepare, read_shards, write_corpus_file
from tests.corpus.server import Site, running_site

SPEED = {
    "total_seconds": 0.6,
    "first_retry_seconds": 0.01,
    "max_retries": 2,
    "max_megabytes": 1.0,
    "longest_wait_seconds": 1.0,
}
DROPPED = {
    "status/404": ("HTTP 4xx", "404 Not Found"),
    "status/503": ("HTTP 5xx", "503 Service Unavailable"),
    "status/501": ("HTTP 5xx", "501 Not Implemented"),
    "slow": ("time-out", "0.6 s"),
    "announced": ("too large", "50,000,000 bytes"),
    "huge/plain": ("too large", "more than 1,000,000 bytes"),
    "huge/packed": ("too large", "more than 1,000,000 bytes"),
    "private/1": ("robots.txt", "http://127.0.0.1:{port}/robots.txt does not allow it"),
    "redirect/private/1": ("robots.txt", "http://127.0.0.1:{port}/robots.txt does not allow it"),
    "redirect/loop": ("redirect loop", "http://127.0.0.1:{port}/redirect/loop"),
    "redirect/out": ("bad redirect", "ftp://x/"),
    "redirect/nowhere": ("bad redirect", "http://[::/ (Invalid IPv6 URL)"),
    "hops/9": ("too many redirects", "6, the last one to http://127.0.0.1:{port}/hops/3"),
    "type": ("wrong type", "application/pdf"),
    "long-wait": ("asked to wait too long", "3600 s (429 Too Many Requests)"),
    "empty": ("no text", "26 bytes of text/html"),
    "broken": ("connection", None),
}
KEPT = ["page/1", "page/2", "temporary/503", "temporary/429", "hops/3", "plain", "latin", "redirect/page/3"]


@pytest.fixture
def site():
    with running_site() as site:
        yield site


@pytest.fixture
def links(tmp_path):
    def write(urls):
        (tmp_path / "links.txt").write_text("".join(f"{url}\n" for url in urls))
        return write_corpus_file(tmp_path, urls={"lists": ["links.txt"]}, download=dict(SPEED, shards=2))

    return write


async def fetched(site: Site, path: str, **settings: object) -> Page | PageError:
    async with Fetcher(DownloadConfig(**{**SPEED, **settings}), 4) as fetcher:
        try:
            return await fetcher.fetch(site.url(path))
        except PageError as error:
            return error


def test_every_page_becomes_a_document_or_is_dropped_with_a_reason(tmp_path, site, links):
    nowhere = "http://127.0.0.1:9/page"
    prepare(links([*(site.url(path) for path in [*KEPT, *DROPPED]), nowhere]))

    out = tmp_path / "out" / "02-download"
    kept = {record["url"]: record for record in read_shards(out)}
    dropped = {record["url"]: record for record in read_shards(out / "dropped")}
    assert sorted(kept) == sorted(site.url(path) for path in KEPT)
    assert "Story 1. This is sentence 0 of a story" in kept[site.url("page/1")]["text"]
    assert "Home" not in kept[site.url("page/1")]["text"]
    assert kept[site.url("plain")]["text"] == "Plain text, wie schön."
    assert "Wie schön." in kept[site.url("latin")]["text"]
    assert "Story hopped." in kept[site.url("hops/3")]["text"]
    assert dropped.pop(nowhere)["reason"] == "connection"
    found = {url: (record["reason"], record["detail"]) for url, record in dropped.items()}
    expected = {site.url(path): DROPPED[path] for path in DROPPED}
    assert {url: reason for url, (reason, _) in found.items()} == {url: reason for url, (reason, _) in expected.items()}
    detailed = {url: (reason, detail.format(port=site.port)) for url, (reason, detail) in expected.items() if detail}
    assert {url: found[url] for url in detailed} == detailed
    reasons = Counter(reason for reason, _ in DROPPED.values())
    reasons["connection"] += 1
    assert counts_of(out)["dropped"] == reasons
    # There are two further attempts, but none after errors that are final.
    visits = {
        path: site.visits[path] for path in ("status/503", "slow", "broken", "status/404", "temporary/503", "page/1")
    }
    assert visits == {"status/503": 3, "slow": 3, "broken": 3, "status/404": 1, "temporary/503": 2, "page/1": 1}
    assert (site.visits["private/1"], site.visits["robots.txt"]) == (0, 1)
    assert site.agents == {"meshtrain"}


def test_simultaneous_requests_stay_within_the_limits(tmp_path, site, links):
    file = links([site.url(f"page/{number}", host) for number in range(12) for host in ("127.0.0.1", "localhost")])

    prepare(file, "download.concurrent_per_host=2", "download.respect_robots=false")
    per_host = site.most_active
    site.most_active = 0
    prepare(
        file,
        "download.concurrent_per_host=10",
        "download.concurrent=3",
        f"directory={tmp_path}/again",
        "download.shards=1",
        "download.respect_robots=false",
    )

    assert per_host in (2, 4)
    assert site.most_active == 3
    assert site.visits["robots.txt"] == 0
    assert sum(site.visits.values()) == 48


def test_the_remaining_links_of_a_host_that_never_answers_are_dropped(tmp_path, site, links):
    nowhere = [f"http://127.0.0.1:9/{number}" for number in range(9)]
    prepare(links([*nowhere, site.url("page/1")]), "download.concurrent_per_host=1")

    assert counts_of(tmp_path / "out" / "02-download")["dropped"] == {"connection": 5, "host does not answer": 4}


@pytest.mark.parametrize(
    ("robots", "agent", "reason"),
    [
        ((404, ""), "meshtrain", None),
        ((503, ""), "meshtrain", "robots.txt"),
        ((200, "User-agent: rude\nDisallow: /\n"), "meshtrain", None),
        ((200, "User-agent: rude\nDisallow: /\n"), "rude/1.0", "robots.txt"),
        ((200, "User-agent: *\nCrawl-delay: 100\n"), "meshtrain", "asked to wait too long"),
        ((200, "\x00\xff nonsense"), "meshtrain", None),
    ],
)
def test_robots_txt_is_respected(site, robots, agent, reason):
    site.robots = robots
    answer = asyncio.run(fetched(site, "page/1", user_agent=agent))

    assert (answer.reason if isinstance(answer, PageError) else None) == reason
    assert site.visits["page/1"] == (1 if reason is None else 0)


def test_the_crawl_delay_of_robots_txt_is_kept(site):
    site.robots = (200, "User-agent: *\nCrawl-delay: 0.2\n")

    async def fetch_all() -> None:
        async with Fetcher(DownloadConfig(**SPEED, concurrent_per_host=3), 4) as fetcher:
            await asyncio.gather(*(fetcher.fetch(site.url(f"page/{number}")) for number in range(4)))

    start = time.monotonic()
    asyncio.run(fetch_all())

    assert 0.6 <= time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("7", 7), ("soon", 0), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("", 0)],
)
def test_retry_after_is_parsed(header, seconds):
    assert parse_retry_after(header) == seconds


def test_retry_after_may_be_a_date():
    assert 10**8 < parse_retry_after("Fri, 31 Dec 2100 23:59:59 GMT") < 10**10


BROKEN_EXTRACTION = """
import sys, time
from meshtrain.corpus.web.extraction import READY, receive, send
send(sys.stdout.buffer, READY)
while (charset := receive(sys.stdin.buffer)) is not None:
    body = receive(sys.stdin.buffer)
    if b"hang" in body: time.sleep(60)
    if b"crash" in body: sys.exit(7)
    send(sys.stdout.buffer, b'"text of ' + body + b'"')
"""


def test_a_page_that_breaks_the_extraction_does_not_affect_others(tmp_path):
    async def extract_all(bodies: list[bytes]) -> list[str]:
        answers = []
        async with Extractor(1.0, tmp_path / "log", (sys.executable, "-c", BROKEN_EXTRACTION)) as extractor:
            for body in bodies:
                try:
                    answers.append(await extractor.text_of(Page(body, "text/html", None)))
                except PageError as error:
                    answers.append(f"{error.reason}: {error.detail}")
        return answers

    assert asyncio.run(extract_all([b"one", b"hang", b"two", b"crash", b"three"])) == [
        "text of one",
        "extraction time-out: 1 s",
        "text of two",
        f"extraction crash: exit code 7, see {tmp_path}/log",
        "text of three",
    ]


@pytest.mark.parametrize("charset", ["idna", "undefined", "base64", "no-such", None])
def test_plain_text_with_an_unusable_character_set_is_read_as_utf8(tmp_path, charset):
    async def extract() -> str:
        async with Extractor(1.0, tmp_path / "log") as extractor:
            return await extractor.text_of(Page(b"text \xff", "text/plain", charset))

    assert asyncio.run(extract()) == "text \ufffd"


def test_an_unpaired_surrogate_in_plain_text_is_replaced(tmp_path):
    async def extract() -> str:
        async with Extractor(1.0, tmp_path / "log") as extractor:
            return await extractor.text_of(Page(b"text \\ud800", "text/plain", "unicode_escape"))

    assert asyncio.run(extract()) == "text ?"


def test_an_extraction_process_that_does_not_start_is_an_error(tmp_path):
    async def extract() -> None:
        async with Extractor(1.0, tmp_path / "log", (sys.executable, "-c", "print(1 / 0)")) as extractor:
            await extractor.text_of(Page(b"", "text/html", None))

    with pytest.raises(DataError, match=f"^the process that extracts text does not start; see {tmp_path}/log$"):
        asyncio.run(extract())
    assert "ZeroDivisionError" in (tmp_path / "log").read_text()


def test_an_incomplete_line_of_a_journal_is_cut_off(tmp_path):
    path = tmp_path / "work" / "00000.journal"
    journal = Journal(path)
    journal.add(3, {"text": "drei\n"})
    journal.add(0, {"reason": "time-out", "detail": ""})
    journal.close()
    complete = path.read_bytes()
    path.write_bytes(complete + complete[:20])

    again = Journal(path)
    assert [position in again for position in range(4)] == [True, False, False, True]
    again.add(1, {"text": "eins"})
    assert [again.read(position).get("text") for position in (3, 1, 0)] == ["drei\n", "eins", None]
    again.close()
    assert path.read_bytes().startswith(complete)


def test_no_page_is_fetched_twice_after_a_kill(tmp_path, site, links):
    urls = [site.url(f"page/{number}") for number in range(40)]
    file = links(urls)
    command = [
        sys.executable,
        "-m",
        "meshtrain",
        "corpus",
        "run",
        str(file),
        "workers=2",
        "download.concurrent_per_host=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path.cwd())
    journals = tmp_path / "out" / "02-download" / "work"
    done: set[int] = set()
    while len(done) < 10 and process.poll() is None:
        time.sleep(0.02)
        lines = [line for path in journals.glob("*.journal") for line in path.read_bytes().splitlines(keepends=True)]
        done = {json.loads(line)["position"] for line in lines if line.endswith(b"\n")}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.3)
    before = site.visits.copy()
    lines = [line for path in journals.glob("*.journal") for line in path.read_bytes().splitlines(keepends=True)]
    done = {json.loads(line)["position"] for line in lines if line.endswith(b"\n")}
    assert 10 <= len(done) < 40

    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=Path.cwd())

    later = site.visits - before
    assert {path for path in later if path != "robots.txt"} == {f"page/{number}" for number in set(range(40)) - done}
    assert [record["url"] for record in read_shards(tmp_path / "out" / "02-download")] == urls
