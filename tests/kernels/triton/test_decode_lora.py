"""LoRA for decode steps."""

import math
import random
from dataclasses import replace

import pytest
import torch

from lorax_server.kernels import LoraBatch, reference
from lorax_server.kernels.triton.ops import TritonOps
from tests.kernels.triton.cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    GROUPS,
    LARGE_LAYERS,
    LAYERS,
    MIXED_RANKS,
    RANKS,
    SMALL_LAYERS,
    SOME_RANKS,
    Layer,
    Runs,
    bits,
    check_close,
    choose_cases,
    expected_linear,
    inputs_of,
    linear_weights,
    lora_batch,
    normal,
    pairwise_cases,
    targets_of,
    widened,
)

RUNS: dict[str, Runs] = {
    "one": [(1, 1)],
    "one each": [(adapter, 1) for adapter in (3, 1, 2, 5, 4)],
    "groups": GROUPS,
    "one group": [(3, 40)],
    "base": [(0, 4)],
    "full": [(adapter, 51) for adapter in range(1, 6)] + [(0, 1)],
}
CASES = choose_cases(
    [
        (SMALL_LAYERS[1], FP16, "24", "one each"),
        (SMALL_LAYERS[0], FP32, "16", "base"),
        (SMALL_LAYERS[0], BF16, "mixed", "groups"),
        (SMALL_LAYERS[2], FP32, "1", "one group"),
        (SMALL_LAYERS[1], BF16, "512", "one"),
    ],
    [
        *pairwise_cases(SMALL_LAYERS, DTYPES, SOME_RANKS, RUNS),
        *pairwise_cases(LARGE_LAYERS, [BF16], ["16", "wide mix"], ["one", "groups", "full"]),
    ],
    fast=2,
)
VECTOR_CASES = choose_cases(
    [(SMALL_LAYERS[1], FP32, "mixed")], list(zip(LAYERS, DTYPES * 3, ["mixed", "8"] * 4, strict=False))
)


def poison(ops: TritonOps) -> None:
    for scratch in ops._scratch.values():
        scratch.fill_(math.nan)


def check_linear(layer: Layer, batch: LoraBatch, bias: bool = False) -> None:
    dtype, device = batch.buffer.dtype, batch.buffer.device
    ops, weights = TritonOps(), linear_weights(layer, dtype, device, bias=bias)
    for seed in range(2):
        x = inputs_of(layer, batch, seed)
        out = ops.linear(x, weights, batch, targets_of(layer))
        check_close(out, expected_linear(x, layer, batch, bias=bias), dtype)
        poison(ops)


@pytest.mark.parametrize(("layer", "dtype", "ranks", "runs"), CASES, ids=str)
def test_linear_applies_adapter_of_each_row(
    device: torch.device, layer: Layer, dtype: torch.dtype, ranks: str, runs: str
) -> None:
    check_linear(layer, lora_batch(layer, RUNS[runs], RANKS[ranks], device=device, dtype=dtype))


@pytest.mark.parametrize(("layer", "dtype", "ranks"), VECTOR_CASES, ids=str)
def test_linear_applies_output_scales_and_biases(
    device: torch.device, layer: Layer, dtype: torch.dtype, ranks: str
) -> None:
    batch = lora_batch(
        layer,
        RUNS["groups"],
        RANKS[ranks],
        device=device,
        dtype=dtype,
        output_scales=[1, 2, 3],
        output_biases=[2, 3, 4],
    )
    check_linear(layer, batch, bias=True)


@pytest.mark.parametrize("dtype", choose_cases([BF16], DTYPES), ids=str)
def test_add_lora_changes_only_target_columns(device: torch.device, dtype: torch.dtype) -> None:
    layer = SMALL_LAYERS[1]
    batch = lora_batch(
        layer, RUNS["groups"], MIXED_RANKS, device=device, dtype=dtype, output_scales=[1], output_biases=[2]
    )
    x, width = inputs_of(layer, batch), sum(layer[1])
    out = normal(len(x), width + 8, seed=3, dtype=dtype).to(device)
    before, expected = out.clone(), out[:, :width].float().cpu()
    TritonOps().add_lora(out, x, batch, targets_of(layer))
    reference.add_lora(expected, x.float().cpu(), widened(batch), targets_of(layer))
    check_close(out[:, :width], expected, dtype)
    assert torch.equal(out[:, width:], before[:, width:])
    is_base = batch.adapter_indices == 0
    assert torch.equal(out[is_base], before[is_base])


@pytest.mark.slow
def test_nan_rows_and_adapters_do_not_affect_other_rows(device: torch.device) -> None:
    layer = SMALL_LAYERS[0]
    runs: Runs = [(1, 3), (3, 2), (0, 1), (4, 2), (3, 1)]
    batch = lora_batch(layer, runs, MIXED_RANKS, device=device, dtype=BF16)
    weights, ops, targets = linear_weights(layer, BF16, device, bias=False), TritonOps(), targets_of(layer)
    x = inputs_of(layer, batch)
    clean = ops.linear(x, weights, batch, targets)
    x[1] = math.nan  # a row
    broken = batch.host_table[4, targets[0].index]  # an adapter
    batch.buffer[broken[0] : broken[0] + layer[0]] = math.nan
    out = ops.linear(x, weights, batch, targets)
    others = [0, 2, 3, 4, 5, 8]
    assert torch.equal(bits(out[others]), bits(clean[others]))
    assert out[1].isnan().all()
    assert out[6:8, targets[0].columns].isnan().all()
    rest = slice(targets[1].columns.start, None)
    assert torch.equal(bits(out[6:8, rest]), bits(clean[6:8, rest]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "dtype"), choose_cases([(LAYERS[0], BF16)], pairwise_cases([LAYERS[0], LAYERS[-1]], DTYPES)), ids=str
)
def test_lora_bits_are_independent_of_adapter_mix(device: torch.device, dtype: torch.dtype, layer: Layer) -> None:
    targets, ops = targets_of(layer), TritonOps()
    mixes: list[tuple[Runs, int]] = [
        ([(3, 1), (0, 19)], 0),
        ([(1, 2), (3, 17), (5, 1)], 18),
        ([(3, 20)], 7),
        ([(1, 9), (2, 1), (3, 1), (4, 9)], 10),
    ]
    result = []
    row, base = normal(layer[0], seed=5, dtype=dtype), normal(sum(layer[1]), seed=6, dtype=dtype)
    for seed, (runs, place) in enumerate(mixes):
        batch = lora_batch(layer, runs, MIXED_RANKS, device=device, dtype=dtype, output_scales=[3])
        x = inputs_of(layer, batch, seed)
        out = normal(20, sum(layer[1]), seed=seed, dtype=dtype).to(device)
        x[place], out[place] = row.to(device), base.to(device)
        ops.add_lora(out, x, batch, targets)
        result.append(bits(out[place]))
    assert all(torch.equal(result[0], other) for other in result)


def shuffle(batch: LoraBatch, seed: int) -> LoraBatch:
    """Change the adapters in place, and return an equal new batch."""
    draw = random.Random(seed)
    rows = len(batch.adapter_indices)
    indices = [adapter for _ in range(rows) for adapter in [draw.randrange(6)] * draw.choice((1, 2, 17))][:rows]
    batch.adapter_indices.copy_(torch.tensor(indices, dtype=torch.int32))
    runs = [(adapter, 1) for adapter in indices]
    bounds = list(range(len(runs) + 1))
    return replace(batch, bounds=bounds, adapters=indices, derived={})


@pytest.mark.slow
def test_changed_batch_is_planned_in_place(device: torch.device) -> None:
    layer, ops = SMALL_LAYERS[0], TritonOps()
    made = lora_batch(layer, [(1, 20)], MIXED_RANKS, device=device, dtype=BF16)
    batch = replace(made, host_table=torch.zeros(0), bounds=[], adapters=[])  # as for a captured graph
    weights = linear_weights(layer, BF16, device, bias=False)
    ops.refresh_lora_plan(batch, batch)
    tiles = batch.derived["decode tiles"]
    for seed in range(3):
        same = replace(shuffle(made, seed), derived={})
        ops.refresh_lora_plan(batch, batch)
        x = inputs_of(layer, batch, seed)
        check_close(ops.linear(x, weights, batch, targets_of(layer)), expected_linear(x, layer, same, bias=False), BF16)
    assert all(now is before for now, before in zip(batch.derived["decode tiles"], tiles, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_graph_can_be_replayed_with_any_adapter_mix(device: torch.device, layer: Layer) -> None:
    ops, targets, weights = TritonOps(), targets_of(layer), linear_weights(layer, BF16, device, bias=True)
    made = lora_batch(layer, [(1, 64)], MIXED_RANKS, device=device, dtype=BF16, output_scales=[1, 3], output_biases=[2])
    batch = replace(made, host_table=torch.zeros(0), bounds=[], adapters=[])
    x = inputs_of(layer, batch)
    ops.refresh_lora_plan(batch, batch)
    ops.linear(x, weights, batch, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weights, batch, targets)
    for seed in range(4):
        same = shuffle(made, seed)
        ops.refresh_lora_plan(batch, batch)
        x.copy_(inputs_of(layer, batch, seed))
        out.fill_(math.nan)
        poison(ops)
        graph.replay()
        check_close(out, expected_linear(x, layer, same, bias=True), BF16)
