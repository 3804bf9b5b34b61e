"""MXFP4 matrices are read exactly."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lorax_server.config import ModelConfig
from lorax_server.models.registry import build_model, get_model
from lorax_server.weights.mxfp4 import dequantize_mxfp4
from tests.paged import PagedDriver
from tests.parity.variants import VARIANTS, checkpoint, make_oracle, make_weights

CPU = torch.device("cpu")


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales of matrices `shape`, whose last dimension is the inputs."""
    draw = torch.Generator().manual_seed(seed)
    *outer, inputs = shape
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), dtype=torch.uint8, generator=draw)
    return blocks, torch.randint(119, 125, (*outer, inputs // 32), dtype=torch.uint8, generator=draw)


def test_dequantized_matrices_match_transformers() -> None:
    blocks, scales = random_blocks(3, 8, 96, seed=0)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    for expert in range(3):
        assert torch.equal(dequantize_mxfp4(blocks[expert], scales[expert]), expected[expert])


def test_all_values_are_exact() -> None:
    """Compare with the definition of the format: a sign, two exponent bits, one mantissa bit."""
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 16)  # the upper four bits are 0
    values = dequantize_mxfp4(blocks, torch.tensor([[130]], dtype=torch.uint8))[0]
    for bits, value in enumerate(values[0::2].tolist()):
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert value == (-size if bits >> 3 else size) * 2**3
    assert not values[1::2].any()


def test_checkpoint_with_mxfp4_experts_loads(tmp_path: Path) -> None:
    config = VARIANTS["gptoss"].config_class(**VARIANTS["gptoss"].settings | {"intermediate_size": 32})
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tensors = checkpoint("gptoss", make_oracle("gptoss"))
    plain, stored = dict(tensors), dict(tensors)
    for layer, (name, outputs) in itertools.product(range(3), (("gate_up_proj", 64), ("down_proj", 32))):
        prefix = f"model.layers.{layer}.mlp.experts.{name}"
        blocks, scales = random_blocks(6, outputs, 32, seed=layer)
        plain[prefix] = convert_moe_packed_tensors(blocks, scales).float()
        bias = torch.randn(6, outputs, generator=torch.Generator().manual_seed(layer))
        plain[f"{prefix}_bias"] = stored[f"{prefix}_bias"] = bias
        del stored[prefix]
        stored |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model, same = get_model(ModelConfig(tmp_path, dtype="float32")), build_model(config, make_weights(plain, CPU))
    drivers = PagedDriver(model), PagedDriver(same)
    first, second = (driver.forward([(driver.add(), [5, 9, 33, 60])])[0] for driver in drivers)
    assert torch.equal(first, second)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_other_quantized_checkpoints_are_rejected(method: str) -> None:
    from lorax_server.model_types import is_mxfp4

    assert is_mxfp4("gpt_oss", {"quant_method": "mxfp4"})
    assert not is_mxfp4("gpt_oss", {"quant_method": method})
    assert not is_mxfp4("llama", {"quant_method": "mxfp4"})
