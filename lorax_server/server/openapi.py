"""The OpenAPI document with the limits in force, so that its readers can keep them."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lorax_server.server.access.keys import KeyRing
from lorax_server.server.http.middleware import PUBLIC
from lorax_server.server.http.problems import OPENAI_PREFIX
from lorax_server.server.http.replica_protocol import CHANGE_PATHS
from lorax_server.server.schemas.lorax import ErrorResponse, StreamResponse
from lorax_server.server.schemas.openai import ChatCompletionChunk, CompletionChunk, OpenAIErrorResponse
from lorax_server.server.schemas.responses import ResponseEvent
from lorax_server.server.service import Service

REFERENCE = "#/components/schemas/{model}"

SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of the server, where it has any; else what an adapter's source wants to see of the caller.",
}
EVENT_SCHEMA = "x-event-schema"  # OpenAPI has a word for it from 3.2 on, which tools do not know yet
# The events of each stream, and the last event of a stream that fails.
STREAMS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "/": (StreamResponse, ErrorResponse),
    "/invocations": (StreamResponse, ErrorResponse),
    "/generate_stream": (StreamResponse, ErrorResponse),
    "/v1/completions": (CompletionChunk, OpenAIErrorResponse),
    "/v1/chat/completions": (ChatCompletionChunk, OpenAIErrorResponse),
    "/v1/responses": (ResponseEvent, OpenAIErrorResponse),
}


def describe_limits(app: FastAPI, service: Service) -> None:
    """Fill in what is known only once the model is loaded."""
    document = app.openapi()
    config, schemas = service.config, document["components"]["schemas"]
    max_id = service.tokenizers.base.num_ids - 1
    lengths = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens")
    limits = dict.fromkeys(lengths, service.max_total_tokens - 1)
    limits |= dict.fromkeys(("return_k_alternatives", "logprobs", "top_logprobs"), config.max_logprobs)
    limits |= dict.fromkeys(("n", "best_of"), config.max_choices)
    limits["truncate"] = service.max_input_length
    limits["prompt"] = max(service.engine.info.vocab_size - 1, max_id)  # of token ids
    for name in ("GenerateParameters", "CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"):
        fields = schemas[name]["properties"]
        for field in limits.keys() & fields.keys():
            _limit(fields[field], "integer", "maximum", limits[field])
        _limit(fields["stop"], "array", "maxItems", config.max_stop_sequences)
    _limit(schemas["GenerateParameters"]["properties"]["best_of"], "integer", "maximum", config.max_best_of)
    _limit(schemas["DetokenizeRequest"]["properties"]["ids"], "integer", "maximum", max_id)
    _describe_streams(document)
    _describe_operations(document, service.keys)


def _limit(schema: dict[str, Any], kind: str, word: str, limit: int) -> None:
    """Set a limit of all values of a kind, however deep they lie."""
    if schema.get("type") == kind:
        schema[word] = limit
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        _limit(inner, kind, word, limit)


def _describe_streams(document: dict[str, Any]) -> None:
    """Add the schemas of events. To most tools a stream is text; people, and tools that know the field, see more."""
    models = sorted({model for pair in STREAMS.values() for model in pair}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "serialization") for model in models], ref_template=REFERENCE)
    for name, schema in schemas["$defs"].items():
        document["components"]["schemas"].setdefault(name, schema)
    for path, pair in STREAMS.items():
        event, error = (model.__name__ for model in pair)
        description = f"Events: each is `data: ` and a `{event}`. One that fails ends with an `{error}`."
        content = document["paths"][path]["post"]["responses"]["200"].setdefault("content", {})
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": description},
            EVENT_SCHEMA: {"oneOf": [{"$ref": REFERENCE.format(model=name)} for name in (event, error)]},
        }


def _describe_operations(document: dict[str, Any], keys: KeyRing) -> None:
    """Say which operations need a key, and which take one: the page at `/docs` sends it only where this says so.

    FastAPI adds a 422 to each, for which OpenAI's routes have 400.
    """
    document["components"]["securitySchemes"] = {"bearer": SCHEME}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path.startswith(OPENAI_PREFIX):
                del operation["responses"]["422"]
            if method != "get" or not PUBLIC.fullmatch(path):
                needs_key = not keys.is_open or (path in CHANGE_PATHS and keys.has_admin)
                operation["security"] = [{"bearer": []}] if needs_key else [{"bearer": []}, {}]
