"""Routes: name suggestions, adapter tiers, new adapter quota, log probability limits and field names in errors."""

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
from lorax_server.types import Output, ResolvedAdapter
from tests.server.fake_server import Reply, Routes, chat, complete, generate
from tests.server.service_harness import ids

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


# --- Misspelled names -------------------------------------------------------------------------------------------------

FOLDER = ["poet", "pirate", "secret-poet"]


class MisspelledRoutes(Routes):
    """Routes whose adapter source does not have the misspelled names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(FOLDER, **options)
        for name in ("peot", "secret-poem"):
            self.resolutions[name] = AdapterNotFoundError(f"adapter {name!r}: there is no such folder")


MISSPELLED_REQUESTS = {
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


@pytest.mark.parametrize("where", MISSPELLED_REQUESTS)
def test_misspelled_adapter_gets_suggestions(where: str, keys_file: Path) -> None:
    path, body, status = MISSPELLED_REQUESTS[where]
    reply = MisspelledRoutes(keys_file=keys_file).post(path, body, "boss")
    assert reply.status == status
    assert "; did you mean 'poet'" in reply.message


def test_misspelled_model_gets_suggestions(keys_file: Path) -> None:
    reply = MisspelledRoutes(keys_file=keys_file).get("/v1/models/peot", "all")
    assert (reply.status, "did you mean 'poet'" in reply.message) == (404, True)
    assert reply.json["error"]["code"] == "model_not_found"


def test_invalid_hub_name_gets_suggestions() -> None:
    """Names are suggested without a request to the source."""
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
def test_suggestions_exclude_forbidden_names(path: str, body: dict[str, Any], keys_file: Path) -> None:
    routes = MisspelledRoutes(keys_file=keys_file)
    assert "'secret-poet'" in routes.post(path, body, "all").message
    rejected = routes.post(path, body, "some")
    assert rejected.status == 403
    assert "secret-poet" not in rejected.message


def test_restricted_key_gets_suggestions(keys_file: Path) -> None:
    routes = MisspelledRoutes(keys_file=keys_file)
    rejected = routes.post(NATIVE, generate(adapter_id="peot"), "some")
    assert (rejected.status, rejected.message.endswith("; did you mean 'poet'?")) == (403, True)
    existing, missing = (
        routes.post(NATIVE, generate(adapter_id=name), "some") for name in ("secret-poet", "secret-poex")
    )
    assert existing.message.replace("poet'", "poex'") == missing.message.replace("poet'", "poex'")  # indistinguishable


@pytest.mark.parametrize("default_source", ["hub", "local"])
@pytest.mark.parametrize(
    ("path", "make_body"),
    [
        (COMPLETIONS, complete),
        (CHAT, chat),
        (CHAT, lambda name: chat(f"base:{name}")),
        (NATIVE, lambda name: generate(adapter_id=name)),
    ],
    ids=["completions", "chat", "after the base model", "generate"],
)
def test_forbidden_and_missing_names_are_indistinguishable(
    path: str, make_body: Callable[[str], dict[str, Any]], default_source: str, keys_file: Path
) -> None:
    routes = MisspelledRoutes(keys_file=keys_file, default_source=default_source)
    existing, missing = (routes.post(path, make_body(name), "some") for name in ("secret-poet", "secret-poem"))
    assert existing.status == missing.status == 403
    assert existing.body.replace(b"secret-poet", b"secret-poem") == missing.body
    assert routes.post(path, make_body("pirate-x"), "some").status != 403  # allowed for this key


def test_long_name_is_truncated_in_error() -> None:
    routes = Routes(["poet"], default_source="hub")
    assert len(routes.post(CHAT, chat("p" * 10_000)).message) < 500


# --- Adapter tier -----------------------------------------------------------------------------------------------------


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
def test_first_stream_event_has_adapter_tier(path: str, body: dict[str, Any], tier: str) -> None:
    routes = Routes(["poet"])
    set_template(routes)
    routes.resolutions["poet"] = ResolvedAdapter("hash", tier=tier)
    reply = routes.post(path, body)
    assert reply.status == 200
    assert reply.headers["x-adapter-tier"] == tier
    first, *others = reply.events
    assert first["adapter_tier"] == tier
    assert others
    assert not any("adapter_tier" in event for event in others)


def test_client_libraries_accept_adapter_tier() -> None:
    routes = Routes(["poet"])
    routes.resolutions["poet"] = ResolvedAdapter("hash", tier="disk")
    set_template(routes)
    native = routes.post(STREAM, generate(adapter_id="poet")).events[0]
    assert lorax.types.StreamResponse(**native).token.id == native["token"]["id"]
    chunk = ChatCompletionChunk.model_validate(routes.post(CHAT, chat("poet", stream=True)).events[0])
    assert (chunk.model_extra or {})["adapter_tier"] == "disk"
    text = Completion.construct(**routes.post(COMPLETIONS, complete("poet", stream=True)).events[0])
    assert (text.model_extra or {})["adapter_tier"] == "disk"


def test_responses_and_errors_have_adapter_tier_header() -> None:
    routes = Routes(["poet"])
    routes.resolutions["poet"] = ResolvedAdapter("hash", tier="host")
    for path, body in ((NATIVE, generate(adapter_id="poet")), (COMPLETIONS, complete("poet"))):
        assert routes.post(path, body).headers["x-adapter-tier"] == "host"
    failed = routes.post(NATIVE, generate(adapter_id="poet", max_new_tokens=1000))
    assert (failed.status, failed.headers["x-adapter-tier"]) == (422, "host")
    merged = routes.post(NATIVE, generate(merged_adapters={"ids": ["poet", "pirate"]}))
    assert (merged.headers["x-adapter-hash"], merged.headers["x-adapter-tier"]) == ("merged", "host")
    routes.resolutions["pirate"] = ResolvedAdapter("hash of pirate", tier="fetched")
    merged = routes.post(NATIVE, generate(merged_adapters={"ids": ["poet", "pirate"]}))
    assert merged.headers["x-adapter-tier"] == "fetched"


def test_base_model_has_no_adapter_tier() -> None:
    reply = Routes().post(STREAM, generate())
    assert "x-adapter-tier" not in reply.headers
    assert "adapter_tier" not in reply.events[0]


def set_template(routes: Routes) -> None:
    async def render(*_: Any, **__: Any) -> str:
        return "ask"

    routes.service.tokenizers.render = render  # type: ignore[method-assign]


# --- New adapters -----------------------------------------------------------------------------------------------------


def send_request(routes: Routes, name: str, key: str | None = None, source: str = "hub") -> Reply:
    return routes.post(NATIVE, generate(adapter_id=name, adapter_source=source), key)


def test_new_adapter_quota_is_per_key(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert [send_request(routes, name, "few").status for name in ("o/a", "o/b", "o/a", "o/b")] == [200] * 4
    rejected = send_request(routes, "o/c", "few")
    assert (rejected.status, rejected.headers["retry-after"]) == (429, "30")
    assert "reached the limit of 2 new adapters per minute" in rejected.message
    openai_reply = routes.post(COMPLETIONS, complete("o/c", adapter_source="hub"), "few")
    assert openai_reply.json["error"]["code"] == "rate_limit_exceeded"
    assert "reached the limit of 2 new adapters per minute" in openai_reply.message
    assert send_request(routes, "o/a", "few").status == 200
    assert send_request(routes, "o/c", "all").status == 200
    assert send_request(routes, "o/c", "few").status == 200  # known after the request with the other key


def test_failed_lookups_consume_quota(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.resolutions |= {f"o/{number}": AdapterNotFoundError("no such repository") for number in range(9)}
    assert [send_request(routes, f"o/{number}", "few").status for number in range(4)] == [424, 424, 429, 429]
    assert send_request(routes, "o/0", "few").status == 429  # failed lookups are not remembered


def test_each_merged_adapter_is_charged(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    merged = generate(merged_adapters={"ids": ["o/a", "o/b", "o/c"]}, adapter_source="hub")
    assert routes.post(NATIVE, merged, "few").status == 429
    assert routes.post(NATIVE, merged, "boss").status == 200


def test_refetched_adapter_is_charged(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.resolutions["o/a"] = ResolvedAdapter("hash", tier="fetched")
    assert [send_request(routes, "o/a", "few").status for _ in range(4)] == [
        200
    ] * 4  # the first fetch was charged as a new adapter
    assert send_request(routes, "o/b", "few").status == 429


def send_concurrently(routes: Routes, name: str, key: str, count: int) -> Counter[int]:
    """Send `count` requests concurrently and count their statuses."""
    body, headers = generate(adapter_id=name, adapter_source="hub"), {"authorization": f"Bearer {key}"}

    async def send() -> list[Reply]:
        return await asyncio.gather(*(routes._send("POST", NATIVE, body, headers) for _ in range(count)))

    return Counter(reply.status for reply in asyncio.run(send()))


def test_concurrent_requests_for_new_adapter_are_charged_once(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.resolutions["o/a"] = ResolvedAdapter("hash", tier="fetched")
    assert send_concurrently(routes, "o/a", "few", 20) == {200: 20}
    assert [send_request(routes, name, "few").status for name in ("o/b", "o/c")] == [200, 429]


def test_concurrent_requests_for_fetch_are_charged_once(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert send_request(routes, "o/a", "boss").status == 200
    routes.resolutions["o/a"] = ResolvedAdapter("hash", tier="fetched")
    assert send_concurrently(routes, "o/a", "few", 20) == {200: 20}
    assert [send_request(routes, name, "few").status for name in ("o/b", "o/c")] == [200, 429]


@pytest.mark.parametrize(
    ("error", "status"),
    [(SourceError("the hub is down"), 424), (OverloadedError("many are fetched"), 429), (EngineError("it fell"), 500)],
)
def test_temporary_failure_is_not_charged(error: LoraxError, status: int, keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    routes.resolutions["o/a"] = error
    for _ in range(2):
        assert send_concurrently(routes, "o/a", "few", 5) == {status: 5}
    assert str(error) in send_request(routes, "o/a", "few").message
    del routes.resolutions["o/a"]
    assert [send_request(routes, name, "few").status for name in ("o/a", "o/b", "o/c")] == [200, 200, 429]


def test_local_folders_are_not_charged(keys_file: Path) -> None:
    routes = Routes(keys_file=keys_file)
    assert {send_request(routes, f"name-{number}", "few", "local").status for number in range(5)} == {200}


def test_server_without_keys_has_quota_only_if_configured() -> None:
    routes = Routes()
    assert {send_request(routes, f"o/{number}").status for number in range(70)} == {200}
    routes = Routes(new_adapters_per_minute=3)
    assert [send_request(routes, f"o/{number}").status for number in range(4)] == [200, 200, 200, 429]


# --- Log probability limit --------------------------------------------------------------------------------------------

PROMPT = len(ids("ask"))
SAMPLED = {"temperature": 0.5}
LOGPROB_REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {  # path, body, number of log probabilities
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


@pytest.mark.parametrize("what", LOGPROB_REQUESTS)
def test_log_probability_limit_applies_to_all_routes(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, count = LOGPROB_REQUESTS[what]
    routes = Routes()
    set_template(routes)
    monkeypatch.setattr(checks, "MAX_LOGPROBS_PER_REQUEST", count - 1)
    rejected = routes.post(path, body)
    assert rejected.status == (422 if path == NATIVE else 400)
    assert f"could return {count} log probabilities; the limit is {count - 1}" in rejected.message
    assert not routes.engine.sent  # rejected before submission
    fields = {NATIVE: "`return_k_alternatives`", COMPLETIONS: "`logprobs`", CHAT: "`top_logprobs`"}
    assert fields[path] in rejected.message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (STREAM, generate(return_k_alternatives=20, details=True)),
        (CHAT, chat(logprobs=True, top_logprobs=20, stream=True)),
        (NATIVE, generate()),
    ],
)
def test_streamed_log_probabilities_are_not_limited(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = Routes()
    set_template(routes)
    monkeypatch.setattr(checks, "MAX_LOGPROBS_PER_REQUEST", 0)
    assert routes.post(path, body).status == 200


# --- Field names in errors --------------------------------------------------------------------------------------------

LORAX_FIELDS = ("`inputs`", "`max_new_tokens`", "`min_new_tokens`", "`return_k_alternatives`")
EXCESSIVE_FIELDS: dict[str, dict[str, Any]] = {
    "a long answer": {"max_tokens": 1000},
    "more than fits": {"max_tokens": 127},
    "min_tokens beyond the answer": {"min_tokens": 50, "max_tokens": 5},
    "min_tokens below 0": {"min_tokens": -1},
    "alternatives": {"logprobs": 21},
}


@pytest.mark.parametrize("what", EXCESSIVE_FIELDS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_openai_errors_use_openai_field_names(path: str, what: str) -> None:
    routes, more = Routes(), dict(EXCESSIVE_FIELDS[what])
    set_template(routes)
    if path == CHAT and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": more["logprobs"]}
    rejected = routes.post(path, complete(**more) if path == COMPLETIONS else chat(**more))
    assert rejected.status == 400, rejected.body
    assert not any(word in rejected.message for word in LORAX_FIELDS)


def test_too_long_prompt_error_uses_route_field_names() -> None:
    routes = Routes()
    assert routes.post(COMPLETIONS, complete(prompt="x " * 500)).message.startswith("`prompt` tokens + `max_tokens`")
    assert "`inputs` tokens + `max_new_tokens`" in routes.post(NATIVE, {**generate(), "inputs": "x " * 500}).message


@pytest.mark.parametrize(("path", "field"), [(NATIVE, "inputs"), (COMPLETIONS, "prompt")])
def test_engine_errors_use_route_field_names(path: str, field: str) -> None:
    routes = Routes()
    error: LoraxError = InputError("`inputs` has tokens beyond the vocabulary of 7")

    def fail(request_id: int, *_: Any, **__: Any) -> None:
        routes.engine._deliver(Output.failed(request_id, error))

    routes.engine.emit_tokens = fail  # type: ignore[method-assign]
    assert f"`{field}` has tokens beyond" in routes.post(path, generate() if path == NATIVE else complete()).message
    streamed = routes.post(COMPLETIONS, complete(stream=True))
    assert (streamed.status, streamed.message) == (400, "`prompt` has tokens beyond the vocabulary of 7")


def test_missing_chat_template_has_error_code() -> None:
    rejected = Routes().post(CHAT, chat())
    assert (rejected.status, rejected.json["error"]["code"]) == (400, "no_chat_template")


# --- Routes for other tasks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "ask"}),
        ("/classify", {"inputs": "ask"}),
        ("/classify_batch", {"inputs": ["ask"]}),
        ("/rerank", {"query": "ask", "documents": ["quick"]}),
        ("/v1/embeddings", {"input": "ask"}),
        ("/v1/classify", {"input": "ask"}),
        ("/v1/rerank", {"query": "ask", "documents": ["quick"]}),
        ("/v1/score", {"text_1": "ask", "text_2": "quick"}),
    ],
)
def test_generative_model_rejects_pooling_routes(path: str, body: dict[str, Any]) -> None:
    reply = Routes().post(path, body)
    assert reply.status == (400 if path.startswith("/v1") else 422)
    assert "it is served for text generation (--task generate)" in reply.message
