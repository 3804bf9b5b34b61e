"""`DirectWriter`: a stream has the same content with and without direct writes."""

import asyncio
import gc
import json
from typing import Any

import pytest

from lorax_server.server.generations import RemoteGeneration
from lorax_server.server.http.sse import CHUNK_WRITER, DirectWriter, EventStream, encode_event
from lorax_server.types import FinishReason, Output, Request, SampledToken, SamplingParams, StopParams
from tests.server.fake_server import Routes, complete, generate
from tests.server.service_harness import Peer, ScriptedEngine, ids, settle, tokenizer

TEXT = "quick brown fox jumps"


class FakeConnection:
    """A connection that appends direct writes to the client's messages while `is_writable`."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.is_writable = True
        self.num_written = 0
        self._sent = sent

    def write(self, chunk: bytes) -> None:
        assert chunk, "an empty chunk would end the response"
        self.num_written += 1
        self._sent.append({"type": "http.response.body", "body": chunk, "more_body": True})


class StreamedGeneration:
    """A streamed generation and the client that reads it."""

    def __init__(self, **stop: Any) -> None:
        self.engine, self.peer, self.direct_writer = ScriptedEngine(), Peer(), DirectWriter()
        self.connection = FakeConnection(self.peer.sent)
        params = StopParams(**{"max_new_tokens": 100} | stop)
        request = Request(self.engine.new_id(), ids("ask"), SamplingParams(), params)
        self.generation = RemoteGeneration(self.engine, request, tokenizer())
        self.generation.set_direct_writer(
            self.direct_writer, lambda events: b"".join(encode_event(each.text) for each in events)
        )

    async def events(self) -> Any:
        async for token_events in self.generation.stream():
            yield b"".join(encode_event(each.text) for each in token_events)

    def start(self) -> "asyncio.Task[None]":
        response = EventStream(self.events(), 1000.0, direct_writer=self.direct_writer)
        scope = {"extensions": {CHUNK_WRITER: lambda: self.connection}}
        return asyncio.create_task(response(scope, self.peer.receive, self.peer.send))

    @property
    def text(self) -> str:
        pieces = self.peer.body.split(b"\n\n")[:-1]
        return "".join(json.loads(chunk.removeprefix(b"data: ")) for chunk in pieces)


def test_first_and_last_tokens_are_not_written_directly() -> None:
    async def check() -> None:
        stream, tokens = StreamedGeneration(), ids(TEXT)
        reading = stream.start()
        await settle()
        stream.engine.emit_tokens(1, tokens[0])
        assert stream.connection.num_written == 0  # the reader records the time to first token
        await settle()
        stream.engine.emit_tokens(1, *tokens[1:-1])
        assert stream.connection.num_written == len(tokens) - 2  # before the reader runs
        stream.engine.emit_tokens(1, tokens[-1], end=FinishReason.LENGTH)
        await reading
        assert (stream.connection.num_written, stream.text) == (len(tokens) - 2, TEXT)
        assert stream.generation.completion.token_ids == tokens
        assert stream.peer.sent[-1]["more_body"] is False
        assert not stream.direct_writer.is_open

    asyncio.run(check())


def test_blocked_client_gets_tokens_in_order() -> None:
    async def check() -> None:
        stream, tokens = StreamedGeneration(), ids(TEXT)
        reading = stream.start()
        await settle()
        stream.engine.emit_tokens(1, tokens[0])
        await settle()
        stream.engine.emit_tokens(1, tokens[1])
        stream.connection.is_writable = False
        stream.engine.emit_tokens(1, tokens[2])
        stream.connection.is_writable = True
        stream.engine.emit_tokens(1, *tokens[3:5])  # the reader has not handled the previous token
        assert stream.connection.num_written == 1
        await settle()
        stream.engine.emit_tokens(1, *tokens[5:], end=FinishReason.LENGTH)
        await reading
        assert stream.text == TEXT

    asyncio.run(check())


@pytest.mark.parametrize("is_last", [False, True])
def test_tokens_from_several_steps_are_one_chunk(is_last: bool) -> None:
    async def check() -> None:
        stream, tokens = StreamedGeneration(), ids(TEXT)
        reading = stream.start()
        await settle()
        stream.engine.emit_tokens(1, tokens[0])
        await settle()
        end = FinishReason.LENGTH if is_last else None
        steps = [[Output(1, (SampledToken(token_id, -0.5),))] for token_id in tokens[1:-1]]
        stream.engine._deliver_steps([*steps, [Output(2), Output(1, (SampledToken(tokens[-1], -0.5),), end)]])
        assert stream.connection.num_written == (0 if is_last else 1)
        stream.engine.emit_tokens(1, *[] if is_last else ids("!"), end=FinishReason.LENGTH)
        await reading
        assert stream.text == (TEXT if is_last else TEXT + "!")

    asyncio.run(check())


def test_stop_string_is_handled_by_reader() -> None:
    async def check() -> None:
        stream = StreamedGeneration(stop_strings=("fox",), include_stop=False)
        reading = stream.start()
        await settle()
        first, *others = ids(TEXT)
        stream.engine.emit_tokens(1, first)
        await settle()
        stream.engine.emit_tokens(1, *others)
        await reading
        assert stream.text == stream.generation.text == "quick brown "
        assert stream.engine.aborted == [1]

    asyncio.run(check())


def test_empty_chunk_is_not_written() -> None:
    async def check() -> None:
        stream = StreamedGeneration()
        stream.generation.set_direct_writer(
            stream.direct_writer, lambda events: b"" if events[0].token_id else b"never"
        )
        reading = stream.start()
        await settle()
        stream.engine.emit_tokens(1, *ids("a"))
        await settle()
        stream.engine.emit_tokens(1, *ids("bc"))
        stream.engine.emit_tokens(1, *ids("d"), end=FinishReason.LENGTH)
        await reading
        assert (stream.connection.num_written, stream.text) == (0, "ad")

    asyncio.run(check())


def test_direct_write_error_fails_only_its_stream() -> None:
    async def check() -> None:
        stream = StreamedGeneration()
        stream.generation.set_direct_writer(stream.direct_writer, lambda events: bytes([1 // len(events[1:])]))
        reading = stream.start()
        await settle()
        stream.engine.emit_tokens(1, *ids("a"))
        await settle()
        stream.engine.emit_tokens(1, *ids("b"))
        with pytest.raises(ZeroDivisionError):
            await reading
        assert stream.engine.aborted == [1]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate_stream", generate(adapter_id="one", details=True, return_k_alternatives=2)),
        ("/v1/completions", complete("one", stream=True, echo=True)),
        ("/v1/completions", complete(stream=True, logprobs=1)),
        ("/v1/completions", complete(stream=True, n=2, stream_options={"include_usage": True})),
    ],
)
def test_direct_writes_match_normal_stream(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Routes(folder=["one"]).post(path, body).events
    connections = list[FakeConnection]()

    async def respond(self: EventStream, scope: Any, receive: Any, send: Any) -> None:
        class ForwardingConnection(FakeConnection):
            def write(self, chunk: bytes) -> None:
                super().write(chunk)
                waiting = send(self._sent.pop())
                with pytest.raises(StopIteration):
                    waiting.send(None)  # the test's `send` never suspends

        connections.append(ForwardingConnection([]))
        await whole(self, {**scope, "extensions": {CHUNK_WRITER: lambda: connections[-1]}}, receive, send)

    whole = EventStream.__call__
    monkeypatch.setattr(EventStream, "__call__", respond)
    quick = Routes(folder=["one"]).post(path, body).events
    assert join(quick) == join(plain)
    assert (connections[0].num_written > 0) is (body.get("n", 1) == 1)


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", generate()), ("/v1/completions", complete(stream=True))]
)
def test_generation_is_freed_without_garbage_collection(path: str, body: Any) -> None:
    """Generations have no reference cycles, because garbage collection may run late."""
    routes = Routes()
    routes.post(path, body)
    gc.collect()
    gc.disable()
    try:
        routes.post(path, body)
        assert not [each for each in gc.get_objects() if isinstance(each, RemoteGeneration)]
    finally:
        gc.enable()


def join(events: list[Any]) -> dict[str, Any]:
    """Merge stream events, because tokens may be grouped differently."""
    result: dict[str, Any] = {"text": "", "tokens": [], "rest": []}
    for each in events:
        if "token" in each:
            result["tokens"].append(each.pop("token"))
        for choice in each.get("choices", ()):
            delta = choice.get("delta", choice)
            result["text"] += f"{choice['index']}: {delta.pop('text', None) or delta.pop('content', '')}"
            logprobs = choice.pop("logprobs") or {}
            result["tokens"] += logprobs.get("content") or logprobs.get("tokens") or []
            result["rest"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        result["rest"] += [each[key] for key in ("usage", "details", "generated_text", "adapter_tier") if each.get(key)]
    result["text"] = result["text"].replace("0: ", "") if "1: " not in result["text"] else sorted(result["text"])
    return result
