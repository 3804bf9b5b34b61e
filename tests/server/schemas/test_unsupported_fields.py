"""Fields of other servers: supported, rejected by name, or ignored if they have no effect."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lorax_server.server.schemas.lorax import GenerateParameters
from lorax_server.server.schemas.openai import ChatCompletionRequest, CompletionRequest
from lorax_server.server.schemas.unsupported_fields import (
    CHAT,
    COMPLETIONS,
    FIELDS_BY_ROUTE,
    GENERATE,
    UNSUPPORTED_FIELDS,
)
from lorax_server.types import Merge
from tests.server.fake_server import Reply, Routes, chat, complete, generate

PATHS = {GENERATE: "/generate", CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
SCHEMAS: dict[str, type[BaseModel]]
SCHEMAS = {GENERATE: GenerateParameters, CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


class Templated(Routes):
    """Routes with a fake chat template that records its messages and variables."""

    def __init__(self, **options: Any) -> None:
        super().__init__(["poet", "pirate"], **options)
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.service.tokenizers.render = self._render  # type: ignore[method-assign]

    async def _render(self, _: Any, messages: list[dict[str, Any]], tenant: str = "", /, **variables: Any) -> str:
        self.rendered.append((messages, variables))
        return "ask"


@pytest.fixture
def routes() -> Templated:
    return Templated()


def send(routes: Routes, route: str, **fields: Any) -> Reply:
    make = {GENERATE: generate, CHAT: chat, COMPLETIONS: complete}[route]
    return routes.post(PATHS[route], make(**fields))


# --- Rejected ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", PATHS)
def test_unsupported_fields_are_rejected_by_name(route: str, routes: Templated) -> None:
    for name, field in FIELDS_BY_ROUTE[route].items():
        rejected = send(routes, route, **{name: False if field.defaults_to_true else "x"})
        assert rejected.status == (422 if route == GENERATE else 400), name
        assert f"`{name}`" in rejected.message
        if route != GENERATE:
            error = rejected.json["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not routes.engine.sent


@pytest.mark.parametrize("route", PATHS)
def test_neutral_values_are_accepted(route: str, routes: Templated) -> None:
    empty_values: list[Any] = [None, False, 0, "", [], {}]
    for empty in empty_values:
        fields = {name: empty for name, field in FIELDS_BY_ROUTE[route].items() if not field.defaults_to_true}
        if empty == 0 and empty is not False:
            fields = {name: value for name, value in fields.items() if not FIELDS_BY_ROUTE[route][name].zero_is_set}
        assert send(routes, route, **fields).status == 200
    neutral_values = {name: value for name, field in FIELDS_BY_ROUTE[route].items() for value in field.neutral_values}
    assert len(neutral_values) >= 5
    assert send(routes, route, **neutral_values).status == 200


@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4},
        {"num_return_sequences": 3},
        {"repeat_penalty": 1.3},
        {"prompt_logprobs": 0},
        {"eos_token_id": 0},
    ],
    ids=str,
)
def test_non_default_numbers_are_rejected(fields: dict[str, Any], route: str, routes: Templated) -> None:
    assert send(routes, route, **fields).status == (422 if route == GENERATE else 400)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (GENERATE, {"stop": ["x"], "stop_sequences": ["x"]}),
        (GENERATE, {"max_new_tokens": 5, "max_tokens": 5, "n_predict": 5}),
        (
            COMPLETIONS,
            {"max_tokens": 5, "max_new_tokens": 5, "n_predict": 5, "repetition_penalty": 1.2, "repeat_penalty": 1.2},
        ),
        (CHAT, {"temperature": 0, "do_sample": False}),
    ],
)
def test_field_with_equal_replacement_is_accepted(route: str, fields: dict[str, Any], routes: Templated) -> None:
    assert send(routes, route, **fields).status == 200
    name = next(name for name in fields if name in FIELDS_BY_ROUTE[route])
    other = {**fields, name: True if name == "do_sample" else 9}
    assert name == "do_sample" or send(routes, route, **other).status in (400, 422)


@pytest.mark.parametrize(
    "fields", [{"adapter_id": "poet"}, {"grammar": {"type": "json"}}, {"max_new_tokens": 5}], ids=str
)
def test_top_level_parameters_are_rejected(fields: dict[str, Any], routes: Templated) -> None:
    rejected = routes.post("/generate", {"inputs": "ask", **fields})
    assert (rejected.status, "`parameters`" in rejected.message) == (422, True)
    empty = {"adapter_id": None, "grammar": None, "model": "x", "options": {"use_cache": False}, "stream": False}
    assert routes.post("/generate", {"inputs": "ask", **empty}).status == 200


@pytest.mark.parametrize("route", PATHS)
def test_unknown_fields_are_ignored(route: str, routes: Templated) -> None:
    fields = {"store": True, "metadata": {"a": 1}, "service_tier": "auto", "parallel_tool_calls": True, "priority": 3}
    assert send(routes, route, **fields).status == 200


@pytest.mark.parametrize("route", PATHS)
def test_unsupported_fields_are_not_in_schema(route: str) -> None:
    assert not set(FIELDS_BY_ROUTE[route]) & set(SCHEMAS[route].model_fields)
    for field in FIELDS_BY_ROUTE[route].values():
        assert not field.replacement or field.replacement in SCHEMAS[route].model_fields, field


def test_unsupported_fields_are_unique_and_documented() -> None:
    pairs = [(field.name, route) for field in UNSUPPORTED_FIELDS for route in field.routes]
    assert len(pairs) == len(set(pairs))
    assert all(field.dialects for field in UNSUPPORTED_FIELDS)
    described = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()
    missing = [field.name for field in UNSUPPORTED_FIELDS if not re.search(rf"`{field.name}`", described)]
    assert missing == []


@pytest.mark.parametrize("route", PATHS)
def test_schema_description_lists_unsupported_fields(route: str) -> None:
    description = SCHEMAS[route].model_json_schema()["description"]
    assert all(f"`{name}`" in description for name in FIELDS_BY_ROUTE[route])


# --- Supported --------------------------------------------------------------------------------------------------------


def test_sampling_fields_outside_lorax_api_are_applied(routes: Templated) -> None:
    fields = {"min_p": 0.25, "logit_bias": {"7": -3.5}, "min_new_tokens": 2}
    assert send(routes, GENERATE, **fields).status == 200
    (request,) = routes.engine.added
    assert (request.sampling.min_p, request.sampling.logit_bias) == (0.25, {7: -3.5})
    assert request.sampling.do_sample  # like `top_p`, `min_p` enables sampling
    assert request.stop.min_new_tokens == 2
    assert send(routes, CHAT, typical_p=0.5).status == 200
    assert routes.engine.added[-1].sampling.typical_p == 0.5


@pytest.mark.parametrize("fields", [{"min_p": 1.5}, {"min_new_tokens": 6}, {"logit_bias": {"a": 1}}, {"min_p": "x"}])
def test_invalid_sampling_values_are_rejected(fields: dict[str, Any], routes: Templated) -> None:
    rejected = send(routes, GENERATE, **fields)
    assert (rejected.status, next(iter(fields)) in rejected.message) == (422, True)


def test_add_generation_prompt_reaches_template(routes: Templated) -> None:
    for requested, expected in ((None, True), (True, True), (False, False)):
        assert send(routes, CHAT, add_generation_prompt=requested).status == 200
        assert routes.rendered[-1][1]["add_generation_prompt"] is expected


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["", "base", "poet", "base:poet"])
def test_openai_routes_accept_adapter_id(route: str, model: str, routes: Templated) -> None:
    reply = send(routes, route, model=model, adapter_id="poet")
    assert (reply.status, reply.headers["x-adapter-id"]) == (200, "poet")
    assert reply.json["model"] == "poet"
    assert routes.engine.added[-1].adapter_identity == "hash of poet"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_conflicting_adapter_names_are_rejected(route: str, routes: Templated) -> None:
    merged = {"ids": ["poet", "pirate"]}
    for fields in (
        {"model": "pirate", "adapter_id": "poet"},
        {"model": "gpt-4o", "adapter_id": "poet"},
        {"model": "pirate", "adapter_id": "__base_model__"},
        {"model": "pirate", "merged_adapters": merged},
        {"model": "", "adapter_id": "poet", "merged_adapters": merged},
    ):
        rejected = send(routes, route, **fields)
        assert (rejected.status, rejected.json["error"]["code"]) == (400, "invalid_value"), fields
        assert "adapter" in rejected.message
    assert not routes.engine.sent


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_empty_adapter_name_selects_base_model(route: str, routes: Templated) -> None:
    for name in (None, "", "__base_model__"):
        reply = send(routes, route, model="", adapter_id=name)
        assert (reply.status, "x-adapter-id" in reply.headers) == (200, False)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_openai_routes_accept_merged_adapters(route: str, routes: Templated) -> None:
    merged = {"ids": ["poet", "pirate"], "weights": [0.5, 2.0], "merge_strategy": "ties", "density": 0.5}
    reply = send(routes, route, model="base", merged_adapters=merged)
    assert (reply.status, reply.headers["x-adapter-id"]) == (200, "poet,pirate")
    merges = [merge for message in routes.engine.sent if (merge := getattr(message, "merge", None))]
    assert merges == [Merge((0.5, 2.0), "ties", 0.5, "total")]
    rejected = send(routes, route, model="", merged_adapters={"ids": []})
    assert (rejected.status, rejected.json["error"]["param"]) == (400, "merged_adapters")


# --- Tools, roles and usage -------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tool_choice_none_is_accepted_without_tool_template(routes: Templated) -> None:
    assert send(routes, CHAT, tools=[TOOL], tool_choice="none").status == 200
    # This template does not render tools.
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": "required"}):
        rejected = send(routes, CHAT, **fields)
        assert (rejected.status, rejected.json["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(("template", "role"), [("{{ messages }}", "system"), ("developer or user", "developer")])
def test_developer_role_becomes_system_if_unsupported(
    template: str, role: str, routes: Templated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes.service.tokenizers, "find_template", lambda *_: template)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "ask"}]
    assert send(routes, CHAT, messages=messages).status == 200
    assert [message["role"] for message in routes.rendered[-1][0]] == [role, "user"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_stream_includes_usage_unless_disabled(route: str, routes: Templated) -> None:
    def usages(**fields: Any) -> list[Any]:
        return [event["usage"] for event in send(routes, route, stream=True, **fields).events if event.get("usage")]

    assert len(usages()) == 1  # as in LoRAX
    assert len(usages(stream_options={})) == 1
    assert len(usages(stream_options={"include_usage": True})) == 1
    assert usages(stream_options={"include_usage": False}) == []
