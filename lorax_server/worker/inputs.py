"""The inputs of a step: what its plan says, and tables on the device, so that plans need not repeat what is known."""

from typing import NamedTuple

import numpy as np
import torch

from lorax_server.plan import Ints, StepPlan
from lorax_server.sampling.sampler import RowSampling
from lorax_server.types import SamplingParams


class RowTables:
    """By row, each a running sequence: its tokens, its blocks, the length of its prompt, its sampling parameters."""

    def __init__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, max_length + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(num_rows, -(-max_length // block_size), dtype=torch.int32, device=device)
        self.host_prompt_lengths = [0] * num_rows
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_sampling = [RowSampling(SamplingParams())] * num_rows

    def write_new(self, plan: StepPlan) -> None:
        """Write the rows and blocks that are new in a step."""
        for new in plan.new_rows:
            tokens = torch.tensor(new.token_ids)
            self.token_ids[new.row, : len(tokens)] = tokens.to(self.token_ids.device, non_blocking=True)
            self.prompt_lengths[new.row] = self.host_prompt_lengths[new.row] = new.prompt_length
            self.row_sampling[new.row] = RowSampling.of(new.sampling, new.stop)
        if len(plan.new_blocks):
            rows, columns, blocks = to_device(plan.new_blocks.T, self.blocks.device)
            self.blocks[rows, columns] = blocks.int()


class StepTokens(NamedTuple):
    """The tokens of a step, on the host."""

    sequences: Ints  # [tokens] index of the token's sequence in the plan
    positions: Ints  # [tokens]
    bounds: Ints  # [sequences + 1]
    last: Ints  # [sampling sequences] the token that the next one is chosen after


def locate_tokens(plan: StepPlan) -> StepTokens:
    sequences = np.repeat(np.arange(len(plan.rows)), plan.counts)
    bounds = np.concatenate([[0], plan.counts.cumsum()])
    positions = np.arange(len(sequences)) - bounds[sequences] + plan.starts[sequences]
    return StepTokens(sequences, positions, bounds, (bounds[1:] - 1)[plan.samples])


def to_device(columns: Ints | list[Ints], device: torch.device) -> torch.Tensor:
    """Copy several columns of one length at once."""
    return torch.from_numpy(np.ascontiguousarray(columns)).to(device, non_blocking=True)
