"""Runs the steps of a paged model: from a plan to the chosen tokens, which are asked for when the step is collected."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import AdapterOp, Ints, Load, Move, StepPlan, StepResult, Unload
from lorax_server.sampling.sampler import History, RowSampling, Sampled, Sampler, TopTokens
from lorax_server.types import Alternatives
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.inputs import RowTables, to_device

# Tokens of prompts whose scores are computed at once: of a large vocabulary all of them would not fit.
SCORED_TOKENS = 256
# All but cuDNN's, which plans anew for every length that it has not seen.
GPU_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class ScoredPrompts(NamedTuple):
    """Log probabilities of prompts' tokens, one prompt after the other, and which would have been likeliest."""

    counts: list[int]  # tokens of each prompt
    num_alternatives: list[int]  # that each asks for
    logprobs: torch.Tensor
    top_ids: torch.Tensor  # [tokens, most asked for]
    top_logprobs: torch.Tensor

    def by_prompt(self) -> list[list[float]]:
        return [part.tolist() for part in self.logprobs.split(self.counts)]

    def alternatives(self) -> dict[int, list[Alternatives]]:
        """Of those prompts that ask for any."""
        parts = zip(
            self.num_alternatives, self.top_ids.split(self.counts), self.top_logprobs.split(self.counts), strict=True
        )
        return {
            place: [Alternatives(*each) for each in zip(ids[:, :count].tolist(), top[:, :count].tolist(), strict=True)]
            for place, (count, ids, top) in enumerate(parts)
            if count
        }


class Ticket(NamedTuple):
    """A step that is under way. Its tensors are on the host once `done` has happened."""

    step: int
    sampled: Sampled | None = None
    prompts: ScoredPrompts | None = None
    done: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Places:
    """Where the tokens of a step belong; one entry for each token."""

    sequences: Ints
    positions: Ints
    bounds: Ints  # [sequences + 1]
    last: Ints  # [sampling sequences] the token that the next one is chosen after

    @classmethod
    def of(cls, plan: StepPlan) -> "_Places":
        sequences = np.repeat(np.arange(len(plan.rows)), plan.counts)
        bounds = np.concatenate([[0], plan.counts.cumsum()])
        positions = np.arange(len(sequences)) - bounds[sequences] + plan.starts[sequences]
        return cls(sequences, positions, bounds, (bounds[1:] - 1)[plan.samples])


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
        memory: AdapterMemory | None = None,
    ) -> None:
        self._model = model
        self._device = model.device
        self._memory = memory
        self._kv_cache = model.allocate_kv_cache(num_blocks, block_size)
        self._tables = RowTables(num_rows, max_length, block_size, model.device)
        self._sampler: tuple[int, list[RowSampling], Sampler] | None = None
        self._adapter_data: dict[bytes, AdapterBatchData] = {}  # of the last step, by who the tokens belong to

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step. On a GPU this returns before it is done."""
        if plan.adapter_ops:
            self._forget_adapters(plan.adapter_ops)
        if not len(plan.rows):
            return self._fetch(Ticket(plan.step))  # it ends when the moves that came with it have
        self._tables.take(plan)
        places = _Places.of(plan)
        with sdpa_kernel(GPU_BACKENDS) if self._device.type == "cuda" else nullcontext():
            hidden = self._forward(plan, places)
        sampled = self._choose(plan, places, hidden) if len(places.last) else None
        prompts = self._score_prompts(plan, places, hidden) if plan.asks.any() else None
        return self._fetch(Ticket(plan.step, sampled, prompts))

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step."""
        if ticket.done is not None:
            ticket.done.synchronize()
        token_ids, logprobs, alternatives = [], [], {}
        if ticket.sampled is not None:
            token_ids, logprobs = ticket.sampled.token_ids.tolist(), ticket.sampled.logprobs.tolist()
            alternatives = ticket.sampled.alternatives.by_row() if ticket.sampled.alternatives else {}
        if ticket.prompts is None:
            return StepResult(ticket.step, token_ids, logprobs, alternatives)
        of_prompts = ticket.prompts.by_prompt(), ticket.prompts.alternatives()
        return StepResult(ticket.step, token_ids, logprobs, alternatives, *of_prompts)

    def _forward(self, plan: StepPlan, places: _Places) -> torch.Tensor:
        tables, block_size = self._tables, self._tables.block_size
        rows, starts, counts = to_device([plan.rows, plan.starts, plan.counts], self._device)
        sequences, positions = to_device([places.sequences, places.positions], self._device)
        is_single = len(places.sequences) == len(plan.rows)
        bounds = None if is_single else to_device(places.bounds, self._device).int()
        blocks = tables.blocks[rows]
        slots = blocks[sequences, positions // block_size] * block_size + positions % block_size
        max_s = int((plan.starts + plan.counts).max())
        hidden, _ = self._model(
            tables.token_ids[rows[sequences], positions],
            positions.int(),
            bounds,
            self._kv_cache,
            blocks[:, : -(-max_s // block_size)],
            slots.long(),
            Seqlen(counts, starts, bounds, int(plan.counts.max()), max_s, tables.prompt_lengths[rows]),
            max_s,
            self._adapters_of(plan.adapter_indices, plan.counts),
            skip_lm_head=True,
        )
        return cast(torch.Tensor, hidden)

    def _adapters_of(self, adapter_indices: Ints, counts: Ints) -> AdapterBatchData | None:
        """For so many tokens of each adapter, one after the other. Told apart on the host, which knows them."""
        if self._memory is None or not adapter_indices.any():
            return None
        key = adapter_indices.tobytes() + b"|" + counts.tobytes()
        if key not in self._adapter_data:
            if len(self._adapter_data) >= 2:  # those of the tokens and those of the head
                self._adapter_data = {}
            indices = to_device(np.repeat(adapter_indices, counts), self._device)
            meta = AdapterBatchMetadata(indices, *_runs(adapter_indices, counts))
            self._adapter_data[key] = AdapterBatchData(meta, self._arena)
        return self._adapter_data[key]

    def _forget_adapters(self, ops: Sequence[AdapterOp]) -> None:
        """What is remembered of the last step's speaks of what lay where, so not if one of them has moved or left."""
        touched = {op.index for op in ops if isinstance(op, Load | Move | Unload)}
        for key, data in tuple(self._adapter_data.items()):
            if data.arena is not self._arena or not touched.isdisjoint(data.meta.segment_indices):
                del self._adapter_data[key]

    @property
    def _arena(self) -> AdapterArena:
        assert self._memory is not None
        return self._memory.arena

    def _score(self, hidden: torch.Tensor, tokens: Ints, plan: StepPlan, places: _Places) -> torch.Tensor:
        """The scores after some tokens."""
        adapter_indices = plan.adapter_indices[places.sequences[tokens]]
        data = self._adapters_of(adapter_indices, np.ones_like(adapter_indices))
        logits: torch.Tensor = self._model.lm_head(hidden[to_device(tokens, self._device)], data)[0]
        return logits

    def _choose(self, plan: StepPlan, places: _Places, hidden: torch.Tensor) -> Sampled:
        tables = self._tables
        logits = self._score(hidden, places.last, plan, places)
        chosen_rows = plan.rows[plan.samples]
        host_lengths = (plan.starts + plan.counts)[plan.samples]
        rows, lengths = to_device([chosen_rows, host_lengths], self._device)
        sampler = self._find_sampler([tables.row_sampling[row] for row in chosen_rows.tolist()], logits.shape[-1])
        tokens = tables.token_ids[rows, : int(host_lengths.max())] if sampler.needs_tokens else None
        sampled = sampler(logits, History(lengths, tables.prompt_lengths[rows], tokens))
        tables.token_ids[rows, lengths] = sampled.token_ids
        return sampled

    def _find_sampler(self, row_sampling: list[RowSampling], vocab_size: int) -> Sampler:
        if self._sampler is None or self._sampler[:2] != (vocab_size, row_sampling):
            self._sampler = vocab_size, row_sampling, Sampler(row_sampling, vocab_size, self._device)
        return self._sampler[2]

    def _count_prompt_tokens(self, plan: StepPlan) -> list[int]:
        """How many log probabilities each of those gets that ask for them: its last token has the first of the answer
        after it."""
        rows, starts, counts = plan.rows[plan.asks], plan.starts[plan.asks], plan.counts[plan.asks]
        lengths = [self._tables.host_prompt_lengths[row] for row in rows.tolist()]
        ends = np.minimum(starts + counts, np.array(lengths, dtype=np.int64) - 1)
        return cast(list[int], (ends - starts).tolist())

    def _score_prompts(self, plan: StepPlan, places: _Places, hidden: torch.Tensor) -> ScoredPrompts:
        counts, first = self._count_prompt_tokens(plan), places.bounds[:-1][plan.asks]
        wanted = [self._tables.row_sampling[row].params.num_alternatives for row in plan.rows[plan.asks].tolist()]
        tokens = np.concatenate([np.arange(start, start + n) for start, n in zip(first, counts, strict=True)])
        pieces = []
        for start in range(0, len(tokens), SCORED_TOKENS):
            piece = tokens[start : start + SCORED_TOKENS]
            rows, following = to_device([plan.rows[places.sequences[piece]], places.positions[piece] + 1], self._device)
            logprobs = self._score(hidden, piece, plan, places).float().log_softmax(-1)
            given = logprobs.gather(-1, self._tables.token_ids[rows, following][:, None]).squeeze(-1)
            best, ids = logprobs.topk(min(max(wanted), logprobs.shape[-1]), dim=-1)
            pieces.append((given, ids, best))
        return ScoredPrompts(counts, wanted, *map(torch.cat, zip(*pieces, strict=True)))

    def _fetch(self, ticket: Ticket) -> Ticket:
        """Begin to copy what came out to the host; waiting for the device would also wait for the step after."""
        if self._device.type != "cuda":
            return ticket
        sampled = ticket.sampled
        if sampled is not None:
            top = sampled.alternatives
            if top is not None:
                top = TopTokens(top.counts, _to_host(top.token_ids), _to_host(top.logprobs))
            sampled = Sampled(_to_host(sampled.token_ids), _to_host(sampled.logprobs), top)
        prompts = ticket.prompts
        if prompts is not None:
            prompts = ScoredPrompts(prompts.counts, prompts.num_alternatives, *map(_to_host, prompts[2:]))
        done: Any = torch.cuda.current_stream(self._device).record_event()
        return ticket._replace(sampled=sampled, prompts=prompts, done=done)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _runs(adapter_indices: Ints, counts: Ints) -> tuple[list[int], list[int]]:
    """Boundaries and adapters of the runs of one adapter, counted in tokens; the sequences come in that order."""
    changes = np.flatnonzero(np.diff(adapter_indices)) + 1
    first = np.concatenate([[0], changes])
    bounds = np.concatenate([[0], counts.cumsum()])
    return [*bounds[first].tolist(), int(bounds[-1])], adapter_indices[first].tolist()
