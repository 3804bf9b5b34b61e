"""A tiny random model and the change that must make its comparison fail."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

VOCAB = 97  # not divisible by any tested world size
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = SIZES | {"intermediate_size": 48, "max_position_embeddings": 128}
GQA = GATED | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
NEOX = SIZES | {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 128}
OPT = SIZES | {"ffn_dim": 64, "max_position_embeddings": 128}


@dataclass(frozen=True)
class Variant:
    config_class: Callable[..., PreTrainedConfig]
    settings: dict[str, Any]
    off: dict[str, Any] = field(default_factory=dict)
    spoil: tuple[str, float] | None = None
    norm_mean: float = 1.0  # mean of stored norm weights

    def config(self) -> Any:
        # The large initializer range makes wrong signs and dropped terms visible.
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        return self.config_class(**self.settings, **ids, initializer_range=0.3, attn_implementation="eager")

    def switched_off(self, tensors: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.config()
        for name, value in self.off.items():
            setattr(config, name, value)
        if self.spoil is not None:
            pattern, value = self.spoil
            hit = {name for name in tensors if re.search(pattern, name)}
            assert hit
            tensors = tensors | {name: torch.full_like(tensors[name], value) for name in hit}
        return config, tensors


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | parameters}


NO_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.4],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
