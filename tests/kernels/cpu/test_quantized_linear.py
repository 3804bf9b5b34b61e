"""Native products with quantized weights: exact integer sums of quantized activations, with mixed adapters."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation, BlockMatrix, LinearWeights
from lorax_server.kernels.block_panels import BlockPanels
from lorax_server.kernels.cpu.library import (
    INSTRUCTION_SETS,
    NARROW_DTYPES,
    PACKAGE_DIR,
    Library,
    LibraryUnavailableError,
)
from lorax_server.kernels.cpu.ops import CpuOps
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error

Kind = tuple[int, int, bool]
ROWS = (*range(1, 34), 70, 129)  # the last exceeds one block of rows
FEW_ROWS = (1, 3, 9, 33)
KINDS: list[Kind] = [
    (bits, block, has_offsets) for bits in (4, 8) for block in (16, 32) for has_offsets in (False, True)
]
FEW_KINDS, MORE_KINDS = KINDS[::3], [kind for kind in KINDS if kind not in KINDS[::3]]
# Inputs, target widths, adapter ranks by target. Some targets start or end inside a panel.
SHAPES = [
    (32, [3], [[2], [0], [7]]),
    (96, [20, 11, 19], [[4, 5, 6], [0, 0, 9], [64, 2, 0]]),
    (576, [128, 64, 64], [[16, 0, 3], [1, 1, 1], [16, 16, 300]]),
    (1088, [40, 24], [[8, 8], [0, 40], [33, 1]]),  # more inputs than one pass
]
# Relative errors of the output dtype, and of float32 sums.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
QUANTIZATION_ERROR = 0.01  # of 8-bit activations
SILU, RELU = Activation("silu", F.silu), Activation("relu", F.relu)


class OneLibrary(Library):
    """The library for one instruction set of this CPU, with or without the dot product instruction."""

    def __init__(self, name: str, path: Path, has_dot: bool) -> None:
        Library()  # OpenMP comes from torch
        self.name, self.narrow_dtypes = name, NARROW_DTYPES.get(name, (torch.bfloat16, torch.float16))
        self._load(ctypes.CDLL(str(path)), name)
        if has_dot and not self.has_dot:
            raise LibraryUnavailableError(f"this CPU has no dot product instruction for {name}")
        self.has_dot = has_dot


def find_variants() -> dict[str, CpuOps]:
    """Return ops for all instruction sets of this CPU."""
    result, best = {}, CpuOps()._library.name
    names = next((sets for sets in INSTRUCTION_SETS.values() if sets[0] == best), (best,))
    for name in names:
        path = PACKAGE_DIR / f"_{name}.so"
        for has_dot in (False, True):
            try:
                result[f"{name}{'-dot' if has_dot else ''}"] = CpuOps(OneLibrary(name, path, has_dot))
            except LibraryUnavailableError:
                continue
    return result


VARIANTS = find_variants()
EMULATED = pytest.param("emulated", marks=pytest.mark.slow)  # compiling it takes seconds


@pytest.fixture(params=[*VARIANTS, EMULATED])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    if request.param == "emulated":
        emulated: CpuOps = request.getfixturevalue("emulated")
        return emulated
    return VARIANTS[request.param]


@pytest.fixture(params=VARIANTS)
def native(request: pytest.FixtureRequest) -> CpuOps:
    return VARIANTS[request.param]


@pytest.fixture(autouse=True)
def threads(restored_threads: None) -> None:
    torch.set_num_threads(2)


def make_matrix(kind: Kind, rows: int, inputs: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> BlockMatrix:
    """Return a matrix with all integers of its format. Weights are about 0.02."""
    bits, block, has_offsets = kind
    draw = torch.Generator().manual_seed(rows + inputs + bits + block + has_offsets)
    shape = (rows, inputs // block)
    if bits == 8:
        values = torch.randint(-128, 128, (rows, inputs), generator=draw).to(torch.int8)
        values[0] = -128
    else:
        values = torch.randint(0, 256, (rows, inputs // 2), generator=draw).to(torch.uint8)
        values[0] = 0xFF
    scales = (torch.randn(shape, generator=draw) * (0.02 / (64 if bits == 8 else 5))).to(scale_dtype)
    offsets = (torch.randn(shape, generator=draw) * 0.02).to(scale_dtype) if has_offsets else None
    return BlockMatrix(values, scales, offsets, bits, dtype)


def make_case(
    ops: CpuOps, shape: int, kind: Kind, dtype: torch.dtype = torch.float32, scale_dtype: torch.dtype = torch.float16
) -> tuple[LinearCase, LinearWeights, torch.Tensor]:
    """Return a layer with adapters, its weights in panels, and its exact weights."""
    inputs, widths, ranks = SHAPES[shape]
    adapters = [Adapter(each, vectors=index != 1) for index, each in enumerate(ranks)]
    world = LinearCase(inputs, widths, adapters, dtype=dtype, bias=True, seed=shape, device="cpu")
    matrix = make_matrix(kind, sum(widths), inputs, dtype, scale_dtype)
    weights = ops.make_linear(matrix, world.weights.bias)
    assert isinstance(weights.weight, BlockPanels)
    exact = BlockMatrix(matrix.values, matrix.scales, matrix.offsets, matrix.bits, torch.float32).read()
    return world, weights, exact


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """Return activations after rounding to 8 bits in blocks of 32, in float64."""
    blocks = x.float().view(len(x), -1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scales < torch.finfo(torch.float32).tiny, 0, 1 / scales)
    values = (blocks.double() * inverse.double()).float().round()
    return (values.double() * scales.double()).view(x.shape)


def multiply(x: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return quantize_rows(x) @ exact.double().t()


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("kind", KINDS)
def test_product_is_exact_for_quantized_activations(ops: CpuOps, kind: Kind, shape: int) -> None:
    world, weights, exact = make_case(ops, shape, kind)
    for rows in FEW_ROWS:
        x, indices = world.normal(rows, world.inputs), draw_adapters(rows, len(world.adapters), seed=rows)
        result = run_linear(ops, world, weights, x, indices)
        product = multiply(x, exact)
        assert error(result, world.expected(x, indices, product=product.clone())) < TOLERANCES[torch.float32]
        plain = ops.linear(x, weights, None, ())
        assert error(plain, world.expected(x, [0] * rows, product=product.clone())) < TOLERANCES[torch.float32]
        assert error(plain, world.expected(x, [0] * rows, product=x @ exact.t())) < QUANTIZATION_ERROR


def run_linear(
    ops: CpuOps, world: LinearCase, weights: LinearWeights, x: torch.Tensor, indices: list[int]
) -> torch.Tensor:
    return ops.linear(x, weights, world.batch(indices), world.targets)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", [(8, 32, False), (4, 16, True)])
def test_all_dtypes_match_exact_product(ops: CpuOps, kind: Kind, dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    world, weights, exact = make_case(ops, 2, kind, dtype, scale_dtype)
    for rows in FEW_ROWS:
        x, indices = world.normal(rows, world.inputs), draw_adapters(rows, len(world.adapters), seed=rows)
        result = run_linear(ops, world, weights, x, indices)
        assert result.dtype == dtype
        assert error(result, world.expected(x, indices, product=multiply(x, exact))) < TOLERANCES[dtype]


@pytest.mark.parametrize("kind", [*FEW_KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)])
def test_bits_are_independent_of_batch_threads_and_dot_instruction(ops: CpuOps, kind: Kind) -> None:
    for shape in (1, 3):
        world, weights, _ = make_case(ops, shape, kind)
        x, indices = world.normal(max(ROWS), world.inputs), draw_adapters(max(ROWS), len(world.adapters), seed=1)
        together = run_linear(ops, world, weights, x, indices)
        for row in range(0, len(x), 7):
            alone = run_linear(ops, world, weights, x[row : row + 1], indices[row : row + 1])
            assert torch.equal(alone[0], together[row])
        for rows in ROWS:
            assert torch.equal(run_linear(ops, world, weights, x[:rows], indices[:rows]), together[:rows])
        torch.set_num_threads(1)
        assert torch.equal(run_linear(ops, world, weights, x, indices), together)
        torch.set_num_threads(2)
        other = VARIANTS.get(ops._library.name) if hasattr(ops._library, "name") else None
        if other is not None:
            weights = make_case(other, shape, kind)[1]
            assert torch.equal(run_linear(other, world, weights, x, indices), together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "width"), [(96, 128), (96, 19), (1088, 32)])
def test_gated_product_matches_two_products(native: CpuOps, kind: Kind, inputs: int, width: int) -> None:
    adapters = [Adapter([8, 4]), Adapter([0, 3], vectors=True)]
    world = LinearCase(inputs, [width, width], adapters, dtype=torch.float32, seed=width, device="cpu")
    matrix = make_matrix(kind, 2 * width, inputs, torch.float32, torch.float16)
    weights, exact = native.make_linear(matrix, None), matrix.read()
    x, indices = world.normal(max(FEW_ROWS), inputs), draw_adapters(max(FEW_ROWS), 2, seed=5)
    together = native.gated_linear(x, weights, SILU, world.batch(indices), world.targets)
    for rows in FEW_ROWS:
        result = native.gated_linear(x[:rows], weights, SILU, world.batch(indices[:rows]), world.targets)
        assert torch.equal(result, together[:rows])
        gate, up = world.expected(x[:rows], indices[:rows], product=multiply(x[:rows], exact)).chunk(2, dim=-1)
        assert error(result, F.silu(gate) * up) < 2 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_do_not_affect_other_rows(ops: CpuOps, value: float) -> None:
    world, weights, _ = make_case(ops, 1, (4, 32, True))
    x = world.normal(20, world.inputs)
    clean = ops.linear(x, weights, None, ())
    x[7, 3] = value
    result = ops.linear(x, weights, None, ())
    assert bool(result[7].isnan().all())
    assert torch.equal(result[:7], clean[:7])
    assert torch.equal(result[8:], clean[8:])


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-38, 1e-30, 1e30])
def test_extreme_activations_have_finite_outputs(ops: CpuOps, scale: float) -> None:
    world, weights, exact = make_case(ops, 1, (8, 32, False))
    x = world.normal(5, world.inputs) * scale
    result = ops.linear(x, LinearWeights(weights.weight), None, ())
    if scale < 1e-36:  # denormal scales are flushed to zero
        assert result.abs().max() <= 1e-36
    else:
        assert error(result / scale, multiply(x, exact) / scale) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("kind", [*KINDS, (4, 96, True), (8, 96, False)])
def test_panels_round_trip_all_weights(ops: CpuOps, kind: Kind) -> None:
    for rows, scale_dtype in ((70, torch.float16), (64, torch.float32)):
        matrix = make_matrix(kind, rows, 96, torch.float32, scale_dtype)
        panels, exact = ops.make_linear(matrix, None).weight, matrix.read()
        assert isinstance(panels, BlockPanels)
        assert panels.shape == matrix.shape
        padded = len(panels.panels) * panels.format.width
        narrow = matrix.convert(matrix.bits, min(matrix.block, 32))
        assert panels.panels.nbytes * rows == sum(each.nbytes for each in narrow.tensors) * padded
        assert torch.equal(panels.read(), exact)
        assert torch.equal(panels[11:50][2:37].read(), exact[13:48])
        for ids in (torch.tensor([[rows - 1, 0], [33, 33]]), torch.tensor([], dtype=torch.int64)):
            assert torch.equal(ops.look_up_rows(panels, ids), exact[ids])
            assert torch.equal(panels.look_up_rows(ids), exact[ids])
        assert torch.equal(ops.look_up_rows(panels[32:], torch.tensor([3, 0])), exact[[35, 32]])
        for row in (-1, rows):
            with pytest.raises(IndexError, match=r"must be in \[0, "):
                ops.look_up_rows(panels, torch.tensor([0, row]))


def test_bfloat16_rows_are_rounded_once(ops: CpuOps) -> None:
    matrix = make_matrix((4, 32, True), 40, 64, torch.bfloat16, torch.float16)
    ids = torch.arange(40)
    assert torch.equal(ops.look_up_rows(ops.make_linear(matrix, None).weight, ids), matrix.read())


def test_mismatched_inputs_are_rejected(ops: CpuOps) -> None:
    world, weights, _ = make_case(ops, 1, (8, 32, False))
    x = world.normal(4, world.inputs)
    with pytest.raises(ValueError, match="x must have 96 columns"):
        ops.linear(x[:, :-32], weights, None, ())
    assert isinstance(weights.weight, BlockPanels)
    with pytest.raises(ValueError, match="a product with rows 32 to 50 of panels is not supported"):
        ops.linear(x, LinearWeights(weights.weight[32:]), None, ())


def test_activation_without_kernel_matches_torch(native: CpuOps) -> None:
    matrix = make_matrix((8, 16, False), 64, 96, torch.float32, torch.float16)
    weights, x = native.make_linear(matrix, None), torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    gate, up = native.linear(x, weights, None, ()).chunk(2, dim=-1)
    assert torch.equal(native.gated_linear(x, weights, RELU, None, ()), F.relu(gate) * up)
