"""GPT-NeoX classes with LoRAX's names and signatures, for padded batches (see docs/seed-contract.md)."""

from dataclasses import replace
from typing import Any

import torch

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.models.contract.padded_forward import OutputOptions, PaddedCausalLM, PaddedInputs, PaddedOutput
from lorax_server.models.custom_modeling.common import PlainMLP
from lorax_server.models.custom_modeling.flash_llama_modeling import (
    FlashLlamaAttention,
    FlashLlamaLayer,
    FlashLlamaModel,
)
from lorax_server.models.custom_modeling.flash_neox_modeling import FlashGPTNeoXForCausalLM
from lorax_server.weights import Weights


class GPTNeoXAttention(FlashLlamaAttention):
    """GPT-NeoX attention with its LoRAX class name (see docs/seed-contract.md)."""


class GPTNeoXMLP(PlainMLP):
    """GPT-NeoX MLP with its LoRAX class name (see docs/seed-contract.md)."""


class GPTNeoXLayer(FlashLlamaLayer):
    """GPT-NeoX decoder layer with its LoRAX class name (see docs/seed-contract.md)."""


class GPTNeoXModel(FlashLlamaModel):
    """GPT-NeoX decoder with its LoRAX class name (see docs/seed-contract.md)."""


class GPTNeoXPreTrainedModel(PaddedCausalLM):
    """GPT-NeoX base class with its LoRAX class name (see docs/seed-contract.md)."""


class GPTNeoxForCausalLM(GPTNeoXPreTrainedModel):
    def __init__(self, config: Any, weights: Weights) -> None:
        arch = replace(
            FlashGPTNeoXForCausalLM.describe(config),
            attention_class=GPTNeoXAttention,
            mlp_class=GPTNeoXMLP,
            layer_class=GPTNeoXLayer,
            model_class=GPTNeoXModel,
        )
        super().__init__(config, weights, arch)
        self.gpt_neox, self.embed_out = self.decoder, self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        adapter_data: AdapterBatchData | None = None,
    ) -> PaddedOutput:
        inputs = PaddedInputs(
            input_ids, inputs_embeds, attention_mask, position_ids, head_mask, past_key_values, adapter_data
        )
        options = OutputOptions(labels, use_cache, output_attentions, output_hidden_states, return_dict)
        return self.run(inputs, options)
