"""A corpus: source files, and how their documents are read."""

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from meshtrain.data.cache import compute_identity
from meshtrain.data.text.sources import SourceFile
from meshtrain.data.tokens.cutting import PIECE_CHARACTERS
from meshtrain.errors import DataError, Problem

READING_VERSION = 3
"""Raise this when the same files give other documents or pieces. The cache is then rebuilt."""


@dataclass(frozen=True)
class SettingNames:
    """How the user writes the settings of a corpus; messages quote these texts.

    The defaults are the keys of a run file with one source.
    """

    text_key: str = "data.text_key"
    skip_bad_records: str = 'data.on_bad_record = "skip"'
    validation: str = "data.validation ="
    """Stands before the fraction."""
    other_validation: str = "set data.validation to files of its own, or to 0"
    """The advice for a corpus that cannot be split."""


COMMAND_OPTIONS = SettingNames(
    text_key="--text-key",
    skip_bad_records="--on-bad-record skip",
    validation="--validation",
    other_validation="leave --validation out",
)
"""The same settings as options of `meshtrain tokenize` and `meshtrain tokenizer train`."""


@dataclass(frozen=True)
class RecordForm:
    """What the records of a source hold when they are not single texts.

    Attributes:
        keys: key of a record -> setting that names it. The key holds a text, messages, a prompt, an
            answer or a judgement; the last one the weight of the record, if it has one.
        weight_key: the key of the weight; None: there are no weights. Only then, a form may be
            `text`.
    """

    kind: Literal["text", "chat", "completion", "preference", "unpaired_preference"]
    keys: dict[str, str]
    weight_key: str | None = None

    @property
    def documents(self) -> int:
        """The number of documents of a record: each answer of a pair is one."""
        return 2 if self.kind == "preference" else 1

    @property
    def judges_answers(self) -> bool:
        """Whether a record holds answers that people have judged."""
        return self.kind in ("preference", "unpaired_preference")

    @property
    def may_hold_messages(self) -> bool:
        """Whether the chat template decides the tokens of a record."""
        return self.kind == "chat" or self.judges_answers


class Position(NamedTuple):
    """A position in a corpus, between two records or pieces of them.

    Everything before it has been read.
    """

    file: int = 0
    offset: int = 0
    """Offset in the decompressed content of the file, in bytes; 0 in a table."""
    record: int = 0
    """Number of lines or rows before it in the file."""
    disk_bytes: int = 0
    """Bytes of the file on disk that were read before it."""


START = Position()


@dataclass(frozen=True)
class Corpus:
    """Source files and how their documents are read."""

    files: tuple[SourceFile, ...]
    content_hashes: tuple[str, ...]
    text_key: str = "text"
    form: RecordForm | None = None
    """What a record holds; None: a single text under `text_key`."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    held_out: float = 0.0
    """The fraction of the documents that is held out for validation."""
    num_documents: int | None = None
    """Read only this number of documents, from the first on; None: all."""
    settings: SettingNames = SettingNames()

    @property
    def has_weights(self) -> bool:
        """Whether its records have weights."""
        return self.form is not None and self.form.weight_key is not None

    @property
    def num_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def keys_in_words(self) -> str:
        """The keys that records must have, and the settings that name them."""
        keys = {self.text_key: self.settings.text_key} if self.form is None else self.form.keys
        return " and ".join(f"{setting}, which is {json.dumps(key)}" for key, setting in keys.items())

    @property
    def identity(self) -> str:
        """A hash of everything that decides which documents are read.

        It does not depend on any path.
        """
        contents = [(file.kind, content) for file, content in zip(self.files, self.content_hashes, strict=True)]
        reading = (READING_VERSION, PIECE_CHARACTERS, self.text_key, self.on_bad_record, self.held_out)
        form = None if self.form is None else (self.form.kind, list(self.form.keys))
        if self.has_weights:
            return compute_identity(contents, reading, self.num_documents, form, "weights")
        return compute_identity(contents, reading, self.num_documents, form)

    def is_held_out(self, document: int) -> bool:
        """Return whether a document is held out for validation, with all others of its record.

        The answer depends on the number of the document alone. So the validation text stays the
        same for every seed and mesh, and when documents are appended. The first document is always
        held out, so that the validation text is never empty.
        """
        record = document // (1 if self.form is None else self.form.documents)
        if record == 0:
            return self.held_out > 0
        return xxh3_64_intdigest(record.to_bytes(8, "little")) < self.held_out * 2**64

    def check_unchanged(self) -> None:
        """Check that no file was written to since its content was hashed.

        Raises:
            DataError: if a file was; names the first one.
        """
        for file in self.files:
            if not file.is_unchanged():
                raise DataError(
                    f"{file.path} changed while it was read", "start again when no other process writes to it"
                )

    def refusal(self, problem: str) -> DataError:
        """Return the error for a bad record, for a corpus that does not skip them."""
        return DataError(Problem(problem, f"fix it, or leave such records out with {self.settings.skip_bad_records}"))
