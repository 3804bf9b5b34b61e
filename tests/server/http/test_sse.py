"""EventStream with slow, idle and disconnected clients."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from lorax_server.server.http.sse import DONE_EVENT, KEEP_ALIVE_COMMENT, EventStream, encode_event, encode_json
from tests.server.service_harness import Message, Peer, settle

NEVER_S = 1000.0


class Source:
    """A source of test events that counts how many were read."""

    def __init__(self, *pieces: bytes, then: Callable[[], Awaitable[None]] | None = None) -> None:
        self.num_taken = 0
        self.is_closed = False
        self._pieces = pieces
        self._then = then

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for piece in self._pieces:
                self.num_taken += 1
                yield piece
            if self._then is not None:
                await self._then()
        finally:
            self.is_closed = True


async def wait_forever() -> None:
    await asyncio.Event().wait()


async def run(
    source: Source, peer: Peer, ends: list[bool], keep_alive_s: float = NEVER_S, headers: dict[str, str] | None = None
) -> None:
    stream = EventStream(source.events(), keep_alive_s, headers)
    stream.on_finish = ends.append
    await stream({}, peer.receive, peer.send)


# --- Bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "a\nb", "\r\n\r\ndata: x", "\x00\u2028\x85", "日本👍", '"\\'])
def test_event_is_one_line(text: str) -> None:
    written = encode_event({"text": text})
    assert written.startswith(b"data: ")
    assert written.endswith(b"\n\n")
    assert written.count(b"\n") == 2
    assert b"\r" not in written
    assert json.loads(written[6:]) == {"text": text}


def test_event_writes_nan_as_null() -> None:
    assert encode_json([math.nan, math.inf, -0.5]) == b"[null,null,-0.5]"


def test_response_has_start_events_and_end() -> None:
    async def check() -> None:
        source, peer, ends = Source(encode_event({"a": 1}), encode_event({"b": 2}) + DONE_EVENT), Peer(), list[bool]()
        await run(source, peer, ends, headers={"x-model-id": "it"})
        head, *bodies = peer.sent
        headers = dict(head["headers"])
        assert (head["type"], head["status"]) == ("http.response.start", 200)
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")
        assert headers[b"x-model-id"] == b"it"
        assert b"content-length" not in headers
        assert [(each["body"], each["more_body"]) for each in bodies] == [
            (b'data: {"a":1}\n\n', True),
            (b'data: {"b":2}\n\ndata: [DONE]\n\n', True),
            (b"", False),
        ]
        assert ends == [False]
        assert source.is_closed

    asyncio.run(check())


# --- Silence ----------------------------------------------------------------------------------------------------------


def test_no_keep_alive_after_last_message() -> None:
    async def check() -> None:
        async def listen(message: Message) -> None:
            if message.get("more_body") is False:
                await asyncio.sleep(0.02)  # the client takes it slowly

        peer = Peer(listen)
        await run(Source(encode_event(1)), peer, [], keep_alive_s=0.001)
        assert peer.sent[-1]["more_body"] is False

    asyncio.run(check())


def test_idle_stream_sends_keep_alive() -> None:
    async def check() -> None:
        heard, num_heard = asyncio.Event(), 0

        async def listen(message: Message) -> None:
            nonlocal num_heard
            num_heard += message.get("body") == KEEP_ALIVE_COMMENT
            if num_heard == 3:
                heard.set()

        source, peer = Source(encode_event(1), then=lambda: _wait(heard)), Peer(listen)
        await run(source, peer, [], keep_alive_s=0.001)
        bodies = [message["body"] for message in peer.sent[1:]]
        assert bodies[0] == encode_event(1)
        assert bodies.count(KEEP_ALIVE_COMMENT) >= 3
        assert bodies[-1] == b""
        assert peer.body.replace(KEEP_ALIVE_COMMENT, b"") == encode_event(1)

    asyncio.run(check())


async def _wait(heard: asyncio.Event) -> None:
    await heard.wait()


def test_active_stream_sends_no_keep_alive() -> None:
    async def check() -> None:
        peer = Peer()
        await run(Source(*[encode_event(i) for i in range(100)]), peer, [], keep_alive_s=NEVER_S)
        assert KEEP_ALIVE_COMMENT not in [message.get("body") for message in peer.sent]

    asyncio.run(check())


# --- Clients that leave -----------------------------------------------------------------------------------------------


def test_disconnect_stops_stream() -> None:
    async def check() -> None:
        source, peer, ends = Source(encode_event(1), then=wait_forever), Peer(), list[bool]()
        running = asyncio.create_task(run(source, peer, ends))
        await settle()
        peer.arrivals.put_nowait({"type": "http.request", "body": b"", "more_body": False})  # is no leaving
        await settle()
        assert (running.done(), source.is_closed) == (False, False)
        peer.disconnect()
        await running
        assert ends == [True]
        assert source.is_closed
        assert peer.body == encode_event(1)

    asyncio.run(check())


def test_early_disconnect_stops_stream_before_events() -> None:
    async def check() -> None:
        source, peer, ends = Source(encode_event(1), then=wait_forever), Peer(), list[bool]()
        peer.disconnect()
        await run(source, peer, ends)
        assert ends == [True]
        assert source.is_closed

    asyncio.run(check())


def test_cancelled_stream_counts_as_disconnected() -> None:
    async def check() -> None:
        source, peer, ends = Source(encode_event(1), then=wait_forever), Peer(), list[bool]()
        running = asyncio.create_task(run(source, peer, ends))
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ends == [True]
        assert source.is_closed

    asyncio.run(check())


# --- Failures ---------------------------------------------------------------------------------------------------------


def test_event_error_is_raised_to_caller() -> None:
    async def fail() -> None:
        raise KeyError("mistake")

    async def check() -> None:
        ends: list[bool] = []
        with pytest.raises(KeyError, match="mistake"):
            await run(Source(encode_event(1), then=fail), Peer(), ends)
        assert ends == [False]

    asyncio.run(check())


@pytest.mark.parametrize("kind", ["http.response.start", "http.response.body"])
def test_socket_error_stops_stream(kind: str) -> None:
    async def check() -> None:
        async def break_down(message: Message) -> None:
            if message["type"] == kind:
                raise OSError("broken pipe")

        source, ends = Source(encode_event(1), encode_event(2)), list[bool]()
        with pytest.raises(OSError, match="broken pipe"):
            await run(source, Peer(break_down), ends)
        assert ends == [False]
        assert source.num_taken == (kind == "http.response.body")

    asyncio.run(check())


def test_stream_finishes_if_events_fail_to_close() -> None:
    async def stubborn() -> AsyncGenerator[bytes, None]:
        try:
            yield encode_event(1)
            await wait_forever()
        finally:
            raise RuntimeError("not me")

    async def check() -> None:
        peer, ends = Peer(), list[bool]()
        stream = EventStream(stubborn(), NEVER_S)
        stream.on_finish = ends.append

        async def block(message: Message) -> None:
            if message.get("body"):
                peer.disconnect()
                await wait_forever()

        peer._before_send = block  # closed at a yield, not at an await
        with pytest.raises(RuntimeError, match="not me"):
            await stream({}, peer.receive, peer.send)
        assert ends == [True]

    asyncio.run(check())


def test_events_are_generated_on_demand() -> None:
    async def check() -> None:
        turn = asyncio.Semaphore(0)

        async def take_turns(message: Message) -> None:
            if message.get("body"):
                await turn.acquire()

        source, peer = Source(*[encode_event(i) for i in range(50)]), Peer(take_turns)
        running = asyncio.create_task(run(source, peer, []))
        for count in range(1, 50):
            await settle()
            assert source.num_taken == count
            turn.release()
        turn.release()
        await running
        assert peer.body == b"".join(encode_event(i) for i in range(50))

    asyncio.run(check())
