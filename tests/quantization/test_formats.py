"""Quantized checkpoints: logits match transformers with weights that the format's own library dequantized."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import bitsandbytes.functional
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lorax_server.config import ModelConfig
from lorax_server.kernels import BlockMatrix, Ops, QuantizedMatrix, reference
from lorax_server.kernels.select import ReferenceAttentionOps
from lorax_server.models.registry import find_quantization, get_model, load_config
from lorax_server.weights import checkpoint, estimate_bytes
from lorax_server.worker.memory import model_bytes
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


class KeepingOps(ReferenceAttentionOps):
    """The reference ops, which keep all quantized matrices."""

    keeps_quantized = staticmethod(lambda matrix: isinstance(matrix, QuantizedMatrix))

    def __init__(self) -> None:
        super().__init__(cast(Ops, reference))


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


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_matrices_can_be_kept(name: str, tmp_path: Path) -> None:
    """GPUs have kernels for all formats."""
    oracle = make_oracle()
    write_checkpoint(tmp_path, oracle, name)
    settings = ModelConfig(tmp_path, dtype="float32")
    driver = PagedDriver(get_model(settings, ops=KeepingOps()))
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver) - expected).abs().max() < TOLERANCE
    if "short-group" not in name:
        assert driver.model.weight_format == FORMATS[name].label
    if driver.model.weight_format == FORMATS[name].label and name not in (
        "ct-int4-tensor",  # fused with 8 bits
        "gptq-act-order-per-matrix",  # fused in floating point
    ):
        quantization = find_quantization(load_config(settings))
        estimate = estimate_bytes(tmp_path, torch.float32, torch.device("cuda"), quantization=quantization)
        assert estimate == pytest.approx(model_bytes(driver.model), rel=0.1)


@pytest.mark.parametrize(
    ("quantize", "quantized_format"), [("int4", "int4"), ("fp8", "fp8"), ("bitsandbytes-nf4", "nf4")]
)
def test_size_of_weights_that_are_quantized_while_loading(quantize: str, quantized_format: str, tmp_path: Path) -> None:
    make_oracle(hidden_size=128, intermediate_size=512).save_pretrained(tmp_path)
    model = get_model(ModelConfig(tmp_path, dtype="float32", quantize=quantize), ops=KeepingOps())
    estimate = estimate_bytes(tmp_path, torch.float32, torch.device("cuda"), quantized_format)
    assert estimate == pytest.approx(model_bytes(model), rel=0.15)  # GPUs store float32 scales


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8", "fp8-dynamic"])
def test_chunks_match_matrices_that_are_quantized_as_a_whole(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_oracle().save_pretrained(tmp_path)
    settings = ModelConfig(tmp_path, dtype="float32", quantize=quantize)
    whole = prefill(PagedDriver(get_model(settings, ops=KeepingOps())))
    monkeypatch.setattr(checkpoint, "QUANTIZE_CHUNK_ELEMENTS", 5 * SIZES["hidden_size"])
    assert torch.equal(prefill(PagedDriver(get_model(settings, ops=KeepingOps()))), whole)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3moe"])
def test_weights_are_rounded_to_8_bit_floats(name: str, tmp_path: Path) -> None:
    oracle = make_oracle(name, **{"moe_intermediate_size": 64} if name == "qwen3moe" else {})
    oracle.save_pretrained(tmp_path)
    settings = ModelConfig(tmp_path, dtype="float32", quantize="fp8")
    models = [get_model(settings, ops=ops) for ops in (reference, KeepingOps())]
    assert [model.weight_format for model in models] == ["float32 from fp8", "fp8"]
    rounded, kept = (prefill(PagedDriver(model)) for model in models)
    exact = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (kept - rounded).abs().max() < TOLERANCE
    assert 1e-3 < (rounded - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 0.5


@pytest.mark.parametrize("ops", [None, reference], ids=["cpu", "reference"])
def test_weights_and_activations_are_rounded_to_8_bit_floats(ops: Ops | None, tmp_path: Path) -> None:
    """The oracle is transformers with linear layers that round as described in the documentation."""
    oracle = make_oracle()
    oracle.save_pretrained(tmp_path)
    model = get_model(ModelConfig(tmp_path, dtype="float32", quantize="fp8-dynamic"), ops=ops)
    assert model.weight_format == "fp8-dynamic"
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = round_rows_to_float8(module.weight.data)
            module.register_forward_pre_hook(lambda _, args: (round_rows_to_float8(args[0]),))
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    found = prefill(PagedDriver(model))
    # Different orders of additions can round an activation to the next 8-bit float.
    assert (found - expected).square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()


def round_rows_to_float8(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(-1, keepdim=True) / 448
    return (x / scales).to(torch.float8_e4m3fn).float() * scales


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
