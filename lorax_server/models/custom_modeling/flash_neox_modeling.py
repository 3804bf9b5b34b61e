"""GPT-NeoX: partial RoPE, and attention parallel to the MLP, each with its own norm."""

from functools import partial
from typing import Any

from lorax_server.layers.norm import ResidualLayerNorm
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Architecture,
    BiasFlags,
    FlashLlamaAttention,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    FlashLlamaModel,
    ModuleNames,
)


class GPTNeoXAttention(FlashLlamaAttention):
    """Llama's attention; the seed contract names this class."""


class GPTNeoXMLP(PlainMLP):
    """An MLP without a gate; the seed contract names this class."""


class GPTNeoXLayer(FlashLlamaLayer):
    """Llama's layer; the seed contract names this class."""


class GPTNeoXModel(FlashLlamaModel):
    """Llama's decoder; the seed contract names this class."""


class FlashGPTNeoXForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        names = ModuleNames(
            model="gpt_neox",
            embedding="embed_in",
            final_norm="final_layer_norm",
            attention="attention",
            qkv=("query_key_value",),
            output="dense",
            mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        )
        bias = bool(getattr(config, "attention_bias", True))
        return Architecture(
            names=names,
            biases=BiasFlags(qkv=bias, output=bias, mlp=True),
            attention_class=GPTNeoXAttention,
            mlp_class=GPTNeoXMLP,
            layer_class=GPTNeoXLayer,
            model_class=GPTNeoXModel,
            norm=partial(ResidualLayerNorm, eps=config.layer_norm_eps),
            is_parallel=config.use_parallel_residual,
            num_kv_heads=config.num_attention_heads,
            grouped_qkv=True,
            partial_rotary=True,
        )
