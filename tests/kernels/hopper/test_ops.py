"""Hopper ops against float32 and the reference."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import reference
from lorax_server.kernels.ops import Activation
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
pytest.importorskip("triton", reason="needs Triton")
from lorax_server.kernels.hopper.ops import HopperOps
from tests.kernels.hopper.test_linear import TOLERANCE, make_adapters

pytestmark = pytest.mark.gpu

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module")
def ops() -> HopperOps:
    return HopperOps(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 256, 257, 300, 1000, 2500])
@pytest.mark.parametrize(("inputs", "widths"), [(1024, (1024, 256, 256)), (520, (136,)), (512, (2048, 2048))])
def test_linear_with_any_number_of_tokens_matches_reference(
    ops: HopperOps, inputs: int, widths: Sequence[int], tokens: int, bias: bool, dtype: torch.dtype
) -> None:
    world = LinearCase(inputs, widths, make_adapters(9, len(widths)), dtype=dtype, bias=bias, seed=tokens)
    x = world.normal(tokens, inputs)
    for indices in (draw_adapters(tokens, 9, tokens), [7] * tokens, [0] * tokens):
        got = ops.linear(x, world.weights, world.batch(indices), world.targets)
        assert error(got, world.expected(x, indices)) < 2 * TOLERANCE[dtype]
    plain = ops.linear(x, world.weights, None, ())
    assert error(plain, world.expected(x, [0] * tokens)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 64, 200, 300, 2500])
def test_gated_linear_matches_float32(ops: HopperOps, tokens: int, name: str) -> None:
    world = LinearCase(512, (1032, 1032), make_adapters(9, 2), bias=True, seed=tokens)
    x, activation = world.normal(tokens, 512), Activation(name, ACTIVATIONS[name])
    for indices in (draw_adapters(tokens, 9, tokens), [0] * tokens):
        gate, up = world.expected(x, indices).chunk(2, dim=-1)
        got = ops.gated_linear(x, world.weights, activation, world.batch(indices), world.targets)
        assert error(got, ACTIVATIONS[name](gate) * up) < 0.01


def test_nan_token_does_not_affect_other_tokens(ops: HopperOps) -> None:
    world = LinearCase(512, (1024, 1024), [Adapter([16, 16]), Adapter([40, 0])])
    indices = [1] * 150 + [2] * 150
    x = world.normal(300, 512)
    x[7] = torch.nan
    batch, activation = world.batch(indices), Activation("silu", F.silu)
    for got in (
        ops.linear(x, world.weights, batch, world.targets),
        ops.gated_linear(x, world.weights, activation, batch, world.targets),
    ):
        assert got.isnan().any(1).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 520, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_rms_norm_matches_reference_within_last_bit(ops: HopperOps, rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(n, width, device="cuda").to(dtype) for n in (rows, rows, 1))
    eps = torch.tensor(1e-5, device="cuda")
    for added in (None, residual):
        got, total = ops.rms_norm(x, added, weight[0], eps)
        expected, sum_ = reference.rms_norm(x, added, weight[0], eps)
        assert torch.equal(total, sum_)
        assert (got != expected).float().mean() < 0.02  # another summation order can change the last bit
        torch.testing.assert_close(got, expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("rows", [3, 64])
def test_rms_norm_applies_output_scale_and_bias(ops: HopperOps, rows: int) -> None:
    world = LinearCase(64, (1024,), [Adapter([0], vectors=True), Adapter([8])])
    x, weight = world.normal(rows, 1024), world.normal(1024)
    indices = draw_adapters(rows, 2, 5)
    eps = torch.tensor(1e-5, device="cuda")
    got = ops.rms_norm(x, None, weight, eps, world.batch(indices), world.targets)[0]
    expected = reference.rms_norm(x, None, weight, eps, world.batch(indices), world.targets)[0]
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [3584, 5120, 2304])
def test_rms_norm_with_float32_weight_matches_reference(ops: HopperOps, width: int, dtype: torch.dtype) -> None:
    """Gemma multiplies by the weight in float32 before rounding, so it uses the Triton kernel."""
    x, residual = (torch.randn(16, width, device="cuda").to(dtype) for _ in range(2))
    weight, eps = 1 + 0.1 * torch.randn(width, device="cuda"), torch.tensor(1e-6, device="cuda")
    got, total = ops.rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    wide = total.float()
    expected = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(dtype)
    assert (got != expected).float().mean() < 0.02
    torch.testing.assert_close(got, expected, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(16, 4544), (300, 8192), (1, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm_matches_float32(ops: HopperOps, has_bias: bool, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(n, width, device="cuda").to(dtype) for n in (rows, 1, 1))
    got = ops.layer_norm(x, weight[0], bias[0] if has_bias else None, 1e-5)
    wide = F.layer_norm(x.double(), (width,), weight[0].double(), bias[0].double() if has_bias else None, 1e-5)
    torch.testing.assert_close(got.double(), wide, rtol=0.02, atol=2e-2)
