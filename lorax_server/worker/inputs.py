"""What a worker remembers of each running sequence, in tables on the device, so that a step need not be told again."""

import numpy as np
import torch

from lorax_server.plan import Ints, StepPlan
from lorax_server.sampling.sampler import RowSampling
from lorax_server.types import SamplingParams


class RowTables:
    """By row: tokens, blocks and the length of the prompt on the device, and what is wanted of the next token."""

    def __init__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, max_length + 1, dtype=torch.int64, device=device)
        self.blocks = torch.zeros(num_rows, -(-max_length // block_size), dtype=torch.int32, device=device)
        self.host_prompt_lengths = [0] * num_rows
        self.prompt_lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.row_sampling = [RowSampling(SamplingParams())] * num_rows

    def take(self, plan: StepPlan) -> None:
        """The rows and blocks that are new in a step."""
        for new in plan.new_rows:
            tokens = torch.tensor(new.token_ids)
            self.token_ids[new.row, : len(tokens)] = tokens.to(self.token_ids.device, non_blocking=True)
            self.prompt_lengths[new.row] = self.host_prompt_lengths[new.row] = new.prompt_length
            self.row_sampling[new.row] = RowSampling.of(new.sampling, new.stop)
        if len(plan.new_blocks):
            rows, places, blocks = to_device(plan.new_blocks.T, self.blocks.device)
            self.blocks[rows, places] = blocks.int()


def to_device(columns: Ints | list[Ints], device: torch.device) -> torch.Tensor:
    """Several columns of one length in one copy."""
    return torch.from_numpy(np.ascontiguousarray(columns)).to(device, non_blocking=True)
