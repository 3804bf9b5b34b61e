"""Structured output over HTTP with the OpenAI and LoRAX clients, and with vLLM fields."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import jsonschema
import lorax
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.http_server import Server, serving, write_model, write_variant_adapter
from tests.structured_output.schemas import PERSON

pytestmark = pytest.mark.filterwarnings("ignore:The `dict` method is deprecated")  # LoRAX's client calls it

MESSAGES: list[Any] = [{"role": "user", "content": "Who?"}]
LONG: dict[str, Any] = {"model": "", "max_tokens": 90, "temperature": 1.0, "seed": 1}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


class Person(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder)
    write_variant_adapter(folder / "adapters" / "first", folder / "adapters" / "other")
    with serving(folder) as made:
        yield made


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)) as client:
        yield client


def check(text: str, schema: dict[str, Any] = PERSON) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def test_all_choices_follow_json_schema(sdk: openai.OpenAI) -> None:
    response = sdk.chat.completions.create(messages=MESSAGES, response_format=SCHEMA, n=4, **LONG)  # type: ignore[call-overload]
    assert len({choice.message.content for choice in response.choices}) > 1
    for choice in response.choices:
        assert choice.finish_reason == "stop"
        check(choice.message.content)
    events = list(sdk.chat.completions.create(messages=MESSAGES, response_format=SCHEMA, stream=True, **LONG))  # type: ignore[call-overload]
    texts = [event.choices[0].delta.content or "" for event in events if event.choices]
    check("".join(texts))
    assert "".join(texts) == response.choices[0].message.content  # the same seed


def test_sdk_parses_structured_output(sdk: openai.OpenAI) -> None:
    parsed = sdk.chat.completions.parse(messages=MESSAGES, response_format=Person, **LONG).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with sdk.chat.completions.stream(messages=MESSAGES, response_format=Person, **LONG) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed


def test_json_object_mode_returns_object(sdk: openai.OpenAI) -> None:
    bias: dict[str, Any] = {"response_format": {"type": "json_object"}, "logit_bias": {}}
    response = sdk.chat.completions.create(messages=MESSAGES, **LONG | bias)
    text = response.choices[0].message.content or ""
    assert text.startswith("{")
    if response.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"guided_regex": "[a-c]{2}[0-9]"}, "[a-c]{2}[0-9]"),
        ({"guided_json": {"enum": [7, None]}}, "7|null"),
        ({"guided_json": '{"const": "x"}'}, '"x"'),
        ({"guided_grammar": 'start: "a" "b"+ "c"'}, "ab+c"),
        ({"guided_grammar": 'root ::= "a" | "b" "c"'}, "a|bc"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"regex": "x{3}"}}, "xxx"),
        ({"structured_outputs": {"json": {"const": 1}}}, "1"),
        ({"structured_outputs": {"grammar": "start: /[x-z]/"}}, "[x-z]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}},
            "true|false",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:60],
)
@pytest.mark.parametrize("adapter", ["", "first", "other"])
def test_vllm_structured_output_fields_are_enforced(
    words: dict[str, Any], pattern: str, adapter: str, sdk: openai.OpenAI
) -> None:
    arguments = {**LONG, "model": adapter, "extra_body": words}
    chat = sdk.chat.completions.create(messages=MESSAGES, **arguments).choices[0]
    completion = sdk.completions.create(prompt="The", best_of=2, n=1, **arguments).choices[0]
    for text, reason in ((chat.message.content, chat.finish_reason), (completion.text, completion.finish_reason)):
        assert re.fullmatch(pattern, text or ""), text
        assert reason == "stop"


def test_logprobs_are_computed_before_mask(sdk: openai.OpenAI) -> None:
    arguments: dict[str, Any] = LONG | {"logprobs": True, "top_logprobs": 3, "extra_body": {"guided_choice": ["zzzz"]}}
    logprobs = sdk.chat.completions.create(messages=MESSAGES, **arguments).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].logprob < -1e-3  # the only allowed token, but not the only likely token
    assert all(top.token != "z" for top in logprobs.content[0].top_logprobs[:1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, '"not"'),
        ({"response_format": {"type": "xml"}}, "(got 'xml')"),
        ({"response_format": {}}, "response_format.type: Field required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}, "must be an object"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_grammar": "start: what"}, "unknown name"),
        ({"guided_choice": []}, "at least one string"),
        ({"guided_json": "{"}, "is not valid JSON"),
        ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "two formats"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "`ignore_eos` cannot be combined"),
        ({"guided_choice": ["a"], "ignore_eos_token": True}, "`ignore_eos_token` cannot be combined"),
    ],
    ids=str,
)
def test_invalid_formats_are_rejected(words: dict[str, Any], message: str, sdk: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            list(sdk.chat.completions.create(messages=MESSAGES, stream=stream, extra_body=words, **LONG))


# --- LoRAX ------------------------------------------------------------------------------------------------------------


def test_lorax_client_response_format_is_enforced(server: Server) -> None:
    client = lorax.Client(server.url)
    form: Any = {"type": "json_object", "schema": PERSON}
    for adapter in (None, "first", "other"):
        response = client.generate(
            "Who?", max_new_tokens=90, seed=3, do_sample=True, response_format=form, adapter_id=adapter
        )
        check(response.generated_text)
    best = client.generate("Who?", max_new_tokens=90, do_sample=True, best_of=2, response_format=form)
    assert best.details is not None
    assert best.details.best_of_sequences is not None
    for text in (best.generated_text, *(other.generated_text for other in best.details.best_of_sequences)):
        check(str(text))
    events = list(client.generate_stream("Who?", max_new_tokens=90, response_format=form))
    check(str(events[-1].generated_text))


@pytest.mark.parametrize("kind", ["json_object", "JsonObject", "json_schema", "JsonSchema"])
def test_response_format_schema_may_be_null(kind: str, server: Server) -> None:
    form = {"type": kind, "schema": None}
    body = {"inputs": "Who?", "parameters": {"max_new_tokens": 4, "response_format": form}}
    assert server.post("/generate", body).json["generated_text"].startswith("{")
    plain = {
        "inputs": "Who?",
        "parameters": {"max_new_tokens": 4, "response_format": {"type": "text", "schema": PERSON}},
    }
    assert not server.post("/generate", plain).json["generated_text"].startswith("{")


def test_unenforceable_schema_gets_status_422(server: Server) -> None:
    form = {"type": "json_object", "schema": {"type": "array", "uniqueItems": True}}
    for path in ("/generate", "/generate_stream"):
        response = server.post(path, {"inputs": "Who?", "parameters": {"response_format": form}})
        assert response.status == 422
        assert "uniqueItems" in response.json["error"]
