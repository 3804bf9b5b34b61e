"""KV caches of padded batches.

Each layer has two tensors `[rows, heads, columns, head_dim]`. Rows are right-aligned, so the last column is the last
token of every row. Masked columns contain arbitrary finite numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lorax_server.kernels import LayerCache

COLUMN_AXIS = 2
MIN_SPARE_COLUMNS = 16  # minimum number of free columns in new buffers


@dataclass
class KVBuffers:
    """Keys and values `[rows, heads, columns, head_dim]`. The first `num_filled` columns are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    num_filled: int


class GrowableCache(tuple[torch.Tensor, torch.Tensor]):
    """A (keys, values) tuple of views: the first `length` columns of preallocated buffers."""

    buffers: KVBuffers
    length: int

    def __new__(cls, buffers: KVBuffers, length: int) -> "GrowableCache":
        cache = super().__new__(cls, (buffers.keys[:, :, :length], buffers.values[:, :, :length]))
        cache.buffers, cache.length = buffers, length
        return cache

    def __getnewargs__(self) -> tuple[KVBuffers, int]:  # for `copy` and `pickle`
        return self.buffers, self.length

    @classmethod
    def wrap(cls, cache: LayerCache) -> "GrowableCache":
        """Return a cache that uses these tensors as buffers without free columns."""
        length = int(cache[0].shape[COLUMN_AXIS])
        return cls(KVBuffers(*cache, length), length)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> "GrowableCache":
        """Return a cache with additional columns. They are appended in place if the next columns of the buffers are
        free.
        """
        length, total = self.length, self.length + int(keys.shape[COLUMN_AXIS])
        buffers = self.buffers
        if buffers.num_filled != length or buffers.keys.shape[COLUMN_AXIS] < total:
            buffers = join_rows([self], length, total - length).buffers
        buffers.keys[:, :, length:total], buffers.values[:, :, length:total] = keys, values
        buffers.num_filled = total
        return GrowableCache(buffers, total)


def select_rows(cache: LayerCache, rows: Sequence[int], length: int) -> GrowableCache:
    """Return a copy of the last `length` columns of these rows."""
    keys, values = (tensor[list(rows)] for tensor in cache)
    return join_rows([(keys, values)], length)


def join_rows(caches: Sequence[LayerCache], length: int, num_new: int = 0) -> GrowableCache:
    """Return the rows of several caches in new buffers. The rows are right-aligned, and at least `num_new` columns are
    free.
    """
    num_rows, row = sum(len(keys) for keys, _ in caches), 0
    num_spare = num_new + max(MIN_SPARE_COLUMNS, length // 8)
    keys, values = (like.new_empty(num_rows, like.shape[1], length + num_spare, like.shape[3]) for like in caches[0])
    for cache in caches:
        stop = row + len(cache[0])
        for buffer, tensor in zip((keys, values), cache, strict=True):
            padding = max(length - tensor.shape[COLUMN_AXIS], 0)
            buffer[row:stop, :, :padding] = 0
            buffer[row:stop, :, padding:length] = tensor[:, :, tensor.shape[COLUMN_AXIS] - length + padding :]
        row = stop
    return GrowableCache(KVBuffers(keys, values, length), length)


class GrowingLayer(DynamicLayer):
    """A transformers cache layer that appends to a `GrowableCache`."""

    def __init__(self, cache: LayerCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache: GrowableCache | None = None
        if cache is not None:
            self._set_cache(cache)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is None:
            return self._set_cache((key_states, value_states))
        return self._set_cache(self.cache.append(key_states, value_states))

    def _set_cache(self, cache: LayerCache) -> LayerCache:
        self.cache = cache if isinstance(cache, GrowableCache) else GrowableCache.wrap(cache)
        self.keys, self.values = self.cache
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True
        return self.cache


class GrowingCache(DynamicCache):
    """A transformers cache backed by `GrowableCache` layers.

    Layers with a sliding window also keep all columns, because rows must stay aligned. The mask applies the window.
    """

    def __init__(self, caches: Sequence[LayerCache] | None) -> None:
        super().__init__()
        self.layer_class_to_replicate = GrowingLayer
        self.layers = [GrowingLayer(cache) for cache in caches or ()]

    def layer_caches(self) -> list[LayerCache]:
        return [layer.cache for layer in self.layers if isinstance(layer, GrowingLayer) and layer.cache is not None]
