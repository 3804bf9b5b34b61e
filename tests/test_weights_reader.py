"""Stream weights to a device. Without a GPU, the reader fills host tensors."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorax_server.distributed import FakeGroup, shard_evenly, shard_units, shard_vocab
from lorax_server.errors import WeightsError
from lorax_server.kernels import select_ops
from lorax_server.weights import Weights, open_tensors, open_weights
from lorax_server.weights.reader import WeightsReader
from tests.builders import CPU, weight_options
from tests.test_weights import DAMAGE, safetensors_bytes, some_tensors

SHAPES = {"matrix": (64, 48), "tall": (1000, 7), "cube": (2, 4, 6), "vector": (12,), "scalar": (), "nothing": (0, 5)}


def write_tensors(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    save_file(tensors, path)
    return tensors


def open_streamed(
    path: Path, names: list[str], *, buffer_bytes: int = 64, dtype: torch.dtype = torch.float32
) -> Weights:
    reader = WeightsReader(CPU, buffer_bytes=buffer_bytes)
    return Weights(open_tensors(dict.fromkeys(names, path)), reader=reader, **weight_options(dtype=dtype))


@pytest.mark.parametrize("buffer_bytes", [1, 40, 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_assembled_from_chunks(tmp_path: Path, buffer_bytes: int, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write_tensors(path, dtype)
    if buffer_bytes == 1:
        tensors.pop("tall")  # one task per byte would be slow
        tensors.pop("matrix")
    with open_streamed(path, list(tensors), buffer_bytes=buffer_bytes, dtype=torch.bfloat16) as weights:
        for _ in range(2):
            for name, tensor in tensors.items():
                assert torch.equal(weights.get_tensor(name, SHAPES[name]), tensor.bfloat16())


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_each_rank_gets_its_shard(tmp_path: Path, rank: int) -> None:
    path, group = tmp_path / "model.safetensors", FakeGroup(rank, 4)
    tensors = write_tensors(path)
    with open_streamed(path, list(tensors)) as weights:
        for name, dim, shard in [
            ("matrix", 0, shard_evenly(group, 64, "matrix")),
            ("matrix", 1, shard_evenly(group, 48, "matrix")),
            ("cube", 1, shard_evenly(group, 4, "cube")),
            ("cube", 2, shard_vocab(group, 6)),
            ("tall", 0, shard_vocab(group, 1000)),
            ("vector", 0, shard_units(group, [(4, 1), (4, 2)], "parts")),
        ]:
            part = weights.get_sharded(name, dim, shard, SHAPES[name])
            places = [place for start, stop in shard.ranges for place in range(start, stop)]
            assert torch.equal(part, tensors[name].index_select(dim, torch.tensor(places, dtype=torch.long)))
            assert part.is_contiguous()


def test_only_selected_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write_tensors(path)
    with open_streamed(path, list(tensors), buffer_bytes=1 << 20) as weights:
        weights.get_tensor("vector")  # plus the header
        sizes: list[int] = []
        preadv: Callable[..., int] = os.preadv

        def record(descriptor: int, memory: list[memoryview], offset: int) -> int:
            sizes.append(len(memory[0]))
            return preadv(descriptor, memory, offset)

        monkeypatch.setattr(os, "preadv", record)
        weights.get_sharded("matrix", 0, shard_evenly(FakeGroup(1, 4), 64, "matrix"))
    assert sizes == [16 * 48 * 4]


def test_short_reads_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write_tensors(path)
    preadv: Callable[..., int] = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, memory, offset: preadv(descriptor, [memory[0][:33]], offset))
    with open_streamed(path, list(tensors), buffer_bytes=1000) as weights:
        assert torch.equal(weights.get_tensor("matrix"), tensors["matrix"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantized_tensor_is_rejected(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"qweight": torch.ones(4).to(dtype)}, path)
    with (
        open_streamed(path, ["qweight"]) as weights,
        pytest.raises(WeightsError, match=f"'qweight' is {dtype}; only float16 to float64 are supported"),
    ):
        weights.get_tensor("qweight")


def test_unsupported_dtype_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(4, dtype=torch.uint16)}, path)
    with open_streamed(path, ["x"]) as weights, pytest.raises(WeightsError, match="'x' has an unknown dtype, U16"):
        weights.get_tensor("x")


def test_error_names_file_truncated_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = write_tensors(path)
    with open_streamed(path, list(tensors)) as weights:
        weights.get_tensor("vector")
        os.truncate(path, path.stat().st_size - 3000)
        with pytest.raises(WeightsError, match=r"model\.safetensors: the file is truncated at byte \d+"):
            [weights.get_tensor(name) for name in tensors]


def test_error_names_file_replaced_after_opening(tmp_path: Path) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    tensors = write_tensors(path)
    save_file({"matrix": torch.zeros(3, 3)}, other)
    with open_streamed(path, list(tensors)) as weights:
        other.replace(path)
        with pytest.raises(WeightsError, match=r"model\.safetensors: tensor 'matrix' changed"):
            weights.get_tensor("matrix", SHAPES["matrix"])
        with pytest.raises(WeightsError, match=r"model\.safetensors: tensor 'vector' cannot be read"):
            weights.get_tensor("vector")


@pytest.mark.parametrize("damage", [*DAMAGE, "missing", "list", "sizes"])
def test_error_names_damaged_file(tmp_path: Path, damage: str) -> None:
    """safetensors checks the file first, but the file may be damaged between this check and the read."""
    path = tmp_path / "model.safetensors"
    good = safetensors_bytes(tmp_path)
    if damage in DAMAGE:
        path.write_bytes(DAMAGE[damage](good))
    elif damage == "list":
        path.write_bytes((2).to_bytes(8, "little") + b"[]")
    elif damage == "sizes":
        header = json.dumps({"x": {"dtype": "F32", "shape": [100], "data_offsets": ["a", "b"]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    with (
        closing(WeightsReader(CPU, buffer_bytes=64)) as reader,
        pytest.raises(WeightsError, match=r"model\.safetensors"),
    ):
        reader.read(path, "x", (100,), ())


def test_cpu_maps_files(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_weights(tmp_path, **weight_options()) as weights:
        assert weights._reader is None
        assert torch.equal(weights.get_tensor("matrix"), tensors["matrix"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_tensors_match_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """Free tensors immediately, so that memory is reused while copies are running."""
    generator = torch.Generator().manual_seed(2)
    tensors = {f"x{i}": torch.randn(i + 1, 977, 1031, generator=generator).bfloat16() for i in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    device = torch.device("cuda")
    placement = {**weight_options(dtype=dtype), "device": device, "ops": select_ops(device)}
    with open_weights(tmp_path, **placement) as weights:
        assert weights._reader is not None
        for name, tensor in [*tensors.items(), *reversed(tensors.items())]:
            twice = torch.cat([weights.get_tensor(name), weights.get_tensor(name)])
            columns = weights.get_sharded(name, 2, shard_vocab(FakeGroup(1, 2), 1031))
            assert torch.equal(columns.cpu(), tensor[:, :, 516:].to(dtype))
            assert torch.equal(twice.cpu(), torch.cat([tensor, tensor]).to(dtype))
