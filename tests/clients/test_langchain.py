"""LangChain: `langchain-openai`."""

import asyncio
from functools import reduce
from operator import add
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server

OPTIONS: dict[str, Any] = {"api_key": SecretStr("none"), "temperature": 0, "max_retries": 0}


def chat_with(server: Server, model: str) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=server.v1, max_completion_tokens=LENGTH, **OPTIONS)


def reply_of(message: Any) -> Reply:
    return Reply(message.content, message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])


def test_chat_matches_raw_http(server: Server, question: Question) -> None:
    assert reply_of(chat_with(server, question.model).invoke(PROMPT)) == question.chat


def test_streamed_chat_matches_raw_http(server: Server, question: Question) -> None:
    chunks = list(chat_with(server, question.model).stream(PROMPT))
    assert chunks
    assert reply_of(reduce(add, chunks)) == question.chat


def test_async_chats_match_raw_http(server: Server, shortest_question: Question) -> None:
    async def send_requests() -> tuple[Any, Any]:
        model = chat_with(server, shortest_question.model)
        return await model.ainvoke(PROMPT), reduce(add, [chunk async for chunk in model.astream(PROMPT)])

    assert [reply_of(message) for message in asyncio.run(send_requests())] == [shortest_question.chat] * 2


def test_batch_matches_raw_http(server: Server, shortest_question: Question) -> None:
    answers = chat_with(server, shortest_question.model).batch([PROMPT] * 3)
    assert [reply_of(answer) for answer in answers] == [shortest_question.chat] * 3


def test_streamed_completion_matches_completion(server: Server, question: Question) -> None:
    model = OpenAI(model=question.model, base_url=server.v1, max_tokens=LENGTH, **OPTIONS)
    assert model.invoke(PROMPT) == "".join(model.stream(PROMPT)) == question.completion.text


def test_unknown_model_raises_client_error(server: Server) -> None:
    model = chat_with(server, UNKNOWN_MODEL)
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        model.invoke(PROMPT)
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        list(model.stream(PROMPT))
