"""LoRA tiles."""

import random
from itertools import groupby

import pytest
import torch

from lorax_server.kernels.triton import lora_tiles
from tests.kernels.triton.cases import SMALL_LAYERS, lora_batch

LAYER = SMALL_LAYERS[1]


def list_expected_tiles(indices: list[int], height: int, *, with_base: bool) -> list[list[int]]:
    result = []
    for adapter, run in groupby(range(len(indices)), key=lambda row: indices[row]):
        rows = list(run)
        for place in range(0, len(rows), height):
            if adapter or with_base:
                result.append([rows[place], len(rows[place : place + height]), adapter, 0])
    return result


MIXES = [
    [(1, 1)],
    [(0, 5)],
    [(2, 256)],
    [(1, 16), (2, 17), (3, 15)],
    [(0, 1), (1, 1), (2, 1), (1, 33), (0, 2), (3, 1)],
    [(3, 100), (0, 3), (1, 48), (2, 105)],
]


@pytest.mark.parametrize("runs", MIXES, ids=str)
def test_decode_tiles_are_listed_on_device(device: torch.device, runs: list[tuple[int, int]]) -> None:
    batch = lora_batch(LAYER, runs, [[1]] * 3, device=device, dtype=torch.bfloat16)
    made, count = lora_tiles.decode_tiles(batch)
    expected = list_expected_tiles(batch.adapter_indices.tolist(), 16, with_base=False)
    rest = [[0, 0, 0, 0]] * (len(batch.adapter_indices) - len(expected))
    assert made.tolist() == expected + rest
    assert count.tolist() == [len(expected)]


def test_decode_tiles_are_refreshed_in_place(device: torch.device) -> None:
    batch = lora_batch(LAYER, [(1, 40)], [[1]] * 3, device=device, dtype=torch.bfloat16)
    before = lora_tiles.decode_tiles(batch)
    draw = random.Random(0)
    for _ in range(3):
        indices = [draw.randrange(4) for _ in range(40)]
        batch.adapter_indices.copy_(torch.tensor(indices, dtype=torch.int32))
        lora_tiles.refresh_decode_tiles(batch)
        expected = list_expected_tiles(indices, 16, with_base=False)
        assert before.tiles.tolist()[: len(expected)] == expected
        assert not before.tiles[len(expected) :].any()
        assert before.num_tiles.tolist() == [len(expected)]


@pytest.mark.parametrize(("runs", "height"), list(zip(MIXES, [16, 32, 64, 128, 16, 32], strict=True)), ids=str)
def test_prompt_tiles_cover_every_token(device: torch.device, runs: list[tuple[int, int]], height: int) -> None:
    batch = lora_batch(LAYER, runs, [[1]] * 3, device=device, dtype=torch.bfloat16)
    made = lora_tiles.prompt_tiles(batch, height)
    assert made.tolist() == list_expected_tiles(batch.adapter_indices.tolist(), height, with_base=True)
    assert lora_tiles.prompt_tiles(batch, height) is made
