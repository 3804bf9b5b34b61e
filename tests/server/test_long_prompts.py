"""Long texts are rejected before tokenization or tokenized one at a time, and never block the event loop."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from lorax_server.errors import BusyError
from lorax_server.server import tokenizers as module
from lorax_server.server.http.middleware import LARGE_BODY_BYTES, RequestMiddleware
from lorax_server.server.routes.info import ENCODE_BATCH_TOKENS, encode_token_spans
from lorax_server.server.tokenizers import LONG_TEXT_CHARACTERS, MAX_INLINE_CHARACTERS, NUM_THREADS, Tokenizers
from lorax_server.text.tokenizer import TextTokenizer
from tests.server.fake_server import Routes, chat, complete
from tests.server.service_harness import ServiceHarness, ids, settle, tokenizer
from tests.server.test_tokenizers import BlockedFunction

CHAT, COMPLETIONS, NATIVE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"
TOO_LONG = "word " * 20_000  # far more than 127 tokens of any length


class Spy:
    """A tokenizer backend that records calls to encode and decode methods."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("encode", "decode")):
            self.calls.append(name)
        return getattr(self._backend, name)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Record calls to the tokenizer that all routes share."""
    spy = Spy(tokenizer()._backend)
    monkeypatch.setattr(tokenizer(), "_backend", spy)
    return spy


# --- GIL --------------------------------------------------------------------------------------------------------------


def test_tokenizer_uses_only_gil_releasing_calls(spy: Spy) -> None:
    """`encode` and `decode` would hold the GIL for seconds if the text is long."""
    tokenized = tokenizer().encode("Hello dog")
    tokenizer().tokenize_with_spans("Hello dog")
    assert tokenizer().decode(tokenized) == "Hello dog"
    assert spy.calls == ["encode_batch_fast", "encode_batch", "decode_batch"]


# --- Texts that are too long ------------------------------------------------------------------------------------------


def send_text(routes: Routes, path: str, text: str, **more: Any) -> Any:
    if path == NATIVE:
        return routes.post(path, {"inputs": text, "parameters": more})
    given = {"model": "", "max_tokens": None, **more}
    if path == COMPLETIONS:
        return routes.post(path, {**given, "prompt": text})
    return routes.post(path, {**given, "messages": [{"role": "user", "content": text}]})


def with_template(routes: Routes) -> Routes:
    async def render(_: TextTokenizer, messages: list[dict[str, Any]], tenant: str = "", /, **__: Any) -> str:
        return "".join(str(message["content"]) for message in messages)

    routes.service.tokenizers.render = render  # type: ignore[method-assign]
    return routes


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS, CHAT])
def test_too_long_text_is_rejected_before_tokenization(path: str, spy: Spy) -> None:
    routes = with_template(Routes())
    rejected = send_text(routes, path, TOO_LONG)
    assert spy.calls == []
    tokenized = send_text(routes, path, "x " * 200)  # too long as well, but short enough to be tokenized
    assert spy.calls == ["encode_batch_fast"]
    assert (rejected.status, set(rejected.json)) == (tokenized.status, set(tokenized.json))
    assert rejected.message.split("Given: ")[0] == tokenized.message.split("Given: ")[0]
    assert "Given: at least " in rejected.message
    assert "at least" not in tokenized.message


def test_estimated_token_count_is_lower_bound(spy: Spy) -> None:
    count = int(send_text(Routes(), NATIVE, TOO_LONG).message.split("at least ")[1])
    assert 127 < count <= len(tokenizer().encode(TOO_LONG))


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS, CHAT])
def test_too_long_message_includes_max_new_tokens(path: str, spy: Spy) -> None:
    most = {"max_new_tokens": 5} if path == NATIVE else {"max_tokens": 5}
    message = send_text(with_template(Routes()), path, TOO_LONG, **most).message
    assert "must be <= 128. Given: at least " in message
    assert message.endswith(("and 5 `max_new_tokens`", "and 5 `max_tokens`", "and 5 `max_completion_tokens`"))
    assert spy.calls == []


def test_truncated_text_is_never_too_long(spy: Spy) -> None:
    routes = Routes()
    answer = routes.post(NATIVE, {"inputs": TOO_LONG, "parameters": {"truncate": 7, "max_new_tokens": 5}})
    assert answer.status == 200, answer.body
    assert list(routes.engine.added[0].prompt_ids) == tokenizer().encode(TOO_LONG)[-7:]
    asyncio.run(routes.service.tokenizers.close())


def test_too_long_text_is_tokenized_if_max_token_length_is_unknown(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "_max_token_characters", None)
    routes = Routes()
    assert "at least" not in send_text(routes, NATIVE, TOO_LONG).message
    assert spy.calls == ["encode_batch_fast"]
    asyncio.run(routes.service.tokenizers.close())


# --- Concurrency ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizers() -> Tokenizers:
    return Tokenizers(tokenizer(), Path("nowhere"))


def make_adapter_tokenizer() -> TextTokenizer:
    """Make a tokenizer that shares no vocabulary with the base model's."""
    return TextTokenizer(type(tokenizer()._backend).from_str(tokenizer()._backend.to_str()), {}, {})


@pytest.mark.parametrize("is_own", [False, True])
def test_long_texts_are_tokenized_one_at_a_time(
    is_own: bool, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one long text is tokenized at a time, and `NUM_THREADS` shorter texts."""
    stuck, used = BlockedFunction([7]), make_adapter_tokenizer() if is_own else tokenizer()

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(used, "encode", stuck)
            long = [
                asyncio.create_task(tokenizers.encode(used, "a" * (LONG_TEXT_CHARACTERS + 1), True)) for _ in range(4)
            ]
            await stuck.wait_until_started()
            others = [asyncio.create_task(tokenizers.encode(used, "a" * LONG_TEXT_CHARACTERS, True)) for _ in range(4)]
            await stuck.wait_until_started(NUM_THREADS)
            await settle()
            assert stuck.count == 1 + NUM_THREADS
            stuck.release.set()
            assert await asyncio.gather(*long, *others) == [[7]] * 8
        await tokenizers.close()

    asyncio.run(body())


def test_malloc_is_trimmed_after_long_text(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    trim_calls: list[None] = []
    monkeypatch.setattr(module, "trim_malloc", lambda: trim_calls.append(None))

    async def body() -> None:
        await tokenizers.encode(tokenizer(), "a" * LONG_TEXT_CHARACTERS, True)
        assert trim_calls == []
        await tokenizers.encode(tokenizer(), "a" * (LONG_TEXT_CHARACTERS + 1), True)
        assert trim_calls == [None]
        await tokenizers.decode(tokenizer(), [1] * (LONG_TEXT_CHARACTERS + 1))
        assert trim_calls == [None] * 2
        await tokenizers.close()

    asyncio.run(body())


def test_encode_truncates_to_last_tokens(tokenizers: Tokenizers) -> None:
    async def body() -> None:
        assert await tokenizers.encode(tokenizer(), "a dog", True, truncate=2) == tokenizer().encode("a dog")[-2:]
        assert await tokenizers.encode(tokenizer(), "a dog", True, truncate=99) == tokenizer().encode("a dog")

    asyncio.run(body())


# --- Blocking of the event loop ---------------------------------------------------------------------------------------


class LoopCounter:
    """Counts event loop iterations. Work within one iteration blocks all other requests."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._count_iteration)

    def _count_iteration(self) -> None:
        self.count += 1
        self._handle = self._loop.call_soon(self._count_iteration)

    def close(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize(("size", "is_single_iteration"), [(LARGE_BODY_BYTES + 1, False), (LARGE_BODY_BYTES, True)])
def test_large_bodies_are_parsed_in_separate_loop_iterations(size: int, is_single_iteration: bool) -> None:
    async def body() -> None:
        loop_counter, parsed = LoopCounter(), []

        async def app(*_: Any) -> None:
            parsed.append(loop_counter.count)

        routes = [Route(NATIVE, lambda _: Response(), methods=["POST"])]
        guard = RequestMiddleware(app, routes, ServiceHarness().service)
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": NATIVE, "headers": headers}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size}

        await asyncio.gather(*[guard(dict(scope), receive, send) for _ in range(4)])
        loop_counter.close()
        assert len(parsed) == 4
        assert len(set(parsed)) == (1 if is_single_iteration else 4)

    async def send(_: Any) -> None: ...

    asyncio.run(body())


def test_event_loop_runs_between_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def body() -> None:
        loop_counter, routes = LoopCounter(), Routes()
        encode = routes.service.tokenizers.encode

        async def counted_encode(*args: Any) -> list[int]:
            seen.append(loop_counter.count)
            return await encode(*args)

        monkeypatch.setattr(routes.service.tokenizers, "encode", counted_encode)
        answer = await routes._send("POST", COMPLETIONS, complete(prompt=["ask"] * 5), {})
        loop_counter.close()
        assert answer.status == 200, answer.body

    asyncio.run(body())
    assert len(set(seen)) == 5


def test_encoded_token_spans_match_plain_json() -> None:
    for count in (0, 1, ENCODE_BATCH_TOKENS - 1, ENCODE_BATCH_TOKENS, 2 * ENCODE_BATCH_TOKENS + 5):
        pieces = tokenizer().tokenize_with_spans("z" * count, False)
        answer = encode_token_spans(pieces)
        assert json.loads(bytes(answer.body)) == [piece._asdict() for piece in pieces]
        assert answer.headers["content-type"] == "application/json"


def test_tokenize_cost_depends_on_text_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    async def run(_: TextTokenizer, size: int, work: Callable[[], Response]) -> Response:
        sizes.append(size)
        return work()

    routes = Routes()
    monkeypatch.setattr(routes.service.tokenizers, "run", run)
    routes.post(TOKENIZE, {"inputs": "a" * 10})
    routes.post(TOKENIZE, {"inputs": "a" * LONG_TEXT_CHARACTERS})
    assert sizes[0] <= MAX_INLINE_CHARACTERS
    assert sizes[1] > LONG_TEXT_CHARACTERS


def test_echoed_prompt_is_decoded_in_batch(spy: Spy) -> None:
    answer = Routes().post(COMPLETIONS, complete(prompt=ids("ask"), echo=True))
    assert answer.json["choices"][0]["text"].startswith("ask")
    assert "decode_batch" in spy.calls
    assert "decode" not in spy.calls


# --- Busy machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Routes:
    """Create routes whose template renderer is busy."""
    routes = Routes()

    async def render(*_: Any, **__: Any) -> str:
        raise BusyError("2 s went by", retry_after_s=4.2)

    routes.service.tokenizers.render = render  # type: ignore[method-assign]
    return routes


def test_busy_renderer_returns_503_with_retry_after(busy: Routes) -> None:
    rejected = busy.post(CHAT, chat())
    assert (rejected.status, rejected.headers["retry-after"]) == (503, "5")
    assert rejected.json["error"] == {"message": "2 s went by", "type": "server_error", "param": None, "code": None}
    counted = json.dumps(busy.metrics.render_json())
    assert "overloaded" in counted
    assert "template" not in counted
