"""The OpenAPI document tells the limits in force, so that who reads it can keep them."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lorax_server.server.access.keys import KeyRing
from lorax_server.server.http.middleware import PUBLIC
from lorax_server.server.http.problems import OPENAI_PREFIX
from lorax_server.server.routes.lorax_schemas import ErrorResponse, StreamResponse
from lorax_server.server.routes.openai_schemas import ChatCompletionChunk, CompletionChunk, OpenAIErrorResponse
from lorax_server.server.service import Service

REFERENCE = "#/components/schemas/{model}"

ADMIN = ("/v1/adapters/load", "/v1/adapters/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of the server, where it has any; else what an adapter's source wants to see of the caller.",
}
EVENT_SCHEMA = "x-event-schema"  # OpenAPI has a word for it from 3.2 on, which tools do not know yet
# What each event of a stream is, or the last one if the stream fails.
STREAMS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "/": (StreamResponse, ErrorResponse),
    "/invocations": (StreamResponse, ErrorResponse),
    "/generate_stream": (StreamResponse, ErrorResponse),
    "/v1/completions": (CompletionChunk, OpenAIErrorResponse),
    "/v1/chat/completions": (ChatCompletionChunk, OpenAIErrorResponse),
}


def describe_limits(app: FastAPI, service: Service) -> None:
    """Fill in what is known only when the model is."""
    document = app.openapi()
    schemas = document["components"]["schemas"]
    config = service.config
    _bound(schemas["GenerateParameters"], "max_new_tokens", service.max_total_tokens - 1)
    _bound(schemas["GenerateParameters"], "truncate", service.max_input_length)
    _bound(schemas["GenerateParameters"], "best_of", config.max_best_of)
    _bound(schemas["GenerateParameters"], "return_k_alternatives", config.max_logprobs)
    for name, field in (("CompletionRequest", "logprobs"), ("ChatCompletionRequest", "top_logprobs")):
        _bound(schemas[name], "max_tokens", service.max_total_tokens - 1)
        _bound(schemas[name], "n", config.max_choices)
        _bound(schemas[name], field, config.max_logprobs)
        _bound(schemas[name], "stop", config.max_stop_sequences, "maxItems", "array")
    _bound(schemas["CompletionRequest"], "best_of", config.max_choices)
    _bound(schemas["ChatCompletionRequest"], "max_completion_tokens", service.max_total_tokens - 1)
    _bound(schemas["GenerateParameters"], "stop", config.max_stop_sequences, "maxItems", "array")
    vocabulary = max(int(service.engine.info.get("vocab_size") or 0), service.tokenizers.base.num_ids)
    _bound_ids(schemas["CompletionRequest"]["properties"]["prompt"], vocabulary - 1)
    _bound_ids(schemas["DetokenizeRequest"]["properties"]["ids"], service.tokenizers.base.num_ids - 1)
    _describe_streams(document)
    _describe_refusals(document)
    _describe_keys(document, service.keys)


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


def _describe_streams(document: dict[str, Any]) -> None:
    """A stream is text to a tool; what its events are is for people, and for tools that look for it."""
    models = sorted({model for pair in STREAMS.values() for model in pair}, key=lambda model: model.__name__)
    _, found = models_json_schema([(model, "serialization") for model in models], ref_template=REFERENCE)
    for name, schema in found["$defs"].items():
        document["components"]["schemas"].setdefault(name, schema)
    for path, (event, error) in STREAMS.items():
        described = (
            f"Events: each is `data: ` and a `{event.__name__}`. One that fails ends with an `{error.__name__}`."
        )
        content = document["paths"][path]["post"]["responses"]["200"].setdefault("content", {})
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": described},
            EVENT_SCHEMA: {"oneOf": [{"$ref": REFERENCE.format(model=each.__name__)} for each in (event, error)]},
        }


def _describe_refusals(document: dict[str, Any]) -> None:
    """FastAPI would tell of its own 422 if routes did not; OpenAI's have 400 for the same."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if path.startswith(OPENAI_PREFIX):
                del operation["responses"]["422"]


def _describe_keys(document: dict[str, Any], keys: KeyRing) -> None:
    """Say which callers have to show a key, and which may: the page at `/docs` sends it only where this says so."""
    document["components"]["securitySchemes"] = {"bearer": SCHEME}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method != "get" or not PUBLIC.fullmatch(path):
                needs_key = not keys.is_open or (path in ADMIN and keys.has_admin)
                operation["security"] = [{"bearer": []}] if needs_key else [{"bearer": []}, {}]
