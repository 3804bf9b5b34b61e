"""Tensors in GGUF files have exactly the values that the `gguf` package reads."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from lorax_server.distributed import FakeGroup, Shard, make_full_shard, shard_evenly
from lorax_server.errors import ConfigError, WeightsError
from lorax_server.gguf.architectures import TensorSource
from lorax_server.gguf.container import TENSOR_TYPES, read_gguf
from lorax_server.kernels import BlockMatrix, QuantizedMatrix
from lorax_server.weights import Weights
from lorax_server.weights import gguf as reader
from lorax_server.weights.gguf import GGUFTensor
from tests.builders import weight_options
from tests.gguf.blocks import random_blocks
from tests.gguf.writer import save

ROWS, INPUTS = 12, 512
TYPES = [Type(number) for number in TENSOR_TYPES]
FLOATS = ("F32", "F16", "BF16")
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with a random matrix of each type, and a vector."""
    path = tmp_path_factory.mktemp("tensors") / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind in TYPES:
        writer.add_tensor(kind.name, random_blocks(kind, ROWS, INPUTS), raw_dtype=kind)
    writer.add_tensor("vector", np.arange(64, dtype=np.float32))
    save(writer)
    return path


def open_tensor(path: Path, name: str, **source: Any) -> GGUFTensor:
    entry = read_gguf(path).tensors[name]
    return GGUFTensor(TensorSource(entry, entry.shape)._replace(**source))


def expected(path: Path, name: str) -> torch.Tensor:
    stored = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
    return torch.from_numpy(values.copy()).view(*stored.shape[::-1].tolist())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("read_bytes", [1, 2000, 2**20])  # one row, several rows, and all rows at a time
def test_values_match_gguf_package(kind: Type, read_bytes: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "READ_CHUNK_BYTES", read_bytes)
    tensor, values = open_tensor(path, kind.name), expected(path, kind.name)
    assert values.std() > 0.05
    assert torch.equal(tensor[()], values)
    assert torch.equal(tensor[slice(3, 9), slice(32, 96)], values[3:9, 32:96])
    matrix = tensor.read_matrix([(1, 4), (7, 8)], torch.float32)
    if kind.name in FLOATS:
        assert isinstance(matrix, torch.Tensor)
    else:
        assert isinstance(matrix, BlockMatrix)
        assert matrix.bits == (4 if kind.name in FOUR_BITS else 8)
        matrix = matrix.read()
    assert torch.equal(matrix, torch.cat([values[1:4], values[7:8]]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_interleaved_heads_are_separated(kind: str, path: Path) -> None:
    values = expected(path, kind)
    tensor = open_tensor(path, kind, head_dim=6)
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    assert torch.equal(tensor[()], torch.cat([values[order], values[6 + order]]))
    assert torch.equal(tensor[(slice(6, 12),)], values[6 + order])
    with pytest.raises(ValueError, match="split heads of size 6"):
        tensor[(slice(3, 9),)]


def test_vector_slices_and_offsets_are_read(path: Path) -> None:
    vector = torch.arange(64.0)
    assert torch.equal(open_tensor(path, "vector")[()], vector)
    assert torch.equal(open_tensor(path, "vector")[(slice(3, 60),)], vector[3:60])
    assert torch.equal(open_tensor(path, "vector", offset=-1.0)[()], vector - 1)
    part = open_tensor(path, "vector", shape=(8,), first_row=16)
    assert torch.equal(part[()], vector[16:24])
    row = open_tensor(path, "F32", shape=(INPUTS,), first_row=5)
    assert torch.equal(row[()], expected(path, "F32")[5])


def to_tensor(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    return matrix if isinstance(matrix, torch.Tensor) else matrix.read()


def make_weights(path: Path, rank: int = 0, ranks: int = 1) -> Weights:
    tensors = {name: open_tensor(path, name) for name in read_gguf(path).tensors}
    return Weights(tensors, **weight_options(rank=rank, ranks=ranks))


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q4_K", "F16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_its_shard(kind: str, ranks: int, path: Path) -> None:
    values, by_rows, by_inputs = expected(path, kind), [], []
    for rank in range(ranks):
        weights, group = make_weights(path, rank, ranks), FakeGroup(rank, ranks)
        rows, inputs = shard_evenly(group, ROWS, "rows"), shard_evenly(group, INPUTS, "inputs")
        by_rows.append(weights.get_matrix(kind, rows, make_full_shard(INPUTS)))
        by_inputs.append(weights.get_matrix(kind, make_full_shard(ROWS), inputs))
    plain = [
        [each if isinstance(each, torch.Tensor) else each.read() for each in parts] for parts in (by_rows, by_inputs)
    ]
    assert torch.equal(torch.cat(plain[0]), values)
    assert torch.equal(torch.cat(plain[1], dim=1), values)


def test_interleaved_shards_are_reordered(path: Path) -> None:
    shard = Shard(ROWS, ((6, 12),), interleaved=(6, 4))
    for kind in ("Q8_0", "F32"):
        matrix = make_weights(path).get_matrix(kind, shard, make_full_shard(INPUTS))
        assert torch.equal(to_tensor(matrix), expected(path, kind)[[6, 8, 7, 9, 10, 11]])


def test_shards_that_split_blocks_are_rejected(path: Path) -> None:
    weights, inputs = make_weights(path), Shard(INPUTS, ((16, 64),))
    with pytest.raises(ConfigError, match="tensor 'Q4_0' cannot be split over several ranks: inputs 16 to 64 split"):
        weights.get_matrix("Q4_0", make_full_shard(ROWS), inputs)


def test_wrong_shape_is_rejected(path: Path) -> None:
    with pytest.raises(WeightsError, match=r"a.gguf: tensor 'Q4_0' has shape \(12, 512\), expected \(12, 64\)"):
        make_weights(path).get_matrix("Q4_0", make_full_shard(ROWS), make_full_shard(64))


@pytest.mark.parametrize("kind", [each for each in TYPES if each.name not in FLOATS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_scales_are_rejected(kind: Type, value: float, tmp_path: Path) -> None:
    data = random_blocks(kind, 2, 512)
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    offset = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind.name, 0)
    data.reshape(-1, num_bytes)[1, offset : offset + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    save(writer)
    with pytest.raises(WeightsError, match=rf"a.gguf: a {kind.name} tensor contains scales that are not finite"):
        open_tensor(tmp_path / "a.gguf", "t")[()]


def test_file_truncated_after_opening_is_rejected(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a.gguf"
    copy.write_bytes(path.read_bytes())
    tensor = open_tensor(copy, "BF16")
    copy.write_bytes(path.read_bytes()[: tensor.source.entry.start + 100])
    with pytest.raises(WeightsError, match="the file changed while it was read; restart the server"):
        tensor[()]
