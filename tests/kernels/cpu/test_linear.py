"""Native linear layers against torch in float32, with mixed adapters, and bitwise invariance."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation, LinearWeights, LoraBatch, reference
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.kernels.panels import PanelMatrix, to_panels
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error

OPS = CpuOps()
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 17, 33, 70, 205)  # the last exceeds one block
# inputs, target widths, adapter ranks by target; some targets start or end inside a panel.
SHAPES = [
    (5, [3], [[2], [0], [7]]),
    (64, [64, 32, 32], [[8, 0, 3], [1, 1, 1], [16, 16, 16]]),
    (37, [20, 11, 19], [[4, 5, 6], [0, 0, 9], [64, 2, 0]]),
    (576, [128, 128], [[16, 16], [512, 0], [0, 40]]),
]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make_case(shape: int, dtype: torch.dtype = torch.float32) -> LinearCase:
    inputs, widths, ranks = SHAPES[shape]
    adapters = [Adapter(each, vectors=index != 1) for index, each in enumerate(ranks)]
    return LinearCase(inputs, widths, adapters, dtype=dtype, bias=True, seed=shape, device="cpu")


def load(world: LinearCase) -> LinearWeights:
    assert isinstance(world.weights.weight, torch.Tensor)
    return OPS.make_linear(world.weights.weight, world.weights.bias)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_linear_with_mixed_adapters_matches_reference(shape: int, dtype: torch.dtype) -> None:
    world = make_case(shape, dtype)
    weights = load(world)
    for rows in ROWS:
        x, indices = world.normal(rows, world.inputs), draw_adapters(rows, len(world.adapters), seed=rows)
        result = OPS.linear(x, weights, world.batch(indices), world.targets)
        assert result.dtype == dtype
        assert error(result, world.expected(x, indices)) < TOLERANCES[dtype]
        assert error(OPS.linear(x, weights, None, ()), world.expected(x, [0] * rows)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_linear_bits_are_independent_of_batch_and_threads(shape: int, dtype: torch.dtype) -> None:
    world = make_case(shape, dtype)
    weights, rows = load(world), max(ROWS)
    x, indices = world.normal(rows, world.inputs), draw_adapters(rows, len(world.adapters), seed=1)
    together = OPS.linear(x, weights, world.batch(indices), world.targets)
    for row in range(rows):
        alone = OPS.linear(x[row : row + 1], weights, world.batch(indices[row : row + 1]), world.targets)
        assert torch.equal(alone[0], together[row])
    for some in ROWS:
        result = OPS.linear(x[:some], weights, world.batch(indices[:some]), world.targets)
        assert torch.equal(result, together[:some])
    torch.set_num_threads(1)
    assert torch.equal(OPS.linear(x, weights, world.batch(indices), world.targets), together)


def test_nan_row_does_not_affect_other_rows() -> None:
    world = make_case(1)
    x, indices = world.normal(20, world.inputs), draw_adapters(20, len(world.adapters), seed=3)
    weights = load(world)
    clean = OPS.linear(x, weights, world.batch(indices), world.targets)
    x[7, 3] = torch.nan
    result = OPS.linear(x, weights, world.batch(indices), world.targets)
    assert bool(result[7].isnan().any())
    assert torch.equal(result[:7], clean[:7])
    assert torch.equal(result[8:], clean[8:])


ACTIVATIONS = [
    Activation("silu", F.silu),
    Activation("gelu_tanh", partial(F.gelu, approximate="tanh")),
    Activation("relu", F.relu),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)
@pytest.mark.parametrize(("inputs", "width"), [(96, 128), (96, 24), (96, 19), (600, 24)])  # the last exceeds one block
def test_gated_linear_matches_torch(inputs: int, width: int, activation: Activation, dtype: torch.dtype) -> None:
    adapters = [Adapter([8, 4]), Adapter([0, 3], vectors=True)]
    world = LinearCase(inputs, [width, width], adapters, dtype=dtype, seed=width, device="cpu")
    weights = load(world)
    x, indices = world.normal(max(ROWS), world.inputs), draw_adapters(max(ROWS), 2, seed=5)
    alone = OPS.gated_linear(x[-1:], weights, activation, world.batch(indices[-1:]), world.targets)
    for rows in ROWS:
        result = OPS.gated_linear(x[:rows], weights, activation, world.batch(indices[:rows]), world.targets)
        if rows == max(ROWS):
            assert torch.equal(result[-1:], alone)
        gate, up = world.expected(x[:rows], indices[:rows]).chunk(2, dim=-1)
        assert error(result, activation(gate) * up) < 2 * TOLERANCES[dtype]
        assert error(OPS.gated_linear(x[:rows], weights, activation, None, ()), gated(world, x[:rows], activation)) < (
            2 * TOLERANCES[dtype]
        )


def gated(world: LinearCase, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = world.expected(x, [0] * len(x)).chunk(2, dim=-1)
    return activation(gate) * up


@pytest.mark.parametrize("rows", [1, 5, 9, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lossless_half_precision_storage_halves_memory_and_keeps_bits(dtype: torch.dtype, rows: int) -> None:
    weight = torch.randn(50, 40).to(dtype).float()
    weight[0, :3] = torch.tensor([0.0, -0.0, 2.0**-24 if dtype == torch.float16 else 2.0**-130])  # the last is denormal
    narrow, wide = OPS.make_linear(weight, None), OPS.make_linear(weight + weight * 2**-20, None)
    assert isinstance(narrow.weight, PanelMatrix)
    assert isinstance(wide.weight, PanelMatrix)
    stored = dtype if dtype in OPS._library.narrow_dtypes else torch.float32
    assert (narrow.weight.panels.dtype, wide.weight.panels.dtype) == (stored, torch.float32)
    assert torch.equal(narrow.plain, weight)
    # Both storage dtypes are tested, independent of the CPU's preference.
    cut = LinearWeights(to_panels(weight, OPS._library.panel, (dtype,)))
    assert isinstance(cut.weight, PanelMatrix)
    assert cut.weight.panels.dtype == dtype
    x, same = torch.randn(rows, 40), LinearWeights(replace(cut.weight, panels=cut.weight.panels.float()))
    assert torch.equal(OPS.linear(x, cut, None, ()), OPS.linear(x, same, None, ()))


def test_look_up_rows_reads_panels() -> None:
    weight = torch.randn(50, 7)
    matrix = OPS.make_linear(weight, None).weight
    assert isinstance(matrix, PanelMatrix)
    assert (len(matrix), matrix.shape, matrix.dtype, matrix.device) == (50, (50, 7), torch.float32, weight.device)
    assert torch.equal(matrix.read(), weight)
    assert torch.equal(matrix[11:37][2:9].read(), weight[13:20])
    assert matrix[60:].shape == (0, 7)
    with pytest.raises(IndexError):
        matrix[::2]


def test_strided_inputs_match_contiguous_inputs() -> None:
    world = make_case(1)
    wide = world.normal(9, 2 * world.inputs)
    for x in (wide[:, : world.inputs], wide[:, ::2]):
        result = OPS.linear(x, load(world), None, ())
        assert torch.equal(result, OPS.linear(x.contiguous(), load(world), None, ()))


def test_empty_batch_has_empty_output() -> None:
    world = make_case(1)
    empty: LoraBatch = world.batch([])
    assert OPS.linear(world.normal(0, world.inputs), load(world), empty, world.targets).shape == (0, sum(world.widths))


def test_matrix_without_panels_uses_torch() -> None:
    world = make_case(1)
    x, batch = world.normal(5, world.inputs), world.batch([0, 1, 1, 2, 3])
    assert torch.equal(
        OPS.linear(x, world.weights, batch, world.targets), reference.linear(x, world.weights, batch, world.targets)
    )
    double = OPS.make_linear(torch.randn(3, 4, dtype=torch.float64), None)
    assert isinstance(double.weight, torch.Tensor)


def test_mismatched_shapes_are_rejected() -> None:
    world = make_case(1)
    weights, x = load(world), world.normal(4, world.inputs)
    with pytest.raises(ValueError, match="x must have"):
        OPS.linear(x[:, :-1], weights, None, ())
    with pytest.raises(ValueError, match="x must have"):
        OPS.linear(x.bfloat16(), weights, None, ())
    with pytest.raises(ValueError, match="must have 4 tokens"):
        OPS.linear(x, weights, world.batch([1, 1, 2]), world.targets)
    with pytest.raises(ValueError, match="bias must be"):
        OPS.linear(x, OPS.make_linear(world.weights.plain, torch.zeros(3)), None, ())
    matrix = weights.weight
    assert isinstance(matrix, PanelMatrix)
    for row in (-1, len(matrix)):
        with pytest.raises(IndexError):
            matrix.look_up_rows(torch.tensor([0, row]))
