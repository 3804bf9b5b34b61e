"""Expresses changes to whole base model matrices as LoRA factors `[rank, in]` and `[rank, out]` for one rank.

Matrices are processed in row blocks, because a whole float64 copy may not fit into memory.
"""

import math
from collections.abc import Callable, Iterator

import torch

from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import ProcessGroup

BLOCK_ROWS = 1024

Pause = Callable[[], object]


def compute_weight_difference(
    target: AdapterTarget, weight: torch.Tensor, pause: Pause
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors whose product is `weight` (unsharded, `[out, in]`) minus the base model matrix.

    One factor is the difference and the other is the identity matrix.
    """
    local = target.inputs.select(target.outputs.select(weight, dim=0), dim=1)
    difference = torch.empty_like(local)
    for rows, base in _iterate_row_blocks(target, torch.float32, pause):
        torch.sub(local[rows], base, out=difference[rows])
    outputs, inputs = difference.shape
    if inputs <= outputs:
        return torch.eye(inputs), difference.t()
    return difference, torch.eye(outputs)


def find_gram_size(target: AdapterTarget) -> int:
    """Return the size of the Gram matrix that `compute_smallest_components` decomposes."""
    return target.inputs.full if _uses_input_gram(target) else target.outputs.full


def compute_smallest_components(
    target: AdapterTarget, rank: int, group: ProcessGroup, pause: Pause
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors whose product is the base model matrix restricted to its `rank` smallest singular values.

    Uses the eigenvectors of the Gram matrix, which is all-reduced over the ranks. Float64 compensates for its squared
    condition number. All ranks must call this together.
    """
    inputs, outputs = target.inputs, target.outputs
    by_inputs = _uses_input_gram(target)
    gram = _compute_input_gram(target, pause) if by_inputs else _compute_output_gram(target, pause)
    if inputs.size != inputs.full or outputs.size != outputs.full:
        gram = group.all_reduce(gram)
    zeros = len(gram) - min(inputs.full, outputs.full)
    vectors = torch.linalg.eigh(gram)[1][:, zeros : zeros + rank].t()  # ascending
    blocks = _iterate_row_blocks(target, torch.float64, pause)
    if by_inputs:
        return vectors.float(), torch.cat([vectors @ matrix.t() for _, matrix in blocks], dim=1).float()
    projected = torch.zeros(rank, inputs.size, dtype=torch.float64)
    for rows, matrix in blocks:
        projected.addmm_(vectors[:, rows], matrix)
    return projected.float(), vectors.float()


def draw_vera_projections(seed: int, rank: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate VeRA's shared matrices A and B from a seed, with the same values as PEFT."""
    generator = torch.Generator().manual_seed(seed)
    projections = []
    for shape in ((rank, inputs), (outputs, rank)):
        bound = math.sqrt(3.0) * math.sqrt(2.0) / math.sqrt(shape[1])
        projections.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    return projections[0], projections[1]


def _uses_input_gram(target: AdapterTarget) -> bool:
    """Return True if the Gram matrix is computed over inputs, False if over outputs.

    The dimension of the Gram matrix must not be sharded. If neither dimension is sharded, the smaller dimension is
    used.
    """
    inputs, outputs = target.inputs, target.outputs
    can_multiply_rows = outputs.size == outputs.full
    return inputs.size == inputs.full and not (can_multiply_rows and outputs.full < inputs.full)


def _compute_input_gram(target: AdapterTarget, pause: Pause) -> torch.Tensor:
    gram = torch.zeros(target.inputs.size, target.inputs.size, dtype=torch.float64)
    for _, matrix in _iterate_row_blocks(target, torch.float64, pause):
        gram.addmm_(matrix.t(), matrix)
    return gram


def _compute_output_gram(target: AdapterTarget, pause: Pause) -> torch.Tensor:
    gram = torch.zeros(target.outputs.size, target.outputs.size, dtype=torch.float64)
    for rows, matrix in _iterate_row_blocks(target, torch.float64, pause):
        for other_rows, other in _iterate_row_blocks(target, torch.float64, pause):
            gram[rows, other_rows] = matrix @ other.t()
    return gram


def _iterate_row_blocks(
    target: AdapterTarget, dtype: torch.dtype, pause: Pause
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows, and the blocks of the base model matrix with these rows."""
    for start in range(0, target.outputs.size, BLOCK_ROWS):
        pause()
        rows = slice(start, min(start + BLOCK_ROWS, target.outputs.size))
        yield rows, target.read(rows).cpu().to(dtype)
