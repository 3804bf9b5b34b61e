"""Messages between the parent and its workers, which are the API processes."""

import msgspec

from lorax_server.server.access.model_names import Named
from lorax_server.server.seen_adapters import SeenSnapshot
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.workers.changes import Changes
from lorax_server.types import EngineInfo, Failure


class WireMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the name of the class tells them apart."""


class Question(WireMessage, frozen=True):
    """A message that an `Answered`, a `Written` or a `Denied` of the same number answers."""

    question: int


# --- To a worker ------------------------------------------------------------------------------------------------------


class Welcome(WireMessage, frozen=True):
    """The first message: all that the others know already."""

    created: int
    aliases: dict[str, Named]
    folder: list[str]
    seen: SeenSnapshot


class EngineFound(WireMessage, frozen=True):
    address: str
    info: EngineInfo


class EngineLost(WireMessage, frozen=True):
    problem: str
    retry_after_s: float | None


class ChangeMade(WireMessage, frozen=True):
    """Make this change, and confirm it by `Synced`; without a change: confirm that all before it was done."""

    number: int
    change: Changes | None


class Answered(WireMessage, frozen=True):
    question: int


class Written(WireMessage, frozen=True):
    question: int
    content: bytes


class Denied(WireMessage, frozen=True):
    question: int
    failure: Failure


class Drain(WireMessage, frozen=True):
    """End once all requests are answered, or at once. No more connections come."""

    at_once: bool


ToWorker = Welcome | EngineFound | EngineLost | ChangeMade | Answered | Written | Denied | Drain

# --- To the parent ----------------------------------------------------------------------------------------------------


class Serving(WireMessage, frozen=True):
    """The worker takes connections."""


class CannotStart(WireMessage, frozen=True):
    reason: str


class Departing(WireMessage, frozen=True):
    """The worker was told to end, and wants no more connections."""


class Synced(WireMessage, frozen=True):
    number: int


class EnterAsked(Question, frozen=True):
    """May a key have so many answers? The question's number is the ticket to give back."""

    key: str
    count: int


class TicketLeft(WireMessage, frozen=True):
    ticket: int
    tokens: int


class FareOpened(WireMessage, frozen=True):
    ticket: int
    key: str
    name: Named


class FareAsked(Question, frozen=True):
    ticket: int


class FareOwed(WireMessage, frozen=True):
    ticket: int


class FareGivenBack(WireMessage, frozen=True):
    ticket: int


class FareClosed(WireMessage, frozen=True):
    ticket: int
    is_answered: bool


class ChangeAsked(Question, frozen=True):
    change: Changes


class ScrapeAsked(Question, frozen=True):
    as_json: bool


class RequestBegun(WireMessage, frozen=True):
    pass


class RequestEnded(WireMessage, frozen=True):
    record: RequestRecord


class RequestRefused(WireMessage, frozen=True):
    record: RequestRecord


class ConnectionsOpen(WireMessage, frozen=True):
    """So many connections are open, and so many of all that were handed over have been taken."""

    open: int
    taken: int


class ConnectionRefused(WireMessage, frozen=True):
    reason: str


ToParent = (
    Serving
    | CannotStart
    | Departing
    | Synced
    | EnterAsked
    | TicketLeft
    | FareOpened
    | FareAsked
    | FareOwed
    | FareGivenBack
    | FareClosed
    | ChangeAsked
    | ScrapeAsked
    | RequestBegun
    | RequestEnded
    | RequestRefused
    | ConnectionsOpen
    | ConnectionRefused
)
