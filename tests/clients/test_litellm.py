"""LiteLLM with the providers `openai`, `hosted_vllm` and `text-completion-openai`."""

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH, "num_retries": 0}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def request_arguments(server: Server, provider: str, model: str) -> dict[str, Any]:
    return {"model": f"{provider}/{model}", "api_base": server.v1, "api_key": "none", **GREEDY}


def reply_of(text: str, usage: Any) -> Reply:
    return Reply(text, usage.prompt_tokens, usage.completion_tokens)


def join(chunks: list[Any]) -> Reply:
    return reply_of("".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].usage)


def test_chat_matches_raw_http(server: Server, question: Question) -> None:
    answer = litellm.completion(**request_arguments(server, "openai", question.model), messages=question.messages)
    assert reply_of(answer.choices[0].message.content, answer.usage) == question.chat


def test_streamed_chat_matches_raw_http(server: Server, question: Question) -> None:
    asked = request_arguments(server, "openai", question.model)
    chunks = list(litellm.completion(**asked, messages=question.messages, **WITH_USAGE))
    assert chunks
    assert join(chunks) == question.chat


def test_vllm_provider_matches_raw_http(server: Server, shortest_question: Question) -> None:
    asked = {
        **request_arguments(server, "hosted_vllm", shortest_question.model),
        "messages": shortest_question.messages,
    }
    answer = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, **WITH_USAGE))
    assert reply_of(answer.choices[0].message.content, answer.usage) == join(chunks) == shortest_question.chat


def test_async_chats_match_raw_http(server: Server, shortest_question: Question) -> None:
    async def send_requests() -> tuple[Any, list[Any]]:
        asked = {**request_arguments(server, "openai", shortest_question.model), "messages": shortest_question.messages}
        stream = await litellm.acompletion(**asked, **WITH_USAGE)
        return await litellm.acompletion(**asked), [chunk async for chunk in stream]

    answer, chunks = asyncio.run(send_requests())
    assert reply_of(answer.choices[0].message.content, answer.usage) == join(chunks) == shortest_question.chat


def test_streamed_completion_matches_completion(server: Server, question: Question) -> None:
    asked = {**request_arguments(server, "text-completion-openai", question.model), "prompt": PROMPT}
    answer = litellm.text_completion(**asked)
    assert reply_of(answer.choices[0].text, answer.usage) == question.completion
    chunks = list(litellm.text_completion(**asked, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == question.completion.text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_unknown_model_raises_client_error(provider: str, server: Server, questions: dict[str, Question]) -> None:
    for options in ({}, WITH_USAGE):
        with pytest.raises(litellm.NotFoundError, match=UNKNOWN_MODEL):
            litellm.completion(
                **request_arguments(server, provider, UNKNOWN_MODEL), messages=questions["sql"].messages, **options
            )
