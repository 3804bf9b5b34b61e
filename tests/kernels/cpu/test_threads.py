"""Threads of native kernels: whoever calls them, and however many help, a result has the same bits."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from lorax_server.kernels.cpu.library import Library
from lorax_server.kernels.cpu.sampling import choose_greedy, find_logprobs

FORK_S = 60  # after which a child that hangs is ended


def make_logits() -> torch.Tensor:
    return 3 * torch.randn(40, 9000, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2, 5, 300])
def test_any_number_of_threads(threads: int, library: Library) -> None:
    logits = make_logits()
    torch.set_num_threads(1)
    expected = choose_greedy(library, logits)
    torch.set_num_threads(threads)
    for _ in range(20):
        assert all(map(torch.equal, choose_greedy(library, logits), expected))


@pytest.mark.usefixtures("restored_threads")
def test_several_callers_at_once(library: Library) -> None:
    """Only one of them has helpers; the others do their work alone."""
    torch.set_num_threads(2)
    logits = make_logits()
    token_ids = torch.arange(400).view(40, 10)
    expected, stop = find_logprobs(library, logits, token_ids), Event()

    def call() -> int:
        torch.set_num_threads(2)  # OpenMP keeps it for each thread
        count = 0
        while not stop.is_set():
            assert torch.equal(find_logprobs(library, logits, token_ids), expected)
            count += 1
            if count >= 50:
                stop.set()
        return count

    with ThreadPoolExecutor(3) as callers:
        assert sum(caller.result() for caller in [callers.submit(call) for _ in range(3)]) >= 50


@pytest.mark.usefixtures("restored_threads")
def test_a_child_that_is_forked_has_no_helpers_and_does_the_work_alone(library: Library) -> None:
    torch.set_num_threads(2)
    logits = make_logits()
    expected = choose_greedy(library, logits)
    child = os.fork()
    if child == 0:
        signal.alarm(FORK_S)
        try:
            found = choose_greedy(library, logits)
            os._exit(0 if all(map(torch.equal, found, expected)) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
