"""Requests from hostile clients, and the allowed response statuses."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from lorax_server.server.schemas import lorax, openai
from tests.e2e.hostile_client import chunked, post, request

MAX_BODY = 2 * 2**20
NATIVE, STREAM, COMPLETIONS, CHAT = "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"
INPUTS = {"inputs": "x", "parameters": {"max_new_tokens": 1}}
PROMPT = {"model": "", "prompt": "x", "max_tokens": 1}
MESSAGES = {"model": "", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
GET_PATHS = ("/", "/health", "/ping", "/startup", "/info", "/metrics", "/v1/models", "/v1/models/x", "/v1/adapters")
POST_PATHS = (NATIVE, STREAM, "/invocations", COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/embed", "/v1/embeddings")
ALIVE = request("GET", "/health")

# --- Bodies -----------------------------------------------------------------------------------------------------------

GOOD = json.dumps(INPUTS).encode()
BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 422),
    "blank": (b"  \r\n", 400),
    "null": (b"null", 422),
    "a list": (b"[]", 422),
    "a string": (b'"x"', 422),
    "a number": (b"1e999", 422),
    "cut off": (b'{"inputs": "x', 400),
    "two documents": (GOOD + GOOD, 400),
    "a comment": (b"/**/" + GOOD, 400),
    "bad UTF-8": (b'{"inputs": "\xff\xfe"}', 400),
    "overlong UTF-8": (b'{"inputs": "\xc0\xaf"}', 400),
    "a lone surrogate": (b'{"inputs": "\\ud800"}', 422),
    "a lone surrogate as UTF-8": (b'{"inputs": "\xed\xa0\x80"}', 422),
    "a raw control character": (b'{"inputs": "\x01"}', 400),
    "duplicate keys": (b'{"inputs": 1, ' + GOOD[1:], 200),
    "nested far too deep": (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "deep where nobody looks": (b'{"x": ' + b"[" * 500 + b"]" * 500 + b"," + GOOD[1:], 200),
    "a number of 5000 digits": (b'{"inputs": "x", "parameters": {"seed": ' + b"9" * 5000 + b"}}", 400),
    "a number of 400 digits": (b'{"inputs": "x", "parameters": {"temperature": ' + b"9" * 400 + b"}}", 422),
    "an exponent of 20 digits": (b'{"inputs": "x", "parameters": {"temperature": 1e' + b"9" * 20 + b"}}", 422),
    "NaN": (b'{"inputs": "x", "parameters": {"temperature": NaN}}', 422),
    "Infinity": (b'{"inputs": "x", "parameters": {"top_p": Infinity}}', 422),
    "-Infinity": (b'{"inputs": "x", "parameters": {"repetition_penalty": -Infinity}}', 422),
    "weights NaN": (
        b'{"inputs":"x","parameters":{"merged_adapters":{"ids":["second","./second"],"weights":[NaN,1]}}}',
        422,
    ),
    "one byte too many": (GOOD + b" " * (MAX_BODY + 1 - len(GOOD)), 413),
    "as large as can be": (GOOD + b" " * (MAX_BODY - len(GOOD)), 200),
    "a prompt as large as can be": (b'{"inputs": "' + b"a" * (MAX_BODY - 20) + b'"}', 422),
    "100,000 unknown keys": (json.dumps({**INPUTS, **dict.fromkeys(map(str, range(100_000)))}).encode(), 200),
    "a key of 1 MB": (json.dumps({**INPUTS, "x" * 2**20: 1}).encode(), 200),
}

CONTENT_TYPES = {
    None: 415,
    "": 415,
    "text/plain": 415,
    "application/x-www-form-urlencoded": 415,
    "multipart/form-data; boundary=x": 415,
    "application/jsonp": 415,
    "application/json, text/plain": 415,
    "application/json\t": 200,
    "APPLICATION/JSON; charset=latin-1": 200,
    "application/vnd.x+json": 200,
}

# --- Values -----------------------------------------------------------------------------------------------------------

OTHERS: dict[str, Any] = {
    "string": "x", "integer": 2**53, "number": 0.5, "boolean": True, "array": [[]], "object": {"\0": 1},
}  # fmt: skip
SCHEMAS: dict[str, type[BaseModel]]
SCHEMAS = {NATIVE: lorax.GenerateParameters, COMPLETIONS: openai.CompletionRequest,
           CHAT: openai.ChatCompletionRequest}  # fmt: skip
FIELDS = [(path, field) for path, schema in SCHEMAS.items() for field in schema.model_fields]


def with_field(path: str, field: str, value: Any) -> bytes:
    if path in (NATIVE, STREAM):
        return post(path, {"inputs": "x", "parameters": {"max_new_tokens": 1, field: value}})
    return post(path, {**(PROMPT if path == COMPLETIONS else MESSAGES), field: value})


SECOND = ["second", "./second"]
CHAT_TEXT = "\u202e\u200b\ufeff\U0001f600\0{{ 7 * 7 }}{% for i in range(10 ** 9) %}x{% endfor %}"
VALUES: list[tuple[str, str, Any, int]] = [
    *[(NATIVE, "adapter_id", name, 424) for name in (
        "../second", "/etc", "/etc/passwd", "%2e%2e/second", "..%2fsecond", "~", "~root", "second/../second", "out",
        "out/", "second\r\nx-evil: 1", "second\0", "s\u00e9cond", "\u202esecond", "a" * 100_000, "second@main",
        "second@", "@", "*", "s3://x", "file:///etc", "//x", "C:\\x", "second\n", "a\x7f", " ", "adapter_config.json",
        "second,second",
    )],
    *[(STREAM, "adapter_id", name, 424) for name in ("../second", "second\r\nx-evil: 1", "\u00e9\u4e2d", "a\0")],
    *[(COMPLETIONS, "model", name, 404) for name in ("../second", "s\u00e9cond", ":", "/etc")],
    (COMPLETIONS, "model", "out", 400),
    *[(CHAT, "model", name, 400) for name in ("second\r\nx-evil: 1", "a\0b", "a" * 100_000)],
    *[(NATIVE, "adapter_id", name, 422) for name in ("\ud800", "second\udfff")],
    (NATIVE, "adapter_id", "", 200),
    *[(NATIVE, "merged_adapters", merged, 422) for merged in list[Any]((
        {"ids": []},
        {"ids": ["second"] * 33},
        {"ids": SECOND, "weights": [1]},
        {"ids": SECOND, "weights": [1, 2, 3]},
        {"ids": SECOND, "merge_strategy": "nope"},
        {"ids": SECOND, "merge_strategy": "\ud800"},
        {"ids": SECOND, "merge_strategy": "ties", "majority_sign_method": "x"},
        {"ids": SECOND, "merge_strategy": "ties", "density": -1},
        {"ids": SECOND, "density": 1e300},
    ))],
    (NATIVE, "merged_adapters", {"ids": ["second", "../second"]}, 424),
    (NATIVE, "merged_adapters", {"ids": ["second", "a\r\nb: c"]}, 424),
    (NATIVE, "merged_adapters", {"ids": SECOND, "weights": [1e308, -1e308]}, 422),
    (NATIVE, "merged_adapters", {"ids": SECOND, "weights": [1e30, 1]}, 422),
    *[(NATIVE, "best_of", count, 422) for count in (-1, 3, 2**63, 2**100)],
    *[(path, "n", count, 400) for path in (COMPLETIONS, CHAT) for count in (0, -1, 129, 2**63)],
    (COMPLETIONS, "best_of", 10**9, 400),
    *[(NATIVE, "stop", stop, 422) for stop in (["a"] * 10_000, [""], ["\ud800"])],
    (NATIVE, "stop", ["a" * 2**20], 422),
    (NATIVE, "stop", ["a" * 1024], 200),
    *[(COMPLETIONS, "stop", stop, 400) for stop in (["a"] * 10_000, "", [""])],
    (COMPLETIONS, "stop", "a" * 2**20, 400),
    (COMPLETIONS, "stop", "a" * 1024, 200),
    *[(COMPLETIONS, "logit_bias", bias, 400) for bias in (
        {str(token): 1 for token in range(100_000)}, {"a": 1}, {"-1": 1}, {"9" * 50: 1}, {"1": 101}, {"\u0661": 1},
        {"1.0": 1}, {"": 1}, {"999999": 1}, {"\ud800": 1},
    )],
    *[(COMPLETIONS, "prompt", prompt, 400) for prompt in list[Any]((
        [1] * 600_000, [-1], [2**63], [2**70], [10**6], [], [[]], [""], ["a", 1], [[1], "a"],
        ["x"] * 129, ["x"] * 10_000, [None] * 300_000, [[1]] * 200_000,
    ))],
    *[(NATIVE, "seed", seed, 422) for seed in (2**64, -1)],
    *[(COMPLETIONS, "seed", seed, 400) for seed in (2**64, -(2**64), 10**400)],
    *[(NATIVE, "max_new_tokens", count, 422) for count in (2**63, 0, -1, 128)],
    *[(COMPLETIONS, "max_tokens", count, 400) for count in (2**63, 0, -1, 128)],
    *[(CHAT, "max_completion_tokens", count, 400) for count in (2**63, 0, -1)],
    *[(NATIVE, "temperature", value, status) for value, status in ((5e-324, 200), (1e300, 422), (-1, 422))],
    *[(COMPLETIONS, "temperature", value, status) for value, status in ((1e-300, 200), (1e300, 400), (-1, 400))],
    *[(NATIVE, "top_k", value, 422) for value in (0, 2**31, -1)],
    *[(COMPLETIONS, "top_k", value, 400) for value in (-2, 2**31, 2**70)],
    *[(COMPLETIONS, "stop_token_ids", value, 400) for value in ([-1], [2**70])],
    *[(NATIVE, "return_k_alternatives", value, 422) for value in (0, 21, 10**9)],
    *[(COMPLETIONS, "logprobs", value, 400) for value in (-1, 10**9)],
    *[(NATIVE, "truncate", value, 422) for value in (0, -1, 2**70)],
    *[(CHAT, "messages", messages, 400) for messages in (
        [],
        [{"role": "user", "content": "x"}] * 10_000,
        [1] * 500_000,
        [{"role": "user", "content": [1] * 500_000}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"content": "x"}],
    )],
    (CHAT, "messages", [{"role": "\r\n\0", "content": CHAT_TEXT}], 200),
    (CHAT, "messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}], 400),
    *[(CHAT, "chat_template_kwargs", {name: 1}, 400) for name in ("messages", "tools", "eos_token", "\ud800")],
    *[(CHAT, "chat_template_kwargs", {name: 1}, 200) for name in ("self", "tokenizer", "source", "__class__", "loop")],
    (CHAT, "tools", [{"type": "function"}], 400),
    *[(NATIVE, "adapter_source", name, 200) for name in ("x", "pbase")],  # the source is not used
]  # fmt: skip

# --- HTTP -------------------------------------------------------------------------------------------------------------


class RawCase(NamedTuple):
    """Bytes to send, and the allowed response statuses."""

    data: bytes
    statuses: tuple[int, ...]
    path: str = "/"


def get(*headers: bytes, target: bytes = b"/health", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join(
        [b"GET %s HTTP/%s" % (target, version), b"host: localhost", b"connection: close", *headers, b"", b""]
    )


def keep_alive_request(method: str, path: str, *headers: tuple[str, str], body: bytes = b"") -> bytes:
    """Return a request that keeps the connection open."""
    return request(method, path, headers, body).replace(b"connection: close\r\n", b"")


RAW: dict[str, RawCase] = {
    "CR in a request's id": RawCase(get(b"x-request-id: a\rset-cookie: b"), (400,)),
    "LF in a request's id": RawCase(get(b"x-request-id: a\nset-cookie: b"), (400,)),
    "NUL in a header": RawCase(get(b"x-request-id: a\0b"), (400,)),
    "a folded header": RawCase(get(b"x-request-id: a", b"  b: c"), (400,)),
    "space before a colon": RawCase(get(b"content-length : 5"), (400,)),
    "a header without a name": RawCase(get(b": x"), (400,)),
    "a header of odd bytes": RawCase(get(b"x-request-id: \xff\xfe"), (200,)),
    "a request's id that is too long": RawCase(get(b"x-request-id: " + b"a" * 10_000), (200,)),
    "10,000 headers": RawCase(get(*[b"x-%d: value" % number for number in range(10_000)]), (431,)),
    "a header of 1 MB": RawCase(get(b"x: " + b"a" * 2**20), (431,)),
    "a URL of 1 MB": RawCase(get(target=b"/" + b"a" * 2**20), (431,)),
    "a URL of 60 kB": RawCase(get(target=b"/" + b"a" * 60_000), (404,)),
    "an absolute URI": RawCase(get(target=b"http://evil/health"), (200,)),
    "an absolute URI with dots": RawCase(get(target=b"http://evil/../health"), (404,)),
    "NUL in a path": RawCase(get(target=b"/a\0b"), (400,)),
    "bytes in a path": RawCase(get(target=b"/\xff\xfe"), (400,)),
    "a percent sign": RawCase(get(target=b"/%zz%"), (404,)),
    "percent bytes": RawCase(get(target=b"/%ff%fe%00"), (404,)),
    "a lone surrogate in a path": RawCase(get(target=b"/v1/models/%ed%a0%80"), (404,), "/v1/models"),
    "the server itself": RawCase(b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", (400, 404)),
    "HTTP/0.9": RawCase(b"GET /health\r\n\r\n", (200, 400)),
    "HTTP/1.0": RawCase(b"GET /health HTTP/1.0\r\n\r\n", (200,)),
    "HTTP/2": RawCase(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    "HTTP/9.9": RawCase(get(version=b"9.9"), (400,)),
    "TLS": RawCase(bytes.fromhex("16030100f5010000f10303") + bytes(200), (400,)),
    "garbage": RawCase(bytes(range(256)) * 10, (400,)),
    "an unknown method": RawCase(request("BREW", "/"), (400,)),
    "a method in lower case": RawCase(request("get", "/"), (400,)),
    "CONNECT": RawCase(request("CONNECT", "evil:443"), (400,)),
    "CONNECT to a route": RawCase(request("CONNECT", NATIVE), (400,)),
    "a chunk's size that is none": RawCase(chunked(NATIVE, b"zz\r\nabc\r\n0\r\n\r\n"), (400,)),
    "a chunk's size below 0": RawCase(chunked(COMPLETIONS, b"-1\r\nabc\r\n0\r\n\r\n"), (400,), COMPLETIONS),
    "a chunk's size beyond all": RawCase(chunked(NATIVE, b"f" * 20 + b"\r\nabc"), (400,)),
    "chunks without end": RawCase(chunked(NATIVE, b"10000\r\n%s\r\n" % (b" " * 65536) * 40), (413,)),
    "chunks that are good": RawCase(chunked(NATIVE, b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)), (200,)),
    "one-byte chunks": RawCase(chunked(NATIVE, b"".join(b"1\r\n%c\r\n" % c for c in GOOD) + b"0\r\n\r\n"), (200,)),
    "chunks and a length": RawCase(
        post(NATIVE, b"0\r\n\r\n", ("transfer-encoding", "chunked"), ("content-length", "3")), (400,)
    ),
    "an unknown transfer coding": RawCase(post(NATIVE, GOOD, ("transfer-encoding", "zip")), (400,)),
    "a length and chunks": RawCase(
        post(NATIVE, b"0\r\n\r\n", ("content-length", "3"), ("transfer-encoding", "chunked")), (400,)
    ),
    "two transfer codings": RawCase(post(NATIVE, GOOD, ("transfer-encoding", "chunked, identity")), (400,)),
    "two headers of transfer codings": RawCase(
        post(NATIVE, GOOD, ("transfer-encoding", "chunked"), ("transfer-encoding", "identity")), (400,)
    ),
    "a transfer coding that looks like chunks": RawCase(post(NATIVE, GOOD, ("transfer-encoding", "xchunked")), (400,)),
    "a folded length": RawCase(get(b"content-length:", b" 5"), (400,)),
    "a folded transfer coding": RawCase(get(b"transfer-encoding:", b"\tchunked"), (400,)),
    "two equal lengths": RawCase(post(NATIVE, b"{}", ("content-length", "2"), ("content-length", "2")), (400,)),
    "a list of lengths": RawCase(post(NATIVE, b"{}", ("content-length", "2, 2")), (400,)),
    "a line that ends in LF only": RawCase(b"GET /health HTTP/1.1\nhost: localhost\nconnection: close\n\n", (200, 400)),
    "another host": RawCase(request("GET", "/health").replace(b"localhost", b"evil.example"), (403,)),
    "two hosts": RawCase(get(b"host: evil.example"), (400,)),
    "two bearers": RawCase(post(NATIVE, GOOD, ("authorization", "Bearer a"), ("authorization", "Bearer b")), (400,)),
    "two types": RawCase(post(NATIVE, GOOD, ("content-type", "text/plain"), ("content-type", "text/x")), (400,)),
    "two lengths": RawCase(post(NATIVE, b"{}", ("content-length", "2"), ("content-length", "3")), (400,)),
    **{
        f"a length of {length}": RawCase(post(NATIVE, b"{}", ("content-length", length)), (400,))
        for length in ("-1", "x", "+2", "1e3", "0x10", "9" * 30)
    },
    "a length beyond the limit": RawCase(post(NATIVE, b"{}", ("content-length", str(10**15))), (413,)),
    "a length that is too short": RawCase(post(NATIVE, GOOD, ("content-length", "5")), (400,)),
    "an expectation": RawCase(post(NATIVE, GOOD, ("expect", "200-maybe")), (200,)),
    "a websocket": RawCase(
        get(b"upgrade: websocket", b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", b"sec-websocket-version: 13"), (200,)
    ),
    "a body for GET": RawCase(request("GET", "/health", [("content-length", "5")], b"hello"), (200,)),
    "a bearer of odd bytes": RawCase(post(NATIVE, GOOD, ("authorization", "Bearer \u00ff\u4e2d")), (200,)),
    "a trace of odd bytes": RawCase(post(NATIVE, GOOD, ("traceparent", "\u00ff" * 1000)), (200,)),
    **{
        f"a time limit of {limit}": RawCase(post(CHAT, MESSAGES, ("x-request-timeout", limit)), (400,), CHAT)
        for limit in ("nan", "-1", "0", "1e999", "x", "")
    },
    "a range": RawCase(request("GET", "/openapi.json", [("range", "bytes=0-1,-99999999999")]), (200,)),
    **{
        path: RawCase(request("GET", path), (404,), path)
        for path in (
            "/docs/static/../../etc/passwd", "/docs/static/..%2f..%2fetc%2fpasswd", "/docs/static//etc/passwd",
            "/docs/static/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd",
            "//health", "/health/", "/generate/", "/v1", "/v1/", "/V1/models", "/redoc", "/docs/", "/docs/static/",
        )
    },
}  # fmt: skip

SLOW: dict[str, Callable[[], Iterator[bytes]]] = {
    "nothing": lambda: iter(()),
    "headers": lambda: (bytes([byte]) for byte in get(b"x: " + b"a" * 10_000)),
    "endless headers": lambda: (b"x-%d: y\r\n" % number if number else b"GET / HTTP/1.1\r\n" for number in range(9999)),
    "a body": lambda: iter([post(NATIVE, b"{", ("content-length", "1000")), *[b" "] * 998]),
    "chunks": lambda: iter([chunked(COMPLETIONS, b""), *[b"1\r\n \r\n"] * 9999]),
    "a body that never comes": lambda: iter([post(CHAT, b"", ("content-length", "1000"))]),
}
