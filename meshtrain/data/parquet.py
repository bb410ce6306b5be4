"""Parquet files: one column of texts, read batch by batch."""

from collections.abc import Iterator
from typing import Any

from meshtrain.data.sources import SourceFile
from meshtrain.data.streams import DamagedError
from meshtrain.errors import DataError, name_some

BATCH_ROWS = 128


def read_rows(file: SourceFile, text_key: str, first_row: int) -> Iterator[tuple[list[bytes | None], float]]:
    """Yield the texts of consecutive rows from `first_row` (from 0) on, and how much of the file they are.

    A text is UTF-8 only if who wrote the file kept to it; None is a null.

    Raises:
        DataError: if the file cannot be opened, or the package that reads it is missing.
        DamagedError: if it is no parquet file, has no such column of texts, or is damaged further on.
    """
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
            _check_column(arrow, table.schema_arrow, text_key)
            group, before = _group_of(table.metadata, first_row)
            groups = range(group, table.metadata.num_row_groups)
            for batch in table.iter_batches(BATCH_ROWS, groups, columns=[text_key], use_threads=False):
                texts = batch.column(0).cast(arrow.large_binary()).to_pylist()[max(0, first_row - before) :]
                before += batch.num_rows
                if texts:
                    yield texts, len(texts) / table.metadata.num_rows
        except (arrow.ArrowException, OSError) as error:
            raise DamagedError(f"the parquet file is damaged: {' '.join(str(error).split())}") from error


def _check_column(arrow: Any, schema: Any, text_key: str) -> None:
    if text_key not in schema.names:
        raise DamagedError(f'no column "{text_key}" (data.text_key); the columns are {name_some(schema.names)}')
    kind = schema.field(text_key).type
    of_values = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(of_values) or arrow.types.is_large_string(of_values)):
        raise DamagedError(f'the column "{text_key}" (data.text_key) holds {kind} and not text')


def _group_of(metadata: Any, row: int) -> tuple[int, int]:
    """Return the row group that holds a row, and the first row of that group."""
    first = 0
    for group in range(metadata.num_row_groups):
        following = first + metadata.row_group(group).num_rows
        if row < following:
            return group, first
        first = following
    return metadata.num_row_groups, first
