"""LoRAX routes at the HTTP level: bodies, events, headers and errors."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.http_server import HttpResponse, Server, serving, write_model

PROMPT = "The quick brown fox"
LENGTH = {"max_new_tokens": 6, "ignore_eos_token": True}
ROUTES = ("/generate", "/", "/invocations", "/generate_stream")
TIMES = (
    *("compute-time", "total-time", "validation-time", "queue-time", "inference-time"),
    *("time-per-token", "time-to-first-token", "time-per-output-token"),
)
COUNTS = ("compute-characters", "prompt-tokens", "generated-tokens", "skipped-tokens", "total-tokens")
MERGE = {"ids": ["first", "second"], "weights": [1, 1], "merge_strategy": "linear", "density": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("surface")
    write_model(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, keep_alive_s=0.5) as started:
        yield started


def generate(server: Server, path: str = "/generate", inputs: str = PROMPT, **parameters: Any) -> HttpResponse:
    return server.post(path, {"inputs": inputs, "parameters": {**LENGTH, **parameters}})


# --- Bodies and events ------------------------------------------------------------------------------------------------


def test_response_bodies_match_lorax(server: Server) -> None:
    plain = generate(server)
    assert plain.status == 200
    text = plain.json["generated_text"]
    assert plain.body == json.dumps({"generated_text": text}, ensure_ascii=False, separators=(",", ":")).encode()
    for path in ("/", "/invocations"):
        assert generate(server, path).body == b"[" + plain.body + b"]"
    details = generate(server, details=True).json["details"]
    assert set(details) == {
        *("finish_reason", "prompt_tokens", "generated_tokens", "skipped_tokens", "seed", "prefill", "tokens")
    }
    assert (details["finish_reason"], details["seed"], details["prefill"]) == ("length", None, [])
    assert all(set(token) == {"id", "text", "logprob", "special", "skipped"} for token in details["tokens"])
    prefill = generate(server, decoder_input_details=True).json["details"]["prefill"]
    assert all(set(token) == {"id", "text", "logprob"} for token in prefill)
    other = generate(server, best_of=2, do_sample=True, details=True).json["details"]["best_of_sequences"][0]
    assert set(other) == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}


def test_all_fields_accept_null(server: Server) -> None:
    names = (
        *("adapter_id", "adapter_source", "merged_adapters", "api_token", "best_of", "temperature", "top_k", "top_p"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "typical_p", "do_sample", "stop", "seed"),
        *("return_full_text", "truncate", "watermark", "details", "decoder_input_details", "return_k_alternatives"),
        *("apply_chat_template", "response_format", "unknown_to_all"),
    )
    nothing: dict[str, Any] = dict.fromkeys(names)
    assert generate(server, **nothing).body == generate(server).body
    assert server.post("/generate", {"inputs": PROMPT, "parameters": None, "stream": None}).status == 200


@pytest.mark.parametrize("path", ["/generate_stream", "/", "/invocations"])
def test_stream_events_are_single_lines(path: str, server: Server) -> None:
    body = {"inputs": PROMPT, "stream": True, "parameters": {**LENGTH, "details": True}}
    reply = server.post(path, body)
    whole = generate(server, details=True).json
    assert b"[DONE]" not in reply.body
    assert b"\r" not in reply.body
    assert all(set(event) == {"token", "generated_text", "details"} for event in reply.events)
    assert [event["token"] for event in reply.events] == whole["details"]["tokens"]
    *others, last = reply.events
    assert all(event["generated_text"] is None and event["details"] is None for event in others)
    assert last["generated_text"] == whole["generated_text"]
    assert last["details"] == {"finish_reason": "length", "prompt_tokens": 15, "generated_tokens": 6, "seed": None}
    first = json.dumps(reply.events[0], ensure_ascii=False, separators=(",", ":"))
    assert f"data: {first}\n\n".encode() in reply.body


def test_eos_token_is_reported_but_not_in_text(server: Server) -> None:
    for seed in range(100):  # high temperature, so that all tokens are about equally likely
        how: dict[str, Any] = {
            "temperature": 1e6,
            "seed": seed,
            "max_new_tokens": 100,
            "details": True,
            "ignore_eos_token": False,
        }
        reply = generate(server, **how).json
        if reply["details"]["finish_reason"] == "eos_token":
            break
    last = reply["details"]["tokens"][-1]
    assert (last["text"], last["special"]) == ("</s>", True)
    assert "</s>" not in reply["generated_text"]
    assert reply["details"]["generated_tokens"] == len(reply["details"]["tokens"]) < 100
    assert generate(server, "/generate_stream", **how).events[-1]["token"] == last
    assert generate(server, **how | {"ignore_eos_token": True}).json["details"]["generated_tokens"] == 100


def test_non_finite_numbers_become_null(server: Server) -> None:
    """Tokens outside top-k have a log probability of minus infinity."""
    reply = generate(server, details=True, return_k_alternatives=3, top_k=1, seed=0)
    for token in reply.json["details"]["tokens"]:
        assert [each["logprob"] for each in token["alternative_tokens"]] == [0.0, None, None]
        assert token["logprob"] == 0.0


def test_silent_stream_sends_keepalives_and_final_error(server: Server) -> None:
    """The deadline passes after the status was sent, so the error is the last event."""
    body = json.dumps({"inputs": PROMPT, "parameters": LENGTH})
    with server.paused(), closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for timeout_s in (2, 8, 32):
            headers = {"content-type": "application/json", "x-request-timeout": str(timeout_s)}
            connection.request("POST", "/generate_stream", body, headers)
            response = connection.getresponse()
            content = response.read()
            if response.status == 200:
                break  # otherwise, a busy machine has not sent the status before the deadline
        assert response.status == 200
    error = b'data: {"error":"the request timed out after %d s","error_type":"timeout"}\n\n' % timeout_s
    assert content.endswith(error)
    silence = content.removesuffix(error)
    assert silence == b":\n\n" * silence.count(b":")
    assert len(silence) > 0
    assert generate(server).status == 200


# --- Headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/generate", "/", "/invocations"])
def test_responses_describe_model_and_adapter_in_headers(path: str, server: Server, folder: Path) -> None:
    reply = generate(server, path)
    headers = reply.headers
    assert headers["x-compute-type"] == "cpu+optimized"
    assert headers["x-model-id"] == str(folder / "model")
    assert all(re.fullmatch(r"\d+", headers[f"x-{name}"]) for name in (*TIMES, *COUNTS))
    assert [headers[f"x-{name}"] for name in COUNTS] == [str(len(PROMPT)), "15", "6", "0", "21"]
    assert not any(name.startswith("x-adapter") for name in headers)
    adapted = generate(server, path, adapter_id="first").headers
    assert (adapted["x-adapter-id"], adapted["x-adapter-source"]) == ("first", "local")
    assert re.fullmatch(r"[0-9a-f]{64}", adapted["x-adapter-hash"])
    merged = generate(server, path, merged_adapters=MERGE).headers
    assert merged["x-adapter-id"] == "first,second"


def test_streams_have_sse_and_adapter_headers(server: Server) -> None:
    headers = generate(server, "/generate_stream", adapter_id="first").headers
    assert headers["content-type"].split(";")[0] == "text/event-stream"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-compute-characters"] == str(len(PROMPT))
    assert headers["x-adapter-id"] == "first"
    assert "x-total-time" not in headers


def test_compute_characters_header_counts_prompt_characters(server: Server) -> None:
    assert generate(server, inputs="日本語👋").headers["x-compute-characters"] == "4"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        (b"mine-42", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"two words", False),
        (b"caf\xc3\xa9", False),
        (b"a\tb", False),
        (b"", False),
        (b"<script>alert(1)</script>", True),
    ],
)
def test_request_id_is_returned(given: bytes, is_kept: bool, server: Server) -> None:
    for path in ("/health", "/nowhere"):
        head = b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: %s\r\n\r\n"
        reply = raw(server, head % (path.encode(), given))
        (result,) = re.findall(rb"(?im)^x-request-id: ([^\r\n]*)\r$", reply)
        assert (result == given) == is_kept
        assert is_kept or re.fullmatch(rb"[0-9a-f]{32}", result)


def raw(server: Server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def test_hostile_adapter_name_is_escaped_in_headers(server: Server) -> None:
    for name in ("naïve", "a\r\nx-evil: 1", "\x00", "🙂" * 50, "../../etc", "/etc", "a" * 10_000, "first\n"):
        for path in ROUTES:
            reply = generate(server, path, adapter_id=name)
            assert reply.status == 424
            assert reply.json["error_type"] == "generation"
            assert "x-evil" not in reply.headers
    assert generate(server, adapter_id="first").status == 200


# --- Refusals and their order -----------------------------------------------------------------------------------------

LONG = "very " * 200
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"adapter_id": "first", "merged_adapters": {**MERGE, "ids": []}},
        "at most one of `adapter_id` or `adapters` may be provided",
    ),
    ({"merged_adapters": {**MERGE, "ids": []}}, "at least one adapter ID must be provided when setting `adapters`"),
    (
        {"merged_adapters": {**MERGE, "weights": [1]}},
        "number of adapter IDs must match number of adapter weights",
    ),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": -1}, "`temperature` must be non-negative"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"presence_penalty": -2.5}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": 2**31}, "`top_k` must be less than 2147483648"),
    ({"return_k_alternatives": 0}, "`return_k_alternatives` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"inputs": ""}, "`inputs` cannot be empty"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 127. Given: 0"),
    (
        {"max_new_tokens": 122},
        "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 15 `inputs` tokens and 122 `max_new_tokens`",
    ),
    ({"inputs": LONG, "max_new_tokens": None}, "`inputs` must have less than 127 tokens. Given: 600"),
]


@pytest.mark.parametrize("path", ROUTES)
def test_validation_errors_have_messages(path: str, server: Server) -> None:
    for parameters, message in WRONG:
        given = dict(parameters)
        reply = generate(server, path, given.pop("inputs", PROMPT), **given)
        assert reply.status == 422
        assert (
            reply.body
            == json.dumps(
                {"error": f"Input validation error: {message}", "error_type": "validation"}, separators=(",", ":")
            ).encode()
        )


def test_first_validation_error_is_reported(server: Server) -> None:
    """Send all compatible mistakes after an index in the list."""
    for place, (parameters, message) in enumerate(WRONG[:-2]):
        given: dict[str, Any] = {}
        for later, _ in reversed(WRONG[place:-2]):
            given |= {name: value for name, value in later.items() if name not in ("best_of", "do_sample", "seed")}
        given |= parameters
        if "adapter_id" not in parameters:
            given.pop("adapter_id", None)
        if "do_sample" in parameters:
            given.pop("temperature", None)
        if parameters == {"best_of": 2}:
            given = {name: value for name, value in given.items() if name in ("best_of", "stop", "truncate", "inputs")}
        reply = generate(server, "/generate", given.pop("inputs", PROMPT), **given)
        assert reply.json["error"] == f"Input validation error: {message}"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"merged_adapters": {**MERGE, "merge_strategy": "nonsense"}}, "nonsense"),
        ({"merged_adapters": {**MERGE, "majority_sign_method": "nonsense"}}, "nonsense"),
        ({"merged_adapters": {**MERGE, "density": -0.5, "merge_strategy": "ties"}}, "density"),
        ({"seed": -1}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "parameters.temperature"),
        ({"max_new_tokens": 10.5}, "parameters.max_new_tokens"),
        ({"stop": [""]}, "stop"),
        (
            {"response_format": {"type": "xml"}},
            "`response_format.type` must be 'text', 'json_object' or 'json_schema' (got 'xml')",
        ),
    ],
    ids=str,
)
def test_invalid_stream_request_gets_error_status(parameters: dict[str, Any], message: str, server: Server) -> None:
    reply = generate(server, "/generate_stream", **parameters)
    assert reply.status == 422
    assert message in reply.json["error"]
    assert reply.json["error"].startswith("Input validation error: ")
    assert reply.json["error_type"] == "validation"


@pytest.mark.parametrize(
    ("request_line", "content_type", "body", "status", "message"),
    [
        ("POST /generate", "application/json", b'{"inputs": ', 400, "Failed to parse the request body as JSON: "),
        ("POST /generate", "application/json", b'{"inputs": "\xff"}', 400, ""),
        ("POST /generate", "application/json", b"", 422, ""),
        ("POST /generate", "application/json", b"[]", 422, ""),
        ("POST /generate", "application/json", b"{}", 422, "inputs"),
        ("POST /generate", "application/json", b'{"inputs": 5}', 422, "inputs"),
        ("POST /generate", "application/json", b"[" * 100_000, 400, ""),
        ("POST /generate", "text/plain", b"{}", 415, "Expected request with `Content-Type: application/json`"),
        ("POST /nowhere", "application/json", b"{}", 404, ""),
        ("GET /generate", "application/json", b"", 405, ""),
        ("DELETE /health", "application/json", b"", 405, ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_routing_errors_are_json(
    request_line: str, content_type: str, body: bytes, status: int, message: str, server: Server
) -> None:
    method, path = request_line.split()
    reply = server.send(method, path, body, {"content-type": content_type})
    assert reply.status == status
    assert set(reply.json) == {"error", "error_type"}
    assert message in reply.json["error"]
    assert "allow" in reply.headers or status != 405


def test_too_large_body_is_rejected_before_upload(server: Server) -> None:
    head = (
        b"POST /generate HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: 2097153\r\n\r\n"
    )
    reply = raw(server, head)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":"Failed to buffer the request body: it must be at most 2097152 bytes"' in reply


def test_json_suffix_and_charset_are_accepted(server: Server) -> None:
    body = json.dumps({"inputs": PROMPT, "parameters": LENGTH}).encode()
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json", "APPLICATION/JSON"):
        assert server.send("POST", "/generate", body, {"content-type": kind}).status == 200


@pytest.mark.parametrize("timeout_value", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_deadline_is_rejected(timeout_value: str, server: Server) -> None:
    for path in ROUTES:
        reply = server.post(path, {"inputs": PROMPT}, x_request_timeout=timeout_value)
        assert reply.status == 422
        assert "x-request-timeout" in reply.json["error"]


def test_deadline_before_first_token_gets_error_status(server: Server) -> None:
    with server.paused():
        reply = server.post("/generate", {"inputs": PROMPT}, x_request_timeout="0.2")
    assert reply.status == 504
    assert reply.json == {"error": "the request timed out after 0.2 s", "error_type": "timeout"}


# --- Other routes -----------------------------------------------------------------------------------------------------


def test_health_body_is_empty_and_info_contains_limits(server: Server, folder: Path) -> None:
    for path in ("/health", "/ping", "/", "/startup"):
        reply = server.send("GET", path)
        assert (reply.status, reply.body) == (200, b"")
    assert server.send("HEAD", "/health").status == 200
    info = server.send("GET", "/info").json
    assert info["model_id"] == str(folder / "model")
    assert (info["max_input_length"], info["max_total_tokens"], info["max_best_of"]) == (127, 128, 2)
    assert (info["model_dtype"], info["model_device_type"]) == ("torch.float32", "cpu")


def test_tokenize_and_detokenize_round_trip(server: Server) -> None:
    tokens = server.post("/tokenize", {"inputs": PROMPT, "add_special_tokens": None}).json
    assert all(set(token) == {"id", "text", "start", "stop"} for token in tokens)
    assert "".join([PROMPT[token["start"] : token["stop"]] for token in tokens]) == PROMPT
    assert tokens[1]["text"].startswith("\u0120")  # space in the vocabulary
    ids = [token["id"] for token in tokens]
    assert server.post("/detokenize", {"ids": ids}).json == {"text": PROMPT}
    assert server.post("/detokenize", {"ids": [10**9]}).status == 422


@pytest.mark.parametrize("path", ["/embed", "/classify", "/classify_batch"])
def test_unsupported_routes_are_rejected(path: str, server: Server) -> None:
    inputs = ["a"] if path == "/classify_batch" else "a"
    reply = server.post(path, {"inputs": inputs, "parameters": None, "stream": False})
    assert reply.status == 422
    assert reply.json["error_type"] == "validation"
    assert reply.json["error"].endswith("it is served for text generation (--task generate)")
