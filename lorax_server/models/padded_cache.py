"""The keys and values of a padded batch: rows leave, join and grow without copies of what can stay.

The cache of a layer is two tensors [rows, heads, columns, size], right-aligned: the last column is the last token of
every row. With `keys_head_dim_last=False` the keys are [rows, heads, size, columns] instead (BLOOM's of old). Masked
columns hold any numbers, but never a NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lorax_server.kernels import LayerCache

COLUMNS = 2  # the axis
MIN_ROOM = 16  # columns


@dataclass
class Filled:
    """The number of columns in use, shared by all views of the same memory."""

    columns: int


class Buffers(NamedTuple):
    """Keys and values [rows, heads, columns, size], of which the first columns are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    filled: Filled


class RoomyCache(tuple[torch.Tensor, torch.Tensor]):
    """(keys, values): the columns from `start` to `stop` of two buffers, which may have room for more after them."""

    buffers: Buffers
    start: int
    stop: int

    def __new__(cls, buffers: Buffers, start: int, stop: int) -> "RoomyCache":
        cache = super().__new__(cls, (buffers.keys[:, :, start:stop], buffers.values[:, :, start:stop]))
        cache.buffers, cache.start, cache.stop = buffers, start, stop
        return cache

    def __getnewargs__(self) -> tuple[Buffers, int, int]:  # for copies
        return self.buffers, self.start, self.stop

    @classmethod
    def fill(cls, keys: torch.Tensor, values: torch.Tensor, length: int) -> "RoomyCache":
        """Use the first `length` columns of new buffers."""
        return cls(Buffers(keys, values, Filled(length)), 0, length)

    @property
    def room(self) -> int:
        """The columns that can be written in place: none if another cache has written its own there."""
        num_columns = int(self.buffers.keys.shape[COLUMNS])
        return num_columns - self.stop if self.buffers.filled.columns == self.stop else 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> "RoomyCache":
        num_new = int(keys.shape[COLUMNS])
        cache = self if self.room >= num_new else self._moved(num_new)
        stop = cache.stop + num_new
        cache.buffers.keys[:, :, cache.stop : stop] = keys
        cache.buffers.values[:, :, cache.stop : stop] = values
        cache.buffers.filled.columns = stop
        return RoomyCache(cache.buffers, cache.start, stop)

    def view_rows(self, first: int, stop: int, length: int) -> "RoomyCache | None":
        """View some rows and the last columns; None if less than half of the memory behind them would be used."""
        keys = self.buffers.keys
        kept = (stop - first) * (length + self.room) * keys.shape[1] * keys.shape[3] * keys.itemsize
        if 2 * kept < keys.untyped_storage().nbytes():
            return None
        buffers = Buffers(keys[first:stop], self.buffers.values[first:stop], self.buffers.filled)
        return RoomyCache(buffers, self.stop - length, self.stop)

    def _moved(self, num_new: int) -> "RoomyCache":
        """Copy to new buffers, with more room than `num_new` columns need."""
        length = self.stop - self.start
        keys, values = (_allocate(tensor, len(tensor), length, num_new) for tensor in self)
        keys[:, :, :length], values[:, :, :length] = self
        return RoomyCache.fill(keys, values, length)


def unfold_heads(cache: LayerCache, num_rows: int) -> LayerCache:
    """Split the axis into which old models fold rows and heads."""
    keys, values = cache
    if keys.dim() == 4:
        return cache
    return keys.view(num_rows, -1, *keys.shape[-2:]), values.view(num_rows, -1, *values.shape[-2:])


def select_rows(cache: LayerCache, rows: Sequence[int], length: int, keys_head_dim_last: bool = True) -> LayerCache:
    """Return the last `length` columns of these rows; a view where that does not keep much else in memory."""
    if not keys_head_dim_last:
        return _turn_keys(_gather([(_turn_keys(cache), rows)], length))
    runs = _find_runs(rows)
    view = cache.view_rows(*runs[0], length) if isinstance(cache, RoomyCache) and len(runs) == 1 else None
    return view or _gather([(cache, rows)], length)


def join_rows(caches: Sequence[LayerCache], length: int, keys_head_dim_last: bool = True) -> LayerCache:
    """Return all rows of several caches, `length` columns of each; shorter ones are padded on the left."""
    if not keys_head_dim_last:
        return _turn_keys(join_rows([_turn_keys(cache) for cache in caches], length))
    return _gather([(cache, range(len(cache[0]))) for cache in caches], length)


def _turn_keys(cache: LayerCache) -> LayerCache:
    """Change from one layout of the keys to the other."""
    keys, values = cache
    return keys.mT, values


def _gather(sources: Sequence[tuple[LayerCache, Sequence[int]]], length: int) -> RoomyCache:
    """Copy some rows of each cache to new buffers, right-aligned to `length`."""
    num_rows = sum(len(rows) for _, rows in sources)
    keys, values = (_allocate(tensor, num_rows, length) for tensor in sources[0][0])
    row = 0
    for cache, rows in sources:
        for first, stop in _find_runs(rows):
            for buffer, tensor in zip((keys, values), cache, strict=True):
                kept = tensor[first:stop, :, slice(-length, None) if length else slice(0)]
                padding = length - kept.shape[COLUMNS]
                buffer[row : row + stop - first, :, :padding] = 0
                buffer[row : row + stop - first, :, padding:length] = kept
            row += stop - first
    return RoomyCache.fill(keys, values, length)


def _find_runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Group rows that follow each other, as first and last + 1, so that each run is one copy."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _allocate(like: torch.Tensor, num_rows: int, length: int, num_new: int = 0) -> torch.Tensor:
    room = num_new + max(MIN_ROOM, length // 8)
    return like.new_empty(num_rows, like.shape[1], length + room, like.shape[3])


# --- At the edge to transformers --------------------------------------------------------------------------------------


class GrowingLayer(DynamicLayer):
    """A layer of a transformers cache that appends to a cache of ours."""

    def __init__(self, cache: LayerCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache: RoomyCache | None = None
        if cache is not None:
            self._hold(cache)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is None:
            return self._hold((key_states, value_states))
        return self._hold(self.cache.append(key_states, value_states))

    def _hold(self, cache: LayerCache) -> LayerCache:
        keys, values = cache
        self.cache = cache if isinstance(cache, RoomyCache) else RoomyCache.fill(keys, values, keys.shape[COLUMNS])
        self.keys, self.values = self.cache
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        return self.cache


class GrowingCache(DynamicCache):
    """A transformers cache over caches of ours. Every layer keeps all columns, also those with a window: rows are
    aligned by their last column, and the mask says what a layer sees."""

    def __init__(self, caches: Sequence[LayerCache] | None) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer
        self.layers = [GrowingLayer(cache) for cache in caches or ()]

    def layer_caches(self) -> list[LayerCache]:
        return [layer.cache for layer in self.layers if isinstance(layer, GrowingLayer) and layer.cache is not None]
