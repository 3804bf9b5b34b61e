"""The keys and values of a padded batch: how rows leave, join and grow without copying what can stay.

A layer's past is two tensors [rows, heads, columns, size], right-aligned: the last column is the last token of every
row. With `keys_head_dim_last=False` the keys are [rows, heads, size, columns] instead (BLOOM's of old). Masked columns
hold whatever there was, but never anything that is not a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LayerPast = tuple[torch.Tensor, torch.Tensor]

COLUMNS = 2  # the axis
MIN_ROOM = 16  # columns


@dataclass
class Filled:
    """How many columns of some memory are in use, for all who look at it."""

    columns: int


class Buffers(NamedTuple):
    """Keys and values [rows, heads, columns, size], of which the first are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    filled: Filled

    @property
    def num_columns(self) -> int:
        return int(self.keys.shape[COLUMNS])


class RoomyPast(tuple[torch.Tensor, torch.Tensor]):
    """(keys, values): the columns from `start` to `stop` of two buffers, which may have room for more after them."""

    buffers: Buffers
    start: int
    stop: int

    def __new__(cls, buffers: Buffers, start: int, stop: int) -> "RoomyPast":
        past = super().__new__(cls, (buffers.keys[:, :, start:stop], buffers.values[:, :, start:stop]))
        past.buffers, past.start, past.stop = buffers, start, stop
        return past

    def __getnewargs__(self) -> tuple[Buffers, int, int]:  # for copies
        return self.buffers, self.start, self.stop

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "RoomyPast":
        """Tensors as they are, without room."""
        length = int(keys.shape[COLUMNS])
        return cls(Buffers(keys, values, Filled(length)), 0, length)

    @property
    def room(self) -> int:
        """Columns that can be written in place. None if another past goes on from here: it has its own there."""
        return self.buffers.num_columns - self.stop if self.buffers.filled.columns == self.stop else 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> "RoomyPast":
        added = int(keys.shape[COLUMNS])
        past = self if self.room >= added else self._moved(added)
        stop = past.stop + added
        past.buffers.keys[:, :, past.stop : stop] = keys
        past.buffers.values[:, :, past.stop : stop] = values
        past.buffers.filled.columns = stop
        return RoomyPast(past.buffers, past.start, stop)

    def rows(self, first: int, stop: int, length: int) -> "RoomyPast | None":
        """A view of some rows and the last columns; None if less than half of the memory it keeps would be used."""
        keys = self.buffers.keys
        kept = (stop - first) * (length + self.room) * keys.shape[1] * keys.shape[3] * keys.itemsize
        if 2 * kept < keys.untyped_storage().nbytes():
            return None
        buffers = Buffers(keys[first:stop], self.buffers.values[first:stop], self.buffers.filled)
        return RoomyPast(buffers, self.stop - length, self.stop)

    def _moved(self, wanted: int) -> "RoomyPast":
        """The same in new buffers, with more room than is wanted now."""
        length = self.stop - self.start
        keys, values = (_allocate(part, len(part), length, wanted + _room(length)) for part in self)
        keys[:, :, :length], values[:, :, :length] = self
        return RoomyPast(Buffers(keys, values, Filled(length)), 0, length)


def unfold_heads(past: LayerPast, num_rows: int) -> LayerPast:
    """Old models fold rows and heads into one axis."""
    keys, values = past
    if keys.dim() == 4:
        return past
    return keys.view(num_rows, -1, *keys.shape[-2:]), values.view(num_rows, -1, *values.shape[-2:])


def select_past(past: LayerPast, rows: Sequence[int], length: int, keys_head_dim_last: bool = True) -> LayerPast:
    """The last `length` columns of these rows; a view where that does not keep much else in memory."""
    if not keys_head_dim_last:
        return _turned(_gather([(_turned(past), rows)], length))
    first, num_rows = rows[0], len(rows)
    is_run = list(rows) == list(range(first, first + num_rows))
    view = past.rows(first, first + num_rows, length) if isinstance(past, RoomyPast) and is_run else None
    return view or _gather([(past, rows)], length)


def join_pasts(pasts: Sequence[LayerPast], length: int, keys_head_dim_last: bool = True) -> LayerPast:
    """All rows of several pasts, `length` columns of each; shorter ones are padded on the left."""
    if not keys_head_dim_last:
        return _turned(_gather([(_turned(past), range(len(past[0]))) for past in pasts], length))
    return _gather([(past, range(len(past[0]))) for past in pasts], length)


def _turned(past: LayerPast) -> LayerPast:
    """From one layout of the keys to the other."""
    keys, values = past
    return keys.mT, values


def _gather(parts: Sequence[tuple[LayerPast, Sequence[int]]], length: int) -> RoomyPast:
    """Some rows of each past in new buffers, right-aligned to `length`."""
    num_rows = sum(len(rows) for _, rows in parts)
    keys, values = (_allocate(tensor, num_rows, length, _room(length)) for tensor in parts[0][0])
    row = 0
    for past, rows in parts:
        for first, stop in _runs(rows):
            for buffer, tensor in zip((keys, values), past, strict=True):
                kept = tensor[first:stop, :, _last(length)]
                padding = length - kept.shape[COLUMNS]
                buffer[row : row + stop - first, :, :padding] = 0
                buffer[row : row + stop - first, :, padding:length] = kept
            row += stop - first
    return RoomyPast(Buffers(keys, values, Filled(length)), 0, length)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rows that follow each other, as first and last + 1, so that each run is one copy."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _allocate(like: torch.Tensor, num_rows: int, length: int, room: int) -> torch.Tensor:
    return like.new_empty(num_rows, like.shape[1], length + room, like.shape[3])


def _room(length: int) -> int:
    return max(MIN_ROOM, length // 8)


def _last(length: int) -> slice:
    return slice(-length, None) if length else slice(0)


# --- At the edge to transformers --------------------------------------------------------------------------------------


class GrowingLayer(DynamicLayer):
    """A layer of a transformers cache that appends to a past of ours."""

    def __init__(self, past: LayerPast | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.past: RoomyPast | None = None
        if past is not None:
            self._hold(past if isinstance(past, RoomyPast) else RoomyPast.of(*past))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.past is None:
            return self._hold(RoomyPast.of(key_states, value_states))
        return self._hold(self.past.append(key_states, value_states))

    def _hold(self, past: RoomyPast) -> RoomyPast:
        self.past = past
        self.keys, self.values = past
        self.dtype, self.device = past[0].dtype, past[0].device
        self.is_initialized = True
        return past


class GrowingCache(DynamicCache):
    """A transformers cache over our pasts. Every layer keeps all columns, also those with a window: rows are aligned
    by their last column, and the mask says what a layer sees."""

    def __init__(self, pasts: Sequence[LayerPast] | None) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer
        self.layers = [GrowingLayer(past) for past in pasts or ()]

    def pasts(self) -> list[LayerPast]:
        return [layer.past for layer in self.layers if isinstance(layer, GrowingLayer) and layer.past is not None]
