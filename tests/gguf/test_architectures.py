"""Logits of GGUF files match transformers, for each architecture and with mixed tensor types."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from lorax_server.config import ModelConfig
from lorax_server.errors import UnsupportedModelError, WeightsError
from lorax_server.gguf.architectures import ARCHITECTURES
from lorax_server.gguf.container import read_gguf
from lorax_server.gguf.model_folder import find_model_folder
from lorax_server.kernels import Ops, reference
from lorax_server.models.registry import get_model
from tests.gguf import writer
from tests.paged import PagedDriver
from tests.parity.oracle import oracle_logits
from tests.parity.variant import VOCAB, Variant, rope
from tests.parity.variants import VARIANTS

# Quantized rows consist of blocks of 32 weights.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
EXPERT_SIZES = SIZES | {"moe_intermediate_size": 64}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LATENT_SIZES: dict[str, Any] = EXPERT_SIZES | {
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16, "moe_intermediate_size": 32}
}
LATENT_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.707, mscale_all_dim=0.707)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee-biases", SIZES),
    "cohere2": ("cohere2", SIZES | {"layer_types": None, "num_hidden_layers": 5}),
    "command-r": ("cohere-head-norm", SIZES),
    "deepseek2": ("deepseek2", LATENT_SIZES | LATENT_YARN | {"q_lora_rank": 32}),
    "deepseek2-lite": ("deepseek2-lite", LATENT_SIZES),
    "deepseek2-float": ("deepseek2", {}),
    "deepseek3": ("deepseek3", LATENT_SIZES | LATENT_YARN | {"q_lora_rank": 32}),
    "deepseek3-unnormalized": ("deepseek3-bias", LATENT_SIZES | {"norm_topk_prob": False}),
    "exaone4": ("exaone4", SIZES),
    "exaone4-no-window": ("exaone4-no-window", SIZES),
    "gemma": ("gemma", SIZES),
    "gemma2": ("gemma2-logit-cap", SIZES | {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3-window", SIZES | {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7}),
    "glm4": ("glm4", SIZES),
    "glm4-yarn": ("glm4-yarn", SIZES),
    "gpt2": ("gpt2", {"n_embd": 64}),
    "granite": ("granite", SIZES),
    "granitemoe": ("granitemoe", SIZES),
    "llama": ("llama-gqa", SIZES),
    "llama-bias": ("llama-attention-bias", SIZES | {"mlp_bias": True, "tie_word_embeddings": True}),
    "llama-head-dim": ("llama-own-head-dim", SIZES),
    "llama-linear": ("llama-rope-linear", SIZES),
    "llama-llama3": ("llama-gqa", SIZES | {"head_dim": 64} | rope("llama3", **LLAMA3 | {"rope_theta": 500000.0})),
    "mixtral": ("mixtral", SIZES),
    "nemotron": ("nemotron-biases", SIZES),
    "olmo2": ("olmo2", SIZES),
    "olmoe": ("olmoe", SIZES),
    "phi2": ("phi", SIZES | {"num_key_value_heads": 4}),
    "phi3": ("phi3-window", SIZES),
    "phi3-longrope": ("phi3-longrope-beyond", {}),
    "phi3-partial": ("phi3-partial-rotary", SIZES),
    "qwen2": ("qwen2-bias", SIZES),
    "qwen2moe": ("qwen2moe", EXPERT_SIZES | {"shared_expert_intermediate_size": 96, "norm_topk_prob": False}),
    "qwen2moe-no-bias": (
        "qwen2moe-no-bias",
        EXPERT_SIZES | {"shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    ),
    "qwen3": ("qwen3-attention-bias", SIZES),
    "qwen3moe": ("qwen3moe", EXPERT_SIZES),
    "smollm3": ("smollm3", SIZES | {"no_rope_layers": None, "num_hidden_layers": 5}),
    "stablelm": ("stablelm-bias", SIZES),
    "stablelm-norms": ("stablelm-head-norms", SIZES),
    "stablelm-parallel": ("stablelm-parallel", SIZES),
    "starcoder2": ("starcoder2", SIZES),
}
# transformers ignores config fields of the other cases, or does not read their architecture.
READ_BY_TRANSFORMERS = ("gpt2", "llama", "llama-head-dim", "qwen2", "qwen3moe", "starcoder2")
PROMPT = [(7 * place * place + 3) % VOCAB for place in range(23)]
TOLERANCE = 1e-4


def make_oracle(case: str) -> Any:
    """Make a transformers model with random parameters: no bias is zero and no norm is one."""
    name, changes = CASES[case]
    variant: Variant = replace(VARIANTS[name], settings=VARIANTS[name].settings | changes)
    torch.manual_seed(sum(case.encode()))
    model = AutoModelForCausalLM.from_config(variant.config(), dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.3)
        if parameter.dim() == 1 and parameter_name.endswith("weight"):
            parameter.data.add_(variant.norm_mean)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)
    return model


def serve(path: Path, ops: Ops = reference) -> PagedDriver:
    """Load a file. The reference ops are exact, while native kernels quantize activations."""
    return PagedDriver(get_model(ModelConfig(find_model_folder(path)), ops=ops))


def prefill(driver: PagedDriver) -> torch.Tensor:
    return driver.forward([(driver.add(prompt_length=len(PROMPT)), PROMPT)])[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_with_dequantized_weights(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(case)
    choose_type = writer.mixed_types if CASES[case][1] else lambda _: Type.F32
    writer.write_model(tmp_path / "model.gguf", oracle, choose_type)
    driver = serve(tmp_path / "model.gguf")
    assert bool(driver.model.weight_format) == bool(CASES[case][1])
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(driver) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_logits_match_transformers_gguf_loader(case: str, tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle(case), writer.mixed_types)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path / "model.gguf")) - expected).abs().max() < TOLERANCE


def test_every_architecture_is_tested() -> None:
    assert set(ARCHITECTURES) <= set(CASES)


def test_fused_query_key_value_is_split(tmp_path: Path) -> None:
    """llama.cpp's converter has an option to fuse these matrices."""
    oracle = make_oracle("llama-bias")
    writer.write_model(tmp_path / "model.gguf", oracle, fuses_qkv=True)
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path / "model.gguf")) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0])
@pytest.mark.parametrize("splits_kv", [False, True])
def test_keys_and_values_of_latent_attention(splits_kv: bool, kind: Type, tmp_path: Path) -> None:
    """Older versions of llama.cpp's converter do not split `kv_b_proj`."""
    oracle = make_oracle("deepseek2")
    writer.write_model(tmp_path / "model.gguf", oracle, lambda _: kind, splits_kv=splits_kv)
    assert ("blk.0.attn_k_b.weight" in read_gguf(tmp_path / "model.gguf").tensors) == splits_kv
    expected = oracle_logits(oracle, PROMPT, len(PROMPT), {})
    assert (prefill(serve(tmp_path / "model.gguf")) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert_gating_func", 3, "deepseek2.expert_gating_func = 3 is not supported"),
        ("attention.temperature_scale", 0.1, "deepseek2.attention.temperature_scale is not supported"),
    ],
)
def test_other_models_with_latent_attention_are_rejected(
    field: str, value: float, message: str, tmp_path: Path
) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("deepseek2"), fields={f"deepseek2.{field}": value})
    with pytest.raises(UnsupportedModelError, match=message):
        find_model_folder(tmp_path / "model.gguf")


def test_unexpected_shape_of_keys_is_rejected(tmp_path: Path) -> None:
    oracle = make_oracle("deepseek2")
    oracle.config.qk_nope_head_dim += 4
    extra = {f"blk.0.attn_{each}_b.weight": torch.ones(4, 32, 32) for each in "kv"}
    writer.write_model(tmp_path / "model.gguf", oracle, splits_kv=False, extra=extra)
    with pytest.raises(WeightsError, match=r"attn_k_b\.weight' has shape \(4, 32, 32\), expected \(4, 32, 36\)"):
        find_model_folder(tmp_path / "model.gguf")


def test_missing_values_of_latent_attention_are_rejected(tmp_path: Path) -> None:
    extra = {"blk.0.attn_k_b.weight": torch.ones(4, 32, 32)}
    writer.write_model(tmp_path / "model.gguf", make_oracle("deepseek2"), splits_kv=False, extra=extra)
    with pytest.raises(WeightsError, match=r"tensor 'blk\.0\.attn_v_b\.weight' is missing"):
        find_model_folder(tmp_path / "model.gguf")


def test_mistral_is_detected_by_model_name(tmp_path: Path) -> None:
    """Adapters for Mistral name `mistral` as their base model type."""
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), metadata={"general.name": "Mistral 7B"})
    assert serve(tmp_path / "model.gguf").model.config.model_type == "mistral"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "adapter"}, "the file contains an adapter, not a model"),
        ({"general.type": "mmproj"}, "the file contains an mmproj, not a model"),
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope' is not supported"),
    ],
)
def test_unsupported_metadata_is_rejected(metadata: dict[str, str], message: str, tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        find_model_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.9.attn_q.weight", "output_norm.scale"])
def test_unknown_tensors_are_rejected(name: str, tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), extra={name: torch.ones(32)})
    with pytest.raises(UnsupportedModelError, match=f"tensor '{name}' is not supported for llama models"):
        find_model_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize("count", [1, 5, 7, 2**31 - 1])
def test_unexpected_number_of_experts_is_rejected(count: int, tmp_path: Path) -> None:
    oracle = make_oracle("qwen3moe")
    oracle.config.num_experts = count
    writer.write_model(tmp_path / "model.gguf", oracle)
    with pytest.raises(WeightsError, match=rf"ffn_\w+_exps\.weight' has shape \(6, .*, expected {count} matrices"):
        find_model_folder(tmp_path / "model.gguf")


def test_unused_tensors_are_rejected(tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), extra={"blk.0.attn_output.bias": torch.ones(64)})
    with pytest.raises(WeightsError, match=r"the model does not support tensor 'model.layers.0.self_attn.o_proj.bias'"):
        serve(tmp_path / "model.gguf")


def test_rope_factors_other_than_llama3_are_rejected(tmp_path: Path) -> None:
    writer.write_model(tmp_path / "model.gguf", make_oracle("llama"), extra={"rope_freqs.weight": torch.arange(1.0, 5)})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not contain Llama 3's RoPE scaling"):
        find_model_folder(tmp_path / "model.gguf")
