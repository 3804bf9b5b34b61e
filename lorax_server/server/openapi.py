"""The OpenAPI document tells the limits in force, so that who reads it can keep them."""

from typing import Any

from fastapi import FastAPI

from lorax_server.server.parts import Parts

EMPTY = ("/", "/health", "/ping", "/startup")
STREAMS = ("/", "/invocations", "/generate_stream", "/v1/completions", "/v1/chat/completions")
EVENTS = {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}}
BEARER = {"bearer": {"type": "http", "scheme": "bearer"}}


def describe_limits(app: FastAPI, parts: Parts) -> None:
    """Fill in what is known only when the model is."""
    document = app.openapi()
    schemas = document["components"]["schemas"]
    config = parts.config
    _bound(schemas["GenerateParameters"], "max_new_tokens", parts.max_total_tokens - 1)
    _bound(schemas["GenerateParameters"], "truncate", parts.max_input_length)
    _bound(schemas["GenerateParameters"], "best_of", config.max_best_of)
    _bound(schemas["GenerateParameters"], "return_k_alternatives", config.max_logprobs)
    for name, field in (("CompletionRequest", "logprobs"), ("ChatCompletionRequest", "top_logprobs")):
        _bound(schemas[name], "max_tokens", parts.max_total_tokens - 1)
        _bound(schemas[name], "n", config.max_choices)
        _bound(schemas[name], field, config.max_logprobs)
        _bound(schemas[name], "stop", config.max_stop_sequences, "maxItems", "array")
    _bound(schemas["CompletionRequest"], "best_of", config.max_choices)
    _bound(schemas["ChatCompletionRequest"], "max_completion_tokens", parts.max_total_tokens - 1)
    _bound(schemas["GenerateParameters"], "stop", config.max_stop_sequences, "maxItems", "array")
    vocabulary = max(int(parts.engine.info.get("vocab_size") or 0), parts.tokenizers.base.num_ids)
    _bound_ids(schemas["CompletionRequest"]["properties"]["prompt"], vocabulary - 1)
    _bound_ids(schemas["DetokenizeRequest"]["properties"]["ids"], parts.tokenizers.base.num_ids - 1)
    _describe_answers(document["paths"])
    if not parts.keys.is_open:
        _require_keys(document)


def _bound(schema: dict[str, Any], field: str, most: int, word: str = "maximum", kind: str = "integer") -> None:
    described = schema["properties"][field]
    for each in (described, *described.get("anyOf", ())):
        if each.get("type") == kind:
            each[word] = most


def _bound_ids(schema: dict[str, Any], most: int) -> None:
    """Token ids, however deep they lie."""
    if schema.get("type") == "integer":
        schema["maximum"] = most
    for each in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        _bound_ids(each, most)


def _describe_answers(paths: dict[str, Any]) -> None:
    """What FastAPI cannot be told: that there may be no body, or another one than usual."""
    for path in EMPTY:
        del paths[path]["get"]["responses"]["200"]["content"]
    for path in STREAMS:
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = EVENTS


def _require_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = BEARER
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path not in ("/", "/health", "/ping", "/startup", "/metrics") or operation.get("requestBody"):
                operation["security"] = [{"bearer": []}]
