"""Test tasks, imported by sandbox workers."""

import os
import resource
import signal
import sys
import threading
import time

from lorax_server.sandbox.task import SandboxTask, TaskError


def make_task(name: str, **limits: object) -> SandboxTask:
    """Return a task in this module with limits that a busy machine does not reach."""
    values = {"cpu_s": 60.0, "memory_bytes": 2**28, "wall_s": 120.0} | limits
    return SandboxTask(f"{__name__}:{name}", **values)  # type: ignore[arg-type]


def echo(text: str) -> bytes:
    return text.encode()


def get_pid() -> bytes:
    return str(os.getpid()).encode()


def get_environment() -> bytes:
    return "\n".join(os.environ).encode()


def get_priority() -> bytes:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return f"{own - os.getpriority(os.PRIO_PROCESS, os.getpid())}".encode()


def reject(message: str) -> bytes:
    raise TaskError(message)


def fail() -> bytes:
    raise KeyError("x" * 10_000)


def exit_python() -> bytes:
    sys.exit(3)


def spin() -> bytes:
    while True:
        pass


def allocate(num_bytes: int) -> bytes:
    return str(len(bytearray(num_bytes))).encode()


def recurse() -> bytes:
    return recurse()


def crash() -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    return b""


def return_many_bytes(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def print_text() -> bytes:
    print("noise", flush=True)
    print("noise", file=sys.stderr, flush=True)
    return b"done"


def get_stack_size() -> bytes:
    return str(threading.stack_size()).encode()


def wait_for(path: str) -> bytes:
    """Block until the file exists."""
    while not os.path.exists(path):
        time.sleep(0.005)
    return path.encode()


def get_core_limit() -> bytes:
    return str(resource.getrlimit(resource.RLIMIT_CORE)).encode()
