"""Measure the GPU time of CUDA graphs, excluding host time."""

import statistics
from collections.abc import Callable, Sequence

import torch

BYTES_PER_MS = 4.1e9  # memory bandwidth that an H200 reaches


def capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run the function once to warm up, then capture it as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def measure(*graphs: torch.cuda.CUDAGraph, count: int = 25) -> list[float]:
    """Return the median time of each graph in milliseconds.

    The graphs alternate, because long matrix products lower the GPU clock.
    """
    calls = [graph.replay for graph in graphs]
    return measure_calls(calls, count)


def measure_calls(calls: Sequence[Callable[[], object]], count: int, warm_up: int = 3) -> list[float]:
    """Return the median time of each call in milliseconds. The calls alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(count + warm_up):
        for call, measured in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # keeps the host ahead, so that its time does not count
            start.record()
            call()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end))
    return [statistics.median(measured[warm_up:]) for measured in times]
