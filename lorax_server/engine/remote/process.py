"""The engine process: takes messages, lets the engine step, sends the outputs.

Queries about names are answered beside the steps, on the threads that know the answer. A request for an adapter follows
such an answer, and would otherwise wait for a step to end before it even arrives.
"""

import gc
import logging
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.errors import EngineError, LoraxError
from lorax_server.process_tuning import trim_malloc
from lorax_server.types import EngineInfo, Failure, Output

if TYPE_CHECKING:
    from lorax_server.engine.engine import Engine  # with numpy, which the API process does not need

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

REST_AFTER = 20  # idle turns


@contextmanager
def connected(address: str) -> Iterator[EngineChannel]:
    """Open the channel to the API process, and report there whatever fails inside, such as building an engine.

    Ctrl-C reaches every process of a terminal, but the API process decides when the engine stops.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineChannel(address)
    channel.open()
    try:
        yield channel
    except LoraxError as error:
        channel.fail(error)
        raise SystemExit(1) from error  # reported already, and a stack trace would not help the user
    except Exception as error:
        channel.fail(error)
        raise
    finally:
        channel.close()


def serve(engine: "Engine", channel: EngineChannel, info: EngineInfo) -> None:
    """Serve until the API process says stop or is gone. An error of `step` is reported, and then raised.

    A thread that finds that the engine cannot go on calls `channel.report`.
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
    def __init__(self, engine: "Engine", channel: EngineChannel) -> None:
        self._engine = engine
        self._channel = channel
        self._refused: list[Output] = []  # sent with the outputs of the step
        self._is_stopping = False
        self._idle_s = 0.0
        self._num_idle = 0  # idle turns since the last output

    def run(self, info: EngineInfo) -> None:
        engine, channel = self._engine, self._channel
        channel.wake = engine.wake
        channel.handle_urgent = self._handle_urgent
        channel.send(messages.Ready(info))
        while True:
            for message in channel.take():
                self._handle(message)
            if self._is_stopping:
                return
            self._send(engine.step())
            is_idle, since = not (engine.is_busy or engine.wake.is_set()), time.monotonic()
            engine.wait()  # returns at once if a message has come
            if is_idle:
                self._idle_s += time.monotonic() - since
                self._num_idle += 1
                if self._num_idle == REST_AFTER:  # once: it takes milliseconds, and the next step takes memory again
                    gc.collect()  # full collections are rare while steps run
                    trim_malloc()

    # --- Messages to the engine ---------------------------------------------------------------------------------------

    def _handle_urgent(self, message: messages.ToEngine) -> bool:
        """Handle queries about names, which need no step, on the channel's thread, where nothing may block."""
        is_urgent = isinstance(message, messages.Resolve | messages.ForgetAdapter)
        if is_urgent:
            self._handle(message)
        return is_urgent

    def _handle(self, message: messages.ToEngine) -> None:
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
                    self._refused.append(Output.failed(request.request_id, _to_report(error)))
            case _:
                try:
                    self._answer(message)
                except Exception as error:
                    self._refuse(message.query_id, error)

    def _answer(self, message: messages.Queries) -> None:
        query_id, engine = message.query_id, self._engine
        match message:
            case messages.Resolve(_, refs, merge):
                self._reply_when_done(query_id, engine.resolve(refs, merge), messages.ResolveReply)
            case messages.LoadAdapter(_, identity, pin):
                self._reply_when_done(query_id, engine.load(identity, pin), messages.Done)
            case messages.UnloadAdapter(_, identity):
                engine.unload(identity)
                self._channel.send(messages.Done(query_id))
            case messages.ForgetAdapter(_, source, name):
                engine.forget(source, name)
                self._channel.send(messages.Done(query_id))
            case messages.ListAdapters(_, identities):
                self._channel.send(messages.AdaptersReply(query_id, engine.list_adapters(identities)))
            case messages.GetStatus():
                self._channel.send(messages.StatusReply(query_id, replace(engine.status(), idle_s=self._idle_s)))

    def _reply_when_done(self, query_id: int, future: Future[Result], kind: type[messages.Reply[Result]]) -> None:
        def when_done(done: Future[Result]) -> None:
            try:
                self._channel.send(kind(query_id, done.result()))
            except BaseException as error:  # whatever it is, it belongs to the caller
                self._refuse(query_id, error)

        future.add_done_callback(when_done)

    # --- Messages from the engine -------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> None:
        """Send all outputs in one message."""
        outputs, self._refused = self._refused + outputs, []
        if outputs:
            self._num_idle = 0
            self._channel.send(messages.Outputs(outputs))

    def _refuse(self, query_id: int, error: BaseException) -> None:
        self._channel.send(messages.Refused(query_id, Failure.of(_to_report(error))))


def _to_report(error: BaseException) -> LoraxError:
    """Return a user's error as it is. Log any other: it is a bug of the engine, and ends only what it happened to."""
    if isinstance(error, LoraxError) and not isinstance(error, messages.ChannelError):
        return error
    logger.error("A request failed because of a mistake of the engine", exc_info=error)
    return EngineError(f"the engine made a mistake: {type(error).__name__}: {error}")
