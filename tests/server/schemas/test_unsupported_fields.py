"""Fields of other servers: honoured, refused by name, or ignored where they change nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lorax_server.server.schemas.lorax import GenerateParameters
from lorax_server.server.schemas.openai import ChatCompletionRequest, CompletionRequest
from lorax_server.server.schemas.unsupported_fields import CHAT, COMPLETIONS, UNSUPPORTED_FIELDS, FIELDS_BY_ROUTE, GENERATE
from lorax_server.types import Merge
from tests.server.fake_server import Reply, Routes, chat, complete, generate

PATHS = {GENERATE: "/generate", CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
SCHEMAS: dict[str, type[BaseModel]]
SCHEMAS = {GENERATE: GenerateParameters, CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


class Templated(Routes):
    """Routes with a chat template that keeps its messages and variables."""

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


def ask(routes: Routes, route: str, **fields: Any) -> Reply:
    make = {GENERATE: generate, CHAT: chat, COMPLETIONS: complete}[route]
    return routes.post(PATHS[route], make(**fields))


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", PATHS)
def test_what_would_change_the_answer_is_refused_by_name(route: str, routes: Templated) -> None:
    for name, field in FIELDS_BY_ROUTE[route].items():
        refused = ask(routes, route, **{name: False if field.defaults_to_true else "x"})
        assert refused.status == (422 if route == GENERATE else 400), name
        assert f"`{name}`" in refused.message
        if route != GENERATE:
            error = refused.json["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not routes.engine.sent


@pytest.mark.parametrize("route", PATHS)
def test_what_asks_for_nothing_passes(route: str, routes: Templated) -> None:
    nothings: list[Any] = [None, False, 0, "", [], {}]
    for nothing in nothings:
        fields = {name: nothing for name, field in FIELDS_BY_ROUTE[route].items() if not field.defaults_to_true}
        if nothing == 0 and nothing is not False:
            fields = {name: value for name, value in fields.items() if not FIELDS_BY_ROUTE[route][name].zero_is_set}
        assert ask(routes, route, **fields).status == 200
    neutral_values = {name: value for name, field in FIELDS_BY_ROUTE[route].items() for value in field.neutral_values}
    assert len(neutral_values) >= 5
    assert ask(routes, route, **neutral_values).status == 200


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
def test_numbers_that_ask_for_something(fields: dict[str, Any], route: str, routes: Templated) -> None:
    assert ask(routes, route, **fields).status == (422 if route == GENERATE else 400)


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
def test_the_same_may_be_said_in_several_words(route: str, fields: dict[str, Any], routes: Templated) -> None:
    assert ask(routes, route, **fields).status == 200
    name = next(name for name in fields if name in FIELDS_BY_ROUTE[route])
    other = {**fields, name: True if name == "do_sample" else 9}
    assert name == "do_sample" or ask(routes, route, **other).status in (400, 422)


@pytest.mark.parametrize(
    "fields", [{"adapter_id": "poet"}, {"grammar": {"type": "json"}}, {"max_new_tokens": 5}], ids=str
)
def test_what_belongs_into_parameters_is_refused_beside_them(fields: dict[str, Any], routes: Templated) -> None:
    refused = routes.post("/generate", {"inputs": "ask", **fields})
    assert (refused.status, "`parameters`" in refused.message) == (422, True)
    nothing = {"adapter_id": None, "grammar": None, "model": "x", "options": {"use_cache": False}, "stream": False}
    assert routes.post("/generate", {"inputs": "ask", **nothing}).status == 200


@pytest.mark.parametrize("route", PATHS)
def test_what_nobody_knows_is_ignored(route: str, routes: Templated) -> None:
    fields = {"store": True, "metadata": {"a": 1}, "service_tier": "auto", "parallel_tool_calls": True, "priority": 3}
    assert ask(routes, route, **fields).status == 200


@pytest.mark.parametrize("route", PATHS)
def test_no_field_is_both_known_and_foreign(route: str) -> None:
    assert not set(FIELDS_BY_ROUTE[route]) & set(SCHEMAS[route].model_fields)
    for field in FIELDS_BY_ROUTE[route].values():
        assert not field.replacement or field.replacement in SCHEMAS[route].model_fields, field


def test_each_is_listed_once_with_who_has_it() -> None:
    pairs = [(field.name, route) for field in UNSUPPORTED_FIELDS for route in field.routes]
    assert len(pairs) == len(set(pairs))
    assert all(field.dialects for field in UNSUPPORTED_FIELDS)
    described = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()
    missing = [field.name for field in UNSUPPORTED_FIELDS if not re.search(rf"`{field.name}`", described)]
    assert missing == []


@pytest.mark.parametrize("route", PATHS)
def test_the_schema_names_them(route: str) -> None:
    description = SCHEMAS[route].model_json_schema()["description"]
    assert all(f"`{name}`" in description for name in FIELDS_BY_ROUTE[route])


# --- Honoured ---------------------------------------------------------------------------------------------------------


def test_sampling_of_other_dialects_is_honoured(routes: Templated) -> None:
    fields = {"min_p": 0.25, "logit_bias": {"7": -3.5}, "min_new_tokens": 2}
    assert ask(routes, GENERATE, **fields).status == 200
    (request,) = routes.engine.added
    assert (request.sampling.min_p, request.sampling.logit_bias) == (0.25, {7: -3.5})
    assert request.sampling.do_sample  # as by `top_p`
    assert request.stop.min_new_tokens == 2
    assert ask(routes, CHAT, typical_p=0.5).status == 200
    assert routes.engine.added[-1].sampling.typical_p == 0.5


@pytest.mark.parametrize("fields", [{"min_p": 1.5}, {"min_new_tokens": 6}, {"logit_bias": {"a": 1}}, {"min_p": "x"}])
def test_their_values_are_checked(fields: dict[str, Any], routes: Templated) -> None:
    refused = ask(routes, GENERATE, **fields)
    assert (refused.status, next(iter(fields)) in refused.message) == (422, True)


def test_a_chat_may_go_on_without_a_prompt_for_its_answer(routes: Templated) -> None:
    for asked, expected in ((None, True), (True, True), (False, False)):
        assert ask(routes, CHAT, add_generation_prompt=asked).status == 200
        assert routes.rendered[-1][1]["add_generation_prompt"] is expected


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("model", ["", "base", "poet", "base:poet"])
def test_an_adapter_can_be_named_as_lorax_does(route: str, model: str, routes: Templated) -> None:
    reply = ask(routes, route, model=model, adapter_id="poet")
    assert (reply.status, reply.headers["x-adapter-id"]) == (200, "poet")
    assert reply.json["model"] == "poet"
    assert routes.engine.added[-1].adapter_identity == "hash of poet"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_names_that_contradict_each_other_are_refused(route: str, routes: Templated) -> None:
    merged = {"ids": ["poet", "pirate"]}
    for fields in (
        {"model": "pirate", "adapter_id": "poet"},
        {"model": "gpt-4o", "adapter_id": "poet"},
        {"model": "pirate", "adapter_id": "__base_model__"},
        {"model": "pirate", "merged_adapters": merged},
        {"model": "", "adapter_id": "poet", "merged_adapters": merged},
    ):
        refused = ask(routes, route, **fields)
        assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_value"), fields
        assert "adapter" in refused.message
    assert not routes.engine.sent


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_nothing_named_is_the_base_model(route: str, routes: Templated) -> None:
    for name in (None, "", "__base_model__"):
        reply = ask(routes, route, model="", adapter_id=name)
        assert (reply.status, "x-adapter-id" in reply.headers) == (200, False)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_adapters_are_merged_on_openais_routes_too(route: str, routes: Templated) -> None:
    merged = {"ids": ["poet", "pirate"], "weights": [0.5, 2.0], "merge_strategy": "ties", "density": 0.5}
    reply = ask(routes, route, model="base", merged_adapters=merged)
    assert (reply.status, reply.headers["x-adapter-id"]) == (200, "poet,pirate")
    asked = [merge for message in routes.engine.sent if (merge := getattr(message, "merge", None))]
    assert asked == [Merge((0.5, 2.0), "ties", 0.5, "total")]
    refused = ask(routes, route, model="", merged_adapters={"ids": []})
    assert (refused.status, refused.json["error"]["param"]) == (400, "merged_adapters")


# --- Tools, roles and usage -------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_tools_that_must_not_be_used_pass(routes: Templated) -> None:
    assert ask(routes, CHAT, tools=[TOOL], tool_choice="none").status == 200
    # The template of these routes shows no tools to the model.
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": "required"}):
        refused = ask(routes, CHAT, **fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(("template", "role"), [("{{ messages }}", "system"), ("developer or user", "developer")])
def test_a_developer_is_a_system_where_a_template_knows_none(
    template: str, role: str, routes: Templated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes.service.tokenizers, "find_template", lambda *_: template)
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "ask"}]
    assert ask(routes, CHAT, messages=messages).status == 200
    assert [message["role"] for message in routes.rendered[-1][0]] == [role, "user"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_stream_tells_its_usage_unless_it_is_told_not_to(route: str, routes: Templated) -> None:
    def usages(**fields: Any) -> list[Any]:
        return [event["usage"] for event in ask(routes, route, stream=True, **fields).events if event.get("usage")]

    assert len(usages()) == 1  # as in LoRAX
    assert len(usages(stream_options={})) == 1
    assert len(usages(stream_options={"include_usage": True})) == 1
    assert usages(stream_options={"include_usage": False}) == []
