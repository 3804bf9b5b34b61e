"""AMX products against Intel's specification, bit for bit: emulated, and native if the CPU has AMX."""

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Activation
from lorax_server.kernels import panels as panels_module
from lorax_server.kernels.cpu.abi import Dtype
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.kernels.panels import PanelMatrix, to_paired_panels
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 257, 300)
# Inputs and outputs: partial and whole tiles. With more than 1024 inputs, sums are stored between blocks.
SHAPES = [(1, 1), (31, 33), (32, 32), (64, 160), (100, 70), (1056, 40)]
TINY = torch.finfo(torch.float32).tiny
SILU = Activation("silu", F.silu)


NATIVE = CpuOps()


# Compiling the emulation takes seconds.
EMULATED = pytest.param("emulated", marks=pytest.mark.slow)


@pytest.fixture(params=[EMULATED, "native"] if NATIVE.has_fast_bfloat16 else [EMULATED])
def ops(request: pytest.FixtureRequest, restored_threads: None, emulated: CpuOps) -> CpuOps:
    torch.set_num_threads(2)
    return emulated if request.param == "emulated" else NATIVE


def flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < TINY, torch.zeros_like(x).copysign(x), x)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply as specified for `tdpbf16ps`. Products of bfloat16 values are exact in float64."""
    missing = -x.shape[1] % 32
    left, right = (flush(F.pad(one, (0, missing)).float()).double() for one in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for tile in range(0, left.shape[1], 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(tile, tile + 32):
            sums[k % 2] = flush((sums[k % 2].double() + left[:, k, None] * right[None, :, k]).float())
        total = flush(total + flush(sums[0] + sums[1]))
    return total


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_amx_product_is_bitwise_equal_to_instruction_semantics(ops: CpuOps, inputs: int, outputs: int) -> None:
    # Inputs have few bits, so float64 sums are exact and are rounded to float32 only once.
    weight, x = (torch.randn(n, inputs).mul(64).round().div(16).bfloat16() for n in (outputs, max(ROWS)))
    scales = torch.randint(-6, 6, (inputs,)).exp2()  # float32 sums must round
    weight, x = (weight * scales).bfloat16(), (x * scales.flip(0)).bfloat16()
    weights, expected = ops.make_linear(weight, None), multiply(x, weight).bfloat16()
    assert isinstance(weights.weight, PanelMatrix)
    assert weights.weight.is_paired
    for rows in ROWS:
        assert torch.equal(ops.linear(x[:rows], weights, None, ()), expected[:rows]), rows


def draw_powers(*shape: int) -> torch.Tensor:
    """Draw powers of two, including denormals."""
    exponents = torch.tensor([-133, -128, -126, -125, -66, -64, -63, -62, -61, -60, -1, 0])
    sign = torch.randint(0, 2, shape) * 2 - 1
    return (exponents[torch.randint(len(exponents), shape)].float().exp2() * sign).bfloat16()


def test_amx_flushes_denormals_to_zero(ops: CpuOps) -> None:
    x, weight = draw_powers(20, 64), draw_powers(40, 64)
    x[:10, ::2] = 2.0**-64  # sums are near the smallest normal float
    weight[:20] = weight[:20].sign() * 2.0**-63
    result = ops.linear(x, ops.make_linear(weight, None), None, ())
    assert torch.equal(result, multiply(x, weight).bfloat16())


def test_infinite_and_nan_rows_do_not_affect_other_rows(ops: CpuOps) -> None:
    x, weights = torch.randn(40, 50).bfloat16(), ops.make_linear(torch.randn(70, 50).bfloat16(), None)
    clean = ops.linear(x, weights, None, ())
    x[7], x[23, 49] = torch.inf, torch.nan
    result = ops.linear(x, weights, None, ())
    assert bool(result[23].isnan().all())
    assert not bool(result[7].isfinite().any())
    others = [row for row in range(40) if row not in (7, 23)]
    assert torch.equal(result[others], clean[others])


@pytest.mark.parametrize("gated", [False, True])
def test_amx_bits_are_independent_of_batch_and_threads(ops: CpuOps, gated: bool) -> None:
    adapters = [Adapter([8, 4]), Adapter([0, 3], vectors=True), Adapter([17, 0], vectors=True)]
    world = LinearCase(96, [160, 160], adapters, dtype=torch.bfloat16, bias=True, seed=3, device="cpu")
    weights = ops.make_linear(world.weights.plain, world.weights.bias)
    x, indices = world.normal(300, world.inputs), draw_adapters(300, len(adapters), seed=5)

    def run(rows: slice) -> torch.Tensor:
        batch = world.batch(indices[rows])
        if gated:
            return ops.gated_linear(x[rows], weights, SILU, batch, world.targets)
        return ops.linear(x[rows], weights, batch, world.targets)

    together, expected = run(slice(300)), world.expected(x, indices)
    gate, up = expected.chunk(2, dim=-1)
    assert error(together, F.silu(gate) * up if gated else expected) < 1.2e-2
    for rows in ROWS:
        assert torch.equal(run(slice(rows)), together[:rows])
    for row in (0, 40, 290):
        assert torch.equal(run(slice(row, row + 1)), together[row : row + 1])
    torch.set_num_threads(1)
    assert torch.equal(run(slice(300)), together)


def test_strided_inputs_match_contiguous_inputs(ops: CpuOps) -> None:
    wide, weights = torch.randn(20, 200).bfloat16(), ops.make_linear(torch.randn(70, 64).bfloat16(), None)
    for x in (wide[:, 3:67], wide[:, 8:136:2]):
        assert torch.equal(ops.linear(x, weights, None, ()), ops.linear(x.contiguous(), weights, None, ()))


def test_empty_batch_has_empty_output(ops: CpuOps) -> None:
    weights = ops.make_linear(torch.randn(70, 64).bfloat16(), None)
    assert ops.linear(torch.empty(0, 64, dtype=torch.bfloat16), weights, None, ()).shape == (0, 70)


def test_look_up_rows_reads_paired_panels(ops: CpuOps) -> None:
    weight = torch.randn(75, 37).bfloat16()
    matrix = ops.make_linear(weight, None).weight
    assert isinstance(matrix, PanelMatrix)
    assert (len(matrix), matrix.shape, matrix.dtype) == (75, (75, 37), torch.bfloat16)
    assert torch.equal(matrix.read(), weight)
    assert torch.equal(matrix[11:70][2:50].read(), weight[13:61])
    ids = torch.tensor([[0, 74], [33, 32]])
    assert torch.equal(matrix.look_up_rows(ids), weight[ids])
    assert torch.equal(ops.look_up_rows(matrix, ids), weight[ids])
    assert torch.equal(ops.look_up_rows(matrix[5:], ids[1]), weight[5:][ids[1]])


def test_float32_model_does_not_use_amx(ops: CpuOps) -> None:
    """Weights that are exact in bfloat16 are stored in bfloat16, but float32 models do not use AMX."""
    x, weight = torch.randn(5, 64), torch.randn(40, 64).bfloat16().float()
    weights = ops.make_linear(weight, None)
    assert isinstance(weights.weight, PanelMatrix)
    assert (weights.weight.panels.dtype, weights.weight.is_paired) == (torch.bfloat16, False)
    assert error(ops.linear(x, weights, None, ()), x @ weight.t()) < 2e-6


@pytest.mark.parametrize("chunk_elements", [1, 3000, 2**20])
def test_paired_panels_are_padded_with_zeros(chunk_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels_module, "PACK_CHUNK_ELEMENTS", chunk_elements)
    weight = torch.arange(40 * 34).view(40, 34).bfloat16()
    panels = to_paired_panels(weight, 32).panels
    assert (panels.shape, Dtype.BFLOAT16_PAIRS) == ((2, 32, 32, 2), 3)
    assert torch.equal(panels[1, 4, 7], weight[39, 8:10])
    assert not bool(panels[:, 17:].any())
    assert not bool(panels[1, :, 8:].any())
