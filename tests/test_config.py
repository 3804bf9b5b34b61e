import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from lorax_server.config import DTYPES, QUANTIZE_METHODS, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError


def test_model_config_requires_only_path() -> None:
    settings = ModelConfig(Path("model"))
    assert settings.path == Path("model")
    assert (settings.dtype, settings.device, settings.quantize) == (None, "cpu", None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_supported_dtypes_are_accepted(dtype: str) -> None:
    assert ModelConfig(Path("model"), dtype=dtype).dtype == dtype


@pytest.mark.parametrize("quantize", QUANTIZE_METHODS)
def test_supported_quantizations_are_accepted(quantize: str) -> None:
    assert ModelConfig(Path("model"), quantize=quantize).quantize == quantize


@pytest.mark.parametrize("dtype", ["float64", "int8", "fp16", "torch.float32", ""])
def test_unknown_dtype_is_rejected(dtype: str) -> None:
    with pytest.raises(ConfigError, match="float32, float16, bfloat16") as caught:
        ModelConfig(Path("model"), dtype=dtype)
    assert f"dtype {dtype!r}" in str(caught.value)


@pytest.mark.parametrize("quantize", ["hqq-2bit", "fp4", ""])
def test_unknown_quantization_is_rejected(quantize: str) -> None:
    with pytest.raises(ConfigError, match="fp8-kv") as caught:
        ModelConfig(Path("model"), quantize=quantize)
    assert f"quantize {quantize!r}" in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:13"])
def test_supported_devices_are_accepted(device: str) -> None:
    assert ModelConfig(Path("model"), device=device).device == device


@pytest.mark.parametrize("device", ["banana", "", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:0\n", "mps"])
def test_unknown_device_is_rejected(device: str) -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda or cuda:<index>") as caught:
        ModelConfig(Path("model"), device=device)
    assert f"device {device!r}" in str(caught.value)


def test_settings_are_frozen() -> None:
    settings = ModelConfig(Path("model"))
    with pytest.raises(FrozenInstanceError):
        settings.dtype = "float16"  # type: ignore[misc]


# --- Engines ----------------------------------------------------------------------------------------------------------

MODEL = ModelConfig(Path("model"))
COUNTS = [
    "tensor_parallel",
    "max_steps_in_flight",
    "max_num_seqs",
    "max_step_tokens",
    "max_mixed_tokens",
    "max_prefill_chunk_tokens",
    "max_length",
]
COUNTS += ["block_size"]
SIZES = ["cache_bytes", "adapter_host_bytes", "max_waiting"]
NOT_NEGATIVE = ["adapter_bytes", "adapter_timeout_s", "adapter_eviction_delay_s", "max_wait_s"]


def test_engine_config_requires_only_model() -> None:
    settings = EngineConfig(MODEL)
    assert settings.sources == SourceConfig()
    assert not settings.tenant_weights


def engine_config(**settings: Any) -> EngineConfig:
    return EngineConfig(MODEL, **settings)


@pytest.mark.parametrize("name", [*COUNTS, *SIZES])
@pytest.mark.parametrize("value", [0, -1])
def test_values_below_one_are_rejected(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = {value} must be at least 1$"):
        engine_config(**{name: value})


@pytest.mark.parametrize("name", [*COUNTS, *SIZES])
def test_minimum_of_one_is_accepted(name: str) -> None:
    assert getattr(engine_config(**{"max_num_seqs": 1, name: 1}), name) == 1


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_negative_values_are_rejected(name: str) -> None:
    assert getattr(engine_config(**{name: 0}), name) == 0
    with pytest.raises(ConfigError, match=f"^{name} = -0.5 must not be negative$"):
        engine_config(**{name: -0.5})


@pytest.mark.parametrize("name", ["adapter_timeout_s", "max_wait_s"])
def test_infinite_timeout_is_accepted(name: str) -> None:
    assert getattr(engine_config(**{name: math.inf}), name) == math.inf


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, math.nan, math.inf])
def test_fraction_must_be_in_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"must be (above 0|at most 1)"):
        EngineConfig(MODEL, gpu_memory_fraction=fraction)
    assert EngineConfig(MODEL, gpu_memory_fraction=1).gpu_memory_fraction == 1


@pytest.mark.parametrize("weight", [0, -1.0])
def test_tenant_weights_must_be_positive(weight: float) -> None:
    with pytest.raises(ConfigError, match="tenant_weights must be above 0"):
        EngineConfig(MODEL, tenant_weights={"a": 1.0, "b": weight})


def test_max_step_tokens_must_cover_max_num_seqs() -> None:
    with pytest.raises(ConfigError, match="max_step_tokens = 7 must be at least max_num_seqs = 8"):
        EngineConfig(MODEL, max_step_tokens=7, max_num_seqs=8)
    assert EngineConfig(MODEL, max_step_tokens=8, max_num_seqs=8).max_num_seqs == 8


@pytest.mark.parametrize("settings", [{"hub": True}, {"s3_bucket": "bucket"}])
def test_remote_sources_need_cache_folder(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set `cache`"):
        SourceConfig(**settings)
    assert SourceConfig(cache=Path("cache"), **settings).cache == Path("cache")


@pytest.mark.parametrize("name", ["max_bytes", "num_threads"])
def test_source_limits_must_be_positive(name: str) -> None:
    settings: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"^{name} = 0 must be at least 1$"):
        SourceConfig(**settings)


def test_hub_token_is_not_in_repr() -> None:
    assert "secret" not in repr(EngineConfig(MODEL, sources=SourceConfig(hub_token="secret")))


@pytest.mark.parametrize("count", [2, 8])
def test_multiple_api_processes_are_rejected(count: int) -> None:
    with pytest.raises(ConfigError, match=r"40,000 tokens/s; scale out with replicas \(lorax serve --replicas\)"):
        ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base", api_workers=count)
    assert ServerConfig(EngineConfig(ModelConfig(Path("nowhere"))), "base", api_workers=1).api_workers == 1


def test_draft_tokens_are_limited() -> None:
    model = ModelConfig(Path("model"))
    assert EngineConfig(model, speculative_tokens=64).speculative_tokens == 64
    with pytest.raises(ConfigError, match="speculative_tokens = 1000 must be at most 64"):
        EngineConfig(model, speculative_tokens=1000)
