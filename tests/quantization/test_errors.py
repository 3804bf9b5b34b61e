"""Quantized checkpoints that are unsupported, damaged or hostile are rejected with a clear error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError, UnsupportedModelError, WeightsError
from lorax_server.kernels import reference
from lorax_server.model_types import check_model_config
from lorax_server.models.registry import get_model
from lorax_server.quantization_config import read_quantization_config
from lorax_server.weights import estimate_bytes
from lorax_server.worker.memory import model_bytes
from tests.models.tiny import change_json
from tests.quantization.test_formats import make_oracle, serve
from tests.quantization.writer import FORMATS, write_checkpoint

Tensors = dict[str, torch.Tensor]
MODULE = "model.layers.0.self_attn.q_proj"
COMPRESSED = {"quant_method": "compressed-tensors"}
INT4_GROUP = {"weights": {"num_bits": 4, "type": "int"}}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("gptq", "must be an object"),
        ({"bits": 4}, "quantization method None is not supported; supported methods: compressed-tensors, fp8"),
        ({"quant_method": "aqlm"}, "'aqlm' is not supported"),
        ({"quant_method": ["gptq"]}, r"\['gptq'\] is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq is not supported with bits = 3; use 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; use gptq or gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype = 'int64'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "8 bits for"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "cannot be read"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8; use 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version = 'gemv'; use gemm"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "cannot be read"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "positive"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "'int4'"),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized", "config_groups": {"a": INT4_GROUP}},
            "nvfp4-pack-quantized",
        ),
        (
            {
                **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
                "config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            "num_bits = 3",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": ["a"]}, "cannot be read"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format = 'marlin-24'"),
        (
            {"quant_method": "compressed-tensors", "quantization_config": {"transform_config": {"a": 1}}},
            "transform_config",
        ),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"}, "version = 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [float("inf"), 1]}, "cannot be read"),
    ],
)
def test_unsupported_config_is_rejected(stored: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_quantization_config(stored)


@pytest.mark.parametrize("name", FORMATS)
def test_config_check_accepts_supported_formats(name: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[name].config}))
    check_model_config(tmp_path, "model", needs_adapters=True)


def test_quantized_model_without_paged_implementation_is_rejected(tmp_path: Path) -> None:
    config = {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["gptq"].config}))
    with pytest.raises(UnsupportedModelError, match=r"quantized weights \(gptq\) are not supported for the model type"):
        check_model_config(tmp_path, "model")


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[str, Callable[[Tensors], None]], Path]:
    """Return a function that writes a quantized checkpoint and changes its tensors."""

    def make(name: str, change: Callable[[Tensors], None]) -> Path:
        write_checkpoint(tmp_path, make_oracle(num_hidden_layers=1), name)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return make


def replace(suffix: str, value: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        stored = tensors.pop(f"{MODULE}.{suffix}")
        if value is not None:
            tensors[f"{MODULE}.{suffix}"] = value(stored)

    return change


def fill_with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


def fill_with_float_nan(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full(tensor.shape, float("nan"))


def write_state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def write(stored: torch.Tensor) -> torch.Tensor:
        state = json.loads(bytes(stored.tolist())) | changes
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return write


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGES: dict[str, tuple[str, str, Any, str]] = {
    "gptq without scales": ("gptq", "scales", None, "scales' is missing"),
    "gptq without zero points": ("gptq", "qzeros", None, "qzeros' is missing"),
    "gptq with other outputs": ("gptq", "scales", lambda x: x[:, :-1], "has shape .* expected"),
    "gptq with infinite scales": ("gptq", "scales", fill_with_nan, "not finite"),
    "gptq with wrong groups": ("gptq", "g_idx", lambda x: x + 1, "must contain numbers from 0 to 1"),
    "gptq with negative groups": ("gptq", "g_idx", lambda x: x - 1, "must contain numbers from 0 to 1"),
    "gptq with float groups": ("gptq-act-order", "g_idx", lambda x: x.to(torch.float8_e4m3fn), "dtype torch.float8"),
    "gptq with too few inputs": ("gptq", "qweight", lambda x: x[:-1], "has shape .* expected"),
    "gptq with wide words": ("gptq", "qweight", lambda x: x.long(), "dtype torch.int64"),
    "gptq without groups": ("gptq", "scales", lambda x: x[:0], "has shape .* expected"),
    "gptq with flat scales": ("gptq", "scales", lambda x: x[0, 0], "has shape .* expected"),
    "gptq with flat words": ("gptq", "qweight", lambda x: x[0], "expected two positive numbers"),
    "awq with flat scales": ("awq", "scales", lambda x: x[0, 0], "cannot be divided into 0 groups"),
    "awq without groups": ("awq", "scales", lambda x: x[:0], "cannot be divided into 0 groups"),
    "awq with uneven groups": ("awq", "scales", lambda x: x.repeat(2, 1)[:3], "cannot be divided into 3 groups"),
    "packed without groups": ("ct-int4", "weight_scale", lambda x: x[:, :0], "cannot be divided into 0 groups"),
    "packed with flat words": ("ct-int4", "weight_packed", lambda x: x[0], "expected two positive numbers"),
    "packed with a long shape": ("ct-int4", "weight_shape", lambda x: x.repeat(10), "two positive integers"),
    "packed with a float shape": ("ct-int4", "weight_shape", fill_with_float_nan, "two positive integers"),
    "int8 without groups": ("ct-w8a8", "weight_scale", lambda x: x[:, :0], "cannot be divided into 0 groups"),
    "fp8 rows with uneven groups": ("ct-fp8-rows", "weight_scale", lambda x: x.repeat(1, 3), "into 3 groups"),
    "flat fp8": ("fp8-matrix", "weight", lambda x: x.flatten(), "expected two positive numbers"),
    "nf4 with infinite shape": ("nf4", NF4_STATE, write_state(shape=[float("inf"), 64]), "cannot be read"),
    "nf4 with huge blocks": ("nf4", NF4_STATE, write_state(blocksize=2**70), "has shape .* expected"),
    "nested with infinite offset": ("nf4-double", NF4_STATE, write_state(nested_offset=float("nan")), "must be finite"),
    "nested with huge offset": ("nf4-double", NF4_STATE, write_state(nested_offset=10**400), "cannot be read"),
    "nested with blocks of 0": ("nf4-double", NF4_STATE, write_state(nested_blocksize=0), "nested_blocksize positive"),
    "int8 with two layouts": (
        "bitsandbytes-int8",
        "weight_format",
        lambda x: x.repeat(2),
        "layout for one kind of GPU",
    ),
    "awq without scales": ("awq", "scales", None, "scales' is missing"),
    "awq with other zero points": ("awq", "qzeros", lambda x: x[:-1], "has shape .* expected"),
    "packed without shape": ("ct-int4", "weight_shape", None, "weight_shape' is missing"),
    "packed with a huge shape": ("ct-int4", "weight_shape", lambda x: x * 2**40, "does not fit"),
    "packed with a negative shape": ("ct-int4", "weight_shape", lambda x: -x, "two positive integers"),
    "packed with wrong groups": ("ct-int4-act-order", "weight_g_idx", lambda x: x + 1, "numbers below 2"),
    "packed with an empty order": ("ct-int4-act-order", "weight_g_idx", lambda x: x[:0], "has shape .* expected"),
    "packed with a huge order": ("ct-int4-act-order", "weight_shape", lambda x: x * 2**40, "has shape .* expected"),
    "fp8 with wrong blocks": ("fp8-blocks", "weight_scale_inv", lambda x: x[:, :-1], "has shape .* expected"),
    "fp8 without scales": ("fp8-matrix", "weight_scale", None, "float8_e4m3fn; only float16 to float64"),
    "fp8 with scales that are not finite": ("fp8-matrix", "weight_scale", fill_with_nan, "not finite"),
    "nf4 without absmax": ("nf4", "weight.absmax", None, "absmax' is missing"),
    "nf4 with a broken state": ("nf4", NF4_STATE, lambda x: x[:-1], "cannot be read"),
    "nf4 with a huge state": ("nf4", NF4_STATE, lambda _: torch.zeros(2**20, dtype=torch.uint8), "1048576 bytes"),
    "nf4 with another block size": ("nf4", NF4_STATE, write_state(blocksize=128), "has shape .* expected"),
    "nf4 with block size 0": ("nf4", NF4_STATE, write_state(blocksize=0), "must be positive"),
    "nf4 with another shape": ("nf4", NF4_STATE, write_state(shape=[128, 32]), "has shape .* expected"),
    "nf4 with a huge shape": ("nf4", NF4_STATE, write_state(shape=[2**40, 2**40]), "has shape .* expected"),
    "nf4 with a long table": ("nf4", "weight.quant_map", lambda x: x.repeat(2), "has shape .* expected"),
    "nested without table": ("nf4-double", "weight.nested_quant_map", None, "nested_quant_map' is missing"),
    "nested without offset": ("nf4-double", NF4_STATE, write_state(nested_offset=None), "cannot be read"),
    "int8 with a GPU layout": ("bitsandbytes-int8", "weight_format", lambda x: x + 1, "layout for one kind of GPU"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_rejected(damage: str, damaged: Callable[..., Path]) -> None:
    name, suffix, value, message = DAMAGES[damage]
    folder = damaged(name, replace(suffix, value))
    with pytest.raises(WeightsError, match=message):
        serve(folder, dtype="float32")


@pytest.mark.parametrize("quantize", ["int8", "int4", "bitsandbytes-nf4"])
@pytest.mark.parametrize("name", ["gptq", "fp8-blocks"])
def test_quantized_checkpoint_is_not_quantized_again(name: str, quantize: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_oracle(num_hidden_layers=1), name)
    with pytest.raises(ConfigError, match="omit `quantize`"):
        get_model(ModelConfig(tmp_path, quantize=quantize), ops=reference)


@pytest.mark.parametrize(
    ("quantize", "reason"), [("bitsandbytes-nf4", "bitsandbytes rounds"), ("fp8-dynamic", "use fp8")]
)
def test_mixture_of_experts_is_not_rounded_while_loading(quantize: str, reason: str, tmp_path: Path) -> None:
    make_oracle("qwen3moe").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"not supported for mixtures of experts.*{reason}"):
        get_model(ModelConfig(tmp_path, quantize=quantize), ops=reference)


def test_format_setting_must_match_checkpoint(tmp_path: Path) -> None:
    """LoRAX requires `--quantize gptq` for GPTQ checkpoints."""
    write_checkpoint(tmp_path, make_oracle(num_hidden_layers=1), "gptq")
    assert serve(tmp_path, quantize="gptq").model.weight_format == "gptq-int4"
    with pytest.raises(ConfigError, match="awq needs a checkpoint in this format, but the weights are stored as gptq"):
        serve(tmp_path, quantize="awq")
    change_json(tmp_path / "config.json", quantization_config=None)
    with pytest.raises(ConfigError, match="but the weights are not quantized; use int8, int4 or fp8"):
        serve(tmp_path, quantize="gptq")


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        "gptq-act-order",
        "gptq-act-order-short-group",
        "awq",
        "ct-int4-asymmetric",
        "ct-int4-act-order",
        "ct-w8a8",
        "nf4",
        "fp8-blocks",
    ],
)
def test_estimated_bytes_are_close_to_loaded_bytes(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_oracle(hidden_size=256, intermediate_size=512), name)
    model = serve(tmp_path, dtype="float32").model
    quantization = read_quantization_config(FORMATS[name].config)
    estimate = estimate_bytes(tmp_path, torch.float32, torch.device("cpu"), None, quantization)
    assert 0.8 < estimate / model_bytes(model) < 1.1


def test_awq_with_scaled_activations_is_rejected(damaged: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.act.scales"] = torch.ones(128)

    with pytest.raises(WeightsError, match=r"AWQ with scaled activations is not supported \(tensor '.*act.scales'\)"):
        serve(damaged("awq", change), dtype="float32")


def test_gptq_groups_must_divide_inputs(damaged: Callable[..., Path]) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{MODULE}.g_idx"]
        for part in ("scales", "qzeros"):
            tensors[f"{MODULE}.{part}"] = tensors[f"{MODULE}.{part}"].repeat(2, 1)[:3]

    with pytest.raises(WeightsError, match="cannot be divided into 3 groups"):
        serve(damaged("gptq", change), dtype="float32")


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_config_of_old_quantized_checkpoints_is_explained(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_oracle(num_hidden_layers=1), "gptq")
    change_json(tmp_path / "config.json", quantization_config=None)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{name}: describes a quantized checkpoint, but config.json has no"):
        serve(tmp_path)
