"""Native norms against the reference and float64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lorax_server.kernels import Field, LoraBatch, LoraTarget, reference
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One ulp in half precision: sums that differ in the last bit can round differently.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZES = [1, 5, 16, 64, 67, 100, 576, 4096]
EPS = torch.tensor(1e-5)

Norm = Callable[[torch.Tensor, torch.Tensor, LoraBatch | None], torch.Tensor]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def both_norms(library: Library, weight: torch.Tensor, bias: torch.Tensor) -> list[Norm]:
    """Return both norms as functions with the same signature."""
    targets = [LoraTarget(1, slice(0, len(weight)))]
    return [
        lambda x, residual, lora: CpuOps(library).rms_norm(x, residual, weight, EPS, lora, targets)[0],
        lambda x, _, lora: CpuOps(library).layer_norm(x, weight, bias, 1e-5, lora, targets),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_matches_reference(dtype: torch.dtype, has_residual: bool, library: Library) -> None:
    for size in SIZES:
        for rows in (0, 1, 3, 20):
            x, weight = normal(rows, size, seed=1, dtype=dtype), normal(size, seed=2, dtype=dtype)
            residual = normal(rows, size, seed=3, dtype=dtype) if has_residual else None
            expected, summed = reference.rms_norm(x, residual, weight, EPS)
            actual, total = CpuOps(library).rms_norm(x, residual, weight, EPS)
            check_close(actual, expected)
            assert torch.equal(total, summed)
            assert has_residual or total is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounding_matches_reference(dtype: torch.dtype, library: Library) -> None:
    """Nearly all values are equal. A missing rounding step would change about 10 % of them."""
    x, residual, weight = (normal(*shape, seed=4, dtype=dtype) for shape in ((64, 576), (64, 576), (576,)))
    actual, _ = CpuOps(library).rms_norm(x, residual, weight, EPS)
    expected, _ = reference.rms_norm(x, residual, weight, EPS)
    assert (actual != expected).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weight_multiplies_before_rounding(dtype: torch.dtype, library: Library) -> None:
    x, residual = (normal(64, 576, seed=seed, dtype=dtype) for seed in (4, 5))
    weight = normal(576, seed=6) + 1
    actual, total = CpuOps(library).rms_norm(x, residual, weight, EPS)
    expected, summed = reference.rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, summed)
    assert (actual != expected).float().mean() < 1e-3
    narrow, _ = reference.rms_norm(x, residual, weight.to(dtype), EPS)
    assert (actual != narrow).float().mean() > 0.1
    with pytest.raises(ValueError, match="norm weight must have shape"):
        CpuOps(library).rms_norm(x, residual, weight[1:], EPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_matches_reference(dtype: torch.dtype, library: Library) -> None:
    for size in SIZES:
        for rows in (0, 1, 20):
            x = normal(rows, size, seed=1, dtype=dtype)
            for affine in (False, True):
                weight, bias = (normal(size, seed=seed, dtype=dtype) if affine else None for seed in (2, 3))
                expected = reference.layer_norm(x, weight, bias, 1e-5)
                check_close(CpuOps(library).layer_norm(x, weight, bias, 1e-5), expected)


def test_layer_norm_is_precise_for_large_mean(library: Library) -> None:
    x = normal(3, 4000, seed=1) * 0.1 + 300
    expected = F.layer_norm(x.double(), (4000,), eps=1e-5)
    actual = CpuOps(library).layer_norm(x, None, None, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3)  # rounding of x


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_match_reference(dtype: torch.dtype, library: Library) -> None:
    whole, weight = normal(4, 6, 20, seed=1, dtype=dtype), normal(20, seed=2, dtype=dtype)
    layouts = [whole, whole[:, 1:4], whole[:, 2], whole[1:, :, :].transpose(0, 1), normal(20, 6, seed=3, dtype=dtype).T]
    for x in layouts:
        actual, same = CpuOps(library).rms_norm(x, None, weight, EPS)
        assert same is x or torch.equal(same, x)
        check_close(actual, reference.rms_norm(x, None, weight, EPS)[0])
        check_close(CpuOps(library).layer_norm(x, weight, None, 1e-5), reference.layer_norm(x, weight, None, 1e-5))
        summed = CpuOps(library).rms_norm(x, torch.ones_like(x), weight, EPS)
        for ours, theirs in zip(summed, reference.rms_norm(x, torch.ones_like(x), weight, EPS), strict=True):
            check_close(ours, theirs)


def test_mismatched_residual_is_rejected(library: Library) -> None:
    x, weight = normal(3, 8, seed=1), normal(8, seed=2)
    for residual in (normal(2, 8, seed=3), normal(3, 8, seed=3).half()):
        with pytest.raises(ValueError, match="shape and dtype of x"):
            CpuOps(library).rms_norm(x, residual, weight, EPS)


# --- adapters

KINDS = [
    [],
    [],
    [Field.OUTPUT_SCALE],
    [Field.OUTPUT_BIAS],
    [Field.OUTPUT_SCALE, Field.OUTPUT_BIAS],
]  # vectors of each adapter; 0 is the base model
RUNS = [(0, 1), (1, 2), (2, 12), (3, 1), (4, 3), (2, 1)]  # adapter, tokens


def adapters(size: int, dtype: torch.dtype, runs: list[tuple[int, int]] = RUNS) -> LoraBatch:
    """Make an adapter batch with vectors at target 1, surrounded by NaN."""
    buffer = torch.full((len(KINDS) * 4 * size + 8,), math.nan)
    table = torch.full((len(KINDS), 3, len(Field)), -1)
    table[..., Field.RANK :] = 0
    at = 3
    for adapter, fields in enumerate(KINDS):
        for field in fields:
            buffer[at : at + size] = normal(size, seed=adapter * 10 + field)
            table[adapter, 1, field] = at
            at += size + 1
    indices = [adapter for adapter, length in runs for _ in range(length)]
    return LoraBatch(
        buffer=buffer.to(dtype),
        table=table,
        scales=torch.ones(len(KINDS), 3),
        features=torch.full((3, 2), size),
        adapter_indices=torch.tensor(indices, dtype=torch.int32),
        host_table=table,
        bounds=[sum(length for _, length in runs[:count]) for count in range(len(runs) + 1)],
        adapters=[adapter for adapter, _ in runs],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [20, 131])
def test_norm_applies_adapter_of_each_row(dtype: torch.dtype, size: int, library: Library) -> None:
    x, residual = normal(20, size, seed=1, dtype=dtype), normal(20, size, seed=2, dtype=dtype)
    weight, bias = normal(size, seed=3, dtype=dtype), normal(size, seed=4, dtype=dtype)
    lora, targets = adapters(size, dtype), [LoraTarget(1, slice(0, size))]
    expected, summed = reference.rms_norm(x, residual, weight, EPS, lora, targets)
    actual, total = CpuOps(library).rms_norm(x, residual, weight, EPS, lora, targets)
    check_close(actual, expected)
    assert torch.equal(total, summed)
    plain, _ = CpuOps(library).rms_norm(x, residual, weight, EPS, lora, [])
    check_close(plain, reference.rms_norm(x, residual, weight, EPS)[0])
    assert torch.equal(plain[:3], actual[:3])
    assert not torch.allclose(plain[3:].float(), actual[3:].float(), atol=0.1)
    expected = reference.layer_norm(x, weight, bias, 1e-5, lora, targets)
    check_close(CpuOps(library).layer_norm(x, weight, bias, 1e-5, lora, targets), expected)


def test_mismatched_adapters_are_rejected(library: Library) -> None:
    x, weight = normal(20, 8, seed=1), normal(8, seed=2)
    for rows, columns in ((x[:19], slice(0, 8)), (x, slice(0, 4))):
        with pytest.raises(ValueError, match="must cover all columns"):
            CpuOps(library).rms_norm(rows, None, weight, EPS, adapters(8, x.dtype), [LoraTarget(1, columns)])


# --- batch invariance


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_bits_are_batch_invariant(dtype: torch.dtype, library: Library) -> None:
    size = 131
    x, residual = normal(20, size, seed=1, dtype=dtype), normal(20, size, seed=2, dtype=dtype)
    for norm in both_norms(library, normal(size, seed=3, dtype=dtype), normal(size, seed=4, dtype=dtype)):
        together = norm(x, residual, adapters(size, dtype))
        owners = [adapter for adapter, length in RUNS for _ in range(length)]
        for row in (0, 2, 7, 15, 19):
            one = slice(row, row + 1)
            alone = norm(x[one], residual[one], adapters(size, dtype, [(owners[row], 1)]))
            assert torch.equal(together[one], alone)


def test_nan_row_does_not_affect_other_rows(library: Library) -> None:
    x, residual = normal(20, 67, seed=1), normal(20, 67, seed=2)
    for norm in both_norms(library, normal(67, seed=3), normal(67, seed=4)):
        expected = norm(x, residual, None)
        for bad in (math.nan, math.inf):
            broken = x.clone()
            broken[7, 66] = bad
            actual = norm(broken, residual, None)
            assert actual[7].isnan().any()
            assert torch.equal(actual[:7], expected[:7])
            assert torch.equal(actual[8:], expected[8:])


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_independent_of_threads(dtype: torch.dtype, library: Library) -> None:
    size, runs = 2051, [(2, 17), (0, 9), (4, 1), (3, 14)]
    x, residual = normal(41, size, seed=1, dtype=dtype), normal(41, size, seed=2, dtype=dtype)
    norms = both_norms(library, normal(size, seed=3, dtype=dtype), normal(size, seed=4, dtype=dtype))
    result = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        result.append([norm(x, residual, adapters(size, dtype, runs)) for norm in norms])
    for others in result[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(result[0], others, strict=True))


@pytest.mark.parametrize("bits", [0x7FFF, 0x7F81, -1, -0x7F])  # the last two are negative NaN
def test_bfloat16_nan_stays_nan(bits: int, library: Library) -> None:
    x = torch.full((1, 20), bits, dtype=torch.int16).view(torch.bfloat16)
    assert x.isnan().all()
    normed, total = CpuOps(library).rms_norm(x, torch.ones_like(x), torch.ones(20, dtype=x.dtype), EPS)
    assert normed.isnan().all()
    assert total.isnan().all()
    assert CpuOps(library).layer_norm(x, None, None, 1e-5).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 5, 67, 576, 4096])
def test_scale_and_shift_matches_reference(size: int, dtype: torch.dtype, library: Library) -> None:
    """Use three adjacent targets in strided rows. Only the second target has vectors."""
    lora = adapters(size, dtype)
    targets = [LoraTarget(i, slice(2 + i * size, 2 + (i + 1) * size)) for i in range(3)]
    rows = normal(len(lora.adapter_indices), 3 * size + 4, seed=7, dtype=dtype)
    for some in (targets, targets[1:2], targets[:1]):
        actual, expected = rows.clone(), rows.clone()
        CpuOps(library).scale_and_shift(actual, lora, some)
        reference.scale_and_shift(expected, lora, some)
        check_close(actual, expected)
        assert torch.equal(actual, rows) == (some == targets[:1])


def test_scale_and_shift_rejects_mismatched_rows(library: Library) -> None:
    lora, targets = adapters(8, torch.float32), [LoraTarget(1, slice(0, 8))]
    tokens = len(lora.adapter_indices)
    for rows in (normal(tokens - 1, 8, seed=1), normal(tokens, 8, seed=1).half(), normal(8, tokens, seed=1).t()):
        with pytest.raises(ValueError, match=f"must be {tokens} rows"):
            CpuOps(library).scale_and_shift(rows, lora, targets)
