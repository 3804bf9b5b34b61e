"""The engine process: takes messages, lets the engine step, sends what came of it.

Questions about names are answered beside the steps, on the threads that know: a request that names an adapter comes
after its answer, and would otherwise wait for a step to end before it even arrives.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.errors import EngineError, LoraxError
from lorax_server.machine import give_back_memory
from lorax_server.types import (
    AdapterRef,
    AdapterState,
    EngineInfo,
    EngineStatus,
    Failure,
    Merge,
    Output,
    Request,
    Resolved,
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

IDLE_S = 0.05  # how often it is looked for what depends on time alone
REST_AFTER = 20  # times that it had nothing to do


class ServedEngine(Protocol):
    """What can be served: `engine.engine.Engine`, or what stands in for it."""

    @property
    def wake(self) -> threading.Event: ...
    @property
    def is_busy(self) -> bool: ...
    def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Future[Resolved]: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def load(self, identity: str, pin: bool | None = None) -> Future[None]: ...
    def unload(self, identity: str) -> None: ...
    def forget(self, source: str, name: str) -> None: ...
    def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]: ...
    def step(self) -> list[Output]: ...
    def status(self) -> EngineStatus: ...
    def close(self) -> None: ...


@contextmanager
def connected(address: str) -> Iterator[EngineChannel]:
    """The channel to the API process. What fails inside, such as building an engine, is told there before it ends all.

    Ctrl-C reaches every process of a terminal, but when the engine stops is for the API process to say.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineChannel(address)
    channel.open()
    try:
        yield channel
    except LoraxError as error:
        channel.fail(error)
        raise SystemExit(1) from error  # it has been told, and where we are says nothing to who made the mistake
    except Exception as error:
        channel.fail(error)
        raise
    finally:
        channel.close()


def serve(engine: ServedEngine, channel: EngineChannel, info: EngineInfo) -> None:
    """Until it is told to stop or nobody is left to serve. Whatever `step` raises is told, and then raised.

    Who finds in another thread that the engine cannot go on calls `channel.report`.
    """
    try:
        _EngineLoop(engine, channel).run(info)
        if channel.has_failed:
            raise SystemExit(1)
    except Exception as error:
        channel.fail(error)
        raise
    finally:
        engine.close()


class _EngineLoop:
    def __init__(self, engine: ServedEngine, channel: EngineChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._refused: list[Output] = []  # goes out with those of the step
        self._is_stopping = False
        self._idle_s = 0.0
        self._num_idle = 0  # since something was told

    def run(self, info: EngineInfo) -> None:
        engine, channel = self._engine, self._channel
        channel.wake = engine.wake
        channel.answer_at_once = self._answer_at_once
        channel.send(messages.Ready(info))
        while True:
            engine.wake.clear()  # before looking: what happens from here on sets it again
            for data in channel.take():
                self._take(data)
            if self._is_stopping:
                return
            self._send(engine.step())
            if not (engine.is_busy or channel.has_messages):
                since = time.monotonic()
                engine.wake.wait(IDLE_S)
                self._idle_s += time.monotonic() - since
                self._rest()

    def _rest(self) -> None:
        """After some idle turns memory is given back, once: it takes milliseconds, and the next step takes it again."""
        self._num_idle += 1
        if self._num_idle == REST_AFTER:
            give_back_memory()

    # --- What comes ---------------------------------------------------------------------------------------------------

    def _answer_at_once(self, data: bytes) -> bool:
        """On the thread of the channel, where nothing may wait."""
        message = messages.decode_question(data)
        if message is not None:
            self._obey(message)
        return message is not None

    def _take(self, data: bytes) -> None:
        try:
            message = messages.decode_to_engine(data)
        except messages.ChannelError as error:
            answer = messages.answer_to_unreadable(data, error)
            if answer is None:
                raise  # somebody would wait for ever
            logger.exception("A message that cannot be read is refused")
            self._reply(answer)
        else:
            self._obey(message)

    def _obey(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Stop():
                self._is_stopping = True
            case messages.Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case messages.Add(request):
                try:
                    self._engine.add(request)
                except Exception as error:
                    self._refused.append(Output.failed(request.request_id, _to_be_told(error)))
            case _:
                try:
                    self._call(message)
                except Exception as error:
                    self._reply(messages.Refused(message.call_id, Failure.of(_to_be_told(error))))

    def _call(self, message: messages.Queries) -> None:
        call_id = message.call_id
        match message:
            case messages.Resolve(_, refs, merge):
                resolving = self._engine.resolve(refs, merge)
                self._reply_when_done(call_id, resolving, lambda resolved: messages.ResolveReply(call_id, resolved))
            case messages.LoadAdapter(_, identity, pin):
                self._reply_when_done(call_id, self._engine.load(identity, pin), lambda _: messages.Done(call_id))
            case messages.UnloadAdapter(_, identity):
                self._engine.unload(identity)
                self._reply(messages.Done(call_id))
            case messages.ForgetAdapter(_, source, name):
                self._engine.forget(source, name)
                self._reply(messages.Done(call_id))
            case messages.ListAdapters(_, identities):
                self._reply(messages.AdaptersReply(call_id, self._engine.list_adapters(identities)))
            case messages.GetStatus():
                status = replace(self._engine.status(), idle_s=self._idle_s)
                self._reply(messages.StatusReply(call_id, status))

    def _reply_when_done(
        self, call_id: int, future: Future[Result], reply: Callable[[Result], messages.FromEngine]
    ) -> None:
        def when_done(done: Future[Result]) -> None:
            try:
                message = reply(done.result())
            except BaseException as error:  # whatever it is, it belongs to who asked
                message = messages.Refused(call_id, Failure.of(_to_be_told(error)))
            self._reply(message)

        future.add_done_callback(when_done)

    # --- What goes ----------------------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> None:
        """All of it in one message. What cannot be sent fails alone."""
        outputs, self._refused = self._refused + outputs, []
        if outputs:
            self._num_idle = 0
            try:
                self._channel.send(messages.Outputs(outputs))
            except messages.ChannelError:
                self._channel.send(messages.Outputs([self._sendable(output) for output in outputs]))

    def _sendable(self, output: Output) -> Output:
        try:
            messages.encode(messages.Outputs([output]))
        except messages.ChannelError as error:
            self._engine.abort(output.request_id)
            return Output.failed(output.request_id, _to_be_told(error))
        return output

    def _reply(self, reply: messages.FromEngine) -> None:
        """At once, on any thread."""
        try:
            self._channel.send(reply)
        except messages.ChannelError as error:
            if not isinstance(reply, messages.Reply):
                raise
            self._channel.send(messages.Refused(reply.call_id, Failure.of(_to_be_told(error))))


def _to_be_told(error: BaseException) -> LoraxError:
    """A user's mistake as it is. One of ours is written down, and ends no more than what it happened to."""
    if isinstance(error, LoraxError) and not isinstance(error, messages.ChannelError):
        return error
    logger.error("A request failed because of a mistake of the engine", exc_info=error)
    return EngineError(f"the engine made a mistake: {type(error).__name__}: {error}")
