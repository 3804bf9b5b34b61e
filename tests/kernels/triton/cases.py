"""Adapter batches, and expected outputs of the reference in float32.

Tests run on a GPU if available. Otherwise they run a few small cases in Triton's interpreter on a CPU, which is slow.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from lorax_server.kernels import Field, LinearWeights, LoraBatch, LoraTarget, reference
from tests.kernels.triton.interpreter import IS_INTERPRETED

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]
TOLERANCES = {BF16: 4e-2, FP16: 6e-3, FP32: 2e-5}
UNIT_BYTES = 256  # alignment of tensors in the buffer

# Layer inputs, and outputs of each target.
Layer = tuple[int, tuple[int, ...]]
SMALL_LAYERS: list[Layer] = [(40, (24, 8, 16)), (16, (72,)), (24, (40, 40))]
LARGE_LAYERS: list[Layer] = [(4096, (4096, 1024, 1024)), (1000, (520,)), (1032, (1400, 1400)), (2048, (5632, 5632))]
LAYERS = SMALL_LAYERS if IS_INTERPRETED else SMALL_LAYERS + LARGE_LAYERS

Runs = Sequence[tuple[int, int]]  # adapter, number of tokens


def normal(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class NanBuffer:
    """A buffer with NaN between the tensors."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.unit = dtype, UNIT_BYTES // dtype.itemsize
        self.parts = [torch.full((self.unit,), math.nan, dtype=dtype)]
        self.size = self.unit

    def add(self, piece: torch.Tensor) -> int:
        at, flat = self.size, piece.flatten().to(self.dtype)
        return self.add_bits(flat) if len(flat) else at

    def add_bits(self, flat: torch.Tensor) -> int:
        at, padding = self.size, self.unit + -len(flat) % self.unit
        self.parts += [flat, torch.full((padding,), math.nan, dtype=self.dtype)]
        self.size += len(flat) + padding
        return at

    def join(self, device: torch.device) -> torch.Tensor:
        return torch.cat(self.parts).to(device)


def empty_table(num_adapters: int, num_targets: int) -> torch.Tensor:
    table = torch.zeros(1 + num_adapters, num_targets, len(Field), dtype=torch.long)
    table[:, :, : Field.RANK] = -1
    return table


def make_batch(buffer: torch.Tensor, table: torch.Tensor, features: Sequence[tuple[int, int]], runs: Runs) -> LoraBatch:
    device = buffer.device
    indices = [adapter for adapter, length in runs for _ in range(length)]
    scales = torch.arange(table[..., 0].numel()).view(table.shape[:2]) % 5 * 0.25 + 0.25
    return LoraBatch(
        buffer=buffer,
        table=table.to(device),
        scales=scales.to(device),
        features=torch.tensor(features, device=device),
        adapter_indices=torch.tensor(indices, dtype=torch.int32, device=device),
        host_table=table,
        bounds=[sum(length for _, length in runs[:count]) for count in range(len(runs) + 1)],
        adapters=[adapter for adapter, _ in runs],
    )


def lora_batch(
    layer: Layer,
    runs: Runs,
    ranks: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    output_scales: Sequence[int] = (),
    output_biases: Sequence[int] = (),
) -> LoraBatch:
    """Make a batch: adapter `i + 1` has rank `ranks[i][slice]`, repeated if there are fewer ranks than slices.

    `output_scales` and `output_biases` list adapters with vectors. The layer's targets start at `FIRST_TARGET`.
    """
    inputs, outputs = layer
    buffer, table, seed = NanBuffer(dtype), empty_table(len(ranks), FIRST_TARGET + len(outputs)), 100
    for adapter, of_slices in enumerate(ranks, start=1):
        for index, width in enumerate(outputs):
            fields, rank, seed = table[adapter, FIRST_TARGET + index], of_slices[index % len(of_slices)], seed + 4
            fields[Field.RANK] = rank
            if rank:
                fields[Field.A] = buffer.add(normal(rank, inputs, seed=seed) / math.sqrt(inputs))
                fields[Field.B] = buffer.add(normal(rank, width, seed=seed + 1) / math.sqrt(rank))
            for having, field in ((output_scales, Field.OUTPUT_SCALE), (output_biases, Field.OUTPUT_BIAS)):
                if adapter in having:
                    fields[field] = buffer.add(normal(width, seed=seed + field))
    features = [(inputs, inputs)] * FIRST_TARGET + [(inputs, width) for width in outputs]
    return make_batch(buffer.join(device), table, features, runs)


FIRST_TARGET = 2


def targets_of(layer: Layer) -> list[LoraTarget]:
    features = layer[1]
    return [
        LoraTarget(FIRST_TARGET + index, slice(sum(features[:index]), sum(features[: index + 1])))
        for index in range(len(features))
    ]


def linear_weights(
    layer: Layer, dtype: torch.dtype, device: torch.device, *, bias: bool, padding: int = 0
) -> LinearWeights:
    inputs, outputs = layer[0], sum(layer[1]) + padding
    added = normal(outputs, seed=8, dtype=dtype).to(device) if bias else None
    return LinearWeights((normal(outputs, inputs, seed=7) / math.sqrt(inputs)).to(device, dtype), added)


def inputs_of(layer: Layer, batch: LoraBatch, seed: int = 1) -> torch.Tensor:
    return normal(len(batch.adapter_indices), layer[0], seed=seed, dtype=batch.buffer.dtype).to(batch.buffer.device)


# --- cases


def pairwise_cases(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return a small set of cases that covers all pairs of values of any two axes (pairwise testing)."""
    left = list(product(*(enumerate(axis) for axis in axes)))
    missing = {pair for case in left for pair in pairs_of(case)}
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(missing & pairs_of(case)))
        missing -= pairs_of(best)
        chosen.append(tuple(value for _, value in best))
    return chosen


def pairs_of(case: Sequence[tuple[int, Any]]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    places = [(axis, place) for axis, (place, _) in enumerate(case)]
    return set(combinations(places, 2))


def choose_cases(interpreted: Sequence[Any], on_gpu: Sequence[Any], fast: int | None = None) -> list[Any]:
    """Return the test cases. For the interpreter, all but the first `fast` cases are marked slow."""
    if not IS_INTERPRETED:
        return list(on_gpu)
    first = len(interpreted) if fast is None else fast
    rest = (case if isinstance(case, tuple) else (case,) for case in interpreted[first:])
    return [*interpreted[:first], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]


# --- adapter mixes

MIXED_RANKS = [[16, 0, 5], [0], [24, 64, 1], [40], [8]]
RANKS = {str(rank): [[rank]] * 5 for rank in (1, 8, 16, 24, 64, 512)}
RANKS |= {"mixed": MIXED_RANKS, "wide mix": [[512, 3], *MIXED_RANKS[1:]]}
SOME_RANKS = ["1", "16", "24", "512", "wide mix"]
PROMPT_GROUPS = (
    [(0, 2), (3, 17), (1, 1), (0, 7), (4, 3), (2, 4), (1, 5), (5, 3), (0, 1)]
    if IS_INTERPRETED
    else [(0, 2), (3, 70), (1, 1), (0, 40), (4, 3), (2, 44), (1, 33), (5, 66), (0, 1)]
)
GROUPS = [(0, 2), (3, 17), (1, 1), (0, 1), (4, 3), (2, 4), (1, 2), (5, 2), (0, 1)]


# --- expected values


def widened(batch: LoraBatch) -> LoraBatch:
    """Return the batch in float32 on a CPU, without derived values."""
    return replace(
        batch,
        buffer=batch.buffer.float().cpu(),
        table=batch.table.cpu(),
        scales=batch.scales.cpu(),
        features=batch.features.cpu(),
        adapter_indices=batch.adapter_indices.cpu(),
        derived={},
    )


def widened_weights(weights: LinearWeights) -> LinearWeights:
    bias = weights.bias
    return LinearWeights(weights.plain.float().cpu(), None if bias is None else bias.float().cpu())


def expected_linear(x: torch.Tensor, layer: Layer, batch: LoraBatch, *, bias: bool) -> torch.Tensor:
    weights = widened_weights(linear_weights(layer, batch.buffer.dtype, torch.device("cpu"), bias=bias))
    return reference.linear(x.float().cpu(), weights, widened(batch), targets_of(layer))


def check_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with float32. The tolerance scales with the largest value of each row."""
    assert found.dtype == dtype
    error = (found.float().cpu() - expected).abs()
    allowed = expected.abs() + 2 * expected.square().mean(dim=1, keepdim=True).sqrt()
    assert found.isfinite().all()
    assert (error <= TOLERANCES[dtype] * allowed).all(), (
        f"{float((error / allowed).nan_to_num().max())} of a row's size"
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


# --- uninitialized memory


@pytest.fixture
def nan_filled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, and integers with an invalid index."""
    make = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        out: torch.Tensor = make(self, *args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(math.nan if out.is_floating_point() else 123 if out.dtype.itemsize == 1 else -12345)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
