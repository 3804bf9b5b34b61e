"""MPT: ALiBi, norms without bias, and matrices without."""

import math
from typing import Any

import torch

from lorax_server.distributed import Shard, join_shards
from lorax_server.errors import ConfigError
from lorax_server.kernels import Activation
from lorax_server.layers.activation import get_activation
from lorax_server.layers.linear import TensorParallelMultiAdapterLinear
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LayerNorms,
    Names,
    PlainMLP,
)
from lorax_server.models.custom_modeling.fused.attention import AlibiAttention
from lorax_server.weights import Weights


def read_attention(config: Any, field: str, default: Any = None) -> Any:
    """Return a field of the config's part about attention, which is a dictionary once the config is stored."""
    part = config.attn_config
    return part.get(field, default) if isinstance(part, dict) else getattr(part, field, default)


class MPTAttention(AlibiAttention):
    output_name = "out_proj"

    @staticmethod
    def count_kv_heads(config: Any) -> int:
        return int(config.num_attention_heads)

    def load_qkv(
        self, prefix: str, config: Any, weights: Weights, shards: tuple[Shard, Shard], bias: bool
    ) -> TensorParallelMultiAdapterLinear:
        fused = join_shards([shards[0], shards[1], shards[1]])
        return TensorParallelMultiAdapterLinear(weights, [f"{prefix}.Wqkv"], config.hidden_size, [fused], bias=bias)

    def scale(self, config: Any) -> float:
        return float(read_attention(config, "softmax_scale") or super().scale(config))

    def slopes(self, config: Any) -> torch.Tensor:
        """Return the slopes of all heads; a number that is no power of 2 has those of the next, every other first."""
        count, steepest = config.num_attention_heads, read_attention(config, "alibi_bias_max", 8)
        power = 2 ** math.ceil(math.log2(count))
        slopes = torch.tensor([2.0 ** (-steepest * (head + 1) / power) for head in range(power)])
        return slopes if power == count else torch.cat([slopes[1::2], slopes[::2]])[:count]


class MPTMLP(PlainMLP):
    first, second = "up_proj", "down_proj"

    def inner_size(self, config: Any) -> int:
        return 4 * int(config.hidden_size)

    def load_activation(self, config: Any) -> Activation:  # noqa: ARG002 - whatever the config says
        return get_activation("gelu", "activation")


class MPTLayer(FlashLlamaLayer):
    names = Names("transformer", "wte", "blocks", "attn", "ffn", "norm_1", "norm_f", "norm_2")
    attention_class = MPTAttention
    mlp_class = MPTMLP
    rotates = False
    layer_norms = LayerNorms("layer_norm_epsilon", bias=False)

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases()


class MPTForCausalLM(FlashLlamaForCausalLM):
    layer_class = MPTLayer

    def check(self, config: Any) -> None:
        for field in ("clip_qkv", "qk_ln", "prefix_lm"):
            if read_attention(config, field):
                raise ConfigError(f"config field attn_config.{field} is not supported")
        if not read_attention(config, "alibi", True):
            raise ConfigError("config field attn_config.alibi = false is not supported")
        if getattr(config, "logit_scale", None) is not None:
            raise ConfigError(f"config field logit_scale = {config.logit_scale!r} is not supported")
        if not getattr(config, "no_bias", True):
            raise ConfigError("config field no_bias = false is not supported")
