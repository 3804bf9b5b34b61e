"""Builds step inputs from a step plan and from per-slot tables on the device."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lorax_server.kernels.device import columns_to_device, host_view, make_stream, to_device
from lorax_server.plan import Ints, StepMasks, StepPlan
from lorax_server.sampling.sampler import SequenceSampling, TokenMasks
from lorax_server.types import SamplingParams

CUDA_SEGMENT_BYTES = 20 * 2**20  # allocation granularity of torch's CUDA allocator, per stream
MAX_SPLIT_KEYS = 8192  # limit per sequence; with more keys, one attention call for all tokens is faster


class SelectedSlots(NamedTuple):
    """The `SlotTables` entries of selected slots. They are valid until one of these slots is written."""

    key: bytes
    slots: torch.Tensor
    token_offsets: Ints  # index of each slot's first token in the flattened `SlotTables.token_ids`
    prompt_lengths: torch.Tensor
    sequence_sampling: list[SequenceSampling]


class SlotTables:
    """Stores the tokens, KV blocks, prompt length and sampling parameters of each slot.

    The host has copies of all values except sampled tokens, because reading device memory would synchronize. Derived
    values are computed in numpy, which is faster than torch for small arrays.
    """

    def __init__(self, max_num_seqs: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.token_ids = torch.zeros(max_num_seqs, max_length + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(max_num_seqs, -(-max_length // block_size), dtype=torch.int32, device=device)
        self.host_prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self._host_tokens = host_view(self.token_ids.view(-1))
        self._host_blocks = host_view(self.blocks)
        self._shifts = np.zeros(self.blocks.shape, np.int64)  # KV slot minus token position, for each block
        self._last_sampling = SequenceSampling(SamplingParams())  # of the last new sequence
        self._sequence_sampling = [self._last_sampling] * max_num_seqs
        self._selected: SelectedSlots | None = None  # cached selection of the last step
        self._block_tables: tuple[bytes, int, torch.Tensor] | None = None  # (slots key, width, blocks) of the last step
        self.version = 0  # incremented when slots or blocks change

    def write_new(self, plan: StepPlan) -> None:
        """Write a step's new sequences and KV blocks to the tables."""
        device = self.blocks.device
        self.version += bool(plan.new_sequences) or len(plan.new_blocks) > 0
        for new in plan.new_sequences:
            tokens = to_device(np.array(new.token_ids, np.int64), device)
            self.token_ids[new.slot, : len(tokens)] = tokens
            self.host_prompt_lengths[new.slot] = new.prompt_length
            sampling = SequenceSampling.from_params(new.sampling, new.stop)
            # Equal parameters share an object, because comparing different objects takes longer.
            self._last_sampling = self._last_sampling if sampling == self._last_sampling else sampling
            self._sequence_sampling[new.slot] = self._last_sampling
            self._selected = None
        if len(plan.new_blocks):
            slots, columns, blocks = plan.new_blocks.T
            self._shifts[slots, columns] = (blocks - columns) * self.block_size
            self._block_tables = None
            if self._host_blocks is not None:
                self._host_blocks[slots, columns] = blocks
            else:
                on_device = columns_to_device([slots, columns, blocks], device)
                self.blocks[on_device[0], on_device[1]] = on_device[2].int()

    def select(self, slots: Ints) -> SelectedSlots:
        """Return the table entries of these slots. The last selection is reused if the slots are the same."""
        key = slots.tobytes()
        if self._selected is None or self._selected.key != key:
            on_device, prompt_lengths = columns_to_device([slots, self.host_prompt_lengths[slots]], self.blocks.device)
            token_offsets = slots * self.token_ids.shape[1]
            sequence_sampling = [self._sequence_sampling[slot] for slot in slots.tolist()]
            self._selected = SelectedSlots(key, on_device, token_offsets, prompt_lengths, sequence_sampling)
        return self._selected

    def select_blocks(self, selected: SelectedSlots, max_length: int) -> torch.Tensor:
        """Return the block table of the selected slots, with enough columns for `max_length` tokens."""
        width = -(-max_length // self.block_size)
        known = self._block_tables
        if known is None or known[0] != selected.key or known[1] != width:
            known = selected.key, width, self.blocks.index_select(0, selected.slots)[:, :width]
            self._block_tables = known
        return known[2]

    def write_drafts(self, plan: StepPlan) -> None:
        """Write a step's draft tokens to the token table, after the known tokens of their sequences."""
        assert plan.drafts is not None
        firsts = plan.slots * self.token_ids.shape[1] + plan.starts + plan.counts - plan.drafts.counts
        token_indices = _concatenate_ranges(firsts, plan.drafts.counts)
        if self._host_tokens is not None:
            self._host_tokens[token_indices] = plan.drafts.token_ids
        else:
            on_device = columns_to_device([token_indices, plan.drafts.token_ids], self.token_ids.device)
            self.token_ids.view(-1)[on_device[0]] = on_device[1]

    def compute_kv_slots(self, slots: Ints, positions: Ints) -> Ints:
        """Return the KV cache slot of each token, given its sequence slot and its position in the sequence."""
        kv_slots: Ints = self._shifts[slots, positions // self.block_size] + positions
        return kv_slots

    def read_tokens(self, token_indices: Ints) -> torch.Tensor:
        """Return the tokens at these indices of the flattened `token_ids`."""
        if self._host_tokens is not None:
            return torch.from_numpy(self._host_tokens[token_indices])
        return self.token_ids.view(-1)[to_device(token_indices, self.token_ids.device)]

    def write_tokens(self, token_indices: Ints, token_ids: torch.Tensor) -> None:
        if self._host_tokens is not None:
            self._host_tokens[token_indices] = token_ids.numpy()
        else:
            self.token_ids.view(-1)[to_device(token_indices, token_ids.device)] = token_ids


class StepLayout(NamedTuple):
    """A step's token counts and derived indices, on the host. Consecutive decode steps share a layout."""

    key: bytes
    counts: list[int]  # tokens per sequence
    max_count: int
    sequences: Ints  # [tokens] index of the token's sequence in the plan
    offsets: Ints  # [tokens] index of the token among its sequence's new tokens
    bounds: Ints  # [sequences + 1]
    last: Ints  # [sampled rows] index of the token whose logits are sampled
    rows: Ints  # [sampled rows] index of the row's sequence in the plan
    samples_all: bool  # True if every sequence has one sampled row


class StepTokens(NamedTuple):
    """The slots and positions of a step's tokens, on the host."""

    layout: StepLayout
    slots: Ints  # [tokens] slot of each token
    positions: Ints  # [tokens] position in the sequence
    lengths: Ints  # [sequences] sequence length, including this step's tokens

    @property
    def is_single(self) -> bool:
        """Return True if every sequence has exactly one token in the step."""
        return self.layout.max_count == 1


def build_step_tokens(plan: StepPlan, cached_layout: StepLayout | None = None) -> StepTokens:
    """Return the slots and positions of a step's tokens. The layout `cached_layout` is reused if it fits this step."""
    layout = cached_layout
    if layout is None or layout.key != _layout_key(plan):
        layout = _build_layout(plan)
    lengths = plan.starts + plan.counts
    if layout.max_count == 1:
        return StepTokens(layout, plan.slots, plan.starts, lengths)
    slots, positions = plan.slots[layout.sequences], plan.starts[layout.sequences] + layout.offsets
    return StepTokens(layout, slots, positions, lengths)


def _layout_key(plan: StepPlan) -> bytes:
    key = plan.counts.tobytes() + plan.samples.tobytes()
    return key if plan.drafts is None else key + plan.drafts.counts.tobytes()


def _build_layout(plan: StepPlan) -> StepLayout:
    counts = plan.counts.tolist()
    sequences = np.repeat(np.arange(len(counts)), plan.counts)
    bounds = np.concatenate([[0], plan.counts.cumsum()])
    last, rows = (bounds[1:] - 1)[plan.samples], np.flatnonzero(plan.samples)
    if plan.drafts is not None:
        num_drafts = plan.drafts.counts[rows]
        last, rows = _concatenate_ranges(last - num_drafts, num_drafts + 1), np.repeat(rows, num_drafts + 1)
    return StepLayout(
        _layout_key(plan),
        counts,
        max(counts),
        sequences,
        np.arange(len(sequences)) - bounds[sequences],
        bounds,
        last,
        rows,
        bool(plan.samples.all()) and plan.drafts is None,
    )


def _concatenate_ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenated ranges `[start, start + count)`."""
    ends = counts.cumsum()
    ranges: Ints = np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)
    return ranges


def split_forced_tokens(plan: StepPlan, prompt_lengths: Ints) -> StepPlan:
    """Return a plan in which each forced or draft token is a separate entry, like a decode token.

    The tokens then use the same CPU graphs as decode tokens, with bitwise equal results. Prompts are not split. Long
    sequences are split only if they have draft tokens. Whether a sequence is split does not depend on other sequences.
    `prompt_lengths` is indexed by slot.
    """
    num_keys = plan.counts * (plan.starts + plan.counts)
    num_drafts = np.zeros_like(plan.counts) if plan.drafts is None else plan.drafts.counts
    is_short = (num_keys <= MAX_SPLIT_KEYS) | (num_drafts > 0)
    several = (plan.counts > 1) & is_short & (plan.starts >= prompt_lengths[plan.slots])
    assert several[num_drafts > 0].all(), "draft tokens must follow at least one generated token"
    if True not in several.tolist():
        return plan
    repeats = np.where(several, plan.counts, 1)
    sequences, ends = np.repeat(np.arange(len(repeats)), repeats), repeats.cumsum()
    token_indices = np.arange(len(sequences))
    return replace(
        plan,
        slots=plan.slots[sequences],
        starts=plan.starts[sequences] + token_indices - (ends - repeats)[sequences],
        counts=np.where(several, 1, plan.counts)[sequences],
        samples=plan.samples[sequences] & (token_indices + 1 + num_drafts[sequences] >= ends[sequences]),
        scores_prompt=plan.scores_prompt[sequences],
        adapter_indices=plan.adapter_indices[sequences],
        drafts=None,  # all sequences with draft tokens are split
    )


def count_mask_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Return the maximum GPU memory for `MaskUploader`, in bytes. Its stream has a separate memory pool.

    The masks of two steps can be in flight at the same time.
    """
    num_bytes = max_num_seqs * (torch.int64.itemsize + count_mask_words(vocab_size) * torch.int32.itemsize)
    return 2 * -(-num_bytes // CUDA_SEGMENT_BYTES) * CUDA_SEGMENT_BYTES


def count_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class MaskUploader:
    """Uploads token masks. On a GPU, the upload overlaps the forward pass, and only sampling waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = make_stream(device)

    def upload(self, masks: StepMasks, vocab_size: int) -> TokenMasks:
        """Copy token masks to the device, and return them padded to `vocab_size` tokens."""
        padded = self._write(masks, count_mask_words(vocab_size))
        if self._stream is None:
            return TokenMasks(to_device(masks.rows, self._device), padded)
        with torch.cuda.stream(self._stream):
            sent = TokenMasks(to_device(masks.rows, self._device), padded.to(self._device, non_blocking=True))
        steps = torch.cuda.current_stream(self._device)
        steps.wait_stream(self._stream)
        for tensor in sent:
            tensor.record_stream(steps)  # keeps the allocator from reusing the memory during the step
        return sent

    def _write(self, masks: StepMasks, width: int) -> torch.Tensor:
        """Return the masks in one host tensor, padded to `width` words. The tensor is pinned if there is a GPU."""
        written = torch.empty(len(masks.rows), width, dtype=torch.int32, pin_memory=self._stream is not None)
        for row, mask in zip(written.numpy(), masks.masks, strict=True):
            row[: len(mask)] = mask[:width]
            row[len(mask) :] = 0
        return written


class _ColumnSlices(NamedTuple):
    """The position of each column in the int64 array of step inputs. Two int32 values are packed into each int64
    element.
    """

    sequences: slice  # three columns: slots, numbers of cached tokens, numbers of new tokens
    bounds: slice  # one int32 column: sequence bounds
    tokens: slice  # three columns: KV slots, prompt lengths, indices in the token table
    small: slice  # two int32 columns: positions, adapter indices

    @classmethod
    def compute(cls, num_tokens: int, num_seqs: int) -> "_ColumnSlices":
        sizes = 3 * num_seqs, num_seqs // 2 + 1, 3 * num_tokens, num_tokens
        ends = list(itertools.accumulate(sizes))
        return cls(*(slice(end - size, end) for size, end in zip(sizes, ends, strict=True)))


class _Columns(NamedTuple):
    """A step's inputs on the host. All arrays are views of `buffer`."""

    buffer: Ints
    by_seq: Ints  # [3, sequences]
    bounds: npt.NDArray[np.int32]
    by_token: Ints  # [3, tokens]
    small: npt.NDArray[np.int32]  # [2, tokens]

    @classmethod
    def split(cls, buffer: Ints, column_slices: _ColumnSlices) -> "_Columns":
        by_seq, by_token = buffer[column_slices.sequences].reshape(3, -1), buffer[column_slices.tokens].reshape(3, -1)
        small = buffer[column_slices.small].view(np.int32).reshape(2, -1)
        return cls(buffer, by_seq, buffer[column_slices.bounds].view(np.int32), by_token, small)


class StaticInputs:
    """Step inputs at fixed device addresses, for graphs.

    On a GPU, a single copy uploads all values that the host knows. On a CPU, these values are written in place. Tokens
    and block tables are gathered on the device. Padding sequences have length 0. Padding tokens have no KV cache
    entries.
    """

    def __init__(self, tables: SlotTables, num_tokens: int, num_seqs: int) -> None:
        """Allocate the inputs for steps with at most `num_tokens` tokens and `num_seqs` sequences."""
        device = tables.blocks.device
        self._tables = tables
        self._column_slices = at = _ColumnSlices.compute(num_tokens, num_seqs)
        self._buffer = torch.zeros(at.small.stop, dtype=torch.int64, device=device)
        buffer = host_view(self._buffer)
        self._in_place = None if buffer is None else _Columns.split(buffer, at)
        self._written: tuple[object, ...] = ()  # key of the current contents, which the next step may reuse
        self.slots, self.cache_lengths, self.input_lengths = self._buffer[at.sequences].view(3, -1)
        self.cu_seqlens = self._buffer[at.bounds].view(torch.int32)[: num_seqs + 1]
        self.kv_slots, self.prompt_lengths, self.token_indices = self._buffer[at.tokens].view(3, -1)
        self.position_ids, self.adapter_indices = self._buffer[at.small].view(torch.int32).view(2, -1)
        self.block_tables = torch.zeros(num_seqs, tables.blocks.shape[1], dtype=torch.int32, device=device)
        self.kv_slots.fill_(-1)

    def write(self, plan: StepPlan, tokens: StepTokens, padded_seqs: int) -> torch.Tensor:
        """Write the inputs of a step, and return its token IDs on the device."""
        count, tables, columns = len(tokens.slots), self._tables, self._in_place
        if columns is not None:
            key = plan.slots.tobytes(), plan.adapter_indices.tobytes(), tokens.layout.key, padded_seqs, tables.version
            if key != self._written:
                self._written = ()
                columns.buffer.fill(0)
                self._write_composition(columns, plan, tokens)
                self._select_blocks(padded_seqs)
                self._written = key
            self._write_positions(columns, plan, tokens)
            return tables.read_tokens(columns.by_token[2, :count])
        columns = _Columns.split(np.zeros(self._column_slices.small.stop, np.int64), self._column_slices)
        self._write_composition(columns, plan, tokens)
        self._write_positions(columns, plan, tokens)
        self._buffer.copy_(torch.from_numpy(columns.buffer).pin_memory(), non_blocking=True)
        self._select_blocks(padded_seqs)
        return tables.token_ids.view(-1).index_select(0, self.token_indices[:count])

    def _write_composition(self, columns: _Columns, plan: StepPlan, tokens: StepTokens) -> None:
        """Write the columns that do not change while the same sequences decode."""
        num_seqs, count = len(plan.slots), len(tokens.slots)
        columns.by_seq[0, :num_seqs] = plan.slots
        columns.by_seq[2, :num_seqs] = plan.counts
        columns.bounds[: num_seqs + 1] = tokens.layout.bounds
        columns.bounds[num_seqs + 1 :] = count
        columns.by_token[0, count:] = -1
        columns.by_token[1, :count] = self._tables.host_prompt_lengths[tokens.slots]
        columns.small[1, :count] = plan.adapter_indices[tokens.layout.sequences]

    def _write_positions(self, columns: _Columns, plan: StepPlan, tokens: StepTokens) -> None:
        """Write the columns that change in every step."""
        num_seqs, count, tables = len(plan.slots), len(tokens.slots), self._tables
        columns.by_seq[1, :num_seqs] = plan.starts
        columns.by_token[0, :count] = tables.compute_kv_slots(tokens.slots, tokens.positions)
        columns.by_token[2, :count] = tokens.slots * tables.token_ids.shape[1] + tokens.positions
        columns.small[0, :count] = tokens.positions

    def _select_blocks(self, padded_seqs: int) -> None:
        torch.index_select(self._tables.blocks, 0, self.slots[:padded_seqs], out=self.block_tables[:padded_seqs])
