"""The corpus: source files, and how their documents are read."""

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from meshtrain.data.cache import compute_identity
from meshtrain.data.text.sources import SourceFile
from meshtrain.data.tokens.cutting import PIECE_CHARACTERS
from meshtrain.errors import DataError

READING_VERSION = 3
"""Counts the ways in which the same files have been cut into documents and pieces."""


TEXT_KEY = "data.text_key"


@dataclass(frozen=True)
class RecordForm:
    """What the records of a source hold, where that is not a single text.

    Attributes:
        keys: key of a record -> key of the run file that names it: the messages; or the prompt and the completion.
    """

    kind: Literal["chat", "completion"]
    keys: dict[str, str]


class Position(NamedTuple):
    """A place in a corpus between two records or pieces of them; everything before it has been read."""

    file: int = 0
    offset: int = 0
    """In the content of the file, decompressed, in bytes; 0 in a table."""
    record: int = 0
    """Lines or rows before it in the file."""
    disk_bytes: int = 0
    """Of the file as it lies on the disk, read before it."""


START = Position()


@dataclass(frozen=True)
class Corpus:
    """Source files and how their documents are read."""

    files: tuple[SourceFile, ...]
    content_hashes: tuple[str, ...]
    text_key: str = "text"
    form: RecordForm | None = None
    """What a record holds that is not a single text; None: a text under `text_key`."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    held_out: float = 0.0
    """The fraction of the documents that is kept aside for validation."""
    num_documents: int | None = None
    """Only so many are read, from the first on; None: all."""

    @property
    def num_bytes(self) -> int:
        """The size of the files on disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def keys_in_words(self) -> str:
        """The keys of records that were looked for, and the keys of the run file that name them."""
        keys = {self.text_key: TEXT_KEY} if self.form is None else self.form.keys
        return " and ".join(f"{said_by}, which is {json.dumps(key)}" for key, said_by in keys.items())

    @property
    def identity(self) -> str:
        """A hash of all that decides which documents are read; no path is part of it."""
        contents = [(file.kind, content) for file, content in zip(self.files, self.content_hashes, strict=True)]
        reading = (READING_VERSION, PIECE_CHARACTERS, self.text_key, self.on_bad_record, self.held_out)
        form = None if self.form is None else (self.form.kind, list(self.form.keys))
        return compute_identity(contents, reading, self.num_documents, form)

    def is_held_out(self, document: int) -> bool:
        """Return whether a document is kept aside for validation.

        It depends on the document's place alone: the validation text stays the same for every seed and mesh, and for
        more documents after these. The first document always is held out, so that there is one.
        """
        if document == 0:
            return self.held_out > 0
        return xxh3_64_intdigest(document.to_bytes(8, "little")) < self.held_out * 2**64

    def check_unchanged(self) -> None:
        """Check that no file was written to since its content was hashed.

        Raises:
            DataError: naming the first file that was.
        """
        for file in self.files:
            if not file.is_unchanged():
                raise DataError(
                    f"{file.path} changed while it was read; start again when nothing writes to it any more"
                )

    def refusal(self, problem: str) -> DataError:
        """Return the error that a bad record is under the policy to fail."""
        return DataError(f'{problem}; mend it, or leave such records out with data.on_bad_record = "skip"')
