"""Parquet files: one column of texts, read batch by batch."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshtrain.data.text.byte_streams import DamagedError
from meshtrain.data.text.corpus import TEXT_KEY
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError, name_some

BATCH_ROWS = 128


def read_rows(file: SourceFile, text_key: str, first_row: int) -> Iterator[tuple[list[bytes | None], float]]:
    """Yield the texts of consecutive rows from `first_row` (from 0) on, and how much of the file they are.

    A text is UTF-8 only if who wrote the file kept to it; None is a null.

    Raises:
        DataError: if the file cannot be opened, or the package that reads it is missing.
        DamagedError: if it is no parquet file, has no such column of texts, or is damaged further on.
    """
    for batch, fraction in _read_batches(file, {text_key: TEXT_KEY}, first_row, of_texts=True):
        yield batch.column(0).cast("large_binary").to_pylist(), fraction


def read_records(
    file: SourceFile, keys: Mapping[str, str], first_row: int
) -> Iterator[tuple[list[bytes | str], float]]:
    """Yield consecutive rows as lines of JSON, and how much of the file they are; see `read_rows`.

    A text in place of a line says what is wrong with the row.

    Args:
        keys: columns that there must be -> the keys of a run file that name them; all that there are are read.
    """
    for batch, fraction in _read_batches(file, keys, first_row, of_texts=False):
        yield _lines_of(batch), fraction


def _lines_of(batch: Any) -> list[bytes | str]:
    try:
        return [json.dumps(row, default=str).encode() for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        # Arrow looks at the text only now.
        if batch.num_rows == 1:
            return [f"not UTF-8 text (byte {error.start + 1:,} of a text: {error.reason})"]
        return [line for row in range(batch.num_rows) for line in _lines_of(batch.slice(row, 1))]


def _read_batches(
    file: SourceFile, keys: Mapping[str, str], first_row: int, *, of_texts: bool
) -> Iterator[tuple[Any, float]]:
    try:
        import pyarrow as arrow  # noqa: PLC0415 - of an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f'{file.path}: to read it takes a package more: pip install "meshtrain[data]"') from error
    try:
        stream = file.path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror or error}; mend it or leave it out") from error
    with stream:
        try:
            table = arrow.parquet.ParquetFile(stream)
            for key, said_by in keys.items():
                _check_column(arrow, table.schema_arrow, key, said_by, of_texts=of_texts)
            group, before = _group_of(table.metadata, first_row)
            groups = range(group, table.metadata.num_row_groups)
            columns = list(keys) if of_texts else None
            for batch in table.iter_batches(BATCH_ROWS, groups, columns=columns, use_threads=False):
                wanted = batch.slice(max(0, first_row - before))
                before += batch.num_rows
                if wanted.num_rows:
                    yield wanted, wanted.num_rows / table.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise DamagedError(f"the parquet file is damaged: {' '.join(str(error).split())}") from error


def _check_column(arrow: Any, schema: Any, key: str, said_by: str, *, of_texts: bool) -> None:
    if key not in schema.names:
        names = name_some([f'"{name}"' for name in schema.names])
        raise DamagedError(f'no column "{key}" ({said_by}); the columns are {names}')
    kind = schema.field(key).type
    of_values = kind.value_type if arrow.types.is_dictionary(kind) else kind
    is_text = arrow.types.is_string(of_values) or arrow.types.is_large_string(of_values)
    if _holds_bytes(arrow, of_values) or (of_texts and not is_text):
        raise DamagedError(f'the column "{key}" ({said_by}) holds {kind} and not text')


def _holds_bytes(arrow: Any, kind: Any) -> bool:
    """Tell whether there are bytes in a type, of which JSON could show no more than Python's way to write them."""
    is_bytes = (arrow.types.is_binary, arrow.types.is_large_binary, arrow.types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in is_bytes) or any(
        _holds_bytes(arrow, kind.field(number).type) for number in range(kind.num_fields)
    )


def _group_of(metadata: Any, row: int) -> tuple[int, int]:
    """Return the row group that holds a row, and the first row of that group."""
    first = 0
    for group in range(metadata.num_row_groups):
        following = first + metadata.row_group(group).num_rows
        if row < following:
            return group, first
        first = following
    return metadata.num_row_groups, first
