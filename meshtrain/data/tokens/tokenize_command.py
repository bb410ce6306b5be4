"""The command `meshtrain tokenize`: it writes a folder of token files, complete or not at all."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from meshtrain import console
from meshtrain.console import BYTES_PER_MB
from meshtrain.data.cache import Cache, build_output, compute_identity
from meshtrain.data.text.corpus import COMMAND_OPTIONS, Corpus
from meshtrain.data.text.sources import find_typed_files
from meshtrain.data.tokens.journal import JOURNAL, Job
from meshtrain.data.tokens.megatron import RECORD, megatron_token_type, write_megatron_index
from meshtrain.data.tokens.token_file import TokenCounts
from meshtrain.data.tokens.tokenizer import find_tokenizer
from meshtrain.data.tokens.tokenizing import tokenize
from meshtrain.data.tokens.workers import num_cores
from meshtrain.errors import DataError

Format = Literal["meshtrain", "megatron"]


@dataclass(frozen=True)
class TokenizeRequest:
    """What the user of the command asks for."""

    sources: Sequence[str]
    """As typed: paths and globs relative to the working directory."""
    tokenizer: str
    output: Path
    text_key: str = "text"
    on_bad_record: Literal["fail", "skip"] = "fail"
    format: Format = "meshtrain"
    num_workers: int | None = None
    """Processes; None: one per core."""
    validation: float = 0.0
    """The fraction of the documents that becomes a token file of its own."""
    num_documents: int | None = None
    """Read only this number of documents, from the first on; None: all."""


def tokenize_sources(request: TokenizeRequest, cache: Cache) -> None:
    """Tokenize sources into a directory with `train`, if asked for `validation`, and the tokenizer.

    A command that was killed or failed resumes where it stopped. The files are the same, byte for
    byte, however often that happens and for any number of workers.

    Raises:
        DataError: if a source, a document or the tokenizer is wrong, or the output is there already
            and differs.
    """
    job = _job(request, cache)
    name = compute_identity(job.identity, request.format)
    if request.output.exists():
        _check_same(request.output, name)
        console.line(f"{request.output} already holds these token files; nothing was done")
        return
    started = time.monotonic()
    partial = request.output.with_name(f"{request.output.name}.partial")
    is_resumed = (partial / JOURNAL).exists()
    parts: dict[str, TokenCounts] = {}

    def fill(directory: Path) -> None:
        tokenize(directory, job=job)
        (directory / "tokenizer").mkdir(exist_ok=True)
        job.tokenizer.copy(directory / "tokenizer")
        parts.update({part: TokenCounts.read(directory / part) for part in job.parts})
        if request.format == "megatron":
            for part in job.parts:
                _to_megatron(directory / part, job.type_on_disk)
        _write_record(directory / RECORD, request, job, name, parts)

    request.output.parent.mkdir(parents=True, exist_ok=True)
    is_built = build_output(request.output, fill, keeps=(BaseException,))
    if not is_built:
        _check_same(request.output, name)
        console.line(f"{request.output} was written by another process meanwhile; nothing was done")
        return
    _show(request, parts, None if is_resumed else time.monotonic() - started)


def _job(request: TokenizeRequest, cache: Cache) -> Job:
    files = find_typed_files(request.sources)
    tokenizer = find_tokenizer(request.tokenizer, cache, setting="--tokenizer")
    # The files are not hashed, as those in the cache are. An output is resumed on the machine where
    # it was started.
    contents = tuple(f"{file.path} {file.num_bytes} {file.modified_nanoseconds}" for file in files)
    corpus = Corpus(
        tuple(files),
        contents,
        text_key=request.text_key,
        on_bad_record=request.on_bad_record,
        held_out=request.validation,
        num_documents=request.num_documents,
        settings=COMMAND_OPTIONS,
    )
    token_type = megatron_token_type(tokenizer.vocab_size) if request.format == "megatron" else None
    return Job(corpus, tokenizer, "Tokenizing", request.num_workers or num_cores(), token_type)


def _check_same(output: Path, name: str) -> None:
    record = output / RECORD
    if not record.is_file() or json.loads(record.read_text())["identity"] != name:
        raise DataError(
            f"--output: {output} exists already, but does not hold the token files of this command",
            "remove it, or choose another directory",
        )


def _to_megatron(part: Path, token_type: np.dtype) -> None:
    """Turn a token file into a Megatron-LM pair of the same name."""
    offsets = np.memmap(part / "documents.bin", np.int64, "r")
    write_megatron_index(part.with_name(f"{part.name}.idx"), offsets, token_type)
    (part / "tokens.bin").rename(part.with_name(f"{part.name}.bin"))
    shutil.rmtree(part)


def _write_record(path: Path, request: TokenizeRequest, job: Job, name: str, parts: dict[str, TokenCounts]) -> None:
    record = {
        "identity": name,
        "format": request.format,
        "text_key": request.text_key,
        "on_bad_record": request.on_bad_record,
        "sources": [{"path": str(file.path), "bytes": file.num_bytes} for file in job.corpus.files],
        "parts": {part: asdict(counts) for part, counts in parts.items()},
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def _show(request: TokenizeRequest, parts: dict[str, TokenCounts], seconds: float | None) -> None:
    rows = [
        (
            part,
            f"{counts.documents:,}",
            f"{counts.tokens:,}",
            f"{counts.text_bytes / BYTES_PER_MB:,.1f} MB",
            f"{counts.text_bytes / counts.tokens:.2f}",
        )
        for part, counts in parts.items()
    ]
    console.table("Token files", ["part", "documents", "tokens", "text", "bytes per token"], rows)
    text_bytes = sum(counts.text_bytes for counts in parts.values())
    skipped = sum(counts.skipped_records for counts in parts.values())
    empty = sum(counts.empty_documents for counts in parts.values())
    # A resumed command has done a part of the work before, so its speed is unknown.
    speed = f"{seconds:,.1f} s, {text_bytes / BYTES_PER_MB / seconds:,.2f} MB/s; " if seconds else ""
    console.line(f"{speed}left out: {skipped:,} bad records, {empty:,} empty documents")
    output = request.output.absolute()
    keys = [f'data.{part} = ["{output / part}"]' for part in parts] + [
        f'data.tokenizer.path = "{output / "tokenizer"}"'
    ]
    console.line("\n".join(["To train on it:", *keys]))
