"""The inputs of a step: what its plan says, and tables on the device, so that plans need not repeat what is known."""

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

SEGMENT_BYTES = 20 * 2**20  # that torch's allocator of a GPU takes at once for a stream
MAX_UNROLLED_KEYS = 8192  # of all slots of a sequence: more are read faster where its tokens share them


class SelectedSlots(NamedTuple):
    """Some slots of the tables, as steps need them. They serve until one of them is written again."""

    key: bytes
    slots: torch.Tensor
    first_places: Ints  # where their tokens begin in `SlotTables.token_ids`, counted from its first row on
    prompt_lengths: torch.Tensor
    sequence_sampling: list[SequenceSampling]


class SlotTables:
    """By slot, each a running sequence: its tokens, its blocks, the length of its prompt, its sampling parameters.

    The host keeps a copy of whatever it knows, since reading the device's would wait for the device. What follows from
    it is computed on the host: there an operation on a few numbers takes a fraction of torch's time.
    """

    def __init__(self, max_num_seqs: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.token_ids = torch.zeros(max_num_seqs, max_length + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(max_num_seqs, -(-max_length // block_size), dtype=torch.int32, device=device)
        self.host_prompt_lengths = np.zeros(max_num_seqs, np.int64)
        self._host_tokens = host_view(self.token_ids.view(-1))
        self._host_blocks = host_view(self.blocks)
        self._shifts = np.zeros(self.blocks.shape, np.int64)  # kv_slots of a block, less the positions of their tokens
        self._sequence_sampling = [SequenceSampling(SamplingParams())] * max_num_seqs
        self._selected: SelectedSlots | None = None  # those of the last step
        self._block_tables: tuple[bytes, int, torch.Tensor] | None = None  # likewise, with their width
        self.version = 0  # of slots and blocks

    def write_new(self, plan: StepPlan) -> None:
        """Write the slots and blocks that are new in a step."""
        device = self.blocks.device
        self.version += bool(plan.new_sequences) or len(plan.new_blocks) > 0
        for new in plan.new_sequences:
            tokens = to_device(np.array(new.token_ids, np.int64), device)
            self.token_ids[new.slot, : len(tokens)] = tokens
            self.host_prompt_lengths[new.slot] = new.prompt_length
            self._sequence_sampling[new.slot] = SequenceSampling.of(new.sampling, new.stop)
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
        """Return what is known of some slots: the last answer, where they are the same and none of them is new."""
        key = slots.tobytes()
        if self._selected is None or self._selected.key != key:
            on_device, prompt_lengths = columns_to_device([slots, self.host_prompt_lengths[slots]], self.blocks.device)
            first_places = slots * self.token_ids.shape[1]
            sequence_sampling = [self._sequence_sampling[slot] for slot in slots]
            self._selected = SelectedSlots(key, on_device, first_places, prompt_lengths, sequence_sampling)
        return self._selected

    def take_blocks(self, selected: SelectedSlots, max_length: int) -> torch.Tensor:
        """Return the blocks of slots, as many columns as the longest of them needs."""
        width = -(-max_length // self.block_size)
        known = self._block_tables
        if known is None or known[0] != selected.key or known[1] != width:
            known = selected.key, width, self.blocks.index_select(0, selected.slots)[:, :width]
            self._block_tables = known
        return known[2]

    def find_kv_slots(self, slots: Ints, positions: Ints) -> Ints:
        """Return the places of tokens in the cache."""
        kv_slots: Ints = self._shifts[slots, positions // self.block_size] + positions
        return kv_slots

    def read_tokens(self, places: Ints) -> torch.Tensor:
        """Return tokens at places of `token_ids`, counted from its first row on."""
        if self._host_tokens is not None:
            return torch.from_numpy(self._host_tokens[places])
        return self.token_ids.view(-1)[to_device(places, self.token_ids.device)]

    def write_tokens(self, places: Ints, token_ids: torch.Tensor) -> None:
        if self._host_tokens is not None:
            self._host_tokens[places] = token_ids.numpy()
        else:
            self.token_ids.view(-1)[to_device(places, token_ids.device)] = token_ids


class StepLayout(NamedTuple):
    """The tokens of a step by their numbers alone, which decode steps repeat; on the host."""

    key: bytes
    counts: list[int]  # of each sequence
    max_count: int
    sequences: Ints  # [tokens] index of the token's sequence in the plan
    offsets: Ints  # [tokens] of the token among those of its sequence
    bounds: Ints  # [sequences + 1]
    last: Ints  # [sampling sequences] the token that the next one is chosen after
    samples_all: bool


class StepTokens(NamedTuple):
    """The tokens of a step, on the host."""

    layout: StepLayout
    slots: Ints  # [tokens]
    positions: Ints  # [tokens]
    lengths: Ints  # [sequences] up to the last token of the step

    @property
    def is_single(self) -> bool:
        """Return whether each sequence has one token."""
        return self.layout.max_count == 1


def locate_tokens(plan: StepPlan, known: StepLayout | None = None) -> StepTokens:
    """Find the tokens of a step. A layout that is known serves again, if it is the step's."""
    layout = known
    if layout is None or layout.key != plan.counts.tobytes() + plan.samples.tobytes():
        layout = _lay_out(plan)
    lengths = plan.starts + plan.counts
    if layout.max_count == 1:
        return StepTokens(layout, plan.slots, plan.starts, lengths)
    slots, positions = plan.slots[layout.sequences], plan.starts[layout.sequences] + layout.offsets
    return StepTokens(layout, slots, positions, lengths)


def _lay_out(plan: StepPlan) -> StepLayout:
    key, counts = plan.counts.tobytes() + plan.samples.tobytes(), plan.counts.tolist()
    sequences = np.repeat(np.arange(len(counts)), plan.counts)
    bounds = np.concatenate([[0], plan.counts.cumsum()])
    return StepLayout(
        key,
        counts,
        max(counts),
        sequences,
        np.arange(len(sequences)) - bounds[sequences],
        bounds,
        (bounds[1:] - 1)[plan.samples],
        bool(plan.samples.all()),
    )


def unroll(plan: StepPlan, prompt_lengths: Ints) -> StepPlan:
    """Give each token of an answer an entry of its own, where several come at once since a structure forces them.

    So they are computed as if they had come one by one: by the same program of a CPU, and to the same bits. Prompts
    stay whole, and so do long sequences: whether others are in the step changes nothing. `prompt_lengths` are those of
    all slots.
    """
    num_keys = plan.counts * (plan.starts + plan.counts)
    several = (plan.counts > 1) & (num_keys <= MAX_UNROLLED_KEYS) & (plan.starts >= prompt_lengths[plan.slots])
    if True not in several.tolist():
        return plan
    repeats = np.where(several, plan.counts, 1)
    sequences, ends = np.repeat(np.arange(len(repeats)), repeats), repeats.cumsum()
    places = np.arange(len(sequences))
    return replace(
        plan,
        slots=plan.slots[sequences],
        starts=plan.starts[sequences] + places - (ends - repeats)[sequences],
        counts=np.where(several, 1, plan.counts)[sequences],
        samples=plan.samples[sequences] & (places + 1 == ends[sequences]),
        scores_prompt=plan.scores_prompt[sequences],
        adapter_indices=plan.adapter_indices[sequences],
    )


def count_mask_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Return the most bytes that torch takes of a GPU for `MaskLane`, whose stream shares no memory with others.

    They are for the masks of a step, and for those of the step before, which may not have ended yet.
    """
    num_bytes = max_num_seqs * (torch.int64.itemsize + count_mask_words(vocab_size) * torch.int32.itemsize)
    return 2 * -(-num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES


def count_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class MaskLane:
    """Takes masks to a device, on a GPU beside the forward, which runs meanwhile: only what comes after waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = make_stream(device)

    def send(self, masks: StepMasks, vocab_size: int) -> TokenMasks:
        """Return masks on the device, as wide as its scores."""
        words = self._write(masks, count_mask_words(vocab_size))
        if self._stream is None:
            return TokenMasks(to_device(masks.rows, self._device), words)
        with torch.cuda.stream(self._stream):
            sent = TokenMasks(to_device(masks.rows, self._device), words.to(self._device, non_blocking=True))
        steps = torch.cuda.current_stream(self._device)
        steps.wait_stream(self._stream)
        for tensor in sent:
            tensor.record_stream(steps)  # or its memory would be used again while a step reads it
        return sent

    def _write(self, masks: StepMasks, width: int) -> torch.Tensor:
        """Copy masks of any width, to where a GPU can fetch them."""
        written = torch.empty(len(masks.rows), width, dtype=torch.int32, pin_memory=self._stream is not None)
        for row, mask in zip(written.numpy(), masks.words, strict=True):
            row[: len(mask)] = mask[:width]
            row[len(mask) :] = 0
        return written


class _Places(NamedTuple):
    """Columns of the inputs of a step, as parts of one array of int64, in which int32 takes half the room."""

    sequences: slice  # three columns: slots, tokens in the cache, tokens of this step
    bounds: slice  # of the sequences, int32
    tokens: slice  # three columns: kv_slots, prompt lengths, places in the table of tokens
    small: slice  # two columns of int32: positions, adapters

    @classmethod
    def lay_out(cls, num_tokens: int, num_seqs: int) -> "_Places":
        sizes = 3 * num_seqs, num_seqs // 2 + 1, 3 * num_tokens, num_tokens
        ends = list(itertools.accumulate(sizes))
        return cls(*(slice(end - size, end) for size, end in zip(sizes, ends, strict=True)))


class _Columns(NamedTuple):
    """The inputs of a step on the host."""

    numbers: Ints  # all of them
    by_seq: Ints  # [3, sequences]
    bounds: npt.NDArray[np.int32]
    by_token: Ints  # [3, tokens]
    small: npt.NDArray[np.int32]  # [2, tokens]

    @classmethod
    def divide(cls, numbers: Ints, at: _Places) -> "_Columns":
        by_seq, by_token = numbers[at.sequences].reshape(3, -1), numbers[at.tokens].reshape(3, -1)
        small = numbers[at.small].view(np.int32).reshape(2, -1)
        return cls(numbers, by_seq, numbers[at.bounds].view(np.int32), by_token, small)


class FixedInputs:
    """The inputs of a step at fixed places on the device, for a graph that reads them there.

    One copy brings all that the host knows; on a CPU it is written where it is read. Only the tokens and the blocks are
    gathered on the device. A step may be padded: a sequence of padding has no length, and the key and value of a token
    of padding go nowhere.
    """

    def __init__(self, tables: SlotTables, num_tokens: int, num_seqs: int) -> None:
        """`num_tokens` and `num_seqs` are the most of a step."""
        device = tables.blocks.device
        self._tables = tables
        self._at = at = _Places.lay_out(num_tokens, num_seqs)
        self._numbers = torch.zeros(at.small.stop, dtype=torch.int64, device=device)
        numbers = host_view(self._numbers)
        self._in_place = None if numbers is None else _Columns.divide(numbers, at)
        self._written: tuple[object, ...] = ()  # what was written that the next step may repeat
        self.slots, self.cache_lengths, self.input_lengths = self._numbers[at.sequences].view(3, -1)
        self.cu_seqlens = self._numbers[at.bounds].view(torch.int32)[: num_seqs + 1]
        self.kv_slots, self.prompt_lengths, self.places = self._numbers[at.tokens].view(3, -1)
        self.position_ids, self.adapter_indices = self._numbers[at.small].view(torch.int32).view(2, -1)
        self.block_tables = torch.zeros(num_seqs, tables.blocks.shape[1], dtype=torch.int32, device=device)
        self.kv_slots.fill_(-1)

    def write(self, plan: StepPlan, tokens: StepTokens, padded_seqs: int) -> torch.Tensor:
        """Write a step. Return its tokens."""
        count, tables, columns = len(tokens.slots), self._tables, self._in_place
        if columns is not None:
            key = plan.slots.tobytes(), plan.adapter_indices.tobytes(), tokens.layout.key, padded_seqs, tables.version
            if key != self._written:
                self._written = ()
                columns.numbers.fill(0)
                self._write_all(columns, plan, tokens)
                self._take_blocks(padded_seqs)
                self._written = key
            self._write_places(columns, plan, tokens)
            return tables.read_tokens(columns.by_token[2, :count])
        columns = _Columns.divide(np.zeros(self._at.small.stop, np.int64), self._at)
        self._write_all(columns, plan, tokens)
        self._write_places(columns, plan, tokens)
        self._numbers.copy_(torch.from_numpy(columns.numbers).pin_memory(), non_blocking=True)
        self._take_blocks(padded_seqs)
        return tables.token_ids.view(-1).index_select(0, self.places[:count])

    def _write_all(self, columns: _Columns, plan: StepPlan, tokens: StepTokens) -> None:
        """Write what stays the same while the same sequences decode."""
        num_seqs, count = len(plan.slots), len(tokens.slots)
        columns.by_seq[0, :num_seqs] = plan.slots
        columns.by_seq[2, :num_seqs] = plan.counts
        columns.bounds[: num_seqs + 1] = tokens.layout.bounds
        columns.bounds[num_seqs + 1 :] = count
        columns.by_token[0, count:] = -1
        columns.by_token[1, :count] = self._tables.host_prompt_lengths[tokens.slots]
        columns.small[1, :count] = plan.adapter_indices[tokens.layout.sequences]

    def _write_places(self, columns: _Columns, plan: StepPlan, tokens: StepTokens) -> None:
        """Write what each step changes."""
        num_seqs, count, tables = len(plan.slots), len(tokens.slots), self._tables
        columns.by_seq[1, :num_seqs] = plan.starts
        columns.by_token[0, :count] = tables.find_kv_slots(tokens.slots, tokens.positions)
        columns.by_token[2, :count] = tokens.slots * tables.token_ids.shape[1] + tokens.positions
        columns.small[0, :count] = tokens.positions

    def _take_blocks(self, padded_seqs: int) -> None:
        torch.index_select(self._tables.blocks, 0, self.slots[:padded_seqs], out=self.block_tables[:padded_seqs])
