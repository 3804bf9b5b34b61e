"""Quantized checkpoints: logits match transformers with weights that the format's own library dequantized."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lorax_server.config import ModelConfig
from lorax_server.kernels import BlockMatrix, reference
from lorax_server.models.registry import get_model
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits
from tests.parity.variant import VOCAB, Variant
from tests.parity.variants import VARIANTS
from tests.quantization.writer import FORMATS, write_checkpoint

PROMPT = [(7 * place * place + 3) % VOCAB for place in range(23)]
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes on CPUs reads rows of whole blocks of 64 correctly
TOLERANCE = 1e-4


def make_oracle(name: str = "llama-gqa", **changes: Any) -> Any:
    variant: Variant = replace(VARIANTS[name], settings=VARIANTS[name].settings | SIZES | changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(variant.config(), dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3)
        if parameter.dim() == 1 and parameter_name.endswith("weight"):
            parameter.data.add_(variant.norm_mean)
    return model


def serve(folder: Path, **settings: Any) -> PagedDriver:
    """Load a model with the reference ops, which are exact, while native kernels quantize activations."""
    return PagedDriver(get_model(ModelConfig(folder, **settings), ops=reference))


def prefill(driver: PagedDriver) -> torch.Tensor:
    return driver.forward([(driver.add(prompt_length=len(PROMPT)), PROMPT)])[0]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_match_transformers_with_dequantized_weights(name: str, tmp_path: Path) -> None:
    oracle = make_oracle()
    write_checkpoint(tmp_path, oracle, name)
    driver = serve(tmp_path, dtype="float32")
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver) - expected).abs().max() < TOLERANCE
    layer: Any = driver.model.model.layers[0]
    assert isinstance(layer.mlp.down_proj.linear.weight, BlockMatrix) == FORMATS[name].is_integer
    kept = FORMATS[name].is_integer
    assert driver.model.weight_format == FORMATS[name].label if kept else f"float32 from {FORMATS[name].label}"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_rounding_while_loading_matches_bitsandbytes(name: str, kind: str, tmp_path: Path) -> None:
    """QLoRA adapters are trained on these weights. Embedding and LM head are not rounded."""
    oracle = make_oracle(name)
    oracle.save_pretrained(tmp_path)
    driver = serve(tmp_path, quantize=f"bitsandbytes-{kind}")
    assert driver.model.weight_format == f"float32 from {kind}"
    for module_name, module in oracle.named_modules():
        is_transposed = isinstance(module, Conv1D)
        if not (is_transposed or isinstance(module, torch.nn.Linear)) or module_name == "lm_head":
            continue
        weight = (module.weight.t() if is_transposed else module.weight).detach().contiguous()
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type=kind)
        rounded = bitsandbytes.functional.dequantize_4bit(packed, state)
        module.weight.data = rounded.t() if is_transposed else rounded
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver) - expected).abs().max() < TOLERANCE
