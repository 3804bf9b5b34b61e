"""Run tasks in a child process of the server, one at a time, until the parent closes the socket.

Usage: `python -m lorax_server.sandbox.worker FD [MODULE ...]`, with the socket's file descriptor, and modules to import
before the first task. A frame is an eight-byte length and a body. The first reply byte is the reply type.
"""

import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lorax_server.process_tuning import set_process_title
from lorax_server.sandbox.task import MAX_ERROR_CHARACTERS, SandboxTask, TaskError

LENGTH_PREFIX = struct.Struct(">Q")
PR_SET_PDEATHSIG = 1
OK_REPLY, ERROR_REPLY, OUT_OF_MEMORY_REPLY = b"o", b"e", b"m"
LAST_REPLY = b"l"  # second reply byte if the worker exits after the reply
CPU_TIME_SIGNAL = signal.SIGPROF  # sent when a task exceeds its CPU time; kills the worker
MAX_RESIDENT_BYTES = 2**28  # a worker that uses more memory is replaced after its task


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read and return `count` bytes. Raise `EOFError` if the other process closes the socket first."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def read_frame(connection: socket.socket, max_bytes: int) -> bytes:
    """Read a frame and return its body. Raise `EOFError` if the socket is closed or the body exceeds `max_bytes`."""
    (length,) = LENGTH_PREFIX.unpack(read_exactly(connection, LENGTH_PREFIX.size))
    if length > max_bytes:
        raise EOFError
    return read_exactly(connection, length)


def write_frame(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH_PREFIX.pack(len(body)) + body)


def run_task(task: SandboxTask, args: Sequence[Any]) -> bytes:
    """Run a task under its limits and return the reply. If the task exceeds its CPU time, this process is killed."""
    module, name = task.function.split(":")
    function: Callable[..., bytes] = getattr(importlib.import_module(module), name)  # imported before limits apply
    replies: list[bytes] = []
    niceness = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> None:
        with suppress(OSError):  # only Linux has thread priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness + task.niceness)
        replies.append(_call(function, args))

    _limit_memory(_used_bytes("VmData") + task.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)
    threading.stack_size(task.stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    _limit_memory(resource.RLIM_INFINITY)
    (reply,) = replies
    kind, body = reply[:1], reply[1:]
    is_last = task.is_long or kind == OUT_OF_MEMORY_REPLY or _used_bytes("VmRSS") > MAX_RESIDENT_BYTES
    return kind + (LAST_REPLY if is_last else b" ") + body


def _call(function: Callable[..., bytes], args: Sequence[Any]) -> bytes:
    try:
        return OK_REPLY + function(*args)
    except MemoryError:
        return OUT_OF_MEMORY_REPLY
    except TaskError as error:
        message = str(error)
    except RecursionError:
        message = "nested too deeply"
    except BaseException as error:  # including Rust panics
        message = f"{type(error).__name__}: {error}"
    return ERROR_REPLY + message[:MAX_ERROR_CHARACTERS].encode(errors="backslashreplace")


def _limit_memory(num_bytes: int) -> None:
    """Limit the heap memory of this process. RLIMIT_AS would also count libraries, which take gigabytes with torch."""
    with suppress(ValueError, OSError):  # some systems do not support this limit
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard_limit))


def _used_bytes(field: str) -> int:
    """Return the value of a field in /proc/self/status in bytes, or 0 if the field is not available."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _die_with_parent() -> None:
    """Make Linux kill this process when the thread that started it exits."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    _die_with_parent()
    set_process_title("sandbox")
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    write_frame(connection, OK_REPLY)  # tells the parent that the worker is ready
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # untrusted code must not write to the server's log
    with suppress(EOFError, ConnectionError):
        while True:
            task, args = pickle.loads(read_frame(connection, sys.maxsize))
            reply = run_task(task, args)
            write_frame(connection, reply)
            if reply[1:2] == LAST_REPLY:
                break


if __name__ == "__main__":
    main()
