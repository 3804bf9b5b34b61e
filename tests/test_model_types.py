"""Unsupported models are rejected from `config.json` alone, with one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError
from lorax_server.model_types import MODEL_CLASSES, check_model_config, is_paged


def check(folder: Path, config: Any, needs_adapters: bool = False) -> None:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    check_model_config(folder, "owner/model", needs_adapters=needs_adapters)


REJECTED = {
    "unknown quantization": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "hqq"}},
        r"the quantization method 'hqq' is not supported; .*; use the model with 16-bit weights",
    ),
    "broken quantization": ({"model_type": "llama", "quantization_config": 4}, r"must be an object \(got 4\)"),
    "padded and quantized": (
        {"model_type": "codegen", "quantization_config": {"quant_method": "awq", "bits": 4}},
        r"quantized weights \(awq\) are not supported for the model type 'codegen'",
    ),
    "encoder": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "BertForMaskedLM does not generate text; only causal language models are served",
    ),
    "classifier": (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification does not generate text",
    ),
    "vision": (
        {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}},
        "Qwen2VLForConditionalGeneration reads images or audio",
    ),
    "encoder-decoder": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        "T5ForConditionalGeneration is an encoder-decoder model",
    ),
    "unknown": (
        {"model_type": "llama9", "architectures": ["Llama9ForCausalLM"]},
        "model type 'llama9' is unknown to the installed version of transformers; similar types .*: llama",
    ),
    "no type": ({"architectures": ["LlamaForCausalLM"]}, "must contain a `model_type`"),
    "wrong types": ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "a list of `architectures`"),
    "not an object": ([], "config.json is not an object"),
    "not JSON": ("{", "config.json cannot be read"),
    "deep": ("[" * 100_000, "config.json cannot be read"),
}


@pytest.mark.parametrize(("config", "reason"), REJECTED.values(), ids=REJECTED)
def test_unsupported_config_is_rejected_with_reason(tmp_path: Path, config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model 'owner/model': .*{reason}"):
        check(tmp_path, config)


def test_adapter_folder_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="this is an adapter; name its base model"):
        check_model_config(tmp_path, "owner/model")


def test_padded_model_is_rejected_only_if_adapters_are_configured(tmp_path: Path) -> None:
    config = {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]}
    check(tmp_path, config)
    with pytest.raises(ConfigError, match="'codegen' is served without adapters, but adapters are configured"):
        check(tmp_path, config, needs_adapters=True)
    check(tmp_path, config | {"quantization_config": {"load_in_8bit": True}})


@pytest.mark.parametrize("model_type", sorted({*MODEL_CLASSES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}))
def test_every_causal_model_type_passes(tmp_path: Path, model_type: str) -> None:
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "LlamaForCausalLM")
    for name in names if isinstance(names, tuple | list) else (names,):
        check(tmp_path, {"model_type": model_type, "architectures": [name]})


def test_falcon_with_alibi_is_padded() -> None:
    assert is_paged({"model_type": "falcon"})
    assert not is_paged({"model_type": "falcon", "alibi": True})
    assert not is_paged({"model_type": "codegen"})


GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
BITSANDBYTES = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
UNFIT_QUANTIZE = {
    "unquantized": ("gptq", {}, "gptq needs a checkpoint in this format, but the weights are not quantized"),
    "other format": ("awq", GPTQ, "the weights are stored as gptq; omit `quantize`"),
    "quantized": ("int8", GPTQ, "already stored as gptq; omit `quantize`"),
    "same name": ("bitsandbytes", BITSANDBYTES, "already stored as bitsandbytes"),
    "rounded": ("fp8-dynamic", FP8, "already stored as fp8"),
    "experts": ("fp8-dynamic", {"model_type": "mixtral", "num_local_experts": 8}, "mixtures of experts"),
    "padded": ("int8", {"model_type": "codegen"}, "int8 is not supported for the model type 'codegen'"),
    "no cache": ("fp8-kv", {"model_type": "bert"}, "only for text generation"),
}


@pytest.mark.parametrize(("quantize", "config", "reason"), UNFIT_QUANTIZE.values(), ids=UNFIT_QUANTIZE)
def test_quantize_must_fit_config(tmp_path: Path, quantize: str, config: dict[str, Any], reason: str) -> None:
    config = {"model_type": "llama", **config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"^model 'model': quantize = .*{reason}.*\(docs/quantization.md\)"):
        check_model_config(
            tmp_path,
            "model",
            settings=ModelConfig(tmp_path, quantize=quantize),
            generates=lambda config: config["model_type"] != "bert",
        )


@pytest.mark.parametrize(
    ("quantize", "config"), [("gptq", GPTQ), ("fp8", FP8), ("fp8", {}), ("int8", {}), ("fp8-kv", GPTQ), (None, GPTQ)]
)
def test_quantize_that_fits_is_accepted(tmp_path: Path, quantize: str | None, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    check_model_config(tmp_path, "model", settings=ModelConfig(tmp_path, quantize=quantize))


def test_old_quantization_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "quantize_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="copy the content to this field"):
        check_model_config(tmp_path, "model", settings=ModelConfig(tmp_path, quantize="gptq"))
