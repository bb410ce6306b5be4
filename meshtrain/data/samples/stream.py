"""Samples of a stream: numbered as they are read, and shuffled within a buffer.

The rows of a stream are cut into buffers of a fixed number of rows, and each buffer is shuffled on
its own. So the n-th sample is the same for any number of processes. To resume, the start of its
buffer is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from threading import RLock

import numpy as np

from meshtrain.data.samples.order import FILLER, derive_round_keys, permute
from meshtrain.data.samples.rows import Arrays, packed_arrays, padded_arrays, padded_width
from meshtrain.data.samples.stream_rows import Cursor, Row, StreamReader

ENDLESS = 1 << 48
"""The number of samples of a stream, which repeats at its end."""
MIN_BUFFERS_KEPT = 3
CURSORS_KEPT = 1 << 16
"""More than the number of buffers that a loader reads ahead, however small they are.

A cursor is nine numbers.
"""


@dataclass(frozen=True)
class StreamForm:
    """How the samples of a stream are cut; see `meshtrain.config.data.DataConfig`."""

    sequence_length: int
    pad_id: int
    is_padded: bool
    separate_documents: bool
    pad_to_multiple_of: int | None
    num_buffered: int
    shuffle: bool


class StreamSamples:
    """The samples of a stream.

    Read them in about ascending order: going back by more than a few buffers reads the files again.

    Args:
        reader: yields the rows.
    """

    def __init__(self, reader: StreamReader, form: StreamForm) -> None:
        self._reader, self._form = reader, form
        self._cursors = {0: Cursor()}
        self._buffers: dict[int, list[Row]] = {}
        self._rows: Iterator[Row] = iter(())
        self._next_buffer = -1
        self._buffers_kept = MIN_BUFFERS_KEPT
        # The thread of an abandoned loader may still be reading.
        self._lock = RLock()

    def __len__(self) -> int:
        return ENDLESS

    def cursor(self, num_samples: int) -> tuple[int, ...]:
        """Return where to resume after some samples: a buffer, and the cursor of its start."""
        with self._lock:
            buffer = self._nearest(num_samples // self._form.num_buffered)
            return (buffer, *self._cursors[buffer].flat())

    def restore(self, saved: tuple[int, ...]) -> None:
        """Resume from what `cursor` returned."""
        with self._lock:
            self._cursors[saved[0]] = Cursor.from_flat(saved[1:])

    def lengths(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row."""
        if not self._form.is_padded:
            return np.where(sample_ids == FILLER, 1, self._form.sequence_length)
        with self._lock:
            self._keep(sample_ids)
            return np.array([len(self._row(sample).tokens) if sample != FILLER else 1 for sample in sample_ids])

    def width(self, sample_ids: np.ndarray) -> int:
        """Return the number of columns that a batch of these samples needs."""
        form = self._form
        if not form.is_padded or form.pad_to_multiple_of is None:
            return form.sequence_length
        return padded_width(self.lengths(sample_ids), form.sequence_length, form.pad_to_multiple_of)

    def read(self, sample_ids: np.ndarray, width: int | None = None, *, with_tokens: bool = True) -> Arrays:
        """Return the rows; see `meshtrain.data.samples.rows.Samples`."""
        form = self._form
        width = width or self.width(sample_ids)
        is_filler = sample_ids == FILLER
        shape = (len(sample_ids), width if form.is_padded else width + 1)
        tokens, trained, begins = np.zeros(shape, np.int64), np.ones(shape, bool), np.zeros(shape, bool)
        lengths = np.ones(len(sample_ids), np.int64)
        self._keep(sample_ids)
        is_known = not with_tokens and not form.is_padded and not form.separate_documents and self._trains_on_everything
        for number in [] if is_known else np.flatnonzero(~is_filler):
            with self._lock:
                row = self._row(int(sample_ids[number]))
            lengths[number] = length = min(len(row.tokens), shape[1])
            trained[number, :length], begins[number, :length] = row.trained[:length], row.begins[:length]
            if with_tokens:
                tokens[number, :length] = row.tokens[:length]
        if form.is_padded:
            return padded_arrays(tokens, trained, lengths, is_filler, form.pad_id)
        if not form.separate_documents:
            return packed_arrays(tokens, trained, None, is_filler, form.pad_id)
        return packed_arrays(tokens, trained & ~begins, begins, is_filler, form.pad_id)

    @property
    def _trains_on_everything(self) -> bool:
        return self._reader.corpus.form is None

    def _keep(self, sample_ids: np.ndarray) -> None:
        """Keep enough buffers for a batch, which is read twice: for its width and for its rows."""
        known = sample_ids[sample_ids != FILLER]
        if len(known):
            span = int(known.max() - known.min()) // self._form.num_buffered + 1
            self._buffers_kept = max(self._buffers_kept, span + 1)

    def _nearest(self, buffer: int) -> int:
        return max(known for known in self._cursors if known <= buffer)

    def _row(self, sample: int) -> Row:
        buffer, position = divmod(sample, self._form.num_buffered)
        return self._buffer(buffer)[position]

    def _buffer(self, buffer: int) -> list[Row]:
        if buffer not in self._buffers:
            if not self._next_buffer <= buffer or self._nearest(buffer) > self._next_buffer or self._next_buffer < 0:
                self._next_buffer = self._nearest(buffer)
                self._buffers.clear()
                self._rows = self._rows_from(self._cursors[self._next_buffer])
            while buffer not in self._buffers:
                self._fill()
        return self._buffers[buffer]

    def _rows_from(self, cursor: Cursor) -> Iterator[Row]:
        reader, length = self._reader, self._form.sequence_length
        return reader.padded_rows(cursor, length) if self._form.is_padded else reader.packed_rows(cursor, length)

    def _fill(self) -> None:
        """Read the next buffer."""
        number, size = self._next_buffer, self._form.num_buffered
        rows = list(islice(self._rows, size))
        self._cursors[number] = rows[0].cursor
        if self._form.shuffle:
            keys = derive_round_keys(f"{self._reader.seed}/buffer/{number}")
            rows = [rows[position] for position in permute(np.arange(size), size, keys=keys)]
        self._buffers[number] = rows
        self._next_buffer += 1
        for kept, most in ((self._buffers, self._buffers_kept), (self._cursors, CURSORS_KEPT)):
            while len(kept) > most:
                # The first cursor stays, so that anything forgotten can be read again from the
                # start.
                del kept[min(known for known in kept if known != 0 or most != CURSORS_KEPT)]
