"""Tiny random models, one for each architecture feature.

`off` holds config changes that disable the feature. `spoil` is a tensor name pattern and a value that disable it if no
config field does. With the feature disabled, the comparison with the oracle must fail.
"""

import warnings
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from lorax_server.distributed import FakeGroup, ProcessGroup
from lorax_server.weights import Weights
from tests.builders import ops_of
from tests.parity.other_variants import OTHER_VARIANTS
from tests.parity.variant import GATED, GPT2, GQA, LONG, NEOX, NO_SCALING, OPT, Variant, rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, Variant] = {
    "llama-mha": Variant(LlamaConfig, GATED, off={"num_key_value_heads": 2}),
    "llama-gqa": Variant(LlamaConfig, GQA, off={"num_key_value_heads": 4}),
    "llama-mqa": Variant(LlamaConfig, GATED | {"num_key_value_heads": 1}, off={"num_key_value_heads": 4}),
    "llama-attention-bias": Variant(LlamaConfig, GQA | {"attention_bias": True}, off={"attention_bias": False}),
    "llama-mlp-bias": Variant(LlamaConfig, GQA | {"mlp_bias": True}, off={"mlp_bias": False}),
    "llama-own-head-dim": Variant(LlamaConfig, GQA | {"head_dim": 16}, off={"head_dim": 8}),
    "llama-tied-head": Variant(LlamaConfig, GQA | {"tie_word_embeddings": True}, off={"tie_word_embeddings": False}),
    "llama-gelu-tanh": Variant(LlamaConfig, GQA | {"hidden_act": "gelu_pytorch_tanh"}, off={"hidden_act": "silu"}),
    "llama-rope-theta": Variant(LlamaConfig, GQA | rope("default", rope_theta=500.0), off=NO_SCALING),
    "llama-rope-linear": Variant(LlamaConfig, GQA | rope("linear", factor=4.0), off=NO_SCALING),
    "llama-rope-llama3": Variant(LlamaConfig, GQA | rope("llama3", **LLAMA3), off=NO_SCALING),
    "llama-rope-yarn": Variant(
        LlamaConfig, GQA | rope("yarn", factor=4.0, original_max_position_embeddings=32), off=NO_SCALING
    ),
    "llama-rope-yarn-mscale": Variant(
        LlamaConfig,
        GQA | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3),
        off=rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-rope-dynamic-within": Variant(
        LlamaConfig, GQA | rope("dynamic", factor=4.0), off=rope("linear", factor=4.0)
    ),
    "llama-rope-dynamic-beyond": Variant(
        LlamaConfig, GQA | {"max_position_embeddings": 16} | rope("dynamic", factor=4.0), off=NO_SCALING
    ),
    "llama-rope-longrope-within": Variant(LlamaConfig, GQA | rope("longrope", **LONG), off=NO_SCALING),
    "llama-rope-longrope-beyond": Variant(
        LlamaConfig,
        GQA | rope("longrope", **LONG | {"original_max_position_embeddings": 16}),
        off=rope("longrope", **LONG),
    ),
    "llama-fp8-kv": Variant(LlamaConfig, GQA | {"quantize": "fp8-kv"}, off={"quantize": None}),
    "mistral-window": Variant(MistralConfig, GQA | {"sliding_window": 6}, off={"sliding_window": None}),
    "mistral-no-window": Variant(MistralConfig, GQA | {"sliding_window": None}, off={"sliding_window": 6}),
    "mistral-own-head-dim": Variant(MistralConfig, GQA | {"head_dim": 16, "sliding_window": 6}, off={"head_dim": 8}),
    "qwen2-bias": Variant(Qwen2Config, GQA, spoil=(r"[qkv]_proj\.bias", 0.0)),
    "qwen2-window": Variant(
        Qwen2Config,
        GQA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        off={"layer_types": ["full_attention"] * 3},
    ),
    "qwen3-head-norm": Variant(Qwen3Config, GQA | {"head_dim": 16}, spoil=(r"[qk]_norm\.weight", 1.0)),
    "qwen3-attention-bias": Variant(
        Qwen3Config, GQA | {"head_dim": 16, "attention_bias": True}, off={"attention_bias": False}
    ),
    "qwen3-window": Variant(
        Qwen3Config,
        GQA | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        off={"layer_types": ["full_attention"] * 3},
    ),
    "gpt2": Variant(GPT2Config, GPT2, off={"layer_norm_epsilon": 0.5}),
    "gpt2-no-scale": Variant(GPT2Config, GPT2 | {"scale_attn_weights": False}, off={"scale_attn_weights": True}),
    "gpt2-inverse-layer-scale": Variant(
        GPT2Config,
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        off={"scale_attn_by_inverse_layer_idx": False},
    ),
    # Upcasting has no effect in float32. test_details.py covers half precision.
    "gpt2-reorder-and-upcast": Variant(
        GPT2Config, GPT2 | {"reorder_and_upcast_attn": True}, off={"layer_norm_epsilon": 0.5}
    ),
    "gpt2-n-inner": Variant(GPT2Config, GPT2 | {"n_inner": 36}, off={"n_inner": None}),
    "gpt2-untied-head": Variant(GPT2Config, GPT2 | {"tie_word_embeddings": False}, spoil=(r"lm_head\.weight", 0.0)),
    **{
        f"gpt2-{name}": Variant(GPT2Config, GPT2 | {"activation_function": name}, off={"activation_function": other})
        for name, other in (
            ("relu", "gelu"),
            ("silu", "gelu"),
            ("gelu", "silu"),
            ("tanh", "gelu"),
            ("quick_gelu", "gelu"),
            ("gelu_fast", "silu"),
        )
    },
    "neox-parallel": Variant(GPTNeoXConfig, NEOX, off={"use_parallel_residual": False}),
    "neox-sequential": Variant(
        GPTNeoXConfig, NEOX | {"use_parallel_residual": False}, off={"use_parallel_residual": True}
    ),
    "neox-rotary-half": Variant(GPTNeoXConfig, NEOX | {"rotary_pct": 0.5}, off=rope("default")),
    "neox-rotary-all": Variant(
        GPTNeoXConfig, NEOX | {"rotary_pct": 1.0}, off=rope("default", partial_rotary_factor=0.25)
    ),
    "neox-rotary-base": Variant(
        GPTNeoXConfig, NEOX | {"rotary_emb_base": 500}, off=rope("default", partial_rotary_factor=0.25)
    ),
    "neox-rope-linear": Variant(
        GPTNeoXConfig,
        NEOX | rope("linear", factor=4.0, partial_rotary_factor=0.5),
        off=rope("default", partial_rotary_factor=0.5),
    ),
    "neox-rope-dynamic-beyond": Variant(
        GPTNeoXConfig,
        NEOX | {"max_position_embeddings": 16} | rope("dynamic", factor=4.0, partial_rotary_factor=0.5),
        off=rope("default", partial_rotary_factor=0.5),
    ),
    "neox-no-attention-bias": Variant(GPTNeoXConfig, NEOX | {"attention_bias": False}, off={"attention_bias": True}),
    "neox-relu": Variant(GPTNeoXConfig, NEOX | {"hidden_act": "relu"}, off={"hidden_act": "gelu"}),
    "neox-gelu-fast": Variant(GPTNeoXConfig, NEOX | {"hidden_act": "gelu_fast"}, off={"hidden_act": "relu"}),
    "neox-tied-head": Variant(GPTNeoXConfig, NEOX | {"tie_word_embeddings": True}, off={"tie_word_embeddings": False}),
    "opt-pre-norm": Variant(OPTConfig, OPT, off={"do_layer_norm_before": False}),
    "opt-post-norm": Variant(OPTConfig, OPT | {"do_layer_norm_before": False}, off={"do_layer_norm_before": True}),
    "opt-projection": Variant(OPTConfig, OPT | {"word_embed_proj_dim": 16}, off={"word_embed_proj_dim": 32}),
    "opt-350m-like": Variant(
        OPTConfig, OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}, off={"do_layer_norm_before": True}
    ),
    "opt-no-final-norm": Variant(
        OPTConfig, OPT | {"_remove_final_layer_norm": True}, off={"_remove_final_layer_norm": False}
    ),
    "opt-no-bias": Variant(OPTConfig, OPT | {"enable_bias": False}, off={"enable_bias": True}),
    "opt-no-affine": Variant(
        OPTConfig, OPT | {"layer_norm_elementwise_affine": False}, off={"layer_norm_elementwise_affine": True}
    ),
    "galactica-like": Variant(
        OPTConfig,
        OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        off={"activation_function": "relu"},
    ),
}

VARIANTS |= OTHER_VARIANTS

# A rounding difference in float32 can change a float8 cache value by a whole step.
TOLERANCE = {name: 2e-2 if "fp8" in name else 1e-4 for name in VARIANTS}
# Variants in `make test`: the first one per architecture, and variants with special caches or rotary angles.
QUICK = {
    *{variant.config().model_type: name for name, variant in reversed(VARIANTS.items())}.values(),
    *("llama-gqa", "llama-fp8-kv", "llama-rope-dynamic-beyond", "llama-rope-longrope-beyond", "gemma3-window"),
}
LENGTH_DEPENDENT = [name for name in VARIANTS if "dynamic" in name or "longrope" in name]


def make_oracle(name: str, spread: float = 0.3) -> Any:
    """Make the variant in transformers with random parameters: no bias is zero and no norm is one."""
    model, random_state = _build_oracle(name, spread)
    torch.set_rng_state(random_state)
    return deepcopy(model)  # a test may change it


@cache
@torch.no_grad()
def _build_oracle(name: str, spread: float) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(sum(name.encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of transformers' modules use torch.jit
        model = AutoModelForCausalLM.from_config(VARIANTS[name].config(), dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.normal_(0, spread)
        if parameter.dim() == 1 and parameter_name.endswith("weight"):
            parameter.add_(VARIANTS[name].norm_mean)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(0, spread)
    return model, torch.get_rng_state()


def make_weights(tensors: dict[str, torch.Tensor], device: torch.device, group: ProcessGroup | None = None) -> Weights:
    return Weights(
        tensors,
        device=device,
        dtype=torch.float32,
        process_group=group or FakeGroup(),
        ops=ops_of(device),
    )


def checkpoint(name: str, oracle: Any) -> dict[str, torch.Tensor]:
    """Return the oracle's tensors and the KV cache scales, which only the server reads."""
    tensors = dict(oracle.state_dict())
    if oracle.config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # stored once, in the embedding
    if "fp8" in name:
        for layer in range(oracle.config.num_hidden_layers):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.02 * (layer + 1))
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.03 * (layer + 1))
    return tensors
