"""Hostile names and numbers on every route are rejected with short messages and never cause a 500."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import BaseModel

from lorax_server.errors import AdapterNotFoundError
from lorax_server.server.schemas import lorax, openai
from lorax_server.types import ResolvedAdapter
from tests.server.fake_server import Reply, Routes, chat, complete, generate

NATIVE, STREAM, COMPLETIONS, CHAT = "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"
ADMIN = "admin-key"
SCHEMAS: dict[str, type[BaseModel]] = {
    NATIVE: lorax.GenerateParameters,
    COMPLETIONS: openai.CompletionRequest,
    CHAT: openai.ChatCompletionRequest,
}
NUMBERS: dict[str, str] = {  # as JSON
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e400": "1e400",
    "-1e400": "-1e400",
    "a number of 400 digits": "9" * 400,
    "2**63": str(2**63),
    "2**64": str(2**64),
    "-1": "-1",
    "-2**63": str(-(2**63)),
    "a half": "0.5",
    "the smallest": "5e-324",
    "negative zero": "-0.0",
    "true": "true",
    "a string": '"1"',
    "a list": "[1]",
    "an object": "{}",
}
NAMES: dict[str, str] = {
    "10,000 characters": "a" * 10_000,
    "climbing": "../../etc/passwd",
    "absolute": "/etc/passwd",
    "backslashes": "..\\..\\poet",
    "wide dots": "\uff0e\uff0e/poet",
    "encoded": "%2e%2e%2fpoet",
    "a home": "~root/.ssh",
    "NUL": "poet\0",
    "a line": "poet\r\nx-evil: 1",
    "an escape": "\x1b[31mpoet",
    "turned round": "\u202etoep",
    "nothing to see": "\u200b",
    "another source": "s3:poet",
    "a scheme": "file:///etc/passwd",
    "a URL": "http://169.254.169.254/latest/meta-data",
    "a bucket": "s3://bucket/poet",
    "a shell": "$(touch x);`id`|poet",
    "a query": "poet?x=1&y=2#z",
    "a template": "{{ 7 * 7 }}{% raw %}",
    "a format": "%s%n{0.__class__}",
    "stars": "*?[a-z]",
    "many slashes": "/" * 1000,
    "an emoji": "\U0001f600" * 50,
}


@pytest.fixture(scope="module")
def routes() -> Iterator[Routes]:
    """Create routes whose source has one adapter, and check at the end that the state is unchanged."""
    made = Routes(["poet"], admin_key=ADMIN)
    made.resolutions["poet"] = ResolvedAdapter("hash", tier="device")
    made.resolutions |= {
        name: AdapterNotFoundError(f"adapter {name[:64]!r}: no such folder") for name in NAMES.values()
    }

    async def render(*_: Any, **__: Any) -> str:
        return "ask"

    made.service.tokenizers.render = render  # type: ignore[method-assign]
    yield made
    assert made.service.rate_limits.num_running == 0
    assert set(made.service.model_names.adapters) == {"poet"}
    assert made.post(NATIVE, generate(adapter_id="poet")).status == 200


def check(reply: Reply, *statuses: int) -> None:
    assert reply.status in statuses, (reply.status, reply.body[:300])
    assert "x-evil" not in reply.headers
    if reply.status >= 400:
        assert 0 < len(reply.message) < 1000  # the message does not repeat a large request


def _list_numeric_fields() -> list[tuple[str, str]]:
    result = []
    for path, schema in SCHEMAS.items():
        for name, field in schema.model_json_schema()["properties"].items():
            kinds = {branch.get("type") for branch in field.get("anyOf", [field])}
            if kinds & {"integer", "number"}:
                result.append((path, name))
    return result


@pytest.mark.parametrize(("path", "field"), _list_numeric_fields())
def test_hostile_numbers_are_rejected_or_harmless(routes: Routes, path: str, field: str) -> None:
    """Send hostile numbers in each numeric field. They are rejected or harmless."""
    whole = {NATIVE: generate, COMPLETIONS: complete, CHAT: chat}[path]
    for text in NUMBERS.values():
        body = whole()
        (body["parameters"] if path == NATIVE else body)[field] = json.loads(text)
        reply = routes.post(path, body)
        rejected_status = 422 if path == NATIVE else 400
        check(reply, 200, rejected_status)
        if text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "true", '"1"', "[1]", "{}"):
            is_flag = text == "true" and field == "logprobs" and path == CHAT
            assert is_flag or reply.status == rejected_status, text


def test_temperature_error_names_limit(routes: Routes) -> None:
    reply = routes.post(NATIVE, generate(temperature=1e39))
    assert reply.status == 422
    assert "`temperature` must be <= 3.40282e+38 (got 1e+39)" in reply.message


@pytest.mark.parametrize("case", NAMES)
def test_hostile_names_are_not_found_on_any_route(routes: Routes, case: str) -> None:
    name = NAMES[case]
    for path in (NATIVE, STREAM):
        check(routes.post(path, generate(adapter_id=name)), 424)
    for path, body in ((COMPLETIONS, complete(name)), (CHAT, chat(name)), (CHAT, chat(f"base:{name}", stream=True))):
        check(routes.post(path, body), 404)
    check(routes.post(NATIVE, generate(merged_adapters={"ids": ["poet", name]})), 424)
    check(routes.get(f"/v1/models/{quote(name, safe='')}"), 404)
    check(routes.get(f"/v1/adapters?also={quote(name, safe='')}&search={quote(name[:100], safe='')}"), 200)


@pytest.mark.parametrize("case", NAMES)
def test_hostile_names_are_not_found_on_admin_routes(routes: Routes, case: str) -> None:
    name = NAMES[case]
    check(routes.post("/v1/adapters/load", {"adapter_id": name}, ADMIN), 404)
    check(routes.post("/v1/adapters/unload", {"adapter_id": name}, ADMIN), 404)
    check(routes.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": name}, ADMIN), 404)
    check(routes.post("/v1/unload_lora_adapter", {"lora_name": name}, ADMIN), 404)


@pytest.mark.parametrize("name", ["", "a" * 10_000, "x\0", "x\n", "\u202ex", "__base_model__", "base"])
def test_invalid_alias_is_rejected(routes: Routes, name: str) -> None:
    check(routes.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "poet"}, ADMIN), 400)


@pytest.mark.parametrize("path", [NATIVE, COMPLETIONS, CHAT, "/v1/adapters/load", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("name", ["\ud800", "poet\udfff"])
def test_lone_surrogates_in_names_are_rejected(routes: Routes, path: str, name: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        NATIVE: generate(adapter_id=name),
        COMPLETIONS: complete(name),
        CHAT: chat(name),
        "/v1/adapters/load": {"adapter_id": name},
        "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": name},
    }
    check(routes.post(path, bodies[path], ADMIN), 422 if path == NATIVE else 400)


POETS = ["poet", "./poet"]
INVALID_MERGES: dict[str, Any] = {
    "no ids": {"ids": []},
    "ids that are null": {"ids": [None]},
    "an id for ids": {"ids": "poet"},
    "33 ids": {"ids": ["poet"] * 33, "weights": [1.0] * 33},
    "200,000 ids": {"ids": ["poet"] * 200_000},
    "too few weights": {"ids": POETS, "weights": [1.0]},
    "too many weights": {"ids": POETS, "weights": [1.0] * 3},
    "weights of NaN": {"ids": POETS, "weights": [float("nan"), 1.0]},
    "endless weights": {"ids": POETS, "weights": [float("inf"), 1.0]},
    "weights beyond all": {"ids": POETS, "weights": [10**400, 1.0]},
    "weights beyond use": {"ids": POETS, "weights": [1e30, 1.0]},
    "a weight below use": {"ids": POETS, "weights": [1.0, -1000.1], "merge_strategy": "ties", "density": 0.5},
    "weights that are true": {"ids": POETS, "weights": [True, 1.0]},
    "weights that are null": {"ids": POETS, "weights": [None, 1.0]},
    "weights of text": {"ids": POETS, "weights": ["1", "1"]},
    "a density of NaN": {"ids": POETS, "merge_strategy": "ties", "density": float("nan")},
    "a density below 0": {"ids": POETS, "merge_strategy": "ties", "density": -0.1},
    "a density above 1": {"ids": POETS, "density": 1.1},
    "an unknown strategy": {"ids": POETS, "merge_strategy": "x" * 10_000},
    "a strategy of lists": {"ids": POETS, "merge_strategy": []},
    "an unknown sign": {"ids": POETS, "merge_strategy": "ties", "majority_sign_method": "\0"},
    "a list": [],
    "true": True,
}


@pytest.mark.parametrize("case", INVALID_MERGES)
def test_invalid_merges_are_rejected(routes: Routes, case: str) -> None:
    check(routes.post(NATIVE, generate(merged_adapters=INVALID_MERGES[case])), 422)


QUERIES = {
    **{f"limit={value}": f"limit={value}" for value in ("0", "-1", "1001", "1e3", "NaN", "", "0.5", "0x10", "9" * 30)},
    "a limit of 5000 digits": f"limit={'9' * 5000}",
    "a mark that is none": "after=poet",
    "an empty mark": "after=",
    "a mark of 10,000 characters": f"after=name:{'a' * 10_000}",
    "a search of 10,000 characters": f"search={'a' * 10_000}",
    "101 further names": "also=x&" * 101,
}


@pytest.mark.parametrize("case", QUERIES)
def test_invalid_queries_are_rejected(routes: Routes, case: str) -> None:
    check(routes.get(f"/v1/adapters?{QUERIES[case]}"), 400)


@pytest.mark.parametrize(
    "query", ["after=name:%00", "after=hash:%ff", "after=hash:", "search=%ed%a0%80", "limit=1&limit=2"]
)
def test_unusual_queries_are_accepted(routes: Routes, query: str) -> None:
    check(routes.get(f"/v1/adapters?{query}"), 200)
    check(routes.get(f"/v1/adapters?{query}", ADMIN), 200)
