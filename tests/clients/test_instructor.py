"""instructor with text completions. test_tools.py covers structured output."""

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pytest

from tests.clients.conftest import LENGTH, UNKNOWN_MODEL, Question, Server

TEXT: dict[str, Any] = {"response_model": None, "temperature": 0, "max_tokens": LENGTH}


@pytest.fixture
def client(server: Server) -> Iterator[instructor.Instructor]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield instructor.from_openai(client)


def test_chat_matches_raw_http(client: Any, question: Question) -> None:
    answer = client.create(model=question.model, messages=question.messages, **TEXT)
    assert answer.choices[0].message.content == question.chat.text
    assert answer.usage.prompt_tokens == question.chat.prompt_tokens
    assert answer.usage.completion_tokens == question.chat.completion_tokens


def test_streamed_chat_matches_raw_http(client: Any, question: Question) -> None:
    chunks = client.create(model=question.model, messages=question.messages, stream=True, **TEXT)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert texts
    assert "".join(texts) == question.chat.text


def test_client_can_be_created_from_provider_name(server: Server, shortest_question: Question) -> None:
    client = instructor.from_provider(f"openai/{shortest_question.model}", base_url=server.v1, api_key="none")
    answer: Any = client.create(messages=shortest_question.messages, **TEXT)
    assert answer.choices[0].message.content == shortest_question.chat.text


def test_unknown_model_raises_client_error(client: Any, questions: dict[str, Question]) -> None:
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        client.create(model=UNKNOWN_MODEL, messages=questions["sql"].messages, **TEXT)
