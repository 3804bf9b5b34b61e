"""The service of a worker: what must be one for all is asked of the parent, the rest is the worker's own."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Self

from lorax_server.config import ServerConfig
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import Named
from lorax_server.server.service import Leavable, Payable, Service
from lorax_server.server.telemetry.audit import AuditLog
from lorax_server.server.telemetry.metrics import RequestMetrics, clean
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.workers import messages
from lorax_server.server.workers.changes import AdapterFound, Changes
from lorax_server.server.workers.link import ParentLink

LOCAL = "local"  # the source that fetches nothing, so that nobody pays for it
COUNTED = (
    "key", "is_known", "identity", "num_choices", "status", "error_type", "is_dropped", "prompt_tokens",
    "cached_tokens", "generated_tokens", "max_new_tokens", "total_s", "validation_s", "adapter_s", "queue_s",
    "first_token_s", "inference_s",
)  # fmt: skip


@dataclass(eq=False)
class JoinedService(Service):
    """A `Service` of one worker among several."""

    link: ParentLink = field(kw_only=True)

    @classmethod
    async def join(cls, config: ServerConfig, keys: KeyRing, link: ParentLink, num_workers: int) -> "JoinedService":
        """Start a service and return it when the engine that all share takes requests."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(link.engine.close)
            parts = await cls._read_files(config, closing)
            await link.engine.start()
            service = cls(config, link.engine, keys, link.names, *parts, link.seen, link.created, link=link)
            service.audit_log = AuditLog(service.metrics, num_processes=num_workers)
            service._closing = closing.pop_all()
        return service

    def _make_metrics(self) -> RequestMetrics:
        return ToldMetrics(self.link)

    async def enter(self, key: Key, count: int = 1) -> Leavable:
        ticket = AskedPermit(self.link)
        try:
            await self.link.ask(messages.EnterAsked(ticket.number, key.name, count))
        except asyncio.CancelledError:  # the parent may have said yes
            ticket.leave()
            raise
        return ticket

    def fare(self, key: Key, name: Named) -> Payable:
        return NoFare() if name.source == LOCAL else AskedFare(self.link, key, name)

    async def change(self, change: Changes) -> None:
        if not (isinstance(change, AdapterFound) and self.seen.knows(change.identity, change.name, change.needs_token)):
            await self.link.ask(messages.ChangeAsked(self.link.new_ticket(), change))

    async def scrape(self, as_json: bool = False) -> bytes:
        return await self.link.ask(messages.ScrapeAsked(self.link.new_ticket(), as_json)) or b""


class AskedPermit:
    """A `Permit` that the parent holds."""

    def __init__(self, link: ParentLink) -> None:
        self.number = link.new_ticket()
        self._link = link
        self._is_left = False

    def leave(self, tokens: int = 0) -> None:
        if not self._is_left:
            self._is_left = True
            self._link.tell(messages.TicketLeft(self.number, tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class AskedFare:
    """A `Fare` that the parent holds."""

    def __init__(self, link: ParentLink, key: Key, name: Named) -> None:
        self._link = link
        self._key = key
        self._name = name
        self._ticket = link.new_ticket()

    async def ask(self) -> None:
        await self._link.ask(messages.FareAsked(self._link.new_ticket(), self._ticket))

    def owe(self) -> None:
        self._link.tell(messages.FareOwed(self._ticket))

    def give_back(self) -> None:
        self._link.tell(messages.FareGivenBack(self._ticket))

    def __enter__(self) -> Self:
        self._link.tell(messages.FareOpened(self._ticket, self._key.name, self._name))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_answered = error is None or isinstance(error, Exception)
        self._link.tell(messages.FareClosed(self._ticket, is_answered))


class NoFare:
    """The fare of an adapter that is on this machine."""

    async def ask(self) -> None:
        pass

    def owe(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


class ToldMetrics:
    """`RequestMetrics` that the parent keeps for all."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link

    def begin(self) -> None:
        self._link.tell(messages.RequestBegun())

    def end(self, record: RequestRecord) -> None:
        self._link.tell(messages.RequestEnded(_shorten(record)))

    def refuse(self, record: RequestRecord) -> None:
        self._link.tell(messages.RequestRefused(_shorten(record)))

    def set_connections(self, count: int) -> None:
        self._link.note_open(count)

    def refuse_connection(self, reason: str) -> None:
        self._link.tell(messages.ConnectionRefused(reason))


def _shorten(record: RequestRecord) -> RequestRecord:
    """Return the part of a record that is counted. The client's name for an adapter is short and plain then."""
    adapter_id = record.adapter_id and clean(record.adapter_id)
    return RequestRecord("", "", adapter_id=adapter_id, **{name: getattr(record, name) for name in COUNTED})
