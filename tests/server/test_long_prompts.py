"""Long texts: they are refused before tokenization if they surely do not fit, are tokenized one after the other,
and hold up no other request."""

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
from lorax_server.server.routes.info import ENCODE_BATCH_TOKENS, encode_pieces
from lorax_server.server.tokenizers import LONG_TEXT_CHARACTERS, MAX_INLINE_CHARACTERS, NUM_THREADS, Tokenizers
from lorax_server.text.tokenizer import TextTokenizer
from tests.server.bench import Bench, ids, settle, tokenizer
from tests.server.fake_server import Routes, chat, complete
from tests.server.test_tokenizers import Stuck

CHAT, COMPLETIONS, NATIVE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"
TOO_LONG = "word " * 20_000  # far more than 127 tokens of any length


class Spy:
    """A tokenizer's backend that notes calls of encode and decode methods."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("encode", "decode")):
            self.calls.append(name)
        return getattr(self._backend, name)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Spy on the tokenizer that all routes share."""
    spy = Spy(tokenizer()._backend)
    monkeypatch.setattr(tokenizer(), "_backend", spy)
    return spy


# --- Python's lock ----------------------------------------------------------------------------------------------------


def test_only_calls_that_leave_the_lock_to_others_are_made(spy: Spy) -> None:
    """Avoid `encode` and `decode`: they hold Python's lock all the time, seconds for a long text."""
    found = tokenizer().encode("Hello dog")
    tokenizer().pieces("Hello dog")
    assert tokenizer().decode(found) == "Hello dog"
    assert spy.calls == ["encode_batch_fast", "encode_batch", "decode_batch"]


# --- Texts that cannot fit --------------------------------------------------------------------------------------------


def ask(routes: Routes, path: str, text: str, **more: Any) -> Any:
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
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokens(path: str, spy: Spy) -> None:
    routes = with_template(Routes())
    refused = ask(routes, path, TOO_LONG)
    assert spy.calls == []
    found = ask(routes, path, "x " * 200)  # which is too long as well, but might have fitted
    assert spy.calls == ["encode_batch_fast"]
    assert (refused.status, set(refused.json)) == (found.status, set(found.json))
    assert refused.message.split("Given: ")[0] == found.message.split("Given: ")[0]
    assert "Given: at least " in refused.message
    assert "at least" not in found.message


def test_the_number_that_is_named_is_not_too_large(spy: Spy) -> None:
    named = int(ask(Routes(), NATIVE, TOO_LONG).message.split("at least ")[1])
    assert 127 < named <= len(tokenizer().encode(TOO_LONG))


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS, CHAT])
def test_with_a_number_of_new_tokens_the_words_are_those_of_their_sum(path: str, spy: Spy) -> None:
    most = {"max_new_tokens": 5} if path == NATIVE else {"max_tokens": 5}
    message = ask(with_template(Routes()), path, TOO_LONG, **most).message
    assert "must be <= 128. Given: at least " in message
    assert message.endswith(("and 5 `max_new_tokens`", "and 5 `max_tokens`", "and 5 `max_completion_tokens`"))
    assert spy.calls == []


def test_a_text_that_is_cut_is_never_too_long(spy: Spy) -> None:
    routes = Routes()
    answer = routes.post(NATIVE, {"inputs": TOO_LONG, "parameters": {"truncate": 7, "max_new_tokens": 5}})
    assert answer.status == 200, answer.body
    assert list(routes.engine.added[0].prompt_ids) == tokenizer().encode(TOO_LONG)[-7:]
    asyncio.run(routes.service.tokenizers.close())


def test_where_nothing_is_sure_the_text_becomes_tokens(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "_reach", None)
    routes = Routes()
    assert "at least" not in ask(routes, NATIVE, TOO_LONG).message
    assert spy.calls == ["encode_batch_fast"]
    asyncio.run(routes.service.tokenizers.close())


# --- Work at one time -------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizers() -> Tokenizers:
    return Tokenizers(tokenizer(), Path("nowhere"))


def own() -> TextTokenizer:
    """Make a tokenizer that shares no vocabulary with the base model's."""
    return TextTokenizer(type(tokenizer()._backend).from_str(tokenizer()._backend.to_str()), {}, {})


@pytest.mark.parametrize("is_own", [False, True])
def test_long_texts_become_tokens_one_after_the_other(
    is_own: bool, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any time, one long text is tokenized, and as many texts of bounded length as there are threads."""
    stuck, used = Stuck([7]), own() if is_own else tokenizer()

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(used, "encode", stuck)
            long = [asyncio.create_task(tokenizers.encode(used, "a" * (LONG_TEXT_CHARACTERS + 1), True)) for _ in range(4)]
            await stuck.begun()
            others = [asyncio.create_task(tokenizers.encode(used, "a" * LONG_TEXT_CHARACTERS, True)) for _ in range(4)]
            await stuck.begun(NUM_THREADS)
            await settle()
            assert stuck.count == 1 + NUM_THREADS
            stuck.go.set()
            assert await asyncio.gather(*long, *others) == [[7]] * 8
        await tokenizers.close()

    asyncio.run(body())


def test_memory_is_given_back_after_a_long_text(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(module, "trim_malloc", lambda: given_back.append(None))

    async def body() -> None:
        await tokenizers.encode(tokenizer(), "a" * LONG_TEXT_CHARACTERS, True)
        assert given_back == []
        await tokenizers.encode(tokenizer(), "a" * (LONG_TEXT_CHARACTERS + 1), True)
        assert given_back == [None]
        await tokenizers.decode(tokenizer(), [1] * (LONG_TEXT_CHARACTERS + 1))
        assert given_back == [None] * 2
        await tokenizers.close()

    asyncio.run(body())


def test_what_is_cut_is_cut_where_the_tokens_are_made(tokenizers: Tokenizers) -> None:
    async def body() -> None:
        assert await tokenizers.encode(tokenizer(), "a dog", True, truncate=2) == tokenizer().encode("a dog")[-2:]
        assert await tokenizers.encode(tokenizer(), "a dog", True, truncate=99) == tokenizer().encode("a dog")

    asyncio.run(body())


# --- Other work that holds requests up --------------------------------------------------------------------------------


class Turns:
    """A counter of the turns of the event loop: work within one turn holds up all other requests."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._handle = self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize(("size", "at_once"), [(LARGE_BODY_BYTES + 1, False), (LARGE_BODY_BYTES, True)])
def test_large_bodies_are_parsed_in_turns(size: int, at_once: bool) -> None:
    async def body() -> None:
        turns, parsed = Turns(), []

        async def app(*_: Any) -> None:
            parsed.append(turns.count)

        routes = [Route(NATIVE, lambda _: Response(), methods=["POST"])]
        guard = RequestMiddleware(app, routes, Bench().service)
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": NATIVE, "headers": headers}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size}

        await asyncio.gather(*[guard(dict(scope), receive, send) for _ in range(4)])
        turns.close()
        assert len(parsed) == 4
        assert len(set(parsed)) == (1 if at_once else 4)

    async def send(_: Any) -> None: ...

    asyncio.run(body())


def test_others_have_turns_between_the_prompts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    async def body() -> None:
        turns, routes = Turns(), Routes()
        encode = routes.service.tokenizers.encode

        async def spied(*args: Any) -> list[int]:
            seen.append(turns.count)
            return await encode(*args)

        monkeypatch.setattr(routes.service.tokenizers, "encode", spied)
        answer = await routes._send("POST", COMPLETIONS, complete(prompt=["ask"] * 5), {})
        turns.close()
        assert answer.status == 200, answer.body

    asyncio.run(body())
    assert len(set(seen)) == 5


def test_a_list_of_many_tokens_is_whole() -> None:
    for count in (0, 1, ENCODE_BATCH_TOKENS - 1, ENCODE_BATCH_TOKENS, 2 * ENCODE_BATCH_TOKENS + 5):
        pieces = tokenizer().pieces("z" * count, False)
        answer = encode_pieces(pieces)
        assert json.loads(bytes(answer.body)) == [piece._asdict() for piece in pieces]
        assert answer.headers["content-type"] == "application/json"


def test_a_short_list_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_echoed_tokens_are_decoded_where_texts_are(spy: Spy) -> None:
    answer = Routes().post(COMPLETIONS, complete(prompt=ids("ask"), echo=True))
    assert answer.json["choices"][0]["text"].startswith("ask")
    assert "decode_batch" in spy.calls
    assert "decode" not in spy.calls


# --- A busy machine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def busy() -> Routes:
    """Make routes whose templates cannot be rendered now."""
    routes = Routes()

    async def render(*_: Any, **__: Any) -> str:
        raise BusyError("2 s went by", retry_after_s=4.2)

    routes.service.tokenizers.render = render  # type: ignore[method-assign]
    return routes


def test_a_chat_that_cannot_be_rendered_now_may_come_back(busy: Routes) -> None:
    refused = busy.post(CHAT, chat())
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert refused.json["error"] == {"message": "2 s went by", "type": "server_error", "param": None, "code": None}
    counted = json.dumps(busy.metrics.render_json())
    assert "overloaded" in counted
    assert "template" not in counted
