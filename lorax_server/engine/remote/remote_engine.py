"""The API process's client for an engine in a separate process."""

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import ClientChannel, describe_exit
from lorax_server.engine.remote.output_stream import Handler, OutputStream
from lorax_server.errors import EngineError, InputError, LoraxError
from lorax_server.types import (
    AdapterRef,
    AdapterState,
    EngineInfo,
    EngineStatus,
    Merge,
    Output,
    Request,
    ResolvedAdapter,
)

logger = logging.getLogger(__name__)
Config = TypeVar("Config")
Result = TypeVar("Result")

FIRST_RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 60.0
STABLE_AFTER_S = 300.0  # an engine that ran at least this long restarts without delay


class RemoteEngine:
    """Starts an engine process, forwards requests to it, and restarts it after a crash.

    `target(config, address)` is a module-level function that builds an engine and calls `process.serve`. All methods
    must run on one event loop. The client buffers outputs, so that slow readers do not delay other requests.
    """

    def __init__(
        self,
        target: Callable[[Config, str], None],
        config: Config,
        *,
        restart: bool = True,
        first_delay_s: float = FIRST_RESTART_DELAY_S,
    ) -> None:
        self.is_healthy = False
        self.num_restarts = 0
        self.info: EngineInfo  # set by `start`
        self._target = functools.partial(target, config)
        self._restart = restart
        self._first_pause_s = first_delay_s
        self._ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[messages.Reply[Any]]] = {}
        self._streams: dict[int, OutputStream] = {}
        self._channel: ClientChannel | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._restart_reason = "the engine is not started"
        self._retry_after_s: float | None = None

    def new_id(self) -> int:
        """Return a request ID that is unique, even across engine restarts."""
        return next(self._ids)

    # --- Start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine and wait until it accepts requests. A failed first start is not retried."""
        assert self._supervisor is None, "the client was already started"
        start_s = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(start_s))

    async def close(self) -> None:
        """Stop the engine. All requests and queries fail."""
        self._fail_all("the engine is stopped", None)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        if self._channel is not None:
            await self._channel.stop()

    # --- Requests and queries -----------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request, one at a time. `stream` yields them in lists."""
        async with aclosing(self.stream(request)) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def stream(self, request: Request, handler: Handler | None = None) -> AsyncGenerator[list[Output], None]:
        """Yield lists of outputs as they arrive, or raise the request's error.

        Closing the generator aborts the request. While the caller waits for outputs, `handler` receives them first,
        except for the last outputs.
        """
        request_id = request.request_id
        assert request_id not in self._streams, f"request {request_id} was already added"
        self._send(messages.Add(request))
        stream = self._streams[request_id] = OutputStream(handler)
        try:
            while True:
                await stream.wait()
                outputs = stream.drain()
                if outputs:
                    yield outputs
                if stream.is_closed and not stream.outputs:
                    if stream.error is not None:
                        raise stream.error
                    return
        finally:
            self.abort(request_id)

    def abort(self, request_id: int, error: LoraxError | None = None) -> None:
        """Abort a request. If `error` is set, the reader raises it. Ignore requests that have finished."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.close(error)
            self._send(messages.Abort((request_id,)))

    async def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> ResolvedAdapter:
        return await self._query(messages.Resolve(self.new_id(), tuple(refs), merge), messages.ResolveReply)

    async def load(self, identity: str, pin: bool | None = None) -> None:
        await self._query(messages.LoadAdapter(self.new_id(), identity, pin), messages.DoneReply)

    async def unload(self, identity: str) -> None:
        await self._query(messages.UnloadAdapter(self.new_id(), identity), messages.DoneReply)

    async def move(self, request_ids: Sequence[int], identity: str) -> None:
        """Continue requests with another loaded adapter. Requests that have finished are ignored."""
        await self._query(messages.MoveRequests(self.new_id(), tuple(request_ids), identity), messages.DoneReply)

    async def forget(self, source: str, name: str) -> None:
        await self._query(messages.ForgetAdapter(self.new_id(), source, name), messages.DoneReply)

    async def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        return await self._query(messages.ListAdapters(self.new_id(), tuple(identities)), messages.AdaptersReply)

    async def status(self) -> EngineStatus:
        return await self._query(messages.GetStatus(self.new_id()), messages.StatusReply)

    async def _query(self, message: messages.AnyQuery, kind: type[messages.Reply[Result]]) -> Result:
        self._send(message)
        query = self._queries[message.query_id] = asyncio.get_running_loop().create_future()
        try:
            reply = await query
            assert isinstance(reply, kind)
            return reply.result
        finally:
            self._queries.pop(message.query_id, None)

    def _send(self, message: messages.ToEngine) -> None:
        if not self.is_healthy or self._channel is None:
            raise self._make_unavailable_error()
        try:
            self._channel.send(message)
        except messages.ChannelError as error:
            raise InputError(str(error)) from error

    # --- Outputs and replies ------------------------------------------------------------------------------------------

    async def _deliver_all(self, channel: ClientChannel) -> str:
        """Deliver outputs and replies until the engine stops. Return the reason why it stopped."""
        steps: list[list[Output]] = []  # outputs that are not delivered yet
        while True:
            try:
                message = await channel.receive()
            except messages.ChannelError as error:
                self._deliver_steps(steps)
                return f"invalid message from the engine: {error}"
            if isinstance(message, messages.Outputs):
                steps.append(message.outputs)
                if channel.has_more:
                    continue
            self._deliver_steps(steps)
            steps.clear()
            match message:
                case None:
                    return f"the engine process exited ({describe_exit(await channel.stop())})"
                case messages.EngineFailed(reason, _):
                    return f"the engine failed: {reason}"
                case messages.Outputs():
                    pass
                case messages.Reply():
                    self._settle(message)
                case _:
                    return f"unexpected message from the engine: {type(message).__name__}"

    def _deliver_steps(self, steps: Sequence[Sequence[Output]]) -> None:
        """Group the outputs from several steps by request, and deliver them."""
        if len(steps) == 1:
            for output in steps[0]:
                self._deliver(output)
            return
        by_request: defaultdict[int, list[Output]] = defaultdict(list)
        for outputs in steps:
            for output in outputs:
                by_request[output.request_id].append(output)
        for outputs in by_request.values():
            self._deliver(*outputs)

    def _deliver(self, *outputs: Output) -> None:
        """Push one request's outputs to its stream."""
        last = outputs[-1]
        stream = self._streams.get(last.request_id)
        if stream is None:
            return  # the request was aborted
        if last.failure is None and last.finish_reason is None:
            stream.push(outputs)
            return
        del self._streams[last.request_id]
        stream.push(outputs if last.failure is None else outputs[:-1], is_last=True)
        stream.close(None if last.failure is None else last.failure.to_error())

    def _settle(self, reply: messages.Reply[Any]) -> None:
        query = self._queries.get(reply.query_id)
        if query is None or query.done():
            return
        if isinstance(reply, messages.QueryFailed):
            query.set_exception(reply.result.to_error())
        else:
            query.set_result(reply)

    # --- Crash and restart --------------------------------------------------------------------------------------------

    async def _launch(self) -> float:
        """Start an engine process. Return its startup time in seconds."""
        began = time.monotonic()
        channel = ClientChannel()
        self.info = await channel.start(self._target)
        self._channel = channel
        self.is_healthy = True
        return time.monotonic() - began

    async def _supervise(self, start_s: float) -> None:
        pause_s = 0.0
        try:
            while True:
                assert self._channel is not None
                began = time.monotonic()
                problem = await self._deliver_all(self._channel)
                pause_s = next_restart_delay_s(pause_s, time.monotonic() - began, self._first_pause_s)
                logger.error("%s; %d requests failed", problem, len(self._streams))
                self._fail_all(problem, pause_s + start_s if self._restart else None)
                await self._channel.stop()  # release the old process's resources before the next start
                if not self._restart:
                    return
                start_s, pause_s = await self._relaunch(start_s, pause_s)
        finally:  # even after a bug in this task, callers must not hang
            if self.is_healthy:
                self._fail_all("the engine supervisor stopped", None)

    async def _relaunch(self, start_s: float, pause_s: float) -> tuple[float, float]:
        """Start a new engine process, and return its startup time and the last retry delay.

        Failed starts are retried until a start succeeds.
        """
        while True:
            await asyncio.sleep(pause_s)
            try:
                start_s = await self._launch()
                self.num_restarts += 1
                return start_s, pause_s
            except Exception as error:  # including failures to create a process or folder
                pause_s = next_restart_delay_s(pause_s, 0.0, self._first_pause_s)
                logger.error("%s", error)
                self._fail_all(str(error), pause_s + start_s)

    def _fail_all(self, problem: str, retry_after_s: float | None) -> None:
        """Fail all pending requests and queries."""
        if retry_after_s is not None:
            problem, retry_after_s = f"{problem}; the engine is restarting", float(math.ceil(max(1.0, retry_after_s)))
        self.is_healthy, self._restart_reason, self._retry_after_s = False, problem, retry_after_s
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close(self._make_unavailable_error())
        for query in self._queries.values():
            if not query.done():
                query.set_exception(self._make_unavailable_error())

    def _make_unavailable_error(self) -> EngineError:
        return EngineError(self._restart_reason, self._retry_after_s)


def next_restart_delay_s(last_delay_s: float, uptime_s: float, first_delay_s: float) -> float:
    """Return the delay before a restart. It is 0 after a long uptime, and otherwise doubles up to a limit."""
    if uptime_s >= STABLE_AFTER_S:
        return 0.0
    return min(max(first_delay_s, 2 * last_delay_s), MAX_RESTART_DELAY_S)
