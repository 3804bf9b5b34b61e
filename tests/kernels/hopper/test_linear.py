"""Fused linear layers with adapters against float32. Requires a Hopper GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch

from lorax_server.kernels.ops import LoraBatch
from tests.kernels.batches import Adapter, LinearCase, draw_adapters, error, spread_adapters

pytest.importorskip("cuda.bindings", reason="needs cuda-core")
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.linear import FusedLinear

pytestmark = pytest.mark.gpu

Fused = dict[torch.dtype, FusedLinear]

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
# Inputs and outputs: 8B model layers, narrow layers, and widths that are no multiple of a tile.
SHAPES = [
    (4096, (4096, 1024, 1024)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
    (896, (896, 128, 128)),
    (4864, (896,)),
    (1024, (128,)),
    (72, (200, 104)),
]
ROWS = [1, 3, 8, 13, 32, 64, 100, 128]
RANKS = [16, 8, 1, 24, 64, 40, 512, 9, 16]


@pytest.fixture(scope="module")
def fused() -> Fused:
    kernels = Kernels(torch.device("cuda", 0))
    return {dtype: FusedLinear(kernels, dtype) for dtype in TOLERANCE}


def make_adapters(count: int, slices: int) -> list[Adapter]:
    """Make adapters with all ranks, with and without vectors and with missing targets."""
    adapters = [Adapter([rank] * slices) for rank in RANKS]
    adapters[1] = Adapter([8] * slices, vectors=True)
    adapters[2] = Adapter([0] * slices, vectors=True)
    adapters[3] = Adapter([24] + [0] * (slices - 1))
    adapters[5] = Adapter([0] * (slices - 1) + [40], vectors=True)
    return adapters[:count]


def poison(fused: FusedLinear) -> None:
    """Fill scratch memory and freed output memory with NaN."""
    for scratch in (fused.low_rank, *fused.deltas.values()):
        scratch.fill_(torch.nan)
    torch.full((1 << 24,), torch.nan, device="cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "widths"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_fused_linear_matches_float32(
    fused: Fused, inputs: int, widths: Sequence[int], rows: int, dtype: torch.dtype
) -> None:
    world = LinearCase(inputs, widths, make_adapters(9, len(widths)), dtype=dtype, bias=rows % 2 == 0, seed=rows)
    x, linear = world.normal(rows, inputs), fused[dtype]
    for indices in (draw_adapters(rows, 9, rows), spread_adapters(rows, min(rows, 9)), [7] * rows, [0] * rows):
        poison(linear)
        got = linear.linear(x, world.weights, world.batch(indices), world.targets)
        assert error(got, world.expected(x, indices)) < TOLERANCE[dtype]
        out = world.normal(rows, sum(widths))
        added = out.clone()
        linear.add_lora(added, x, world.batch(indices), world.targets)
        assert error(added, world.expected(x, indices, out)) < TOLERANCE[dtype]
        assert linear.counters.tolist() == [0, 0, 0]
    plain = linear.linear(x, world.weights, None, ())
    assert error(plain, world.expected(x, [0] * rows)) < TOLERANCE[dtype]


def capture(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def set_adapters(linear: FusedLinear, batch: LoraBatch, indices: Sequence[int]) -> None:
    batch.adapter_indices.copy_(torch.tensor(indices, dtype=torch.int32))
    linear.refresh_plan(batch)


@pytest.mark.parametrize("rows", [1, 13, 64, 128])
def test_graph_can_be_replayed_with_any_adapter_mix(fused: Fused, rows: int) -> None:
    """Capture without adapters, then replay with none, some, all, missing targets, and rank 512."""
    world = LinearCase(1024, (1024, 256, 256), make_adapters(9, 3))
    x, linear = world.normal(rows, 1024), fused[torch.bfloat16]
    batch = world.batch([0] * rows)
    graph, out = capture(lambda: linear.linear(x, world.weights, batch, world.targets))
    for seed in range(6):
        indices = draw_adapters(rows, 9, seed) if seed else [0] * rows
        set_adapters(linear, batch, indices)
        x.copy_(world.normal(rows, 1024))
        poison(linear)
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, world.expected(x, indices)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("rows", "adapters"), [(64, 64), (64, 1), (64, 8), (37, 5), (16, 16), (1, 1), (128, 64)])
def test_graph_replays_match_single_launches(fused: Fused, rows: int, adapters: int) -> None:
    """Replay a chain of linear layers, whose launches overlap and could race."""
    size, layers = 2048, 12
    worlds = [LinearCase(size, (size,), [Adapter([16])] * adapters, seed=seed) for seed in range(layers)]
    linear, indices = fused[torch.bfloat16], spread_adapters(rows, adapters)
    batches, first = [world.batch(indices) for world in worlds], worlds[0].normal(rows, size)

    def run(after: Callable[[], None] = lambda: None) -> torch.Tensor:
        x = first
        for world, batch in zip(worlds, batches, strict=True):
            x = linear.linear(x, world.weights, batch, world.targets)
            after()
        return x

    expected = run(torch.cuda.synchronize)
    graph, out = capture(run)
    for _ in range(60):
        poison(linear)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("rows", [8, 64, 128])
def test_linear_bits_are_batch_invariant(fused: Fused, rows: int) -> None:
    """A row keeps its bits with other rows, at another position, and with NaN in another row."""
    world = LinearCase(1024, (1024, 256, 256), make_adapters(9, 3), bias=True)
    linear, x = fused[torch.bfloat16], world.normal(rows, 1024)
    for adapter in (0, 1, 4, 7):
        alone = [0] * (rows - 1) + [adapter] if adapter else [0] * rows
        expected = linear.linear(x, world.weights, world.batch(alone), world.targets)[-1]
        others = sorted([adapter, *draw_adapters(rows - 1, 9, adapter)])
        place = others.index(adapter)
        moved = world.normal(rows, 1024)
        moved[place], moved[place - 1] = x[-1], torch.nan
        got = linear.linear(moved, world.weights, world.batch(others), world.targets)
        assert torch.equal(got[place], expected)
        assert got.isnan().any(1).nonzero().flatten().tolist() == [(place - 1) % rows]
