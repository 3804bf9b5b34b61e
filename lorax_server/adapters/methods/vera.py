"""VeRA: one pair of random matrices for all modules, of which each module scales the ranks and the outputs."""

import math

import torch


def make_projections(seed: int, rank: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw A and B as PEFT draws them for modules with up to so many inputs and outputs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for shape in ((rank, inputs), (outputs, rank)):
        bound = math.sqrt(3.0) * math.sqrt(2.0) / math.sqrt(shape[1])
        drawn.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    return drawn[0], drawn[1]
