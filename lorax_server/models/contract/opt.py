"""OPT classes with LoRAX's names and signatures, for padded batches (see docs/seed-contract.md)."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.models.contract.padded_forward import OutputOptions, PaddedCausalLM, PaddedInputs, PaddedOutput
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaAttention, FlashLlamaModel
from lorax_server.models.custom_modeling.flash_opt_modeling import FlashOPTForCausalLM, positions_from_mask
from lorax_server.weights import Weights


class OPTAttention(FlashLlamaAttention):
    """OPT attention with its LoRAX class name (see docs/seed-contract.md)."""


class OPTPreTrainedModel(PaddedCausalLM):
    """OPT base class with its LoRAX class name (see docs/seed-contract.md)."""


class OPTModel(nn.Module):
    def __init__(self, decoder: FlashLlamaModel) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, ctx: Any) -> BaseModelOutputWithPast:
        hidden_states: Any = self.decoder.run_layers(self.decoder.embed(input_ids, ctx), ctx)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states)


class OPTForCausalLM(OPTPreTrainedModel):
    def __init__(self, config: Any, weights: Weights) -> None:
        arch = replace(FlashOPTForCausalLM.describe(config), attention_class=OPTAttention)
        super().__init__(config, weights, arch)
        self.model = OPTModel(self.decoder)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        head_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        adapter_data: AdapterBatchData | None = None,
    ) -> PaddedOutput:
        inputs = PaddedInputs(input_ids, inputs_embeds, attention_mask, None, head_mask, past_key_values, adapter_data)
        if attention_mask is not None:
            inputs = inputs._replace(position_ids=positions_from_mask(attention_mask, inputs.num_cached))
        options = OutputOptions(labels, use_cache, output_attentions, output_hidden_states, return_dict)
        return self.run(inputs, options)
