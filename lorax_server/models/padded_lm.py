"""Runs Hugging Face causal language models in padded batches, without adapters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from lorax_server.kernels import LayerCache
from lorax_server.models.padded_batch import PaddedBatch
from lorax_server.models.padded_cache import GrowingCache
from lorax_server.models.padding_check import accepts_parameter, check_padding
from lorax_server.models.pretrained import (
    eos_token_ids,
    is_stored_in_8_bits,
    load_config,
    load_generation_eos,
    load_model,
    load_tokenizer,
    resolve_pad_token,
)
from lorax_server.sampling import Sampler, SamplerOutput
from lorax_server.sampling.batch import History, TokenMasks

# Without cuDNN, which builds a new plan for every sequence length, i.e. in every decode step: a step of a model with
# 160M parameters takes 77 ms instead of 12 ms on an H200.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PaddedStepOutput(NamedTuple):
    """A step's results before `advance` writes them to the batch."""

    sampled: SamplerOutput
    logits: torch.Tensor  # [rows, columns, vocabulary]; only the last column unless prompt logprobs are requested
    caches: list[LayerCache]  # indexed by layer


class PaddedLM:
    """A model loaded by `AutoModelForCausalLM`, with its tokenizer."""

    def __init__(
        self,
        model_id: str,
        revision: str | None = None,
        quantize: str | None = None,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.model_id = model_id
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        self.config = load_config(model_id, revision, trust_remote_code)
        generation_eos = load_generation_eos(model_id, revision)
        self.tokenizer = load_tokenizer(model_id, revision, trust_remote_code)
        quantize = "bitsandbytes" if is_stored_in_8_bits(model_id, self.config) else quantize
        model = load_model(model_id, self.config, revision, quantize, self.dtype, self.device, trust_remote_code)
        self.model = model.eval()
        self.vocab_size = self.config.get_text_config(decoder=True).vocab_size
        eos = sorted(generation_eos | eos_token_ids(self.config, self.tokenizer)) or None
        object.__setattr__(self.config, "eos_token_id", eos)  # some config classes reject a list
        self.pad_token_id = resolve_pad_token(self.tokenizer, self.config, self.vocab_size)
        self._accepts_position_ids = accepts_parameter(model, "position_ids")
        self._accepts_logits_to_keep = accepts_parameter(model, "logits_to_keep")
        self._sampler: tuple[list[Any], Sampler] | None = None
        rounded_to = self.dtype if quantize is None else torch.float16  # 8-bit layers round inputs to float16
        name = f"{model_id} ({type(model).__name__})"
        check_padding(self.forward, name, self.vocab_size, self.pad_token_id, rounded_to, self.device)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Sequence[LayerCache] | None = None,
        *,
        only_last: bool = False,
    ) -> tuple[torch.Tensor, list[LayerCache]]:
        """Return logits `[rows, columns, vocabulary]` and the updated KV caches.

        With `only_last`, the model may return only the last column.
        """
        cache = GrowingCache(past_key_values)
        arguments: dict[str, Any] = {"position_ids": position_ids} if self._accepts_position_ids else {}
        if only_last and self._accepts_logits_to_keep:
            arguments["logits_to_keep"] = 1
        with sdpa_kernel(ATTENTION_BACKENDS):
            output = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            )
        return output.logits.to(self.device), cache.layer_caches()

    @torch.inference_mode()
    def compute(self, batch: PaddedBatch, masks: TokenMasks | None = None) -> PaddedStepOutput:
        """Run one step and sample the next token of every row, without modifying the batch."""
        is_first = batch.past_key_values is None
        logits, caches = self.forward(
            batch.input_ids,
            batch.attention_mask[:, : batch.attention_mask.shape[1] - batch.padding_right_offset],
            batch.position_ids,
            batch.past_key_values,
            only_last=not (is_first and any(request.prefill_logprobs for request in batch.requests)),
        )
        return PaddedStepOutput(self._sample_tokens(batch, logits[:, -1], masks), logits, caches)

    @torch.inference_mode()
    def advance(self, batch: PaddedBatch, token_ids: torch.Tensor, caches: list[LayerCache]) -> None:
        """Update the batch: the sampled `token_ids` `[rows]` become the next step's input."""
        batch.input_ids = token_ids[:, None]
        batch.attention_mask[:, batch.attention_mask.shape[1] - batch.padding_right_offset] = 1
        batch.position_ids = batch.position_ids[:, -1:] + 1
        for row, stop in enumerate(batch.stopping_criterias):
            if stop.finish_reason is not None:  # a finished sequence's position might exceed the model's limit
                batch.position_ids[row] -= 1
        batch.past_key_values = caches
        batch.max_input_length += 1
        batch.padding_right_offset -= 1

    def _sample_tokens(self, batch: PaddedBatch, logits: torch.Tensor, masks: TokenMasks | None) -> SamplerOutput:
        choosers = batch.next_token_choosers
        if self._sampler is None or self._sampler[0] != choosers:
            sampler = Sampler([chooser.sequence_sampling for chooser in choosers], logits.shape[-1], logits.device)
            self._sampler = (choosers.copy(), sampler)
        sampler = self._sampler[1]
        lengths = torch.tensor([batch.input_lengths, [chooser.prompt_length for chooser in choosers]])
        lengths = lengths.to(logits.device)
        token_ids = None
        if sampler.needs_tokens:
            token_ids = pad_sequence([ids[:, 0] for ids in batch.all_input_ids], batch_first=True).to(logits.device)
        return sampler(logits, History(lengths[0], lengths[1], token_ids), masks)


def prompt_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> list[float]:
    """Return the log probability of every prompt token except the first.

    `logits` is `[columns, vocabulary]`; padding columns come first.
    """
    scores = logits[len(logits) - len(token_ids) : -1].float()
    logprobs = scores.gather(-1, token_ids[1:, None].to(scores.device)).squeeze(-1) - scores.logsumexp(-1)
    return logprobs.tolist()
