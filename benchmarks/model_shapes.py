"""Shapes of published models that are no Llama, and the ways in which transformers can run them."""

from typing import Any

from transformers import Gemma2Config, Phi3Config

GEMMA_2_9B = {
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
PHI_4 = {
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_configs(**changes: Any) -> dict[str, Any]:
    """Return configs by name, with these changes."""
    return {
        "Gemma-2-9B": Gemma2Config(**{**GEMMA_2_9B, **changes}),
        "Phi-4": Phi3Config(**{**PHI_4, **changes}),
    }


def list_attentions(config: Any) -> tuple[str, ...]:
    """Return the ways to attend, of those that need no other package, that compute what the config says."""
    return ("eager",) if getattr(config, "attn_logit_softcapping", None) else ("sdpa", "eager")
