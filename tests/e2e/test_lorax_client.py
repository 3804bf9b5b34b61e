"""Tests the published LoRAX Python client against the server."""

import asyncio
import copy
import http.client
import json
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import lorax
import pytest
import torch
from lorax.errors import GenerationError, OverloadedError, ShardTimeoutError, ValidationError
from peft import PeftModel

from tests.e2e.http_server import Server, ids_of, serving, write_model, write_variant_adapter
from tests.e2e.test_architectures import (
    LENGTH,
    NEW_TOKENS,
    PROMPT,
    LoraxClient,
    greedy,
    make_models,
    text_of,
    token_ids,
)
from tests.parity.oracle import oracle_logits

pytestmark = [
    pytest.mark.slow,  # test_lorax_routes.py covers the same routes
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),  # the client calls it
]


class ServerAndModels(NamedTuple):
    folder: Path
    server: Server
    models: dict[str | None, Any]  # transformers models by adapter name

    def greedy(self, prompt: str = PROMPT, adapter: str | None = None) -> list[int]:
        return greedy(self.models[adapter], ids_of([prompt])[0])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAndModels]:
    folder = tmp_path_factory.mktemp("world")
    models = make_models(folder)
    write_variant_adapter(folder / "adapters" / "first", folder / "adapters" / "other")
    with serving(folder) as server:
        yield ServerAndModels(folder, server, models)


@pytest.fixture(params=["Client", "AsyncClient"])
def client(request: pytest.FixtureRequest, world: ServerAndModels) -> Iterator[LoraxClient]:
    both = LoraxClient(world.server, request.param == "AsyncClient")
    yield both
    both.close()


# --- Options ----------------------------------------------------------------------------------------------------------


def test_details_can_be_disabled(world: ServerAndModels, client: LoraxClient) -> None:
    reply = client.generate(details=False)
    assert reply.details is None
    assert reply.generated_text == client.generate().generated_text
    events = client.stream(details=False)
    assert [event.details for event in events] == [None] * NEW_TOKENS
    assert events[-1].generated_text == reply.generated_text


def test_unlimited_completion_stops_at_eos_or_context_length(client: LoraxClient) -> None:
    details = client.generate(max_new_tokens=None).details
    assert details.prompt_tokens + details.generated_tokens == 128
    ended = client.generate(max_new_tokens=None, ignore_eos_token=False).details
    assert ended.finish_reason in ("length", "eos_token")


def test_best_of_returns_all_sequences(client: LoraxClient) -> None:
    details = client.generate(best_of=2, do_sample=True).details
    (other,) = details.best_of_sequences
    assert details.seed is not None
    assert details.seed != other.seed
    means = [sum(token.logprob for token in each.tokens) / NEW_TOKENS for each in (details, other)]
    assert means[0] >= means[1]
    assert text_of(other.tokens) == other.generated_text
    assert token_ids(client.generate(do_sample=True, seed=other.seed)) == [token.id for token in other.tokens]


def test_alternatives_are_most_likely_tokens(world: ServerAndModels, client: LoraxClient) -> None:
    prompt = ids_of([PROMPT])[0]
    tokens = client.generate(return_k_alternatives=3).details.tokens
    ids = [*prompt, *[token.id for token in tokens]]
    logprobs = oracle_logits(world.models[None], ids, len(prompt), {}).log_softmax(-1)
    for place, token in enumerate(tokens):
        best = logprobs[len(prompt) - 1 + place].topk(3)
        assert [each.id for each in token.alternative_tokens] == best.indices.tolist()
        assert [each.logprob for each in token.alternative_tokens] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert token.logprob == token.alternative_tokens[0].logprob
    assert client.generate().details.tokens[0].alternative_tokens is None


def test_async_stream_includes_alternatives(world: ServerAndModels) -> None:
    events = LoraxClient(world.server, is_async=True).stream(return_k_alternatives=2)
    assert all(len(event.token.alternative_tokens) == 2 for event in events)


def test_prompt_logprobs_match_transformers(world: ServerAndModels, client: LoraxClient) -> None:
    prompt = ids_of([PROMPT])[0]
    for details in (True, False):
        prefill = client.generate(decoder_input_details=True, details=details).details.prefill
        assert [token.id for token in prefill] == prompt
        assert "".join([token.text for token in prefill]) == PROMPT
        logprobs = oracle_logits(world.models[None], prompt, len(prompt), {}).log_softmax(-1)
        expected = logprobs[:-1].gather(-1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
        assert prefill[0].logprob is None
        assert [token.logprob for token in prefill[1:]] == pytest.approx(expected, abs=1e-3)
    assert client.generate().details.prefill == []


def test_stop_sequence_is_included_in_text(client: LoraxClient) -> None:
    whole = client.generate()
    stop = whole.generated_text[3:5]
    reply = client.generate(stop_sequences=["never to be seen", stop])
    assert reply.details.finish_reason == "stop_sequence"
    assert reply.generated_text == whole.generated_text[: whole.generated_text.index(stop) + len(stop)]
    assert text_of(reply.details.tokens) == reply.generated_text
    events = client.stream(stop_sequences=[stop])
    assert events[-1].generated_text == reply.generated_text
    assert events[-1].details.finish_reason == "stop_sequence"


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_seed_makes_completion_reproducible(seed: int, client: LoraxClient) -> None:
    responses = [client.generate(do_sample=True, seed=seed, temperature=1.5, top_k=50, top_p=0.99) for _ in range(2)]
    assert token_ids(responses[0]) == token_ids(responses[1])
    assert responses[0].details.seed == seed
    events = client.stream(do_sample=True, seed=seed, temperature=1.5, top_k=50, top_p=0.99)
    assert [event.token.id for event in events] == token_ids(responses[0])
    assert events[-1].details.seed == seed
    assert token_ids(client.generate(do_sample=True, seed=5, temperature=1.5)) != token_ids(responses[0])


def test_random_seed_is_returned(client: LoraxClient) -> None:
    one, other = (client.generate(do_sample=True, temperature=2.0, max_new_tokens=20) for _ in range(2))
    assert token_ids(one) != token_ids(other)
    again = client.generate(do_sample=True, temperature=2.0, max_new_tokens=20, seed=one.details.seed)
    assert token_ids(again) == token_ids(one)
    assert client.generate().details.seed is None


def test_truncate_keeps_prompt_end(world: ServerAndModels, client: LoraxClient) -> None:
    prompt = ids_of([PROMPT])[0]
    expected = greedy(world.models[None], prompt[-3:])
    reply = client.generate(truncate=3)
    assert reply.details.prompt_tokens == 3
    assert token_ids(reply)[: len(expected)] == expected
    long = client.generate("very " * 200 + PROMPT, truncate=20)
    assert long.details.prompt_tokens == 20


def test_return_full_text_includes_prompt(client: LoraxClient) -> None:
    plain = client.generate().generated_text
    assert client.generate(return_full_text=True).generated_text == PROMPT + plain
    assert client.stream(return_full_text=True)[-1].generated_text == PROMPT + plain


def test_watermark_is_deterministic(client: LoraxClient) -> None:
    marked = [token_ids(client.generate(watermark=True)) for _ in range(2)]
    assert marked[0] == marked[1] != token_ids(client.generate())


def test_repetition_penalty_changes_completion(client: LoraxClient) -> None:
    assert token_ids(client.generate(repetition_penalty=3.0)) != token_ids(client.generate())


def test_low_temperature_matches_greedy(world: ServerAndModels, client: LoraxClient) -> None:
    assert client.generate(typical_p=0.5, seed=1).details.seed == 1
    expected = world.greedy()
    assert token_ids(client.generate(temperature=1e-4, seed=1))[: len(expected)] == expected
    for temperature in (0.0, 1.0):  # LoRAX uses greedy decoding for these values
        assert token_ids(client.generate(temperature=temperature)) == token_ids(client.generate())


# --- Adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [None, "local"])
def test_adapter_source_and_token_are_accepted(source: str | None, world: ServerAndModels, client: LoraxClient) -> None:
    for adapter in ("first", "second"):
        expected = world.greedy(adapter=adapter)
        reply = client.generate(adapter_id=adapter, adapter_source=source, api_token="what-the-hub-would-want")
        assert token_ids(reply)[: len(expected)] == expected
        events = client.stream(adapter_id=adapter, adapter_source=source, api_token="what-the-hub-would-want")
        assert [event.token.id for event in events] == token_ids(reply)
    for name in ("", "__base_model__"):
        assert token_ids(client.generate(adapter_id=name)) == token_ids(client.generate())


def merged(strategy: str | None, weights: list[float], density: float = 1.0, sign: str | None = None) -> Any:
    return lorax.MergedAdapters(
        ids=["first", "second" if strategy in (None, "linear") else "other"],  # others need equal ranks
        weights=weights,
        merge_strategy=strategy,
        density=density,
        majority_sign_method=sign,
    )


def test_linear_merge_adds_adapter_deltas(world: ServerAndModels, client: LoraxClient) -> None:
    model = write_sum(world, {"first": 0.7, "second": 0.4})
    expected = greedy(model, ids_of([PROMPT])[0])
    for strategy in (None, "linear"):
        for density in (0.0, 1.0):
            reply = client.generate(merged_adapters=merged(strategy, [0.7, 0.4], density))
            assert token_ids(reply)[: len(expected)] == expected
    events = client.stream(merged_adapters=merged("linear", [0.7, 0.4]))
    assert [event.token.id for event in events][: len(expected)] == expected


@torch.no_grad()
def write_sum(world: ServerAndModels, weights: dict[str, float]) -> Any:
    """Return the base model plus a weighted sum of the adapter deltas."""
    base = {name: value.clone() for name, value in world.models[None].state_dict().items()}
    summed = {name: value.clone() for name, value in base.items()}
    for adapter, weight in weights.items():
        for name, module in world.models[adapter].named_modules():
            if hasattr(module, "lora_A"):
                summed[f"{name}.weight"] += weight * module.get_delta_weight("default")
    model = type(world.models[None])(world.models[None].config).eval()
    model.load_state_dict(summed)
    return model


def merged_by_peft(world: ServerAndModels, strategy: str, weights: list[float], density: float, sign: str) -> Any:
    """Return the model with the adapters `first` and `other`, merged by PEFT."""
    adapters = world.folder / "adapters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(world.models[None]), adapters / "first", "first")
        model.load_adapter(adapters / "other", "other")
        model.add_weighted_adapter(
            ["first", "other"], weights, "sum", strategy, density=density, majority_sign_method=sign
        )
        model.set_adapter("sum")
    return model.eval().get_base_model()


def test_merge_strategies_match_peft(world: ServerAndModels, client: LoraxClient) -> None:
    def tokens(*how: Any) -> list[int]:
        return token_ids(client.generate(merged_adapters=merged(*how)))

    both, prompt = [0.9, 0.6], ids_of([PROMPT])[0]
    for how in (("ties", 0.5, "total"), ("ties", 1.0, "frequency"), ("dare_linear", 1.0, "total")):
        strategy, density, sign = how
        expected = greedy(merged_by_peft(world, strategy, both, density, sign), prompt)
        assert tokens(strategy, both, density, sign)[: len(expected)] == expected
    assert tokens("dare_ties", both) == tokens("ties", both)  # a density of 1 drops no values
    assert tokens("ties", both, 0.0) == tokens("ties", both)  # LoRAX clients send 0 for the default
    for strategy in ("ties", "dare_linear", "dare_ties"):
        assert tokens(strategy, both, 0.3) == tokens(strategy, both, 0.3) != tokens(strategy, both)
    ranks = lorax.MergedAdapters(ids=["first", "second"], weights=both, merge_strategy="ties", density=1.0)
    with pytest.raises(ValidationError, match=r"ranks \[2, 5\] .*; ties requires equal ranks, linear does not"):
        client.generate(merged_adapters=ranks)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValidationError, "`max_new_tokens` must be strictly positive"),
        ({"max_new_tokens": 1000}, ValidationError, "must be <= 128. Given: .* `inputs` tokens and 1000"),
        ({"truncate": 1000}, ValidationError, "`truncate` must be strictly positive and less than 127. Given: 1000"),
        ({"stop_sequences": list("abcde")}, ValidationError, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"seed": 2**64}, ValidationError, "seed"),
        ({"adapter_id": "nobody"}, GenerationError, "Request failed during generation: .*'nobody'"),
        ({"adapter_id": "../model"}, GenerationError, "model"),
        ({"adapter_id": "first", "adapter_source": "s3"}, GenerationError, "source 's3' is not enabled"),
        ({"adapter_id": "first", "adapter_source": "pbase"}, GenerationError, "source 'pbase' is not enabled"),
        (
            {"response_format": {"type": "json_object", "schema": {"not": {}}}, "ignore_eos_token": False},
            ValidationError,
            'Unimplemented keys: \\["not"\\]',
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_server_errors_raise_client_exceptions(
    arguments: dict[str, Any], error: type[Exception], message: str, client: LoraxClient
) -> None:
    for generate_tokens in (client.generate, client.stream):
        with pytest.raises(error, match=message):
            generate_tokens(**arguments)
    assert client.generate().details.generated_tokens == NEW_TOKENS  # other requests are not affected


def test_too_long_prompt_is_rejected(client: LoraxClient) -> None:
    for generate_tokens in (client.generate, client.stream):
        with pytest.raises(ValidationError, match=r"`inputs` tokens \+ `max_new_tokens` must be <= 128\. Given: "):
            generate_tokens("very " * 200)
        with pytest.raises(ValidationError, match=r"`inputs` must have less than 127 tokens\. Given: "):
            generate_tokens("very " * 200, max_new_tokens=None)


@pytest.mark.parametrize("is_async", [False, True])
def test_request_timeout_raises_client_error(is_async: bool, world: ServerAndModels) -> None:
    client = LoraxClient(world.server, is_async, x_request_timeout="0.000001")
    for generate_tokens in (client.generate, client.stream):
        with pytest.raises(ShardTimeoutError, match="the request timed out after 1e-06 s"):
            generate_tokens()
    client.close()


def test_unsupported_features_are_reported(client: LoraxClient) -> None:
    for method in ("embed", "classify"):
        with pytest.raises(ValidationError, match="it is served for text generation"):
            client.call(method, "a")


def test_unsupported_batch_methods_are_reported(world: ServerAndModels) -> None:
    """Test the client class with batch methods."""
    with pytest.raises(ValidationError, match="it is served for text generation"):
        lorax.Client(world.server.url).classify_batch(["a", "b"])


def test_too_many_concurrent_requests_are_rejected(tmp_path: Path) -> None:
    """Send a second request while the engine is paused."""
    write_model(tmp_path)
    body = json.dumps({"inputs": PROMPT, "stream": True, "parameters": LENGTH})
    with (
        serving(tmp_path, "--max-concurrent-requests", "1", keep_alive_s=0.1) as server,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as first,
    ):
        clients = [LoraxClient(server, is_async) for is_async in (False, True)]
        with server.paused():
            first.request("POST", "/", body, {"content-type": "application/json"})
            response = first.getresponse()
            for client in clients:
                for generate_tokens in (client.generate, client.stream):
                    with pytest.raises(OverloadedError, match="Model is overloaded"):
                        generate_tokens()
        assert response.read().count(b"data: ") == NEW_TOKENS
        clients[0].close()


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_concurrent_threads_get_correct_completions(method: str, world: ServerAndModels) -> None:
    """Concurrent completions match single completions."""
    wanted: list[str | None] = [None, "first", "second"] * 4
    alone = {adapter: world.greedy(adapter=adapter) for adapter in world.models}

    async def generate_tokens(client: lorax.AsyncClient, adapter: str | None) -> list[int]:
        if method == "generate":
            return token_ids(await client.generate(PROMPT, adapter_id=adapter, **LENGTH))
        return [event.token.id async for event in client.generate_stream(PROMPT, adapter_id=adapter, **LENGTH)]

    async def run_requests() -> list[list[int]]:
        client = lorax.AsyncClient(world.server.url)
        return await asyncio.gather(*(generate_tokens(client, adapter) for adapter in wanted))

    for adapter, tokens in zip(wanted, asyncio.run(run_requests()), strict=True):
        assert tokens[: len(alone[adapter])] == alone[adapter]


def test_metrics_are_available_as_text_and_json(world: ServerAndModels) -> None:
    """Send the requests of newer client versions."""
    world.server.post("/", {"inputs": PROMPT, "parameters": LENGTH})
    text = world.server.send("GET", "/metrics", headers={"accept": "text/plain"})
    assert text.headers["content-type"].startswith("text/plain")
    assert b"\nlorax_request_count" in text.body
    reply = world.server.send("GET", "/metrics", headers={"accept": "application/json"}).json
    assert reply["lorax_queue_length"]["data"][0]["value"] == 0.0
    assert all(set(each) == {"type", "data"} for each in reply.values())
