"""LlamaIndex: `llama-index-llms-openai-like`."""

import asyncio
from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server

MESSAGES = [ChatMessage(role="user", content=PROMPT)]


def make_client(server: Server, model: str, is_chat_model: bool = True) -> OpenAILike:
    return OpenAILike(
        model=model,
        api_base=server.v1,
        api_key="none",
        is_chat_model=is_chat_model,
        temperature=0,
        max_tokens=LENGTH,
        max_retries=0,
    )


def reply_of(text: str, raw: Any) -> Reply:
    return Reply(text, raw.usage.prompt_tokens, raw.usage.completion_tokens)


def test_chat_matches_raw_http(server: Server, question: Question) -> None:
    answer = make_client(server, question.model).chat(MESSAGES)
    assert reply_of(answer.message.content or "", answer.raw) == question.chat


def test_streamed_chat_matches_raw_http(server: Server, question: Question) -> None:
    pieces = list(make_client(server, question.model).stream_chat(MESSAGES))
    assert pieces
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content == question.chat.text


def test_async_chats_match_raw_http(server: Server, shortest_question: Question) -> None:
    async def send_requests() -> tuple[str | None, list[str]]:
        model = make_client(server, shortest_question.model)
        answer = await model.achat(MESSAGES)
        return answer.message.content, [piece.delta or "" async for piece in await model.astream_chat(MESSAGES)]

    whole, pieces = asyncio.run(send_requests())
    assert whole == "".join(pieces) == shortest_question.chat.text


def test_streamed_completion_matches_completion(server: Server, question: Question) -> None:
    model = make_client(server, question.model, is_chat_model=False)
    answer = model.complete(PROMPT)
    assert reply_of(answer.text, answer.raw) == question.completion
    pieces = list(model.stream_complete(PROMPT))
    assert "".join(piece.delta or "" for piece in pieces) == question.completion.text


def test_unknown_model_raises_client_error(server: Server) -> None:
    model = make_client(server, UNKNOWN_MODEL)
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        model.chat(MESSAGES)
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        list(model.stream_chat(MESSAGES))
