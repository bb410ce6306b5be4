"""Tokenizing: a corpus becomes token files.

A job that was killed resumes, and writes the same bytes.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from meshtrain import console
from meshtrain.data.cache import Cache, write_atomically
from meshtrain.data.text.chunks import read_chunks
from meshtrain.data.text.corpus import Corpus
from meshtrain.data.text.documents import count_problem
from meshtrain.data.tokens.cutting import Cutter
from meshtrain.data.tokens.encoding import EncodedBlock, build_task
from meshtrain.data.tokens.journal import JOURNAL, Job, Progress, load_journal
from meshtrain.data.tokens.part_writer import PartState, PartWriter, file_sizes
from meshtrain.data.tokens.scanning import hash_of, progress_if_long, scan_tokens, scan_trained_mask
from meshtrain.data.tokens.token_file import (
    TRAIN,
    VALIDATION,
    TokenCounts,
    TokenFile,
    check_size,
    is_complete,
)
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.data.tokens.workers import BLOCK_BYTES, encode_blocks, group_into_blocks
from meshtrain.errors import DataError, Problem

SECONDS_BETWEEN_ENTRIES = 2.0


def prepare_token_files(
    corpus: Corpus, tokenizer: TokenizerFiles, cache: Cache, *, description: str
) -> tuple[dict[str, TokenFile], bool]:
    """Tokenize a corpus, unless the cache has it.

    Args:
        description: the text of the progress bar.

    Returns:
        The token files by part (TRAIN, and VALIDATION if documents are held out), and whether they
        were built now.

    Raises:
        DataError: if a document cannot be read, a part comes out empty, or the cache cannot be
            written.
    """
    job = Job(corpus, tokenizer, description)
    name = f"tokens/{job.identity}"

    def is_done(directory: Path) -> bool:
        return all(is_complete(directory / part) for part in job.parts)

    built = cache.build(name, partial(tokenize, job=job), is_complete=is_done, keeps_partial=True)
    return {part: TokenFile.open(cache.directory / name / part) for part in job.parts}, built


def tokenize(directory: Path, *, job: Job) -> None:
    """Write the token files of a job into a directory: a new one, or one that a killed job left.

    The bytes are the same for any number of workers, and however often the job was killed.

    Raises:
        DataError: if a document cannot be read, a part comes out empty, or a file changes
            meanwhile.
    """
    progress = load_journal(directory, job)
    if progress is None:
        progress = Progress()
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(job.writer(directory / part, state))
            for part, state in zip(job.parts, progress.parts or (PartState(),) * 2, strict=False)
        }
        _Run(directory, job, progress, writers).run()
    job.corpus.check_unchanged()
    _check_not_empty(job.corpus, progress, [writer.state for writer in writers.values()])
    for part, writer in writers.items():
        # Bad records belong to no part. They are counted in the first.
        _finish_part(directory / part, job, writer.state, progress if part == TRAIN else Progress())
    (directory / JOURNAL).unlink(missing_ok=True)


class _Run:
    """Runs a job from its last journal entry to its end."""

    def __init__(self, directory: Path, job: Job, progress: Progress, writers: dict[str, PartWriter]) -> None:
        self._directory = directory
        self._job = job
        self._progress = progress
        self._writers = writers

    def run(self) -> None:
        corpus, tokenizer = self._job.corpus, self._job.tokenizer.load()
        task = build_task(corpus, tokenizer, self._job.type_on_disk, self._job.template)
        blocks = group_into_blocks(read_chunks(corpus, Cutter(tokenizer), self._progress.position))
        # Starting a process takes longer than encoding one block.
        num_workers = min(self._job.num_workers, corpus.num_bytes // BLOCK_BYTES)
        last_entry = monotonic()
        with console.progress(self._job.description, corpus.num_bytes, unit="MB") as advance:
            advance(self._progress.disk_bytes)
            try:
                for block, encoded in encode_blocks(blocks, task, num_workers):
                    self._write(encoded)
                    self._progress.position = block[-1].end
                    disk_bytes = sum(chunk.disk_bytes for chunk in block)
                    self._progress.disk_bytes += disk_bytes
                    advance(disk_bytes)
                    if self._has_all_documents():
                        break
                    if monotonic() - last_entry > SECONDS_BETWEEN_ENTRIES:
                        self._write_journal()
                        last_entry = monotonic()
            except DataError:
                # It is never raised within a block, so what was written so far need not be written
                # again.
                self._write_journal()
                raise
        self._write_journal()

    def _has_all_documents(self) -> bool:
        limit = self._job.corpus.num_documents
        return limit is not None and self._progress.documents >= limit and not self._progress.is_open

    def _write_journal(self) -> None:
        for writer in self._writers.values():
            writer.flush()
        self._progress.parts = tuple(writer.state for writer in self._writers.values())
        entry = asdict(self._progress) | {"identity": self._job.journal_identity}
        write_atomically(self._directory / JOURNAL, json.dumps(entry))

    def _write(self, block: EncodedBlock) -> None:
        progress, corpus = self._progress, self._job.corpus
        is_first = np.append(not progress.is_open, block.ends_document[:-1])[: len(block.lengths)]
        is_empty = is_first & (block.num_bytes == 0)
        begun = progress.documents + np.cumsum(is_first & ~is_empty)
        limit = corpus.num_documents
        self._count_problems(block, begun, limit)
        is_within_limit = np.where(is_empty, begun, begun - 1) < (np.inf if limit is None else limit)
        num_texts = int(is_within_limit.sum())
        kept = ~is_empty & is_within_limit
        if corpus.held_out:
            held_out = np.array([corpus.is_held_out(max(0, number - 1)) for number in begun.tolist()], np.bool_)
            self._writers[TRAIN].write(block.select(kept & ~held_out))
            self._writers[VALIDATION].write(block.select(kept & held_out))
        else:
            self._writers[TRAIN].write(block if kept.all() else block.select(kept))
        progress.empty_documents += int(is_empty[:num_texts].sum())
        if num_texts:
            progress.documents = int(begun[num_texts - 1])
            progress.is_open = not block.ends_document[num_texts - 1]

    def _count_problems(self, block: EncodedBlock, begun: np.ndarray, limit: int | None) -> None:
        for num_before, problem in block.problems:
            documents = int(begun[num_before - 1]) if num_before else self._progress.documents
            is_open = not block.ends_document[num_before - 1] if num_before else self._progress.is_open
            if limit is None or documents < limit or is_open:
                count_problem(problem, self._job.corpus, self._progress.skipped_records)
                self._progress.skipped_records += 1


def _check_not_empty(corpus: Corpus, progress: Progress, parts: list[PartState]) -> None:
    documents = [part.documents for part in parts]
    if min(documents) > 0:
        return
    settings = corpus.settings
    where = str(corpus.files[0].path) if len(corpus.files) == 1 else f"{corpus.files[0].path} and the files after it"
    if sum(documents):
        raise DataError(
            Problem(
                f"{where}: {sum(documents):,} documents cannot be split by {settings.validation} {corpus.held_out}",
                settings.other_validation,
            )
        )
    empty_documents = progress.empty_documents + sum(part.empty_documents for part in parts)
    raise DataError(
        f"{where}: no text found, but {empty_documents:,} empty documents and {progress.skipped_records:,} skipped "
        "records",
        f"check the files and {corpus.keys_in_words}",
    )


def _finish_part(directory: Path, job: Job, state: PartState, progress: Progress) -> None:
    """Check what was written to a part, and write its counts."""
    for name, size in file_sizes(state, job.type_on_disk, **job.arrays).items():
        check_size(directory / name, size, stated_in="the process that wrote it")
    offsets = np.memmap(directory / "documents.bin", np.int64, "r")
    tokens = directory / "tokens.bin"
    with progress_if_long(f"Checking {directory.name}", tokens.stat().st_size) as advance:
        scan = scan_tokens(tokens, job.type_on_disk, offsets, tokenizer=job.tokenizer, advance=advance)
    assert scan.ended_documents == state.documents, "every document is followed by the end token"
    TokenCounts(
        documents=state.documents,
        tokens=state.tokens,
        ended_documents=scan.ended_documents,
        text_bytes=state.text_bytes,
        skipped_records=progress.skipped_records,
        empty_documents=progress.empty_documents + state.empty_documents,
        unigram_entropy_nats=scan.unigram_entropy_nats,
        vocab_size=job.tokenizer.vocab_size,
        tokenizer=job.tokenizer.identity,
        tokens_hash=scan.tokens_hash,
        documents_hash=scan.documents_hash,
        meshtrain=version("meshtrain"),
        **_count_marks(directory, job),
    ).write(directory)


def _count_marks(directory: Path, job: Job) -> dict[str, Any]:
    """Return the counts of what is known of single tokens and documents, if anything is."""
    if job.corpus.form is None:
        return {}
    num_tokens, hashed = scan_trained_mask(directory / "trained.bin")
    weights = {"weights_hash": hash_of(directory / "weights.bin")} if job.corpus.has_weights else {}
    return {"trained_tokens": num_tokens, "trained_hash": hashed, **weights}
