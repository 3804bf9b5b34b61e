"""The engine's side of a process that follows structures."""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe

from lorax_server.structures import wire
from lorax_server.text.chat_template import ENVIRONMENT

CLOSE_S = 5.0
OnMessage = Callable[["StructureProcess", wire.FromProgram | None], None]


class StructureProcess:
    """Starts the process. Two threads write to it and read from it, so that nobody waits until it has started."""

    def __init__(self, start: wire.Start, on_message: "OnMessage") -> None:
        """`on_message` is called on the reading thread; with None at the end, however it came."""
        self.request_ids: set[int] = set()  # that it follows, or that wait for it
        self.asked_at: dict[int, float] = {}  # when it was asked for masks that have not come, by request, in order
        self.problem, self.unusable_until = "", 0.0  # of its tokenizer
        self.is_gone = False
        self._on_message = on_message
        self._connection, theirs = Pipe()
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lorax_server.structures.program", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        theirs.close()
        self._unsent: queue.SimpleQueue[wire.ToProgram | wire.Start | None] = queue.SimpleQueue()
        self._unsent.put(start)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def send(self, message: wire.ToProgram) -> None:
        """Send a message. A process that is gone does not get it, and `on_message` tells so."""
        self._unsent.put(message)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self.is_gone = True
        self._unsent.put(None)
        self._process.kill()
        self._process.wait(CLOSE_S)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)
        self._connection.close()

    def _write(self) -> None:
        with suppress(OSError):  # of a process that is gone, which the reader tells
            while (message := self._unsent.get()) is not None:
                self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def _read(self) -> None:
        try:
            while True:
                self._on_message(self, pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self.is_gone = True
            self._on_message(self, None)
