"""Changes of whole matrices of the base model, as pairs of factors `[rank, in]` and `[rank, out]` of a rank's part.

The matrices are read, taken to the CPU and cast in stretches of rows: as a whole they may be larger than what is free.
"""

import math
from collections.abc import Callable, Iterator

import torch

from lorax_server.adapters.target import AdapterTarget
from lorax_server.distributed import ProcessGroup

ROWS = 1024  # of a stretch

Pause = Callable[[], object]


def find_difference(target: AdapterTarget, weight: torch.Tensor, pause: Pause) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what has to be added to the base model's matrix to get `weight`, a whole `[out, in]`.

    One of the factors is the difference itself, the other one the identity.
    """
    local = target.inputs.take(target.outputs.take(weight, dim=0), dim=1)
    difference = torch.empty_like(local)
    for rows, base in _stretches(target, torch.float32, pause):
        torch.sub(local[rows], base, out=difference[rows])
    outputs, inputs = difference.shape
    if inputs <= outputs:
        return torch.eye(inputs), difference.t()
    return difference, torch.eye(outputs)


def find_product_size(target: AdapterTarget) -> int:
    """Return the number of rows of the products in which `find_smallest` finds singular values."""
    return target.inputs.full if _multiplies_inputs(target) else target.outputs.full


def find_smallest(
    target: AdapterTarget, rank: int, group: ProcessGroup, pause: Pause
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part of the base model's matrix that has its smallest singular values, so many of them.

    They are found by the products of rows, or of columns, which ranks add up. Float64 makes up for the squares. All
    ranks call this together.
    """
    inputs, outputs = target.inputs, target.outputs
    by_inputs = _multiplies_inputs(target)
    products = _multiply_columns(target, pause) if by_inputs else _multiply_rows(target, pause)
    if inputs.size != inputs.full or outputs.size != outputs.full:
        products = group.all_reduce(products)
    zeros = len(products) - min(inputs.full, outputs.full)
    vectors = torch.linalg.eigh(products)[1][:, zeros : zeros + rank].t()  # ascending
    stretches = _stretches(target, torch.float64, pause)
    if by_inputs:
        return vectors.float(), torch.cat([vectors @ matrix.t() for _, matrix in stretches], dim=1).float()
    parts = torch.zeros(rank, inputs.size, dtype=torch.float64)
    for rows, matrix in stretches:
        parts.addmm_(vectors[:, rows], matrix)
    return parts.float(), vectors.float()


def make_projections(seed: int, rank: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw VeRA's shared A and B as PEFT draws them. Each module scales the ranks and the outputs of a part of them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for shape in ((rank, inputs), (outputs, rank)):
        bound = math.sqrt(3.0) * math.sqrt(2.0) / math.sqrt(shape[1])
        drawn.append(torch.empty(shape).uniform_(-bound, bound, generator=generator))
    return drawn[0], drawn[1]


def _multiplies_inputs(target: AdapterTarget) -> bool:
    """Tell whether columns are multiplied: those of a whole side, of the shorter one where both are. Their order, which
    may not be the checkpoint's, does not matter: it is that of the factors, too."""
    inputs, outputs = target.inputs, target.outputs
    can_multiply_rows = outputs.size == outputs.full
    return inputs.size == inputs.full and not (can_multiply_rows and outputs.full < inputs.full)


def _multiply_columns(target: AdapterTarget, pause: Pause) -> torch.Tensor:
    products = torch.zeros(target.inputs.size, target.inputs.size, dtype=torch.float64)
    for _, matrix in _stretches(target, torch.float64, pause):
        products.addmm_(matrix.t(), matrix)
    return products


def _multiply_rows(target: AdapterTarget, pause: Pause) -> torch.Tensor:
    products = torch.zeros(target.outputs.size, target.outputs.size, dtype=torch.float64)
    for rows, matrix in _stretches(target, torch.float64, pause):
        for others, other in _stretches(target, torch.float64, pause):
            products[rows, others] = matrix @ other.t()
    return products


def _stretches(target: AdapterTarget, dtype: torch.dtype, pause: Pause) -> Iterator[tuple[slice, torch.Tensor]]:
    """Go through the rows of the base model's matrix."""
    for start in range(0, target.outputs.size, ROWS):
        pause()
        rows = slice(start, min(start + ROWS, target.outputs.size))
        yield rows, target.read(rows).cpu().to(dtype)
