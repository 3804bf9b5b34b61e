"""Tests for the sandbox: limits, killed workers, fairness between tenants, and closing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from lorax_server.errors import BusyError, OverloadedError
from lorax_server.process_tuning import TITLE_KEEPS_ENVIRONMENT
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.sandbox.task import (
    ENVIRONMENT_VARIABLES,
    MAX_ERROR_CHARACTERS,
    TaskError,
    TaskKilledError,
    TaskTimeoutError,
)
from tests.sandbox.tasks import make_task

TIMEOUT_S = 120.0
ECHO, PID = make_task("echo"), make_task("get_pid")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(1)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Sandbox]:
    made = Sandbox(2)
    yield made
    made.close()


def find_pid(sandbox: Sandbox) -> int:
    return int(sandbox.submit(PID).result(TIMEOUT_S))


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def block(sandbox: Sandbox, path: Path, tenant: str = "") -> "Future[bytes]":
    """Occupy a worker until the file exists."""
    blocked = sandbox.submit(make_task("wait_for"), str(path), tenant=tenant)
    wait_until(blocked.running)
    return blocked


# --- Results and limits -----------------------------------------------------------------------------------------------


def test_task_returns_bytes_and_worker_is_reused(sandbox: Sandbox) -> None:
    assert sandbox.submit(ECHO, "Größe").result(TIMEOUT_S) == "Größe".encode()
    assert find_pid(sandbox) == find_pid(sandbox) != os.getpid()


def test_worker_inherits_no_secrets(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    names = set(sandbox.submit(make_task("get_environment")).result(TIMEOUT_S).decode().split("\n"))
    ours = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HF_HUB_OFFLINE", TITLE_KEEPS_ENVIRONMENT}
    assert names <= {*ENVIRONMENT_VARIABLES, *ours, "LC_CTYPE"}  # Python sets the last one


def test_task_error_keeps_message_and_worker(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    with pytest.raises(TaskError, match=r"^roles must alternate$"):
        sandbox.submit(make_task("reject"), "roles must alternate").result(TIMEOUT_S)
    with pytest.raises(TaskError, match="KeyError") as failed:
        sandbox.submit(make_task("fail")).result(TIMEOUT_S)
    assert len(str(failed.value)) == MAX_ERROR_CHARACTERS
    with pytest.raises(TaskError, match="SystemExit"):
        sandbox.submit(make_task("exit_python")).result(TIMEOUT_S)
    with pytest.raises(TaskError, match="nested too deeply"):
        sandbox.submit(make_task("recurse")).result(TIMEOUT_S)
    assert find_pid(sandbox) == pid


def test_deeply_nested_arguments_are_rejected(sandbox: Sandbox) -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TaskError, match="nested too deeply"):
        sandbox.submit(ECHO, deep).result(TIMEOUT_S)
    while deep:  # freeing the nested list in one step would also recurse
        (deep,) = deep  # type: ignore[assignment]


def test_cpu_limit_replaces_the_worker(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    with pytest.raises(TaskTimeoutError, match=r"longer than 0\.05 s"):
        sandbox.submit(make_task("spin", cpu_s=0.05)).result(TIMEOUT_S)
    assert find_pid(sandbox) != pid
    assert not psutil.pid_exists(pid)  # the process was reaped


def test_cpu_limit_ignores_waiting_time(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    os.kill(pid, signal.SIGSTOP)
    done = sandbox.submit(make_task("echo", cpu_s=0.5), "late")
    time.sleep(0.6)
    assert not done.done()
    os.kill(pid, signal.SIGCONT)
    assert done.result(TIMEOUT_S) == b"late"


def test_wall_time_limit_raises_busy_error(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(BusyError, match="the machine is busy"):
        sandbox.submit(make_task("echo", wall_s=0.1), "x" * 10_000_000).result(TIMEOUT_S)
    assert find_pid(sandbox) != pid


def test_memory_limit_fails_the_task_and_replaces_the_worker(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    with pytest.raises(TaskKilledError, match="bytes of memory"):
        sandbox.submit(make_task("allocate", memory_bytes=2**26), 2**28).result(TIMEOUT_S)
    assert find_pid(sandbox) != pid
    assert sandbox.submit(make_task("allocate", memory_bytes=2**28), 2**26).result(TIMEOUT_S) == b"67108864"


def test_crash_fails_only_one_task(sandbox: Sandbox) -> None:
    with pytest.raises(TaskKilledError, match="SIGSEGV"):
        sandbox.submit(make_task("crash")).result(TIMEOUT_S)
    assert sandbox.submit(ECHO, "next").result(TIMEOUT_S) == b"next"


def test_oversized_reply_fails_the_task(sandbox: Sandbox) -> None:
    assert sandbox.submit(make_task("return_many_bytes", max_reply_bytes=100), 100).result(TIMEOUT_S) == bytes(100)
    with pytest.raises(TaskKilledError):
        sandbox.submit(make_task("return_many_bytes", max_reply_bytes=100), 101).result(TIMEOUT_S)
    assert sandbox.submit(ECHO, "next").result(TIMEOUT_S) == b"next"


def test_task_output_does_not_reach_the_log(sandbox: Sandbox, capfd: pytest.CaptureFixture[str]) -> None:
    assert sandbox.submit(make_task("print_text")).result(TIMEOUT_S) == b"done"
    assert "noise" not in "".join(capfd.readouterr())


def test_task_sets_stack_size_and_priority(sandbox: Sandbox) -> None:
    assert sandbox.submit(make_task("get_stack_size", stack_bytes=2**22)).result(TIMEOUT_S) == str(2**22).encode()
    assert sandbox.submit(make_task("get_priority", niceness=4)).result(TIMEOUT_S) == b"4"
    assert sandbox.submit(make_task("get_priority")).result(TIMEOUT_S) == b"0"


def test_dead_idle_worker_is_replaced(sandbox: Sandbox) -> None:
    pid = find_pid(sandbox)
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert find_pid(sandbox) != pid


def test_worker_start_failure_is_reported(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BusyError, match="failed to start"):
        sandbox.submit(ECHO, "x").result(TIMEOUT_S)
    monkeypatch.undo()
    assert sandbox.submit(ECHO, "x").result(TIMEOUT_S) == b"x"


# --- The queue --------------------------------------------------------------------------------------------------------


def test_tenants_are_served_round_robin(sandbox: Sandbox, tmp_path: Path) -> None:
    order: list[str] = []
    first = block(sandbox, tmp_path / "go")
    futures = []
    for tenant, count in (("many", 5), ("few", 2), ("one", 1)):
        for number in range(count):
            futures.append(sandbox.submit(ECHO, "x", tenant=tenant))
            futures[-1].add_done_callback(lambda _, name=f"{tenant} {number}": order.append(name))  # type: ignore[misc]
    (tmp_path / "go").touch()
    for future in (first, *futures):
        future.result(TIMEOUT_S)
    wait_until(lambda: len(order) == len(futures))  # a result is available before its callbacks run
    assert order == ["many 0", "few 0", "one 0", "many 1", "few 1", "many 2", "many 3", "many 4"]


def test_pending_tasks_are_limited_per_tenant(sandbox: Sandbox, tmp_path: Path) -> None:
    task = make_task("wait_for", max_pending=2)
    first = [sandbox.submit(task, str(tmp_path / "go"), tenant="a") for _ in range(2)]
    with pytest.raises(OverloadedError) as refused:
        sandbox.submit(task, str(tmp_path / "go"), tenant="a")
    assert refused.value.retry_after_s is not None
    other = sandbox.submit(task, str(tmp_path / "go"), tenant="b")
    (tmp_path / "go").touch()
    for future in (*first, other):
        future.result(TIMEOUT_S)
    assert sandbox.submit(task, str(tmp_path / "go"), tenant="a").result(TIMEOUT_S)


def test_long_tasks_occupy_at_most_one_worker(pair: Sandbox, tmp_path: Path) -> None:
    task = make_task("wait_for", is_long=True)
    running = pair.submit(task, str(tmp_path / "go"), tenant="a")
    queued = pair.submit(task, str(tmp_path / "go"), tenant="b")
    wait_until(running.running)
    assert pair.submit(ECHO, "x", tenant="c").result(TIMEOUT_S) == b"x"
    assert not queued.running()
    (tmp_path / "go").touch()
    for future in (running, queued):
        future.result(TIMEOUT_S)


def test_second_worker_starts_only_under_contention(pair: Sandbox, tmp_path: Path) -> None:
    first = find_pid(pair)
    wait_until(lambda: pair._num_idle == 1)  # a result is available before its worker is idle
    assert find_pid(pair) == first
    wait_until(lambda: pair._num_idle == 1)
    blocked = block(pair, tmp_path / "go")
    assert find_pid(pair) != first
    (tmp_path / "go").touch()
    blocked.result(TIMEOUT_S)


def test_cancelled_task_is_skipped(sandbox: Sandbox, tmp_path: Path) -> None:
    blocked = block(sandbox, tmp_path / "go")
    cancelled, last = sandbox.submit(make_task("crash")), sandbox.submit(ECHO, "last")
    assert cancelled.cancel()
    (tmp_path / "go").touch()
    assert last.result(TIMEOUT_S) == b"last"
    assert blocked.done()


def test_run_raises_busy_after_wait_timeout(sandbox: Sandbox, tmp_path: Path) -> None:
    blocked = block(sandbox, tmp_path / "go")
    with pytest.raises(BusyError, match="did not finish within"):
        asyncio.run(sandbox.run(ECHO, "x", timeout_s=0.05))
    (tmp_path / "go").touch()
    blocked.result(TIMEOUT_S)
    assert asyncio.run(sandbox.run(ECHO, "y", timeout_s=TIMEOUT_S)) == b"y"


# --- Closing ----------------------------------------------------------------------------------------------------------


def test_close_fails_tasks_and_reaps_workers(tmp_path: Path) -> None:
    sandbox = Sandbox(1)
    pid = find_pid(sandbox)
    running = block(sandbox, tmp_path / "never")
    queued = sandbox.submit(ECHO, "x")
    sandbox.close()
    for future in (running, queued):
        with pytest.raises(BusyError, match="stopping"):
            future.result(TIMEOUT_S)
    with pytest.raises(BusyError, match="stopping"):
        sandbox.submit(ECHO, "x")
    assert not psutil.pid_exists(pid)


def test_killed_workers_leave_no_zombies(sandbox: Sandbox) -> None:
    for _ in range(3):
        with pytest.raises(TaskKilledError):
            sandbox.submit(make_task("crash")).result(TIMEOUT_S)
    find_pid(sandbox)
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


def test_worker_exits_with_its_parent() -> None:
    script = (
        "import os, sys; sys.path.insert(0, '.')\n"
        "from lorax_server.sandbox.sandbox import Sandbox\n"
        "from tests.sandbox.tasks import make_task\n"
        "print(Sandbox(1).submit(make_task('get_pid')).result().decode(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
