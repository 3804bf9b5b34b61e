"""OpenAI's Python package, sync and async."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


def reply_of(text: str, usage: Any) -> Reply:
    return Reply(text, usage.prompt_tokens, usage.completion_tokens)


def join_chats(chunks: list[Any]) -> Reply:
    return reply_of(
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks[-1].usage
    )


def test_models_are_listed(client: openai.OpenAI, question: Question) -> None:
    assert question.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(question.model).id == question.model


def test_chat_matches_raw_http(client: openai.OpenAI, question: Question) -> None:
    answer = client.chat.completions.create(model=question.model, messages=question.messages, **GREEDY)
    assert reply_of(answer.choices[0].message.content or "", answer.usage) == question.chat
    assert answer.model == question.model


def test_streamed_chat_matches_raw_http(client: openai.OpenAI, question: Question) -> None:
    chunks = list(
        client.chat.completions.create(model=question.model, messages=question.messages, **GREEDY, **WITH_USAGE)
    )
    assert chunks
    assert join_chats(chunks) == question.chat


def test_stream_helper_matches_raw_http(client: openai.OpenAI, shortest_question: Question) -> None:
    with client.chat.completions.stream(
        model=shortest_question.model, messages=shortest_question.messages, **GREEDY
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content == shortest_question.chat.text


def test_completion_matches_raw_http(client: openai.OpenAI, question: Question) -> None:
    answer = client.completions.create(model=question.model, prompt=PROMPT, **GREEDY)
    assert reply_of(answer.choices[0].text, answer.usage) == question.completion


def test_streamed_completion_matches_raw_http(client: openai.OpenAI, question: Question) -> None:
    chunks = list(client.completions.create(model=question.model, prompt=PROMPT, **GREEDY, **WITH_USAGE))
    assert reply_of("".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage) == (
        question.completion
    )


def test_concurrent_requests_to_all_models_match_raw_http(server: Server, questions: dict[str, Question]) -> None:
    """Run requests with and without streaming for all models concurrently."""

    async def whole(client: openai.AsyncOpenAI, each_question: Question) -> Reply:
        answer = await client.chat.completions.create(
            model=each_question.model, messages=each_question.messages, **GREEDY
        )
        return reply_of(answer.choices[0].message.content or "", answer.usage)

    async def streamed(client: openai.AsyncOpenAI, each_question: Question) -> Reply:
        stream = await client.chat.completions.create(
            model=each_question.model, messages=each_question.messages, **GREEDY, **WITH_USAGE
        )
        return join_chats([chunk async for chunk in stream])

    async def run_all() -> list[Reply]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(
                    send_requests(client, each_question)
                    for each_question in questions.values()
                    for send_requests in (whole, streamed)
                )
            )

    assert asyncio.run(run_all()) == [each_question.chat for each_question in questions.values() for _ in range(2)]


def test_unknown_model_raises_client_error(
    client: openai.OpenAI, server: Server, questions: dict[str, Question]
) -> None:
    messages = questions["sql"].messages
    for options in ({}, WITH_USAGE):
        with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
            client.chat.completions.create(model=UNKNOWN_MODEL, messages=messages, **options)

    async def send_requests() -> None:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as other:
            await other.chat.completions.create(model=UNKNOWN_MODEL, messages=messages)

    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        asyncio.run(send_requests())


def test_tools_without_template_support_are_rejected(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match=r"`tools`.*template"):
        client.chat.completions.create(model="sql", messages=[{"role": "user", "content": PROMPT}], tools=[tool])


def test_responses_api_matches_raw_http_chat(client: openai.OpenAI, question: Question) -> None:
    each_question: dict[str, Any] = {
        "model": question.model,
        "input": PROMPT,
        "temperature": 0,
        "max_output_tokens": LENGTH,
    }
    whole = client.responses.create(**each_question)
    assert whole.usage is not None
    assert Reply(whole.output_text, whole.usage.input_tokens, whole.usage.output_tokens) == question.chat
    with client.responses.stream(**each_question) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == question.chat.text
    assert deltas
    assert "".join(deltas) == question.chat.text


def test_responses_are_not_stored(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="sql", input=PROMPT, previous_response_id="resp_1")
