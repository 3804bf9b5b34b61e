"""Processes for tensor-parallel tests: one gloo pool for the whole session."""

import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lorax_server.distributed import TorchGroup, join_process_group

POOL_SIZE = 4
GROUP_SIZES = (2, 4)
TIMEOUT_S = 300  # only reached if a test fails; the first test includes all imports, which took 165 s on a busy machine


class RankPool:
    """A pool of processes that runs a function on its first ranks, each in a group of the requested size."""

    def __init__(self, context: ForkServerContext) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{Path(self._folder.name) / 'meeting'}"
        pipes = [context.Pipe() for _ in range(POOL_SIZE)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, meeting, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(group, *args)` on each rank and return the results; raise the first failure."""
        for connection in self._connections[:size]:
            connection.send_bytes(pickle.dumps((size, function, args)))  # as bytes: torch would leave shared tensors
        replies = []
        for connection in self._connections[:size]:
            if not connection.poll(TIMEOUT_S):
                raise TimeoutError("a rank did not answer")
            replies.append(pickle.loads(connection.recv_bytes()))
        for succeeded, reply in replies:
            if not succeeded:
                raise AssertionError(f"a rank failed:\n{reply}")
        return [reply for _, reply in replies]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(rank: int, meeting: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    join_process_group(rank, POOL_SIZE, meeting, torch.device("cpu"))
    groups = {size: dist.new_group(list(range(size))) for size in GROUP_SIZES}
    while True:
        size, function, args = pickle.loads(connection.recv_bytes())
        try:
            reply = pickle.dumps((True, function(TorchGroup(groups[size]), *args)))
        except Exception:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)
