"""Runs the steps of a paged model: from a plan to the chosen tokens, without asking the device in between."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import Ints, StepPlan, StepResult
from lorax_server.sampling.sampler import History, Sampled, Sampler, Wish
from lorax_server.worker.rows import RowTables, to_device


class Ticket(NamedTuple):
    """A step that is under way."""

    step: int
    sampled: Sampled | None


@dataclass(frozen=True)
class _Places:
    """Where the tokens of a step belong; one entry for each token."""

    sequences: torch.Tensor
    positions: torch.Tensor
    bounds: torch.Tensor | None  # [sequences + 1]; None if every sequence has one token
    last: torch.Tensor  # [sampling sequences] the token that the next one is chosen after


class PagedRunner:
    """One rank's model, its cache and its tables."""

    def __init__(
        self,
        model: PagedCausalLM,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        max_length: int,
        arena: AdapterArena | None = None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._arena = arena
        self._kv_cache = model.allocate_kv_cache(num_blocks, block_size)
        self._tables = RowTables(num_rows, max_length, block_size, model.device)
        self._sampler: tuple[list[Wish], Sampler] | None = None

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step. On a GPU this returns before it is done."""
        tables = self._tables
        tables.take(plan)
        places = self._places(plan)
        rows, starts, counts = to_device([plan.rows, plan.starts, plan.counts], self._device)
        token_rows = rows[places.sequences]
        blocks = tables.blocks[rows]
        block_size = tables.block_size
        slots = blocks[places.sequences, places.positions // block_size] * block_size + places.positions % block_size
        max_s = int((plan.starts + plan.counts).max())
        seqlen = Seqlen(counts, starts, places.bounds, int(plan.counts.max()), max_s, tables.prompt_lengths[rows])
        logits, _ = self._model(
            tables.token_ids[token_rows, places.positions],
            places.positions.int(),
            places.bounds,
            self._kv_cache,
            blocks[:, : -(-max_s // block_size)],
            slots.long(),
            seqlen,
            max_s,
            self._adapter_data(plan),
            lm_head_indices=places.last,
        )
        return Ticket(plan.step, self._choose(plan, logits))

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step."""
        if ticket.sampled is None:
            return StepResult(ticket.step, [], [])
        return StepResult(ticket.step, ticket.sampled.token_ids.tolist(), ticket.sampled.logprobs.tolist())

    def _places(self, plan: StepPlan) -> _Places:
        """Counted on the host, where the plan is, and copied at once."""
        sequences = np.repeat(np.arange(len(plan.rows)), plan.counts)
        bounds = np.concatenate([[0], plan.counts.cumsum()])
        positions = np.arange(len(sequences)) - bounds[sequences] + plan.starts[sequences]
        last = (bounds[1:] - 1)[plan.samples]
        is_single = bool((plan.counts == 1).all())
        on_device = to_device([sequences, positions], self._device)
        return _Places(
            on_device[0],
            on_device[1],
            None if is_single else to_device(bounds, self._device).int(),
            to_device(last, self._device),
        )

    def _adapter_data(self, plan: StepPlan) -> AdapterBatchData | None:
        if self._arena is None or not plan.adapter_indices.any():
            return None
        indices = to_device(np.repeat(plan.adapter_indices, plan.counts), self._device)
        return AdapterBatchData(AdapterBatchMetadata(indices, *_runs(plan.adapter_indices, plan.counts)), self._arena)

    def _choose(self, plan: StepPlan, logits: torch.Tensor) -> Sampled | None:
        if not plan.samples.any():
            return None
        tables = self._tables
        chosen_rows = plan.rows[plan.samples]
        host_lengths = (plan.starts + plan.counts)[plan.samples]
        rows, lengths = to_device([chosen_rows, host_lengths], self._device)
        wishes = [tables.wishes[row] for row in chosen_rows.tolist()]
        if self._sampler is None or self._sampler[0] != wishes:
            self._sampler = wishes, Sampler(wishes, logits.shape[-1], self._device)
        sampler = self._sampler[1]
        tokens = tables.token_ids[rows, : int(host_lengths.max())] if sampler.needs_tokens else None
        sampled = sampler(logits, History(lengths, tables.prompt_lengths[rows], tokens))
        tables.token_ids[rows, lengths] = sampled.token_ids
        return sampled


def _runs(adapter_indices: Ints, counts: Ints) -> tuple[list[int], list[int]]:
    """Boundaries and adapters of the runs of one adapter, counted in tokens; the sequences come in that order."""
    changes = np.flatnonzero(np.diff(adapter_indices)) + 1
    first = np.concatenate([[0], changes])
    bounds = np.concatenate([[0], counts.cumsum()])
    return [*bounds[first].tolist(), int(bounds[-1])], adapter_indices[first].tolist()
