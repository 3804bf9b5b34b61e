"""Quantized matrices: `read` matches GGUF's specification, and slices and concatenations keep the weights."""

import pytest
import torch

from lorax_server.kernels import BlockMatrix
from lorax_server.kernels.quantized import quantize_blocks


def make_matrix(bits: int, block: int, has_offsets: bool, rows: int = 6, inputs: int = 96) -> BlockMatrix:
    generator = torch.Generator().manual_seed(bits + block + has_offsets)
    if bits == 8:
        values = torch.randint(-128, 128, (rows, inputs), generator=generator).to(torch.int8)
    else:
        values = torch.randint(0, 256, (rows, inputs // 2), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, inputs // block, generator=generator).half()
    offsets = torch.randn(rows, inputs // block, generator=generator) if has_offsets else None
    return BlockMatrix(values, scales, offsets, bits, torch.float32)


KINDS = [(bits, block, has_offsets) for bits in (4, 8) for block in (16, 32) for has_offsets in (False, True)]


@pytest.mark.parametrize(("bits", "block", "has_offsets"), KINDS)
def test_weight_is_scaled_integer_plus_offset(bits: int, block: int, has_offsets: bool) -> None:
    matrix = make_matrix(bits, block, has_offsets)
    weights = matrix.read()
    for row, column in ((0, 0), (1, 15), (2, 16), (3, 47), (5, 95)):
        if bits == 8:
            value = int(matrix.values[row, column])
        else:
            group, place = divmod(column, 32)
            byte = int(matrix.values[row, group * 16 + place % 16])
            value = (byte >> 4 if place >= 16 else byte & 15) - (0 if has_offsets else 8)
        expected = matrix.scales[row, column // block].float() * value
        if matrix.offsets is not None:
            expected += matrix.offsets[row, column // block]
        assert weights[row, column] == expected


@pytest.mark.parametrize(("bits", "block", "has_offsets"), KINDS)
def test_slices_match_full_matrix(bits: int, block: int, has_offsets: bool) -> None:
    matrix = make_matrix(bits, block, has_offsets)
    whole = matrix.read()
    assert torch.equal(matrix[2:5].read(), whole[2:5])
    assert torch.equal(matrix.select_inputs(32, 96).read(), whole[:, 32:])
    rows = torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(matrix.look_up_rows(rows), whole[rows])
    with pytest.raises(ValueError, match="inputs 16 to 64 split a block of 32"):
        matrix.select_inputs(16, 64)
    with pytest.raises(IndexError, match=r"must be in \[0, 6\) \(got 2 to 6\)"):
        matrix.look_up_rows(torch.tensor([2, 6]))


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_concatenation_of_different_types_keeps_all_weights(
    first: tuple[int, int, bool], second: tuple[int, int, bool]
) -> None:
    parts = [make_matrix(*first), make_matrix(*second, rows=3)]
    joined = BlockMatrix.concat(parts)
    assert torch.equal(joined.read(), torch.cat([part.read() for part in parts]))
    if first == second:
        assert joined.bits == first[0]


@pytest.mark.parametrize(("bits", "bound"), [(8, 1 / 127), (4, 1 / 8)])
def test_quantization_error_is_below_one_quantization_step(bits: int, bound: float) -> None:
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    matrix = quantize_blocks(weight, bits)
    largest = weight.view(5, 4, 32).abs().amax(-1, keepdim=True)
    errors = (matrix.read() - weight).view(5, 4, 32).abs()
    assert (errors <= largest * bound * 1.01).all()
    assert not matrix.read()[2].any()


def test_unsupported_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="blocks of 24 8-bit values with 48 inputs"):
        BlockMatrix(torch.zeros(2, 48, dtype=torch.int8), torch.zeros(2, 2), None, 8, torch.float32)
