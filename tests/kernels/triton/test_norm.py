"""Triton norms and RoPE against the reference on a CPU."""

import math

import pytest
import torch

from lorax_server.kernels import Field, LoraBatch, LoraTarget, reference
from lorax_server.kernels.triton.norm import layer_norm, rms_norm, rotary
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import pairwise_cases
from tests.kernels.triton.paging import normal

# One ulp, or a few in the interpreter, which truncates bfloat16 instead of rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = torch.tensor(1e-5)


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype", "has_residual"),
    pairwise_cases([(3, 64), (2, 100), (1, 1), (0, 8), (2, 3, 20)], DTYPES, [False, True]),
)
def test_rms_norm_matches_reference(
    dtype: torch.dtype, has_residual: bool, shape: tuple[int, ...], device: torch.device
) -> None:
    x, weight = normal(*shape, seed=1, dtype=dtype), normal(shape[-1], seed=2, dtype=dtype)
    residual = normal(*shape, seed=3, dtype=dtype) if has_residual else None
    expected = reference.rms_norm(x, residual, weight, EPS)
    given = None if residual is None else residual.to(device)
    actual = rms_norm(x.to(device), given, weight.to(device), EPS.to(device))
    for ours, theirs in zip(actual, expected, strict=True):
        check_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_weight_multiplies_before_rounding(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = normal(8, 128, seed=1, dtype=dtype), normal(128, seed=2) + 1
    expected, _ = reference.rms_norm(x, None, weight, EPS)
    actual, _ = rms_norm(x.to(device), None, weight.to(device), EPS.to(device))
    assert actual.dtype == dtype
    check_close(actual, expected)
    if dtype == torch.float16:  # the interpreter truncates bfloat16
        assert (actual.cpu() != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_heads_matches_reference(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = normal(4, 6, 16, seed=1, dtype=dtype), normal(16, seed=2, dtype=dtype)
    expected, _ = reference.rms_norm(x[:, 1:4], None, weight, EPS)
    given = x.to(device)
    actual, same = rms_norm(given[:, 1:4], None, weight.to(device), EPS.to(device))
    check_close(actual, expected)
    assert torch.equal(given.cpu(), x)
    assert torch.equal(same.cpu(), x[:, 1:4])


@pytest.mark.parametrize(
    ("shape", "dtype", "has_weight", "has_bias"),
    pairwise_cases([(3, 64), (2, 100), (1, 1), (0, 8), (2, 3, 20)], DTYPES, [False, True], [False, True]),
)
def test_layer_norm_matches_reference(
    dtype: torch.dtype, has_weight: bool, has_bias: bool, shape: tuple[int, ...], device: torch.device
) -> None:
    """Rows have a large mean, which costs precision in sums of squares."""
    x = normal(*shape, seed=1).add(30).to(dtype)
    weight = normal(shape[-1], seed=2, dtype=dtype) if has_weight else None
    bias = normal(shape[-1], seed=3, dtype=dtype) if has_bias else None
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    weight, bias = (None if vector is None else vector.to(device) for vector in (weight, bias))
    check_close(layer_norm(x.to(device), weight, bias, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_strided_heads_matches_reference(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = normal(4, 6, 16, seed=1, dtype=dtype), normal(16, seed=2, dtype=dtype)
    expected = reference.layer_norm(x[:, 1:4], weight, None, 1e-5)
    check_close(layer_norm(x.to(device)[:, 1:4], weight.to(device), None, 1e-5), expected)


def adapters(size: int, dtype: torch.dtype, device: torch.device) -> LoraBatch:
    """Make four adapters: without vectors, with an output scale, an output bias, or both. NaN surrounds the vectors."""
    buffer = torch.full((7 * size,), math.nan)
    table = torch.full((5, 3, len(Field)), -1)
    at = 0
    for adapter, fields in enumerate(
        [[], [], [Field.OUTPUT_SCALE], [Field.OUTPUT_BIAS], [Field.OUTPUT_SCALE, Field.OUTPUT_BIAS]]
    ):
        for field in fields:
            at += size // 2
            buffer[at : at + size] = normal(size, seed=adapter * 10 + field)
            table[adapter, 1, field] = at
            at += size
    table[..., Field.RANK :] = 0
    indices = torch.tensor([0, 1, 2, 2, 3, 4], dtype=torch.int32)
    return LoraBatch(
        buffer=buffer.to(device, dtype),
        table=table.to(device),
        scales=torch.ones(5, 3, device=device),
        features=torch.full((3, 2), size, device=device),
        adapter_indices=indices.to(device),
        host_table=table,
        bounds=[0, 1, 2, 4, 5, 6],
        adapters=[0, 1, 2, 3, 4],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_applies_adapter_of_each_row(dtype: torch.dtype, has_residual: bool, device: torch.device) -> None:
    x, weight = normal(6, 20, seed=1, dtype=dtype), normal(20, seed=2, dtype=dtype)
    residual = normal(6, 20, seed=3, dtype=dtype) if has_residual else None
    targets = [LoraTarget(1, slice(0, 20))]
    lora = adapters(20, dtype, torch.device("cpu"))
    expected, total = reference.rms_norm(x, residual, weight, EPS, lora, targets)
    given = None if residual is None else residual.to(device)
    on_device = adapters(20, dtype, device)
    actual, summed = rms_norm(x.to(device), given, weight.to(device), EPS.to(device), on_device, targets)
    check_close(actual, expected)
    check_close(summed, total)
    plain, _ = rms_norm(x.to(device), given, weight.to(device), EPS.to(device), on_device, [])
    check_close(plain, reference.rms_norm(x, residual, weight, EPS)[0])
    assert not torch.allclose(plain[2:].float(), actual[2:].float(), atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_applies_adapter_of_each_row(dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(6, 20), (20,), (20,)]))
    targets = [LoraTarget(1, slice(0, 20))]
    expected = reference.layer_norm(x, weight, bias, 1e-5, adapters(20, dtype, torch.device("cpu")), targets)
    given = x.to(device), weight.to(device), bias.to(device), 1e-5
    check_close(TritonOps().layer_norm(*given, adapters(20, dtype, device), targets), expected)
    check_close(TritonOps().layer_norm(*given), reference.layer_norm(x, weight, bias, 1e-5))


def test_partial_norm_targets_are_rejected(device: torch.device) -> None:
    x, weight = normal(6, 20, seed=1).to(device), normal(20, seed=2).to(device)
    with pytest.raises(ValueError, match="must cover whole rows"):
        rms_norm(x, None, weight, EPS.to(device), adapters(20, x.dtype, device), [LoraTarget(1, slice(0, 10))])


@pytest.mark.parametrize(
    ("heads", "dim", "turning", "dtype"),
    [
        (3, 16, 16, torch.bfloat16),
        (5, 20, 12, torch.float32),
        (5, 20, 12, torch.float16),
        (1, 2, 2, torch.float16),
        (4, 8, 0, torch.float32),
        (33, 128, 128, torch.bfloat16),
    ],
)
def test_rotary_matches_reference(dtype: torch.dtype, heads: int, dim: int, turning: int, device: torch.device) -> None:
    whole = normal(3, heads + 2, dim, seed=1, dtype=dtype)
    angles = normal(3, turning // 2, seed=2)
    actual = whole.to(device)
    rotary(actual[:, 1 : 1 + heads], angles.cos().to(device), angles.sin().to(device))
    reference.rotary(whole[:, 1 : 1 + heads], angles.cos(), angles.sin())
    check_close(actual, whole)


# --- on a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "dtype"), list(zip([128, 896, 896, 4096, 4096, 5120, 16384, 16384], DTYPES * 3, strict=False))
)
def test_rms_norm_with_real_model_shapes_matches_reference(dtype: torch.dtype, size: int) -> None:
    x, residual = (normal(70, size, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = normal(size, seed=3, dtype=dtype)
    expected = reference.rms_norm(x, residual, weight, EPS)
    actual = rms_norm(x.cuda(), residual.cuda(), weight.cuda(), EPS.cuda())
    assert torch.equal(actual[1].cpu(), expected[1])
    one_place = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(actual[0].cpu(), expected[0], rtol=one_place, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "dtype"), list(zip([64, 768, 768, 4096, 4096, 5120, 16384, 16384], DTYPES * 3, strict=False))
)
def test_layer_norm_with_real_model_shapes_matches_reference(dtype: torch.dtype, size: int) -> None:
    shapes = [(70, size), (size,), (size,)]
    x, weight, bias = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    expected = reference.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    actual = layer_norm(x.cuda(), weight.cuda(), bias.cuda(), 1e-5).cpu().float()
    half_place = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=half_place, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dtype"), [(128, torch.bfloat16), (4096, torch.bfloat16), (1000, torch.float32)])
def test_norm_bits_are_batch_invariant(dtype: torch.dtype, size: int) -> None:
    x, weight = normal(70, size, seed=1, dtype=dtype).cuda(), normal(size, seed=2, dtype=dtype).cuda()
    together = rms_norm(x, x, weight, EPS.cuda())[0], layer_norm(x, weight, weight, 1e-5)
    for row in range(70):
        one = x[row : row + 1]
        assert torch.equal(rms_norm(one, one, weight, EPS.cuda())[0][0], together[0][row])
        assert torch.equal(layer_norm(one, weight, weight, 1e-5)[0], together[1][row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_rounding_matches_reference(dtype: torch.dtype) -> None:
    x, angles = normal(70, 40, 128, seed=1, dtype=dtype), normal(70, 64, seed=2)
    actual = x.cuda()
    rotary(actual, angles.cos().cuda(), angles.sin().cuda())
    reference.rotary(x, angles.cos(), angles.sin())
    assert torch.equal(actual.cpu(), x)


@pytest.mark.gpu
def test_norm_graph_can_be_replayed_with_different_adapters() -> None:
    device = torch.device("cuda")
    x, weight, eps = (tensor.cuda() for tensor in (normal(6, 20, seed=1), normal(20, seed=2), EPS))
    lora, targets = adapters(20, x.dtype, device), [LoraTarget(1, slice(0, 20))]
    angles = normal(6, 10, seed=3).cuda()

    def step() -> torch.Tensor:
        normed, _ = rms_norm(x, x, weight, eps, lora, targets)
        rotary(normed[:, None], angles.cos(), angles.sin())
        return normed

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for indices in ([4, 4, 3, 2, 0, 0], [1, 0, 4, 2, 3, 3]):
        lora.adapter_indices.copy_(torch.tensor(indices))
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, step())
        assert captured.isfinite().all()
