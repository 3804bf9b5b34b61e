"""Tensors are read in blocks, once, independent of the request order."""

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from lorax_server.adapters import tensor_reader
from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.tensor_reader import TensorReader
from lorax_server.files.regular_file import FileChangedError, open_regular_file, read_stamp

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = [(draw.randrange(0, 40), draw.randrange(1, 9)) for _ in range(30)]
    return {
        f"tensor {i}": torch.randn(*shape, generator=generator).to(draw.choice(DTYPES))
        for i, shape in enumerate(shapes)
    }


def open_reader(path: Path, tensors: dict[str, torch.Tensor]) -> TensorReader:
    save_file(tensors, path)
    return TensorReader(path, read_stamp(path), read_header(path, "x"))


@pytest.mark.parametrize("stretch_bytes", [1, 500, 2000, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_can_be_read_repeatedly_in_any_order(
    seed: int, stretch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "READ_BLOCK_BYTES", stretch_bytes)
    tensors = make_tensors(seed)
    reader = open_reader(tmp_path / "file", tensors)
    order = list(tensors)
    for _ in range(2):
        random.Random(seed).shuffle(order)
        for key in order:
            actual, is_finite = reader.read(key)
            expected = tensors[key].float() if tensors[key].dtype == torch.float64 else tensors[key]
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
            assert is_finite
        assert all(block.elements is None for block in reader._blocks.values())  # no block stays in memory


def test_only_non_finite_tensor_is_reported(tmp_path: Path) -> None:
    tensors = {name: torch.ones(8, dtype=torch.bfloat16) for name in "abc"}
    tensors["b"][3] = torch.inf
    tensors |= {"d": torch.ones(3, dtype=torch.float64), "e": torch.full((3,), 1e300, dtype=torch.float64)}
    reader = open_reader(tmp_path / "file", tensors)
    assert [reader.read(key)[1] for key in "abcde"] == [True, False, True, True, False]


def test_file_is_read_in_large_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "READ_BLOCK_BYTES", 1000)
    tensors = {f"tensor {i:02}": torch.full((10,), float(i)) for i in range(50)}  # 40 bytes each
    reader = open_reader(tmp_path / "file", tensors)
    with mock.patch("lorax_server.adapters.tensor_reader.open_regular_file", wraps=open_regular_file) as opened:
        for key, expected in tensors.items():
            assert torch.equal(reader.read(key)[0], expected)
    assert opened.call_count == 2


def test_replaced_file_is_rejected(tmp_path: Path) -> None:
    reader = open_reader(tmp_path / "file", {"a": torch.ones(8)})
    save_file({"a": torch.zeros(8)}, tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "file")
    with pytest.raises(FileChangedError):
        reader.read("a")
