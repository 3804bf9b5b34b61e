"""The GPT-NeoX names of the seed contract (`docs/seed-contract.md`). Serving uses `flash_neox_modeling`."""

from lorax_server.layers.rotary import RotaryEmbedding
from lorax_server.models.contract.neox import GPTNeoxForCausalLM, GPTNeoXPreTrainedModel
from lorax_server.models.custom_modeling.flash_neox_modeling import (
    GPTNeoXAttention,
    GPTNeoXLayer,
    GPTNeoXMLP,
    GPTNeoXModel,
)

__all__ = [
    "GPTNeoXAttention",
    "GPTNeoXLayer",
    "GPTNeoXMLP",
    "GPTNeoXModel",
    "GPTNeoXPreTrainedModel",
    "GPTNeoxForCausalLM",
    "RotaryEmbedding",
]
