"""Routes for health checks, server information, models, metrics and the tokenizer."""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response

from lorax_server import __version__
from lorax_server.errors import InputError, LoraxError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import AdapterKey, make_unknown_model_error, with_suggestions
from lorax_server.server.adapter_listing import select_names
from lorax_server.server.checks import check_no_surrogates
from lorax_server.server.http.error_responses import ErrorResponse, json_response
from lorax_server.server.routes.lorax import ERROR_RESPONSES
from lorax_server.server.routes.openai import ERROR_RESPONSES as OPENAI_ERRORS
from lorax_server.server.schemas.lorax import (
    DetokenizeRequest,
    DetokenizeResponse,
    Info,
    SimpleToken,
    TokenizeRequest,
)
from lorax_server.server.schemas.openai import Model, ModelList
from lorax_server.server.service import Service
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.text.tokenizer import TokenSpan
from lorax_server.types import Request as EngineRequest
from lorax_server.types import SamplingParams, StopParams

JSON_CONTENT_TYPE = "application/json"
MAX_TOKENIZE_CHARACTERS = 2**18  # each character adds up to 50 characters to the response
LISTING_COST_FACTOR = 4  # listing tokens takes this many times longer than tokenizing
ENCODE_BATCH_TOKENS = 4096  # encoding more tokens in one call would hold the GIL for too long
PROBE_VALID_S = 5.0  # a successful probe is cached, so that callers without a key cannot overload the engine
STATUS_TIMEOUT_S = 2.0  # a slow engine must not block the other metrics
ALL_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
NOT_STORED_MESSAGE = "responses are not stored and cannot be retrieved; use POST /v1/responses to create one"


def make_router(service: Service) -> APIRouter:
    router = APIRouter()
    openai: dict[str, Any] = {"responses": OPENAI_ERRORS, "tags": ["OpenAI Compatible"]}
    _add_health(router, service)
    _add_metrics(router, service)
    _add_tokenizer(router, service)

    @router.get("/info", operation_id="get_info", response_model=Info, responses=ERROR_RESPONSES, tags=["LoRAX"])
    async def info() -> Response:
        """Return the served model and the server's limits."""
        return json_response(_make_info(service).model_dump())

    @router.get("/version", operation_id="get_version", responses=ERROR_RESPONSES, tags=["LoRAX"])
    async def version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": __version__}

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", operation_id="list_models", response_model=ModelList, **openai)
    async def models(request: Request) -> Response:
        """List the base model and the named adapters. Requests may also name any adapter in an adapter source."""
        key: Key = request.state.key
        allowed = await select_names(service.model_names, key)

        models = await asyncio.to_thread(_list_models, service, key, allowed)
        return await asyncio.to_thread(json_response, {"object": "list", "data": models})

    @router.get("/v1/models/{model:path}", operation_id="get_model", response_model=Model, **openai)
    async def model(request: Request, model: str) -> Response:
        """Return one model."""
        key, names = request.state.key, service.model_names
        named = names.adapters.get(model)
        allowed = [(model, named)] if named is not None and names.may_use(key, model, named) else []
        for described in _list_models(service, key, allowed):
            if described["id"] == model:
                return json_response(described)
        raise await with_suggestions(make_unknown_model_error(model), model, None, names, key)

    router.api_route("/v1/responses/{rest:path}", methods=ALL_METHODS, include_in_schema=False)(
        _reject_stored_responses
    )
    return router


def _reject_stored_responses() -> Response:
    """Respond with 404 and an explanation, because SDKs report only that the response was not found."""
    raise HTTPException(HTTPStatus.NOT_FOUND, NOT_STORED_MESSAGE)


def _add_health(router: APIRouter, service: Service) -> None:
    unhealthy = ErrorResponse(503, "healthcheck", "unhealthy")
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Everything is working"}, **ERROR_RESPONSES}

    async def health(request: Request) -> Response:
        """Return 200 if the server can process requests, else 503."""
        return Response() if service.is_ready else unhealthy.to_response(request.url.path)

    empty: dict[str, Any] = {"response_class": Response, "responses": responses, "tags": ["LoRAX"]}
    for path, name in (("/health", "check_health"), ("/ping", "ping"), ("/", "check")):
        router.get(path, operation_id=name, **empty)(health)

    lock, valid_until = asyncio.Lock(), -math.inf

    @router.get("/startup", operation_id="check_startup", **empty)
    async def startup() -> Response:
        """Generate one token with the base model, unless a probe succeeded in the last 5 seconds."""
        nonlocal valid_until
        if not service.is_ready:
            return unhealthy.to_response("/")
        async with lock:  # concurrent callers share one probe
            if time.monotonic() >= valid_until:
                request = EngineRequest(service.engine.new_id(), [0], SamplingParams(), StopParams(max_new_tokens=1))
                if not [output async for output in service.engine.generate(request)]:
                    return ErrorResponse(503, "failed healthcheck", "Empty generation").to_response("/")
                valid_until = time.monotonic() + PROBE_VALID_S
        return Response()


def _add_metrics(router: APIRouter, service: Service) -> None:
    as_text = {"text/plain": {"schema": {"type": "string"}}}

    responses: dict[int | str, dict[str, Any]] = {200: {"content": as_text}}

    @router.get("/metrics", operation_id="get_metrics", response_class=Response, responses=responses, tags=["LoRAX"])
    async def metrics(request: Request) -> Response:
        """Return Prometheus metrics, or JSON if `Accept` contains `application/json`."""
        status, engine = None, service.engine
        with suppress(LoraxError, TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                status = await engine.status()
        service.metrics.engine.update(status, engine.is_healthy, engine.num_restarts)
        if JSON_CONTENT_TYPE in request.headers.get("accept", ""):
            return json_response(service.metrics.render_json())
        return Response(service.metrics.render_prometheus(), headers={"content-type": Metrics.content_type})


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    common: dict[str, Any] = {"responses": ERROR_RESPONSES, "tags": ["Tokenization"]}

    @router.post("/tokenize", operation_id="tokenize", response_model=list[SimpleToken], **common)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Tokenize a text with the base model's tokenizer."""
        key: Key = request.state.key
        if len(body.inputs) > MAX_TOKENIZE_CHARACTERS:
            raise InputError(
                f"`inputs` must have at most {MAX_TOKENIZE_CHARACTERS} characters here. Given: {len(body.inputs)}"
            )
        check_no_surrogates(body.inputs)
        tokenizer, with_special = service.tokenizers.base, body.add_special_tokens is not False

        def write() -> Response:
            return encode_token_spans(tokenizer.tokenize_with_spans(body.inputs, with_special))

        with service.rate_limits.acquire(key):
            return await service.tokenizers.run(tokenizer, LISTING_COST_FACTOR * len(body.inputs), write)

    @router.post("/detokenize", operation_id="detokenize", response_model=DetokenizeResponse, **common)
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """Convert token IDs to text."""
        key: Key = request.state.key
        tokenizer, skip_special = service.tokenizers.base, body.skip_special_tokens is not False
        with service.rate_limits.acquire(key):
            return json_response({"text": await service.tokenizers.decode(tokenizer, body.ids, skip_special)})


def encode_token_spans(pieces: Sequence[TokenSpan]) -> Response:
    """Return token pieces as a JSON response, encoded in batches to avoid holding the GIL for too long."""
    batches = (pieces[start : start + ENCODE_BATCH_TOKENS] for start in range(0, len(pieces), ENCODE_BATCH_TOKENS))
    encoded = [msgspec.json.encode([piece._asdict() for piece in batch])[1:-1] for batch in batches]
    return Response(b"[" + b",".join(encoded) + b"]", media_type=JSON_CONTENT_TYPE)


def _make_info(service: Service) -> Info:
    config, engine = service.config, service.engine.info
    return Info(
        model_id=config.model_id,
        model_sha=config.model_revision,
        model_dtype=engine.dtype,
        weight_format=engine.weight_format or None,
        weight_bytes=engine.weight_bytes or None,
        model_device_type=engine.device,
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_input_length=service.max_input_length,
        max_total_tokens=service.max_total_tokens,
        max_batch_total_tokens=engine.num_blocks * engine.block_size,
        version=__version__,
    )


def _list_models(service: Service, key: Key, allowed: list[tuple[str, AdapterKey]]) -> list[dict[str, Any]]:
    """Return descriptions of the base model, if the caller may use it, and of the allowed adapters."""
    names, config = service.model_names, service.config
    common = {
        "object": "model",
        "created": service.created,
        "owned_by": "lorax",
        "max_model_len": service.max_total_tokens,
    }
    bases = names.listed_base_names if key.base_model else ()
    engine = service.engine.info
    base: dict[str, Any] = {
        "root": config.model_id,
        "parent": None,
        "weight_format": engine.weight_format or None,
        "weight_bytes": engine.weight_bytes or None,
    }
    models = [{"id": name, **common, **base} for name in bases]
    # The folder names of uploaded versions are internal.
    uploaded = {
        version.key: f"{name}@v{number}"
        for name, adapter in service.versions
        for number, version in adapter.versions.items()
        if version.is_uploaded
    }
    adapters = (
        {"id": alias, **common, "root": uploaded.get(key, key.name), "parent": names.primary_name}
        for alias, key in allowed
    )
    return [*models, *adapters]
