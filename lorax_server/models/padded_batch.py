"""A left-padded batch for models without a paged implementation. Sequences are added and removed between steps."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch.nn.utils.rnn import pad_sequence

from lorax_server.generation.stopping import StoppingCriteria
from lorax_server.kernels import LayerCache
from lorax_server.models.padded_cache import join_rows, select_rows
from lorax_server.sampling.batch import SequenceSampling


class Chooser(NamedTuple):
    """Sampling parameters and prompt length of one sequence."""

    sequence_sampling: SequenceSampling
    prompt_length: int


class PaddedBatch:
    """A left-padded batch: the last column contains each sequence's last token.

    Between steps the attention mask has `max_input_length + padding_right_offset` columns. The last
    `padding_right_offset` columns are for future tokens. The KV caches have `max_input_length - 1` columns, because the
    tokens in `input_ids` are not computed yet.
    """

    # Fields with one entry per request.
    row_fields: ClassVar[Sequence[str]] = (
        "requests",
        "all_input_ids",
        "input_lengths",
        "next_token_choosers",
        "stopping_criterias",
    )

    requests: list[Any]  # objects with attributes `id` and `prefill_logprobs`
    input_ids: torch.Tensor  # [rows, max_input_length] before the first step, [rows, 1] after it
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    past_key_values: list[LayerCache] | None  # indexed by layer
    all_input_ids: list[torch.Tensor]  # [tokens, 1], without padding, on the CPU
    input_lengths: list[int]
    next_token_choosers: list[Any]  # `Chooser`, or an object with the same fields
    stopping_criterias: list[StoppingCriteria]
    max_input_length: int
    padding_right_offset: int

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @classmethod
    def from_prompts(
        cls,
        requests: list[Any],
        prompts: Sequence[Sequence[int]],
        choosers: list[Any],
        stops: list[StoppingCriteria],
        pad_token_id: int,
        device: torch.device,
        **more: Any,
    ) -> Self:
        """Create a batch from tokenized prompts. `more` contains fields that subclasses add."""
        _check_ids(requests)
        rows = [torch.tensor(ids, dtype=torch.long) for ids in prompts]
        lengths = [len(row) for row in rows]
        width, num_future_tokens = max(lengths), max(stop.remaining_tokens for stop in stops)
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side="left")
        mask = torch.zeros(len(rows), width + num_future_tokens, dtype=torch.long)
        mask[:, :width] = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
        positions = (mask[:, :width].cumsum(-1) - 1).masked_fill(mask[:, :width] == 0, 1)
        return cls(
            requests=requests,
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=None,
            all_input_ids=[row[:, None] for row in rows],
            input_lengths=lengths,
            next_token_choosers=choosers,
            stopping_criterias=stops,
            max_input_length=width,
            padding_right_offset=num_future_tokens,
            **more,
        )

    @torch.inference_mode()
    def filter(self, request_ids: list[int]) -> Self | None:
        """Keep only these requests, in this order. Return this batch, or None if `request_ids` is empty."""
        if not request_ids:
            return None
        rows = self._find_rows(request_ids)
        if rows == list(range(len(self))):
            return self
        for name in self.row_fields:
            setattr(self, name, [getattr(self, name)[row] for row in rows])
        index = torch.tensor(rows, device=self.input_ids.device)
        width, num_future_tokens = max(self.input_lengths), self._count_future_tokens()
        end = self.attention_mask.shape[1] - self.padding_right_offset
        columns = slice(-width, None) if self.past_key_values is None else slice(None)
        self.input_ids = self.input_ids[index, columns]
        self.position_ids = self.position_ids[index, columns]
        self.attention_mask = self.attention_mask[index, end - width : end + num_future_tokens]
        caches = self.past_key_values or []
        for layer, cache in enumerate(caches):  # layer by layer, to keep only one layer's copy in memory
            caches[layer] = select_rows(cache, rows, width - 1)
        self.max_input_length, self.padding_right_offset = width, num_future_tokens
        return self

    @classmethod
    @torch.inference_mode()
    def concatenate(cls, batches: Sequence[Self], **more: Any) -> Self:
        """Merge batches into one. Each batch must have run its first step, and is unusable afterwards."""
        requests = _check_joinable(batches)
        width = max(batch.max_input_length for batch in batches)
        num_future_tokens = max(batch.padding_right_offset for batch in batches)
        mask = batches[0].attention_mask.new_zeros(len(requests), width + num_future_tokens)
        row = 0
        for batch in batches:
            end = batch.attention_mask.shape[1] - batch.padding_right_offset
            start = end - batch.max_input_length
            mask[row : row + len(batch), width - (end - start) : width] = batch.attention_mask[:, start:end]
            row += len(batch)
        lists = {name: [value for batch in batches for value in getattr(batch, name)] for name in cls.row_fields}
        return cls(
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            attention_mask=mask,
            position_ids=torch.cat([batch.position_ids for batch in batches]),
            past_key_values=_join_layers(batches, width - 1),
            max_input_length=width,
            padding_right_offset=num_future_tokens,
            **lists,
            **more,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Append one token to each sequence."""
        for row, token_id in enumerate(token_ids):
            self.all_input_ids[row] = torch.cat([self.all_input_ids[row], torch.tensor([[token_id]])])
            self.input_lengths[row] += 1

    def __len__(self) -> int:
        return len(self.requests)

    def _count_future_tokens(self) -> int:
        """Return the maximum number of tokens that any unfinished request can still generate."""
        running = [stop for stop in self.stopping_criterias if stop.finish_reason is None]
        return max((stop.remaining_tokens for stop in running), default=0)

    def _find_rows(self, request_ids: list[int]) -> list[int]:
        rows = {request.id: row for row, request in enumerate(self.requests)}
        if not rows.keys() >= set(request_ids) or len(set(request_ids)) != len(request_ids):
            raise ValueError(f"request_ids must be distinct IDs from this batch {list(rows)} (got {request_ids})")
        return [rows[request_id] for request_id in request_ids]


def _check_joinable(batches: Sequence[PaddedBatch]) -> list[Any]:
    """Return the requests of all batches. Raise ValueError if the batches cannot be merged."""
    requests = [request for batch in batches for request in batch.requests]
    _check_ids(requests)
    shapes = set()
    for batch in batches:
        if batch.past_key_values is None:
            raise ValueError("batches can be merged only after their first step")
        shapes.add(tuple((keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in batch.past_key_values))
    if len(shapes) != 1:
        raise ValueError("batches from different models cannot be merged")
    return requests


def _check_ids(requests: Sequence[Any]) -> None:
    if not requests:
        raise ValueError("a batch needs at least one request")
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        raise ValueError(f"request IDs in a batch must be unique (got {sorted(ids)})")


def _join_layers(batches: Sequence[PaddedBatch], length: int) -> list[LayerCache]:
    """Return the merged KV caches. The original caches are released layer by layer, so that only one layer is in memory
    twice.
    """
    caches = [batch.past_key_values or [] for batch in batches]
    joined: list[LayerCache] = []
    for layer in range(len(caches[0])):
        sources = [each[layer] for each in caches]
        for each in caches:
            each[layer] = (torch.empty(0), torch.empty(0))
        joined.append(join_rows(sources, length))
    for batch in batches:
        batch.past_key_values = None
    return joined
