"""Native activations against torch and float64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2CLS, ACT2FN

from lorax_server.kernels.cpu.abi import ActivationKind
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.layers.activation import get_activation

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # about half an ulp

Function = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


KINDS = [
    (ActivationKind.SILU, F.silu),
    (ActivationKind.GELU_TANH, gelu_tanh),
    (ActivationKind.GELU, F.gelu),
    (ActivationKind.QUICK_GELU, quick_gelu),
    (ActivationKind.RELU, F.relu),
    (ActivationKind.SIGMOID, torch.sigmoid),
]
MAX_DIFFERENCE = 1.5e-6  # absolute or relative, in float32; the error of torch's GELU is 1.2e-6
PARAMETRIC = ("prelu", "xielu")  # activations with learned parameters, which are rejected
NAMES = sorted(ACT2CLS.keys() - {*PARAMETRIC})


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apply_kind(library: Library, values: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    return CpuOps(library).apply_gate(torch.cat([values, torch.ones_like(values)])[None], kind)[0]


@pytest.mark.parametrize(("kind", "function"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_matches_torch(kind: ActivationKind, function: Function, dtype: torch.dtype, library: Library) -> None:
    for rows, width in [(0, 8), (1, 1), (1, 1536), (3, 5), (7, 67), (2, 3000)]:
        x = 3 * normal(rows, 2 * width, seed=width, dtype=dtype)
        left, right = x.double().chunk(2, dim=-1)
        result = CpuOps(library).apply_gate(x, kind)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), function(left) * right, rtol=TOLERANCE[dtype], atol=2e-6)
        wide = torch.cat([x, x], dim=1)[:, : 2 * width]
        assert torch.equal(CpuOps(library).apply_gate(wide, kind), CpuOps(library).apply_gate(x, kind))
        assert torch.equal(CpuOps(library).apply_gate(x.T.contiguous().T, kind), CpuOps(library).apply_gate(x, kind))


@pytest.mark.parametrize(("kind", "function"), KINDS)
def test_activation_is_precise_over_range(kind: ActivationKind, function: Function, library: Library) -> None:
    x = torch.linspace(-100, 100, 400_001)
    result = apply_kind(library, x, kind).double()
    torch.testing.assert_close(result, function(x.double()), rtol=3e-7, atol=1e-6)
    near = x.abs() < 5
    torch.testing.assert_close(result[near], function(x[near].double()), rtol=5e-6, atol=0)


@pytest.mark.parametrize(("kind", "function"), KINDS)
def test_activation_handles_extreme_values(kind: ActivationKind, function: Function, library: Library) -> None:
    x = torch.tensor([-math.inf, math.inf, math.nan, -100, -89, -88, 88, 89, 0.0, -0.0, 1e20, -1e20, 1e-40])
    expected = function(x.double()).float()  # in float32, torch's GELU of infinity is NaN
    torch.testing.assert_close(apply_kind(library, x, kind), expected, rtol=1e-6, atol=1e-35, equal_nan=True)


def test_gate_rejects_odd_width(library: Library) -> None:
    with pytest.raises(ValueError, match="even number of columns"):
        CpuOps(library).apply_gate(torch.zeros(2, 7), ActivationKind.SILU)


def test_gate_rows_are_independent(library: Library) -> None:
    x = normal(9, 134, seed=1)
    expected = CpuOps(library).apply_gate(x, ActivationKind.SILU)
    x[4] = math.nan
    actual = CpuOps(library).apply_gate(x, ActivationKind.SILU)
    assert actual[4].isnan().all()
    for row in (0, 3, 5, 8):
        assert torch.equal(actual[row], expected[row])
        assert torch.equal(CpuOps(library).apply_gate(x[row : row + 1], ActivationKind.SILU)[0], expected[row])


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_independent_of_threads(dtype: torch.dtype, library: Library) -> None:
    x, result = normal(11, 5002, seed=1, dtype=dtype), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        result.append(CpuOps(library).apply_gate(x, ActivationKind.GELU_TANH))
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])


@pytest.mark.parametrize("name", NAMES)
def test_plain_activation_matches_transformers(name: str, library: Library) -> None:
    activation = get_activation(name, "hidden_act")
    for rows, width in [(0, 8), (1, 1), (7, 67), (2, 3000)]:
        x = 3 * normal(rows, width, seed=width)
        result = CpuOps(library).activate(x, activation)
        torch.testing.assert_close(result, ACT2FN[name](x), rtol=MAX_DIFFERENCE, atol=MAX_DIFFERENCE)


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("name", NAMES)
def test_plain_activation_is_independent_of_batch_and_threads(name: str, library: Library) -> None:
    activation = get_activation(name, "hidden_act")
    for dtype, width in [(torch.float32, 1), (torch.float32, 37), (torch.float32, 1003), (torch.bfloat16, 5)]:
        x = 4 * normal(23, width, seed=width, dtype=dtype)
        torch.set_num_threads(1)
        expected = CpuOps(library).activate(x, activation)
        for threads, first, count in [(1, 0, 1), (1, 5, 2), (2, 3, 7), (2, 0, 23)]:
            torch.set_num_threads(threads)
            rows = slice(first, first + count)
            assert torch.equal(CpuOps(library).activate(x[rows], activation), expected[rows]), (threads, rows, width)
