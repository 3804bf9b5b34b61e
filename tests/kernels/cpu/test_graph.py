"""CpuGraph tests: replay with other inputs, and errors for unrecordable operations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lorax_server.kernels import UnrecordableError
from lorax_server.kernels.cpu.graph import BufferPool, CpuGraph
from lorax_server.kernels.cpu.ops import CpuOps
from lorax_server.kernels.ops import LinearWeights

ROWS, SIZE = 3, 40
OPS = CpuOps()


def make_weights(seed: int = 0) -> LinearWeights:
    generator = torch.Generator().manual_seed(seed)
    return OPS.make_linear(torch.randn(SIZE, SIZE, generator=generator), None)


def record(run: Callable[[], torch.Tensor], buffers: BufferPool | None = None) -> CpuGraph:
    with torch.inference_mode():
        return OPS.record(run, ROWS, buffers or BufferPool(2 * ROWS))


def replay(graph: CpuGraph) -> torch.Tensor:
    with torch.inference_mode():
        graph.replay()
        return graph.output.clone()


def run_layers(x: torch.Tensor, layers: list[LinearWeights], norm: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """Run kernels, torch ops and views, as model layers do."""
    residual = None
    for weights in layers:
        x, residual = OPS.rms_norm(x, residual, norm, eps)
        both = OPS.linear(x, weights, None, ())
        left, right = both[:, : SIZE // 2], both.view(ROWS, 2, -1).unbind(1)[1]
        x = torch.cat([left + right, right.relu()], dim=1)
        x = torch.nn.functional.gelu(x).contiguous()
    return x


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_replay_matches_eager_run(threads: int, restored_threads: None) -> None:
    torch.set_num_threads(threads)
    x, norm, eps = torch.randn(ROWS, SIZE), torch.randn(SIZE), torch.tensor(1e-5)
    layers = [make_weights(seed) for seed in range(4)]
    graph = record(lambda: run_layers(x, layers, norm, eps))
    for _ in range(3):
        x.copy_(torch.randn(ROWS, SIZE))
        assert torch.equal(replay(graph), run_layers(x, layers, norm, eps))


def test_recording_runs_no_kernel() -> None:
    x, weights = torch.randn(ROWS, SIZE), make_weights()
    buffers = BufferPool(ROWS)
    graph = record(lambda: OPS.linear(x, weights, None, ()), buffers)
    with torch.inference_mode():
        graph.output.fill_(7)
    record(lambda: OPS.linear(x, weights, None, ()), buffers)
    assert bool((graph.output == 7).all())
    assert torch.equal(replay(graph), OPS.linear(x, weights, None, ()))


def test_replay_of_wide_matrices_with_threads_matches_eager_run(restored_threads: None) -> None:
    torch.set_num_threads(4)
    weights = OPS.make_linear(torch.randn(1000, 300), None)
    x = torch.randn(ROWS, 300)
    graph = record(lambda: OPS.linear(x, weights, None, ()))
    expected = OPS.linear(x, weights, None, ())
    for _ in range(50):
        assert torch.equal(replay(graph), expected)


UNRECORDABLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number on the host": lambda x: x * x.sum().item(),
    "numbers on the host": lambda x: x * x[0].tolist()[0],
    "an array": lambda x: torch.from_numpy(x.numpy() + 1),
    "a decision": lambda x: x if bool((x > 0).all()) else -x,
    "a change in place": lambda x: x.add_(1),
    "a product by torch": lambda x: x @ x.T,
    "random numbers": lambda x: x + torch.randn(ROWS, SIZE),
    "another kernel": lambda x: OPS.top_k_scores(x, 2)[0],
}


@pytest.mark.parametrize("what", UNRECORDABLE)
def test_unrecordable_operations_raise(what: str) -> None:
    x = torch.randn(ROWS, SIZE)
    with pytest.raises(UnrecordableError):
        record(lambda: UNRECORDABLE[what](x))
    weights = make_weights()
    assert torch.isfinite(OPS.linear(x, weights, None, ())).all()  # recording has ended, so kernels execute


def test_released_buffers_are_reused() -> None:
    x, weights = torch.randn(ROWS, SIZE), make_weights()

    def run(depth: int) -> torch.Tensor:
        result = x
        for _ in range(depth):
            result = OPS.linear(result, weights, None, ())
        return result

    buffers = BufferPool(2 * ROWS)
    programs = [record(partial(run, depth), buffers) for depth in (2, 9)]
    assert buffers.num_bytes == 2 * 2 * ROWS * SIZE * 4
    for graph, depth in zip(programs, (2, 9), strict=True):
        assert torch.equal(replay(graph), run(depth))


def test_smaller_runs_share_buffers_of_larger_runs() -> None:
    buffers, weights = BufferPool(8), make_weights()
    with torch.inference_mode():
        for rows in (8, 1, 5):
            x = torch.randn(rows, SIZE)
            graph = OPS.record(partial(OPS.linear, x, weights, None, ()), rows, buffers)
            graph.replay()
            assert torch.equal(graph.output, OPS.linear(x, weights, None, ()))
    assert buffers.num_bytes == 8 * SIZE * 4
