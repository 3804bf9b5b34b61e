"""A worker as its parent sees it."""

import array
import asyncio
import multiprocessing.process
import socket
import time
from typing import TYPE_CHECKING

from lorax_server.server.access.rate_limits import Fare, Permit
from lorax_server.server.workers.messages import ToParent, WireMessage

if TYPE_CHECKING:
    from lorax_server.server.workers.wire import Wire

SLOW_S = 1.0  # a worker that has not taken a connection for so long gets none while others do


class Seat:
    """One worker, from its start to its end, and all that it holds meanwhile.

    `number` tells workers apart for ever: one that takes the place of another has a number of its own.
    """

    def __init__(
        self,
        number: int,
        process: multiprocessing.process.BaseProcess,
        door: socket.socket,
        first: "asyncio.Future[None]",
    ) -> None:
        self.number = number
        self.process = process
        self._first = first  # of its place, to be settled when it serves
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_started = self.has_served = False  # it has said so; the second stays
        self.is_open = False  # it may be given connections
        self.reason = ""  # why it cannot start
        self.num_open = 0
        self.permits: dict[int, Permit] = {}
        self.fares: dict[int, Fare] = {}
        self._wire: Wire[ToParent] | None = None
        self._door = door
        self._num_handed = 0
        self._num_taken = 0
        self._handed_at = 0.0  # when the first one was handed over that is not taken
        self._awaited: dict[int, asyncio.Future[None]] = {}

    def connect(self, wire: "Wire[ToParent]") -> None:
        self._wire = wire

    @property
    def lost(self) -> "asyncio.Future[None]":
        """A future that is done when the worker will say no more."""
        return self.ended if self._wire is None else self._wire.lost

    def send(self, message: WireMessage) -> None:
        if self._wire is not None:
            self._wire.send(message)

    def start(self) -> None:
        """Note that the worker has said that it serves."""
        self.has_started = self.has_served = True

    def open(self) -> None:
        """Let the worker have connections from now on."""
        self.is_open = True
        if not self._first.done():
            self._first.set_result(None)

    # --- Confirmations ------------------------------------------------------------------------------------------------

    def expect(self, number: int) -> "asyncio.Future[None]":
        """Return a future that is done when the worker confirms a message, or is gone."""
        awaited = self._awaited[number] = asyncio.get_running_loop().create_future()
        if self.ended.done():
            awaited.set_result(None)
        return awaited

    def confirm(self, number: int) -> None:
        awaited = self._awaited.pop(number, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    # --- Connections --------------------------------------------------------------------------------------------------

    @property
    def load(self) -> tuple[bool, int, int]:
        """The order in which workers are given connections, the least first; of equals the one that had fewer."""
        num_waiting = self._num_handed - self._num_taken
        is_slow = num_waiting > 0 and time.monotonic() - self._handed_at > SLOW_S
        return is_slow, self.num_open + num_waiting, self._num_handed

    def hand_over(self, connection: socket.socket) -> bool:
        """Give the worker a connection. False if it cannot take it now."""
        fds = array.array("i", [connection.fileno()])
        try:
            self._door.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except BlockingIOError:
            return False
        except OSError:  # it is gone, and its end is about to be noticed
            self.is_open = False
            return False
        if self._num_handed == self._num_taken:
            self._handed_at = time.monotonic()
        self._num_handed += 1
        return True

    def count(self, num_open: int, num_taken: int) -> None:
        """Note how many connections the worker has, and how many it has taken over."""
        if num_taken > self._num_taken:
            self._handed_at = time.monotonic()
        self.num_open, self._num_taken = num_open, num_taken

    # --- The end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Give back all that the worker held, since its process is gone. Tokens that it did not tell of are not
        paid for."""
        self.is_open = self.has_started = False
        self.num_open = 0
        for permit in self.permits.values():
            permit.leave()
        for fare in self.fares.values():
            fare.__exit__(None, asyncio.CancelledError(), None)
        self.permits.clear()
        self.fares.clear()
        for number in list(self._awaited):
            self.confirm(number)
        if self._wire is not None:
            self._wire.close()
        self._door.close()
