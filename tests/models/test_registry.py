import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from lorax_server.config import ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.errors import ConfigError, UnsupportedModelError, WeightsError
from lorax_server.kernels import reference
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.model_types import MODEL_CLASSES, find_similar_types
from lorax_server.models import get_model, registry
from lorax_server.models.registry import build_model, find_model_class
from tests.builders import memory_weights
from tests.paged import PagedDriver


def llama_config(**fields: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, **fields})


def gpt2_config(**fields: Any) -> GPT2Config:
    return GPT2Config(**{"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **fields})


def saved(model: PreTrainedModel, folder: Path) -> Path:
    # Well away from 0, so that a missing layer changes the logits.
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(llama_config()), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(GPT2LMHeadModel(gpt2_config()), tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the Llama folder and replaces fields of its `config.json`."""

    def edit(**fields: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(llama, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        return folder

    return edit


# --- Loading from a folder


@pytest.mark.parametrize(("folder", "theirs"), [("llama", LlamaForCausalLM), ("gpt2", GPT2LMHeadModel)])
def test_saved_model_matches_transformers_logits(
    folder: str, theirs: type[PreTrainedModel], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    model = get_model(ModelConfig(path))
    expected_model = theirs.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [[5, 17, 3, 60, 8, 2, 11], [1, 44], [9]]
    driver = PagedDriver(model)
    sequences = [driver.add() for _ in prompts]
    first = driver.forward([(seq, prompt) for seq, prompt in zip(sequences, prompts, strict=True)])
    second = driver.forward([(seq, [7]) for seq in sequences])
    for prompt, begun, continued in zip(prompts, first, second, strict=True):
        with torch.no_grad():
            expected = expected_model(torch.tensor([[*prompt, 7]])).logits[0]
        torch.testing.assert_close(torch.cat([begun, continued]), expected, rtol=0, atol=1e-4)


def test_model_uses_requested_rank_and_ops(llama: Path) -> None:
    model = get_model(ModelConfig(llama), FakeGroup(1, 2), reference)
    assert model.ops is reference
    assert model.kv_shape == (1, 8)
    assert not model.training


@pytest.mark.parametrize("model_type", sorted(MODEL_CLASSES))
def test_registered_classes_are_importable(model_type: str) -> None:
    assert callable(find_model_class(model_type))


# --- Settings


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [None, "float32", "float16", "bfloat16"])
def test_dtype_follows_request_checkpoint_and_cpu(
    llama: Path,
    tmp_path: Path,
    stored: torch.dtype,
    asked: str | None,
    is_fast: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(CpuOps, "has_fast_bfloat16", is_fast)
    dtype = getattr(torch, asked or ("bfloat16" if is_fast and stored == torch.bfloat16 else "float32"))
    folder = tmp_path / "stored"
    theirs: Any = LlamaForCausalLM.from_pretrained(llama)
    theirs.to(stored).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
    with caplog.at_level(logging.INFO):
        model: Any = get_model(ModelConfig(folder, dtype=asked))
    assert f"model dtype: {dtype} ".replace("torch.", "") in caplog.text
    assert ("AMX" in caplog.text) == (asked is None and dtype == torch.bfloat16)
    assert model.model.embed_tokens.weight.dtype == dtype
    assert model.model.norm.weight.dtype == dtype
    assert model.allocate_kv_cache(1, 4)[0][0].dtype == dtype


def test_fp8_kv_stores_keys_and_values_as_float8(llama: Path) -> None:
    model = get_model(ModelConfig(llama, quantize="fp8-kv"))
    driver = PagedDriver(model)
    assert {cache.dtype for layer in driver.kv_cache for cache in layer} == {torch.float8_e4m3fn}
    seq = driver.add()
    logits = torch.cat([driver.forward([(seq, [5, 17, 3, 60])])[0], driver.forward([(seq, [7])])[0]])
    exact = PagedDriver(get_model(ModelConfig(llama)))
    expected = exact.forward([(exact.add(), [5, 17, 3, 60, 7])])[0]
    error = (logits - expected).abs().max()
    assert 0 < error < 0.1 * expected.abs().max()


def test_float8_cache_scales_come_from_checkpoint(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(0.5)
    tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([0.25])
    save_file(tensors, folder / "model.safetensors")
    model: Any = get_model(ModelConfig(folder, quantize="fp8-kv"))
    specs = [layer.self_attn.spec for layer in model.model.layers]
    assert [(spec.k_scale, spec.v_scale) for spec in specs] == [(1.0, 1.0), (0.5, 0.25)]
    model = get_model(ModelConfig(folder))
    specs = [layer.self_attn.spec for layer in model.model.layers]
    assert [(spec.k_scale, spec.v_scale) for spec in specs] == [(1.0, 1.0), (1.0, 1.0)]


def test_per_head_kv_scale_is_rejected(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    shutil.copytree(llama, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="k_scale"):
        get_model(ModelConfig(folder, quantize="fp8-kv"))


# --- Invalid config.json


def test_weights_larger_than_gpu_memory_are_rejected(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = SimpleNamespace(total_memory=456)
    size = 4 * sum(tensor.numel() for tensor in load_file(llama / "model.safetensors").values())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (123, 456))
    with pytest.raises(ConfigError, match=f"need about {size // 2} bytes, but only 123 of 456 bytes on cuda"):
        get_model(ModelConfig(llama, device="cuda", dtype="float16"), ops=reference)
    with pytest.raises(ConfigError, match=f"need about {size // 4} bytes"):
        get_model(ModelConfig(llama, device="cuda", dtype="float16"), FakeGroup(0, 2), ops=reference)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 456))

    def fail(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(registry, "open_weights", fail)
    with pytest.raises(ConfigError, match="only 1000000000 of"):
        get_model(ModelConfig(llama, device="cuda", dtype="float16"), ops=reference)


@pytest.mark.parametrize("model_type", ["bert", "from_the_future", "", "LLAMA", None, 3, ["llama"]])
def test_unsupported_model_type_is_rejected_before_weights(tmp_path: Path, model_type: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match=r"is not supported; use one of arcee, bloom, .*qwen3") as caught:
        get_model(ModelConfig(tmp_path))
    assert f"model_type = {model_type!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "relatives"),
    [
        ("gemma3n", ["gemma", "gemma2", "gemma3_text"]),
        ("qwen3_next", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]),
        ("mistral4", ["mistral"]),
        ("phimoe", ["phi"]),
        ("LLAMA", ["llama"]),
        ("from_the_future", []),
        ("", []),
        ("3", []),
    ],
)
def test_similar_model_types_are_suggested(model_type: str, relatives: list[str]) -> None:
    assert find_similar_types(model_type)[: len(relatives)] == relatives
    assert bool(find_similar_types(model_type)) == bool(relatives)


def test_config_object_with_unsupported_type_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        build_model(BertConfig(), memory_weights({}))


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{nope",
        b"\xff\xfe\x00",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b"[" * 100_000,
    ],
    ids=["missing", "empty", "not JSON", "not UTF-8", "list", "number", "null", "no model_type", "deeply nested"],
)
def test_unreadable_config_error_names_file(edited: Callable[..., Path], content: bytes | None) -> None:
    path = edited() / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used as a model config") as caught:
        get_model(ModelConfig(path.parent))
    assert str(path) in str(caught.value)


def test_missing_folder_error_names_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        get_model(ModelConfig(tmp_path / "absent"))
    assert str(tmp_path / "absent" / "config.json") in str(caught.value)


def test_missing_weights_error_names_folder(edited: Callable[..., Path]) -> None:
    folder = edited()
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="no weights") as caught:
        get_model(ModelConfig(folder))
    assert str(folder) in str(caught.value)


def test_remote_code_prompt_is_never_shown(edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = edited(model_type="custom", auto_map={"AutoConfig": "custom.CustomConfig"})
    (folder / "custom.py").write_text("class CustomConfig: pass")
    asked: list[str] = []

    def ask(prompt: str = "") -> str:
        asked.append(prompt)
        return "n"

    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(ConfigError):
        get_model(ModelConfig(folder))
    assert asked == []


# --- Unsupported config fields


def test_error_names_field_with_invalid_number(edited: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads = 3"):
        get_model(ModelConfig(edited(num_key_value_heads=3)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "nope"}, "config field hidden_act = 'nope'"),
        ({"rope_parameters": {"rope_type": "nope"}}, "config field rope_type = 'nope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, r"rope_parameters\.factor = 0"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
            r"rope_parameters\.short_factor is not a list of 4 positive numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 5}},
            r"rope_parameters\.long_factor is not a list of 4 positive numbers",
        ),
    ],
)
def test_error_names_unsupported_config_field(
    edited: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        get_model(ModelConfig(edited(**fields)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 3, "head_dim": None}, "attention heads"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"dtype": "banana"}, "banana"),
    ],
)
def test_transformers_validation_error_is_reported(
    edited: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    folder = edited(**fields)
    with pytest.raises(ConfigError, match=f"(?s)cannot be used as a model config: .*{message}") as caught:
        get_model(ModelConfig(folder))
    assert str(folder / "config.json") in str(caught.value)


def test_odd_rotary_dim_is_rejected(edited: Callable[..., Path]) -> None:
    """Either transformers or this server rejects it, depending on the transformers version."""
    with pytest.raises(ConfigError, match="head_dim"):
        get_model(ModelConfig(edited(head_dim=7)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", -32),
        ("intermediate_size", 0),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -5),
        ("num_attention_heads", -4),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 0),
        ("vocab_size", 0),
    ],
)
def test_non_positive_counts_are_rejected(edited: Callable[..., Path], field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"config field {field} must be a positive integer \(got {value}\)"):
        get_model(ModelConfig(edited(**{field: value})))


def test_aliased_config_fields_are_validated(gpt2: Path, tmp_path: Path) -> None:
    config = json.loads((gpt2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": -1}))
    with pytest.raises(ConfigError, match=r"config field num_hidden_layers must be a positive integer \(got -1\)"):
        get_model(ModelConfig(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": None}},
    ],
)
def test_null_is_treated_as_missing_field(llama: Path, edited: Callable[..., Path], fields: dict[str, Any]) -> None:
    drivers = [PagedDriver(get_model(ModelConfig(folder))) for folder in (llama, edited(**fields))]
    plain, ours = (driver.forward([(driver.add(), [5, 17, 3, 60])])[0] for driver in drivers)
    assert torch.equal(ours, plain)


def with_fields(config: PretrainedConfig, **fields: Any) -> PretrainedConfig:
    """Set fields without transformers' validation."""
    for field, value in fields.items():
        setattr(config, field, value)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_fields(llama_config(), num_attention_heads=3, head_dim=None), "hidden_size = 32 is not a multiple of 3"),
        (with_fields(llama_config(), num_key_value_heads=3), "4 attention heads cannot share num_key_value_heads = 3"),
        (with_fields(llama_config(), hidden_act="nope"), "hidden_act = 'nope'"),
        (with_fields(llama_config(), rope_parameters={"rope_type": "linear"}), "rope_parameters lacks 'factor'"),
        (with_fields(gpt2_config(), n_head=3), "hidden_size = 32 is not a multiple of 3"),
        (with_fields(gpt2_config(), activation_function="nope"), "activation_function = 'nope'"),
        (with_fields(gpt2_config(), add_cross_attention=True), "add_cross_attention = true is not supported"),
    ],
)
def test_config_object_is_validated(config: PretrainedConfig, message: str) -> None:
    model = GPT2LMHeadModel(gpt2_config()) if config.model_type == "gpt2" else LlamaForCausalLM(llama_config())
    with pytest.raises(ConfigError, match=message):
        build_model(config, memory_weights(model.state_dict()))


@pytest.mark.parametrize(
    ("fields", "name", "found", "wanted"),
    [
        ({"vocab_size": 70}, "model.embed_tokens.weight", (61, 32), (70, 32)),
        ({"vocab_size": 50}, "model.embed_tokens.weight", (61, 32), (50, 32)),
        ({"intermediate_size": 64}, "model.layers.0.mlp.gate_proj.weight", (48, 32), (64, 32)),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight", (16, 32), (32, 32)),
    ],
)
def test_config_and_weights_mismatch_error_shows_shapes(
    edited: Callable[..., Path], fields: dict[str, int], name: str, found: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    folder = edited(**fields)
    with pytest.raises(WeightsError) as caught:
        get_model(ModelConfig(folder))
    path = folder / "model.safetensors"
    assert str(caught.value) == f"{path}: tensor {name!r} has shape {found}, expected {wanted}"


def test_error_names_missing_layer(edited: Callable[..., Path]) -> None:
    with pytest.raises(WeightsError, match=r"'model\.layers\.2\.self_attn\.q_proj\.weight' is missing"):
        get_model(ModelConfig(edited(num_hidden_layers=3)))


def test_indivisible_tensor_parallel_size_is_rejected(llama: Path, gpt2: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads = 4 is not divisible by 3"):
        get_model(ModelConfig(llama), FakeGroup(0, 3))
    with pytest.raises(ConfigError, match="num_attention_heads = 4 is not divisible by 3"):
        get_model(ModelConfig(gpt2), FakeGroup(0, 3))
