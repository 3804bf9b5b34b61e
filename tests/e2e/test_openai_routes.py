"""OpenAI and adapter routes at the HTTP level: names, chat templates, changed files, keys and limits."""

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.e2e.http_server import (
    HttpResponse,
    Server,
    ids_of,
    serving,
    write_model,
    write_variant_adapter,
)
from tests.parity.oracle import oracle_greedy

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
JSON = {"content-type": "application/json"}
ADMIN = "Bearer admin-secret"
WAIT_S = 60.0  # folders are polled every few seconds
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
LOOPING = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
BROKEN = "{% for message in %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write adapters with and without chat templates."""
    made = tmp_path_factory.mktemp("surface")
    write_model(made)
    for name, template in (("polite", TEMPLATE), ("looping", LOOPING), ("broken", BROKEN)):
        shutil.copytree(made / "adapters" / "first", made / "adapters" / name)
        (made / "adapters" / name / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    names = ("--served-model-name", "shown", "--served-model-name", "org/also")
    with serving(folder, *names, "--admin-key", "admin-secret", keep_alive_s=0.5) as started:
        yield started


def complete(server: Server, model: str, prompt: str = PROMPT, **more: Any) -> HttpResponse:
    return server.post("/v1/completions", {"model": model, "prompt": prompt, **GREEDY, **more})


def chat(server: Server, model: str, **more: Any) -> HttpResponse:
    return server.post("/v1/chat/completions", {"model": model, "messages": MESSAGES, **GREEDY, **more})


def text(reply: HttpResponse) -> str:
    assert reply.status == 200, reply.body
    choice = reply.json["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


# --- On the wire ------------------------------------------------------------------------------------------------------


def test_response_bodies_and_events_match_openai(server: Server) -> None:
    whole = complete(server, "first").json
    assert set(whole) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert whole["id"].startswith("cmpl-")
    streamed = complete(server, "first", stream=True)
    assert streamed.body.endswith(b"\n\ndata: [DONE]\n\n")
    *chunks, done = streamed.events
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert not [chunk for chunk in chunks[:-1] if "usage" in chunk]  # a slow reader may get one chunk only
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    talked = chat(server, "first", stream=True)
    assert talked.body.endswith(b"data: [DONE]\n\n")
    assert talked.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert talked.events[-2]["choices"][0]["delta"] == {}


def test_errors_have_openai_format(server: Server) -> None:
    refused = complete(server, "first", best_of=1, n=2)
    assert refused.status == 400
    message = "`best_of` (1) must be at least `n` (2)"
    expected_error = {"message": message, "type": "invalid_request_error", "param": "best_of", "code": "invalid_value"}
    assert refused.json == {"error": expected_error}
    assert server.send("GET", "/v1/nothing").json["error"]["type"] == "not_found_error"


def test_failed_stream_sends_error_and_no_done(server: Server) -> None:
    headers = {"content-type": "application/json", "x-request-timeout": "2"}
    body = json.dumps({"model": "", "messages": MESSAGES, "stream": True, **GREEDY})
    with server.paused(), closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        content = response.read()
    assert b"[DONE]" not in content
    *silence, last, rest = content.split(b"\n\n")
    assert set(silence) == {b":"}
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "the request timed out after 2 s"
    assert rest == b""


def test_sdk_raises_stream_error(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client, server.paused():
        stream = client.chat.completions.create(
            model="", messages=MESSAGES, stream=True, extra_headers={"x-request-timeout": "2"}
        )
        with pytest.raises(openai.APIError, match="the request timed out after 2 s"):
            list(stream)


# --- Names ------------------------------------------------------------------------------------------------------------


def test_all_model_name_spellings_are_accepted(server: Server, folder: Path) -> None:
    model_id = str(folder / "model")
    base, first = text(complete(server, "")), text(complete(server, "first"))
    assert base != first
    for name in ("shown", "org/also", model_id):
        reply = complete(server, name)
        assert text(reply) == base
        assert reply.json["model"] == name
        assert "x-adapter-id" not in reply.headers
        adapted = complete(server, f"{name}:first")
        assert text(adapted) == first
        assert adapted.headers["x-adapter-id"] == "first"
    assert complete(server, "").json["model"] == "shown"
    assert text(complete(server, "first", adapter_source="local")) == first
    for model in ("nobody", "shown:nobody", "first:shown", "shown/first"):
        assert complete(server, model).status == 404
        assert complete(server, model).json["error"]["code"] == "model_not_found"
    assert complete(server, "first", adapter_source="nowhere").status == 400
    listed = [model["id"] for model in server.send("GET", "/v1/models").json["data"]]
    assert listed[:2] == ["shown", "org/also"]
    assert {"first", "second", "polite"} < set(listed)
    assert server.send("GET", "/v1/models/org%2Falso").json["root"] == model_id


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
def test_request_without_model_selects_base_model(server: Server, model: dict[str, Any]) -> None:
    assert text(server.post("/v1/completions", {"prompt": PROMPT, **GREEDY, **model})) == text(complete(server, ""))
    chatting = server.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **model})
    assert text(chatting) == text(chat(server, ""))
    responding = server.post("/v1/responses", {"input": "hi", "temperature": 0, "max_output_tokens": 4, **model})
    assert responding.status == 200, responding.body
    assert chatting.json["model"] == responding.json["model"] == "shown"
    with_adapter = server.post("/v1/completions", {"prompt": PROMPT, "adapter_id": "first", **GREEDY, **model})
    assert text(with_adapter) == text(complete(server, "first"))


def test_local_adapter_rejects_revision(server: Server) -> None:
    for model in ("first@main", "shown:first@main"):
        reply = complete(server, model)
        assert reply.status == 404
        assert "first@main" in reply.json["error"]["message"]
    native = server.post("/generate", {"inputs": PROMPT, "parameters": {"adapter_id": "first@main"}})
    assert native.status == 424


# --- Templates --------------------------------------------------------------------------------------------------------


def test_adapter_chat_template_is_used(server: Server) -> None:
    assert text(chat(server, "polite")) == text(complete(server, "polite", "<Hi>"))
    assert text(chat(server, "first")) == text(complete(server, "first", "[user] Hi\n[assistant] "))
    assert chat(server, "polite").headers["x-compute-characters"] == str(len("<Hi>"))


def test_bad_templates_do_not_affect_other_chats(server: Server) -> None:
    """An infinite and an invalid template do not affect other chats."""
    before = text(chat(server, "first"))
    responses: list[HttpResponse] = []
    threads = [threading.Thread(target=lambda: responses.append(chat(server, "looping"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert text(chat(server, "first")) == before
    for thread in threads:
        thread.join()
    responses.append(chat(server, "broken", stream=True))
    for reply in responses:
        assert reply.status == 400
        assert reply.json["error"]["message"].startswith("Failed applying chat template to messages: ")
    assert text(complete(server, "looping")) == text(complete(server, "first"))
    assert text(chat(server, "polite")) == text(complete(server, "polite", "<Hi>"))


# --- Adapters that come and go ----------------------------------------------------------------------------------------


def test_added_and_replaced_adapter_folders_are_detected(server: Server, folder: Path) -> None:
    adapters = folder / "adapters"
    write_variant_adapter(adapters / "first", folder / "prepared")
    os.replace(folder / "prepared", adapters / "late")
    wait_until(lambda: server.send("GET", "/v1/models/late").status == 200)
    old, first = complete(server, "late"), complete(server, "first")
    assert text(old) != text(first)
    shutil.copy(adapters / "first" / "adapter_model.safetensors", folder / "replacement")
    os.replace(folder / "replacement", adapters / "late" / "adapter_model.safetensors")
    wait_until(lambda: complete(server, "late").headers["x-adapter-hash"] != old.headers["x-adapter-hash"])
    assert text(complete(server, "late")) == text(first)
    shutil.rmtree(adapters / "late")
    wait_until(lambda: server.send("GET", "/v1/models/late").status == 404)


def admin(server: Server, path: str, key: str = ADMIN, **body: Any) -> HttpResponse:
    return server.send("POST", path, body, {"authorization": key} if key else {})


def listed(server: Server, name: str) -> dict[str, Any] | None:
    data = server.send("GET", "/v1/adapters", headers={"authorization": ADMIN}).json["data"]
    return next((each for each in data if each["id"] == name), None)


def test_admin_can_load_pin_and_unload(server: Server) -> None:
    wanted: dict[str, Any] = {"adapter_id": "second", "adapter_source": "local", "name": "deux", "pin": True}
    loaded = admin(server, "/v1/adapters/load", **wanted)
    assert (loaded.json["pinned"], loaded.json["source"], loaded.json["object"]) == (True, "local", "adapter")
    reply = complete(server, "deux")
    assert reply.headers["x-adapter-hash"] == loaded.json["hash"]
    assert text(reply) == text(complete(server, "second"))
    result = listed(server, "deux")
    assert result is not None
    assert (result["state"], result["pinned"], result["uses"] >= 1) == (loaded.json["state"], True, True)
    assert admin(server, "/v1/adapters/load", adapter_id="second", pin=False).json["pinned"] is False
    assert admin(server, "/v1/adapters/unload", adapter_id="deux").status == 200
    assert complete(server, "deux").status == 404
    assert complete(server, "second").status == 200
    for path in ("/v1/adapters/load", "/v1/adapters/unload"):
        assert admin(server, path, adapter_id="nobody").status == 404


def test_only_admin_can_change_adapters(server: Server) -> None:
    bodies = {
        "/v1/adapters/load": {"adapter_id": "first"},
        "/v1/adapters/unload": {"adapter_id": "first"},
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "first"},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
    }
    for path, body in bodies.items():
        for key in ("", "Bearer wrong", "admin-secret", "Basic admin-secret"):
            assert admin(server, path, key, **body).status == 401
    names = {each["id"] for each in server.send("GET", "/v1/adapters").json["data"]}
    assert {"first", "second"} <= names


def test_vllm_routes_load_and_unload_adapter(server: Server, folder: Path) -> None:
    for path in ("first", str(folder / "adapters" / "first")):
        added = admin(server, "/v1/load_lora_adapter", lora_name="vllm-name", lora_path=path)
        assert (added.status, added.body) == (200, b"Success: LoRA adapter 'vllm-name' added successfully.")
        assert text(complete(server, "vllm-name")) == text(complete(server, "first"))
        removed = admin(server, "/v1/unload_lora_adapter", lora_name="vllm-name")
        assert (removed.status, removed.body) == (200, b"Success: LoRA adapter 'vllm-name' removed successfully.")
        assert complete(server, "vllm-name").status == 404
    assert admin(server, "/v1/load_lora_adapter", lora_name="a", lora_path="/etc").status in (403, 404, 424)
    assert admin(server, "/v1/unload_lora_adapter", lora_name="vllm-name").status == 404


# --- Keys, a hub, and the model's own settings ------------------------------------------------------------------------

KEYS = """
[keys.all]
key = "all-secret"
[keys.poet]
key = "poet-secret"
adapters = ["local:fir*", "second"]
base_model = false
[keys.seldom]
key = "seldom-secret"
requests_per_minute = 1
"""


@contextmanager
def empty_hub() -> Iterator[tuple[str, list[str]]]:
    """Run an empty hub. Yield its address and the requested paths."""
    requested_paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested_paths.append(self.path)
            self.send_response(404)
            self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{hub.server_port}", requested_paths
        hub.shutdown()
        thread.join()


class SecuredServer(NamedTuple):
    """A server with keys, a hub as default source, and a generation config."""

    server: Server
    hub_paths: list[str]  # requested from the hub
    expected: list[int]

    def sdk(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0)

    def complete(self, key: str = "all-secret", **more: Any) -> Any:
        with self.sdk(key) as client:
            return client.completions.create(**{"model": "", "prompt": PROMPT, "max_tokens": 8, **more})


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder = tmp_path_factory.mktemp("secured")
    model = write_model(folder)
    settings = {"top_k": 1, "repetition_penalty": 4.0, "temperature": 0.7, "eos_token_id": model.config.eos_token_id}
    (folder / "model" / "generation_config.json").write_text(json.dumps(settings))
    (folder / "keys.toml").write_text(KEYS)
    (folder / "keys.toml").chmod(0o600)
    flags = ("--keys-file", str(folder / "keys.toml"), "--default-adapter-source", "hub")
    with empty_hub() as (url, requested_paths):
        cache = ("--hub-endpoint", url, "--huggingface-hub-cache", str(folder / "cache"))
        with serving(folder, *flags, *cache, has_hub=True, environ={"HF_HUB_OFFLINE": "0"}) as server:
            yield SecuredServer(server, requested_paths, oracle_greedy(model, ids_of([PROMPT])[0], 8, {}))


def test_unknown_model_name_is_not_requested_from_hub(secured: SecuredServer) -> None:
    for name in ("gpt-4o", "o1-mini", "text-davinci-003"):
        with pytest.raises(openai.NotFoundError, match=f"'{name}' does not exist; ") as caught:
            secured.complete(model=name)
        assert caught.value.code == "model_not_found"
    assert secured.hub_paths == []
    with pytest.raises(openai.NotFoundError):
        secured.complete(model="owner/name@v1")
    assert any("owner/name" in path and "v1" in path for path in secured.hub_paths)


def test_api_keys_restrict_adapters(secured: SecuredServer) -> None:
    with pytest.raises(openai.AuthenticationError, match="unknown API key") as caught:
        secured.complete("wrong")
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.PermissionDeniedError, match="may not use adapter 'second'"):
        secured.complete("poet-secret", model="second", extra_body={"adapter_source": "local"})
    with pytest.raises(openai.PermissionDeniedError, match="may not use the base model"):
        secured.complete("poet-secret")
    allowed = secured.complete("poet-secret", model="first", extra_body={"adapter_source": "local"})
    assert allowed.model == "first"
    assert secured.complete("poet-secret", model="second").model == "second"  # by the configured name
    with secured.sdk("poet-secret") as client:
        assert [model.id for model in client.models.list()] == ["second"]
    assert secured.server.send("GET", "/health").status == 200
    for path in ("/generate", "/", "/v1/adapters/load"):
        assert secured.server.post(path, {"inputs": PROMPT, "adapter_id": "a"}).status in (401, 403)
    for path in ("/v1/models", "/v1/adapters", "/info"):
        assert secured.server.send("GET", path).status == 401


def test_malformed_json_is_rejected(secured: SecuredServer) -> None:
    with secured.sdk("all-secret") as client, pytest.raises(openai.BadRequestError, match="Failed to parse"):
        client.post("/completions", cast_to=object, content=b'{"model": ', options={"headers": JSON})


def test_rate_limited_key_gets_retry_after(secured: SecuredServer) -> None:
    secured.complete("seldom-secret")
    with pytest.raises(openai.RateLimitError, match="reached its limit of 1 requests per minute") as caught:
        secured.complete("seldom-secret")
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.code == "rate_limit_exceeded"
    secured.complete("all-secret")


def test_generation_config_applies_to_openai_routes_only(secured: SecuredServer) -> None:
    """The generation config has top-k 1 and a repetition penalty."""
    texts = {secured.complete().choices[0].text for _ in range(3)}
    assert len(texts) == 1
    plain = secured.complete(temperature=0, extra_body={"repetition_penalty": 1.0}).choices[0].text
    assert texts != {plain}
    assert len({secured.complete(extra_body={"top_k": -1}).choices[0].text for _ in range(3)}) > 1
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    headers = {"authorization": "Bearer all-secret"}
    native = secured.server.send("POST", "/generate", body, headers).json
    ids = [token["id"] for token in native["details"]["tokens"]]
    count = min(len(ids), len(secured.expected))
    assert ids[:count] == secured.expected[:count]
    assert native["generated_text"] == plain
    drawn = {"do_sample": True, "max_new_tokens": 8}
    sampled = [secured.server.send("POST", "/generate", {**body, "parameters": drawn}, headers).json for _ in range(3)]
    assert len({each["generated_text"] for each in sampled}) > 1
