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


def test_requests_compile_no_kernels(tmp_path: Path) -> None:
    """All CUDA and Triton kernels are compiled before the server is ready."""
    write_model(tmp_path)

    def find_compiled() -> set[Path]:
        return set((tmp_path / "cache").rglob("*.cubin"))

    environ = {"LORAX_CACHE": str(tmp_path / "cache/lorax"), "TRITON_CACHE_DIR": str(tmp_path / "cache/triton")}
    flags = ("--device", "cuda", "--dtype", "bfloat16")
    with serving(tmp_path, *flags, environ=environ, from_scratch=True) as server:
        compiled = find_compiled()
        assert compiled
        for adapter in (None, "first", "second"):
            for parameters in ({}, {"do_sample": True, "top_p": 0.9, "seed": 1}, {"repetition_penalty": 1.2}):
                for prompt in PROMPTS:
                    body = {"adapter_id": adapter, "max_new_tokens": NEW_TOKENS, **parameters}
                    assert server.post("/generate", {"inputs": prompt, "parameters": body}).status == 200
        assert find_compiled() == compiled
        assert [line for line in server.log if "compiling a CUDA kernel on first use" in line] == []
