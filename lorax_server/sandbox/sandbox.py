"""Run untrusted tasks in a small pool of worker processes, with fair scheduling across tenants.

A worker is a new Python interpreter, so it inherits neither threads nor secrets. It runs one task at a time. If a task
exceeds a limit or crashes, its worker is killed and the next task starts a new worker.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from lorax_server.errors import BusyError, OverloadedError
from lorax_server.sandbox.task import ENVIRONMENT_VARIABLES, SandboxTask, TaskError, TaskKilledError, TaskTimeoutError
from lorax_server.sandbox.worker import (
    CPU_TIME_SIGNAL,
    LAST_REPLY,
    OK_REPLY,
    OUT_OF_MEMORY_REPLY,
    read_frame,
    write_frame,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # starting a process can be slow on a busy machine
RETRY_AFTER_S = 5.0
STOPPING_MESSAGE = "the server is stopping"


class _Job(NamedTuple):
    task: SandboxTask
    args: Sequence[Any]
    tenant: str
    future: "Future[bytes]"


class Sandbox:
    """Runs tasks in up to `num_workers` worker processes. Any thread may submit tasks."""

    def __init__(self, num_workers: int = 2, preload: Sequence[str] = ()) -> None:
        """Create the sandbox. Each worker imports the modules in `preload` before its first task."""
        self._num_workers = num_workers
        self._preload = preload
        self._condition = threading.Condition()  # guards the fields below
        self._queues: dict[str, deque[_Job]] = {}  # queued jobs by tenant, longest waiting tenant first
        self._num_pending: Counter[tuple[str, str]] = Counter()  # queued and running jobs, by function and tenant
        self._num_idle = 0
        self._has_long_task = False  # True while a long task is running
        self._is_closed = False
        self._processes: list[_WorkerProcess] = []
        self._threads: list[threading.Thread] = []

    def submit(self, task: SandboxTask, *args: Any, tenant: str = "") -> "Future[bytes]":
        """Queue a task and return its future, which fails with `TaskError`, `TaskKilledError` or `BusyError`."""
        job, key = _Job(task, args, tenant, Future()), (task.function, tenant)
        with self._condition:
            if self._is_closed:
                raise BusyError(STOPPING_MESSAGE)
            if task.max_pending is not None and self._num_pending[key] >= task.max_pending:
                raise OverloadedError(
                    f"this client already has {task.max_pending} pending tasks; retry later", RETRY_AFTER_S
                )
            if self._num_idle <= self._num_queued and len(self._threads) < self._num_workers:
                self._start_thread()  # before the job is queued, because this may raise
            self._num_pending[key] += 1
            self._queues.setdefault(tenant, deque()).append(job)
            self._condition.notify_all()
        return job.future

    async def run(self, task: SandboxTask, *args: Any, tenant: str = "", timeout_s: float | None = None) -> bytes:
        """Run a task from an event loop and return its result. Raise `BusyError` if the task has not finished after
        `timeout_s`.
        """
        future = self.submit(task, *args, tenant=tenant)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise BusyError(
                f"the sandbox task did not finish within {timeout_s:g} s: the machine is busy", RETRY_AFTER_S
            ) from None

    def close(self) -> None:
        """Kill the workers. Tasks that are queued or running fail with `BusyError`."""
        with self._condition:
            self._is_closed = True
            jobs = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
            self._condition.notify_all()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(BusyError(STOPPING_MESSAGE))
        for process in self._processes:
            process.close()
        for thread in self._threads:
            thread.join()

    @property
    def _num_queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def _start_thread(self) -> None:
        process = _WorkerProcess(self._preload)
        thread = threading.Thread(target=self._serve, args=(process,), name="sandbox", daemon=True)
        thread.start()
        self._processes.append(process)
        self._threads.append(thread)

    def _serve(self, process: "_WorkerProcess") -> None:
        """Run queued tasks one at a time in a worker process."""
        while (job := self._next_job()) is not None:
            if job.future.set_running_or_notify_cancel():
                try:
                    reply = process.run(job.task, job.args)
                except BaseException as error:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(reply)
                    del reply
            with self._condition:
                self._num_pending -= Counter([(job.task.function, job.tenant)])
                self._has_long_task = self._has_long_task and not job.task.is_long
                self._condition.notify_all()
            del job  # free the task's arguments while waiting
        process.stop()

    def _next_job(self) -> _Job | None:
        """Wait for the next job and return it, or return None after `close`."""
        with self._condition:
            self._num_idle += 1
            try:
                while not self._is_closed:
                    for tenant, queue in self._queues.items():
                        if self._has_long_task and queue[0].task.is_long:
                            continue
                        job = queue.popleft()
                        del self._queues[tenant]
                        if queue:
                            self._queues[tenant] = queue  # the tenant goes to the end of the queue
                        self._has_long_task |= job.task.is_long
                        return job
                    self._condition.wait()
                return None
            finally:
                self._num_idle -= 1


class _WorkerProcess:
    """One worker process, started on demand. Only `close` may be called from other threads."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        self._lock = threading.Lock()  # guards the next two fields
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._connection: socket.socket | None = None

    def run(self, task: SandboxTask, args: Sequence[Any]) -> bytes:
        """Run a task and return its result. Start the process if necessary."""
        try:
            request = pickle.dumps((task, args), protocol=5)
        except RecursionError:
            raise TaskError("nested too deeply") from None
        if self._process is not None and self._process.poll() is not None:
            logger.warning("a sandbox worker exited with status %d", self._process.returncode)
            self.stop()
        connection = self._connection or self._start()
        try:
            connection.settimeout(task.wall_s)
            write_frame(connection, request)
            reply = read_frame(connection, task.max_reply_bytes + 2)
        except TimeoutError:
            self.stop()
            logger.warning("a sandbox worker made no progress for %g s", task.wall_s)
            raise BusyError(f"a task took more than {task.wall_s:g} s: the machine is busy", RETRY_AFTER_S) from None
        except (EOFError, OSError):
            raise self._diagnose_exit(task) from None
        except BaseException:  # otherwise the next task would read the rest of this reply
            self.stop()
            raise
        kind, is_last, body = reply[:1], reply[1:2] == LAST_REPLY, reply[2:]
        if is_last:
            self.stop()
        if kind == OK_REPLY:
            return body
        if kind == OUT_OF_MEMORY_REPLY:
            raise TaskKilledError(f"it needs more than {task.memory_bytes} bytes of memory")
        raise TaskError(body.decode(errors="replace"))

    def close(self) -> None:
        """Kill the process and prevent another start. Any thread may call this."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def stop(self) -> int | None:
        """Kill and reap the process. Return its exit status, or None if no process was running."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.kill()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return None if process is None else process.wait()

    def _start(self) -> socket.socket:
        environment = {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ}
        try:
            self._connection, child_socket = socket.socketpair()
            command = (sys.executable, "-m", "lorax_server.sandbox.worker", str(child_socket.fileno()), *self._preload)
            with self._lock, child_socket:
                if self._is_closed:
                    raise BusyError(STOPPING_MESSAGE)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[child_socket.fileno()],
                    env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                    start_new_session=True,
                )
            self._connection.settimeout(START_TIMEOUT_S)
            read_frame(self._connection, 1)
        except (EOFError, OSError) as error:
            self.stop()
            raise BusyError("a sandbox worker failed to start; see the log", RETRY_AFTER_S) from error
        except BaseException:
            self.stop()
            raise
        return self._connection

    def _diagnose_exit(self, task: SandboxTask) -> Exception:
        # The process closed its socket or sent a malformed reply. Wait until it exits, to get its exit status before
        # `stop` kills it.
        process = self._process
        if process is not None:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                logger.warning("a sandbox worker sent a malformed reply")
        status = self.stop()
        if self._is_closed:
            return BusyError(STOPPING_MESSAGE)
        if status == -CPU_TIME_SIGNAL:
            return TaskTimeoutError(f"it takes longer than {task.cpu_s:g} s")
        name = signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"
        return TaskKilledError(f"it crashed its process ({name})")
