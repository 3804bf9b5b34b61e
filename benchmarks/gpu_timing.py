"""Times on a GPU: CUDA graphs, so that the host's time is not part of them."""

import statistics
from collections.abc import Callable, Sequence

import torch

BYTES_PER_MS = 4.1e9  # that an H200 reads


def capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def measure_in_turns(graphs: Sequence[torch.cuda.CUDAGraph], count: int) -> list[float]:
    """Return the median milliseconds of each graph. Long products lower the chip's clock, for all alike in this way."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(count):
        for graph, taken in zip(graphs, times, strict=True):
            taken.append(measure(graph, count=1, warm=0))
    return [statistics.median(taken[1:]) for taken in times]


def measure(graph: torch.cuda.CUDAGraph, count: int = 25, warm: int = 3) -> float:
    """Return the median milliseconds of replays in a row."""
    times: list[float] = []
    for _ in range(count + warm):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[warm:])
