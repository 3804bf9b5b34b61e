"""Tool calls and structured output with every client. A grammar forces the demo model to call tools."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import instructor
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import PROMPT, Server

MODEL = "sql"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
Number = Annotated[int, Field(ge=0, le=99)]


class Count(BaseModel):
    """Number of things."""

    model_config = ConfigDict(extra="forbid")

    count: Number


class Known(Count):
    version: Literal[1]


class Unknown(BaseModel):
    version: Literal[2]
    reason: Literal["forgotten", "never known"]


class Verdict(BaseModel):
    """A discriminated union, which pydantic writes as `oneOf`."""

    found: Annotated[Known | Unknown, Field(discriminator="version")]


FUNCTION: dict[str, Any] = {"name": "tell", "description": "Tell it", "parameters": Count.model_json_schema()}
TOOL: Any = {"type": "function", "function": FUNCTION}


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tool_server.v1, api_key="none", max_retries=0) as client:
        yield client


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def test_openai_streamed_tool_call_matches_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": [openai.pydantic_function_tool(Count)]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 100}
    choice = client.chat.completions.parse(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Count)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.delta" in kinds
    assert calls
    (streamed,) = calls
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_openai_responses_return_valid_arguments(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 100}
    function: Any = {"type": "function", "strict": False, **FUNCTION}
    response = client.responses.create(tools=[function], tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = response.output
    assert call.type == "function_call"
    assert 0 <= json.loads(call.arguments)["count"] <= 99
    assert isinstance(client.responses.parse(text_format=Count, **asked).output_parsed, Count)


def test_openai_parses_union_types(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 1, "max_tokens": 100, "n": 8}
    answers = client.chat.completions.parse(messages=MESSAGES, response_format=Verdict, **asked).choices
    result = [answer.message.parsed.found for answer in answers if answer.message.parsed]
    assert len(result) == 8
    assert {type(each) for each in result} <= {Known, Unknown}


# --- Other clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor_returns_response_model(mode: instructor.Mode, client: openai.OpenAI) -> None:
    made = instructor.from_openai(client, mode=mode)
    result = made.create(model=MODEL, response_model=Count, max_retries=0, messages=MESSAGES, max_tokens=100)
    assert isinstance(result, Count)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_returns_tool_calls(method: Any, uses_responses: bool, tool_server: Server) -> None:
    llm = ChatOpenAI(
        base_url=tool_server.v1, api_key="none", model=MODEL, use_responses_api=uses_responses, max_retries=0
    )
    assert isinstance(llm.with_structured_output(Count, method=method).invoke(PROMPT), Count)
    bound = llm.bind_tools([TOOL], tool_choice="tell")
    (call,) = bound.invoke(PROMPT).tool_calls
    assert (call["name"], 0 <= call["args"]["count"] <= 99) == ("tell", True)
    whole: Any = None
    for chunk in bound.stream(PROMPT):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["tell"]


def test_litellm_returns_valid_tool_calls(tool_server: Server) -> None:
    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": tool_server.v1, "api_key": "none"}
    asked |= {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "tell"}}}
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    assert 0 <= json.loads(call.function.arguments)["count"] <= 99
    chunks = list(litellm.completion(stream=True, **asked))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert 0 <= json.loads(streamed.function.arguments)["count"] <= 99


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput, PromptedOutput])
@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai_returns_output_type(kind: Any, model: Any, tool_server: Server) -> None:
    provider = OpenAIProvider(base_url=tool_server.v1, api_key="none")
    agent = Agent(model(MODEL, provider=provider), output_type=kind(Count), retries=0)
    if kind is PromptedOutput:  # any JSON object, and no schema
        with pytest.raises(Exception, match="retries"):
            agent.run_sync(PROMPT)
    else:
        assert isinstance(agent.run_sync(PROMPT).output, Count)
