"""Any HuggingFace causal language model, in padded batches that requests join and leave between steps."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.kernels import LayerCache
from lorax_server.models.causal_lm_batch import CausalLMBatch, adapter_meta_of
from lorax_server.models.model import Model
from lorax_server.models.padded_cache import GrowingCache
from lorax_server.models.padding_check import check_padding, takes
from lorax_server.models.pretrained import (
    eos_token_ids,
    is_stored_in_8_bits,
    load_config,
    load_generation_eos,
    load_model,
    load_tokenizer,
    resolve_pad_token,
)
from lorax_server.models.types import AlternativeTokens, GeneratedText, Generation, NextTokens
from lorax_server.sampling import NextTokenChooser, Sampled, Sampler
from lorax_server.sampling.batch import TokenMasks
from lorax_server.sampling.sampler import History
from lorax_server.types import Alternatives

__all__ = ["CausalLM", "CausalLMBatch"]

logger = logging.getLogger(__name__)

# All but cuDNN's, which plans anew for every length that it has not seen. A growing batch has a new length at every
# step: with 160M parameters on an H200 such a step takes 77 ms instead of 12.
ATTENTION_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Computed(NamedTuple):
    """The results of a step, before they are written to the batch."""

    sampled: Sampled
    logits: torch.Tensor  # [rows, columns, vocabulary], of the last column only where no more is asked for
    caches: list[LayerCache]  # by layer


class CausalLM(Model):
    """Any model that `AutoModelForCausalLM` loads, without adapters: those need an architecture of our own."""

    def __init__(
        self,
        model_id: str,
        revision: str | None = None,
        quantize: str | None = None,
        compile: bool = False,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if compile:
            logger.warning("%s: compile is not supported here and has no effect", model_id)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
        config = load_config(model_id, revision, trust_remote_code)
        generation_eos = load_generation_eos(model_id, revision)
        tokenizer = load_tokenizer(model_id, revision, trust_remote_code)
        quantize = "bitsandbytes" if is_stored_in_8_bits(model_id, config) else quantize
        model = load_model(model_id, config, revision, quantize, dtype, device, trust_remote_code)
        super().__init__(model_id, model, tokenizer, requires_padding=True, dtype=dtype, device=device)
        self.dynamic_adapter_loading_enabled = False
        self.config = config
        self.vocab_size = config.get_text_config(decoder=True).vocab_size
        eos = sorted(generation_eos | eos_token_ids(config, tokenizer)) or None
        object.__setattr__(config, "eos_token_id", eos)  # some configs check that it is one id
        pad = resolve_pad_token(tokenizer, config, self.vocab_size)
        tokenizer.pad_token_id = pad  # as in LoRAX, for callers that pad; stays None if the tokenizer lacks the id
        self._takes_positions = takes(model, "position_ids")
        self._takes_logits_to_keep = takes(model, "logits_to_keep")
        self._sampler: tuple[list[NextTokenChooser], Sampler] | None = None
        rounded_to = dtype if quantize is None else torch.float16  # 8-bit layers round their input to float16
        check_padding(self.forward, f"{model_id} ({type(model).__name__})", self.vocab_size, pad, rounded_to, device)

    @property
    def batch_type(self) -> type[CausalLMBatch]:
        return CausalLMBatch

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Sequence[LayerCache] | None = None,
        adapter_data: AdapterBatchData | None = None,
        *,
        only_last: bool = False,
    ) -> tuple[torch.Tensor, list[LayerCache]]:
        """Return logits [rows, columns, vocabulary], of the last column alone if `only_last`, and the caches."""
        if adapter_data is not None and any(adapter_data.meta.segment_indices):
            raise self._no_adapters()
        cache = GrowingCache(past_key_values)
        arguments: dict[str, Any] = {"position_ids": position_ids} if self._takes_positions else {}
        if only_last and self._takes_logits_to_keep:
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
    def generate_token(self, batch: CausalLMBatch) -> tuple[list[Generation], CausalLMBatch | None]:
        """Compute one step. A finished request gets no more results, and stays until it is filtered out."""
        adapted = [request.id for request in batch.requests if request.adapter_index]
        if adapted:
            raise self._no_adapters().of(*adapted)
        is_first = batch.past_key_values is None
        sampled, logits, caches = self.compute(batch)
        logprobs = sampled.logprobs.tolist()
        _check_numbers(batch, logprobs)

        alternatives = sampled.alternatives.by_row() if sampled.alternatives else {}
        token_ids = sampled.token_ids.tolist()
        batch.append(token_ids)
        generations = []
        for row, token_id in enumerate(token_ids):
            if batch.stopping_criterias[row].finish_reason is not None:
                continue
            text, is_special = self._append_text(batch, row, token_id)
            if row % self.world_size == self.rank:
                others = self._add_texts(alternatives.get(row))
                token = NextTokens([token_id], [logprobs[row]], [text], [is_special], others)
                generations.append(self._make_generation(batch, row, token, logits if is_first else None))
        if all(stop.finish_reason is not None for stop in batch.stopping_criterias):
            return generations, None
        self.advance(batch, sampled.token_ids, caches)
        return generations, batch

    @torch.inference_mode()
    def compute(self, batch: CausalLMBatch, masks: TokenMasks | None = None) -> Computed:
        """Choose the next token of every row. The batch stays as it is."""
        is_first = batch.past_key_values is None
        logits, caches = self.forward(
            batch.input_ids,
            batch.attention_mask[:, : batch.attention_mask.shape[1] - batch.padding_right_offset],
            batch.position_ids,
            batch.past_key_values,
            only_last=not (is_first and any(request.prefill_logprobs for request in batch.requests)),
        )
        return Computed(self._choose(batch, logits[:, -1], masks), logits, caches)

    @torch.inference_mode()
    def advance(self, batch: CausalLMBatch, token_ids: torch.Tensor, caches: list[LayerCache]) -> None:
        """Make the [rows] chosen tokens the input of the next step."""
        is_first = batch.past_key_values is None
        batch.input_ids = token_ids[:, None]
        batch.attention_mask[:, batch.attention_mask.shape[1] - batch.padding_right_offset] = 1
        batch.position_ids = batch.position_ids[:, -1:] + 1
        for row, stop in enumerate(batch.stopping_criterias):
            if stop.finish_reason is not None:  # keep its position: the model may not have a higher one
                batch.position_ids[row] -= 1
        batch.past_key_values = caches
        batch.max_input_length += 1
        batch.padding_right_offset -= 1
        if is_first:
            batch.adapter_meta = adapter_meta_of(batch.requests, 1, self.device)

    def _no_adapters(self) -> AdapterError:
        return AdapterError(f"{self.model_id}: only models with an implementation of our own are served with adapters")

    def _choose(self, batch: CausalLMBatch, logits: torch.Tensor, masks: TokenMasks | None) -> Sampled:
        choosers = batch.next_token_choosers
        if self._sampler is None or self._sampler[0] != choosers:
            sampler = Sampler([chooser.row_sampling for chooser in choosers], logits.shape[-1], logits.device)
            self._sampler = (choosers.copy(), sampler)
        sampler = self._sampler[1]
        lengths = torch.tensor([batch.input_lengths, [chooser.prompt_length for chooser in choosers]])
        lengths = lengths.to(logits.device)
        token_ids = None
        if sampler.needs_tokens:
            token_ids = pad_sequence([ids[:, 0] for ids in batch.all_input_ids], batch_first=True).to(logits.device)
        return sampler(logits, History(lengths[0], lengths[1], token_ids), masks)

    def _append_text(self, batch: CausalLMBatch, row: int, token_id: int) -> tuple[str, bool]:
        """Advance a row's text and stop rules by a token. Return the text it adds, and whether its token is special."""
        stop, prefix, read = batch.stopping_criterias[row], batch.prefix_offsets[row], batch.read_offsets[row]
        if stop.current_tokens == 0:
            prefix, read = self.detokenizer.start(batch.all_input_ids[row][:-1, 0].tolist())
        ids = batch.all_input_ids[row][prefix:, 0].tolist()
        progress = self.detokenizer.advance(ids, 0, read - prefix)
        pending = ""
        if stop.may_end_with(token_id):
            pending = self.detokenizer.pending(ids, progress.prefix_offset, progress.read_offset)
        stop(token_id, progress.text, pending)
        batch.prefix_offsets[row] = prefix + progress.prefix_offset
        batch.read_offsets[row] = prefix + progress.read_offset
        is_special = self.detokenizer.is_special(token_id) and not stop.new_text
        return (self.detokenizer.token_text(token_id) if is_special else stop.new_text), is_special

    def _add_texts(self, alternatives: Alternatives | None) -> list[AlternativeTokens]:
        if alternatives is None:
            return []
        texts = [self.detokenizer.token_text(token_id) for token_id in alternatives.token_ids]
        return [AlternativeTokens(alternatives.token_ids, alternatives.logprobs, texts)]

    def _make_generation(
        self, batch: CausalLMBatch, row: int, token: NextTokens, prompt_logits: torch.Tensor | None
    ) -> Generation:
        """Make one request's result; with its first token come the logits of the prompts."""
        request, stop, chooser = batch.requests[row], batch.stopping_criterias[row], batch.next_token_choosers[row]
        prompt, prompt_length, text = None, 0, None
        if prompt_logits is not None:
            prompt_length = chooser.prompt_length
            prompt = self._prompt_tokens(batch, row, prompt_logits) if request.prefill_logprobs else None
        if stop.finish_reason is not None:
            seed = None if chooser.params.is_greedy else chooser.params.seed
            text = GeneratedText(stop.current_output, stop.current_tokens, 0, stop.finish_reason, seed)
        return Generation(request.id, prompt, prompt_length, token, text)

    def _prompt_tokens(self, batch: CausalLMBatch, row: int, logits: torch.Tensor) -> NextTokens:
        """Return the prompt with the log probability of each of its tokens."""
        ids = batch.all_input_ids[row][:-1, 0]
        token_ids = ids.tolist()
        return NextTokens(
            token_ids,
            [math.nan, *prompt_logprobs(logits[row], ids)],
            [self.detokenizer.token_text(token_id) for token_id in token_ids],
            [self.detokenizer.is_special(token_id) for token_id in token_ids],
        )


def prompt_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> list[float]:
    """Return the log probability of each of [tokens] but the first. Of the [columns, vocabulary] logits, the last are
    those of the tokens."""
    scores = logits[len(logits) - len(token_ids) : -1].float()
    logprobs = scores.gather(-1, token_ids[1:, None].to(scores.device)).squeeze(-1) - scores.logsumexp(-1)
    return logprobs.tolist()


def _check_numbers(batch: CausalLMBatch, logprobs: list[float]) -> None:
    rows = zip(batch.requests, batch.stopping_criterias, logprobs, strict=True)
    failed = [request.id for request, stop, logprob in rows if stop.finish_reason is None and math.isnan(logprob)]
    if failed:
        raise LoraxError(
            "the model's scores are not numbers (too large for its dtype?); "
            "the batch is as it was, and the others can continue without it"
        ).of(*failed)
