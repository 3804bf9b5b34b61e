"""Requests and queries to an engine in another process, and its outputs and replies."""

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from lorax_server.engine.remote import messages
from lorax_server.engine.remote.mailbox import Mailbox, Take
from lorax_server.engine.remote.sockets import ClientSockets
from lorax_server.errors import EngineError, InputError, LoraxError
from lorax_server.types import AdapterRef, AdapterState, EngineInfo, EngineStatus, Merge, Output, Request, Resolved

Result = TypeVar("Result")


class EngineRequests:
    """The part of an `EngineClient` that knows nothing of processes: who has asked, and who gets the answers.

    All methods belong to one event loop. Outputs wait for slow readers of `generate`, at most as many as their request
    may generate, so that a slow reader holds up no other. `worker` is the number of this API process; all ids begin
    with it, so that they differ from those of other processes.
    """

    def __init__(self, worker: int = 0) -> None:
        self.is_healthy = False
        self.num_restarts = 0
        self.info: EngineInfo  # facts that are known once the engine has started
        self._ids = itertools.count((worker << messages.WORKER_BITS) + 1)
        self._queries: dict[int, asyncio.Future[messages.Reply[Any]]] = {}
        self._streams: dict[int, Mailbox] = {}
        self._channel: ClientSockets | None = None
        self._problem = "the engine is not started"
        self._retry_after_s: float | None = None

    def new_id(self) -> int:
        """Return an id for a request, never the same one twice, whatever happens to the engine."""
        return next(self._ids)

    # --- Requests and queries -----------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield the request's outputs as they come, or raise the error that ends it. A reader that stops aborts it."""
        async with aclosing(self.stream(request)) as stream:
            async for outputs in stream:
                for output in outputs:
                    yield output

    async def stream(self, request: Request, take: Take | None = None) -> AsyncGenerator[list[Output], None]:
        """Yield outputs like `generate`, but in lists: all that came since the last list.

        Outputs that end nothing are offered to `take` first, if the reader waits: no task wakes for them then.
        """
        request_id = request.request_id
        assert request_id not in self._streams, f"request {request_id} is here already"
        self._send(messages.Add(request))
        mailbox = self._streams[request_id] = Mailbox(take)
        try:
            while True:
                await mailbox.wait()
                outputs = mailbox.empty()
                if outputs:
                    yield outputs
                if mailbox.error is not None and not mailbox.outputs:
                    raise mailbox.error
                if mailbox.is_ended and not mailbox.outputs:
                    return
        finally:
            self.abort(request_id)

    def abort(self, request_id: int, error: LoraxError | None = None) -> None:
        """End a request and its reader, which gets the error if there is one. Do nothing if it has ended already."""
        mailbox = self._streams.pop(request_id, None)
        if mailbox is not None:
            mailbox.end(error)
            self._send(messages.Abort((request_id,)))

    async def resolve(self, refs: Sequence[AdapterRef], merge: Merge | None = None) -> Resolved:
        return await self._query(messages.Resolve(self.new_id(), tuple(refs), merge), messages.ResolveReply)

    async def load(self, identity: str, pin: bool | None = None) -> None:
        await self._query(messages.LoadAdapter(self.new_id(), identity, pin), messages.Done)

    async def unload(self, identity: str) -> None:
        await self._query(messages.UnloadAdapter(self.new_id(), identity), messages.Done)

    async def forget(self, source: str, name: str) -> None:
        await self._query(messages.ForgetAdapter(self.new_id(), source, name), messages.Done)

    async def list_adapters(self, identities: Sequence[str]) -> list[AdapterState]:
        return await self._query(messages.ListAdapters(self.new_id(), tuple(identities)), messages.AdaptersReply)

    async def status(self) -> EngineStatus:
        return await self._query(messages.GetStatus(self.new_id()), messages.StatusReply)

    async def _query(self, message: messages.Queries, kind: type[messages.Reply[Result]]) -> Result:
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
            raise self._loss()
        try:
            self._channel.send(message)
        except messages.ChannelError as error:
            raise InputError(str(error)) from error

    # --- Outputs and replies ------------------------------------------------------------------------------------------

    async def _deliver_all(self, channel: ClientSockets) -> str:
        """Deliver the engine's messages until there are no more, and return why."""
        steps: list[list[Output]] = []  # whose outputs were not delivered yet
        while True:
            try:
                message = await channel.receive()
            except messages.ChannelError as error:
                self._deliver_steps(steps)
                return f"the engine is not understood: {error}"
            if isinstance(message, messages.Outputs):
                steps.append(message.outputs)
                if channel.has_more:
                    continue
            self._deliver_steps(steps)
            steps.clear()
            match message:
                case None:
                    return await self._describe_end()
                case messages.Failed(reason):
                    return f"the engine failed: {reason}"
                case messages.Outputs():
                    pass
                case messages.Reply():
                    self._settle(message)
                case _:
                    return f"the engine is not understood: {type(message).__name__} is not due"

    def _deliver_steps(self, steps: Sequence[Sequence[Output]]) -> None:
        """Deliver the outputs of steps. If several are here already, a request's outputs are written together."""
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
        """Deliver outputs of one request."""
        last = outputs[-1]
        mailbox = self._streams.get(last.request_id)
        if mailbox is None:
            return  # aborted meanwhile
        if last.failure is None and last.finish_reason is None:
            mailbox.put(outputs)
            return
        del self._streams[last.request_id]
        mailbox.put_last(outputs if last.failure is None else outputs[:-1])
        mailbox.end(None if last.failure is None else last.failure.to_error())

    def _settle(self, reply: messages.Reply[Any]) -> None:
        query = self._queries.get(reply.query_id)
        if query is None or query.done():
            return
        if isinstance(reply, messages.Refused):
            query.set_exception(reply.result.to_error())
        else:
            query.set_result(reply)

    async def _describe_end(self) -> str:
        """Describe the end of the engine, after its last message."""
        return "the engine process ended"

    # --- Loss ---------------------------------------------------------------------------------------------------------

    def _lose(self, problem: str, retry_after_s: float | None) -> None:
        """End all requests and queries with an error: the engine will not answer."""
        if retry_after_s is None:
            self._end_all(problem, None)
        else:
            self._end_all(f"{problem}; it is being started again", float(math.ceil(max(1.0, retry_after_s))))

    def _end_all(self, problem: str, retry_after_s: float | None) -> None:
        self.is_healthy, self._problem, self._retry_after_s = False, problem, retry_after_s
        streams, self._streams = self._streams, {}
        for mailbox in streams.values():
            mailbox.end(self._loss())
        for query in self._queries.values():
            if not query.done():
                query.set_exception(self._loss())

    @property
    def loss(self) -> EngineError:
        """The reason why no request is taken."""
        return self._loss()

    def _loss(self) -> EngineError:
        return EngineError(self._problem, self._retry_after_s)
