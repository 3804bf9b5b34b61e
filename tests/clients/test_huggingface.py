"""huggingface_hub's `InferenceClient`: `text_generation` (LoRAX and TGI route) and `chat_completion` (OpenAI route)."""

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, ValidationError

from tests.clients.conftest import BASE, LENGTH, PROMPT, UNKNOWN_MODEL, Question, Reply, Server

END = "<|end|>"  # this client includes the EOS token, as with TGI


@pytest.fixture
def native(server: Server) -> InferenceClient:
    return InferenceClient(server.url)


@pytest.fixture
def chats(server: Server) -> InferenceClient:
    return InferenceClient(base_url=server.v1)


def generate_arguments(question: Question) -> dict[str, Any]:
    """Return the request arguments. The base model has no `adapter_id`."""
    adapter = None if question.model == BASE else question.model
    return {"prompt": PROMPT, "max_new_tokens": LENGTH, "adapter_id": adapter}


def test_text_generation_matches_raw_http(native: InferenceClient, question: Question) -> None:
    answer = native.text_generation(**generate_arguments(question), details=True, decoder_input_details=True)
    assert answer.generated_text == question.completion.text
    assert answer.details is not None
    assert answer.details.generated_tokens == question.completion.completion_tokens
    assert len(answer.details.prefill) == question.completion.prompt_tokens


def test_streamed_text_matches_raw_http(native: InferenceClient, question: Question) -> None:
    events = list(native.text_generation(**generate_arguments(question), stream=True, details=True))
    assert len(events) == question.completion.completion_tokens
    assert "".join(event.token.text for event in events if not event.token.special) == question.completion.text
    assert events[-1].generated_text == question.completion.text


def test_text_without_details_matches_raw_http(native: InferenceClient, shortest_question: Question) -> None:
    texts = list(native.text_generation(**generate_arguments(shortest_question), stream=True))
    assert (
        native.text_generation(**generate_arguments(shortest_question))
        == "".join(texts).removesuffix(END)
        == shortest_question.completion.text
    )


def test_async_text_matches_raw_http(server: Server, shortest_question: Question) -> None:
    async def send_requests() -> tuple[str, list[str]]:
        async with AsyncInferenceClient(server.url) as client:
            stream = await client.text_generation(**generate_arguments(shortest_question), stream=True)
            return await client.text_generation(**generate_arguments(shortest_question)), [
                text async for text in stream
            ]

    whole, texts = asyncio.run(send_requests())
    assert whole == "".join(texts).removesuffix(END) == shortest_question.completion.text


def chat(client: InferenceClient, question: Question, **options: Any) -> Any:
    return client.chat_completion(question.messages, model=question.model, temperature=0, max_tokens=LENGTH, **options)


def reply_of(text: str, usage: Any) -> Reply:
    return Reply(text, usage.prompt_tokens, usage.completion_tokens)


def test_chat_matches_raw_http(chats: InferenceClient, question: Question) -> None:
    answer = chat(chats, question)
    assert reply_of(answer.choices[0].message.content, answer.usage) == question.chat


def test_streamed_chat_matches_raw_http(chats: InferenceClient, question: Question) -> None:
    chunks = list(chat(chats, question, stream=True, stream_options={"include_usage": True}))
    assert chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert reply_of(text, chunks[-1].usage) == question.chat


def test_unknown_model_raises_client_error(native: InferenceClient, chats: InferenceClient) -> None:
    with pytest.raises(GenerationError, match=UNKNOWN_MODEL):
        native.text_generation(PROMPT, adapter_id=UNKNOWN_MODEL)
    with pytest.raises(GenerationError, match=UNKNOWN_MODEL):
        list(native.text_generation(PROMPT, adapter_id=UNKNOWN_MODEL, stream=True))
    with pytest.raises(HfHubHTTPError, match=UNKNOWN_MODEL) as caught:
        chats.chat_completion([{"role": "user", "content": PROMPT}], model=UNKNOWN_MODEL)
    assert caught.value.response.status_code == 404


def test_unsupported_grammar_error_names_field(native: InferenceClient) -> None:
    grammar: Any = {"type": "regex", "value": "[0-9]+"}
    with pytest.raises(ValidationError, match="grammar"):
        native.text_generation(PROMPT, adapter_id="sql", grammar=grammar)
