"""OpenAI's Agents SDK: functions and structured output, with the responses API (default) and the chat API."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, RunConfig, Runner, StopAtTools, function_tool
from agents.models.openai_provider import OpenAIProvider

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Server
from tests.clients.test_tools import MODEL, Count, Number

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 100}


@asynccontextmanager
async def configured(server: Server, by_responses: bool) -> AsyncIterator[RunConfig]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=by_responses)
        yield RunConfig(model_provider=provider, tracing_disabled=True)


def count_kites(count: Number) -> str:
    """Report the number of kites."""
    return f"{count} kites"


COUNT_TOOL = function_tool(count_kites)


def run(agent: Agent[Any], server: Server, by_responses: bool, is_streamed: bool) -> tuple[Any, list[str]]:
    """Run an agent. Return its result and the stream event types."""

    async def act() -> tuple[Any, list[str]]:
        async with configured(server, by_responses) as config:
            if not is_streamed:
                return await Runner.run(agent, PROMPT, run_config=config), []
            result = Runner.run_streamed(agent, PROMPT, run_config=config)
            return result, [
                event.data.type async for event in result.stream_events() if event.type == "raw_response_event"
            ]

    return asyncio.run(act())


@pytest.fixture(params=[True, False], ids=["responses", "chats"])
def by_responses(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_agent_run_matches_raw_http(
    server: Server, shortest_question: Question, by_responses: bool, is_streamed: bool
) -> None:
    agent = Agent(
        "teller", model=shortest_question.model, model_settings=ModelSettings(temperature=0, max_tokens=LENGTH)
    )
    result, kinds = run(agent, server, by_responses, is_streamed)
    assert result.final_output == shortest_question.chat.text
    usage = result.context_wrapper.usage
    assert (usage.input_tokens, usage.output_tokens) == (
        shortest_question.chat.prompt_tokens,
        shortest_question.chat.completion_tokens,
    )
    assert ("response.output_text.delta" in kinds) == is_streamed


def test_agent_returns_output_type(tool_server: Server, by_responses: bool, is_streamed: bool) -> None:
    agent = Agent("teller", model=MODEL, output_type=Count, model_settings=ModelSettings(**SETTINGS))
    result, _ = run(agent, tool_server, by_responses, is_streamed)
    assert isinstance(result.final_output, Count)


@pytest.mark.parametrize("choice", ["required", "count_kites"])
def test_forced_function_call_returns_valid_arguments(
    tool_server: Server, by_responses: bool, is_streamed: bool, choice: str
) -> None:
    settings = ModelSettings(**SETTINGS, tool_choice=choice, parallel_tool_calls=False)
    stops = StopAtTools(stop_at_tool_names=["count_kites"])
    agent = Agent("teller", model=MODEL, tools=[COUNT_TOOL], model_settings=settings, tool_use_behavior=stops)
    result, kinds = run(agent, tool_server, by_responses, is_streamed)
    number, word = result.final_output.split()
    assert (0 <= int(number) <= 99, word) == (True, "kites")
    assert ("response.function_call_arguments.delta" in kinds) == is_streamed


def test_agent_continues_after_function_result(tool_server: Server, by_responses: bool, is_streamed: bool) -> None:
    """Run the full loop: a call, its result, and a final structured completion."""
    settings = ModelSettings(**SETTINGS, tool_choice="required")
    agent = Agent("teller", model=MODEL, tools=[COUNT_TOOL], model_settings=settings, output_type=Count)
    result, _ = run(agent, tool_server, by_responses, is_streamed)
    assert isinstance(result.final_output, Count)
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert kinds[-1] == "message_output_item"


def test_unknown_model_raises_client_error(server: Server, by_responses: bool) -> None:
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        run(Agent("teller", model=UNKNOWN_MODEL), server, by_responses, False)
