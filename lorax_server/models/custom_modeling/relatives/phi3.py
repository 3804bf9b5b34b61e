"""Phi-3 and Phi-4: Llama whose query, key and value are one matrix, and gate and up another."""

from typing import Any

from lorax_server.distributed import Shard, join_shards
from lorax_server.layers.linear import TensorParallelMultiAdapterLinear
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    Biases,
    FlashLlamaForCausalLM,
    FlashLlamaLayer,
    LlamaMLP,
)
from lorax_server.models.custom_modeling.flash_mistral_modeling import FlashMistralAttention
from lorax_server.weights import Weights


class Phi3Attention(FlashMistralAttention):
    def load_qkv(
        self, prefix: str, config: Any, weights: Weights, shards: tuple[Shard, Shard], bias: bool
    ) -> TensorParallelMultiAdapterLinear:
        fused = join_shards([shards[0], shards[1], shards[1]])
        return TensorParallelMultiAdapterLinear(weights, [f"{prefix}.qkv_proj"], config.hidden_size, [fused], bias=bias)


class Phi3MLP(LlamaMLP):
    def load_gate(
        self, prefix: str, config: Any, weights: Weights, shard: Shard, bias: bool
    ) -> TensorParallelMultiAdapterLinear:
        names, fused = [f"{prefix}.gate_up_proj"], join_shards([shard, shard])
        return TensorParallelMultiAdapterLinear(weights, names, config.hidden_size, [fused], bias=bias)


class Phi3Layer(FlashLlamaLayer):
    attention_class = Phi3Attention
    mlp_class = Phi3MLP
    partial_rotary = True

    def biases(self, config: Any) -> Biases:  # noqa: ARG002 - whatever the config says
        return Biases()


class Phi3ForCausalLM(FlashLlamaForCausalLM):
    layer_class = Phi3Layer
