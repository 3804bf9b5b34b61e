"""The one port: the parent accepts connections, and hands each to the worker that has the fewest.

Workers that accept from a shared socket take whatever comes when they look, often all of a burst; and with a socket for
each (SO_REUSEPORT) the system chooses by chance, and drops what waits for a worker that is killed. A connection that is
handed over belongs to one worker, and nothing waits elsewhere than in the parent's own queue.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from lorax_server.server.http.uvicorn_server import BACKLOG
from lorax_server.server.workers.seat import Seat

logger = logging.getLogger(__name__)

AT_ONCE = 64  # connections that are accepted before other events have their turn
RETRY_S = 0.005  # until workers that could not take a connection are asked again
ERROR_S = 0.5
ONE = 1


class Door:
    """The parent's end: a socket that listens, and workers to hand its connections to."""

    def __init__(self, listener: socket.socket, seats: Callable[[], Sequence[Seat]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._seats = seats
        self._waiting: socket.socket | None = None  # accepted, and no worker could take it yet
        self._retry: asyncio.TimerHandle | None = None
        self._is_listening = False

    def open(self) -> None:
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._is_listening = True
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more. A connection that no worker has taken is closed."""
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._retry is not None:
            self._retry.cancel()
        if self._waiting is not None:
            self._waiting.close()

    def wake(self) -> None:
        """Look again for a worker that takes connections: one has come."""
        if self._is_listening and self._retry is not None:
            self._retry.cancel()
            self._try_again()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # such as: there are no files left
                logger.error("no connection can be accepted: %s", error)
                self._pause(ERROR_S)
                return
            if not self._hand_over(connection):
                self._waiting = connection
                self._pause(RETRY_S)
                return

    def _pause(self, seconds: float) -> None:
        """Accept no more for a while: connections wait in the system's queue."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(seconds, self._try_again)

    def _hand_over(self, connection: socket.socket) -> bool:
        for seat in sorted((seat for seat in self._seats() if seat.is_open), key=lambda seat: seat.load):
            if seat.hand_over(connection):
                connection.close()  # the worker has it
                return True
        return False

    def _try_again(self) -> None:
        if self._waiting is None or self._hand_over(self._waiting):
            self._waiting = self._retry = None
            self._loop.add_reader(self._listener.fileno(), self._accept)
        else:
            self._retry = self._loop.call_later(RETRY_S, self._try_again)


def take_connections(end: socket.socket) -> list[socket.socket]:
    """Take over the connections that the parent has handed to this worker so far."""
    taken: list[socket.socket] = []
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(end, ONE, ONE)
        except BlockingIOError:
            return taken
        if not data:  # the parent is gone
            return taken
        taken += [socket.socket(fileno=fd) for fd in fds]
