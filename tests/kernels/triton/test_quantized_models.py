"""Quantized models on the Triton kernels. Attention uses the reference ops, to save time."""

from pathlib import Path

import pytest
import torch

from lorax_server.config import ModelConfig
from lorax_server.kernels.select import ReferenceAttentionOps
from lorax_server.kernels.triton.ops import TritonOps
from lorax_server.models.registry import get_model
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits
from tests.quantization.test_formats import PROMPT, KeepingOps, make_oracle, prefill
from tests.quantization.writer import write_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["gptq-asymmetric", "gptq-act-order", "fp8-blocks", "nf4-double"])
def test_quantized_checkpoint_matches_transformers(device: torch.device, name: str, tmp_path: Path) -> None:
    oracle = make_oracle(num_hidden_layers=1)
    write_checkpoint(tmp_path, oracle, name)
    settings = ModelConfig(tmp_path, dtype="float32", device=str(device))
    driver = PagedDriver(get_model(settings, ops=ReferenceAttentionOps(TritonOps())))
    assert "from" not in driver.model.weight_format
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver).cpu() - expected).abs().max() < 1e-3


@pytest.mark.parametrize("quantize", ["int4", "fp8", "bitsandbytes-nf4"])
def test_quantizing_while_loading_matches_reference(device: torch.device, quantize: str, tmp_path: Path) -> None:
    make_oracle(num_hidden_layers=1).save_pretrained(tmp_path)
    settings = [
        ModelConfig(tmp_path, dtype="float32", device=where, quantize=quantize) for where in ("cpu", str(device))
    ]
    expected = prefill(PagedDriver(get_model(settings[0], ops=KeepingOps())))
    driver = PagedDriver(get_model(settings[1], ops=ReferenceAttentionOps(TritonOps())))
    assert driver.model.weight_format.startswith(quantize.removeprefix("bitsandbytes-"))
    assert (prefill(driver).cpu() - expected).abs().max() < 1e-3
