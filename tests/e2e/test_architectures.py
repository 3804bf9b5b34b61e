"""Compare every architecture behind a real server with transformers and PEFT, using the LoRAX client."""

import asyncio
from pathlib import Path
from typing import Any

import lorax
import pytest
from lorax.errors import GenerationError

from tests.e2e.http_server import Server, ids_of, serving, with_adapter, write_model
from tests.parity.oracle import oracle_greedy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),  # the client calls it
]

PROMPT = "The quick brown fox"
NEW_TOKENS = 12
LENGTH = {"max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}
ARCHITECTURES = (
    "llama-gqa",
    "gpt2",
    "neox-parallel",
    "opt-pre-norm",
    "mistral-window",
    "qwen2-bias",
    "qwen3-head-norm",
    "codegen",  # unknown to the registry
)


class LoraxClient:
    """The sync or async LoRAX client with one interface."""

    def __init__(self, server: Server, is_async: bool, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._sync = None if is_async else lorax.Client(server.url, headers=named)
        self._async = lorax.AsyncClient(server.url, headers=named) if is_async else None

    def call(self, method: str, *args: Any, **arguments: Any) -> Any:
        if self._async is not None:
            return asyncio.run(getattr(self._async, method)(*args, **arguments))
        return getattr(self._sync, method)(*args, **arguments)

    def generate(self, prompt: str = PROMPT, **arguments: Any) -> Any:
        return self.call("generate", prompt, **LENGTH | arguments)

    def stream(self, prompt: str = PROMPT, **arguments: Any) -> list[Any]:
        if self._sync is not None:
            return list(self._sync.generate_stream(prompt, **LENGTH | arguments))
        client = self._async

        async def collect() -> list[Any]:
            assert client is not None
            return [event async for event in client.generate_stream(prompt, **LENGTH | arguments)]

        return asyncio.run(collect())

    def close(self) -> None:
        """Close the session, which the client does not close."""
        if self._sync is not None and self._sync.session is not None:
            self._sync.session.close()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    return oracle_greedy(model, prompt, NEW_TOKENS, {})


def make_models(folder: Path, name: str = "llama-gqa") -> dict[str | None, Any]:
    model = write_model(folder, name)
    adapters = sorted((folder / "adapters").iterdir())
    return {None: model} | {adapter.name: with_adapter(model, adapter) for adapter in adapters}


def token_ids(response: Any) -> list[int]:
    return [token.id for token in response.details.tokens]


def text_of(tokens: list[Any]) -> str:
    return "".join([token.text for token in tokens if not token.special])


def check_answers(client: LoraxClient, model: Any, adapter: str | None) -> int:
    """Compare completions with transformers. Return the number of compared tokens."""
    expected = greedy(model, ids_of([PROMPT])[0])
    response = client.generate(adapter_id=adapter)
    assert token_ids(response)[: len(expected)] == expected
    assert text_of(response.details.tokens) == response.generated_text
    assert response.details.generated_tokens == len(response.details.tokens) == NEW_TOKENS
    assert response.details.finish_reason == "length"
    events = client.stream(adapter_id=adapter)
    assert [event.token.id for event in events] == token_ids(response)
    assert [event.token.text for event in events] == [token.text for token in response.details.tokens]
    assert [event.generated_text for event in events] == [None] * (NEW_TOKENS - 1) + [response.generated_text]
    assert events[-1].details.generated_tokens == NEW_TOKENS
    assert events[-1].details.prompt_tokens == response.details.prompt_tokens == len(ids_of([PROMPT])[0])
    return len(expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_matches_transformers_and_peft(name: str, tmp_path: Path) -> None:
    models = make_models(tmp_path, name)
    assert len(models) == (1 if name == "codegen" else 3)
    with serving(tmp_path, has_adapters=name != "codegen") as server:
        for is_async in (False, True):
            client = LoraxClient(server, is_async)
            compared = [check_answers(client, model, adapter) for adapter, model in models.items()]
            if name == "codegen":
                with pytest.raises(GenerationError, match="adapter"):
                    client.generate(adapter_id="first")
            client.close()
            assert min(compared) > NEW_TOKENS // 2
    responses = {tuple(greedy(model, ids_of([PROMPT])[0])) for model in models.values()}
    assert len(responses) == len(models)
