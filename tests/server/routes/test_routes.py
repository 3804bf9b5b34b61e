"""Replies of routes about misspelt and new adapters, where an adapter was, fields, and too much at once."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lorax
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from lorax_server.errors import (
    AdapterNotFoundError,
    EngineError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.server import checks
from lorax_server.types import Output, Resolved
from tests.server.bench import ids
from tests.server.fake_server import Reply, Routes, chat, complete, generate

NATIVE, STREAM, COMPLETIONS, CHAT = "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"
KEYS = """
[keys.all]
key = "all"
[keys.some]
key = "some"
adapters = ["poet", "pirate*"]
base_model = false
[keys.few]
key = "few"
new_adapters_per_minute = 2
[keys.boss]
key = "boss"
admin = true
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


# --- Misspelt names ---------------------------------------------------------------------------------------------------

FOLDER = ["poet", "pirate", "secret-poet"]


class Misspelt(Routes):
    """Routes whose source knows none of the names that are not listed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(FOLDER, **options)
        for name in ("peot", "secret-poem"):
            self.answers[name] = AdapterNotFoundError(f"adapter {name!r}: there is no such folder")


MISSPELT = {
    "generate": (NATIVE, generate(adapter_id="peot"), 424),
    "generate_stream": (STREAM, generate(adapter_id="peot"), 424),
    "a named source": (NATIVE, generate(adapter_id="peot", adapter_source="local"), 424),
    "a merge": (NATIVE, generate(merged_adapters={"ids": ["pirate", "peot"]}), 424),
    "completions": (COMPLETIONS, complete("peot"), 404),
    "a stream of completions": (COMPLETIONS, complete("peot", stream=True), 404),
    "after the base model": (COMPLETIONS, complete("base:peot"), 404),
    "chat": (CHAT, chat("peot"), 404),
    "load": ("/v1/adapters/load", {"adapter_id": "peot"}, 404),
    "unload": ("/v1/adapters/unload", {"adapter_id": "peot"}, 404),
    "vLLM's load": ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "peot"}, 404),
    "vLLM's unload": ("/v1/unload_lora_adapter", {"lora_name": "peot"}, 404),
}


@pytest.mark.parametrize("where", MISSPELT)
def test_a_misspelt_adapter_is_told_its_neighbours(where: str, keys_file: Path) -> None:
    path, body, status = MISSPELT[where]
    reply = Misspelt(keys_file=keys_file).post(path, body, "boss")
    assert reply.status == status
    assert "; did you mean 'poet'" in reply.message


def test_a_misspelt_model_is_told_its_neighbours(keys_file: Path) -> None:
    reply = Misspelt(keys_file=keys_file).get("/v1/models/peot", "all")
    assert (reply.status, "did you mean 'poet'" in reply.message) == (404, True)
    assert reply.json["error"]["code"] == "model_not_found"


def test_a_name_that_no_hub_can_have_is_told_its_neighbours() -> None:
    """Suggest neighbours without asking a source."""
    routes = Routes(["poet"], default_source="hub")
    reply = routes.post(CHAT, chat("peot"))
    assert (reply.status, "did you mean 'poet'?" in reply.message) == (404, True)
    assert not routes.engine.sent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (NATIVE, generate(adapter_id="secret-poem")),
        (COMPLETIONS, complete("secret-poem")),
        (NATIVE, generate(merged_adapters={"ids": ["pirate", "secret-poem"]})),
    ],
)
def test_nobody_is_told_names_that_it_may_not_use(path: str, body: dict[str, Any], keys_file: Path) -> None:
    routes = Misspelt(keys_file=keys_file)
    assert "'secret-poet'" in routes.post(path, body, "all").message
    refused = routes.post(path, body, "some")
    assert refused.status == 403
    assert "secret-poet" not in refused.message


def test_a_key_that_may_use_little_is_told_what_it_may_use(keys_file: Path) -> None:
    routes = Misspelt(keys_file=keys_file)
    refused = routes.post(NATIVE, generate(adapter_id="peot"), "some")
    assert (refused.status, refused.message.endswith("; did you mean 'poet'?")) == (403, True)
    there, not_there = (
        routes.post(NATIVE, generate(adapter_id=name), "some") for name in ("secret-poet", "secret-poex")
    )
    assert there.message.replace("poet'", "poex'") == not_there.message.replace("poet'", "poex'")  # no difference


@pytest.mark.parametrize("default_source", ["hub", "local"])
@pytest.mark.parametrize(
    ("path", "ask_for"),
    [
        (COMPLETIONS, complete),
        (CHAT, chat),
        (CHAT, lambda name: chat(f"base:{name}")),
        (NATIVE, lambda name: generate(adapter_id=name)),
    ],
    ids=["completions", "chat", "after the base model", "generate"],
)
def test_a_key_cannot_tell_forbidden_names_from_missing_ones(
    path: str, ask_for: Callable[[str], dict[str, Any]], default_source: str, keys_file: Path
) -> None:
    routes = Misspelt(keys_file=keys_file, default_source=default_source)
    there, missing = (routes.post(path, ask_for(name), "some") for name in ("secret-poet", "secret-poem"))
    assert there.status == missing.status == 403
    assert there.body.replace(b"secret-poet", b"secret-poem") == missing.body
    assert routes.post(path, ask_for("pirate-x"), "some").status != 403  # which it may use


def test_a_long_name_is_not_repeated() -> None:
    routes = Routes(["poet"], default_source="hub")
    assert len(routes.post(CHAT, chat("p" * 10_000)).message) < 500


# --- Where an adapter was ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host", "disk", "fetched"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (STREAM, generate(adapter_id="poet")),
        (COMPLETIONS, complete("poet", stream=True)),
        (CHAT, chat("poet", stream=True, stream_options={"include_usage": True})),
        (COMPLETIONS, complete("poet", stream=True, n=2)),
    ],
)
def test_the_first_event_says_where_the_adapter_was(path: str, body: dict[str, Any], tier: str) -> None:
    routes = Routes(["poet"])
    _give_template(routes)
    routes.answers["poet"] = Resolved("hash", tier=tier)
    reply = routes.post(path, body)
    assert reply.status == 200
    assert reply.headers["x-adapter-tier"] == tier
    first, *others = reply.events
    assert first["adapter_tier"] == tier
    assert others
    assert not any("adapter_tier" in event for event in others)


def test_the_clients_that_there_are_read_the_first_event() -> None:
    routes = Routes(["poet"])
    routes.answers["poet"] = Resolved("hash", tier="disk")
    _give_template(routes)
    native = routes.post(STREAM, generate(adapter_id="poet")).events[0]
    assert lorax.types.StreamResponse(**native).token.id == native["token"]["id"]
    chunk = ChatCompletionChunk.model_validate(routes.post(CHAT, chat("poet", stream=True)).events[0])
    assert (chunk.model_extra or {})["adapter_tier"] == "disk"
    text = Completion.construct(**routes.post(COMPLETIONS, complete("poet", stream=True)).events[0])
    assert (text.model_extra or {})["adapter_tier"] == "disk"


def test_whole_answers_and_errors_say_where_the_adapter_was() -> None:
    routes = Routes(["poet"])
    routes.answers["poet"] = Resolved("hash", tier="host")
    for path, body in ((NATIVE, generate(adapter_id="poet")), (COMPLETIONS, complete("poet"))):
        assert routes.post(path, body).headers["x-adapter-tier"] == "host"
    failed = routes.post(NATIVE, generate(adapter_id="poet", max_new_tokens=1000))
    assert (failed.status, failed.headers["x-adapter-tier"]) == (422, "host")
    merged = routes.post(NATIVE, generate(merged_adapters={"ids": ["poet", "pirate"]}))
    assert (merged.headers["x-adapter-hash"], merged.headers["x-adapter-tier"]) == ("merged", "host")
    routes.answers["pirate"] = Resolved("hash of pirate", tier="fetched")
    merged = routes.post(NATIVE, generate(merged_adapters={"ids": ["poet", "pirate"]}))
    assert merged.headers["x-adapter-tier"] == "fetched"


def test_the_base_model_is_nowhere() -> None:
    reply = Routes().post(STREAM, generate())
    assert "x-adapter-tier" not in reply.headers
    assert "adapter_tier" not in reply.events[0]


def _give_template(routes: Routes) -> None:
    async def render(*_: Any, **__: Any) -> str:
        return "ask"

    routes.service.tokenizers.render = render  # type: ignore[method-assign]


# --- New adapters -----------------------------------------------------------------------------------------------------


def ask(routes: Routes, name: str, key: str | None = None, source: str = "hub") -> Reply:
    return routes.post(NATIVE, generate(adapter_id=name, adapter_source=source), key)


def test_a_key_names_so_many_new_adapters_a_minute(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert [ask(routes, name, "few").status for name in ("o/a", "o/b", "o/a", "o/b")] == [200] * 4
    refused = ask(routes, "o/c", "few")
    assert (refused.status, refused.headers["retry-after"]) == (429, "30")
    assert "used up the 2 new adapters a minute" in refused.message
    on_the_other_surface = routes.post(COMPLETIONS, complete("o/c", adapter_source="hub"), "few")
    assert on_the_other_surface.json["error"]["code"] == "rate_limit_exceeded"
    assert "used up the 2 new adapters a minute" in on_the_other_surface.message
    assert ask(routes, "o/a", "few").status == 200
    assert ask(routes, "o/c", "all").status == 200
    assert ask(routes, "o/c", "few").status == 200  # by now it is known


def test_who_probes_for_names_pays_for_each(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.answers |= {f"o/{number}": AdapterNotFoundError("no such repository") for number in range(9)}
    assert [ask(routes, f"o/{number}", "few").status for number in range(4)] == [424, 424, 429, 429]
    assert ask(routes, "o/0", "few").status == 429  # it was not found, so it is not known


def test_each_part_of_a_merge_counts(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    merged = generate(merged_adapters={"ids": ["o/a", "o/b", "o/c"]}, adapter_source="hub")
    assert routes.post(NATIVE, merged, "few").status == 429
    assert routes.post(NATIVE, merged, "boss").status == 200


def test_what_is_fetched_again_is_owed(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.answers["o/a"] = Resolved("hash", tier="fetched")
    assert [ask(routes, "o/a", "few").status for _ in range(4)] == [200] * 4  # the first was paid for when it was new
    assert ask(routes, "o/b", "few").status == 429


def ask_together(routes: Routes, name: str, key: str, count: int) -> Counter[int]:
    """Send `count` requests at once and count their statuses."""
    body, headers = generate(adapter_id=name, adapter_source="hub"), {"authorization": f"Bearer {key}"}

    async def send() -> list[Reply]:
        return await asyncio.gather(*(routes._send("POST", NATIVE, body, headers) for _ in range(count)))

    return Counter(reply.status for reply in asyncio.run(send()))


def test_requests_that_come_together_for_a_new_adapter_pay_once(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.answers["o/a"] = Resolved("hash", tier="fetched")
    assert ask_together(routes, "o/a", "few", 20) == {200: 20}
    assert [ask(routes, name, "few").status for name in ("o/b", "o/c")] == [200, 429]


def test_requests_that_wait_for_the_same_fetch_owe_once(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert ask(routes, "o/a", "boss").status == 200
    routes.answers["o/a"] = Resolved("hash", tier="fetched")
    assert ask_together(routes, "o/a", "few", 20) == {200: 20}
    assert [ask(routes, name, "few").status for name in ("o/b", "o/c")] == [200, 429]


@pytest.mark.parametrize(
    ("error", "status"),
    [(SourceError("the hub is down"), 424), (OverloadedError("many are fetched"), 429), (EngineError("it fell"), 500)],
)
def test_an_adapter_that_cannot_be_given_now_costs_nothing(error: LoraxError, status: int, keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.answers["o/a"] = error
    for _ in range(2):
        assert ask_together(routes, "o/a", "few", 5) == {status: 5}
    assert str(error) in ask(routes, "o/a", "few").message
    del routes.answers["o/a"]
    assert [ask(routes, name, "few").status for name in ("o/a", "o/b", "o/c")] == [200, 200, 429]


def test_folders_cost_nothing(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert {ask(routes, f"name-{number}", "few", "local").status for number in range(5)} == {200}


def test_an_open_server_has_a_quota_only_if_it_is_told_to() -> None:
    routes = Routes()
    assert {ask(routes, f"o/{number}").status for number in range(70)} == {200}
    routes = Routes(new_adapters_per_minute=3)
    assert [ask(routes, f"o/{number}").status for number in range(4)] == [200, 200, 200, 429]


# --- Too much at once -------------------------------------------------------------------------------------------------

PROMPT = len(ids("ask"))
SAMPLED = {"temperature": 0.5}
LISTED: dict[str, tuple[str, dict[str, Any], int]] = {  # path, body, log probabilities that it may have
    "alternatives": (NATIVE, generate(return_k_alternatives=9), 50),
    "details": (NATIVE, generate(details=True), 5),
    "best_of": (NATIVE, generate(details=True, best_of=2, return_k_alternatives=9, **SAMPLED), 100),
    "the prompt's": (NATIVE, generate(decoder_input_details=True), 5 + PROMPT),
    "the prompt's, of each answer": (
        NATIVE,
        generate(decoder_input_details=True, best_of=2, **SAMPLED),
        10 + 2 * PROMPT,
    ),
    "completions": (COMPLETIONS, complete(logprobs=4), 25),
    "several prompts": (COMPLETIONS, complete(prompt=["ask", "ask"], logprobs=4, n=2), 100),
    "completions' best_of": (COMPLETIONS, complete(logprobs=4, best_of=3), 75),
    "echo": (COMPLETIONS, complete(logprobs=0, echo=True), 5 + PROMPT),
    "a streamed echo": (COMPLETIONS, complete(logprobs=0, echo=True, stream=True, n=3), 3 * PROMPT),
    "chat": (CHAT, chat(logprobs=True, top_logprobs=3, n=2), 40),
}


@pytest.mark.parametrize("what", LISTED)
def test_log_probabilities_are_bounded_on_every_surface(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, count = LISTED[what]
    routes = Routes()
    _give_template(routes)
    monkeypatch.setattr(checks, "MAX_LOGPROBS_PER_REQUEST", count - 1)
    refused = routes.post(path, body)
    assert refused.status == (422 if path == NATIVE else 400)
    assert f"could return {count} log probabilities; the limit is {count - 1}" in refused.message
    assert not routes.engine.sent  # nothing was computed
    fields = {NATIVE: "`return_k_alternatives`", COMPLETIONS: "`logprobs`", CHAT: "`top_logprobs`"}
    assert fields[path] in refused.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (STREAM, generate(return_k_alternatives=20, details=True)),
        (CHAT, chat(logprobs=True, top_logprobs=20, stream=True)),
        (NATIVE, generate()),
    ],
)
def test_what_is_streamed_or_not_listed_is_not_counted(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = Routes()
    _give_template(routes)
    monkeypatch.setattr(checks, "MAX_LOGPROBS_PER_REQUEST", 0)
    assert routes.post(path, body).status == 200


# --- Fields -----------------------------------------------------------------------------------------------------------

LORAX_WORDS = ("`inputs`", "`max_new_tokens`", "`min_new_tokens`", "`return_k_alternatives`")
TOO_MUCH: dict[str, dict[str, Any]] = {
    "a long answer": {"max_tokens": 1000},
    "more than fits": {"max_tokens": 127},
    "min_tokens beyond the answer": {"min_tokens": 50, "max_tokens": 5},
    "min_tokens below 0": {"min_tokens": -1},
    "alternatives": {"logprobs": 21},
}


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_openai_clients_are_told_of_their_own_fields(path: str, what: str) -> None:
    routes, more = Routes(), dict(TOO_MUCH[what])
    _give_template(routes)
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": more["logprobs"]}
    refused = routes.post(path, complete(**more) if path == COMPLETIONS else chat(**more))
    assert refused.status == 400, refused.body
    assert not any(word in refused.message for word in LORAX_WORDS)


def test_a_long_prompt_is_called_what_it_is() -> None:
    routes = Routes()
    assert routes.post(COMPLETIONS, complete(prompt="x " * 500)).message.startswith("`prompt` tokens + `max_tokens`")
    assert "`inputs` tokens + `max_new_tokens`" in routes.post(NATIVE, {**generate(), "inputs": "x " * 500}).message


@pytest.mark.parametrize(("path", "field"), [(NATIVE, "inputs"), (COMPLETIONS, "prompt")])
def test_what_the_engine_refuses_is_told_in_the_routes_words(path: str, field: str) -> None:
    routes = Routes()
    error: LoraxError = InputError("`inputs` has tokens beyond the vocabulary of 7")

    def fail(request_id: int, *_: Any, **__: Any) -> None:
        routes.engine._deliver(Output.failed(request_id, error))

    routes.engine.give = fail  # type: ignore[method-assign]
    assert f"`{field}` has tokens beyond" in routes.post(path, generate() if path == NATIVE else complete()).message
    streamed = routes.post(COMPLETIONS, complete(stream=True))
    assert (streamed.status, streamed.message) == (400, "`prompt` has tokens beyond the vocabulary of 7")


def test_a_model_without_a_chat_template_says_so_by_a_code() -> None:
    refused = Routes().post(CHAT, chat())
    assert (refused.status, refused.json["error"]["code"]) == (400, "no_chat_template")
