"""The engine's side of a process that follows structures."""

import os
import pickle
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe

from cachetools import LRUCache

from lorax_server.structured_output import wire
from lorax_server.structured_output.slots import MaskSlots
from lorax_server.text.chat_template import ENVIRONMENT

CLOSE_S = 5.0
MAX_AT_ONCE = 2**14  # bytes that are sent without another thread, less than what there is room for
OnMessage = Callable[["StructureProcess", wire.FromProgram | None], None]


class StructureProcess:
    """Starts the process. Two threads write to it and read from it, so that nobody waits until it has started."""

    def __init__(self, start: wire.Start, on_message: "OnMessage") -> None:
        """`on_message` is called on the reading thread; with None at the end, however it came."""
        self.slot_of: dict[int, int] = {}  # by request that it follows, or that waits for it
        self.asked_at: dict[int, float] = {}  # when it was asked for masks that have not come, by request, in order
        self.known: LRUCache[int, bool] = LRUCache(wire.MAX_COMPILED)  # hashes of grammars that it was given last
        self.problem, self.unusable_until = "", 0.0  # of its tokenizer
        self.is_gone = False
        self._on_message = on_message
        self._connection, theirs = Pipe()
        self.slots = MaskSlots()
        given = [theirs.fileno(), self.slots.file]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lorax_server.structured_output.program", *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError:  # of a machine that is full
            self._connection.close()
            self.slots.close()
            raise
        finally:
            theirs.close()
        self._room = select.poll()
        self._room.register(self._connection.fileno(), select.POLLOUT)
        self._sending = threading.Lock()  # guards the next two
        self._num_unsent = 0
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()
        self.send(start)

    def send(self, message: wire.ToProgram | wire.Start) -> None:
        """Send a message. A process that is gone does not get it, and `on_message` tells so.

        What is small goes at once, where nothing is before it and there is room: another thread would have to wait for
        its turn at Python. All else is left to that thread, or the caller would wait until the process reads.
        """
        data = pickle.dumps(message, protocol=5)
        with self._sending:
            if not self._num_unsent and len(data) <= MAX_AT_ONCE and self._has_room():
                with suppress(OSError):
                    self._connection.send_bytes(data)
            else:
                self._num_unsent += 1
                self._unsent.put(data)

    def _has_room(self) -> bool:
        """Tell whether the process has read most of what it was sent."""
        return not self._connection.closed and bool(self._room.poll(0))

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
        self.slots.close()

    def _write(self) -> None:
        with suppress(OSError):  # of a process that is gone, which the reader tells
            while (data := self._unsent.get()) is not None:
                self._connection.send_bytes(data)
                with self._sending:
                    self._num_unsent -= 1

    def _read(self) -> None:
        try:
            while True:
                self._on_message(self, pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            self.is_gone = True
            self._on_message(self, None)
