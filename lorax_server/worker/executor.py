"""Runs step plans on several tensor-parallel ranks. This has been tested with CPU processes, but not with
several GPUs.
"""

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.config import EngineConfig
from lorax_server.distributed import join_process_group
from lorax_server.errors import ConfigError, EngineError, LoraxError
from lorax_server.phases import Phases
from lorax_server.plan import Capabilities, PrepareResult, StepMasks, StepPlan, StepResult
from lorax_server.pooling import read_pooling
from lorax_server.process_tuning import limit_malloc_arenas, set_process_title, trim_malloc
from lorax_server.worker.worker import Worker, build_worker

logger = logging.getLogger(__name__)

RANK_EXIT_TIMEOUT_S = 5.0  # a rank that takes longer to exit is killed
IDLE_BEFORE_TRIM_S = 1.0  # idle time after which a rank returns free memory to the system
RANK_ERROR_WAIT_S = 5.0  # maximum wait for the error message from a rank that exited
GROUP_TIMEOUT_S = 600.0  # timeout of collectives, for example while another rank loads weights


class TensorParallelExecutor:
    """Runs rank 0 in this process and every other rank in a child process. If one rank exits, all ranks are stopped."""

    def __init__(
        self,
        config: EngineConfig,
        on_rank_exit: Callable[[EngineError], None] | None = None,
        phases: Phases | None = None,
    ) -> None:
        """Start all ranks and load the model. `phases` measures the startup of rank 0.

        `on_rank_exit` is called on a background thread if a rank exits unexpectedly.
        """
        self._on_rank_exit = on_rank_exit
        self._failure: EngineError | None = None
        self._is_closing = False
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lorax-ranks-")
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        self._ranks: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for rank in range(1, config.tensor_parallel):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_run_rank, args=(config, rank, rendezvous, child_end), name=f"rank {rank}")
            process.start()
            child_end.close()
            self._ranks.append(process)
            self._connections.append(parent_end)
        self._watcher = threading.Thread(target=self._watch_ranks, name="watch ranks", daemon=True)
        self._watcher.start()
        try:
            self._worker = _build_rank_worker(config, 0, rendezvous, phases)
        except BaseException as error:
            explained = self._find_cause(error)
            self.close()
            raise explained from error

    @property
    def capabilities(self) -> Capabilities:
        return self._worker.capabilities

    def on_event(self, notify: Callable[[], None]) -> None:
        self._worker.on_event(notify)

    def pack(self, spec: AdapterSpec) -> PrepareResult | None:  # noqa: ARG002 - the protocol's argument
        return None  # all ranks prepare an adapter together

    def pop_prepared(self) -> list[PrepareResult]:
        return self._worker.pop_prepared()

    def pop_loaded(self) -> list[int]:
        return self._worker.pop_loaded()

    def submit(self, plan: StepPlan) -> LoraxError | None:
        """Start a step on all ranks. An out-of-memory error stops all ranks, because steps cannot be undone."""
        return self._run_on_all_ranks(plan, lambda: self._worker.submit(plan))

    def mask(self, masks: StepMasks) -> LoraxError | None:
        return self._run_on_all_ranks(masks, lambda: self._worker.mask(masks))

    def _run_on_all_ranks(
        self, order: StepPlan | StepMasks, work: Callable[[], LoraxError | None]
    ) -> LoraxError | None:
        message = pickle.dumps(order, protocol=5)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            return work()
        except (OSError, RuntimeError) as error:  # a pipe or a collective failed because a rank exited
            raise self._find_cause(error) from error

    def collect(self) -> StepResult:
        try:
            return self._worker.collect()
        except RuntimeError as error:
            raise self._find_cause(error) from error

    def close(self) -> None:
        self._is_closing = True
        for connection in self._connections:
            connection.close()  # the rank exits on EOF
        for process in self._ranks:
            process.join(RANK_EXIT_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        if hasattr(self, "_worker"):
            self._worker.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._folder.cleanup()

    def _find_cause(self, error: BaseException) -> BaseException:
        """Return the error of the rank that failed first, or `error` if no rank reports an error in time."""
        self._watcher.join(timeout=RANK_ERROR_WAIT_S)
        return self._failure or error

    def _watch_ranks(self) -> None:
        """Wait until a rank exits, then kill the other ranks, which may be blocked in a collective."""
        exited = wait([process.sentinel for process in self._ranks])
        if self._is_closing:
            return
        dead = next(process for process in self._ranks if process.sentinel in exited)
        dead.join()  # waits for the exit code
        reason = _read_rank_error(self._connections[self._ranks.index(dead)])
        self._failure = EngineError(f"tensor-parallel {dead.name} exited with code {dead.exitcode}{reason}")
        logger.error("%s", self._failure)
        for process in self._ranks:
            process.kill()
        if self._on_rank_exit is not None:
            self._on_rank_exit(self._failure)


def build_executor(
    config: EngineConfig, on_rank_exit: Callable[[EngineError], None] | None = None, phases: Phases | None = None
) -> Worker | TensorParallelExecutor:
    if config.tensor_parallel == 1:
        return build_worker(config, phases=phases)
    if (pooling := read_pooling(config.model)) is not None:
        raise ConfigError(f"task = {pooling.task} does not support tensor parallelism; set tensor_parallel = 1")
    return TensorParallelExecutor(config, on_rank_exit, phases)


def _build_rank_worker(config: EngineConfig, rank: int, rendezvous: str, phases: Phases | None = None) -> Worker:
    if config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"device {config.model.device!r} selects one GPU, but every rank needs its own: set device to 'cuda'"
        )
    if config.model.device == "cuda":
        config = replace(config, model=replace(config.model, device=f"cuda:{rank}"))
    device = torch.device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return build_worker(
        config, join_process_group(rank, config.tensor_parallel, rendezvous, device, GROUP_TIMEOUT_S), phases
    )


def _run_rank(config: EngineConfig, rank: int, rendezvous: str, connection: Connection) -> None:
    """Run a rank in a child process. It executes step plans from the pipe until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops the ranks
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        set_process_title(f"rank {rank}")
        limit_malloc_arenas()
        worker = _build_rank_worker(config, rank, rendezvous)
        while True:
            plan = receive_plan(connection)
            worker.submit(plan)
            if plan.is_masked:
                masks: StepMasks = pickle.loads(connection.recv_bytes())
                worker.mask(masks)
            worker.pop_prepared()
            worker.discard_oldest()
    except EOFError:
        os._exit(0)  # do not join threads, which may be blocked in a collective
    except BaseException as error:
        text = str(error) if isinstance(error, LoraxError) else traceback.format_exc()
        connection.send_bytes(text.encode())
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.1)
        os._exit(1)


def receive_plan(connection: Connection) -> StepPlan:
    """Wait for the next step plan and return it. During a long wait, return free memory to the system."""
    if not connection.poll(IDLE_BEFORE_TRIM_S):
        trim_malloc()
    plan: StepPlan = pickle.loads(connection.recv_bytes())
    return plan


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _read_rank_error(connection: Connection) -> str:
    try:
        return f": {connection.recv_bytes().decode().strip()}" if connection.poll() else ""
    except (EOFError, OSError):
        return ""
