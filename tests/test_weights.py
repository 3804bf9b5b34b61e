import json
import os
import pickle
import random
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from lorax_server.cli.demo import DEMO_FOLDER
from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup, Shard, make_full_shard, shard_evenly, shard_units, shard_vocab
from lorax_server.errors import ConfigError, WeightsError
from lorax_server.files.model_files import check_model_files
from lorax_server.models import get_model
from lorax_server.weights import Weights, estimate_bytes, open_tensors, open_weights
from tests.builders import CPU, memory_weights, weight_options

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(8, 6, generator=generator),
        "cube": torch.randn(2, 4, 6, generator=generator),
        "vector": torch.randn(12, generator=generator),
        "scalar": torch.tensor(2.5),
    }


def write_single(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), folder / "model.safetensors")


def write_sharded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    weight_map = {name: f"model-{index}.safetensors" for index, name in enumerate(tensors)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_bin(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    torch.save(dict(tensors), folder / "pytorch_model.bin")


def write_sharded_bin(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    weight_map = {name: f"pytorch_model-{index}.bin" for index, name in enumerate(tensors)}
    for name, file in weight_map.items():
        torch.save({name: tensors[name]}, folder / file)
    (folder / BIN_INDEX).write_text(json.dumps({"weight_map": weight_map}))


FORMATS = [write_single, write_sharded, write_bin, write_sharded_bin]
Writer = Callable[[Path, Mapping[str, torch.Tensor]], None]


class RecordingWeights(Weights):
    """Weights that record how much of each tensor is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[tuple[str, tuple[int, ...]]] = []

    def _read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = super()._read(name, index)
        self.read.append((name, tuple(tensor.shape)))
        return tensor


# --- unsharded and sharded tensors


@pytest.mark.parametrize("write", FORMATS)
def test_unsharded_tensors_round_trip(tmp_path: Path, write: Writer) -> None:
    tensors = some_tensors()
    write(tmp_path, tensors)
    weights = open_weights(tmp_path, **weight_options())
    for name, tensor in tensors.items():
        assert weights.has(name)
        assert weights.get_shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.get_tensor(name, tuple(tensor.shape)), tensor)
    assert not weights.has("nothing")


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_gets_its_shard(tmp_path: Path, write: Writer, ranks: int) -> None:
    tensors = some_tensors()
    write(tmp_path, tensors)
    twin = memory_weights(tensors)
    for rank in range(ranks):
        group = FakeGroup(rank, ranks)
        weights = open_weights(tmp_path, **weight_options(rank=rank, ranks=ranks))
        for name, dim, shard in [
            ("vector", 0, shard_evenly(group, 12, "vector")),
            ("matrix", 0, shard_evenly(group, 8, "matrix")),
            ("matrix", 1, shard_vocab(group, 6)),
            ("cube", 1, shard_evenly(group, 4, "cube")),
            ("vector", 0, shard_units(group, [(4, 1), (4, 2)], "parts")),
        ]:
            part = weights.get_sharded(name, dim, shard, tuple(tensors[name].shape))
            places = [place for start, stop in shard.ranges for place in range(start, stop)]
            assert torch.equal(part, tensors[name].index_select(dim, torch.tensor(places, dtype=torch.long)))
            assert torch.equal(part, twin.get_sharded(name, dim, shard))


def test_empty_shard_has_no_rows(tmp_path: Path) -> None:
    write_single(tmp_path, {"embedding": torch.ones(5, 3)})
    shard = shard_vocab(FakeGroup(3, 4), 5)
    assert open_weights(tmp_path, **weight_options()).get_sharded("embedding", 0, shard, (5, 3)).shape == (0, 3)
    assert memory_weights({"embedding": torch.ones(5, 3)}).get_sharded("embedding", 0, shard).shape == (0, 3)


def test_only_shard_is_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_single(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    weights = RecordingWeights(open_tensors(dict.fromkeys(tensors, path)), **weight_options())
    assert weights.has("matrix")
    assert weights.get_shape("matrix") == (8, 6)
    assert weights.read == []
    group = FakeGroup(1, 2)
    weights.get_sharded("matrix", 0, shard_evenly(group, 8, "matrix"))
    weights.get_sharded("matrix", 1, shard_evenly(group, 6, "matrix"))
    weights.get_sharded("vector", 0, shard_units(group, [(2, 3), (2, 3)], "vector"))
    assert weights.read == [("matrix", (4, 6)), ("matrix", (8, 3)), ("vector", (3,)), ("vector", (3,))]


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux can forget its peak memory")
def test_reading_shard_allocates_only_shard_memory(tmp_path: Path) -> None:
    rows = 2**18
    header = json.dumps({"x": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # A sparse file of 1 GB, which uses no disk space.
        file.truncate(8 + len(header) + rows * 4096)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    weights = open_weights(tmp_path, **weight_options(dtype=torch.bfloat16))
    part = weights.get_sharded("x", 0, shard_evenly(FakeGroup(5, 4096), rows, "x"), (rows, 1024))
    assert torch.equal(part, torch.zeros(64, 1024, dtype=torch.bfloat16))
    assert peak_memory() - before < 2**26


def test_contiguous_shard_is_one_read(tmp_path: Path) -> None:
    write_single(tmp_path, some_tensors())
    path = tmp_path / "model.safetensors"
    weights = RecordingWeights(open_tensors({"matrix": path}), **weight_options())
    weights.get_sharded("matrix", 1, make_full_shard(6))
    assert weights.read == [("matrix", (8, 6))]


@pytest.mark.parametrize("write", FORMATS)
def test_tensors_are_cast_to_model_dtype(tmp_path: Path, write: Writer) -> None:
    stored = some_tensors()["matrix"].bfloat16()
    write(tmp_path, {"matrix": stored, "scalar": torch.tensor(0.5, dtype=torch.bfloat16)})
    weights = open_weights(tmp_path, **weight_options(dtype=torch.float32))
    assert weights.get_tensor("scalar").dtype == torch.float32
    assert torch.equal(weights.get_tensor("matrix"), stored.float())
    part = weights.get_sharded("matrix", 0, shard_evenly(FakeGroup(1, 2), 8, "matrix"))
    assert part.dtype == torch.float32
    assert torch.equal(part, stored[4:].float())


def test_safetensors_are_preferred_to_pickles(tmp_path: Path) -> None:
    write_single(tmp_path, {"x": torch.ones(1)})
    write_bin(tmp_path, {"x": torch.zeros(1)})
    assert open_weights(tmp_path, **weight_options()).get_tensor("x") == 1


def test_estimate_bytes_uses_load_dtype(tmp_path: Path) -> None:
    write_sharded(tmp_path, {"x": torch.zeros(1000), "y": torch.zeros(500, dtype=torch.float16)})
    assert estimate_bytes(tmp_path, torch.float32, CPU) == 6000
    assert estimate_bytes(tmp_path, torch.bfloat16, CPU) == 3000


def test_estimate_bytes_of_pickles_is_lower_bound(tmp_path: Path) -> None:
    write_bin(tmp_path, {"x": torch.zeros(1000)})
    assert 4000 <= estimate_bytes(tmp_path, torch.float32, CPU) < 6000
    assert estimate_bytes(tmp_path, torch.float16, CPU) < 3000


# --- names


ALIASES = [
    ("transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
    ("transformer.wte.weight", "wte.weight"),
    ("model.decoder.layers.0.fc1.weight", "decoder.layers.0.fc1.weight"),
    ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", "layers.0.mlp.dense_h_to_4h.weight"),
    ("model.layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
    ("model.embed_tokens.weight", "embed_tokens.weight"),
]


@pytest.mark.parametrize(("requested_name", "stored"), ALIASES)
@pytest.mark.parametrize("write", FORMATS)
def test_inner_model_checkpoint_lacks_prefix(tmp_path: Path, write: Writer, requested_name: str, stored: str) -> None:
    tensor = some_tensors()["matrix"]
    write(tmp_path, {stored: tensor})
    weights = open_weights(tmp_path, **weight_options())
    assert weights.has(requested_name)
    assert weights.get_shape(requested_name) == (8, 6)
    assert torch.equal(weights.get_tensor(requested_name, (8, 6)), tensor)
    assert torch.equal(
        weights.get_sharded(requested_name, 1, shard_evenly(FakeGroup(1, 2), 6, "x"), (8, 6)), tensor[:, 3:]
    )


@pytest.mark.parametrize(("long", "short"), ALIASES)
def test_full_name_takes_precedence(long: str, short: str) -> None:
    weights = memory_weights({long: torch.ones(1), short: torch.zeros(1)})
    assert weights.get_tensor(long) == 1
    assert weights.get_tensor(short) == 0


def test_only_prefix_may_be_missing() -> None:
    weights = memory_weights({"fc1.weight": torch.ones(1)})
    assert not weights.has("model.decoder.fc1.weight")
    assert not weights.has("lm_head.fc1.weight")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.wte.weight


def test_tied_tensors_are_found_under_both_names(tmp_path: Path) -> None:
    model = Tied()
    save_model(model, str(tmp_path / "model.safetensors"))
    weights = open_weights(tmp_path, **weight_options())
    for name in ("wte.weight", "lm_head.weight", "transformer.wte.weight", "transformer.lm_head.weight"):
        assert weights.has(name)
        assert weights.get_shape(name) == (6, 4)
        assert torch.equal(weights.get_tensor(name, (6, 4)), model.wte.weight)
        part = weights.get_sharded(name, 0, shard_evenly(FakeGroup(1, 2), 6, "vocab_size"))
        assert torch.equal(part, model.wte.weight[3:])


def test_tied_scalars_are_found_under_both_names(tmp_path: Path) -> None:
    save_file({"k_scale": torch.tensor(0.5)}, tmp_path / "model.safetensors", metadata={"v_scale": "k_scale"})
    assert open_weights(tmp_path, **weight_options()).get_tensor("v_scale") == 0.5


# --- invalid tensors


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("name", ["nothing", "model.layers.0.nothing"])
def test_missing_tensor_error_names_file(tmp_path: Path, write: Writer, name: str) -> None:
    write(tmp_path, some_tensors())
    weights = open_weights(tmp_path, **weight_options())
    for call in (
        lambda: weights.get_tensor(name),
        lambda: weights.get_shape(name),
        lambda: weights.get_sharded(name, 0, make_full_shard(3)),
    ):
        with pytest.raises(WeightsError, match="is missing") as caught:
            call()
        assert repr(name) in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("write", FORMATS)
def test_wrong_shape_error_names_expected_shape(tmp_path: Path, write: Writer) -> None:
    write(tmp_path, some_tensors())
    weights = open_weights(tmp_path, **weight_options())
    calls: list[Callable[[], Any]] = [
        lambda: weights.get_tensor("matrix", (8, 7)),
        lambda: weights.get_sharded("matrix", 1, Shard(7, ((0, 3),)), (8, 7)),
    ]
    for call in calls:
        with pytest.raises(WeightsError, match=r"'matrix' has shape \(8, 6\), expected \(8, 7\)") as caught:
            call()
        assert str(tmp_path) in str(caught.value)


def test_wrong_shape_error_names_shard_file(tmp_path: Path) -> None:
    write_sharded(tmp_path, some_tensors())
    with pytest.raises(WeightsError) as caught:
        open_weights(tmp_path, **weight_options()).get_tensor("cube", (1,))
    assert str(tmp_path / "model-1.safetensors") in str(caught.value)


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantized_tensor_is_rejected(tmp_path: Path, write: Writer, dtype: torch.dtype) -> None:
    write(tmp_path, {"qweight": torch.ones(4).to(dtype)})
    weights = open_weights(tmp_path, **weight_options())
    with pytest.raises(WeightsError, match=f"'qweight' is {dtype}; only float16 to float64 are supported") as caught:
        weights.get_tensor("qweight")
    assert str(tmp_path) in str(caught.value)


def test_in_memory_tensor_error_names_source() -> None:
    weights = Weights({}, source="the test's tensors", **weight_options())
    with pytest.raises(WeightsError, match="the test's tensors: tensor 'x' is missing"):
        weights.get_tensor("x")


# --- unreadable files


def safetensors_bytes(tmp_path: Path) -> bytes:
    path = tmp_path / "whole.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    return path.read_bytes()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda _: random.Random(0).randbytes(500),
    "truncated": lambda good: good[:-100],
    "truncated in the header": lambda good: good[:20],
    "huge header": lambda good: (2**62).to_bytes(8, "little") + good[8:],
    "header past the end": lambda good: (50_000_000).to_bytes(8, "little") + good[8:],
    "empty": lambda _: b"",
    "header that is not JSON": lambda good: good[:8] + b"?" + good[9:],
    "offsets past the end": lambda good: good.replace(b"[0,400]", b"[0,999]"),
}


TRUNCATED = ("truncated", "truncated in the header", "header past the end", "empty", "offsets past the end")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("sharded", [False, True])
def test_error_names_damaged_safetensors_file(tmp_path: Path, damage: str, sharded: bool) -> None:
    damaged = DAMAGE[damage](safetensors_bytes(tmp_path))
    path = tmp_path / ("shard.safetensors" if sharded else "model.safetensors")
    path.write_bytes(damaged)
    (tmp_path / "tokenizer.json").touch()
    if sharded:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": path.name}}))
    is_short = damage in TRUNCATED
    reason = r"the file has \d+ bytes.*was the copy interrupted\?" if is_short else "not a readable safetensors file"
    with pytest.raises(WeightsError, match=reason) as caught:
        open_weights(tmp_path, **weight_options())
    assert str(path) in str(caught.value)
    with pytest.raises(WeightsError, match=reason) if is_short else nullcontext():
        check_model_files(tmp_path)


def test_truncated_file_error_names_both_sizes(tmp_path: Path) -> None:
    good = safetensors_bytes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(good[:-100])
    with pytest.raises(WeightsError, match=f"has {len(good) - 100} bytes, but its header needs {len(good)}; was the"):
        check_model_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(good)
    with pytest.raises(ConfigError, match=r"no tokenizer; looked for tokenizer\.json, tokenizer\.model, "):
        check_model_files(tmp_path)
    (tmp_path / "qwen.tiktoken").touch()
    check_model_files(tmp_path)


def test_git_lfs_pointer_error_suggests_git_lfs_pull(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    for check in (check_model_files, lambda folder: open_weights(folder, **weight_options())):
        with pytest.raises(WeightsError, match="is a Git LFS pointer without the weights; run `git lfs pull`"):
            check(tmp_path)


BAD_INDICES = {
    "not JSON": ("{nope", "not a weight index"),
    "empty": ("", "not a weight index"),
    "not UTF-8": (b"\xff\xfe{", "not a weight index"),
    "no weight_map": ('{"metadata": {}}', "weight_map"),
    "not an object": ("[]", "weight_map"),
    "weight_map of a wrong type": ('{"weight_map": ["x"]}', "weight_map"),
    "missing shard": ('{"weight_map": {"x": "absent.safetensors"}}', "'absent.safetensors' is missing"),
    "number for a shard": ('{"weight_map": {"x": 3}}', "'3' is missing"),
    "no name for a shard": ('{"weight_map": {"x": ""}}', "'' is missing"),
    "parent folder": ('{"weight_map": {"x": "../outside.safetensors"}}', "'../outside.safetensors' is not a plain"),
    "subfolder": ('{"weight_map": {"x": "sub/x.safetensors"}}', "'sub/x.safetensors' is not a plain"),
    "absolute path": ('{"weight_map": {"x": "/etc/passwd"}}', "'/etc/passwd' is not a plain"),
    "the parent itself": ('{"weight_map": {"x": ".."}}', r"'\.\.'"),
    "deeply nested": ("[" * 100_000, "not a weight index"),
}


@pytest.mark.parametrize("index", [INDEX, BIN_INDEX])
@pytest.mark.parametrize(("content", "message"), BAD_INDICES.values(), ids=BAD_INDICES.keys())
def test_error_names_invalid_index(tmp_path: Path, index: str, content: str | bytes, message: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    # The files outside of the folder exist and are valid.
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "sub" / "x.safetensors")
    (folder / index).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WeightsError, match=message) as caught:
        open_weights(folder, **weight_options())
    assert str(folder / index) in str(caught.value)


def test_index_with_missing_tensors_is_rejected(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    weights = open_weights(tmp_path, **weight_options())
    assert weights.get_tensor("x") == 0
    with pytest.raises(WeightsError, match=r"a\.safetensors: tensor 'y' cannot be read"):
        weights.get_tensor("y")


def test_pickle_index_with_missing_tensors_is_rejected(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "a.bin")
    (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"x": "a.bin", "y": "a.bin"}}))
    with pytest.raises(WeightsError, match="tensor 'y' is missing"):
        open_weights(tmp_path, **weight_options()).get_tensor("y")


@pytest.mark.parametrize("present", [False, True])
def test_error_names_folder_without_weights(tmp_path: Path, present: bool) -> None:
    folder = tmp_path / "model"
    if present:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"no weights; looked for model\.safetensors") as caught:
        open_weights(folder, **weight_options())
    assert str(folder) in str(caught.value)


# --- pickles


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def hostile_zip(path: Path, marker: Path) -> None:
    torch.save({"x": torch.zeros(1), "y": Hostile(marker)}, path)


def hostile_legacy(path: Path, marker: Path) -> None:
    torch.save({"y": Hostile(marker)}, path, _use_new_zipfile_serialization=False)


def hostile_plain(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps({"y": Hostile(marker)}))


@pytest.mark.parametrize("write", [hostile_zip, hostile_legacy, hostile_plain])
@pytest.mark.parametrize("sharded", [False, True])
def test_hostile_pickle_is_not_executed(tmp_path: Path, write: Callable[[Path, Path], None], sharded: bool) -> None:
    path, marker = tmp_path / ("shard.bin" if sharded else "pytorch_model.bin"), tmp_path / "marker"
    write(path, marker)
    if sharded:
        (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"y": "shard.bin"}}))
    with pytest.raises(WeightsError, match="cannot be loaded as plain tensors") as caught:
        open_weights(tmp_path, **weight_options())
    assert str(path) in str(caught.value)
    assert not marker.exists()


def test_hostile_pickle_fixture_executes_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        {"x": [1.0, 2.0]},
        {"x": {"nested": torch.zeros(1)}},
        [torch.zeros(1)],
        torch.zeros(1),
        {"step": 3},
        {"x": torch.zeros(1), "y": torch.eye(3).to_sparse()},
    ],
    ids=["list", "nested", "no dictionary", "bare tensor", "number", "sparse"],
)
def test_pickle_with_non_tensor_objects_is_rejected(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(WeightsError, match=r"not a plain dictionary of tensors|not load as plain tensors") as caught:
        open_weights(tmp_path, **weight_options())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["random", "truncated", "empty"])
def test_error_names_damaged_pickle(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.zeros(2000)}, path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(WeightsError, match="cannot be loaded as plain tensors") as caught:
        open_weights(tmp_path, **weight_options())
    assert str(path) in str(caught.value)


def test_legacy_pickle_format_can_be_loaded(tmp_path: Path) -> None:
    tensor = some_tensors()["matrix"]
    torch.save({"matrix": tensor}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    weights: Weights = open_weights(tmp_path, **weight_options())
    assert torch.equal(weights.get_tensor("matrix"), tensor)


def test_loading_progress_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("lorax_server.weights.progress.LOG_INTERVAL_S", 0.0)
    caplog.set_level("INFO", "lorax_server.weights.progress")
    get_model(ModelConfig(DEMO_FOLDER / "model"))
    pattern = r"loading weights: (\d+\.\d\d) of (\d+\.\d\d) GB in \d+ s"
    amounts = [re.fullmatch(pattern, message) for message in caplog.messages]
    loaded = [float(match[1]) for match in amounts if match]
    assert len(loaded) > 10
    assert loaded == sorted(loaded)
    assert amounts[-1] is not None
    assert amounts[-1][1] == amounts[-1][2]


def test_fast_loads_log_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lorax_server.weights.progress")
    get_model(ModelConfig(DEMO_FOLDER / "model"))
    assert caplog.messages == []
