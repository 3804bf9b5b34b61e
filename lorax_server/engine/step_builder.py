"""Builds step plans from scheduled sequences, and tracks submitted steps."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lorax_server.engine.kv_cache import KvCache
from lorax_server.engine.sequence import Sequence
from lorax_server.plan import AdapterOp, Bools, Drafts, Ints, NewSequence, StepPlan, StepResult


class BatchColumns(NamedTuple):
    """The sequences in a step, in plan order, and the `StepPlan` columns, which have one entry per sequence."""

    sequences: list[Sequence]
    slots: Ints
    starts: Ints
    counts: Ints
    samples: Bools
    scores_prompt: Bools
    adapter_indices: Ints


class SubmittedStep(NamedTuple):
    """A submitted step whose result has not been applied yet."""

    number: int
    num_tokens: int
    submitted_at: float
    columns: BatchColumns
    sampled: list[Sequence | None]  # sequences that sample a token; None if sampling is deferred to a later step
    scored_prompts: list[tuple[Sequence, int]]  # with the index of the first token that this step computes
    is_masked: bool = True  # some sampled sequences have a grammar
    drafts: dict[int, tuple[int, ...]] = {}  # noqa: RUF012 - draft tokens by index in `sampled`; never modified if empty
    first_rows: Seq[int] = ()  # index in `StepResult.token_ids` by index in `sampled`; empty without drafts

    def rollback(self, cache: KvCache) -> "SubmittedStep":
        """Undo the step's changes to its sequences. Return an empty step with the same number."""
        columns = self.columns
        starts, flags = columns.starts.tolist(), columns.samples.tolist()
        for sequence, start, samples in zip(columns.sequences, starts, flags, strict=True):
            sequence.num_in_flight -= samples
            sequence.num_drafts = 0
            cache.rollback(sequence, start)
        return self._replace(num_tokens=0, sampled=[], scored_prompts=[], drafts={}, first_rows=())

    @property
    def is_decode(self) -> bool:
        """Return True if every sequence computes only its last token and possibly draft tokens."""
        num_drafts = sum([len(draft) for draft in self.drafts.values()])
        return self.num_tokens - num_drafts == len(self.sampled) == len(self.columns.sequences) > 0

    def first_row(self, number: int) -> int:
        """Return the index in `StepResult.token_ids` of the first token that a sequence samples."""
        return self.first_rows[number] if self.first_rows else number

    def find_accepted(self, number: int, result: StepResult) -> range:
        """Return the indices of a sequence's valid tokens in `result.token_ids`.

        The last valid token is the first token that differs from its draft token, or the token after the draft.
        """
        first = end = self.first_row(number)
        if draft := self.drafts.get(number):
            token_ids, logprobs = result.token_ids, result.logprobs
            for token_id in draft:
                if token_ids[end] != token_id or math.isnan(logprobs[end]):
                    break
                end += 1
        return range(first, end + 1)

    def cut_draft(self, number: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence's draft. The other draft tokens are rejected."""
        sequence, draft = self.sampled[number], self.drafts[number]
        assert sequence is not None
        self.drafts[number] = draft[:length]
        if sequence.slot is not None:
            sequence.num_computed -= len(draft) - length

    def list_masked(self) -> list[tuple[int, int]]:
        """Return the sampled sequences that need a token mask, as (index in `sampled`, request ID)."""
        return [
            (number, sequence.request.request_id)
            for number, sequence in enumerate(self.sampled)
            if sequence is not None and sequence.request.structure is not None and not sequence.is_finished
        ]

    def list_grammar_tokens(self, result: StepResult) -> list[tuple[int, int]]:
        """Return the new tokens of unfinished sequences with a grammar, as (request ID, token ID)."""
        if not self.is_masked:
            return []
        found = list[tuple[int, int]]()
        for number, sequence in enumerate(self.sampled):
            if sequence is None or sequence.request.structure is None or sequence.is_finished:
                continue
            rows = self.find_accepted(number, result)
            token_ids = result.token_ids[rows.start : rows.stop]
            if not math.isnan(result.logprobs[rows[-1]]) and sequence.continues_after(token_ids):
                found += [(sequence.request.request_id, each) for each in (*token_ids, *sequence.forced_tokens)]
        return found

    def count_unfinished(self) -> int:
        """Return the number of sampled sequences that are not finished."""
        return sum(sequence is not None and not sequence.is_finished for sequence in self.sampled)

    def max_forced_tokens(self, number: int, num_sampled: int = 1) -> int:
        """Return how many forced tokens may follow the `num_sampled` tokens that a sequence samples in this step.

        Return 0 if another step in flight also samples for this sequence, because that token would come first.
        """
        sequence = self.sampled[number]
        if sequence is None or sequence.num_in_flight > 1:
            return 0
        return max(0, sequence.num_remaining - (num_sampled - 1))

    def append_forced_tokens(self, forced: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Append forced tokens after the sampled tokens. `forced` is the same as in `StepMasks`."""
        for row, token_ids in forced:
            sequence = self.sampled[bisect_right(self.first_rows, row) - 1 if self.first_rows else row]
            assert sequence is not None
            sequence.forced_tokens, sequence.has_forced_tokens = token_ids, True

    def defer_sampling(self, indices: Iterable[int]) -> None:
        """Skip sampling for some sequences, given as indices in `sampled`.

        A later step recomputes their last token and samples.
        """
        for index in indices:
            sequence = self.sampled[index]
            assert sequence is not None
            self.sampled[index] = None
            sequence.num_in_flight -= 1
            sequence.num_drafts = 0
            if sequence.slot is not None:
                sequence.num_computed -= 1 + len(self.drafts.get(index, ()))

    def find_largest_sequence(self) -> Sequence:
        """Return the sequence that probably needs the most memory. If there is a tie, return the newest sequence."""
        columns = self.columns
        counts, scores_prompt = columns.counts.tolist(), columns.scores_prompt.tolist()
        return max(zip(columns.sequences, counts, scores_prompt, strict=True), key=_memory_rank)[0]


def _memory_rank(entry: tuple[Sequence, int, bool]) -> tuple[bool, int, int, int]:
    sequence, num_tokens, scores_prompt = entry
    return scores_prompt, num_tokens, sequence.request.sampling.num_alternatives, sequence.arrival


class CachedDecodeBatch(NamedTuple):
    """The sequences that each decode one token in a step. Consecutive decode steps usually reuse this batch."""

    version: int  # `FairQueue.version`, which changes with slot assignments and shares
    added: list[Sequence]  # in scheduling order
    columns: BatchColumns
    tokens_by_fairness_key: Mapping[tuple[str, str], int]  # number of tokens by tenant and adapter


@dataclass
class StepBuilder:
    """Collects the sequences for one step, and the slot and block updates for the workers."""

    token_budget: int  # tokens that can still be added
    max_prefill_chunk_tokens: int | None = None  # maximum tokens per sequence
    can_chunk: bool = True
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens per sequence
    samples: list[bool] = field(default_factory=list)
    scored_prompts: dict[Sequence, int] = field(default_factory=dict)  # first computed token, by sequence
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    has_grammars: bool = False  # some sampled sequences have a grammar
    drafts: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)

    def add_tokens(self, sequence: Sequence, count: int, samples: bool, draft: tuple[int, ...] = ()) -> None:
        """Add `count` tokens of a running sequence, and then its draft tokens. Its blocks must be allocated."""
        if draft:
            self.drafts[sequence], sequence.num_drafts = draft, len(draft)
            count += len(draft)
        if sequence.num_sent_blocks < len(sequence.blocks):
            self._send_blocks(sequence)
        start = sequence.num_computed
        if sequence.prompt_logprobs is not None and start < len(sequence.request.prompt_ids) - 1:
            self.scored_prompts[sequence] = start
        self.sequences.append(sequence)
        self.counts.append(count)
        self.samples.append(samples)
        self.token_budget -= count
        sequence.num_computed = start + count
        if samples:
            sequence.num_in_flight += 1
            sequence.has_forced_tokens = False
            if sequence.request.structure is not None:
                self.has_grammars = True

    def _send_blocks(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        first = sequence.num_sent_blocks
        for index, block in enumerate(sequence.blocks[first:], first):
            self.new_blocks.append((sequence.slot, index, block))
        sequence.num_sent_blocks = len(sequence.blocks)

    def sum_tokens(self, first: int = 0) -> Mapping[tuple[str, str], int]:
        """Return token counts by tenant and adapter, for `sequences[first:]`."""
        sums: dict[tuple[str, str], int] = {}
        for sequence, count in zip(self.sequences[first:], self.counts[first:], strict=True):
            sums[sequence.fairness_key] = sums.get(sequence.fairness_key, 0) + count
        return sums

    def chunk_size(self, sequence: Sequence, reserve: int = 0) -> int:
        """Return how many tokens of a sequence fit into the step if `reserve` tokens are reserved for other sequences.

        All tokens in a chunk use the same adapter. If prompts cannot be split into chunks, the first sequence always
        fits.
        """
        num_tokens = sequence.num_uncomputed
        if not self.can_chunk:
            return num_tokens if num_tokens <= self.token_budget or not self.sequences else 0
        available = max(self.token_budget - reserve, min(self.token_budget, 1))
        num_tokens = min(num_tokens, sequence.num_base_tokens or num_tokens)
        return min(num_tokens, available, self.max_prefill_chunk_tokens or self.token_budget)

    def reuse_or_build(self, version: int, cached: CachedDecodeBatch | None) -> CachedDecodeBatch:
        """Return the decode batch with all sequences added so far. Each sequence must have one token.

        Reuse `cached` if it has the same sequences and slots.
        """
        if cached is None or cached.version != version or cached.added != self.sequences:
            return CachedDecodeBatch(version, self.sequences.copy(), self.build_columns(), self.sum_tokens())
        starts = np.array([sequence.num_computed - 1 for sequence in cached.columns.sequences], np.int64)
        return cached._replace(columns=cached.columns._replace(starts=starts))

    def build_columns(self) -> BatchColumns:
        """Return the plan columns, with the sequences sorted by adapter."""
        indices = [sequence.step_adapter_index for sequence in self.sequences]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        sequences = [self.sequences[position] for position in order]
        counts = [self.counts[position] for position in order]
        slots, starts = [sequence.slot for sequence in sequences], [sequence.num_computed for sequence in sequences]
        # One array for all columns: creating a small array costs as much as filling dozens of entries.
        columns = np.array([slots, starts, counts, [indices[position] for position in order]], dtype=np.int64)
        columns[1] -= columns[2]
        flags = [self.samples[position] for position in order], [each in self.scored_prompts for each in sequences]
        samples, scores_prompt = np.array(flags, dtype=np.bool_)
        return BatchColumns(sequences, columns[0], columns[1], columns[2], samples, scores_prompt, columns[3])

    def build_submitted_step(self, number: int, columns: BatchColumns, now: float) -> SubmittedStep:
        sampled: list[Sequence | None] = [*columns.sequences]
        if not all(self.samples):
            sampled = [*itertools.compress(sampled, columns.samples.tolist())]
        scored_prompts = [
            (each, self.scored_prompts[each]) for each in columns.sequences if each in self.scored_prompts
        ]
        step = SubmittedStep(number, sum(self.counts), now, columns, sampled, scored_prompts, self.has_grammars)
        if not self.drafts:
            return step
        drafts, first_rows, row = dict[int, tuple[int, ...]](), list[int](), 0
        for index, sequence in enumerate(sampled):
            first_rows.append(row)
            row += 1
            if sequence is not None and (draft := self.drafts.get(sequence)):
                drafts[index] = draft
                row += len(draft)
        return step._replace(drafts=drafts, first_rows=[*first_rows, row])

    def build_plan(
        self, step: int, columns: BatchColumns, adapter_ops: tuple[AdapterOp, ...], *, runs_draft_heads: bool
    ) -> StepPlan:
        return StepPlan(
            step,
            *columns[1:],
            new_sequences=tuple(self.new_sequences),
            new_blocks=np.array(self.new_blocks, np.int64) if self.new_blocks else np.empty((0, 3), np.int64),
            adapter_ops=adapter_ops,
            is_masked=self.has_grammars,
            drafts=self._build_drafts(columns.sequences) if self.drafts else None,
            runs_draft_heads=runs_draft_heads,
        )

    def _build_drafts(self, sequences: list[Sequence]) -> Drafts:
        drafts = [self.drafts.get(sequence, ()) for sequence in sequences]
        counts, token_ids = [len(draft) for draft in drafts], [*itertools.chain.from_iterable(drafts)]
        return Drafts(np.array(counts, np.int64), np.array(token_ids, np.int64))
