"""Pydantic AI with text completions. test_tools.py covers tools and structured output."""

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server


def make_agent(server: Server, model: str, **options: Any) -> Agent[None, Any]:
    provider = OpenAIProvider(base_url=server.v1, api_key="none")
    settings: Any = {"temperature": 0, "max_tokens": LENGTH}
    return Agent(OpenAIChatModel(model, provider=provider), model_settings=settings, **options)


def reply_of(text: str, usage: Any) -> Reply:
    return Reply(text, usage.input_tokens, usage.output_tokens)


def test_run_matches_raw_http_chat(server: Server, question: Question) -> None:
    result = make_agent(server, question.model).run_sync(PROMPT)
    assert reply_of(result.output, result.usage) == question.chat


def test_streamed_run_matches_run(server: Server, question: Question) -> None:
    async def run() -> tuple[list[str], Any]:
        async with make_agent(server, question.model).run_stream(PROMPT) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)], result.usage

    texts, usage = asyncio.run(run())
    assert texts
    assert reply_of("".join(texts), usage) == question.chat


def test_unknown_model_raises_client_error(server: Server) -> None:
    with pytest.raises(ModelHTTPError, match=UNKNOWN_MODEL) as caught:
        make_agent(server, UNKNOWN_MODEL).run_sync(PROMPT)
    assert caught.value.status_code == 404
