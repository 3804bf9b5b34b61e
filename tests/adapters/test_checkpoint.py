"""Malformed adapter files, and tensor names from all PEFT versions."""

import io
import json
import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

from lorax_server.adapters import checkpoint
from lorax_server.adapters.checkpoint import (
    MAX_DIMENSIONS,
    MAX_KEY_LENGTH,
    TensorInfo,
    TensorRole,
    assign_tensors,
    read_header,
)
from lorax_server.adapters.sources.source import read_json
from lorax_server.errors import AdapterError
from lorax_server.files.regular_file import open_regular_file

NAME = "acme/tuned"


def assigned_keys(keys: list[str], modules: Any) -> dict[str, dict[TensorRole, str]]:
    return assign_tensors(keys, modules, NAME)[0]


def header_bytes(header: Any) -> bytes:
    return header if isinstance(header, bytes) else json.dumps(header).encode()


def file_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header_bytes(header)
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write the tensors in the given order, which safetensors would change."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for key, tensor in tensors.items():
        raw = raw_bytes(tensor)
        header[key] = entry(list(tensor.shape), len(data), len(data) + len(raw), names[tensor.dtype])
        data += raw
    path.write_bytes(file_bytes(header, data))


def read_bytes(folder: Path, content: bytes) -> dict[str, TensorInfo]:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(content)
    return read_header(path, NAME)


TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4.0).half(),
    "c": torch.ones(1, 5, dtype=torch.bfloat16),
    "d": torch.tensor(2.0, dtype=torch.float64),
    "nothing": torch.ones(0, 4),
}


def check_against_library(content: bytes, found: Mapping[str, TensorInfo]) -> None:
    oracle = load(content)
    assert found.keys() == oracle.keys()
    for key, info in found.items():
        assert info.shape == tuple(oracle[key].shape)
        assert content[info.start : info.stop] == raw_bytes(oracle[key])


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "x": "\u00fc"}])
def test_valid_header_matches_safetensors(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    for tensors in (TENSORS, dict(reversed(TENSORS.items()))):
        ours = tmp_path / "ours"
        write_tensors(ours, tensors, metadata)
        for content in (ours.read_bytes(), save(tensors, metadata)):
            result = read_bytes(tmp_path, content)
            assert result.keys() == tensors.keys()
            check_against_library(content, result)


def pickled(obj: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    return buffer.getvalue()


class Bomb:
    exploded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "exploded", True)


A = entry([2], 0, 8)
NOT_HEADERS: list[Any] = [[], [[]], "text", 12, 1.5, None, True]
NOT_SAFETENSORS = {
    "torch.save": pickled(TENSORS),
    "torch.save of old": pickled(TENSORS, _use_new_zipfile_serialization=False),
    **{f"pickle {protocol}": pickle.dumps(Bomb(), protocol) for protocol in range(6)},
    "padded pickle": pickle.dumps([Bomb()] * 10_000),
    "empty": b"",
    "7 bytes": b"\x02\0\0\0\0\0\0",
    "length alone": struct.pack("<Q", 2),
    "no header": struct.pack("<Q", 0) + b"{}",
    "1 byte of header": struct.pack("<Q", 1) + b"{}",
    "header longer than the file by 1": struct.pack("<Q", 3) + b"{}",
    **{f"header of {size}": struct.pack("<Q", size) + b"{}" * 50 for size in (2**31, 2**63, 2**64 - 1, 101)},
    "not JSON": file_bytes(b"{nonsense"),
    "not UTF-8": file_bytes(b'{"\xff\xfe":{}}'),
    "deep": file_bytes(b"[" * 100_000 + b"]" * 100_000),
    "deep objects": file_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "many digits": file_bytes(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"0000"),
    **{f"is {value}": file_bytes(value) for value in NOT_HEADERS},
    "same key twice": file_bytes(b'{"a":%b,"a":%b}' % (header_bytes(A), header_bytes(A)), b"0" * 8),
    "same key twice in an entry": file_bytes(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
}


@pytest.mark.parametrize("content", NOT_SAFETENSORS.values(), ids=NOT_SAFETENSORS)
def test_unsupported_file_formats_are_rejected(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': .*adapter_model.safetensors"):
        read_bytes(tmp_path, content)
    assert not Bomb.exploded


def test_missing_files_and_folders_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "a\0b", tmp_path / ("x" * 5000)):
        with pytest.raises(AdapterError, match=f"adapter '{NAME}'"):
            read_header(path, NAME)


def test_fifo_and_device_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # no process writes to the FIFO
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(AdapterError, match=f"adapter '{NAME}': .*not a regular file"):
            read_header(path, NAME)
        with pytest.raises(AdapterError, match="not a regular file"):
            read_json(path, f"adapter '{NAME}'")
        with pytest.raises(OSError, match="not a regular file"):
            open_regular_file(path)


NOT_ENTRIES: list[Any] = [None, "F32", [1, 2], {}, 5]
NOT_DTYPES: list[Any] = ["I32", "f32", "", None, 5, ["F32"], {}, "F32 ", "U16"]
INVALID_ENTRIES = {
    **{f"is {value}": value for value in NOT_ENTRIES},
    "no shape": {"dtype": "F32", "data_offsets": [0, 8]},
    "no dtype": {"shape": [2], "data_offsets": [0, 8]},
    "no offsets": {"dtype": "F32", "shape": [2]},
    "three offsets": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
    **{f"offsets {x}": {"dtype": "F32", "shape": [2], "data_offsets": x} for x in ("08", {"0": 0, "8": 8}, 8, None)},
    **{f"shape {shape}": entry(shape, 0, 8) for shape in ([2.0], [True, 2], ["2"], [None], [[2]], None, 2, "2", [-2])},
    **{f"shape {shape}": entry(shape, 0, 8) for shape in ([-1, -2], [3], [2, 2], [], [0], [2**62], [2**63, 2])},
    "overflow to 8 bytes": entry([2**32, 2**30, 2], 0, 8),
    "overflow to 0 bytes": entry([2**62, 4], 0, 0),
    **{f"offsets {stop}": entry([2], 0, stop) for stop in (8.0, True, "8", None, -8, 7, 2**63, 10**30, [8])},
    **{f"start {start}": entry([2], start, 8) for start in (0.0, False, "0", None, -1, 1, 9)},
    **{f"dtype {x}": entry([2], 0, 8, x) for x in NOT_DTYPES},
    **{f"dtype {x}": entry([8], 0, 8, x) for x in ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0")},
    "quantized": entry([1], 0, 8, "I64"),
}


@pytest.mark.parametrize("broken", INVALID_ENTRIES.values(), ids=INVALID_ENTRIES)
def test_error_names_invalid_header_entry(broken: Any, tmp_path: Path) -> None:
    assert read_bytes(tmp_path, file_bytes({"x.lora_A": A}, b"0" * 8))
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': tensor 'x.lora_A'"):
        read_bytes(tmp_path, file_bytes({"x.lora_A": broken}, b"0" * 8))


def test_truncated_file_error_names_both_sizes(tmp_path: Path) -> None:
    whole = file_bytes({"__metadata__": {"format": "pt"}, "x.lora_A": A, "x.lora_B": entry([4], 8, 24)}, b"0" * 24)
    assert read_bytes(tmp_path, whole)
    start = f"adapter '{NAME}': adapter_model.safetensors: the file has "
    for size in (9, 50, len(whole) - 24, len(whole) - 1):
        needed = len(whole) if size >= len(whole) - 24 else len(whole) - 24
        with pytest.raises(AdapterError) as caught:
            read_bytes(tmp_path, whole[:size])
        assert str(caught.value) == f"{start}{size} bytes, but its header needs {needed}; was the copy interrupted?"
    for size in (0, 7):
        with pytest.raises(AdapterError, match=f"{start}{size} bytes, so its header is incomplete"):
            read_bytes(tmp_path, whole[:size])
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: the file is a Git LFS pointer"):
        read_bytes(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": A, "b": A}, "'b' overlaps"),
        ({"a": A, "b": entry([2], 4, 12)}, "'b' overlaps"),
        ({"b": entry([4], 0, 16), "a": A}, "'b' overlaps"),
        ({"a": A, "b": entry([1], 12, 16)}, "'b' overlaps another or leaves a gap"),
        ({"a": entry([3], 4, 16)}, "'a' overlaps another or leaves a gap"),
        ({"a": A, "hole": entry([0], 10, 10), "b": entry([2], 8, 16)}, "'hole' overlaps"),
        ({"a": entry([3], 0, 12)}, "4 bytes after its last tensor"),
        ({}, "has no tensors"),
    ],
)
def test_gaps_and_overlaps_are_rejected(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': .*{message}"):
        read_bytes(tmp_path, file_bytes(header, b"0" * 16))


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": 5, "a": A},
        {"__metadata__": {"x": 1}, "a": A},
        {"\ud800": A},
        {"a": A | {"dtype": "\ud800"}},
        {"a": entry({}, 0, 4), "b": entry([1], 4, 8)},
        json.dumps({"a": A}).encode("utf-16"),
        b"\xef\xbb\xbf" + header_bytes({"a": A}),
        {"a": A | {"new": float("nan")}},
        b"{'a': 1}",
        header_bytes({"a": A}) + b"{}",
        header_bytes({"a": A}) + b"\0",
    ],
    ids=str,
)
def test_headers_rejected_by_safetensors_are_rejected(header: Any, tmp_path: Path) -> None:
    content = file_bytes(header, b"0" * 8)
    with pytest.raises(SafetensorError):
        load(content)
    with pytest.raises(AdapterError, match=f"adapter '{NAME}'") as refused:
        read_bytes(tmp_path, content)
    assert str(refused.value).encode(), "it can be sent"


@pytest.mark.parametrize("header", [{"a": entry([9] * 5000, 0, 8)}, {"a" * 9999: A | {"shape": [3]}}], ids=["9", "a"])
def test_error_messages_are_short(header: Any, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': tensor 'a") as refusal:
        read_bytes(tmp_path, file_bytes(header, b"0" * 8))
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        ({"k" * MAX_KEY_LENGTH: A}, {"k" * (MAX_KEY_LENGTH + 1): A}),
        ({"k": A}, {"k\n": A}),
        ({"k": entry([2] + [1] * (MAX_DIMENSIONS - 1), 0, 8)}, {"k": entry([2] + [1] * MAX_DIMENSIONS, 0, 8)}),
    ],
    ids=["long key", "line break in a key", "many dimensions"],
)
def test_unusual_tensor_shapes_are_accepted(allowed: Any, refused: Any, tmp_path: Path) -> None:
    assert len(read_bytes(tmp_path, file_bytes(allowed, b"0" * 8))) == 1
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': tensor 'k"):
        read_bytes(tmp_path, file_bytes(refused, b"0" * 8))


def test_long_header_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_bytes({"a": A})
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", len(header))
    assert read_bytes(tmp_path, file_bytes(header, b"0" * 8))
    with pytest.raises(AdapterError, match=f"adapter '{NAME}': adapter_model.safetensors"):
        read_bytes(tmp_path, file_bytes(header + b" ", b"0" * 8))


VALID_FILE = save({key: TENSORS[key] for key in "abc"}, {"format": "pt"})


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID_FILE) - 1), st.integers(0, 255)), min_size=1, max_size=3),
    st.just(len(VALID_FILE)) | st.integers(0, len(VALID_FILE) + 9),
)
def test_fuzzed_files_match_safetensors_or_fail(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], size: int
) -> None:
    damaged = bytearray(VALID_FILE)
    for at, byte in flips:
        damaged[at] = byte
    content = bytes(damaged[:size]).ljust(size, b"\0")
    try:
        result = read_bytes(tmp_path_factory.getbasetemp(), content)
    except AdapterError:
        return
    check_against_library(content, result)


# --- tensor names

LLAMA = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(12) for x in "qkvo"]
LLAMA += ["model.embed_tokens", "model.norm", "model.layers.0.input_layernorm", "lm_head"]
NEOX = ["gpt_neox.layers.0.attention.query_key_value", "gpt_neox.embed_in", "lm_head"]
Q = "model.layers.1.self_attn.q_proj"
PEFT = "base_model.model."
WRAPPER_PREFIXES = [PEFT, "", PEFT + "model.", PEFT + PEFT, "base_model.", "module." + PEFT, "_orig_mod."]
WRAPPER_PREFIXES += ["_forward_module." + PEFT, PEFT + "_fsdp_wrapped_module."]


@pytest.mark.parametrize("prefix", WRAPPER_PREFIXES)
@pytest.mark.parametrize(
    ("suffix", "part"),
    [
        *((f"lora_{x}{name}.weight", TensorRole[f"LORA_{x}"]) for x in "AB" for name in ("", ".default", ".my-name")),
        *((f"lora_embedding_{x}{name}", TensorRole[f"LORA_{x}"]) for x in "AB" for name in ("", ".default")),
        *((f"lora_B{name}.bias", TensorRole.LORA_BIAS) for name in ("", ".default")),
        *(
            (f"lora_magnitude_vector{name}", TensorRole.MAGNITUDE)
            for name in ("", ".weight", ".default", ".default.weight")
        ),
        *((f"{x}trainable_tokens_delta", TensorRole.TOKEN_ROWS) for x in ("", "token_adapter.")),
        ("token_adapter.trainable_tokens_delta.default", TensorRole.TOKEN_ROWS),
        *(
            (f"{x}weight", TensorRole.WEIGHT)
            for x in ("", "base_layer.", "modules_to_save.", "modules_to_save.default.")
        ),
        *((f"{x}bias", TensorRole.BIAS) for x in ("", "base_layer.", "modules_to_save.", "modules_to_save.default.")),
        *((f"original_module.{x}", None) for x in ("weight", "bias")),
        *((f"{x}", None) for x in ("lora_velora_embed", "lora_monteclora_sampler.default.std_prior")),
    ],
)
def test_current_and_early_peft_keys_are_recognized(prefix: str, suffix: str, part: TensorRole | None) -> None:
    for module in (Q, "model.embed_tokens", "lm_head"):
        key = f"{prefix}{module}.{suffix}"
        assert assigned_keys([key], LLAMA) == ({} if part is None else {module: {part: key}})


@pytest.mark.parametrize(
    ("key", "modules", "module"),
    [
        (f"{PEFT}embed_out.lora_A.weight", NEOX, "lm_head"),
        (f"{PEFT}embed_out.modules_to_save.default.weight", NEOX, "lm_head"),
        (f"{PEFT}layers.0.attention.query_key_value.lora_A.weight", NEOX, NEOX[0]),
        (f"{PEFT}layers.1.self_attn.q_proj.lora_A.weight", LLAMA, Q),
        (f"{PEFT}norm.weight", LLAMA, "model.norm"),
        ("embed_tokens.weight", LLAMA, "model.embed_tokens"),
    ],
)
def test_leading_name_components_may_be_missing(key: str, modules: list[str], module: str) -> None:
    assert assigned_keys([key], modules)[module] in ({part: key} for part in TensorRole)


@pytest.mark.parametrize(
    "key",
    [
        *("q_proj.lora_A.weight", f"{PEFT}self_attn.q_proj.lora_A.weight"),  # without the layer index
        *("lora_A.weight", ".lora_A.weight", f"{PEFT}.lora_A.weight", "", ".", "weight", "...", f"{PEFT}{Q}"),
        *(f"{PEFT}{Q}.lora_C.weight", f"{PEFT}{Q}.lora_A", f"{PEFT}{Q}.lora_A.weight.bias", f"{PEFT}{Q}.lora_A.a.b"),
        *(f"{PEFT}{Q}.lora_A.weight\n", f"{PEFT}{Q}\n.lora_A.weight", f"{PEFT}{Q}.lora_A.weight.SCB", f"{PEFT}{Q}.W"),
        *(f"{PEFT}{Q}.ia3_m", f"{PEFT}{Q}.hada_w1_a", f"{PEFT}{Q}.lora_E", f"{PEFT}prompt_embeddings"),
        f"{PEFT}{Q.replace('.1.', '.12.')}.lora_A.weight",
        f"{PEFT}{Q.replace('q_proj', 'Q_proj')}.lora_A.weight",
        f"{PEFT}{Q.replace('q_proj', 'xq_proj')}.lora_A.weight",
        f"{PEFT}transformer.h.0.attn.c_attn.lora_A.weight",
        f"{PEFT}model.decoder.layers.1.self_attn.q_proj.lora_A.weight",
        f"{PEFT}{Q}.lora_B.default.extra.weight",
        *(f"{prefix}{Q}.lora_A.weight" for prefix in ("x.", f"x.{PEFT}", f"{PEFT}0.", f"{PEFT}.", "visual.model.")),
    ],
)
def test_unknown_keys_are_rejected(key: str) -> None:
    with pytest.raises(AdapterError) as refusal:
        assign_tensors([f"{PEFT}{Q}.lora_A.weight", key], LLAMA, NAME)
    assert str(refusal.value).startswith(
        (f"adapter '{NAME}': tensor {key!r} is unknown", f"adapter '{NAME}': tensor {key!r} targets")
    )


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj", "down_proj_bias"])
def test_replaced_experts_are_rejected(parameter: str) -> None:
    with pytest.raises(AdapterError, match="replaces the weights of experts"):
        assign_tensors([f"{PEFT}model.layers.0.mlp.experts.{parameter}"], LLAMA, NAME)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{PEFT}{Q}.lora_A.default.weight", f"{PEFT}{Q}.lora_A.weight"),
        (f"{PEFT}{Q}.lora_A.weight", f"{Q}.lora_A.weight"),
        (f"{PEFT}{Q}.lora_A.one.weight", f"{PEFT}{Q}.lora_A.two.weight"),
        (f"{PEFT}{Q}.lora_A.weight", f"{PEFT}{Q}.lora_embedding_A"),
        (f"{PEFT}lm_head.base_layer.weight", f"{PEFT}lm_head.weight"),
        (f"{PEFT}embed_out.weight", f"{PEFT}lm_head.weight"),
        (f"{PEFT}lm_head.modules_to_save.one.weight", f"{PEFT}lm_head.modules_to_save.two.weight"),
    ],
)
def test_duplicate_keys_are_rejected(first: str, second: str) -> None:
    for keys in ([first, second], [second, first]):
        with pytest.raises(AdapterError) as refusal:
            assign_tensors(keys, LLAMA, NAME)
        assert all(text in str(refusal.value) for text in (NAME, first, second))


def test_two_keys_for_one_module_are_rejected() -> None:
    """Config patterns could match only one of the names."""
    keys = [f"{PEFT}embed_out.lora_B.weight", f"{PEFT}lm_head.lora_A.weight"]
    with pytest.raises(AdapterError, match=r"lm_head.lora_A.weight' uses a second name for module 'lm_head'"):
        assign_tensors(keys, LLAMA, NAME)


def test_saved_embedding_takes_precedence_over_its_copy() -> None:
    keys = [f"{PEFT}lm_head.modules_to_save.weight", f"{PEFT}lm_head.weight"]
    assert assigned_keys(keys, LLAMA) == {"lm_head": {TensorRole.WEIGHT: keys[1]}}
    assert assigned_keys(keys[::-1], LLAMA) == {"lm_head": {TensorRole.WEIGHT: keys[1]}}


def test_many_long_keys_are_matched_in_linear_time() -> None:
    training = [f"{PEFT}{Q}.x{i}.original_module.weight" for i in range(20_000)]
    assert assigned_keys(training, LLAMA) == {}
    keys = [f"{PEFT * (i % 9)}{Q}.lora_A.{i}.weight" for i in range(20_000)]
    with pytest.raises(AdapterError, match="are duplicates"):
        assign_tensors([*training, *keys], LLAMA, NAME)
    long_keys = ("a." * 1000, PEFT * 100, ".lora_A.default" * 1000, ".original_module." * 500 + "\n", "." * 1000)
    for long in (*long_keys, "x" * 1_000_000):
        with pytest.raises(AdapterError, match=NAME):
            assign_tensors([f"{long}.lora_A.weight"], LLAMA, NAME)


@pytest.mark.parametrize("key", ["model.weight", "base_model.model.lora_A.weight", "module.bias"])
def test_key_with_only_wrapper_prefixes_is_rejected(key: str) -> None:
    with pytest.raises(AdapterError, match=key.replace(".", r"\.")):
        assign_tensors([key], ["model.norm", "lm_head"], "tested")
