"""Thread tests for the native CPU kernels: results never depend on the number of threads or callers."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps


def make_logits() -> torch.Tensor:
    return 3 * torch.randn(40, 9000, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2, 5, 20])
def test_greedy_result_is_independent_of_thread_count(threads: int, library: Library) -> None:
    logits = make_logits()
    torch.set_num_threads(1)
    expected = CpuOps(library).choose_greedy(logits)
    torch.set_num_threads(threads)
    for _ in range(20):
        assert all(map(torch.equal, CpuOps(library).choose_greedy(logits), expected))


@pytest.mark.usefixtures("restored_threads")
def test_concurrent_callers_get_correct_results(library: Library) -> None:
    torch.set_num_threads(1)
    logits = make_logits()
    token_ids = torch.arange(400).view(40, 10)
    expected, stop = CpuOps(library).gather_logprobs(logits, token_ids), Event()

    def call() -> int:
        torch.set_num_threads(2)  # OpenMP stores the value per thread
        count = 0
        while not stop.is_set():
            assert torch.equal(CpuOps(library).gather_logprobs(logits, token_ids), expected)
            count += 1
            if count >= 50:
                stop.set()
        return count

    with ThreadPoolExecutor(3) as callers:
        assert sum(caller.result() for caller in [callers.submit(call) for _ in range(3)]) >= 50


@pytest.mark.slow
def test_failed_allocation_raises_memory_error() -> None:
    """In every thread: the second call needs more memory than the process limit."""
    program = """
import resource
import torch
from lorax_server.kernels.cpu.library import Library
torch.set_num_threads(4)
library = Library()

def prepare(vocabulary):
    scores = torch.arange(16 * vocabulary, dtype=torch.float32).view(16, vocabulary)
    best, ids = torch.empty(16, 3), torch.empty(16, 3, dtype=torch.long)

    def call():
        library.top_k_scores(
            0, scores.data_ptr(), vocabulary, 16, vocabulary, 3, 0, 0, 0, best.data_ptr(), ids.data_ptr()
        )
        return ids.tolist()

    return call

few, many = prepare(10_000), prepare(4_000_000)
expected = few()  # the threads have started
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, hard))
for _ in range(5):
    try:
        many()
    except MemoryError as error:
        print(error)
    assert few() == expected
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert many()[0] == [3_999_999, 3_999_998, 3_999_997]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a native kernel could not allocate scratch memory"] * 5
