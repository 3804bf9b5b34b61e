"""Translate GGUF metadata and tensor names to transformers configs and tensor names.

llama.cpp's converters define these names. They also reorder query and key rows, and change norm weights.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lorax_server.errors import UnsupportedModelError
from lorax_server.gguf.container import GGUFFile, TensorEntry

TENSOR_NAME_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # part of the config
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_TOLERANCE = 1e-4
DEFAULT_ROPE_THETA = 10000.0
# Numbers of layers in models whose attention scale depends on the hidden size instead of the head size.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# All experts are in one tensor `[experts, outputs, inputs]`. transformers' names have the expert's number.
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
SHARED_EXPERT_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",  # stored as a vector
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Multi-head latent attention. Newer files split `attn_kv_b` into `attn_k_b` and `attn_v_b`.
LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LATENT_KEYS_PATTERN = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")
LATENT_VALUES_PATTERN = re.compile(r"blk\.\d+\.attn_v_b\.weight")
CORRECTION_BIAS = "exp_probs_b"  # a parameter of the router in transformers, without the suffix `.bias`
SOFTMAX_GATING, SIGMOID_GATING = 1, 2  # values of `expert_gating_func`
YARN_LOG_MULTIPLIER = 0.1  # llama.cpp's converter multiplies `mscale_all_dim` by this
HEAD_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORM_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST_NORM_NAMES = {name: SANDWICH_NORM_NAMES[name] for name in ("post_attention_norm", "post_ffw_norm")}


class TensorSource(NamedTuple):
    """The location of one transformers tensor in a GGUF file, and how its values differ from transformers."""

    entry: TensorEntry
    shape: tuple[int, ...]  # in transformers
    first_row: int = 0
    head_dim: int | None = None  # set if the halves of each head's rows are interleaved
    offset: float = 0.0  # added to the values
    # Set if `entry` contains the transposed key matrices of all heads, and another entry their value matrices.
    values: TensorEntry | None = None


class _Fields:
    """Reads a file's architecture-specific metadata fields. Names omit the architecture prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.require("general.architecture", str)

    def find_int(self, key: str) -> int | None:
        return self.file.get(f"{self.name}.{key}", int)

    def find_float(self, key: str) -> float | None:
        return self.file.get(f"{self.name}.{key}", float)

    def require_int(self, key: str) -> int:
        return self.file.require(f"{self.name}.{key}", int)

    def require_float(self, key: str) -> float:
        return self.file.require(f"{self.name}.{key}", float)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    @property
    def is_latent(self) -> bool:
        """Return True if the model uses multi-head latent attention."""
        return self.find_int("attention.kv_lora_rank") is not None

    @property
    def head_dim(self) -> int:
        if self.is_latent:  # as in transformers, the size of the rotated part
            return self.require_int("rope.dimension_count")
        size, heads = self.require_int("embedding_length"), self.require_int("attention.head_count")
        return self.find_int("attention.key_length") or size // heads

    def rope_theta(self) -> float:
        return self.find_float("rope.freq_base") or DEFAULT_ROPE_THETA


@dataclass(frozen=True)
class GGUFArchitecture:
    """An architecture in GGUF files: its type in transformers, its tensor names, and its config fields."""

    model_type: str
    class_name: str
    names: Mapping[str, str]  # modules of a layer
    model_names: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    layer_prefix: str = "model.layers"
    interleaves_heads: bool = False
    norm_offset: float = 0.0
    make_config: Callable[[_Fields], dict[str, Any]] | None = None


def find_architecture(file: GGUFFile) -> GGUFArchitecture:
    name = file.require("general.architecture", str)
    kind = file.get("general.type", str) or "model"
    if kind != "model":
        hint = "; `lorax convert-adapter` converts it" if kind == "adapter" else ""
        raise UnsupportedModelError(f"{file.path}: the file contains an {kind[:40]}, not a model{hint}")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported; use one of {', '.join(sorted(ARCHITECTURES))}"
        )
    if name == "llama" and "blk.0.ffn_gate_inp.weight" in file.tensors:
        return MIXTRAL
    if name == "llama" and "mistral" in (file.get("general.name", str) or "").lower():
        return MISTRAL_ARCHITECTURE
    if name == "deepseek2" and file.get("deepseek2.expert_gating_func", int) == SIGMOID_GATING:
        return DEEPSEEK3_ARCHITECTURE
    return ARCHITECTURES[name]


def make_config(file: GGUFFile) -> dict[str, Any]:
    """Return the transformers `config.json` content for a file."""
    fields, arch = _Fields(file), find_architecture(file)
    if "token_embd.weight" not in file.tensors:
        raise file.error("tensor 'token_embd.weight' is missing")
    if file.get(f"{fields.name}.attention.causal", bool) is False:
        raise UnsupportedModelError(f"{file.path}: only causal models are supported")
    heads, head_dim = fields.require_int("attention.head_count"), fields.head_dim
    if not fields.is_latent and (fields.find_int("attention.value_length") or head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: attention.key_length and attention.value_length differ")
    config = {
        "architectures": [arch.class_name],
        "model_type": arch.model_type,
        "dtype": "bfloat16",  # on GPUs, weights are dequantized to this dtype
        "hidden_size": fields.require_int("embedding_length"),
        "intermediate_size": fields.require_int("feed_forward_length"),
        "num_hidden_layers": fields.require_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.find_int("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.require_int("context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "rms_norm_eps": fields.find_float("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": fields.find_float("attention.layer_norm_epsilon"),
        "rope_parameters": _rope_parameters(fields),
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias") or fields.has_tensor("blk.0.attn_qkv.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
        **{f"{token}_token_id": file.get(f"tokenizer.ggml.{key}_token_id", int) for token, key in TOKEN_KEYS.items()},
        **(arch.make_config(fields) if arch.make_config else {}),
    }
    return {key: value for key, value in config.items() if value is not None or key in NULLABLE_FIELDS}


TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding"}
# Fields for which null and a missing value differ in transformers.
NULLABLE_FIELDS = ("sliding_window", "q_lora_rank", "bos_token_id", "eos_token_id", "pad_token_id")
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def map_tensors(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Return a map from transformers tensor names to tensors in the file. Reject unknown tensors."""
    arch = find_architecture(file)
    tensors: dict[str, TensorSource] = {}
    for name, entry in file.tensors.items():
        if "attn_kv_b" in arch.names and (match := LATENT_KEYS_PATTERN.fullmatch(name)):
            tensors.update(_join_keys_and_values(file, arch, config, match[1]))
        elif "attn_kv_b" in arch.names and LATENT_VALUES_PATTERN.fullmatch(name):
            continue
        elif name not in ROPE_TENSORS:
            tensors.update(map_tensor(file, arch, config, name, entry))
    return tensors


def map_tensor(
    file: GGUFFile, arch: GGUFArchitecture, config: Mapping[str, Any], name: str, entry: TensorEntry
) -> Iterator[tuple[str, TensorSource]]:
    match, rows = TENSOR_NAME_PATTERN.fullmatch(name), entry.shape[0]
    layer, module, kind = match.groups() if match else (None, "", "")
    names = arch.model_names if layer is None else arch.names
    is_fused = layer is not None and module == "attn_qkv" and "attn_q" in names
    if (not is_fused and module not in names) or int(layer or 0) >= config["num_hidden_layers"]:
        raise UnsupportedModelError(f"{file.path}: tensor {name!r} is not supported for {arch.model_type} models")
    prefix = "" if layer is None else f"{arch.layer_prefix}.{layer}."
    head_dim = config["head_dim"] if arch.interleaves_heads else None
    if is_fused:
        size, kv_size = (config[f"num_{each}_heads"] * config["head_dim"] for each in ("attention", "key_value"))
        if rows != size + 2 * kv_size:
            raise file.error(f"tensor {name!r} has {rows} rows, expected {size + 2 * kv_size}")
        for part, start, count in (("q", 0, size), ("k", size, kv_size), ("v", size + kv_size, kv_size)):
            source = TensorSource(entry, (count, *entry.shape[1:]), start, None if part == "v" else head_dim)
            yield f"{prefix}{names[f'attn_{part}']}.{kind}", source
        return
    target = f"{prefix}{names[module]}" + (f".{kind}" if module != CORRECTION_BIAS else "")
    if "{expert}" in target:
        yield from _split_experts(file, config, name, entry, target)
        return
    if module == "ffn_gate_inp_shexp":
        entry = entry._replace(shape=(1, *entry.shape[-1:]))
    if "{row}" in target:  # transformers stores each row as a tensor
        for row in range(rows):
            yield target.format(row=row), TensorSource(entry, entry.shape[1:], row)
        return
    source = TensorSource(entry, entry.shape, offset=arch.norm_offset if name.endswith("norm.weight") else 0.0)
    if module in ("attn_q", "attn_k") and head_dim is not None:
        if rows % head_dim:
            raise file.error(f"tensor {name!r} has {rows} rows, which is not a multiple of the head size {head_dim}")
        source = source._replace(head_dim=head_dim)
    yield target, source


def _split_experts(
    file: GGUFFile, config: Mapping[str, Any], name: str, entry: TensorEntry, target: str
) -> Iterator[tuple[str, TensorSource]]:
    count = next((config[key] for key in EXPERT_COUNT_FIELDS if key in config), None)
    if len(entry.shape) != 3 or entry.shape[0] != count:
        raise file.error(f"tensor {name!r} has shape {entry.shape}, expected {count} matrices, one per expert")
    shape = entry.shape[1:]
    for expert in range(entry.shape[0]):
        yield target.format(expert=expert), TensorSource(entry._replace(shape=shape), shape, expert * shape[0])


def _join_keys_and_values(
    file: GGUFFile, arch: GGUFArchitecture, config: Mapping[str, Any], layer: str
) -> dict[str, TensorSource]:
    """Return transformers' matrix with the key rows and the value rows of each head."""
    keys, values = file.tensors[f"{layer}.attn_k_b.weight"], file.tensors.get(f"{layer}.attn_v_b.weight")
    heads, latent_size = config["num_attention_heads"], config["kv_lora_rank"]
    key_size, value_size = config["qk_nope_head_dim"], config["v_head_dim"]
    if values is None:
        raise file.error(f"tensor '{layer}.attn_v_b.weight' is missing")
    for name, entry, expected in (
        ("k", keys, (heads, latent_size, key_size)),
        ("v", values, (heads, value_size, latent_size)),
    ):
        if entry.shape != expected:
            raise file.error(f"tensor '{layer}.attn_{name}_b.weight' has shape {entry.shape}, expected {expected}")
    target = f"{arch.layer_prefix}.{layer.removeprefix('blk.')}.{arch.names['attn_kv_b']}.weight"
    return {target: TensorSource(keys, (heads * (key_size + value_size), latent_size), values=values)}


# --- RoPE -------------------------------------------------------------------------------------------------------------


def _rope_parameters(fields: _Fields) -> dict[str, Any]:
    kind = fields.file.get(f"{fields.name}.rope.scaling.type", str) or "none"
    factor = fields.find_float("rope.scaling.factor") or fields.find_float("rope.scale_linear")
    original = fields.find_int("rope.scaling.original_context_length")
    common = {"rope_theta": fields.rope_theta()}
    rotary_dim, head_dim = fields.find_int("rope.dimension_count"), fields.head_dim
    if rotary_dim is not None and rotary_dim != head_dim:
        part = rotary_dim / head_dim
        common["partial_rotary_factor"] = part if int(head_dim * part) == rotary_dim else math.nextafter(part, 2)
    if fields.has_tensor("rope_freqs.weight"):
        return common | _llama3_rope(fields, _read_floats(fields, "rope_freqs.weight"))
    if fields.has_tensor("rope_factors_long.weight") and fields.has_tensor("rope_factors_short.weight"):
        long, short = (_read_floats(fields, f"rope_factors_{each}.weight").tolist() for each in ("long", "short"))
        attention = {"attention_factor": fields.find_float("rope.scaling.attn_factor")}
        common |= {key: value for key, value in attention.items() if value is not None}
        lengths = {"original_max_position_embeddings": original or fields.require_int("context_length")}
        return common | lengths | {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    if kind == "none" or (kind in ("linear", "yarn") and (factor or 1) == 1):
        return common | {"rope_type": "default"}
    if kind == "linear":
        return common | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        keys = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        values = {name: fields.find_float(f"rope.scaling.yarn_{key}") for name, key in keys.items()}
        values |= {"factor": factor, "original_max_position_embeddings": original}
        return common | {"rope_type": "yarn"} | {key: value for key, value in values.items() if value is not None}
    raise UnsupportedModelError(f"{fields.file.path}: RoPE scaling {kind[:40]!r} is not supported")


def _llama3_rope(fields: _Fields, factors: "np.ndarray[Any, np.dtype[np.float32]]") -> dict[str, Any]:
    """Return Llama 3's RoPE settings. The file contains only the resulting frequency divisors."""
    values = LLAMA3_ROPE | {"factor": float(factors.max())}
    frequencies = fields.rope_theta() ** -(np.arange(len(factors)) / len(factors))
    turns = values["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    expected = 1 / ((1 - smooth) / values["factor"] + smooth)
    if not np.allclose(factors, expected, rtol=ROPE_TOLERANCE):
        raise UnsupportedModelError(f"{fields.file.path}: rope_freqs.weight does not contain Llama 3's RoPE scaling")
    return {"rope_type": "llama3", **values}


def _read_floats(fields: _Fields, name: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
    entry = fields.file.tensors[name]
    if entry.type.name != "F32" or len(entry.shape) != 1:
        raise fields.file.error(f"tensor {name!r} must be a vector of F32")
    values = np.fromfile(entry.path, "<f4", entry.shape[0], offset=entry.start)
    if not (np.isfinite(values) & (values > 0)).all():
        raise fields.file.error(f"tensor {name!r} contains values that are not positive numbers")
    return values


# --- Architectures ----------------------------------------------------------------------------------------------------


def _gemma2_config(fields: _Fields) -> dict[str, Any]:
    heads = fields.require_int("attention.head_count")
    is_27b = fields.require_int("block_count") == GEMMA_27B_LAYERS.get(fields.name)
    return {
        "query_pre_attn_scalar": fields.require_int("embedding_length") // heads if is_27b else fields.head_dim,
        "sliding_window": fields.find_int("attention.sliding_window"),
        "attn_logit_softcapping": fields.find_float("attn_logit_softcapping"),
        "final_logit_softcapping": fields.find_float("final_logit_softcapping"),
    }


def _gemma3_config(fields: _Fields) -> dict[str, Any]:
    local_theta = fields.find_float("rope.freq_base_swa") or DEFAULT_ROPE_THETA
    local = {"rope_type": "default", "rope_theta": local_theta}
    rope = {"full_attention": _rope_parameters(fields), "sliding_attention": local}
    return _gemma2_config(fields) | {"rope_parameters": rope}


def _phi3_config(fields: _Fields) -> dict[str, Any]:
    original = fields.find_int("rope.scaling.original_context_length")
    window = fields.find_int("attention.sliding_window") or None
    original = original or fields.require_int("context_length")
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _granite_config(fields: _Fields) -> dict[str, Any]:
    return {
        "attention_multiplier": fields.find_float("attention.scale") or fields.head_dim**-0.5,
        "embedding_multiplier": fields.find_float("embedding_scale") or 1.0,
        "residual_multiplier": fields.find_float("residual_scale") or 1.0,
        "logits_scaling": fields.find_float("logit_scale") or 1.0,
    }


def _local_experts_config(fields: _Fields) -> dict[str, Any]:
    return {
        "num_local_experts": fields.require_int("expert_count"),
        "num_experts_per_tok": fields.require_int("expert_used_count"),
    }


def _experts_config(fields: _Fields, *, normalizes_weights: bool) -> dict[str, Any]:
    return {
        "num_experts": fields.require_int("expert_count"),
        "num_experts_per_tok": fields.require_int("expert_used_count"),
        "norm_topk_prob": normalizes_weights,  # not in the file; llama.cpp uses the same values
    }


def _qwen2_moe_config(fields: _Fields) -> dict[str, Any]:
    return {
        "moe_intermediate_size": fields.require_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": fields.require_int("expert_shared_feed_forward_length"),
        "qkv_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_experts_config(fields, normalizes_weights=False),
    }


def _qwen3_moe_config(fields: _Fields) -> dict[str, Any]:
    return {
        "moe_intermediate_size": fields.require_int("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_experts_config(fields, normalizes_weights=True),
    }


def _deepseek_config(fields: _Fields) -> dict[str, Any]:
    gating = fields.find_int("expert_gating_func") or SOFTMAX_GATING
    if gating not in (SOFTMAX_GATING, SIGMOID_GATING):
        raise UnsupportedModelError(f"{fields.file.path}: {fields.name}.expert_gating_func = {gating} is not supported")
    if fields.find_float("attention.temperature_scale"):
        raise UnsupportedModelError(f"{fields.file.path}: {fields.name}.attention.temperature_scale is not supported")
    key_size = fields.find_int("attention.key_length_mla") or fields.require_int("attention.key_length")
    value_size = fields.find_int("attention.value_length_mla") or fields.require_int("attention.value_length")
    groups = fields.find_int("expert_group_count") or 1
    rope, multiplier = _rope_parameters(fields), fields.find_float("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and multiplier:  # `mscale` is not in the file; llama.cpp uses the same value
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / YARN_LOG_MULTIPLIER)
    config = {
        "num_key_value_heads": fields.require_int("attention.head_count"),
        "q_lora_rank": fields.find_int("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.require_int("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_size - fields.head_dim,
        "qk_rope_head_dim": fields.head_dim,
        "v_head_dim": value_size,
        "first_k_dense_replace": fields.require_int("leading_dense_block_count"),
        "n_routed_experts": fields.require_int("expert_count"),
        "num_experts_per_tok": fields.require_int("expert_used_count"),
        "n_shared_experts": fields.require_int("expert_shared_count"),
        "moe_intermediate_size": fields.require_int("expert_feed_forward_length"),
        "routed_scaling_factor": fields.find_float("expert_weights_scale") or 1.0,
        "norm_topk_prob": fields.file.get(f"{fields.name}.expert_weights_norm", bool) or False,
        "n_group": groups,
        "topk_group": fields.find_int("expert_group_used_count") or groups,
        "rope_parameters": rope,
    }
    if gating == SIGMOID_GATING:
        return config | {"rope_interleave": True}
    return config | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def _olmo2_config(fields: _Fields) -> dict[str, Any]:
    if fields.find_int("attention.sliding_window"):
        raise UnsupportedModelError(f"{fields.file.path}: OLMo 3 (olmo2 with sliding windows) is not supported")
    return {}


def _exaone4_config(fields: _Fields) -> dict[str, Any]:
    window = fields.find_int("attention.sliding_window") or None
    if window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * fields.require_int("block_count")}
    count, key = fields.require_int("block_count"), f"{fields.name}.attention.sliding_window_pattern"
    has_window = fields.file.get_list(key, bool, count) or [(layer + 1) % 4 != 0 for layer in range(count)]
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in has_window],
    }


def _cohere_config(fields: _Fields) -> dict[str, Any]:
    return {
        "logit_scale": fields.require_float("logit_scale"),
        "use_qk_norm": fields.has_tensor("blk.0.attn_q_norm.weight"),
        "sliding_window": fields.find_int("attention.sliding_window"),
    }


def _stablelm_config(fields: _Fields) -> dict[str, Any]:
    return {
        "use_qkv_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "use_parallel_residual": not fields.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": fields.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _starcoder2_config(fields: _Fields) -> dict[str, Any]:
    eps = fields.require_float("attention.layer_norm_epsilon")
    return {"norm_epsilon": eps, "use_bias": fields.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}


def _gpt2_config(fields: _Fields) -> dict[str, Any]:
    return {
        "n_embd": fields.require_int("embedding_length"),
        "n_head": fields.require_int("attention.head_count"),
        "n_inner": fields.require_int("feed_forward_length"),
        "n_layer": fields.require_int("block_count"),
        "n_positions": fields.require_int("context_length"),
        "layer_norm_epsilon": fields.require_float("attention.layer_norm_epsilon"),
    }


def _make_architectures() -> dict[str, GGUFArchitecture]:
    plain_mlp = {name: target for name, target in LLAMA_NAMES.items() if name != "ffn_gate"}
    fused_mlp = plain_mlp | {"ffn_up": "mlp.gate_up_proj"}
    post_norms = {name: target for name, target in LLAMA_NAMES.items() if name not in ("attn_norm", "ffn_norm")}
    post_norms |= POST_NORM_NAMES | HEAD_NORM_NAMES
    phi3 = {name: target for name, target in fused_mlp.items() if name not in ("attn_q", "attn_k", "attn_v")}
    llama_with_head_norms = LLAMA_NAMES | HEAD_NORM_NAMES
    row_norms = {name: f"{target[:-4]}layernorm.norms.{{row}}" for name, target in HEAD_NORM_NAMES.items()}
    sparse = {name: target for name, target in LLAMA_NAMES.items() if not target.startswith("mlp.")} | EXPERT_NAMES
    granite_sparse = {name: target.replace("mlp.", "block_sparse_moe.") for name, target in sparse.items()}
    deepseek = {name: target for name, target in LLAMA_NAMES.items() if name not in ("attn_k", "attn_v")}
    deepseek |= LATENT_NAMES | EXPERT_NAMES
    deepseek |= {
        name: target.replace("shared_expert.", "shared_experts.")
        for name, target in SHARED_EXPERT_NAMES.items()
        if name != "ffn_gate_inp_shexp"
    }
    gpt2_modules = {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    return {
        "arcee": GGUFArchitecture("arcee", "ArceeForCausalLM", plain_mlp, interleaves_heads=True),
        "cohere2": GGUFArchitecture("cohere2", "Cohere2ForCausalLM", LLAMA_NAMES, make_config=_cohere_config),
        "command-r": GGUFArchitecture("cohere", "CohereForCausalLM", llama_with_head_norms, make_config=_cohere_config),
        "deepseek2": GGUFArchitecture("deepseek_v2", "DeepseekV2ForCausalLM", deepseek, make_config=_deepseek_config),
        "exaone4": GGUFArchitecture("exaone4", "Exaone4ForCausalLM", post_norms, make_config=_exaone4_config),
        "gemma": GGUFArchitecture("gemma", "GemmaForCausalLM", LLAMA_NAMES, norm_offset=-1.0),
        "gemma2": GGUFArchitecture(
            "gemma2",
            "Gemma2ForCausalLM",
            LLAMA_NAMES | SANDWICH_NORM_NAMES,
            norm_offset=-1.0,
            make_config=_gemma2_config,
        ),
        "gemma3": GGUFArchitecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            llama_with_head_norms | SANDWICH_NORM_NAMES,
            norm_offset=-1.0,
            make_config=_gemma3_config,
        ),
        "glm4": GGUFArchitecture(
            "glm4",
            "Glm4ForCausalLM",
            fused_mlp | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        ),
        "gpt2": GGUFArchitecture(
            "gpt2",
            "GPT2LMHeadModel",
            gpt2_modules,
            {
                "token_embd": "transformer.wte",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            layer_prefix="transformer.h",
            make_config=_gpt2_config,
        ),
        "granite": GGUFArchitecture(
            "granite", "GraniteForCausalLM", LLAMA_NAMES, interleaves_heads=True, make_config=_granite_config
        ),
        "granitemoe": GGUFArchitecture(
            "granitemoe",
            "GraniteMoeForCausalLM",
            granite_sparse | {"ffn_gate_inp": "block_sparse_moe.router"},
            interleaves_heads=True,
            make_config=lambda fields: _granite_config(fields) | _local_experts_config(fields),
        ),
        "llama": GGUFArchitecture("llama", "LlamaForCausalLM", LLAMA_NAMES, interleaves_heads=True),
        "nemotron": GGUFArchitecture(
            "nemotron",
            "NemotronForCausalLM",
            plain_mlp,
            norm_offset=-1.0,
            make_config=lambda fields: {"norm_eps": fields.require_float("attention.layer_norm_epsilon")},
        ),
        "olmo2": GGUFArchitecture("olmo2", "Olmo2ForCausalLM", post_norms, make_config=_olmo2_config),
        "olmoe": GGUFArchitecture(
            "olmoe",
            "OlmoeForCausalLM",
            sparse | HEAD_NORM_NAMES,
            make_config=partial(_experts_config, normalizes_weights=False),
        ),
        "phi2": GGUFArchitecture(
            "phi",
            "PhiForCausalLM",
            plain_mlp | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
            MODEL_NAMES | {"output_norm": "model.final_layernorm"},
        ),
        "phi3": GGUFArchitecture(
            "phi3",
            "Phi3ForCausalLM",
            phi3 | {"attn_qkv": "self_attn.qkv_proj"},
            make_config=_phi3_config,
        ),
        "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM", LLAMA_NAMES),
        "qwen2moe": GGUFArchitecture(
            "qwen2_moe", "Qwen2MoeForCausalLM", sparse | SHARED_EXPERT_NAMES, make_config=_qwen2_moe_config
        ),
        "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", llama_with_head_norms),
        "qwen3moe": GGUFArchitecture(
            "qwen3_moe", "Qwen3MoeForCausalLM", sparse | HEAD_NORM_NAMES, make_config=_qwen3_moe_config
        ),
        "smollm3": GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", LLAMA_NAMES, interleaves_heads=True),
        "stablelm": GGUFArchitecture(
            "stablelm", "StableLmForCausalLM", LLAMA_NAMES | row_norms, make_config=_stablelm_config
        ),
        "starcoder2": GGUFArchitecture(
            "starcoder2",
            "Starcoder2ForCausalLM",
            plain_mlp | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            make_config=_starcoder2_config,
        ),
    }


ARCHITECTURES = _make_architectures()
# llama.cpp treats DeepSeek-V3 as DeepSeek-V2.
DEEPSEEK3_ARCHITECTURE = replace(
    ARCHITECTURES["deepseek2"],
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    names={**ARCHITECTURES["deepseek2"].names, CORRECTION_BIAS: "mlp.gate.e_score_correction_bias"},
)
# llama.cpp treats Mixtral as Llama, too.
MIXTRAL = GGUFArchitecture(
    "mixtral",
    "MixtralForCausalLM",
    {name: target for name, target in LLAMA_NAMES.items() if not target.startswith("mlp.")}
    | {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{expert}.w1",
        "ffn_up_exps": "mlp.experts.{expert}.w3",
        "ffn_down_exps": "mlp.experts.{expert}.w2",
    },
    interleaves_heads=True,
    make_config=lambda fields: {"sliding_window": None} | _local_experts_config(fields),
)
# llama.cpp treats Mistral as Llama. Adapters name the architecture that they were trained on.
MISTRAL_ARCHITECTURE = GGUFArchitecture(
    "mistral",
    "MistralForCausalLM",
    LLAMA_NAMES,
    interleaves_heads=True,
    make_config=lambda _: {"sliding_window": None},
)
