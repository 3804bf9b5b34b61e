"""Requests in a padded batch, which they join and leave between steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from lorax_server.adapters.batch import AdapterBatchMetadata
from lorax_server.errors import LoraxError
from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.kernels import LayerCache
from lorax_server.models.padded_cache import join_rows, select_rows, unfold_heads
from lorax_server.models.pretrained import resolve_pad_token
from lorax_server.models.requests import check_limits, check_served, prompt_ids, stop_from_pb
from lorax_server.models.types import Batch, messages
from lorax_server.sampling import NextTokenChooser

if TYPE_CHECKING:
    from lorax_server.pb import generate_pb2

# The fields that have an entry for each request.
PER_ROW = (
    "requests",
    "all_input_ids",
    "input_lengths",
    "prefix_offsets",
    "read_offsets",
    "next_token_choosers",
    "stopping_criterias",
)


@dataclass
class CausalLMBatch(Batch):
    """Requests side by side, padded on the left, so that the last column is the last token of each.

    Between steps the mask is `max_input_length + padding_right_offset` wide; its last `padding_right_offset` columns
    are for tokens to come. The caches hold `max_input_length - 1` columns: all but the tokens in `input_ids`.
    """

    batch_id: int
    requests: "list[generate_pb2.Request]"
    requests_idx_mapping: dict[int, int]

    input_ids: torch.Tensor  # [rows, max_input_length] before the first step, [rows, 1] after it
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    past_key_values: list[LayerCache] | None

    all_input_ids: list[torch.Tensor]  # [tokens, 1] each, without padding, on the CPU
    input_lengths: list[int]
    prefix_offsets: list[int]
    read_offsets: list[int]

    next_token_choosers: list[NextTokenChooser]
    stopping_criterias: list[StoppingCriteria]
    adapter_meta: AdapterBatchMetadata  # one index for each of `input_ids`

    max_input_length: int
    padding_right_offset: int
    max_tokens: int  # that the batch can come to hold, padding included
    keys_head_dim_last: bool = True

    @classmethod
    def from_pb(
        cls,
        pb: "generate_pb2.Batch",
        tokenizer: Any,
        tokenizers: Any,
        processor: Any,  # noqa: ARG003  the contract's; images are refused
        config: Any,
        dtype: torch.dtype,  # noqa: ARG003  the contract's; the model knows its own
        device: torch.device,
    ) -> "CausalLMBatch":
        """Use the ids that requests carry, or tokenise their text. Without a `config` nothing limits the prompts.

        The config is the one that `CausalLM` has completed: its eos tokens include those of `generation_config.json`.
        """
        prompts, choosers, stops = [], [], []
        for request in pb.requests:
            try:
                ids, chooser, stop = _read(request, tokenizers.get_tokenizer(request.adapter_index, tokenizer), config)
            except LoraxError as error:
                raise error.of(request.id) from error
            prompts.append(ids)
            choosers.append(chooser)
            stops.append(stop)
        pad = _pad_token(tokenizer, config)
        return cls.from_prompts(pb.id, list(pb.requests), prompts, choosers, stops, pad, device)

    @classmethod
    def from_prompts(
        cls,
        batch_id: int,
        requests: "list[generate_pb2.Request]",
        prompts: Sequence[Sequence[int]],
        choosers: list[NextTokenChooser],
        stops: list[StoppingCriteria],
        pad_token_id: int,
        device: torch.device,
    ) -> "CausalLMBatch":
        """Batch tokenised prompts. Of a request, only `id`, `adapter_index` and `prefill_logprobs` are read."""
        if not requests:
            raise ValueError(f"batch {batch_id} has no requests")
        _check_ids(requests)
        rows = [torch.tensor(ids, dtype=torch.long) for ids in prompts]
        lengths = [len(row) for row in rows]
        width, room = max(lengths), max(stop.remaining_tokens for stop in stops)
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side="left")
        mask = torch.zeros(len(rows), width + room, dtype=torch.long)
        mask[:, :width] = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
        positions = (mask[:, :width].cumsum(-1) - 1).masked_fill(mask[:, :width] == 0, 1)
        return cls(
            batch_id=batch_id,
            requests=requests,
            requests_idx_mapping=_index(requests),
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=None,
            all_input_ids=[row[:, None] for row in rows],
            input_lengths=lengths,
            prefix_offsets=[0] * len(rows),
            read_offsets=lengths.copy(),
            next_token_choosers=choosers,
            stopping_criterias=stops,
            adapter_meta=adapter_meta_of(requests, width, device),
            max_input_length=width,
            padding_right_offset=room,
            max_tokens=len(rows) * (width + room),
        )

    def to_pb(self) -> "generate_pb2.CachedBatch":
        message: generate_pb2.CachedBatch = messages().CachedBatch(
            id=self.batch_id,
            request_ids=[request.id for request in self.requests],
            size=len(self),
            max_tokens=self.max_tokens,
            current_tokens=len(self) * self.max_input_length,
        )
        return message

    @torch.inference_mode()
    def filter(self, request_ids: list[int]) -> "CausalLMBatch | None":
        """Keep these requests, in this order. Change and return this batch, or return None if nothing is kept."""
        if not request_ids:
            return None
        rows, num_rows = self._rows_of(request_ids), len(self)
        if rows == list(range(num_rows)):
            return self
        for name in PER_ROW:
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        self.requests_idx_mapping = _index(self.requests)

        index = torch.tensor(rows, device=self.input_ids.device)
        width, room = max(self.input_lengths), self._room()
        end = self.attention_mask.shape[1] - self.padding_right_offset
        columns = slice(-width, None) if self.past_key_values is None else slice(None)
        self.input_ids = self.input_ids[index, columns]
        self.position_ids = self.position_ids[index, columns]
        self.attention_mask = self.attention_mask[index, end - width : end + room]
        caches = self.past_key_values or []
        for layer, cache in enumerate(caches):  # one at a time, so that only one is in memory twice
            caches[layer] = select_rows(unfold_heads(cache, num_rows), rows, width - 1, self.keys_head_dim_last)
        self.adapter_meta = adapter_meta_of(self.requests, self.input_ids.shape[1], index.device)
        self.max_input_length, self.padding_right_offset = width, room
        self.max_tokens = len(rows) * (width + room)
        return self

    @classmethod
    @torch.inference_mode()
    def concatenate(cls, batches: "Sequence[CausalLMBatch]") -> "CausalLMBatch":
        """Join all requests in one batch. The batches must have taken a step, and are used up, also if this fails."""
        _check_joinable(batches)
        first = batches[0]
        requests = [request for batch in batches for request in batch.requests]
        width = max(batch.max_input_length for batch in batches)
        room = max(batch.padding_right_offset for batch in batches)
        mask = first.attention_mask.new_zeros(len(requests), width + room)
        row = 0
        for batch in batches:
            end = batch.attention_mask.shape[1] - batch.padding_right_offset
            mask[row : row + len(batch), width - batch.max_input_length : width] = batch.attention_mask[
                :, end - batch.max_input_length : end
            ]
            row += len(batch)
        lists = {name: [value for batch in batches for value in getattr(batch, name)] for name in PER_ROW}
        return cls(
            batch_id=first.batch_id,
            requests_idx_mapping=_index(requests),
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            attention_mask=mask,
            position_ids=torch.cat([batch.position_ids for batch in batches]),
            past_key_values=_join_layers(batches, width - 1),
            adapter_meta=adapter_meta_of(requests, 1, mask.device),
            max_input_length=width,
            padding_right_offset=room,
            max_tokens=len(requests) * (width + room),
            keys_head_dim_last=first.keys_head_dim_last,
            **lists,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Append a token to each row."""
        for row, token_id in enumerate(token_ids):
            self.all_input_ids[row] = torch.cat([self.all_input_ids[row], torch.tensor([[token_id]])])
            self.input_lengths[row] += 1

    def __len__(self) -> int:
        return len(self.requests)

    def _room(self) -> int:
        """Count the tokens to come. A finished request needs none, whatever it was allowed."""
        running = [stop for stop in self.stopping_criterias if stop.finish_reason is None]
        return max((stop.remaining_tokens for stop in running), default=0)

    def _rows_of(self, request_ids: list[int]) -> list[int]:
        unknown = [request_id for request_id in request_ids if request_id not in self.requests_idx_mapping]
        if unknown or len(set(request_ids)) != len(request_ids):
            raise ValueError(f"batch {self.batch_id} holds {list(self.requests_idx_mapping)}, asked for {request_ids}")
        return [self.requests_idx_mapping[request_id] for request_id in request_ids]


def _pad_token(tokenizer: Any, config: Any) -> int:
    """Find a token that the model has. Without a config any will do: padding is masked."""
    if config is not None:
        return resolve_pad_token(tokenizer, config, config.get_text_config(decoder=True).vocab_size)
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _read(request: Any, tokenizer: Any, config: Any) -> tuple[list[int], NextTokenChooser, StoppingCriteria]:
    check_served(request)
    stop = stop_from_pb(request.stopping_parameters, tokenizer, config)
    ids = prompt_ids(request, tokenizer)
    if config is not None:
        check_limits(ids, stop, request.parameters.logit_bias, config)
    return ids, NextTokenChooser.from_pb(request.parameters, stop, len(ids)), StoppingCriteria(stop)


def _index(requests: Sequence[Any]) -> dict[int, int]:
    return {request.id: row for row, request in enumerate(requests)}


def adapter_meta_of(requests: Sequence[Any], width: int, device: torch.device) -> AdapterBatchMetadata:
    """Describe the adapter of every token of `width` columns, row after row."""
    indices = torch.tensor([request.adapter_index for request in requests], device=device)
    return AdapterBatchMetadata.from_indices(indices.repeat_interleave(width))


def _check_joinable(batches: Sequence[CausalLMBatch]) -> None:
    if not batches:
        raise ValueError("there are no batches to join")
    if any(batch.past_key_values is None for batch in batches):
        raise ValueError("only batches that have taken their first step can be joined")
    if len({batch.keys_head_dim_last for batch in batches}) != 1:
        raise ValueError("batches with different layouts of their keys cannot be joined")
    _check_ids([request for batch in batches for request in batch.requests])
    shapes = {tuple(_shape(cache, len(batch)) for cache in batch.past_key_values or ()) for batch in batches}
    if len(shapes) != 1:
        raise ValueError("batches of different models cannot be joined")


def _check_ids(requests: Sequence[Any]) -> None:
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        raise ValueError(f"requests of the same id cannot be in one batch: {sorted(ids)}")


def _shape(cache: LayerCache, num_rows: int) -> tuple[int, int, int]:
    """Return the number of heads and the sizes of a head's value and key, whatever the layout of the keys."""
    keys, values = unfold_heads(cache, num_rows)
    columns = values.shape[2]
    return values.shape[1], values.shape[3], keys[0, 0].numel() // max(columns, 1)


def _join_layers(batches: Sequence[CausalLMBatch], length: int) -> list[LayerCache]:
    """Join one layer at a time, and free its sources as soon as they are copied: only one is in memory twice."""
    joined = []
    for layer in range(len(batches[0].past_key_values or [])):
        sources = []
        for batch in batches:
            assert batch.past_key_values is not None
            sources.append(unfold_heads(batch.past_key_values[layer], len(batch)))
            batch.past_key_values[layer] = (torch.empty(0), torch.empty(0))
        joined.append(join_rows(sources, length, batches[0].keys_head_dim_last))
    for batch in batches:
        batch.past_key_values = None
    return joined
