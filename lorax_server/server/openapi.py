"""The OpenAPI document tells the limits in force, so that who reads it can keep them."""

from typing import Any

from fastapi import FastAPI

from lorax_server.server.parts import Parts

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
    if not parts.keys.is_open:
        _require_keys(document)


def _bound(schema: dict[str, Any], field: str, most: int, word: str = "maximum", kind: str = "integer") -> None:
    described = schema["properties"][field]
    for each in (described, *described.get("anyOf", ())):
        if each.get("type") == kind:
            each[word] = most


def _require_keys(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = BEARER
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path not in ("/", "/health", "/ping", "/startup", "/metrics") or operation.get("requestBody"):
                operation["security"] = [{"bearer": []}]
