"""Attention over one matrix that holds, for each key and value head, its queries, its key and its value."""

import math
from dataclasses import replace
from typing import Any

import torch

from lorax_server.distributed import Shard, shard_grouped
from lorax_server.layers.linear import TensorParallelMultiAdapterLinear
from lorax_server.models.custom_modeling.flash_llama_modeling import Biases, FlashLlamaAttention
from lorax_server.weights import Weights


class GroupedAttention(FlashLlamaAttention):
    qkv_name = "query_key_value"
    output_name = "dense"

    @staticmethod
    def count_kv_heads(config: Any) -> int:
        return int(config.num_attention_heads)

    def load_qkv(
        self,
        prefix: str,
        config: Any,
        weights: Weights,
        shards: tuple[Shard, Shard],  # noqa: ARG002 - of matrices that lie one after the other
        bias: bool,
    ) -> TensorParallelMultiAdapterLinear:
        counts = config.num_attention_heads, self.count_kv_heads(config)
        shard = shard_grouped(*self.find_heads(config, weights), counts, self.head_dim)
        name = f"{prefix}.{self.qkv_name}"
        return TensorParallelMultiAdapterLinear(weights, [name], config.hidden_size, [shard], bias=bias)


class AlibiAttention(FlashLlamaAttention):
    """Attention that knows positions by the slopes of its heads alone."""

    def __init__(self, prefix: str, config: Any, weights: Weights, layer_id: int, biases: Biases) -> None:
        super().__init__(prefix, config, weights, layer_id, biases)
        heads, _ = self.find_heads(config, weights)
        slopes = self.slopes(config)[heads.start : heads.stop].to(weights.device)
        self.spec = replace(self.spec, slopes=slopes)

    def slopes(self, config: Any) -> torch.Tensor:
        """Return the slopes of all heads: powers of 2 with even steps, and those between for a number that is none."""
        count = config.num_attention_heads
        power = 2 ** math.floor(math.log2(count))
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / power) for head in range(power)])
        between = torch.tensor([2.0 ** (-4 * (head + 1) / power) for head in range(0, 2 * (count - power), 2)])
        return torch.cat([slopes, between])
