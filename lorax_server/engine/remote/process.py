"""The engine process receives messages, runs engine steps, and sends outputs.

Adapter names are resolved on separate threads, so a slow step does not delay requests that are still waiting for
resolution.
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
    from lorax_server.engine.engine import Engine  # imports numpy, which the API process does not need

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

IDLE_STEPS_BEFORE_TRIM = 20  # idle loop iterations before freed memory is returned to the system


@contextmanager
def open_channel(address: str) -> Iterator[EngineChannel]:
    """Open the channel to the API process, and report exceptions in the `with` block to the API process.

    SIGINT is ignored, because the API process decides when the engine stops.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineChannel(address)
    channel.open()
    try:
        yield channel
    except LoraxError as error:
        channel.fail(error)
        raise SystemExit(1) from error  # already reported; a traceback would not help the user
    except Exception as error:
        channel.fail(error)
        raise
    finally:
        channel.close()


def serve(engine: "Engine", channel: EngineChannel, info: EngineInfo) -> None:
    """Run the engine loop until the API process sends `Stop` or exits. Errors in `step` are reported and raised.

    Other threads can report a fatal error with `channel.report`. The API process then stops the engine.
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
        self._rejected: list[Output] = []  # failures of rejected requests, sent with the next outputs
        self._is_stopping = False
        self._idle_s = 0.0
        self._num_idle = 0  # idle iterations since the last output

    def run(self, info: EngineInfo) -> None:
        engine, channel = self._engine, self._channel
        channel.wake = engine.wake
        channel.handle_urgent = self._handle_urgent
        channel.send(messages.Ready(info))
        while True:
            for message in channel.receive_all():
                self._handle(message)
            if self._is_stopping:
                return
            self._send(engine.step())
            is_idle, since = not (engine.is_busy or engine.wake.is_set()), time.monotonic()
            engine.wait()  # returns immediately if a message has arrived
            if is_idle:
                self._idle_s += time.monotonic() - since
                self._num_idle += 1
                # Once per idle period: this takes milliseconds, and the next step allocates memory again.
                if self._num_idle == IDLE_STEPS_BEFORE_TRIM:
                    gc.collect()  # full collections are rare while steps are running
                    trim_malloc()

    # --- Messages to the engine ---------------------------------------------------------------------------------------

    def _handle_urgent(self, message: messages.ToEngine) -> bool:
        """Handle a name resolution message on the channel thread, without waiting for a step. This must not block.

        Return False if the engine loop must handle the message.
        """
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
                    self._rejected.append(Output.failed(request.request_id, _to_user_error(error)))
            case _:
                try:
                    self._handle_query(message)
                except Exception as error:
                    self._send_error(message.query_id, error)

    def _handle_query(self, message: messages.AnyQuery) -> None:
        query_id, engine = message.query_id, self._engine
        match message:
            case messages.Resolve(_, refs, merge):
                self._reply_when_done(query_id, engine.resolve(refs, merge), messages.ResolveReply)
            case messages.LoadAdapter(_, identity, pin):
                self._reply_when_done(query_id, engine.load(identity, pin), messages.DoneReply)
            case messages.UnloadAdapter(_, identity):
                engine.unload(identity)
                self._channel.send(messages.DoneReply(query_id))
            case messages.MoveRequests(_, request_ids, identity):
                engine.move(request_ids, identity)
                self._channel.send(messages.DoneReply(query_id))
            case messages.ForgetAdapter(_, source, name):
                engine.forget(source, name)
                self._channel.send(messages.DoneReply(query_id))
            case messages.ListAdapters(_, identities):
                self._channel.send(messages.AdaptersReply(query_id, engine.list_adapters(identities)))
            case messages.GetStatus():
                self._channel.send(messages.StatusReply(query_id, replace(engine.status(), idle_s=self._idle_s)))

    def _reply_when_done(self, query_id: int, future: Future[Result], kind: type[messages.Reply[Result]]) -> None:
        def when_done(done: Future[Result]) -> None:
            try:
                self._channel.send(kind(query_id, done.result()))
            except BaseException as error:  # report every error to the caller
                self._send_error(query_id, error)

        future.add_done_callback(when_done)

    # --- Messages from the engine -------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> None:
        """Send all outputs to the API process in one message."""
        outputs, self._rejected = self._rejected + outputs, []
        if outputs:
            self._num_idle = 0
            self._channel.send(messages.Outputs(outputs))

    def _send_error(self, query_id: int, error: BaseException) -> None:
        self._channel.send(messages.QueryFailed(query_id, Failure.from_error(_to_user_error(error))))


def _to_user_error(error: BaseException) -> LoraxError:
    """Return user errors unchanged. Other errors are bugs: log them and return an `EngineError`."""
    if isinstance(error, LoraxError) and not isinstance(error, messages.ChannelError):
        return error
    logger.error("a request failed because of an internal engine error", exc_info=error)
    return EngineError(f"internal engine error: {type(error).__name__}: {error}")
