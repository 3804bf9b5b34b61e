"""The layout of quantized matrices for Hopper kernels, without a GPU."""

from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import BlockMatrix, quantize_blocks, quantize_float8
from lorax_server.kernels.quantized import float8_levels

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
from lorax_server.kernels.hopper.packed import find_format, pack, round_levels

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302),
        *(0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


def draw_matrix(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)


def add_offsets(matrix: BlockMatrix) -> BlockMatrix:
    generator = torch.Generator().manual_seed(1)
    return replace(matrix, offsets=torch.randn(matrix.scales.shape, generator=generator).to(matrix.scales.dtype))


def make_levels(weight: torch.Tensor, block: int) -> BlockMatrix:
    matrix = add_offsets(quantize_blocks(weight, 4, block))  # values are 0 to 15
    return replace(matrix, offsets=None, levels=NF4, scales=matrix.scales.float())


def add_zeros(matrix: BlockMatrix) -> BlockMatrix:
    """Add zero points, as GPTQ and AWQ have."""
    generator = torch.Generator().manual_seed(2)
    zeros = torch.randint(0, 17, matrix.scales.shape, generator=generator)
    return replace(matrix, offsets=-zeros * matrix.scales.float())


MATRICES = {
    "int4": lambda weight: quantize_blocks(weight, 4),
    "int4 in blocks of 64": lambda weight: quantize_blocks(weight, 4, 64),
    "int4 in blocks of 128 with offsets": lambda weight: add_offsets(quantize_blocks(weight, 4, 128)),
    "int4 with zero points": lambda weight: add_zeros(quantize_blocks(weight, 4, 128)),
    "int8 with zero points": lambda weight: add_zeros(quantize_blocks(weight, 8, 128)),
    "int8": lambda weight: quantize_blocks(weight, 8),
    "int8 with offsets": lambda weight: add_offsets(quantize_blocks(weight, 8)),
    "int8 per row": lambda weight: quantize_blocks(weight, 8, weight.shape[1]),
    "fp8": lambda weight: quantize_float8(weight, 64),
    "fp8 per row": lambda weight: quantize_float8(weight, weight.shape[1]),
    "nf4": lambda weight: make_levels(weight, 64),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 512), (72, 384), (296, 640)])
def test_packed_rows_equal_the_matrix(name: str, shape: tuple[int, int]) -> None:
    matrix = MATRICES[name](draw_matrix(*shape))
    packed = pack(matrix, None)
    assert packed is not None
    assert packed.shape == shape
    assert packed.format.shift == ("zeros" if "zero" in name else "offsets" if "offsets" in name else "none")
    assert packed.records.shape[2] == packed.format.record_bytes
    expected, rows = matrix.read(), torch.arange(shape[0])
    if name == "nf4":  # levels are rounded before they are multiplied by the scale
        torch.testing.assert_close(packed.look_up_rows(rows), expected, rtol=0.01, atol=0)
    else:
        assert torch.equal(packed.look_up_rows(rows), expected)
        chosen = torch.tensor([[7, 3], [60, 7]])
        assert torch.equal(packed[5:].look_up_rows(chosen - 2), expected[chosen + 3])


def test_large_matrix_is_packed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = add_zeros(quantize_blocks(draw_matrix(1000, 128), 4, 64))
    whole = pack(matrix, None)
    monkeypatch.setattr("lorax_server.kernels.hopper.packed.PACK_ROWS", 256)
    chunked = pack(matrix, None)
    assert whole is not None
    assert chunked is not None
    assert torch.equal(whole.records, chunked.records)


@pytest.mark.parametrize("index", [-1, 72])
def test_row_outside_the_matrix_is_rejected(index: int) -> None:
    packed = pack(quantize_blocks(draw_matrix(72, 128), 4), None)
    assert packed is not None
    with pytest.raises(IndexError, match=r"row indices must be in \[0, 72\)"):
        packed.look_up_rows(torch.tensor([index]))


def test_padding_is_zero() -> None:
    packed = pack(quantize_float8(draw_matrix(72, 192), 192), None)
    assert packed is not None
    whole = replace(packed, stop=128, inputs=256).look_up_rows(torch.arange(128))
    assert not whole[72:].any()
    assert not whole[:, 192:].any()


def test_rounded_levels_have_small_errors() -> None:
    levels = round_levels(NF4, torch.bfloat16)
    bits = [half for word in levels.words for half in (word & 0xFFFF, word >> 16)]
    rounded = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).float() / levels.factor
    assert (rounded - NF4).square().sum() < 0.5 * (NF4.bfloat16().float() - NF4).square().sum()
    assert rounded[7] == 0


@pytest.mark.parametrize(
    "matrix",
    [
        quantize_blocks(draw_matrix(8, 288), 4, 96),
        quantize_blocks(draw_matrix(12, 256), 4),
        add_offsets(quantize_blocks(draw_matrix(8, 256), 4))[:0],
        quantize_blocks(draw_matrix(8, 256), 8, 16),
        replace(quantize_float8(draw_matrix(8, 128), 64), values=torch.full((8, 128), 127, dtype=torch.uint8)),
        replace(quantize_float8(draw_matrix(8, 128), 64), levels=float8_levels(torch.device("cpu"), torch.float8_e5m2)),
    ],
    ids=["blocks of 96", "12 rows", "no rows", "blocks of 16", "NaN", "e5m2"],
)
def test_unsupported_matrix_has_no_format(matrix: BlockMatrix) -> None:
    assert find_format(matrix) is None
    assert pack(matrix, None) is None
