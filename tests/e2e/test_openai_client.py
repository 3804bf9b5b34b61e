"""Tests the published OpenAI Python SDK against the server: completions, chat, models and errors."""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai
import pytest
import torch

from tests.e2e.http_server import Server, ids_of, make_tokenizer, serving, with_adapter, write_model
from tests.parity.oracle import oracle_greedy, oracle_logits

pytestmark = pytest.mark.slow  # test_openai_routes.py covers the same routes
PROMPT = "The quick brown fox"
NEW_TOKENS = 12
GREEDY: dict[str, Any] = {"max_tokens": NEW_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
SAMPLED: dict[str, Any] = GREEDY | {"temperature": 1.0}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]},
]
RENDERED = "[system] Be brief.\n[user] Hi\n[assistant] Hello\n[user] Who are you?\n[assistant] "


class Sdk:
    """The sync or async SDK with one interface, without retries."""

    def __init__(self, server: Server, is_async: bool, key: str = "none") -> None:
        make = openai.AsyncOpenAI if is_async else openai.OpenAI
        self._client: Any = make(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        self._runner = asyncio.Runner()

    def call(self, send_request: Callable[[Any], Any]) -> Any:
        """Return the SDK response, or the list of chunks for a stream."""
        response = send_request(self._client)
        if inspect.isawaitable(response):
            return self._runner.run(self._finish(response))
        return list(response) if isinstance(response, openai.Stream) else response

    def complete(self, prompt: Any = PROMPT, **more: Any) -> Any:
        arguments = {"model": "", **GREEDY, **more}
        return self.call(lambda client: client.completions.create(prompt=prompt, **arguments))

    def chat(self, messages: Any = None, **more: Any) -> Any:
        arguments = {"model": "", **GREEDY, **more}
        return self.call(lambda client: client.chat.completions.create(messages=messages or MESSAGES, **arguments))

    async def _finish(self, response: Any) -> Any:
        response = await response
        if isinstance(response, openai.AsyncStream):
            return [chunk async for chunk in response]
        return response

    def close(self) -> None:
        self.call(lambda client: client.close())
        self._runner.close()


class ServerAndModels(NamedTuple):
    server: Server
    models: dict[str, Any]

    def greedy(self, prompt: str = PROMPT, adapter: str = "") -> list[int]:
        return oracle_greedy(self.models[adapter], ids_of([prompt])[0], NEW_TOKENS, {})

    def text(self, prompt: str = PROMPT, adapter: str = "") -> str:
        """Return the greedy text from transformers, up to the first numerical tie."""
        return str(make_tokenizer().decode(self.greedy(prompt, adapter), skip_special_tokens=True)).rstrip("\ufffd")

    def logprobs(self, ids: list[int], num_prompt: int, adapter: str = "") -> torch.Tensor:
        return oracle_logits(self.models[adapter], ids, num_prompt, {}).log_softmax(-1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAndModels]:
    folder = tmp_path_factory.mktemp("world")
    model = write_model(folder)
    models = {"": model} | {name: with_adapter(model, folder / "adapters" / name) for name in ("first", "second")}
    with serving(folder) as server:
        yield ServerAndModels(server, models)


@pytest.fixture(params=["OpenAI", "AsyncOpenAI"])
def sdk(request: pytest.FixtureRequest, world: ServerAndModels) -> Iterator[Sdk]:
    made = Sdk(world.server, request.param == "AsyncOpenAI")
    yield made
    made.close()


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Join the text of stream chunks."""
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join([(choice.text if hasattr(choice, "text") else choice.delta.content) or "" for choice in choices])


# --- Completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["", "first", "second"])
def test_completion_matches_transformers_and_peft(adapter: str, world: ServerAndModels, sdk: Sdk) -> None:
    expected = world.text(adapter=adapter)
    response = sdk.complete(model=adapter)
    assert len(expected) > 4
    assert response.choices[0].text.startswith(expected)
    assert response.choices[0].finish_reason == "length"
    assert response.object == "text_completion"
    assert (response.model == adapter) or not adapter
    num_prompt = len(ids_of([PROMPT])[0])
    assert response.usage.prompt_tokens == num_prompt
    assert response.usage.completion_tokens == NEW_TOKENS
    assert response.usage.total_tokens == num_prompt + NEW_TOKENS
    chunks = sdk.complete(model=adapter, stream=True)
    assert text_of(chunks) == response.choices[0].text
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {response.id}
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_all_prompt_forms_are_accepted(world: ServerAndModels, sdk: Sdk) -> None:
    prompts = [PROMPT, "def answer"]
    ids = ids_of(prompts)
    alone = [sdk.complete(prompt).choices[0].text for prompt in prompts]
    assert alone[0].startswith(world.text())
    assert sdk.complete(ids[0]).choices[0].text == alone[0]
    for several in (prompts, ids):
        response = sdk.complete(several)
        assert [choice.text for choice in response.choices] == alone
        assert [choice.index for choice in response.choices] == [0, 1]
        assert response.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        chunks = sdk.complete(several, stream=True)
        assert [text_of(chunks, index) for index in (0, 1)] == alone


def test_n_and_best_of_return_sorted_completions(sdk: Sdk) -> None:
    how = SAMPLED | {"seed": 5, "logprobs": 0}
    response = sdk.complete(n=3, **how)
    texts = [choice.text for choice in response.choices]
    assert len(set(texts)) == 3
    assert response.usage.completion_tokens == 3 * NEW_TOKENS
    assert sdk.complete(**how).choices[0].text == texts[0]
    means = [sum(choice.logprobs.token_logprobs) for choice in response.choices]
    assert means != sorted(means, reverse=True)  # otherwise the next check would be trivial
    ranked = [text for _, text in sorted(zip(means, texts, strict=True), reverse=True)]
    assert [choice.text for choice in sdk.complete(n=2, best_of=3, **how).choices] == ranked[:2]
    chunks = sdk.complete(n=3, stream=True, echo=True, **how)
    assert [text_of(chunks, index) for index in range(3)] == [PROMPT + text for text in texts]


@pytest.mark.parametrize("adapter", ["", "first"])
def test_logprobs_ignore_sampling_parameters(adapter: str, world: ServerAndModels, sdk: Sdk) -> None:
    prompt = ids_of([PROMPT])[0]
    drawn = SAMPLED | {"temperature": 0.4, "top_p": 0.7, "frequency_penalty": 1.5, "seed": 1}
    choice = sdk.complete(model=adapter, echo=True, logprobs=3, **drawn).choices[0]
    assert choice.text.startswith(PROMPT)
    names = [str(make_tokenizer().decode([i])) for i in range(len(make_tokenizer()))]
    logs = choice.logprobs
    assert logs.tokens[: len(prompt)] == [names[i] for i in prompt]
    assert (logs.token_logprobs[0], logs.top_logprobs[0]) == (None, None)
    assert logs.text_offset[: len(prompt) + 1] == [0, *_end_offsets([names[i] for i in prompt])]
    ids = _choose_ids(world, adapter, prompt, logs, names)
    expected = world.logprobs(ids, len(prompt), adapter)
    for place in range(1, len(ids)):
        assert logs.token_logprobs[place] == pytest.approx(float(expected[place - 1, ids[place]]), abs=1e-3)
    for place in range(len(prompt), len(ids)):
        best = expected[place - 1].topk(3)
        wanted = {names[int(i)]: float(value) for i, value in zip(best.indices, best.values, strict=True)}
        actual = logs.top_logprobs[place]
        assert actual[logs.tokens[place]] == logs.token_logprobs[place]
        for name, value in wanted.items():
            if name != "\ufffd":  # ambiguous
                assert actual[name] == pytest.approx(value, abs=1e-3)


def _end_offsets(texts: list[str]) -> list[int]:
    return [sum(map(len, texts[: i + 1])) for i in range(len(texts))]


def _choose_ids(world: ServerAndModels, adapter: str, prompt: list[int], logs: Any, names: list[str]) -> list[int]:
    """Return token IDs by token text. Ambiguous texts are resolved by log probability."""
    ids = list(prompt)
    for name, value in list(zip(logs.tokens, logs.token_logprobs, strict=True))[len(prompt) :]:
        at = world.logprobs(ids, len(prompt), adapter)[-1]
        ids.append(min((i for i, each in enumerate(names) if each == name), key=lambda i: abs(float(at[i]) - value)))
    return ids


def test_echo_scores_prompt_without_generation(world: ServerAndModels, sdk: Sdk) -> None:
    prompt = ids_of([PROMPT])[0]
    for given in (PROMPT, prompt):
        response = sdk.complete(given, max_tokens=0, echo=True, logprobs=1)
        (choice,) = response.choices
        assert choice.text == PROMPT
        expected = world.logprobs(prompt, len(prompt))[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.flatten().tolist(), abs=1e-3)
        assert response.usage.completion_tokens == 0
        assert response.usage.total_tokens == len(prompt)


def test_logit_bias_forces_and_bans_tokens(world: ServerAndModels, sdk: Sdk) -> None:
    forced = ids_of(["g"])[0][0]
    assert sdk.complete(logit_bias={str(forced): 100}).choices[0].text == "g" * NEW_TOKENS
    first = world.greedy()[0]
    banned = sdk.complete(logit_bias={str(first): -100}, logprobs=0, max_tokens=1).choices[0]
    at = world.logprobs(ids_of([PROMPT])[0], len(ids_of([PROMPT])[0]))[-1]
    assert banned.logprobs.token_logprobs[0] == pytest.approx(float(at.topk(2).values[1]), abs=1e-3)
    ended = sdk.complete(logit_bias={str(make_tokenizer().eos_token_id): 100}, extra_body=None)
    assert (ended.choices[0].text, ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("", "stop", 1)


def test_stop_string_is_excluded_from_text(sdk: Sdk) -> None:
    whole = sdk.complete().choices[0].text
    stop = whole[3:5]
    for given in (stop, ["never to be seen", stop]):
        response = sdk.complete(stop=given)
        assert response.choices[0].text == whole[: whole.index(stop)]
        assert response.choices[0].finish_reason == "stop"
        chunks = sdk.complete(stop=given, stream=True)
        assert text_of(chunks) == response.choices[0].text
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_only_seeded_completions_are_reproducible(sdk: Sdk) -> None:
    for seed in (0, -5, 2**63 - 1):
        texts = {sdk.complete(seed=seed, **SAMPLED).choices[0].text for _ in range(2)}
        assert len(texts) == 1
    assert sdk.complete(**SAMPLED).choices[0].text != sdk.complete(**SAMPLED).choices[0].text
    assert sdk.complete(max_tokens=None).usage.completion_tokens == 16


# --- Chat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["", "second"])
def test_chat_matches_completion_of_rendered_template(adapter: str, world: ServerAndModels, sdk: Sdk) -> None:
    response = sdk.chat(model=adapter)
    (choice,) = response.choices
    expected = world.text(RENDERED, adapter)
    assert len(expected) > 4
    assert choice.message.content.startswith(expected)
    assert choice.message.role == "assistant"
    assert response.object == "chat.completion"
    assert response.usage.prompt_tokens == len(ids_of([RENDERED])[0])
    assert sdk.complete(RENDERED, model=adapter).choices[0].text == choice.message.content
    chunks = sdk.chat(model=adapter, stream=True)
    assert text_of(chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == NEW_TOKENS


def test_stream_usage_comes_last_if_requested(sdk: Sdk) -> None:
    for send_request in (sdk.chat, sdk.complete):
        *chunks, last = send_request(stream=True, stream_options={"include_usage": True})
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage.completion_tokens == NEW_TOKENS
        assert last.usage.total_tokens == last.usage.prompt_tokens + NEW_TOKENS
        chunks = send_request(stream=True, stream_options={"include_usage": False})
        assert not any(chunk.usage for chunk in chunks)


def test_chat_returns_n_choices(sdk: Sdk) -> None:
    response = sdk.chat(n=3, seed=11, **SAMPLED)
    texts = [choice.message.content for choice in response.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.usage.completion_tokens == 3 * NEW_TOKENS
    chunks = sdk.chat(n=3, seed=11, stream=True, **SAMPLED)
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason) == [0, 1, 2]


def test_chat_logprobs_include_bytes(world: ServerAndModels, sdk: Sdk) -> None:
    choice = sdk.chat(logprobs=True, top_logprobs=4, **SAMPLED | {"temperature": 0.5, "seed": 2}).choices[0]
    content = choice.logprobs.content
    assert len(content) == NEW_TOKENS
    assert bytes(b for token in content for b in token.bytes).decode(errors="replace") == choice.message.content
    prompt = ids_of([RENDERED])[0]
    best = world.logprobs(prompt, len(prompt))[-1].topk(4)
    assert [token.logprob for token in content[0].top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-3)
    for token in content:
        assert len(token.top_logprobs) == 4
        assert all(math.isfinite(each.logprob) for each in token.top_logprobs)
        assert bytes(token.bytes).decode(errors="replace") == token.token
    chunks = sdk.chat(logprobs=True, top_logprobs=4, stream=True, **SAMPLED | {"temperature": 0.5, "seed": 2})
    logs = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token.bytes for each in logs for token in each.content] == [token.bytes for token in content]
    assert sdk.chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert sdk.chat().choices[0].logprobs is None


def test_max_completion_tokens_overrides_max_tokens(sdk: Sdk) -> None:
    assert sdk.chat(max_tokens=None, max_completion_tokens=3).usage.completion_tokens == 3
    assert sdk.chat(max_tokens=9, max_completion_tokens=3).usage.completion_tokens == 3
    assert sdk.chat(max_tokens=None).usage.total_tokens == 128


def test_chat_stop_string_is_excluded_from_text(sdk: Sdk) -> None:
    whole = sdk.chat().choices[0].message.content
    stop = whole[3:5]
    response = sdk.chat(stop=[stop])
    assert response.choices[0].message.content == whole[: whole.index(stop)]
    assert response.choices[0].finish_reason == "stop"
    assert text_of(sdk.chat(stop=stop, stream=True)) == response.choices[0].message.content


# --- Models and headers -----------------------------------------------------------------------------------------------


def test_models_can_be_listed_and_retrieved(world: ServerAndModels, sdk: Sdk) -> None:
    listed = list(sdk.call(lambda client: client.models.list()).data)
    base = listed[0].id
    assert [model.id for model in listed] == [base, "first", "second"]
    assert [model.parent for model in listed] == [None, base, base]
    assert sdk.call(lambda client: client.models.retrieve("second")).id == "second"
    assert sdk.call(lambda client: client.models.retrieve(base)).id == base
    assert sdk.complete(model=base).choices[0].text == sdk.complete(model="").choices[0].text
    with pytest.raises(openai.NotFoundError, match="'third' does not exist"):
        sdk.call(lambda client: client.models.retrieve("third"))


def test_headers_have_request_id_and_adapter_hash(sdk: Sdk) -> None:
    def send_request(**more: Any) -> Any:
        arguments = {"model": "first", "prompt": PROMPT, **GREEDY, **more}
        return sdk.call(lambda client: client.completions.with_raw_response.create(**arguments))

    response = send_request(extra_headers={"X-Request-ID": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert len(response.headers["x-adapter-hash"]) == 64
    assert response.headers["x-adapter-id"] == "first"
    assert response.parse().choices[0].finish_reason == "length"
    assert "x-adapter-hash" not in send_request(model="").headers
    assert send_request().headers["x-request-id"] != send_request().headers["x-request-id"]


# --- Errors -----------------------------------------------------------------------------------------------------------

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [TOOL]}, "`tools`: the model's chat template does not render tools"),
        ({"tools": [TOOL], "stream": True}, "`tools`: the model's chat template does not render tools"),
        (
            {"response_format": {"type": "xml"}},
            "`response_format.type` must be 'text', 'json_object' or 'json_schema' (got 'xml')",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "image_url"),
        ({"temperature": 2.5}, "`temperature` must be >= 0 and <= 2"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 1000}, "at most 128 completions"),
        ({"logit_bias": {"a": 1}}, "`logit_bias` keys must be token ids"),
        ({"logit_bias": {"99999": 1}}, "`logit_bias` has tokens beyond the vocabulary"),
        ({"top_logprobs": 2}, "`top_logprobs` requires `logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "`top_logprobs` must be <= 20"),
        ({"stop": list("abcde")}, "`stop` supports up to 4"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 1000}, "must be <= 128"),
        ({"messages": [{"role": "user", "content": "very " * 200}]}, "must be <= 128"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_unsupported_requests_are_rejected(arguments: dict[str, Any], message: str, sdk: Sdk) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)) as caught:
        sdk.chat(**arguments)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_empty_messages_and_prompts_are_rejected(sdk: Sdk) -> None:
    with pytest.raises(openai.BadRequestError, match="`messages` must not be empty"):
        sdk.call(lambda client: client.chat.completions.create(model="", messages=[]))
    prompts: list[Any] = ["", [], [""], [[]]]
    for prompt in prompts:
        with pytest.raises(openai.BadRequestError, match="`prompt` must not be empty"):
            sdk.complete(prompt)
    for ids in ([300_000], [-1], [[1], [2**40]]):
        with pytest.raises(openai.BadRequestError):
            sdk.complete(ids)


def test_embeddings_and_unknown_models_raise_errors(sdk: Sdk) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings; it is served for text generation"):
        sdk.call(lambda client: client.embeddings.create(model="", input="a"))
    for is_streamed in (False, True):
        with pytest.raises(openai.NotFoundError, match="'nobody'") as caught:
            sdk.chat(model="nobody", stream=is_streamed)
        assert caught.value.code == "model_not_found"


def test_deadline_header_is_enforced(sdk: Sdk) -> None:
    for is_streamed in (False, True):
        with pytest.raises(openai.InternalServerError, match="timed out after") as caught:
            sdk.chat(stream=is_streamed, extra_headers={"x-request-timeout": "0.000001"})
        assert caught.value.status_code == 504
