"""Threads of native kernels: whoever calls them, and however many help, a result has the same bits."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps

FORK_S = 60  # after which a child that hangs is ended


def make_logits() -> torch.Tensor:
    return 3 * torch.randn(40, 9000, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2, 5, 20])
def test_any_number_of_threads(threads: int, library: Library) -> None:
    logits = make_logits()
    torch.set_num_threads(1)
    expected = CpuOps(library).choose_greedy(logits)
    torch.set_num_threads(threads)
    for _ in range(20):
        assert all(map(torch.equal, CpuOps(library).choose_greedy(logits), expected))


@pytest.mark.usefixtures("restored_threads")
def test_several_callers_at_once(library: Library) -> None:
    """Only one of them has helpers; the others do their work alone."""
    torch.set_num_threads(1)
    logits = make_logits()
    token_ids = torch.arange(400).view(40, 10)
    expected, stop = CpuOps(library).find_logprobs(logits, token_ids), Event()

    def call() -> int:
        torch.set_num_threads(2)  # OpenMP keeps it for each thread
        count = 0
        while not stop.is_set():
            assert torch.equal(CpuOps(library).find_logprobs(logits, token_ids), expected)
            count += 1
            if count >= 50:
                stop.set()
        return count

    with ThreadPoolExecutor(3) as callers:
        assert sum(caller.result() for caller in [callers.submit(call) for _ in range(3)]) >= 50


@pytest.mark.usefixtures("restored_threads")
def test_a_child_that_is_forked_has_helpers_of_its_own(library: Library) -> None:
    """Also while those of its parent sleep."""
    torch.set_num_threads(3)
    logits = make_logits()
    expected = CpuOps(library).choose_greedy(logits)
    time.sleep(0.2)
    child = os.fork()
    if child == 0:
        signal.alarm(FORK_S)
        try:
            for threads in (3, 5, 2, 5):
                torch.set_num_threads(threads)
                found = CpuOps(library).choose_greedy(logits)
                if not all(map(torch.equal, found, expected)):
                    os._exit(1)
                time.sleep(0.05)  # they sleep, and are woken again
            os._exit(0)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_helpers_go_where_openmp_places_threads() -> None:
    program = """
import os, time
import numpy as np
import torch
from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.ops import CpuOps
CpuOps(Library()).choose_greedy(torch.from_numpy(np.zeros((40, 9000), np.float32)))  # torch starts no threads
deadline = time.monotonic() + 120
while True:  # nobody waits for a helper to begin
    places = {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    count = sum(len(place) == 1 for place in places)
    if count == 2 or time.monotonic() > deadline:
        break
print(count)
"""
    environment = os.environ | {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == min(2, len(os.sched_getaffinity(0))), "not all are where the first thread is"


def test_memory_that_cannot_be_allocated_is_an_error() -> None:
    """In every thread: each piece of the second call needs more memory than the process may have."""
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
        library.find_best(
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
    assert done.stdout.splitlines() == ["a kernel could not allocate memory for its threads"] * 5
