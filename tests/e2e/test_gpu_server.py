"""A real server on a GPU, with concurrent requests for the base model and adapters."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.http_server import ids_of, serving, with_adapter, write_model
from tests.parity.oracle import oracle_greedy

pytestmark = pytest.mark.gpu

PROMPTS = ["The quick brown fox", "hello", "you are", "the lazy dog and the world " * 2]
NEW_TOKENS = 16


@pytest.mark.parametrize("name", ["qwen3-head-norm", "gpt2", "opt-pre-norm"])
def test_concurrent_requests_match_single_requests(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name)
    models = {None: model} | {each: with_adapter(model, tmp_path / "adapters" / each) for each in ("first", "second")}
    request_body = [(prompt, adapter) for prompt in PROMPTS for adapter in models]
    with (
        serving(tmp_path, "--device", "cuda", "--dtype", "float32") as server,
        ThreadPoolExecutor(len(request_body)) as pool,
    ):

        def send_requests(prompt: str, adapter: str | None) -> list[int]:
            parameters = {"adapter_id": adapter, "max_new_tokens": NEW_TOKENS, "ignore_eos_token": True}
            body = {"inputs": prompt, "parameters": parameters}
            return [event["token"]["id"] for event in server.post("/generate_stream", body).events]

        responses = list(pool.map(lambda pair: send_requests(*pair), request_body))
        assert server.send("GET", "/info").json["model_device_type"] == "cuda"
        assert server.send("GET", "/health").status == 200
    for (prompt, adapter), response in zip(request_body, responses, strict=True):
        wanted = oracle_greedy(models[adapter], ids_of([prompt])[0], NEW_TOKENS, {})  # up to the first tie
        assert len(wanted) > 1
        assert response[: len(wanted)] == wanted
