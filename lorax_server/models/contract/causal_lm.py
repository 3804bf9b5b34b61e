"""LoRAX's `CausalLM` and `CausalLMBatch`, with protobuf requests and results (see docs/seed-contract.md)."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.errors import AdapterError, LoraxError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.kernels import LayerCache
from lorax_server.models.contract.next_token_chooser import NextTokenChooser
from lorax_server.models.contract.requests import find_pad_token, parse_request
from lorax_server.models.contract.types import (
    AlternativeTokens,
    Batch,
    GeneratedText,
    Generation,
    Model,
    NextTokens,
    TokenizerManager,
    message_types,
)
from lorax_server.models.padded_batch import PaddedBatch
from lorax_server.models.padded_lm import PaddedLM, prompt_logprobs
from lorax_server.text.detokenizer import make_detokenizer
from lorax_server.types import Alternatives

if TYPE_CHECKING:
    from lorax_server.pb import generate_pb2

logger = logging.getLogger(__name__)


@dataclass
class CausalLMBatch(PaddedBatch, Batch):
    """A padded batch with the same fields, in the same order, as in LoRAX (see docs/seed-contract.md)."""

    row_fields = (*PaddedBatch.row_fields, "prefix_offsets", "read_offsets")

    batch_id: int
    requests: "list[generate_pb2.Request]"
    requests_idx_mapping: dict[int, int]

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    past_key_values: list[LayerCache] | None

    all_input_ids: list[torch.Tensor]
    input_lengths: list[int]
    prefix_offsets: list[int]
    read_offsets: list[int]

    next_token_choosers: list[NextTokenChooser]
    stopping_criterias: list[StoppingCriteria]
    adapter_meta: AdapterBatchMetadata  # one adapter index per element of `input_ids`

    max_input_length: int
    padding_right_offset: int
    max_tokens: int  # batch capacity, including padding
    keys_head_dim_last: bool = True  # False: keys are [rows, heads, size, columns] (old BLOOM versions)

    @classmethod
    def from_pb(
        cls,
        pb: "generate_pb2.Batch",
        tokenizer: Any,
        tokenizers: Any,
        processor: Any,  # noqa: ARG003 - required by the contract; images are rejected
        config: Any,
        dtype: torch.dtype,  # noqa: ARG003 - required by the contract
        device: torch.device,
    ) -> "CausalLMBatch":
        """Create a batch from protobuf requests, which contain token IDs or text.

        Pass `CausalLM.config`, which includes the EOS tokens in `generation_config.json`. Without a config, prompt
        lengths are not checked.
        """
        prompts, choosers, stops = [], [], []
        for request in pb.requests:
            try:
                row = parse_request(request, tokenizers.get_tokenizer(request.adapter_index, tokenizer), config)
            except LoraxError as error:
                raise error.for_requests(request.id) from error
            prompts.append(row[0])
            choosers.append(row[1])
            stops.append(row[2])
        pad = find_pad_token(tokenizer, config)
        return cls.from_prompts(list(pb.requests), prompts, choosers, stops, pad, device, batch_id=pb.id)

    @classmethod
    def from_prompts(cls, requests: list[Any], prompts: Sequence[Sequence[int]], *args: Any, **more: Any) -> Self:
        lengths = [len(ids) for ids in prompts]
        more |= {"prefix_offsets": [0] * len(lengths), "read_offsets": lengths}
        more |= {"requests_idx_mapping": {}, "adapter_meta": None, "max_tokens": 0}  # set below
        return super().from_prompts(requests, prompts, *args, **more).update_derived()

    def to_pb(self) -> "generate_pb2.CachedBatch":
        message: generate_pb2.CachedBatch = message_types().CachedBatch(
            id=self.batch_id,
            request_ids=[request.id for request in self.requests],
            size=len(self),
            max_tokens=self.max_tokens,
            current_tokens=len(self) * self.max_input_length,
        )
        return message

    def filter(self, request_ids: list[int]) -> "CausalLMBatch | None":
        self._standardize_keys()
        try:
            remaining = super().filter(request_ids)
        finally:
            self._restore_keys()
        return None if remaining is None else remaining.update_derived()

    @classmethod
    def concatenate(cls, batches: "Sequence[CausalLMBatch]") -> "CausalLMBatch":  # type: ignore[override]
        if not batches:
            raise ValueError("`batches` must not be empty")
        if len({batch.keys_head_dim_last for batch in batches}) != 1:
            raise ValueError("batches with different key layouts cannot be merged")
        first = batches[0]
        for batch in batches:
            batch._standardize_keys()
        more: dict[str, Any] = {"batch_id": first.batch_id, "keys_head_dim_last": first.keys_head_dim_last}
        more |= {"requests_idx_mapping": {}, "adapter_meta": None, "max_tokens": 0}  # set below
        joined = super().concatenate(batches, **more)
        joined._restore_keys()
        return joined.update_derived()

    def update_derived(self) -> Self:
        """Recompute the fields that are derived from other fields."""
        self.requests_idx_mapping = {request.id: row for row, request in enumerate(self.requests)}
        indices = torch.tensor([request.adapter_index for request in self.requests], device=self.input_ids.device)
        self.adapter_meta = AdapterBatchMetadata.from_indices(indices.repeat_interleave(self.input_ids.shape[1]))
        self.max_tokens = len(self) * (self.max_input_length + self.padding_right_offset)
        return self

    def _standardize_keys(self) -> None:
        """Convert KV caches to `[rows, heads, columns, size]`. Old models merge rows and heads into one dimension."""
        for layer, cache in enumerate(self.past_key_values or []):
            keys, values = (each if each.dim() == 4 else each.unflatten(0, (len(self), -1)) for each in cache)
            if cache[0].dim() == 3 or not self.keys_head_dim_last:
                assert self.past_key_values is not None
                self.past_key_values[layer] = (keys if self.keys_head_dim_last else keys.mT), values

    def _restore_keys(self) -> None:
        if not self.keys_head_dim_last and self.past_key_values is not None:
            self.past_key_values = [(keys.mT, values) for keys, values in self.past_key_values]


class CausalLM(PaddedLM, Model):
    """A model loaded by `AutoModelForCausalLM`, with LoRAX's interface. Adapters are not supported."""

    dynamic_adapter_loading_enabled = False

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
        super().__init__(model_id, revision, quantize, dtype, trust_remote_code)
        self.tokenizer.pad_token_id = self.pad_token_id  # as in LoRAX; None if the tokenizer has no such token ID
        self.tokenizers = TokenizerManager()
        self.detokenizer = make_detokenizer(self.tokenizer)
        self.requires_padding = True
        self.rank, self.world_size = 0, 1

    @property
    def batch_type(self) -> type[CausalLMBatch]:
        return CausalLMBatch

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
        if adapter_data is not None and any(adapter_data.meta.segment_indices):
            raise self._make_no_adapters_error()
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, only_last=only_last)

    @torch.inference_mode()
    def generate_token(self, batch: CausalLMBatch) -> tuple[list[Generation], CausalLMBatch | None]:
        """Run one step. Finished requests produce no results but stay in the batch until `filter` removes them."""
        adapted = [request.id for request in batch.requests if request.adapter_index]
        if adapted:
            raise self._make_no_adapters_error().for_requests(*adapted)
        is_first = batch.past_key_values is None
        sampled, logits, caches = self.compute(batch)
        logprobs = sampled.logprobs.tolist()
        _check_finite_logprobs(batch, logprobs)

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
        batch.update_derived()
        return generations, batch

    def _make_no_adapters_error(self) -> AdapterError:
        return AdapterError(f"{self.model_id}: padded batches do not support adapters")

    def _append_text(self, batch: CausalLMBatch, row: int, token_id: int) -> tuple[str, bool]:
        """Detokenize a new token, and update the stopping criteria.

        Return the new text, and True if the token is a special token.
        """
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
        """Return the step result of one request. `prompt_logits` is given only in the first step."""
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
        """Return the prompt tokens with their log probabilities."""
        ids = batch.all_input_ids[row][:-1, 0]
        token_ids = ids.tolist()
        return NextTokens(
            token_ids,
            [math.nan, *prompt_logprobs(logits[row], ids)],
            [self.detokenizer.token_text(token_id) for token_id in token_ids],
            [self.detokenizer.is_special(token_id) for token_id in token_ids],
        )


def _check_finite_logprobs(batch: CausalLMBatch, logprobs: list[float]) -> None:
    rows = zip(batch.requests, batch.stopping_criterias, logprobs, strict=True)
    failed = [request.id for request, stop, logprob in rows if stop.finish_reason is None and math.isnan(logprob)]
    if failed:
        raise LoraxError(
            "the logits are NaN (overflow in the model's dtype?); the batch is unchanged, remove this request to "
            "continue with the others"
        ).for_requests(*failed)
