"""MPT: ALiBi, and no biases on norms and matrices."""

import math
from functools import partial
from typing import Any

import torch

from lorax_server.errors import ConfigError
from lorax_server.layers.activation import get_activation
from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.architecture import Architecture, ModuleNames
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM


class FlashMPTForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        attention = _read_attention(config)
        for field in ("clip_qkv", "qk_ln", "prefix_lm"):
            if attention.get(field):
                raise ConfigError(f"config field attn_config.{field} is not supported")
        if not attention.get("alibi", True):
            raise ConfigError("config field attn_config.alibi = false is not supported")
        if getattr(config, "logit_scale", None) is not None:
            raise ConfigError(f"config field logit_scale = {config.logit_scale!r} is not supported")
        if not getattr(config, "no_bias", True):
            raise ConfigError("config field no_bias = false is not supported")
        names = ModuleNames(
            model="transformer",
            embedding="wte",
            layers="blocks",
            input_norm="norm_1",
            second_norm="norm_2",
            final_norm="norm_f",
            attention="attn",
            qkv=("Wqkv",),
            output="out_proj",
            mlp=("ffn.up_proj", "ffn.down_proj"),
        )
        return Architecture(
            names=names,
            mlp_class=PlainMLP,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_epsilon, bias=False),
            num_kv_heads=config.num_attention_heads,
            scale=attention.get("softmax_scale") or None,
            slopes=_alibi_slopes(config.num_attention_heads, attention.get("alibi_bias_max", 8)),
            uses_rope=False,
            inner_size=4 * config.hidden_size,
            activation=get_activation("gelu", "activation"),
        )


def _read_attention(config: Any) -> dict[str, Any]:
    """Return the model config's `attn_config` section as a dictionary."""
    section = config.attn_config
    return section if isinstance(section, dict) else vars(section)


def _alibi_slopes(num_heads: int, steepest: float) -> torch.Tensor:
    """Return the ALiBi slopes for all heads.

    If the number of heads is not a power of 2, MPT uses the slopes for the next higher power of 2, starting with the
    odd indices.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = torch.tensor([2.0 ** (-steepest * (head + 1) / power) for head in range(power)])
    return slopes if power == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
