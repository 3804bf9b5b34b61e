"""Runs steps of a paged model, from the step plan to the sampled tokens. Results are copied to the host
asynchronously.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from lorax_server.adapters.batch import AdapterBatchData, AdapterBatchMetadata
from lorax_server.kernels import HostLengths
from lorax_server.kernels.device import is_host, to_device
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.plan import AdapterOp, Ints, LoadOp, MoveOp, StepMasks, StepPlan, StepResult, UnloadOp
from lorax_server.sampling.sampler import History, Sampler, SamplerOutput, SequenceSampling, TokenMasks, TopTokens
from lorax_server.types import Alternatives
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.graphs import GraphSizes, StepGraphs
from lorax_server.worker.inputs import (
    MaskUploader,
    SlotTables,
    StepLayout,
    StepTokens,
    build_step_tokens,
    split_forced_tokens,
)

# Cached batches of adapters. A step needs one for all tokens and one for the LM head. The number of draft tokens often
# changes from step to step.
MAX_ADAPTER_DATA = 16
# Logits of all prompt tokens would not fit into memory, so prompt log probabilities are computed in chunks.
PROMPT_LOGPROB_CHUNK_TOKENS = 256


class ScoredPrompts(NamedTuple):
    """The log probabilities and alternatives of prompt tokens, concatenated over all prompts."""

    counts: list[int]  # number of scored tokens per prompt
    num_alternatives: list[int]  # number of requested alternatives per prompt
    logprobs: torch.Tensor  # [tokens]
    top_ids: torch.Tensor  # [tokens, maximum number of alternatives]
    top_logprobs: torch.Tensor

    def by_prompt(self) -> list[list[float]]:
        return [logprobs.tolist() for logprobs in self.logprobs.split(self.counts)]

    def alternatives(self) -> dict[int, list[Alternatives]]:
        """Return the alternatives of each prompt that requests them, keyed by prompt index."""
        tokens = list(map(Alternatives, self.top_ids.tolist(), self.top_logprobs.tolist()))
        alternatives, start = {}, 0
        for prompt, (length, count) in enumerate(zip(self.counts, self.num_alternatives, strict=True)):
            if count:
                alternatives[prompt] = [
                    Alternatives(ids[:count], logprobs[:count]) for ids, logprobs in tokens[start : start + length]
                ]
            start += length
        return alternatives


class Ticket(NamedTuple):
    """A step in flight. Its tensors are on the host after the `done` event."""

    step: int
    sampled: SamplerOutput | None = None
    scored_prompts: ScoredPrompts | None = None
    head_guesses: torch.Tensor | None = None  # [sampled tokens, draft heads]
    done: torch.cuda.Event | None = None


class MaskedTicket(NamedTuple):
    """A step in flight with computed logits. Its tokens cannot be sampled before the token masks are available."""

    plan: StepPlan
    tokens: StepTokens
    logits: torch.Tensor
    scored_prompts: ScoredPrompts | None
    head_guesses: torch.Tensor | None


class PagedRunner:
    """Runs steps with one rank's model, KV cache and slot tables."""

    def __init__(
        self,
        model: PagedCausalLM,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_length: int,
        memory: AdapterMemory | None = None,
        graph_sizes: GraphSizes | None = None,
        capture: bool = True,
    ) -> None:
        """Allocate the KV cache and slot tables. Steps up to the largest size in `graph_sizes` run as graphs.

        See `StepGraphs` for `capture`.
        """
        self._model = model
        self._device = model.device
        self._memory = memory
        self._kv_cache = model.allocate_kv_cache(num_blocks, block_size)
        self._tables = SlotTables(max_num_seqs, max_length, block_size, model.device)
        self._mask_uploader = MaskUploader(model.device)
        self._graphs: StepGraphs | None = None
        if graph_sizes is not None and graph_sizes.decode:
            self._graphs = StepGraphs(model, self._kv_cache, self._tables, memory, graph_sizes, capture=capture)
        self._layout: StepLayout | None = None  # layout of the last step
        self._sampler: tuple[int, list[SequenceSampling], Sampler] | None = None
        self._adapter_data: dict[bytes, AdapterBatchData | None] = {}  # by adapter indices and counts

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Ticket | MaskedTicket:
        """Start a step and return its ticket. On a GPU, this does not wait. A masked step stops before sampling."""
        if plan.adapter_ops:
            self._invalidate_adapters(plan.adapter_ops)
        self._tables.write_new(plan)
        if plan.drafts is not None:
            self._tables.write_drafts(plan)
        if not len(plan.slots):
            return self._fetch(Ticket(plan.step))  # its event is recorded after the plan's adapter moves
        tokens = build_step_tokens(plan, self._layout)
        if not tokens.is_single and self._graphs is not None and self._graphs.has_cpu_graphs:
            plan = split_forced_tokens(plan, self._tables.host_prompt_lengths)
            tokens = build_step_tokens(plan)
        self._layout = tokens.layout
        hidden = self._forward(plan, tokens)
        logits = self._score(hidden, tokens.layout.last, plan, tokens) if len(tokens.layout.last) else None
        sampled = None if logits is None or plan.is_masked else self._sample(plan, tokens, logits)
        prompts = self._score_prompts(plan, tokens, hidden) if True in plan.scores_prompt.tolist() else None
        guesses = None if logits is None or not plan.runs_draft_heads else self._run_draft_heads(hidden, tokens)
        if logits is not None and plan.is_masked:
            return MaskedTicket(plan, tokens, logits, prompts, guesses)
        return self._fetch(Ticket(plan.step, sampled, prompts, guesses))

    @torch.inference_mode()
    def mask(self, ticket: MaskedTicket, masks: StepMasks) -> Ticket:
        """Sample the tokens of a masked step, and return the ticket for `collect`."""
        token_masks = self._mask_uploader.upload(masks, ticket.logits.shape[-1]) if len(masks.rows) else None
        sampled = self._sample(ticket.plan, ticket.tokens, ticket.logits, token_masks)
        if masks.forced:
            self._write_forced(ticket, masks)
        return self._fetch(Ticket(ticket.plan.step, sampled, ticket.scored_prompts, ticket.head_guesses))

    def _write_forced(self, ticket: MaskedTicket, masks: StepMasks) -> None:
        """Write the forced tokens to the token table, after the sampled tokens."""
        layout = ticket.tokens.layout
        slots, lengths = ticket.plan.slots[layout.rows], ticket.tokens.positions[layout.last] + 1
        firsts = self._tables.select(slots).token_offsets + lengths + 1
        offsets = [firsts[number] + np.arange(len(token_ids)) for number, token_ids in masks.forced]
        token_ids = np.concatenate([np.array(token_ids, np.int64) for _, token_ids in masks.forced])
        self._tables.write_tokens(np.concatenate(offsets), to_device(token_ids, self._device))

    def collect(self, ticket: Ticket | MaskedTicket) -> StepResult:
        """Wait for a step and return its result."""
        assert isinstance(ticket, Ticket), "call `mask` before `collect`"
        if ticket.done is not None:
            ticket.done.synchronize()
        if (sampled := ticket.sampled) is not None:
            alternatives = sampled.alternatives.by_row() if sampled.alternatives else {}
            result = StepResult(ticket.step, sampled.token_ids.tolist(), sampled.logprobs.tolist(), alternatives)
        else:
            result = StepResult(ticket.step, [], [])
        if ticket.head_guesses is not None:
            result = replace(result, head_guesses=ticket.head_guesses.tolist())
        if (prompts := ticket.scored_prompts) is not None:
            result = replace(result, prompt_logprobs=prompts.by_prompt(), prompt_alternatives=prompts.alternatives())
        return result

    def _forward(self, plan: StepPlan, tokens: StepTokens) -> torch.Tensor:
        """Run the model, and return the hidden states of all tokens. If a graph fits the step, replay it."""
        adapter_data = self._make_adapter_data(plan.adapter_indices, plan.counts)
        if self._graphs is not None and (kind := self._graphs.find(tokens, adapter_data)) is not None:
            return self._graphs.run(kind, plan, tokens, adapter_data)
        return self._run_eagerly(plan, tokens, adapter_data)

    def _run_eagerly(self, plan: StepPlan, tokens: StepTokens, adapter_data: AdapterBatchData | None) -> torch.Tensor:
        tables, layout = self._tables, tokens.layout
        selected = tables.select(plan.slots)
        starts = to_device(plan.starts, self._device)
        positions = to_device(tokens.positions.astype(np.int32), self._device)
        kv_slots = to_device(tables.compute_kv_slots(tokens.slots, tokens.positions), self._device)
        cu_seqlens, token_offsets = None, selected.token_offsets
        if not tokens.is_single:
            cu_seqlens = to_device(layout.bounds.astype(np.int32), self._device)
            token_offsets = token_offsets[layout.sequences]
        max_s = max(tokens.lengths.tolist())
        seqlen = Seqlen(
            to_device(plan.counts, self._device),
            starts,
            cu_seqlens,
            layout.max_count,
            max_s,
            selected.prompt_lengths,
            HostLengths(layout.counts, plan.starts.tolist()),
            stores_all=True,
        )
        hidden, _ = self._model(
            tables.read_tokens(token_offsets + tokens.positions),
            positions,
            cu_seqlens,
            self._kv_cache,
            tables.select_blocks(selected, max_s),
            kv_slots,
            seqlen,
            max_s,
            adapter_data,
            skip_lm_head=True,
        )
        return cast(torch.Tensor, hidden)

    def _make_adapter_data(self, adapter_indices: Ints, counts: Ints) -> AdapterBatchData | None:
        """Return adapter data for a batch in which `counts[i]` consecutive tokens use `adapter_indices[i]`."""
        if self._memory is None:
            return None
        key = adapter_indices.tobytes() + b"|" + counts.tobytes()
        if key not in self._adapter_data:
            data, known = None, [other for other in list(self._adapter_data.values())[-2:] if other is not None]
            if len(self._adapter_data) >= MAX_ADAPTER_DATA:
                self._adapter_data = {}
            if adapter_indices.any():
                indices = to_device(np.repeat(adapter_indices, counts), self._device)
                meta = AdapterBatchMetadata(indices, *_find_runs(adapter_indices, counts))
                data = AdapterBatchData(meta, self._memory.arena)
                for other in known:
                    data.lora.copy_derived_from(other.lora)
            self._adapter_data[key] = data  # stored last, because the code above may run out of memory
        return self._adapter_data[key]

    def _invalidate_adapters(self, ops: Sequence[AdapterOp]) -> None:
        """Drop cached data of adapters that these operations load, move or unload."""
        assert self._memory is not None
        touched = {op.index for op in ops if isinstance(op, LoadOp | MoveOp | UnloadOp)}
        if self._graphs is not None and touched:
            self._graphs.invalidate_adapters()
        for key, data in tuple(self._adapter_data.items()):
            if data is not None and not touched.isdisjoint(data.meta.segment_indices):
                del self._adapter_data[key]

    def _score(self, hidden: torch.Tensor, chosen: Ints, plan: StepPlan, tokens: StepTokens) -> torch.Tensor:
        """Return the logits of the tokens with the indices `chosen`."""
        adapter_indices, counts = plan.adapter_indices, plan.counts
        if len(chosen) < len(hidden):
            hidden = hidden[to_device(chosen, self._device)]
            adapter_indices = adapter_indices[tokens.layout.sequences[chosen]]
            counts = np.ones_like(adapter_indices)
        logits: torch.Tensor = self._model.lm_head(hidden, self._make_adapter_data(adapter_indices, counts))[0]
        return logits

    def _run_draft_heads(self, hidden: torch.Tensor, tokens: StepTokens) -> torch.Tensor:
        """Return the tokens that the draft heads guess after each sampled token."""
        assert self._model.draft_heads is not None
        last = tokens.layout.last
        chosen = hidden[to_device(last, self._device)] if len(last) < len(hidden) else hidden
        return cast(torch.Tensor, self._model.draft_heads(chosen, self._model.lm_head))

    def _sample(
        self, plan: StepPlan, tokens: StepTokens, logits: torch.Tensor, masks: TokenMasks | None = None
    ) -> SamplerOutput:
        tables = self._tables
        slots, host_lengths = plan.slots, tokens.lengths
        if not tokens.layout.samples_all:
            slots, host_lengths = slots[tokens.layout.rows], tokens.positions[tokens.layout.last] + 1
        selected = tables.select(slots)
        sampler = self._find_sampler(selected.sequence_sampling, logits.shape[-1])
        history = None
        if sampler.needs_history:
            token_ids = tables.token_ids[selected.slots, : int(host_lengths.max())] if sampler.needs_tokens else None
            history = History(to_device(host_lengths, self._device), selected.prompt_lengths, token_ids)
        sampled = sampler.sample(logits, history, masks)
        tables.write_tokens(selected.token_offsets + host_lengths, sampled.token_ids)
        return sampled

    def _find_sampler(self, sequence_sampling: list[SequenceSampling], vocab_size: int) -> Sampler:
        if self._sampler is None or self._sampler[:2] != (vocab_size, sequence_sampling):
            self._sampler = (
                vocab_size,
                sequence_sampling,
                Sampler(sequence_sampling, vocab_size, self._device, self._model.ops),
            )
        return self._sampler[2]

    def _score_prompts(self, plan: StepPlan, tokens: StepTokens, hidden: torch.Tensor) -> ScoredPrompts:
        """Return prompt log probabilities for the sequences that request them."""
        sequences, slots, starts = (
            tokens.layout.sequences,
            plan.slots[plan.scores_prompt],
            plan.starts[plan.scores_prompt],
        )
        ends = np.minimum(starts + plan.counts[plan.scores_prompt], self._tables.host_prompt_lengths[slots] - 1)
        counts, first = (ends - starts).tolist(), tokens.layout.bounds[:-1][plan.scores_prompt]
        num_alternatives = [
            sampling.params.num_alternatives for sampling in self._tables.select(slots).sequence_sampling
        ]
        scored = np.concatenate([np.arange(start, start + n) for start, n in zip(first, counts, strict=True)])
        pieces = []
        for start in range(0, len(scored), PROMPT_LOGPROB_CHUNK_TOKENS):
            piece = scored[start : start + PROMPT_LOGPROB_CHUNK_TOKENS]
            offsets = self._tables.select(plan.slots).token_offsets[sequences[piece]] + tokens.positions[piece] + 1
            following = self._tables.read_tokens(offsets)
            all_logprobs = self._score(hidden, piece, plan, tokens).float().log_softmax(-1)
            logprobs = all_logprobs.gather(-1, following[:, None]).squeeze(-1)
            top_logprobs, top_ids = all_logprobs.topk(min(max(num_alternatives), all_logprobs.shape[-1]), dim=-1)
            pieces.append((logprobs, top_ids, top_logprobs))
        return ScoredPrompts(counts, num_alternatives, *map(torch.cat, zip(*pieces, strict=True)))

    def _fetch(self, ticket: Ticket) -> Ticket:
        """Start copying the results to the host, and return a ticket for the copies.

        `collect` waits for the ticket's event, so it does not wait for later steps.
        """
        if is_host(self._device):
            return ticket
        ticket = cast(Ticket, _to_host(ticket))
        done: Any = torch.cuda.current_stream(self._device).record_event()
        return ticket._replace(done=done)


def _find_runs(adapter_indices: Ints, counts: Ints) -> tuple[list[int], list[int]]:
    """Return the segment boundaries and adapter indices, like `find_segments`. Entry `i` covers `counts[i]` tokens."""
    firsts = np.flatnonzero(np.diff(adapter_indices, prepend=-1))
    bounds = np.concatenate([[0], counts.cumsum()])
    return [*bounds[firsts].tolist(), int(bounds[-1])], adapter_indices[firsts].tolist()


def _to_host(value: Any) -> Any:
    """Start copying a tensor, or all tensors in nested named tuples, to the host. Return the copies."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    if isinstance(value, Ticket | SamplerOutput | TopTokens | ScoredPrompts):
        return type(value)(*map(_to_host, value))
    return value
