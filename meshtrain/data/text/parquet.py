"""Parquet files: texts or records are read batch by batch."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshtrain.data.text.byte_streams import DamagedError
from meshtrain.data.text.images import IMAGE_KEYS, TEXT_ALONE
from meshtrain.data.text.sources import SourceFile
from meshtrain.errors import DataError, name_some, reason_of

BATCH_ROWS = 128


def read_rows(
    file: SourceFile, text_key: str, first_row: int, *, setting: str
) -> Iterator[tuple[list[bytes | None], float]]:
    """Yield batches of texts from row `first_row` on, and the fraction of the file that each is.

    Rows count from 0.

    A text should be UTF-8, but nothing guarantees it. A null is None.

    Args:
        text_key: the column of the texts.
        setting: how the user names that column, for messages.

    Raises:
        DataError: if the file cannot be opened, or the package that reads it is missing.
        DamagedError: if it is not a parquet file, has no such column of texts, or is damaged
            further on.
    """
    for batch, fraction in _read_batches(file, {text_key: setting}, first_row, of_texts=True):
        yield batch.column(0).cast("large_binary").to_pylist(), fraction


def read_parquet_records(
    file: SourceFile, keys: Mapping[str, str], first_row: int
) -> Iterator[tuple[list[bytes | str], float]]:
    """Yield batches of rows as lines of JSON, and the fraction of the file that each is.

    See `read_rows`.

    A row that cannot be a line is the text of its problem instead.

    Args:
        keys: column that the table must have -> setting that names it. All columns are read.
    """
    for batch, fraction in _read_batches(file, keys, first_row, of_texts=False):
        yield _to_lines(batch), fraction


def _to_lines(batch: Any) -> list[bytes | str]:
    try:
        return [json.dumps(row, default=str).encode() for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        # Arrow decodes the texts only here.
        if batch.num_rows == 1:
            return [f"not UTF-8 text (byte {error.start + 1:,} of a text: {error.reason})"]
        return [line for row in range(batch.num_rows) for line in _to_lines(batch.slice(row, 1))]


def _read_batches(
    file: SourceFile, keys: Mapping[str, str], first_row: int, *, of_texts: bool
) -> Iterator[tuple[Any, float]]:
    try:
        import pyarrow as arrow  # noqa: PLC0415 - of an extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f'{file.path}: reading it needs another package: pip install "meshtrain[data]"') from error
    try:
        stream = file.path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {reason_of(error)}", "fix it or leave it out") from error
    with stream:
        try:
            table = arrow.parquet.ParquetFile(stream)
            for key, setting in keys.items():
                _check_column(arrow, table.schema_arrow, key, setting, of_texts=of_texts)
            _check_no_images(arrow, table.schema_arrow, keys)
            group, before = _find_group(table.metadata, first_row)
            groups = range(group, table.metadata.num_row_groups)
            columns = list(keys) if of_texts else None
            for batch in table.iter_batches(BATCH_ROWS, groups, columns=columns, use_threads=False):
                wanted = batch.slice(max(0, first_row - before))
                before += batch.num_rows
                if wanted.num_rows:
                    yield wanted, wanted.num_rows / table.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise DamagedError(f"the parquet file is damaged: {' '.join(str(error).split())}") from error


def _check_column(arrow: Any, schema: Any, key: str, setting: str, *, of_texts: bool) -> None:
    if key not in schema.names:
        names = name_some([f'"{name}"' for name in schema.names])
        raise DamagedError(f'no column "{key}" ({setting}); the columns are {names}')
    kind = schema.field(key).type
    of_values = kind.value_type if arrow.types.is_dictionary(kind) else kind
    is_text = arrow.types.is_string(of_values) or arrow.types.is_large_string(of_values)
    if _holds_bytes(arrow, of_values) or (of_texts and not is_text):
        raise DamagedError(f'the column "{key}" ({setting}) holds {kind} and not text')


def _check_no_images(arrow: Any, schema: Any, keys: Mapping[str, str]) -> None:
    """Check that no column holds images, which reading the texts alone would leave out silently.

    Other columns may be empty, and are checked row by row if they are read.
    """
    for key in IMAGE_KEYS:
        if key in schema.names and key not in keys:
            kind = schema.field(key).type
            if arrow.types.is_struct(kind) or _holds_bytes(arrow, kind):
                raise DamagedError(f'the column "{key}" holds {kind} beside the text, and {TEXT_ALONE}')


def _holds_bytes(arrow: Any, kind: Any) -> bool:
    """Return whether a type holds bytes, which JSON cannot represent."""
    is_bytes = (arrow.types.is_binary, arrow.types.is_large_binary, arrow.types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in is_bytes) or any(
        _holds_bytes(arrow, kind.field(number).type) for number in range(kind.num_fields)
    )


def _find_group(metadata: Any, row: int) -> tuple[int, int]:
    """Return the row group that holds a row, and the first row of that group."""
    first = 0
    for group in range(metadata.num_row_groups):
        following = first + metadata.row_group(group).num_rows
        if row < following:
            return group, first
        first = following
    return metadata.num_row_groups, first
