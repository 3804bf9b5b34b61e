"""The way of tokens past all tasks: a stream has the same content with it and without."""

import asyncio
import gc
import json
from typing import Any

import pytest

from lorax_server.server.generations import RemoteGeneration
from lorax_server.server.http.sse import CHUNK_WRITER, DirectWriter, EventStream, encode_event
from lorax_server.types import FinishReason, Output, Request, SampledToken, SamplingParams, StopParams
from tests.server.bench import Peer, ScriptedClient, ids, settle, tokenizer
from tests.server.fake_server import Routes, complete, generate

TEXT = "quick brown fox jumps"


class Line:
    """A connection that writes at once, beside the client's other messages, unless a test closes it."""

    def __init__(self, sent: list[dict[str, Any]]) -> None:
        self.is_writable = True
        self.num_written = 0
        self._sent = sent

    def write(self, piece: bytes) -> None:
        assert piece, "an empty chunk would end the response"
        self.num_written += 1
        self._sent.append({"type": "http.response.body", "body": piece, "more_body": True})


class Talk:
    """A generation whose events are streamed, and the client that reads them."""

    def __init__(self, **stop: Any) -> None:
        self.engine, self.peer, self.direct_writer = ScriptedClient(), Peer(), DirectWriter()
        self.line = Line(self.peer.sent)
        params = StopParams(**{"max_new_tokens": 100} | stop)
        request = Request(self.engine.new_id(), ids("ask"), SamplingParams(), params)
        self.generation = RemoteGeneration(self.engine, request, tokenizer())
        self.generation.set_direct_writer(self.direct_writer, lambda events: b"".join(encode_event(each.text) for each in events))

    async def events(self) -> Any:
        async for token_events in self.generation.stream():
            yield b"".join(encode_event(each.text) for each in token_events)

    def start(self) -> "asyncio.Task[None]":
        response = EventStream(self.events(), 1000.0, direct_writer=self.direct_writer)
        scope = {"extensions": {CHUNK_WRITER: lambda: self.line}}
        return asyncio.create_task(response(scope, self.peer.receive, self.peer.send))

    @property
    def text(self) -> str:
        pieces = self.peer.body.split(b"\n\n")[:-1]
        return "".join(json.loads(piece.removeprefix(b"data: ")) for piece in pieces)


def test_neither_the_first_token_nor_the_last_takes_the_shortcut() -> None:
    async def check() -> None:
        talk, tokens = Talk(), ids(TEXT)
        reading = talk.start()
        await settle()
        talk.engine.give(1, tokens[0])
        assert talk.line.num_written == 0  # the reader notes when it came
        await settle()
        talk.engine.give(1, *tokens[1:-1])
        assert talk.line.num_written == len(tokens) - 2  # at once
        talk.engine.give(1, tokens[-1], end=FinishReason.LENGTH)
        await reading
        assert (talk.line.num_written, talk.text) == (len(tokens) - 2, TEXT)
        assert talk.generation.completion.token_ids == tokens
        assert talk.peer.sent[-1]["more_body"] is False
        assert not talk.direct_writer.is_open

    asyncio.run(check())


def test_a_client_that_does_not_read_gets_its_tokens_later_and_in_order() -> None:
    async def check() -> None:
        talk, tokens = Talk(), ids(TEXT)
        reading = talk.start()
        await settle()
        talk.engine.give(1, tokens[0])
        await settle()
        talk.engine.give(1, tokens[1])
        talk.line.is_writable = False
        talk.engine.give(1, tokens[2])
        talk.line.is_writable = True
        talk.engine.give(1, *tokens[3:5])  # the reader has not seen the one before
        assert talk.line.num_written == 1
        await settle()
        talk.engine.give(1, *tokens[5:], end=FinishReason.LENGTH)
        await reading
        assert talk.text == TEXT

    asyncio.run(check())


@pytest.mark.parametrize("is_last", [False, True])
def test_tokens_of_several_steps_are_written_together(is_last: bool) -> None:
    async def check() -> None:
        talk, tokens = Talk(), ids(TEXT)
        reading = talk.start()
        await settle()
        talk.engine.give(1, tokens[0])
        await settle()
        end = FinishReason.LENGTH if is_last else None
        steps = [[Output(1, (SampledToken(token_id, -0.5),))] for token_id in tokens[1:-1]]
        talk.engine._deliver_steps([*steps, [Output(2), Output(1, (SampledToken(tokens[-1], -0.5),), end)]])
        assert talk.line.num_written == (0 if is_last else 1)
        talk.engine.give(1, *[] if is_last else ids("!"), end=FinishReason.LENGTH)
        await reading
        assert talk.text == (TEXT if is_last else TEXT + "!")

    asyncio.run(check())


def test_a_stop_string_ends_the_request_by_its_reader() -> None:
    async def check() -> None:
        talk = Talk(stop_strings=("fox",), include_stop=False)
        reading = talk.start()
        await settle()
        first, *others = ids(TEXT)
        talk.engine.give(1, first)
        await settle()
        talk.engine.give(1, *others)
        await reading
        assert talk.text == talk.generation.text == "quick brown "
        assert talk.engine.aborted == [1]

    asyncio.run(check())


def test_what_shows_nothing_is_not_written() -> None:
    async def check() -> None:
        talk = Talk()
        talk.generation.set_direct_writer(talk.direct_writer, lambda events: b"" if events[0].token_id else b"never")
        reading = talk.start()
        await settle()
        talk.engine.give(1, *ids("a"))
        await settle()
        talk.engine.give(1, *ids("bc"))
        talk.engine.give(1, *ids("d"), end=FinishReason.LENGTH)
        await reading
        assert (talk.line.num_written, talk.text) == (0, "ad")

    asyncio.run(check())


def test_a_mistake_on_the_shortcut_ends_its_stream_alone() -> None:
    async def check() -> None:
        talk = Talk()
        talk.generation.set_direct_writer(talk.direct_writer, lambda events: bytes([1 // len(events[1:])]))
        reading = talk.start()
        await settle()
        talk.engine.give(1, *ids("a"))
        await settle()
        talk.engine.give(1, *ids("b"))
        with pytest.raises(ZeroDivisionError):
            await reading
        assert talk.engine.aborted == [1]

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
def test_routes_write_the_same_by_the_shortcut(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Routes(folder=["one"]).post(path, body).events
    lines = list[Line]()

    async def respond(self: EventStream, scope: Any, receive: Any, send: Any) -> None:
        class Passing(Line):
            def write(self, piece: bytes) -> None:
                super().write(piece)
                waiting = send(self._sent.pop())
                with pytest.raises(StopIteration):
                    waiting.send(None)  # `send` of the test never waits

        lines.append(Passing([]))
        await whole(self, {**scope, "extensions": {CHUNK_WRITER: lambda: lines[-1]}}, receive, send)

    whole = EventStream.__call__
    monkeypatch.setattr(EventStream, "__call__", respond)
    quick = Routes(folder=["one"]).post(path, body).events
    assert join(quick) == join(plain)
    assert (lines[0].num_written > 0) is (body.get("n", 1) == 1)


@pytest.mark.parametrize(
    ("path", "body"), [("/generate_stream", generate()), ("/v1/completions", complete(stream=True))]
)
def test_a_generation_is_gone_with_its_request(path: str, body: Any) -> None:
    """Nothing is left for the collector of rings, which may come late."""
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
    """Put the events of a stream together: tokens that came together may share one."""
    found: dict[str, Any] = {"text": "", "tokens": [], "rest": []}
    for each in events:
        if "token" in each:
            found["tokens"].append(each.pop("token"))
        for choice in each.get("choices", ()):
            delta = choice.get("delta", choice)
            found["text"] += f"{choice['index']}: {delta.pop('text', None) or delta.pop('content', '')}"
            logprobs = choice.pop("logprobs") or {}
            found["tokens"] += logprobs.get("content") or logprobs.get("tokens") or []
            found["rest"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        found["rest"] += [each[key] for key in ("usage", "details", "generated_text", "adapter_tier") if each.get(key)]
    found["text"] = found["text"].replace("0: ", "") if "1: " not in found["text"] else sorted(found["text"])
    return found
