"""A job of tokenizing, and its journal, from which a killed job resumes."""

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.data.cache import compute_identity
from meshtrain.data.text.chat_template import ChatTemplate, template_for
from meshtrain.data.text.corpus import START, Corpus, Position
from meshtrain.data.tokens.part_writer import PartState, PartWriter, file_sizes
from meshtrain.data.tokens.token_file import FORMAT_VERSION, TRAIN, VALIDATION, smallest_token_type
from meshtrain.data.tokens.tokenizer import TokenizerFiles
from meshtrain.data.tokens.workers import num_cores

JOURNAL = "journal.json"


@dataclass(frozen=True)
class Job:
    """What to tokenize, and how."""

    corpus: Corpus
    tokenizer: TokenizerFiles
    description: str
    """The text of the progress bar."""
    num_workers: int = field(default_factory=num_cores)
    token_type: type[np.integer] | None = None
    """The type of the tokens on disk; None: the one that a token file has."""

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, if there are conversations.

        Raises DataError if the tokenizer has none.
        """
        return template_for(self.corpus, self.tokenizer)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the token files to write."""
        return (TRAIN, VALIDATION) if self.corpus.held_out else (TRAIN,)

    @property
    def journal_identity(self) -> str:
        """The identity without `on_bad_record`: a job that failed at a bad record can skip it."""
        return replace(self, corpus=replace(self.corpus, on_bad_record="skip")).identity

    @property
    def type_on_disk(self) -> np.dtype:
        """The type of the tokens on disk."""
        return np.dtype(self.token_type or smallest_token_type(self.tokenizer.vocab_size))

    @property
    def identity(self) -> str:
        """A hash of everything that decides the bytes to write."""
        template = self.template.identity if self.template else None
        parts = (FORMAT_VERSION, self.corpus.identity, self.tokenizer.identity, self.type_on_disk.name, template)
        return compute_identity(*parts)

    def writer(self, directory: Path, state: PartState) -> PartWriter:
        """Open one of the token files for writing, from `state` on."""
        return PartWriter(directory, self.type_on_disk, self.tokenizer.end_id, state, **self.arrays)

    @property
    def arrays(self) -> dict[str, bool]:
        """Whether a token file has marks and weights, as arguments of `file_sizes`."""
        return {"has_marks": self.corpus.form is not None, "has_weights": self.corpus.has_weights}


@dataclass
class Progress:
    """How much of a job is done."""

    position: Position = START
    disk_bytes: int = 0
    documents: int = 0
    """Documents with text, in all parts."""
    is_open: bool = False
    """Whether the last of them is incomplete."""
    skipped_records: int = 0
    empty_documents: int = 0
    """Documents without text."""
    parts: tuple[PartState, ...] = ()


def load_journal(directory: Path, job: Job) -> Progress | None:
    """Return the progress of a job that was killed; None if it cannot be resumed."""
    path = directory / JOURNAL
    if not path.exists():
        return None
    entry: dict[str, Any] = json.loads(path.read_text())
    is_strict = job.corpus.on_bad_record == "fail"
    if entry.pop("identity") != job.journal_identity or (is_strict and entry["skipped_records"]):
        return None
    position, parts = Position(*entry.pop("position")), tuple(PartState(**state) for state in entry.pop("parts"))
    for part, state in zip(job.parts, parts, strict=True):
        for name, size in file_sizes(state, job.type_on_disk, **job.arrays).items():
            file = directory / part / name
            if not file.exists() or file.stat().st_size < size:
                return None
    return Progress(position=position, parts=parts, **entry)
