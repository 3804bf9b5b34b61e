from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from lorax_server.config import DTYPES, QUANTIZE, ModelConfig
from lorax_server.errors import ConfigError


def test_a_path_is_enough() -> None:
    settings = ModelConfig(Path("model"))
    assert settings.path == Path("model")
    assert (settings.dtype, settings.device, settings.quantize, settings.pack_weights) == (None, "cpu", None, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_list_is_taken(dtype: str) -> None:
    assert ModelConfig(Path("model"), dtype=dtype).dtype == dtype


@pytest.mark.parametrize("quantize", QUANTIZE)
def test_every_quantisation_of_the_list_is_taken(quantize: str) -> None:
    assert ModelConfig(Path("model"), quantize=quantize).quantize == quantize


@pytest.mark.parametrize("dtype", ["float64", "int8", "fp16", "torch.float32", ""])
def test_another_dtype_is_refused_by_name(dtype: str) -> None:
    with pytest.raises(ConfigError, match="float32, float16, bfloat16") as caught:
        ModelConfig(Path("model"), dtype=dtype)
    assert f"dtype {dtype!r}" in str(caught.value)


@pytest.mark.parametrize("quantize", ["gptq", "fp8", ""])
def test_another_quantisation_is_refused_by_name(quantize: str) -> None:
    with pytest.raises(ConfigError, match="fp8-kv") as caught:
        ModelConfig(Path("model"), quantize=quantize)
    assert f"quantize {quantize!r}" in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:13"])
def test_a_cpu_and_any_gpu_are_taken(device: str) -> None:
    assert ModelConfig(Path("model"), device=device).device == device


@pytest.mark.parametrize("device", ["banana", "", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:0\n", "mps"])
def test_another_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ConfigError, match="use cpu, cuda or cuda:<index>") as caught:
        ModelConfig(Path("model"), device=device)
    assert f"device {device!r}" in str(caught.value)


def test_settings_are_frozen() -> None:
    settings = ModelConfig(Path("model"))
    with pytest.raises(FrozenInstanceError):
        settings.dtype = "float16"  # type: ignore[misc]
