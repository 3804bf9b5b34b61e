"""Completes the OpenAPI document with the server's limits, stream events and authentication."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lorax_server.server.access.keys import KeyRing
from lorax_server.server.http.error_responses import OPENAI_PREFIX
from lorax_server.server.http.middleware import PUBLIC_PATHS
from lorax_server.server.http.replica_protocol import CHANGE_PATHS
from lorax_server.server.schemas.lorax import ErrorResponse, StreamResponse
from lorax_server.server.schemas.openai import ChatCompletionChunk, CompletionChunk, OpenAIErrorResponse
from lorax_server.server.schemas.responses import ResponseEvent
from lorax_server.server.service import Service

SCHEMA_REFERENCE = "#/components/schemas/{model}"

BEARER_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A server API key. If the server has no keys, a token for the adapter source.",
}
VERSION_PATHS = ("/v1/adapters/{name}/weights", "/v1/adapters/{name}/versions")
EVENT_SCHEMA = "x-event-schema"  # OpenAPI 3.2 has a standard field, but tools do not support it yet
# The event schema of each streaming route, and the schema of the last event after an error.
STREAM_EVENTS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "/": (StreamResponse, ErrorResponse),
    "/invocations": (StreamResponse, ErrorResponse),
    "/generate_stream": (StreamResponse, ErrorResponse),
    "/v1/completions": (CompletionChunk, OpenAIErrorResponse),
    "/v1/chat/completions": (ChatCompletionChunk, OpenAIErrorResponse),
    "/v1/responses": (ResponseEvent, OpenAIErrorResponse),
}


def describe_limits(document: dict[str, Any], service: Service) -> None:
    """Add limits that are only known after the model is loaded, stream events and authentication to the document."""
    config, schemas = service.config, document["components"]["schemas"]
    max_id = service.tokenizers.base.num_ids - 1
    lengths = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
    limits = dict.fromkeys(lengths, service.max_total_tokens - 1)
    limits |= dict.fromkeys(("return_k_alternatives", "logprobs", "top_logprobs"), config.max_logprobs)
    limits |= dict.fromkeys(("n", "best_of"), config.max_choices)
    limits["truncate"] = service.max_input_length
    limits["prompt"] = max(service.engine.info.vocab_size - 1, max_id)  # prompts may be lists of token IDs
    for name in ("GenerateParameters", "CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"):
        fields = schemas[name]["properties"]
        for field in limits.keys() & fields.keys():
            _set_limit(fields[field], "integer", "maximum", limits[field])
        _set_limit(fields["stop"], "array", "maxItems", config.max_stop_sequences)
    _set_limit(schemas["GenerateParameters"]["properties"]["best_of"], "integer", "maximum", config.max_best_of)
    _set_limit(schemas["DetokenizeRequest"]["properties"]["ids"], "integer", "maximum", max_id)
    _describe_streams(document)
    _describe_operations(document, service.keys)


def _set_limit(schema: dict[str, Any], kind: str, keyword: str, limit: int) -> None:
    """Set a keyword such as `maximum` on every nested schema of type `kind`."""
    if schema.get("type") == kind:
        schema[keyword] = limit
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        _set_limit(inner, kind, keyword, limit)


def _describe_streams(document: dict[str, Any]) -> None:
    """Describe streams as text, which generated clients support, and add event schemas in `x-event-schema`."""
    models = sorted({model for pair in STREAM_EVENTS.values() for model in pair}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "serialization") for model in models], ref_template=SCHEMA_REFERENCE)
    for name, schema in schemas["$defs"].items():
        document["components"]["schemas"].setdefault(name, schema)
    for path, pair in STREAM_EVENTS.items():
        event, error = (model.__name__ for model in pair)
        description = (
            f"Server-sent events: each is `data: ` and a `{event}`. After an error, the last event is an `{error}`."
        )
        content = document["paths"][path]["post"]["responses"]["200"].setdefault("content", {})
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": description},
            EVENT_SCHEMA: {"oneOf": [{"$ref": SCHEMA_REFERENCE.format(model=name)} for name in (event, error)]},
        }


def _describe_operations(document: dict[str, Any], keys: KeyRing) -> None:
    """Mark operations that require or accept a key, because the page at `/docs` sends keys only to marked operations.

    Also remove the 422 response that FastAPI adds to OpenAI routes, which respond with 400 instead.
    """
    document["components"]["securitySchemes"] = {"bearer": BEARER_SCHEME}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith(OPENAI_PREFIX):
                del operation["responses"]["422"]
            if method != "get" or not PUBLIC_PATHS.fullmatch(path):
                is_change = method != "get" and path in (*CHANGE_PATHS, *VERSION_PATHS)
                needs_key = not keys.allows_anonymous or (is_change and keys.has_admin)
                operation["security"] = [{"bearer": []}] if needs_key else [{"bearer": []}, {}]
