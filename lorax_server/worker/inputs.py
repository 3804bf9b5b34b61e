"""The inputs of a step: what its plan says, and tables on the device, so that plans need not repeat what is known."""

from typing import NamedTuple

import numpy as np
import torch

from lorax_server.plan import Ints, StepPlan
from lorax_server.sampling.sampler import RowSampling
from lorax_server.types import SamplingParams


class RowTables:
    """By row, each a running sequence: its tokens, its blocks, the length of its prompt, its sampling parameters.

    The host keeps a copy of whatever it knows, since reading the device's would wait for the device.
    """

    def __init__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, max_length + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(num_rows, -(-max_length // block_size), dtype=torch.int32, device=device)
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host_blocks = np.zeros(self.blocks.shape, np.int64)
        self.host_prompt_lengths = np.zeros(num_rows, np.int64)
        self.row_sampling = [RowSampling(SamplingParams())] * num_rows

    def write_new(self, plan: StepPlan) -> None:
        """Write the rows and blocks that are new in a step."""
        device = self.blocks.device
        for new in plan.new_rows:
            tokens = to_device(np.array(new.token_ids, np.int64), device)
            self.token_ids[new.row, : len(tokens)] = tokens
            self.prompt_lengths[new.row].fill_(new.prompt_length)  # an assignment would wait for the device
            self.host_prompt_lengths[new.row] = new.prompt_length
            self.row_sampling[new.row] = RowSampling.of(new.sampling, new.stop)
        if len(plan.new_blocks):
            new_blocks = plan.new_blocks.T
            self.host_blocks[new_blocks[0], new_blocks[1]] = new_blocks[2]
            rows, columns, blocks = to_device(new_blocks, device)
            self.blocks[rows, columns] = blocks.int()


class StepTokens(NamedTuple):
    """The tokens of a step, on the host."""

    sequences: Ints  # [tokens] index of the token's sequence in the plan
    positions: Ints  # [tokens]
    bounds: Ints  # [sequences + 1]
    last: Ints  # [sampling sequences] the token that the next one is chosen after

    @property
    def is_single(self) -> bool:
        """Return whether each sequence has one token."""
        return len(self.sequences) == len(self.bounds) - 1


def locate_tokens(plan: StepPlan) -> StepTokens:
    sequences = np.repeat(np.arange(len(plan.rows)), plan.counts)
    bounds = np.concatenate([[0], plan.counts.cumsum()])
    positions = np.arange(len(sequences)) - bounds[sequences] + plan.starts[sequences]
    return StepTokens(sequences, positions, bounds, (bounds[1:] - 1)[plan.samples])


def to_device(columns: Ints | list[Ints], device: torch.device) -> torch.Tensor:
    """Copy several columns of one length at once. To a GPU this takes pinned memory, or the host would wait."""
    host = torch.from_numpy(np.ascontiguousarray(columns))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DecodeInputs:
    """The inputs of steps in which each sequence has one token, at fixed places on the device.

    One copy brings all that the host knows. Only the last tokens and the blocks are gathered on the device. A batch may
    be padded: a row of padding has no length, and its key and value go nowhere.
    """

    def __init__(self, tables: RowTables, max_rows: int) -> None:
        device = tables.blocks.device
        self._tables = tables
        self._max_rows = max_rows
        # Five columns of int64 and two of int32, which take one together.
        self._columns = torch.zeros(6, max_rows, dtype=torch.int64, device=device)
        self.rows, self.cache_lengths, self.input_lengths, self.slots, self.prompt_lengths = self._columns[:5]
        self.position_ids, self.adapter_indices = self._columns[5].view(torch.int32).view(2, max_rows)
        self.block_tables = torch.zeros(max_rows, tables.blocks.shape[1], dtype=torch.int32, device=device)
        self.slots.fill_(-1)

    def write(self, plan: StepPlan, size: int) -> torch.Tensor:
        """Write a step padded to `size` rows. Return the tokens of those that are not padding."""
        count, tables = len(plan.rows), self._tables
        columns = np.zeros((6, self._max_rows), np.int64)
        columns[0, :count] = plan.rows
        columns[1, :count] = plan.starts
        columns[2, :count] = 1
        columns[3] = -1
        blocks = tables.host_blocks[plan.rows, plan.starts // tables.block_size]
        columns[3, :count] = blocks * tables.block_size + plan.starts % tables.block_size
        columns[4, :count] = tables.host_prompt_lengths[plan.rows]
        small = columns[5].view(np.int32).reshape(2, -1)
        small[0, :count] = plan.starts
        small[1, :count] = plan.adapter_indices
        host = torch.from_numpy(columns)
        self._columns.copy_(host.pin_memory() if self._columns.is_cuda else host, non_blocking=True)
        torch.index_select(tables.blocks, 0, self.rows[:size], out=self.block_tables[:size])
        return tables.token_ids[self.rows[:count], self.cache_lengths[:count]]
