"""A worker's link to its parent: questions and their answers, news of the engine, and changes that all make alike."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.joined_engine import JoinedEngine
from lorax_server.errors import EngineError
from lorax_server.server.seen_adapters import SeenAdapters
from lorax_server.server.workers import messages
from lorax_server.server.workers.changes import FolderRead, make_change
from lorax_server.server.workers.common import make_names
from lorax_server.server.workers.wire import Wire

logger = logging.getLogger(__name__)


class ParentLink:
    """The parent as its worker sees it, and the worker's copies of what all know. It belongs to one event loop."""

    def __init__(self, config: ServerConfig, number: int) -> None:
        self.names = make_names(config)
        self.seen = SeenAdapters()
        self.engine = JoinedEngine(number)
        self.created = 0
        self._num_open = self._num_taken = 0  # connections; the second that the parent has handed over
        self._is_counted = True  # the parent knows these numbers
        self.on_drain: Callable[[bool], None] = lambda _: None
        self._wire: Wire[messages.ToWorker] = Wire(messages.ToWorker, self._hear)
        self._welcomed = asyncio.Event()
        self._tickets = itertools.count(1)
        self._questions: dict[int, asyncio.Future[bytes | None]] = {}
        self._folders = asyncio.Lock()  # one is read after the other
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, end: socket.socket) -> None:
        """Connect, and wait until this process knows all that the others know."""
        await self._wire.open(end)
        await self._welcomed.wait()

    @property
    def lost(self) -> "asyncio.Future[None]":
        """A future that is done when the parent is gone."""
        return self._wire.lost

    def tell(self, message: messages.WireMessage) -> None:
        """Tell the parent without waiting. A parent that is gone needs not be told."""
        self._wire.send(message)

    def new_ticket(self) -> int:
        """Return a number for a question, or for what is held at the parent."""
        return next(self._tickets)

    async def ask(self, question: messages.Question) -> bytes | None:
        """Ask the parent, and return what it has written, if anything. Its refusal is raised."""
        if self.lost.done():
            raise EngineError("the server is shutting down")
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._wire.send(question)
        self._questions[question.question] = answer
        try:
            await asyncio.wait((answer, self.lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineError("the server is shutting down")
            return answer.result()
        finally:
            self._questions.pop(question.question, None)

    def close(self) -> None:
        """Tell the parent what it was not told yet, then end."""
        self._wire.close()

    # --- Connections --------------------------------------------------------------------------------------------------

    def note_open(self, count: int) -> None:
        """Note how many connections are open."""
        self._num_open = count
        self._count_soon()

    def note_taken(self, count: int) -> None:
        """Note that so many more connections were taken over."""
        self._num_taken += count
        self._count_soon()

    def _count_soon(self) -> None:
        """Tell the parent in this turn of the event loop, once for all connections that come and go in it."""
        if self._is_counted:
            self._is_counted = False
            asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        if not self._is_counted:
            self._is_counted = True
            self.tell(messages.ConnectionsOpen(self._num_open, self._num_taken))

    # --- Messages of the parent ---------------------------------------------------------------------------------------

    def _hear(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Answered(question):
                self._settle(question, None)
            case messages.Written(question, content):
                self._settle(question, content)
            case messages.Denied(question, failure):
                answer = self._questions.get(question)
                if answer is not None and not answer.done():
                    answer.set_exception(failure.to_error())
            case messages.ChangeMade(number, FolderRead() as change):
                self._begin_folder(number, change)
            case messages.ChangeMade(number, change):
                if change is not None:
                    make_change(change, self.names, self.seen)
                self._count()
                self.tell(messages.Synced(number))
            case messages.EngineFound(address, info):
                self.engine.find(address, info)
            case messages.EngineLost(problem, retry_after_s):
                self.engine.lose(problem, retry_after_s)
            case messages.Drain(at_once):
                self.on_drain(at_once)
            case messages.Welcome():
                self._take_over(message)

    def _settle(self, question: int, content: bytes | None) -> None:
        answer = self._questions.get(question)
        if answer is not None and not answer.done():
            answer.set_result(content)

    def _take_over(self, welcome: messages.Welcome) -> None:
        self.created = welcome.created
        self.names.restore(welcome.aliases, welcome.folder)
        self.seen.restore(welcome.seen)
        self._welcomed.set()

    def _begin_folder(self, number: int, change: FolderRead) -> None:
        task = asyncio.create_task(self._read_folder(number, change))
        self._tasks.add(task)  # a task that nobody holds may vanish
        task.add_done_callback(self._tasks.discard)

    async def _read_folder(self, number: int, change: FolderRead) -> None:
        """Make a change of the folder on another thread: with many adapters it would hold up streams."""
        async with self._folders:
            await asyncio.to_thread(make_change, change, self.names, self.seen)
        self.tell(messages.Synced(number))
