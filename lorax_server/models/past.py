"""The keys and values of a padded batch: how rows leave, join and grow without copying what can stay.

A layer's past is two tensors [rows, heads, columns, size], right-aligned: the last column is the last token of every
row. With `keys_head_dim_last=False` the keys are [rows, heads, size, columns] instead (BLOOM's of old). Masked columns
hold whatever there was, but never anything that is not a number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LayerPast = tuple[torch.Tensor, torch.Tensor]

COLUMNS = 2  # the axis
MIN_ROOM = 16  # columns


class RoomyPast(tuple[torch.Tensor, torch.Tensor]):
    """(keys, values): the columns from `start` to `stop` of two buffers, which may have room for more after them.

    Only one batch may hold it, since growing writes to the buffers.
    """

    buffers: LayerPast
    start: int
    stop: int

    def __new__(cls, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> "RoomyPast":
        past = super().__new__(cls, (keys[:, :, start:stop], values[:, :, start:stop]))
        past.buffers, past.start, past.stop = (keys, values), start, stop
        return past

    def __getnewargs__(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:  # for copies
        return *self.buffers, self.start, self.stop

    @property
    def room(self) -> int:
        return int(self.buffers[0].shape[COLUMNS]) - self.stop

    def would_use_half(self, num_rows: int, length: int) -> bool:
        """Whether a view of so many rows and columns would use at least half of the memory it keeps."""
        keys = self.buffers[0]
        kept = num_rows * (length + self.room) * keys.shape[1] * keys.shape[3] * keys.itemsize
        return 2 * kept >= keys.untyped_storage().nbytes()

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> "RoomyPast":
        added = keys.shape[COLUMNS]
        past = self if self.room >= added else self.moved(added)
        for buffer, new in zip(past.buffers, (keys, values), strict=True):
            buffer[:, :, past.stop : past.stop + added] = new
        return RoomyPast(*past.buffers, past.start, past.stop + added)

    def moved(self, wanted: int) -> "RoomyPast":
        """The same in new buffers, with more room than is wanted now."""
        length = self.stop - self.start
        keys, values = (_allocate(part, len(part), length, wanted + _room(length)) for part in self)
        for buffer, part in zip((keys, values), self, strict=True):
            buffer[:, :, :length] = part
        return RoomyPast(keys, values, 0, length)


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
    if isinstance(past, RoomyPast) and is_run and past.would_use_half(num_rows, length):
        keys, values = (buffer[first : first + num_rows] for buffer in past.buffers)
        return RoomyPast(keys, values, past.stop - length, past.stop)
    return _gather([(past, rows)], length)


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
    return RoomyPast(keys, values, 0, length)


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
            self._hold(past if isinstance(past, RoomyPast) else RoomyPast(*past, 0, past[0].shape[COLUMNS]))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.past is None:
            return self._hold(RoomyPast(key_states, value_states, 0, key_states.shape[COLUMNS]))
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
