"""LoRA tiles. A tile is a limited number of consecutive rows with the same adapter, written as `[first row, rows,
adapter, 0]`.

Decode tiles are listed on the device, so graphs can be replayed with different adapters. Prompt tiles are listed on the
host; in a graph, unused tiles have no rows.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from lorax_server.kernels.ops import GRAPH_SEGMENTS, LoraBatch

DECODE_ROWS = 256  # number of rows in the largest decode step
DECODE_HEIGHT = 16
PROMPT_TILES = "prompt tiles"  # key in `LoraBatch.derived`, together with the tile height


class DecodeTiles(NamedTuple):
    """LoRA tiles for a decode step. Rows that use the base model have no tile."""

    tiles: torch.Tensor  # [rows, 4] int32, zero-padded
    num_tiles: torch.Tensor  # [1] int32


def decode_tiles(lora: LoraBatch) -> DecodeTiles:
    def make() -> DecodeTiles:
        indices = lora.adapter_indices
        tiles = DecodeTiles(indices.new_empty(len(indices), 4), indices.new_empty(1))
        _write_tiles(lora, tiles)
        return tiles

    return lora.cached("decode tiles", make)


def refresh_decode_tiles(lora: LoraBatch) -> None:
    """Update the decode tiles in place for the batch's current adapters."""
    _write_tiles(lora, decode_tiles(lora))


def _write_tiles(lora: LoraBatch, tiles: DecodeTiles) -> None:
    rows = len(lora.adapter_indices)
    _plan_tiles_kernel[(1,)](lora.adapter_indices, *tiles, rows, BLOCK=DECODE_ROWS, HEIGHT=DECODE_HEIGHT)


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["adapters", "tiles", "count"])
def _plan_tiles_kernel(adapters, tiles, count, num_rows, BLOCK: tl.constexpr, HEIGHT: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    is_row = rows < num_rows
    adapter = tl.load(adapters + rows, mask=is_row, other=0)
    before = tl.load(adapters + rows - 1, mask=is_row & (rows > 0), other=-1)
    after = tl.load(adapters + rows + 1, mask=rows + 1 < num_rows, other=-1)
    run_start = tl.associative_scan(tl.where(adapter != before, rows, 0), 0, _maximum)
    row_offsets = (rows - run_start) % HEIGHT
    is_adapted = is_row & (adapter != 0)
    is_first = is_adapted & (row_offsets == 0)
    is_last = is_adapted & ((row_offsets == HEIGHT - 1) | (adapter != after))
    number = tl.cumsum(is_first.to(tl.int32), 0) - 1
    total = tl.sum(is_first.to(tl.int32), 0)
    tl.store(tiles + number * 4, rows, mask=is_first)
    tl.store(tiles + number * 4 + 1, row_offsets + 1, mask=is_last)
    tl.store(tiles + number * 4 + 2, adapter, mask=is_first)
    tl.store(tiles + number * 4 + 3, 0, mask=is_first)
    is_rest = is_row & (rows >= total)
    for field in tl.static_range(4):
        tl.store(tiles + rows * 4 + field, 0, mask=is_rest)
    tl.store(count, total)


def prompt_tiles(lora: LoraBatch, height: int) -> torch.Tensor:
    """Return the LoRA tiles for a prompt, including tiles of rows that use the base model."""
    return lora.cached((PROMPT_TILES, height), lambda: _make_prompt_tiles(lora, height))


def refresh_prompt_tiles(lora: LoraBatch, current: LoraBatch) -> None:
    """Update the prompt tiles of `lora`, a graph's padded batch, in place for the adapters of `current`."""
    for key, tiles in lora.derived.items():
        if isinstance(key, tuple) and key[0] == PROMPT_TILES:
            cut = torch.zeros(tiles.shape, dtype=torch.int32, pin_memory=tiles.is_cuda)
            tile_list = _list_tiles(current, key[1])
            cut[: len(tile_list)] = torch.from_numpy(tile_list)
            tiles.copy_(cut, non_blocking=True)


def _make_prompt_tiles(lora: LoraBatch, height: int) -> torch.Tensor:
    device = lora.adapter_indices.device
    if lora.in_graph:
        max_tiles = -(-len(lora.adapter_indices) // height) + GRAPH_SEGMENTS
        return torch.zeros(max_tiles, 4, dtype=torch.int32, device=device)
    tiles = torch.from_numpy(_list_tiles(lora, height))
    return tiles.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tiles


def _list_tiles(lora: LoraBatch, height: int) -> npt.NDArray[np.int32]:
    bounds = np.array(lora.bounds)
    counts = -(-np.diff(bounds) // height)  # tiles per segment
    segments = np.repeat(np.arange(len(counts)), counts)
    tile_numbers = np.arange(len(segments)) - (counts.cumsum() - counts)[segments]
    first = bounds[segments] + tile_numbers * height
    rows = np.minimum(bounds[segments + 1] - first, height)
    adapters = np.array(lora.adapters)[segments]
    return np.stack([first, rows, adapters, np.zeros_like(first)], axis=1).astype(np.int32)
