"""The parent's desk: state that must be one for all workers, and the answers to what they ask about it."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import Counter, Gauge

from lorax_server.config import ServerConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.errors import LoraxError
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.rate_limits import RateLimits
from lorax_server.server.seen_adapters import SeenAdapters
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.workers import messages
from lorax_server.server.workers.changes import Changes, FolderRead, make_change
from lorax_server.server.workers.common import make_names, scrape
from lorax_server.server.workers.seat import Seat
from lorax_server.types import Failure

logger = logging.getLogger(__name__)

CONFIRM_S = 5.0  # how long the others are waited for when one of them hangs


class Desk:
    """The limits of keys, the names, the adapters that were found, used signatures and the metrics, for all workers.

    It belongs to one event loop, so that what workers ask at the same time has an order.
    """

    def __init__(self, config: ServerConfig, engine: RemoteEngine, keys: KeyRing) -> None:
        self.names = make_names(config)
        self.seen = SeenAdapters()
        self.seats: list[Seat] = []
        self.on_open: Callable[[], None] = lambda: None  # a worker may be given connections from now on
        self._config = config
        self._engine = engine
        self._keys = keys
        self._created = int(time.time())
        self._folder: list[str] = []
        self._limits = RateLimits(
            config.max_concurrent_requests, new_adapters_per_minute=config.new_adapters_per_minute
        )
        self._metrics: Metrics | None = None  # once the engine is known
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        engine.on_change = self._tell_of_engine

    # --- Workers come and go ------------------------------------------------------------------------------------------

    def admit(self, seat: Seat) -> None:
        """Tell a new worker what the others know, and from now on what changes."""
        aliases, folder = dict(self.names.aliases), list(self._folder)
        seat.send(messages.Welcome(self._created, aliases, folder, self.seen.snapshot()))
        if self._engine.address is not None:
            seat.send(messages.EngineFound(self._engine.address, self._engine.info))
        self.seats.append(seat)

    def dismiss(self, seat: Seat) -> None:
        """Take back all that a worker held, here and in the engine. Its process is gone."""
        if seat in self.seats:
            self.seats.remove(seat)
        seat.end()
        self._engine.let_go(seat.number)
        if self._metrics is not None:
            self._metrics.set_connections(sum(each.num_open for each in self.seats))

    def _tell_of_engine(self) -> None:
        address, engine = self._engine.address, self._engine
        if address is None:
            loss = engine.loss
            news: messages.WireMessage = messages.EngineLost(str(loss), loss.retry_after_s)
        else:
            news = messages.EngineFound(address, engine.info)
            if self._metrics is None:
                self._metrics = self._make_metrics()
        for seat in self.seats:
            seat.send(news)

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def change(self, change: Changes) -> None:
        """Make a change here, then at all workers, and wait until they have confirmed it."""
        make_change(change, self.names, self.seen)
        await self._spread(change)

    def note_folder(self, loop: asyncio.AbstractEventLoop, names: Iterable[str]) -> None:
        """Note the adapters of the folder that is watched, on the thread that watches it."""
        listed = list(names)
        self.names.set_folder(listed)
        loop.call_soon_threadsafe(self._tell_of_folder, listed)

    def _tell_of_folder(self, names: list[str]) -> None:
        self._folder = names
        self._begin(self._spread(FolderRead(names)))

    async def _spread(self, change: Changes | None = None) -> None:
        """Tell all workers of a change. Without one: wait until all have done what they were told before."""
        number = next(self._numbers)
        awaited = []
        for seat in self.seats:
            if seat.has_started:  # others confirm once they have begun to listen
                awaited.append(seat.expect(number))
            seat.send(messages.ChangeMade(number, change))
        if awaited:
            _, hanging = await asyncio.wait(awaited, timeout=CONFIRM_S)
            if hanging:
                logger.warning("%d API processes did not confirm a change within %g s", len(hanging), CONFIRM_S)

    # --- Messages of workers ------------------------------------------------------------------------------------------

    def handle(self, seat: Seat, message: messages.ToParent) -> None:
        match message:
            case messages.Synced(number):
                seat.confirm(number)
            case messages.Serving():
                seat.start()
                self._begin(self._open(seat))
            case messages.CannotStart(reason):
                seat.reason = reason
            case messages.Departing():
                seat.is_open = False
                seat.send(messages.Drain(at_once=False))
            case messages.ChangeAsked(question, change):
                self._begin(self._answer(seat, question, self.change(change)))
            case messages.ScrapeAsked(question, as_json):
                self._begin(self._answer(seat, question, self.scrape(as_json)))
            case messages.EnterAsked() | messages.FareAsked():
                self._decide(seat, message)
            case messages.TicketLeft(ticket, tokens):
                permit = seat.permits.pop(ticket, None)
                if permit is not None:
                    permit.leave(tokens)
            case messages.FareOpened() | messages.FareOwed() | messages.FareGivenBack() | messages.FareClosed():
                self._settle_fare(seat, message)
            case _:
                self._count(seat, message)

    def _settle_fare(
        self,
        seat: Seat,
        message: messages.FareOpened | messages.FareOwed | messages.FareGivenBack | messages.FareClosed,
    ) -> None:
        match message:
            case messages.FareOpened(ticket, key, name):
                seat.fares[ticket] = self._limits.fare(self._keys.named(key), name)
                seat.fares[ticket].__enter__()
            case messages.FareOwed(ticket):
                seat.fares[ticket].owe()
            case messages.FareGivenBack(ticket):
                seat.fares[ticket].give_back()
            case messages.FareClosed(ticket, is_answered):
                seat.fares.pop(ticket).__exit__(None, None if is_answered else asyncio.CancelledError(), None)

    def _count(self, seat: Seat, message: messages.ToParent) -> None:
        metrics = self._metrics
        assert metrics is not None, "no worker serves before the engine is there"
        match message:
            case messages.RequestBegun():
                metrics.begin()
            case messages.RequestEnded(record):
                metrics.end(record)
            case messages.RequestRefused(record):
                metrics.refuse(record)
            case messages.ConnectionRefused(reason):
                metrics.refuse_connection(reason)
            case messages.ConnectionsOpen(num_open, taken):
                seat.count(num_open, taken)
                metrics.set_connections(sum(each.num_open for each in self.seats))

    def _decide(self, seat: Seat, message: messages.EnterAsked | messages.FareAsked) -> None:
        """Allow or refuse at once, in the order in which workers ask."""
        question = message.question
        try:
            match message:
                case messages.EnterAsked(_, key, count):
                    seat.permits[question] = self._limits.enter(self._keys.named(key), count)
                case messages.FareAsked(_, ticket):
                    seat.fares[ticket].take()
        except LoraxError as error:
            seat.send(messages.Denied(question, Failure.of(error)))
        else:
            seat.send(messages.Answered(question))

    async def _answer(self, seat: Seat, question: int, work: Coroutine[Any, Any, bytes | None]) -> None:
        try:
            content = await work
        except LoraxError as error:
            seat.send(messages.Denied(question, Failure.of(error)))
        except Exception:
            logger.exception("a worker's question failed because of a mistake of the server")
            seat.send(messages.Denied(question, Failure.of(LoraxError("Internal server error"))))
        else:
            answer = messages.Answered(question) if content is None else messages.Written(question, content)
            seat.send(answer)

    async def _open(self, seat: Seat) -> None:
        """Give a worker connections once it knows all that the others know."""
        await self._spread()
        if seat in self.seats:
            seat.open()
            self.on_open()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # a task that nobody holds may vanish
        task.add_done_callback(self._tasks.discard)

    # --- Metrics ------------------------------------------------------------------------------------------------------

    def _make_metrics(self) -> Metrics:
        total = self._engine.info.max_length
        longest = min(self._config.max_input_length or total, total - 1)
        metrics = Metrics(max_input_length=longest, max_total_tokens=total)
        self._workers = Gauge("lorax_api_workers", "API processes that serve", registry=metrics.registry)
        self._replaced = Counter(
            "lorax_api_workers_replaced_total", "API processes that others took the place of", registry=metrics.registry
        )
        return metrics

    def count_replaced(self) -> None:
        if self._metrics is not None:
            self._replaced.inc()

    async def scrape(self, as_json: bool) -> bytes:
        """Write the metrics of all workers, with all that they have told before now."""
        await self._spread()
        assert self._metrics is not None, "no worker serves before the engine is there"
        self._workers.set(sum(seat.is_open for seat in self.seats))
        return await scrape(self._metrics, self._engine, as_json)
