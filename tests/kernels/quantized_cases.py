"""Random quantized matrices in all formats."""

from dataclasses import replace
from itertools import product

import torch

from lorax_server.kernels import BlockMatrix, ReorderedMatrix
from lorax_server.kernels.quantized import float8_levels

Kind = tuple[int, int, str]  # bits, inputs per block, and "plain", "offsets" or "levels"
BLOCKS = (16, 32, 64, 96, 192)
KINDS: list[Kind] = list(product((4, 8), BLOCKS, ("plain", "offsets", "levels")))
INPUTS = 192


def make_matrix(kind: Kind, rows: int = 6, inputs: int = INPUTS) -> BlockMatrix:
    """Return a matrix. With levels and 8 bits, the values are 8-bit floats."""
    bits, block, extra = kind
    generator = torch.Generator().manual_seed(bits + block)
    values = torch.randint(0, 256, (rows, inputs * bits // 8), generator=generator).to(torch.uint8)
    scales = (torch.rand(rows, inputs // block, generator=generator) / 2**bits).half()
    if extra == "levels":
        levels = torch.arange(-8, 8).float() ** 3 / 512 if bits == 4 else float8_levels(torch.device("cpu"))
        if bits == 8:
            values[values & 0x7F == 0x7F] = 0  # NaN
        return BlockMatrix(values, scales, None, bits, torch.float32, levels)
    matrix = BlockMatrix(values if bits == 4 else values.view(torch.int8), scales, None, bits, torch.float32)
    if extra == "plain":
        return matrix
    return replace(matrix, offsets=torch.randn(rows, inputs // block, generator=generator))


def reorder(matrix: BlockMatrix, seed: int = 0) -> ReorderedMatrix:
    """Return a matrix that stores its inputs in a random order."""
    order = torch.randperm(matrix.inputs, generator=torch.Generator().manual_seed(seed))
    return ReorderedMatrix(matrix, order.to(matrix.device))
