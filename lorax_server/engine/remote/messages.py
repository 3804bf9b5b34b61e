"""Typed messages between the API process and the engine process, which are encoded as msgpack."""

from collections.abc import Mapping, Sequence, Set
from typing import Generic, TypeVar

import msgspec

from lorax_server.errors import EngineError
from lorax_server.types import (
    AdapterRef,
    AdapterState,
    EngineInfo,
    EngineStatus,
    Failure,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
)

Received = TypeVar("Received")
Result = TypeVar("Result")


class ChannelError(EngineError):
    """Raised if a message cannot be sent or decoded."""


# --- To the engine ----------------------------------------------------------------------------------------------------


class EngineMessage(msgspec.Struct, frozen=True, tag=True):
    """Base class of all messages. The encoded message contains the class name."""


class Query(EngineMessage, frozen=True):
    """A message that expects a `Reply` with the same ID."""

    query_id: int


class Add(EngineMessage, frozen=True):
    request: Request


class Abort(EngineMessage, frozen=True):
    request_ids: tuple[int, ...]


class Resolve(Query, frozen=True):
    refs: tuple[AdapterRef, ...]
    merge: Merge | None = None


class LoadAdapter(Query, frozen=True):
    identity: str
    pin: bool | None = None


class UnloadAdapter(Query, frozen=True):
    identity: str


class MoveRequests(Query, frozen=True):
    request_ids: tuple[int, ...]
    identity: str


class GetStatus(Query, frozen=True):
    pass


class ForgetAdapter(Query, frozen=True):
    source: str
    name: str


class ListAdapters(Query, frozen=True):
    identities: tuple[str, ...]


class Stop(EngineMessage, frozen=True):
    """Stops the engine. The API process also sends it to acknowledge `EngineFailed`."""


AnyQuery = Resolve | LoadAdapter | UnloadAdapter | MoveRequests | ForgetAdapter | ListAdapters | GetStatus
ToEngine = Add | Abort | AnyQuery | Stop

# --- From the engine --------------------------------------------------------------------------------------------------


class Ready(EngineMessage, frozen=True):
    """The engine's first message. The engine now accepts requests."""

    info: EngineInfo


class Outputs(EngineMessage, frozen=True):
    """All outputs from one step."""

    outputs: list[Output]


class Reply(EngineMessage, Generic[Result], frozen=True):
    query_id: int
    result: Result


class ResolveReply(Reply[ResolvedAdapter], frozen=True):
    pass


class StatusReply(Reply[EngineStatus], frozen=True):
    pass


class AdaptersReply(Reply[list[AdapterState]], frozen=True):
    pass


class DoneReply(Reply[None], frozen=True):
    """The reply after an adapter was loaded or unloaded, its resolution was forgotten, or requests moved."""

    result: None = None


class QueryFailed(Reply[Failure], frozen=True):
    pass


class EngineFailed(EngineMessage, frozen=True):
    """The engine's final message, with the reason why it stopped, and the exception if it is a user error."""

    message: str
    user_error: Failure | None = None


FromEngine = Ready | Outputs | ResolveReply | StatusReply | AdaptersReply | DoneReply | QueryFailed | EngineFailed

# --- Bytes ------------------------------------------------------------------------------------------------------------


_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: EngineMessage) -> bytes:
    try:
        return msgspec.msgpack.encode(message, enc_hook=_to_builtin)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ChannelError(f"cannot encode {type(message).__name__}: {error}") from error


def decode_to_engine(data: bytes) -> ToEngine:
    return _decode(data, _TO_ENGINE)


def decode_from_engine(data: bytes) -> FromEngine:
    return _decode(data, _FROM_ENGINE)


def reply_to_unreadable(data: bytes, error: ChannelError) -> FromEngine | None:
    """Return an error reply to an unreadable message, or None if the message has no readable ID."""
    failure = EngineError(str(error))
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError):
        return None
    match message:
        case {"query_id": int(query_id)}:
            return QueryFailed(query_id, Failure.from_error(failure))
        case {"request": {"request_id": int(request_id)}}:
            return Outputs([Output.failed(request_id, failure)])
    return None


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Received]) -> Received:
    try:
        return decoder.decode(data)
    except Exception as error:  # also raised by dataclass validation
        raise ChannelError(f"cannot decode a message of {len(data)} bytes: {error}") from error


def _to_builtin(value: object) -> object:
    """Return a mapping, set or sequence as a type that msgpack supports."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set | Sequence):
        return list(value)
    raise TypeError(f"unsupported type {type(value).__name__}: {value!r:.100}")
