"""Equal content has equal identities, and different content has different identities."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.adapters import identity
from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.config import parse_config
from lorax_server.adapters.identity import CHUNK_BYTES, NUM_HASH_THREADS, compute_identity
from lorax_server.errors import AdapterError
from tests.adapters.test_checkpoint import entry, file_bytes, write_tensors

RAW: dict[str, Any] = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    **{"rank_pattern": {"q": 1, "v": 2}, "alpha_pattern": {"q": 1, "v": 2}, "modules_to_save": ["lm_head", "norm"]},
    "trainable_token_indices": {"wte": [1, 2], "lm_head": [3]},
    "use_bdlora": {"target_modules_bd_a": ["o"], "target_modules_bd_b": ["q"], "nblocks": 2},
}
LORA_FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "trainable_token_indices", "use_bdlora")
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0).half(), "c": torch.ones(CHUNK_BYTES // 4 + 3)}


def identity_of(
    path: Path, tensors: Mapping[str, torch.Tensor] = TENSORS, metadata: Any = None, name: str = "x", **changes: Any
) -> str:
    write_tensors(path, tensors, metadata)
    return compute_identity(parse_config(RAW | changes, name), path, read_header(path, name))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "adapter_model.safetensors"


def test_equal_content_has_equal_identity(path: Path) -> None:
    expected = identity_of(path)
    assert len(expected) == 64
    assert identity_of(path, dict(reversed(TENSORS.items()))) == expected
    assert identity_of(path, metadata={"format": "pt"}) == expected
    assert identity_of(path, name="another") == expected
    unimportant: list[dict[str, Any]] = [
        *({"lora_dropout": 0.5}, {"base_model_name_or_path": "x"}, {"peft_version": "9"}, {"inference_mode": False}),
        *({"target_modules": ["v_proj", "q_proj"]}, {"bias": "all"}, {"lora_alpha": 8.0}),
        *({"init_lora_weights": "eva"}, {"exclude_modules": []}, {"modules_to_save": ["norm", "lm_head"]}),
    ]
    for changes in unimportant:
        assert identity_of(path, **changes) == expected, changes


def test_different_content_has_different_identity(path: Path) -> None:
    a, c = TENSORS["a"], TENSORS["c"]
    last = c.clone()
    last[-1] = 2
    tensors = [
        TENSORS,
        {"a": a, "b": TENSORS["b"]},
        TENSORS | {"a": a.view(3, 2)},
        TENSORS | {"a": a.view(6)},
        TENSORS | {"a": a + 1},
        TENSORS | {"a": -a},  # one value is now -0.0
        TENSORS | {"a": a.half()},
        TENSORS | {"b": TENSORS["b"].view(torch.bfloat16)},  # the same bytes
        TENSORS | {"c": last},
        TENSORS | {"nothing": torch.ones(0, 3)},
        TENSORS | {"nothing": torch.ones(3, 0)},
        {"a": a, "b": TENSORS["b"], "d": c},
        {"b": a, "a": TENSORS["b"], "c": c},
        {"a": a, "b": TENSORS["b"], 'c","F32",[1]]["d': c},
    ]
    bdloras: list[dict[str, Any]] = [{"nblocks": 4}, {"target_modules_bd_a": []}]
    configs: list[dict[str, Any]] = [
        *({"r": 5}, {"lora_alpha": 9}, {"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}),
        *({"ensure_weight_tying": True}, {"modules_to_save": ["lm_head"]}, {"use_bdlora": None}),
        *({"rank_pattern": pattern} for pattern in ({}, {"v": 2, "q": 1}, {"q": 1, "v": 3}, {"q": 1, "w": 2})),
        *({"alpha_pattern": pattern} for pattern in ({}, {"v": 2, "q": 1}, {"q": 1.5, "v": 2})),
        *({"trainable_token_indices": ids} for ids in (None, [1, 2], [2, 1], {"wte": [2, 1], "lm_head": [3]})),
        *({"use_bdlora": RAW["use_bdlora"] | x} for x in bdloras),
        {"use_bdlora": {"target_modules_bd_a": ["q"], "target_modules_bd_b": ["o"], "nblocks": 2}},
        # These settings can make the same tensors invalid.
        *({"target_modules": modules} for modules in (None, ".*", "q_proj", ["q_proj"])),
        *({"exclude_modules": modules} for modules in ("v_proj", ["v_proj"], ["q_proj", "v_proj"])),
        *({"layers_to_transform": [0], "layers_pattern": pattern} for pattern in (None, "h", ["h", "g"], ["g", "h"])),
        *({"layers_to_transform": layers} for layers in (1, [0, 1])),
        {"peft_type": "IA3"} | dict.fromkeys(LORA_FIELDS),
        {"peft_type": "IA3", "feedforward_modules": ["v_proj"]} | dict.fromkeys(LORA_FIELDS),
    ]
    result = [identity_of(path, given) for given in tensors] + [identity_of(path, **changes) for changes in configs]
    assert len(set(result)) == len(result)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 9])
def test_identity_is_independent_of_thread_count(num_threads: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = identity_of(path)
    monkeypatch.setattr(identity, "NUM_HASH_THREADS", num_threads)
    monkeypatch.setattr(identity, "MIN_THREAD_BYTES", 1)
    assert identity_of(path) == expected
    header = read_header(path, "x")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterError, match=r"adapter 'x': .* was truncated"):
        compute_identity(parse_config(RAW, "x"), path, header)


def test_identity_depends_on_every_byte(path: Path) -> None:
    tensors = {"a": TENSORS["a"], "b": TENSORS["b"]}
    seen = {identity_of(path, tensors)}
    content = path.read_bytes()
    header = read_header(path, "x")
    for at in range(min(info.start for info in header.values()), len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        seen.add(compute_identity(parse_config(RAW, "x"), path, header))
    assert len(seen) == 1 + 6 * 4 + 4 * 2


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_truncated_file_is_rejected(kept: int, path: Path) -> None:
    write_tensors(path, TENSORS)
    header = read_header(path, "x")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(AdapterError, match=r"adapter 'x': .* was truncated"):
        compute_identity(parse_config(RAW, "x"), path, header)


def test_removed_file_is_rejected(path: Path) -> None:
    write_tensors(path, TENSORS)
    header = read_header(path, "x")
    path.unlink()
    with pytest.raises(AdapterError, match="adapter 'x'"):
        compute_identity(parse_config(RAW, "x"), path, header)


def test_identity_of_large_file_uses_little_memory(path: Path) -> None:
    size = 64 << 20
    with path.open("wb") as file:
        file.write(file_bytes({"a": entry([size // 4], 0, size)}))
        file.truncate(file.tell() + size)
    tracemalloc.start()
    try:
        compute_identity(parse_config(RAW, "x"), path, read_header(path, "x"))
        assert tracemalloc.get_traced_memory()[1] < (NUM_HASH_THREADS + 1) * CHUNK_BYTES  # a chunk per thread
    finally:
        tracemalloc.stop()
