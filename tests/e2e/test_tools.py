"""Tool calls and the Responses API with the OpenAI client. Grammars make a random model call functions."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.http_server import CHAT_TEMPLATE, Server, serving, write_model, write_variant_adapter

TEMPLATE = "{% if tools %}<tool_call>{% endif %}" + CHAT_TEMPLATE
PARSERS = {
    **{"": "hermes", "first": "json", "second": "pythonic", "third": "mistral", "fourth": "llama3_json"},
    "fifth": "qwen3_coder",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 2},
        "b": {"type": "integer", "minimum": 0, "maximum": 9},
        "c": {"$ref": "#/$defs/unit"},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "w", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "n", "parameters": {"type": "object", "additionalProperties": False}}},
]
FUNCTIONS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
MESSAGES: list[Any] = [{"role": "user", "content": "?"}]
LENGTH = 256  # tokens; XML calls are long
LONG: dict[str, Any] = {"temperature": 1.0, "seed": 1}  # generates up to the limit


class Person(BaseModel):
    name: str = Field(max_length=3)
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": LENGTH}))
    for name in ("third", "fourth", "fifth"):
        write_variant_adapter(folder / "adapters" / "first", folder / "adapters" / name)
    with serving(folder, "--tokenizer-config-path", str(write_template(folder)), *flags()) as made:
        yield made


def write_template(folder: Path) -> Path:
    path = folder / "template.json"
    path.write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def flags() -> list[str]:
    own = [
        f"{adapter}={form}" for adapter, form in PARSERS.items() if adapter
    ]  # the base model's parser follows from its template
    return [word for value in own for word in ("--tool-parser", value)]


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)) as client:
        yield client


def check(name: str, arguments: str) -> None:
    assert name in ("w", "n")
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "w" else {"type": "object"})


@pytest.mark.parametrize("model", PARSERS)
def test_required_tool_choice_forces_valid_call(model: str, sdk: openai.OpenAI) -> None:
    call_arguments: dict[str, Any] = LONG | {
        "model": model,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
    }
    call_arguments["parallel_tool_calls"] = False
    reply = sdk.chat.completions.create(n=3, **call_arguments)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls", choice
        (call,) = list(choice.message.tool_calls or ())
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
    with sdk.chat.completions.stream(**call_arguments) as stream:
        for _ in stream:
            pass
        (streamed,) = list(stream.get_final_completion().choices[0].message.tool_calls or ())
    (whole,) = list(reply.choices[0].message.tool_calls or ())
    assert whole.type == "function"
    assert (streamed.function.name, streamed.function.arguments) == (whole.function.name, whole.function.arguments)


@pytest.mark.parametrize("model", PARSERS)
def test_named_tool_choice_forces_that_function(model: str, sdk: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "w"}}
    reply = sdk.chat.completions.create(model=model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, **LONG)
    (call,) = list(reply.choices[0].message.tool_calls or ())
    assert call.type == "function"
    assert call.function.name == "w"
    check("w", call.function.arguments)


def test_conversation_continues_after_tool_call(sdk: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "w"}}
    call_arguments: dict[str, Any] = {"model": "first", "tools": TOOLS}
    message = (
        sdk.chat.completions.create(messages=MESSAGES, tool_choice=choice, **call_arguments, **LONG).choices[0].message
    )
    (call,) = list(message.tool_calls or ())
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    more = sdk.chat.completions.create(messages=[*MESSAGES, message.to_dict(), result], max_tokens=4, **call_arguments)
    assert more.choices[0].finish_reason == "length"


def test_unenforceable_strict_schema_is_rejected(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            sdk.chat.completions.create(model="", messages=MESSAGES, tools=[tool], tool_choice=choice)
    tool["function"]["strict"] = False
    sdk.chat.completions.create(model="", messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=3)


def test_auto_calls_of_strict_functions_are_valid(sdk: openai.OpenAI) -> None:
    """The model can generate text or tool calls, which follow the schema."""
    reply = sdk.chat.completions.create(
        model="", messages=MESSAGES, tools=TOOLS, n=4, temperature=1, seed=5, max_tokens=60
    )
    for choice in reply.choices:
        if choice.finish_reason == "length":  # truncated text or call
            continue
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            check(call.function.name, call.function.arguments)
    assert any(choice.message.content for choice in reply.choices)


# --- Responses --------------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {"temperature": 1.0}


@pytest.mark.parametrize("model", PARSERS)
def test_streamed_tool_call_matches_response(model: str, sdk: openai.OpenAI) -> None:
    call_arguments: dict[str, Any] = {
        "model": model,
        "input": "?",
        "tools": FUNCTIONS,
        "tool_choice": "required",
        **SHORT,
    }
    call_arguments |= {"parallel_tool_calls": False, "extra_body": {"seed": 7}}
    response = sdk.responses.create(**call_arguments)
    assert response.status == "completed"
    (call,) = response.output
    assert call.type == "function_call"
    check(call.name, call.arguments)
    with sdk.responses.stream(**call_arguments) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_responses_follow_json_schema(sdk: openai.OpenAI) -> None:
    call_arguments: dict[str, Any] = {
        "model": "first",
        "input": "Who?",
        "text_format": Person,
        **SHORT,
        "extra_body": {"seed": 7},
    }
    parsed = sdk.responses.parse(**call_arguments).output_parsed
    assert isinstance(parsed, Person)
    with sdk.responses.stream(**call_arguments) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed


@pytest.mark.parametrize("stream", [False, True])
def test_streamed_text_matches_response(stream: bool, sdk: openai.OpenAI) -> None:
    whole = sdk.responses.create(model="first", input="Who?", temperature=0, max_output_tokens=20)
    assert whole.status == "incomplete"
    chat = sdk.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "Who?"}], temperature=0, max_tokens=20
    )
    assert whole.output_text == chat.choices[0].message.content
    if stream:
        events: Any = sdk.responses.create(
            model="first", input="Who?", temperature=0, max_output_tokens=20, stream=True
        )
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text


def test_completion_is_tool_call_or_matches_response_format(sdk: openai.OpenAI) -> None:
    """The completion is a tool call or text in the response format."""
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": {"enum": ["cat", "dog"]}, "strict": True}}
    call_arguments: dict[str, Any] = {"input": "Who?", "text": form, "tools": FUNCTIONS, **SHORT}
    for seed in range(4):
        response = sdk.responses.create(model="", extra_body={"seed": seed}, **call_arguments)
        for item in response.output:
            if item.type == "function_call" and response.status == "completed":
                check(item.name, item.arguments)
        assert response.output_text in ("", '"cat"', '"dog"')
    with pytest.raises(openai.BadRequestError, match="plain JSON"):
        sdk.responses.create(model="first", **call_arguments)
