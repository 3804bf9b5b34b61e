"""Checks a real server against its OpenAPI document with schemathesis."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis import BaseSchema, Case, GenerationMode, HookContext, hooks
from schemathesis.engine import events, from_schema

from lorax_server.server.schemas.lorax import GenerateParameters, GenerateRequest
from lorax_server.server.schemas.unsupported_fields import FIELDS_BY_ROUTE, GENERATE
from tests.e2e.http_server import Server, serving, write_model

NATIVE = ("/", "/invocations", "/generate", "/generate_stream")
OPENAI = ("/v1/completions", "/v1/chat/completions")
# The server's model generates text, so it rejects all requests to these routes.
POOLED = (
    *("/embed", "/classify", "/classify_batch", "/rerank"),
    *("/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"),
)
# Adapter names, sources and versions have rules that the document cannot express.
ADAPTER_CHANGES = ("/v1/adapters/load", "/v1/load_lora_adapter", "/v1/adapters/{name}/versions")
TEXT = {f"POST {path}" for path in (*NATIVE, *OPENAI)}
ADAPTERS = ("first", "second")
FORMAT_FIELDS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "response_format",
)
RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
MISPLACED = {*FIELDS_BY_ROUTE[GENERATE], *GenerateParameters.model_fields} - {*GenerateRequest.model_fields}
MAX_TOKENS = 3
CONFIG: dict[str, Any] = {
    "seed": 6,
    "continue-on-failure": True,
    "generation": {"mode": "all", "database": "none", "deterministic": True, "max-examples": 25, "no-shrink": True},
    # The document has no links, so there are no stateful tests.
    "phases": {"stateful": {"enabled": False}},
    # These routes accept the same bodies as `/` or as chat, which are tested.
    "operations": [
        {"include-path": "/generate", "phases": {"coverage": {"generation": {"mode": "positive"}}}},
        {"include-path": "/v1/completions", "phases": {"coverage": {"generation": {"mode": "positive"}}}},
        {"include-path": "/generate_stream", "phases": {"coverage": {"enabled": False}}},
        {"include-path": "/invocations", "phases": {"coverage": {"enabled": False}}},
        *(
            {"include-path": path, "checks": {"positive_data_acceptance": {"enabled": False}}}
            for path in POOLED + ADAPTER_CHANGES
        ),
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("schema")
    write_model(folder)
    with serving(folder) as running:
        yield running


@pytest.mark.slow
def test_server_matches_openapi_document(server: Server) -> None:
    """Run all checks on every operation. Most completion requests must succeed."""
    config = schemathesis.Config.from_dict({**CONFIG, "base-url": server.url})
    document = _with_events(server.send("GET", "/openapi.json").json)
    schema = schemathesis.openapi.from_dict(document, config=config)
    with registered_hook(make_valid):
        calls, failures = run(schema)
    assert not failures, f"{len(failures)} failures, such as\n" + "\n\n".join(failures[:5])
    text_calls = Counter({key: count for key, count in calls.items() if key[0] in TEXT})
    successful = Counter({label: count for (label, status), count in text_calls.items() if status == 200})
    assert set(successful) == TEXT
    assert successful.total() >= text_calls.total() / 2
    assert min(successful.values()) >= 10


def _with_events(document: Any) -> Any:
    """Describe single events, because schemathesis applies a stream schema to each event."""
    event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
    for methods in document["paths"].values():
        for operation in methods.values():
            content = operation["responses"]["200"].get("content", {})
            if "text/event-stream" in content:
                content["text/event-stream"] = {"itemSchema": event}
    return document


def run(schema: BaseSchema) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Return the number of responses by operation and status, and the failures."""
    calls: Counter[tuple[str, int]] = Counter()
    failures: list[str] = []
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            responses = {name: call.response for name, call in event.recorder.interactions.items()}
            calls.update((event.recorder.label, reply.status_code) for reply in responses.values() if reply is not None)
            for name, checks in event.recorder.checks.items():
                result = [(check.name, check.failure_info) for check in checks if check.failure_info is not None]
                failures += [_describe(event.recorder.label, *each, responses.get(name)) for each in result]
    return calls, failures


def _describe(label: str, check: str, info: Any, reply: Any) -> str:
    summary = "no answer" if reply is None else f"{reply.status_code} {reply.content[:300]!r}"
    return f"{label}, {check}: {info.failure.message}\n{summary}\n{info.code_sample}"


@contextmanager
def registered_hook(hook: Callable[..., None]) -> Iterator[None]:
    schemathesis.hook("before_call")(hook)
    try:
        yield
    finally:
        hooks.unregister(hook)


# --- Rules beyond the schema ------------------------------------------------------------------------------------------


def make_valid(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Change schema-conforming requests so that they also pass all other checks: existing names, compatible fields and
    short completions. Do not change requests that schemathesis made invalid on purpose."""
    body = _with_integers(case.body)
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or not isinstance(body, dict):
        return
    if case.operation.path in NATIVE:
        is_streamed = bool(body.get("stream")) or case.operation.path == "/generate_stream"
        case.body = {
            **{name: value for name, value in body.items() if name not in MISPLACED},
            "inputs": body["inputs"][:16],
            "parameters": _parameters(body.get("parameters"), is_streamed),
        }
    elif case.operation.path in OPENAI:
        case.body = _openai(body)
    elif case.operation.path == "/v1/responses":
        kept = {name: body[name] for name in ("temperature", "top_p", "stream") if name in body}
        case.body = {
            **kept,
            "model": _existing_adapter(body.get("model")) or "",
            "input": "Who?",
            "max_output_tokens": 16,
        }
    else:
        case.body = body


def _with_integers(value: Any) -> Any:
    """Convert whole numbers to integers: JSON Schema accepts `1.0` for `1`, but the server does not."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**63:
            return int(value)
        case list():
            return [_with_integers(each) for each in value]
        case dict():
            return {name: _with_integers(each) for name, each in value.items()}
    return value


def _parameters(given: dict[str, Any] | None, is_streamed: bool) -> dict[str, Any]:
    result = {**(given or {}), "max_new_tokens": MAX_TOKENS}
    merged = result.get("merged_adapters")
    if merged is not None:
        result["merged_adapters"] = _merged(merged)
    if result.get("response_format"):
        result |= {"response_format": {"type": "json_object"}, "ignore_eos_token": False}
    result["seed"] = _clamp_seed(result.get("seed"), 2**64 - 1)
    result["min_new_tokens"] = min(result.get("min_new_tokens") or 0, 1)
    result["logit_bias"] = _bias(result.get("logit_bias"))
    result["adapter_id"] = None if merged is not None else _existing_adapter(result.get("adapter_id"))
    result.update(_source(result))
    result["adapter_ids"] = _fan_out(result, "adapter_ids")
    if result["adapter_ids"]:
        result |= {"adapter_id": None, "merged_adapters": None, "best_of": 1}
    if (result.get("best_of") or 1) > 1:
        result.update({"best_of": 1} if is_streamed else {"do_sample": True, "seed": None})
    if is_streamed:
        result["decoder_input_details"] = False
    return result


def _fan_out(body: dict[str, Any], field: str) -> list[str] | None:
    """Replace adapter names by two existing adapters."""
    return list(ADAPTERS) if body.get(field) else None


def _merged(merged: dict[str, Any]) -> dict[str, Any]:
    ids = ["first"] * min(len(merged["ids"]), 3)  # all strategies accept adapters of equal rank
    return {**merged, "ids": ids, "weights": [0.5] * len(ids)}


def _bias(given: dict[str, Any] | None) -> dict[str, Any] | None:
    return given and {str(place): bias for place, bias in enumerate(given.values())}


def _openai(found: dict[str, Any]) -> dict[str, Any]:
    merged = found.get("merged_adapters")
    if merged is not None:
        found["merged_adapters"] = _merged(merged)
    found["adapter_id"] = None if merged is not None else _existing_adapter(found.get("adapter_id"))
    found["model"] = "" if merged is not None or found["adapter_id"] else _existing_adapter(found.get("model")) or ""
    found.update(_source(found))
    found["models"] = _fan_out(found, "models")
    if found["models"]:
        found |= {"model": "", "adapter_id": None, "merged_adapters": None}
    forms = [found.pop(name, None) for name in FORMAT_FIELDS]
    if any(forms):
        found["guided_choice"] = ["yes", "no"]
        for name in ("ignore_eos", "ignore_eos_token"):
            found.pop(name, None)
    found.pop("tools", None)  # the chat template does not support tools
    found["max_tokens"] = found["max_completion_tokens"] = MAX_TOKENS
    found["min_tokens"] = min(found.get("min_tokens") or 0, 1)
    found["seed"] = _clamp_seed(found.get("seed"), 2**63 - 1)
    found["n"] = min(found.get("n") or 1, 2)
    found["logit_bias"] = _bias(found.get("logit_bias"))
    if "prompt" in found:
        found["prompt"] = _shorten(found["prompt"])
        found["best_of"] = found["n"]
    else:
        found["tool_choice"] = "none"
        found["messages"] = [_message(message) for message in found["messages"][:2]]
        found["logprobs"] = found.get("logprobs") or found.get("top_logprobs") is not None
        kept = {
            name: value for name, value in (found.get("chat_template_kwargs") or {}).items() if name not in RESERVED
        }
        found["chat_template_kwargs"] = kept
    return found


def _source(found: dict[str, Any]) -> dict[str, str | None]:
    return {
        "adapter_source": "local" if found.get("adapter_source") else None,
        "api_token": "token" if found.get("api_token") else None,
    }


def _clamp_seed(seed: int | None, most: int) -> int | None:
    """Clamp a seed, because schemathesis computes limits as floats and slightly exceeds large ones."""
    return None if seed is None else max(-most, min(seed, most))


def _existing_adapter(name: str | None) -> str | None:
    """Replace a name by an existing adapter. None stays None, the base model."""
    return ADAPTERS[len(name) % 2] if name else name


def _shorten(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt[:16]
    return [_shorten(each) for each in prompt[:2]] if isinstance(prompt[0], str | list) else prompt[:16]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": str(part.get("text"))[:8]} for part in content[:2]]
    message = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    return {
        **message,
        "role": message["role"][:8].replace("tool", "user"),
        "content": content[:16] if content else content,
    }
