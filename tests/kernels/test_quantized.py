"""Quantized matrices: `read` matches GGUF's specification, and slices and concatenations keep the weights."""

from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import BlockMatrix, LinearWeights, ReorderedMatrix, concat_matrices, quantized, reference
from lorax_server.kernels.quantized import quantize_blocks, quantize_float8, round_inputs, round_rows
from tests.kernels.quantized_cases import INPUTS, KINDS, Kind, make_matrix, reorder

PLACES = ((0, 0), (1, 15), (2, 16), (3, 47), (5, 95), (4, 191))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_is_scaled_value_plus_offset(kind: Kind) -> None:
    matrix, (bits, block, extra) = make_matrix(kind), kind
    weights = matrix.read()
    for row, column in PLACES:
        if bits == 8:
            value = int(matrix.values[row, column])
        else:
            group, place = divmod(column, 32)
            byte = int(matrix.values[row, group * 16 + place % 16])
            value = (byte >> 4 if place >= 16 else byte & 15) - 8 * (extra == "plain")
        if matrix.levels is not None:
            expected = matrix.scales[row, column // block].float() * matrix.levels[value]
        else:
            expected = matrix.scales[row, column // block].float() * value
        if matrix.offsets is not None:
            expected += matrix.offsets[row, column // block]
        assert weights[row, column] == expected


def test_8_bit_floats_are_decoded_as_in_torch() -> None:
    matrix = make_matrix((8, 192, "levels"))
    assert torch.equal(matrix.read(), matrix.values.view(torch.float8_e4m3fn).float() * matrix.scales.float())


@pytest.mark.parametrize("kind", KINDS)
def test_slices_match_full_matrix(kind: Kind) -> None:
    matrix = make_matrix(kind)
    whole = matrix.read()
    assert torch.equal(matrix[2:5].read(), whole[2:5])
    for start, stop in ((32, 96), (96, INPUTS), (0, 64)):
        assert torch.equal(matrix.select_inputs(start, stop).read(), whole[:, start:stop])
    rows = torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(matrix.look_up_rows(rows), whole[rows])
    with pytest.raises(ValueError, match="inputs 16 to 64 split a block of 32"):
        matrix.select_inputs(16, 64)
    with pytest.raises(IndexError, match=r"must be in \[0, 6\) \(got 2 to 6\)"):
        matrix.look_up_rows(torch.tensor([2, 6]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_match_full_matrix(kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = replace(make_matrix(kind), dtype=dtype)
    whole = matrix.read()
    for chunk_elements in (1, 4 * INPUTS):
        monkeypatch.setattr(quantized, "READ_CHUNK_ELEMENTS", chunk_elements)
        assert matrix.read().dtype == dtype
        assert torch.equal(matrix.read(), whole)


def test_rows_are_selected_on_device_of_matrix() -> None:
    """Row indices are on the host, but weights can be read directly to a GPU."""
    matrix = make_matrix((4, 32, "offsets")).to(torch.device("meta"))
    assert {part.device.type for part in matrix.select_rows(torch.tensor([3, 1])).tensors} == {"meta"}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_concatenation_of_different_types_keeps_all_weights(first: Kind, second: Kind) -> None:
    parts = [make_matrix(first), make_matrix(second, rows=3)]
    joined = concat_matrices(parts)
    weights = joined if isinstance(joined, torch.Tensor) else joined.read()
    assert torch.equal(weights, torch.cat([part.read() for part in parts]))
    if first == second:
        assert isinstance(joined, BlockMatrix)
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


def test_reordered_matrix_is_read_in_original_order(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_matrix((4, 32, "offsets"))
    matrix, whole = reorder(blocks), torch.empty(6, INPUTS)
    whole[:, matrix.order] = blocks.read()
    rows = torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(matrix.look_up_rows(rows), whole[rows])
    assert torch.equal(matrix.select_rows(rows[0]).read(), whole[rows[0]])
    assert torch.equal(matrix.pad_rows(2).read()[:6], whole)
    assert (matrix.shape, matrix.device, matrix.has_levels) == ((6, INPUTS), blocks.device, False)
    assert {part.device.type for part in matrix.to(torch.device("meta")).tensors} == {"meta"}
    with pytest.raises(ValueError, match="inputs 0 to 64 are stored in another order"):
        matrix.select_inputs(0, 64)
    for chunk_elements in (1, 4 * INPUTS, 2**20):
        monkeypatch.setattr(quantized, "READ_CHUNK_ELEMENTS", chunk_elements)
        assert torch.equal(matrix.read(), whole)
        assert torch.equal(matrix[2:5].read(), whole[2:5])


def test_reordered_matrices_stay_quantized_if_their_orders_are_equal() -> None:
    first, second = reorder(make_matrix((4, 32, "plain"))), reorder(make_matrix((8, 64, "offsets"), rows=3))
    other, plain = reorder(second.blocks, seed=1), second.blocks
    for matrix in (second, other, plain):
        joined = concat_matrices([first, matrix])
        assert isinstance(joined, ReorderedMatrix) == (matrix is second)
        weights = joined if isinstance(joined, torch.Tensor) else joined.read()
        assert torch.equal(weights, torch.cat([first.read(), matrix.read()]))


def test_activations_are_rounded_to_the_nearest_8_bit_float_per_row() -> None:
    x = torch.randn(7, 160, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) * 3
    x[2], x[3] = 0, x[3] * 1e-20
    values, scales = round_rows(x)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    assert values.dtype == torch.float8_e4m3fn
    for row in range(7):
        largest = float(x[row].float().abs().max())
        scaled = x[row].float() * 448 / (largest or 1)
        nearest = (scaled[:, None] - numbers).abs().amin(1)
        torch.testing.assert_close((scaled - values[row].float()).abs(), nearest, rtol=0, atol=1e-4)
        assert float(scales[row]) == pytest.approx(largest / 448, rel=1e-6, abs=1e-29)
    torch.testing.assert_close(round_inputs(x), (values.float() * scales).to(torch.bfloat16), rtol=0, atol=0)


def test_invalid_activations_stay_invalid() -> None:
    x = torch.ones(3, 32)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    assert round_inputs(x).isnan().any(1).tolist() == [True, True, False]


def test_product_rounds_activations_but_adapters_do_not() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(24, 64, generator=generator), torch.randn(5, 64, generator=generator)
    matrix = replace(quantize_float8(weight, 64), rounds_inputs=True)
    linear = reference.make_linear(matrix, torch.ones(24))
    assert linear.rounds_inputs
    assert torch.equal(linear.plain, matrix.read())
    scales = x.abs().amax(1, keepdim=True) / 448
    expected = (x / scales).to(torch.float8_e4m3fn).float() * scales @ matrix.read().t() + 1
    torch.testing.assert_close(reference.linear(x, linear, None, ()), expected, rtol=1e-3, atol=1e-3)
    exact = reference.linear(x, LinearWeights(matrix.read(), torch.ones(24)), None, ())
    assert (exact - expected).abs().max() > 0.05
