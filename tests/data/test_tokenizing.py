"""Tokenizing by many processes and after kills: the bytes are always the same."""

import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet
import pytest

from meshtrain.data.cache import Cache
from meshtrain.data.text import chunks
from meshtrain.data.text.corpus import Corpus
from meshtrain.data.text.sources import find_files
from meshtrain.data.tokens import tokenizing, workers
from meshtrain.data.tokens.journal import JOURNAL, Job
from meshtrain.data.tokens.token_file import TRAIN, VALIDATION
from meshtrain.data.tokens.tokenizing import tokenize
from meshtrain.errors import DataError
from tests.data.corpora import byte_tokenizer, read_pieces, write_lines

# A fork would inherit broken threads of tokenizers.
context = multiprocessing.get_context("spawn")
KINDS = ("a.jsonl", "b.jsonl.gz", "c.txt", "d.parquet", "e.txt")


@pytest.fixture(scope="module")
def corpus_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of every kind; some texts are bad, some empty, and one is long."""
    directory = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    texts = [f"document {number}\n" + "some words of it\n" * rng.randint(0, 100) for number in range(300)]
    write_lines(directory / "a.jsonl", texts)
    with (directory / "a.jsonl").open("a") as stream:
        stream.write('broken\n{"text": ""}\n')
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(write_lines(directory / "lines", texts).read_bytes()))
    (directory / "lines").unlink()
    (directory / "c.txt").write_text("one long document\n" * 70_000)
    arrow.parquet.write_table(arrow.table({"text": [*texts, None, ""]}), directory / "d.parquet", row_group_size=500)
    (directory / "e.txt").write_text("short")
    return directory


def job_of(directory: Path, cache: Cache, *, num_workers: int = 0, **options) -> Job:
    files = tuple(find_files([f"{directory}/{name}" for name in KINDS], key="data.train"))
    corpus = Corpus(files, tuple(file.path.name for file in files), **({"on_bad_record": "skip"} | options))
    return Job(corpus, byte_tokenizer(cache), "Tokenizing", num_workers=num_workers)


def made(directory: Path, job: Job) -> dict[str, tuple[bytes, bytes, dict]]:
    """Tokenize, and return the content of the files."""
    directory.mkdir(exist_ok=True)
    tokenize(directory, job=job)
    return {part: content_of(directory / part) for part in job.parts}


def content_of(part: Path) -> tuple[bytes, bytes, dict]:
    counts = json.loads((part / "counts.json").read_text())
    return (part / "tokens.bin").read_bytes(), (part / "documents.bin").read_bytes(), counts


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def expected(corpus_directory: Path, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return what one process writes without a kill."""
    return made(tmp_path_factory.mktemp("expected"), job_of(corpus_directory, cache, held_out=0.1))


def test_tokens_equal_those_of_the_documents(corpus_directory, cache, expected, tmp_path):
    files = [corpus_directory / name for name in KINDS]
    pieces, reader = read_pieces(*files, on_bad_record="skip", held_out=0.1)

    for part, is_held_out in ((TRAIN, False), (VALIDATION, True)):
        # One token per byte, and one at the end.
        text = "".join(piece.text + "\0" * piece.ends_document for piece in pieces if piece.is_held_out is is_held_out)
        assert expected[part][2]["documents"] == text.count("\0")
        assert expected[part][2]["tokens"] == len(text)
        assert len(expected[part][0]) == 2 * len(text)
    assert (expected[TRAIN][2]["skipped_records"], expected[TRAIN][2]["empty_documents"]) == (2, 2)
    assert (reader.skipped_records, reader.empty_documents) == (2, 2)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split a small corpus into many blocks."""
    for module in (tokenizing, workers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 14)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_any_number_of_workers_writes_the_same_bytes(corpus_directory, cache, expected, tmp_path, num_workers):
    assert made(tmp_path / "out", job_of(corpus_directory, cache, num_workers=num_workers, held_out=0.1)) == expected


def tokenize_elsewhere(directory: Path, job: Job) -> None:
    tokenizing.SECONDS_BETWEEN_ENTRIES = 0.0
    tokenizing.BLOCK_BYTES = workers.BLOCK_BYTES = 1 << 15
    chunks.CHUNK_BYTES = 1 << 14
    tokenize(directory, job=job)


def wait_until(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def position_in(directory: Path) -> list[int]:
    """Return the position in the journal; [-1] if there is none yet."""
    try:
        return json.loads((directory / JOURNAL).read_text())["position"]
    except FileNotFoundError:
        return [-1]


def kill_after_next_entry(directory: Path, job: Job) -> list[int]:
    before = position_in(directory)
    process = context.Process(target=tokenize_elsewhere, args=(directory, job))
    process.start()
    wait_until(lambda: position_in(directory) > before or not process.is_alive())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return position_in(directory)


def test_killed_job_resumes_and_writes_the_same_bytes(corpus_directory, cache, expected, tmp_path, capsys):
    directory = tmp_path / "out"
    directory.mkdir()

    places = [
        kill_after_next_entry(directory, job_of(corpus_directory, cache, num_workers=workers, held_out=0.1))
        for workers in (0, 2, 0, 1)
    ]
    capsys.readouterr()
    ended = made(directory, job_of(corpus_directory, cache, held_out=0.1))

    assert places == sorted(places)
    assert len({tuple(place) for place in places}) == len(places)
    assert ended == expected
    # It resumed where it stopped.
    assert not capsys.readouterr().out.startswith("Tokenizing  0.0/")
    assert not (directory / JOURNAL).exists()


def test_journal_of_another_job_is_ignored(corpus_directory, cache, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    kill_after_next_entry(directory, job_of(corpus_directory, cache, held_out=0.1))
    other = job_of(corpus_directory, cache)

    assert made(directory, other) == made(tmp_path / "fresh", other)
    assert not (directory / VALIDATION).exists()


def test_journal_beyond_the_files_is_ignored(corpus_directory, cache, expected, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    job = job_of(corpus_directory, cache, held_out=0.1)
    kill_after_next_entry(directory, job)
    os.truncate(directory / TRAIN / "tokens.bin", 10)

    assert made(directory, job) == expected


def test_skipping_a_bad_record_resumes_the_failed_job(corpus_directory, cache, tmp_path, capsys):
    directory = tmp_path / "out"
    with pytest.raises(DataError, match=f"{corpus_directory}/a.jsonl, line 301: not JSON"):
        made(directory, job_of(corpus_directory, cache, on_bad_record="fail"))
    capsys.readouterr()

    ended = made(directory, job_of(corpus_directory, cache))

    assert ended == made(tmp_path / "fresh", job_of(corpus_directory, cache))


def test_job_that_refuses_bad_records_does_not_resume_one_that_skipped_them(corpus_directory, cache, tmp_path):
    corpus = shutil.copytree(corpus_directory, tmp_path / "corpus")
    skipping, strict = (job_of(corpus, cache, on_bad_record=policy) for policy in ("skip", "fail"))
    (corpus / "e.txt").rename(tmp_path / "e.txt")
    with pytest.raises(DataError, match=f"cannot read {corpus}/e.txt"):
        made(tmp_path / "out", skipping)
    assert json.loads((tmp_path / "out" / JOURNAL).read_text())["skipped_records"] == 2
    (tmp_path / "e.txt").rename(corpus / "e.txt")

    with pytest.raises(DataError, match=f"{corpus}/a.jsonl, line 301: not JSON"):
        tokenize(tmp_path / "out", job=strict)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("limit", [1, 100, 299, 300, 301, 600, 601, 602])
def test_only_the_first_documents_are_tokenized(corpus_directory, cache, expected, tmp_path, limit):
    # Records beyond the limit are not read, so a bad one there does not matter.
    policy = "fail" if limit <= 300 else "skip"

    tokens, documents, counts = made(
        tmp_path / "out", job_of(corpus_directory, cache, num_documents=limit, on_bad_record=policy)
    )[TRAIN]

    assert counts["documents"] == limit
    assert counts["skipped_records"] == (limit > 300)
    whole = made(tmp_path / "whole", job_of(corpus_directory, cache))[TRAIN] if limit == 601 else None
    if whole:
        assert whole[0].startswith(tokens)
        assert whole[1].startswith(documents)


def test_workers_end_with_their_parent(corpus_directory, cache, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    process = context.Process(
        target=tokenize_elsewhere, args=(directory, job_of(corpus_directory, cache, num_workers=2))
    )
    process.start()
    wait_until(lambda: position_in(directory) > [-1])
    workers = children_of(process.pid)
    assert len([worker for worker in workers if "encoding_worker" in command_of(worker)]) == 2

    os.kill(process.pid, signal.SIGKILL)
    process.join()

    wait_until(lambda: not any("encoding_worker" in command_of(worker) for worker in workers))


def test_killed_worker_is_reported(corpus_directory, cache, tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    problems = context.Queue()
    job = job_of(corpus_directory, cache, num_workers=1)
    process = context.Process(target=send_problem, args=(directory, job, problems))
    process.start()
    wait_until(lambda: position_in(directory) > [-1])
    (worker,) = [child for child in children_of(process.pid) if "encoding_worker" in command_of(child)]

    os.kill(worker, signal.SIGKILL)

    assert problems.get(timeout=60) == (
        "a tokenizing process ended (exit code -9); if this machine was short of memory, "
        "use fewer (--workers); start again: finished work is kept",
    )
    process.join()


def send_problem(directory: Path, job: Job, problems: multiprocessing.Queue) -> None:
    try:
        tokenize_elsewhere(directory, job)
    except DataError as error:
        problems.put(error.lines)


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
