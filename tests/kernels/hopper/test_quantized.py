"""Hopper ops with quantized weights against float32."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import BlockMatrix, quantize_blocks, quantize_float8
from lorax_server.kernels.ops import Activation, LinearWeights
from lorax_server.kernels.quantized import round_rows
from tests.kernels.batches import LinearCase, draw_adapters, error

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
pytest.importorskip("triton", reason="needs Triton")
from lorax_server.kernels.hopper.ops import HopperOps
from lorax_server.kernels.hopper.packed import PackedMatrix
from tests.kernels.hopper.test_linear import TOLERANCE, make_adapters

pytestmark = pytest.mark.gpu


def add_offsets(matrix: BlockMatrix) -> BlockMatrix:
    return replace(matrix, offsets=torch.rand_like(matrix.scales.float()) / 10)


def add_zeros(matrix: BlockMatrix) -> BlockMatrix:
    zeros = torch.randint(0, 17, matrix.scales.shape, device=matrix.device)
    return replace(matrix, offsets=-zeros * matrix.scales.float())


def make_levels(weight: torch.Tensor, count: int) -> BlockMatrix:
    """Use random levels. The kernels round levels of 4 bits to 16 bits, so they are multiples of 1 / 64."""
    matrix = add_zeros(quantize_blocks(weight, 4 if count == 16 else 8, 64))
    levels = (torch.randn(count, device=weight.device) * 16).round() / 64
    values = matrix.values.view(torch.uint8)
    return replace(matrix, values=values, offsets=None, levels=levels, scales=matrix.scales.float())


FORMATS = {
    "int4": lambda weight: quantize_blocks(weight, 4),
    "int4 in blocks of 128": lambda weight: quantize_blocks(weight, 4, 128),
    "int4 with zero points": lambda weight: add_zeros(quantize_blocks(weight, 4, 64)),
    "int8": lambda weight: quantize_blocks(weight, 8),
    "int8 with zero points": lambda weight: add_zeros(quantize_blocks(weight, 8, 128)),
    "int8 per row": lambda weight: quantize_blocks(weight, 8, weight.shape[1]),
    "offsets": lambda weight: add_offsets(quantize_blocks(weight, 4)),
    "fp8": lambda weight: quantize_float8(weight, 64),
    "16 levels": lambda weight: make_levels(weight, 16),
    "256 levels": lambda weight: make_levels(weight, 256),  # uses Triton
}


@pytest.fixture(scope="module")
def ops() -> HopperOps:
    return HopperOps(torch.device("cuda", 0))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 65, 128, 200, 1000])
def test_products_with_adapters_match_float32(ops: HopperOps, tokens: int, dtype: torch.dtype, name: str) -> None:
    widths = (2048, 2048)
    world = LinearCase(1024, widths, make_adapters(9, len(widths)), dtype=dtype, bias=True, seed=tokens)
    matrix = FORMATS[name](world.weights.plain).to(torch.device("cuda", 0))
    weights = ops.make_linear(matrix, world.weights.bias)
    ops.prepare([weights], with_lora=True)
    assert weights.is_quantized
    world.weights = LinearWeights(matrix.read(), world.weights.bias)
    x, silu = world.normal(tokens, 1024), Activation("silu", F.silu)
    for indices in (draw_adapters(tokens, 9, tokens), [7] * tokens, [0] * tokens):
        expected = world.expected(x, indices)
        got = ops.linear(x, weights, world.batch(indices), world.targets)
        assert error(got, expected) < 2 * TOLERANCE[dtype]
        gate, up = expected.chunk(2, dim=1)
        gated = ops.gated_linear(x, weights, silu, world.batch(indices), world.targets)
        assert error(gated, F.silu(gate) * up) < 4 * TOLERANCE[dtype]
    assert error(ops.linear(x, weights, None, ()), world.expected(x, [0] * tokens)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 5, 64, 128, 129, 200, 256, 257, 1000])
@pytest.mark.parametrize("widths", [(2048, 2048), (1000, 1000)], ids=str)
def test_rounded_activations_with_adapters_match_float32(
    ops: HopperOps, tokens: int, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    """Only the base product rounds activations."""
    world = LinearCase(1088, widths, make_adapters(9, len(widths)), dtype=dtype, bias=True, seed=tokens)
    matrix = replace(quantize_float8(world.weights.plain, 1088), rounds_inputs=True)
    weights = ops.make_linear(matrix, world.weights.bias)
    ops.prepare([weights], with_lora=True)
    assert isinstance(weights.weight, PackedMatrix)
    x, silu = world.normal(tokens, 1088), Activation("silu", F.silu)
    values, scales = round_rows(x)
    product = (values.float() * scales) @ replace(matrix, dtype=torch.float32).read().T
    for indices in (draw_adapters(tokens, 9, tokens), [7] * tokens, [0] * tokens):
        expected = world.expected(x, indices, product=product.clone())
        got = ops.linear(x, weights, world.batch(indices), world.targets)
        assert error(got, expected) < 2 * TOLERANCE[dtype]
        gate, up = expected.chunk(2, dim=1)
        gated = ops.gated_linear(x, weights, silu, world.batch(indices), world.targets)
        assert error(gated, F.silu(gate) * up) < 4 * TOLERANCE[dtype]
    expected = world.expected(x, [0] * tokens, product=product.clone())
    assert error(ops.linear(x, weights, None, ()), expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("shape", [(1, 64), (3, 4096), (300, 14336), (2, 8200)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rounding_kernel_matches_torch(ops: HopperOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device="cuda").mul(5).to(dtype)
    x[0, 7] = 300
    expected, expected_scales = round_rows(x)
    fused = ops._fused[dtype]
    for form in (torch.float8_e4m3fn, dtype):
        values, scales = fused.round_rows(x, form)
        assert torch.equal(values.float(), expected.float())
        torch.testing.assert_close(scales, expected_scales.flatten(), rtol=1e-6, atol=0)
    x[0, :3] = torch.tensor([torch.inf, torch.nan, 1])
    assert fused.round_rows(x, dtype)[0][0].isnan().any()
    x[0] = 0
    assert not fused.round_rows(x, dtype)[0][0].any()


@pytest.mark.parametrize("shape", [(128, 128), (1000, 1728), (296, 576), (8, 4096)])
def test_unpacked_8_bit_floats_equal_the_matrix(ops: HopperOps, shape: tuple[int, int]) -> None:
    matrix = quantize_float8(torch.randn(shape, device="cuda").to(torch.bfloat16), shape[1])
    packed = ops.make_linear(matrix, None).weight
    assert isinstance(packed, PackedMatrix)
    values, scales = packed.unpack_float8()
    assert torch.equal(values.view(torch.uint8), matrix.values)
    assert torch.equal(scales, matrix.scales.flatten())


@pytest.mark.parametrize("rows", [1, 32])
def test_graph_replays_quantized_product(ops: HopperOps, rows: int) -> None:
    world = LinearCase(1024, (2048,), make_adapters(3, 1), bias=False)
    weights = ops.make_linear(quantize_blocks(world.weights.plain, 4), None)
    x = world.normal(rows, 1024)
    expected = ops.linear(x, weights, None, ())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weights, None, ())
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["int4", "int4 with zero points", "int8 per row", "offsets", "fp8", "16 levels"])
@pytest.mark.parametrize("shape", [(1000, 1728), (1160, 576), (256, 4224), (384, 4096), (32, 14336)])
def test_products_of_unusual_shapes_match_float32(ops: HopperOps, shape: tuple[int, int], name: str) -> None:
    """Half steps, partly filled tiles, odd numbers of tiles, and clusters with blocks that have nothing to do."""
    weight = torch.randn(shape, device="cuda").to(torch.bfloat16) * 0.02
    matrix = FORMATS[name](weight)
    weights = ops.make_linear(matrix, None)
    assert isinstance(weights.weight, PackedMatrix)
    expected_weight = matrix.read()
    assert torch.equal(weights.weight.read(), expected_weight)
    assert torch.equal(weights.weight[5:23].read(), expected_weight[5:23])
    assert torch.equal(weights.weight[5:23].look_up_rows(torch.tensor([3, 0])), expected_weight[[8, 5]])
    for rows in (1, 9, 30, 60, 120, 250):
        x = torch.randn(rows, shape[1], device="cuda").to(torch.bfloat16)
        expected = x.float() @ expected_weight.float().T
        assert error(ops.linear(x, weights, None, ()), expected) < 2 * TOLERANCE[torch.bfloat16]


def test_number_of_outputs_that_is_not_a_multiple_of_8_uses_other_kernels(ops: HopperOps) -> None:
    matrix = quantize_blocks(torch.randn(1001, 256, device="cuda").to(torch.bfloat16), 8)
    weights = ops.make_linear(matrix, None)
    assert not isinstance(weights.weight, PackedMatrix)
    x = torch.randn(3, 256, device="cuda").to(torch.bfloat16)
    expected = x.float() @ matrix.read().float().T
    assert error(ops.linear(x, weights, None, ()), expected) < 2 * TOLERANCE[torch.bfloat16]
