"""Gemma: Llama with scaled embeddings, and RMSNorm weights to which 1 is added after loading."""

from functools import partial
from typing import Any

import torch

from lorax_server.errors import ConfigError
from lorax_server.layers.norm import RMSNorm
from lorax_server.models.custom_modeling.architecture import Architecture, read_biases
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM, FlashLlamaModel
from lorax_server.weights import Weights


class GemmaModel(FlashLlamaModel):
    def __init__(self, prefix: str, config: Any, weights: Weights, *args: Any) -> None:
        super().__init__(prefix, config, weights, *args)
        # transformers rounds the multiplier to the model's dtype.
        self.embedding_multiplier = float(torch.tensor(config.hidden_size**0.5, dtype=weights.dtype))


class FlashGemmaForCausalLM(FlashLlamaForCausalLM):
    @staticmethod
    def describe(config: Any) -> Architecture:
        if getattr(config, "use_bidirectional_attention", None):
            raise ConfigError(
                "config field use_bidirectional_attention = true is not supported: only causal decoders are"
            )
        return Architecture(
            biases=read_biases(config)._replace(mlp=False),
            model_class=GemmaModel,
            norm=partial(RMSNorm, eps=config.rms_norm_eps, offset=1.0, upcast=True),
        )
