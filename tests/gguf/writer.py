"""Write GGUF files from tiny transformers models, as llama.cpp's converter does.

`test_architectures.py` compares the result with transformers. It was also compared with files of llama.cpp's
`convert_hf_to_gguf.py`.
"""

import math
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from tests.gguf.blocks import random_blocks

ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
# Names that the `gguf` package does not know, and names of the same tensors that it knows.
OTHER_NAMES = (
    ("block_sparse_moe.experts", "mlp.experts"),
    ("block_sparse_moe.router", "mlp.gate"),
    ("mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction.bias"),
)
LATENT_MODELS = ("deepseek_v2", "deepseek_v3")
INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral", "mixtral", "smollm3")
SHIFTED_NORMS = ("gemma", "gemma2", "gemma3_text", "nemotron")
# Types that the `gguf` package can quantize to.
TYPES = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.F16, Type.BF16)
Array = npt.NDArray[Any]
ChooseType = Callable[[str], Type]


def mixed_types(name: str) -> Type:
    """Return a type for a matrix. Fused matrices, such as queries and keys, have different types."""
    return TYPES[sum(name.encode()) % len(TYPES)]


def all_float(_: str) -> Type:
    return Type.F32


def write_model(
    path: Path,
    model: Any,
    choose_type: ChooseType = all_float,
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    fields: Mapping[str, int | float] = MappingProxyType({}),
    extra: Mapping[str, torch.Tensor] = MappingProxyType({}),
    fuses_qkv: bool = False,
    splits_kv: bool = True,
    write_tokens: Callable[[gguf.GGUFWriter], object] | None = None,
) -> None:
    """Write a transformers model, and replace its parameters by the dequantized values in the file."""
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(config.model_type, config.model_type))
    write_config(writer, config)
    write_latent_config(writer, config, splits_kv=splits_kv)
    if write_tokens is None:
        write_vocabulary(writer, config.vocab_size)
    else:
        write_tokens(writer)
    for key, value in metadata.items():
        writer.add_string(key, value)
    for key, number in fields.items():
        add: Any = writer.add_float32 if isinstance(number, float) else writer.add_uint32
        add(key, number)
    tensors = split_experts(model.state_dict())
    tensors = split_keys_and_values(config, tensors) if splits_kv else tensors
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    for name, parts in to_gguf_names(config, tensors).items():
        values = np.stack([convert(config, part, tensors[part].numpy()) for part in parts])
        values = values if len(parts) > 1 else values[0]
        is_float = values.ndim == 1 or "norm" in name or "gate_inp" in name
        kind = Type.F32 if is_float else choose_type(name)
        if kind in (Type.F32, *TYPES):
            data = gguf.quants.quantize(values, kind)
        else:
            data = random_blocks(kind, values.shape[0], values.shape[1], spread=0.1)
        writer.add_tensor(name, data, raw_dtype=kind)
        stored = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(values.shape)
        for part, row in zip(parts, stored if len(parts) > 1 else [stored], strict=True):
            restored = torch.from_numpy(revert(config, part, row).copy())
            tensors[part].copy_(restored)
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy())
    if fuses_qkv:
        fuse_qkv(writer)
    write_rope_factors(writer, config)
    save(writer)


def fuse_qkv(writer: gguf.GGUFWriter) -> None:
    tensors = writer.tensors[0]
    for name in [name for name in tensors if ".attn_q." in name]:
        infos = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        parts = [info.tensor for info in infos if info.tensor is not None]
        writer.add_tensor(name.replace("attn_q", "attn_qkv"), np.concatenate(parts))


def save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- Tensors ---


def split_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors, with gate and up matrices of experts separate. They are views."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, is_expert, matrix = name.partition(".experts.")
        if not is_expert:
            split[name] = tensor
        elif matrix == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            split |= {f"{layer}.experts.gate_proj.weight": gate, f"{layer}.experts.up_proj.weight": up}
        else:
            split[f"{layer}.experts.{matrix}.weight"] = tensor
    return split


def split_keys_and_values(config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors, with the transposed keys and the values of latent attention separate, as views."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if config.model_type not in LATENT_MODELS or ".kv_b_proj." not in name:
            split[name] = tensor
            continue
        by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        split |= {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    return split


def to_gguf_names(config: Any, tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the tensors in transformers for each tensor in the file: one, or all rows of a stacked norm."""
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    result: dict[str, list[str]] = {}
    for name in tensors:
        stem = name
        for new, old in OTHER_NAMES:
            stem = stem.replace(new, old)
        stem, _, suffix = stem.rpartition(".")
        if "layernorm.norms." in stem:
            stem = stem.partition(".norms.")[0]
        target = names.get_name(stem)
        assert target is not None, name
        result.setdefault(f"{target}.{suffix}", []).append(name)
    return result


def convert(config: Any, name: str, values: Array) -> Array:
    """Change values as llama.cpp's converter does."""
    if config.model_type in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        shape = (heads, 2, len(values) // heads // 2, *values.shape[1:])
        return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if config.model_type in SHIFTED_NORMS and name.endswith("norm.weight"):
        return values + 1
    if "shared_expert_gate" in name:
        row: Array = values[0]
        return row
    return values.T if is_transposed(config, name) else values


def revert(config: Any, name: str, values: Array) -> Array:
    """Undo `convert`."""
    if config.model_type in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        shape = (heads, len(values) // heads // 2, 2, *values.shape[1:])
        return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    if config.model_type in SHIFTED_NORMS and name.endswith("norm.weight"):
        return values - 1
    if "shared_expert_gate" in name:
        return values[None]
    return values.T if is_transposed(config, name) else values


def is_transposed(config: Any, name: str) -> bool:
    return config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def write_rope_factors(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(attention if scale > 1 else 1.0)
    if rope.get("rope_type") == "llama3":
        size = config.head_dim // 2
        wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(size) / size)
        turns = rope["original_max_position_embeddings"] / wavelengths
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clip(0, 1)
        factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


# --- Metadata ---


def write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    get = config.to_dict().get
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(get("intermediate_size") or get("n_inner") or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    fields = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "layer_norm_epsilon": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "norm_eps": writer.add_layer_norm_eps,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    if config.model_type not in LATENT_MODELS:
        fields |= {"num_key_value_heads": writer.add_head_count_kv, "head_dim": writer.add_key_length}
    for name, add in fields.items():
        if get(name) is not None:
            add(get(name))
    if config.model_type in ("cohere2", "exaone4", "gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(get("sliding_window") or 0)
    if config.model_type == "exaone4":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type != "gpt2":
        write_rope(writer, config)


def write_latent_config(writer: gguf.GGUFWriter, config: Any, *, splits_kv: bool) -> None:
    """Write the fields of DeepSeek models. Older files, which do not split keys and values, have fewer fields."""
    if config.model_type not in LATENT_MODELS:
        return
    key_size = config.qk_nope_head_dim + config.qk_rope_head_dim
    if splits_kv:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key_size)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(key_size)
        writer.add_value_length(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "deepseek_v3" or config.topk_method != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Write a vocabulary of single bytes and numbered tokens."""
    alphabet = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    tokens = [token for token, _ in zip(cycle(alphabet), range(size), strict=False)]
    tokens = [token if number < len(alphabet) else f"<{number}>" for number, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
