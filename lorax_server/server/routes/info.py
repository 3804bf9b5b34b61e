"""Routes that do not ask the model for text: health, models, metrics, and the tokenizer."""

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
from lorax_server.errors import InputError, LoraxError, NotSupportedError
from lorax_server.server.access.keys import Key
from lorax_server.server.access.model_names import Named, unknown_model, with_nearest
from lorax_server.server.adapter_listing import select_names
from lorax_server.server.checks import check_text
from lorax_server.server.http.problems import Problem, json_response
from lorax_server.server.routes.lorax import ERRORS
from lorax_server.server.routes.openai import ERRORS as OPENAI_ERRORS
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
from lorax_server.text.tokenizer import Piece
from lorax_server.types import Request as EngineRequest
from lorax_server.types import SamplingParams, StopParams

JSON = "application/json"
MAX_CHARACTERS = 2**18  # each becomes up to fifty characters of the answer
WRITTEN = 4  # listing tokens takes so many times as long as making them
MANY = 4096  # tokens that are encoded as JSON at once
PROBE_S = 5.0  # a probe's success holds so long: callers without a key cannot keep the engine at work
STATUS_S = 2.0  # metrics are useful without the status of a slow engine, too
METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
NO_RESPONSES = "responses are not stored, so that none can be asked for; POST /v1/responses answers"
NOT_YET = {
    "/embed": "embeddings are",
    "/v1/embeddings": "embeddings are",
    "/classify": "classification is",
    "/classify_batch": "classification is",
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter()
    openai: dict[str, Any] = {"responses": OPENAI_ERRORS, "tags": ["OpenAI Compatible"]}
    _add_health(router, service)
    _add_metrics(router, service)
    _add_tokenizer(router, service)

    @router.get("/info", operation_id="get_info", response_model=Info, responses=ERRORS, tags=["LoRAX"])
    async def info() -> Response:
        """Describe the model that is served, and the limits in force."""
        return json_response(_info(service))

    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/v1/models", operation_id="list_models", response_model=ModelList, **openai)
    async def models(http: Request) -> Response:
        """List the base model and the adapters that have a name. Requests may name any adapter of a source as well."""
        key: Key = http.state.key
        allowed = await select_names(service.model_names, key)

        models = await asyncio.to_thread(_models, service, key, allowed)
        return await asyncio.to_thread(json_response, {"object": "list", "data": models})

    @router.get("/v1/models/{model:path}", operation_id="get_model", response_model=Model, **openai)
    async def model(http: Request, model: str) -> Response:
        """Describe one model."""
        key, names = http.state.key, service.model_names
        named = names.adapters.get(model)
        allowed = [(model, named)] if named is not None and names.may_use(key, model, named) else []
        for described in _models(service, key, allowed):
            if described["id"] == model:
                return json_response(described)
        raise await with_nearest(unknown_model(model), model, None, names, key)

    def refuse(http: Request) -> Response:
        raise NotSupportedError(f"{NOT_YET[http.url.path]} not supported yet")

    for path in NOT_YET:
        router.post(path, include_in_schema=False)(refuse)
    router.api_route("/v1/responses/{rest:path}", methods=METHODS, include_in_schema=False)(_refuse_responses)
    return router


def _refuse_responses() -> Response:
    """Say why there is none: SDKs report only that nothing was found."""
    raise HTTPException(HTTPStatus.NOT_FOUND, NO_RESPONSES)


def _add_health(router: APIRouter, service: Service) -> None:
    unhealthy = Problem(503, "healthcheck", "unhealthy")
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "Everything is working"}, **ERRORS}

    async def health(http: Request) -> Response:
        """Tell whether requests can be answered."""
        return Response() if service.is_ready else unhealthy.response(http.url.path)

    empty: dict[str, Any] = {"response_class": Response, "responses": answers, "tags": ["LoRAX"]}
    for path, name in (("/health", "check_health"), ("/ping", "ping"), ("/", "check")):
        router.get(path, operation_id=name, **empty)(health)

    lock, valid_until = asyncio.Lock(), -math.inf

    @router.get("/startup", operation_id="check_startup", **empty)
    async def startup() -> Response:
        """Ask the base model for a token, unless one has come in the last seconds."""
        nonlocal valid_until
        if not service.is_ready:
            return unhealthy.response("/")
        async with lock:  # one probe for all callers that wait
            if time.monotonic() >= valid_until:
                request = EngineRequest(service.engine.new_id(), [0], SamplingParams(), StopParams(max_new_tokens=1))
                if not [output async for output in service.engine.generate(request)]:
                    return Problem(503, "failed healthcheck", "Empty generation").response("/")
                valid_until = time.monotonic() + PROBE_S
        return Response()


def _add_metrics(router: APIRouter, service: Service) -> None:
    as_text = {"text/plain": {"schema": {"type": "string"}}}

    answers: dict[int | str, dict[str, Any]] = {200: {"content": as_text}}

    @router.get("/metrics", operation_id="get_metrics", response_class=Response, responses=answers, tags=["LoRAX"])
    async def metrics(http: Request) -> Response:
        """Metrics for Prometheus; as JSON for clients that accept that."""
        status, engine = None, service.engine
        with suppress(LoraxError, TimeoutError):
            async with asyncio.timeout(STATUS_S):
                status = await engine.status()
        service.metrics.engine.update(status, engine.is_healthy, engine.num_restarts)
        if JSON in http.headers.get("accept", ""):
            return json_response(service.metrics.json())
        return Response(service.metrics.prometheus(), headers={"content-type": Metrics.content_type})


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    common: dict[str, Any] = {"responses": ERRORS, "tags": ["Tokenization"]}

    @router.post("/tokenize", operation_id="tokenize", response_model=list[SimpleToken], **common)
    async def tokenize(http: Request, body: TokenizeRequest) -> Response:
        """Split a text into tokens."""
        key: Key = http.state.key
        if len(body.inputs) > MAX_CHARACTERS:
            raise InputError(f"`inputs` must have at most {MAX_CHARACTERS} characters here. Given: {len(body.inputs)}")
        check_text(body.inputs)
        tokenizer, with_special = service.tokenizers.base, body.add_special_tokens is not False

        def write() -> Response:
            return list_pieces(tokenizer.pieces(body.inputs, with_special))

        with service.rate_limits.acquire(key):
            return await service.tokenizers.run(tokenizer, WRITTEN * len(body.inputs), write)

    @router.post("/detokenize", operation_id="detokenize", response_model=DetokenizeResponse, **common)
    async def detokenize(http: Request, body: DetokenizeRequest) -> Response:
        """Return the text that tokens stand for."""
        key: Key = http.state.key
        tokenizer, skip_special = service.tokenizers.base, body.skip_special_tokens is not False
        with service.rate_limits.acquire(key):
            return json_response({"text": await service.tokenizers.decode(tokenizer, body.ids, skip_special)})


def list_pieces(pieces: Sequence[Piece]) -> Response:
    """Write a long list in batches: all at once would hold Python's lock for long."""
    batches = (pieces[start : start + MANY] for start in range(0, len(pieces), MANY))
    written = [msgspec.json.encode([piece._asdict() for piece in batch])[1:-1] for batch in batches]
    return Response(b"[" + b",".join(written) + b"]", media_type=JSON)


def _info(service: Service) -> dict[str, Any]:
    config, engine = service.config, service.engine.info
    return {
        "model_id": config.model_id,
        "model_sha": config.model_revision,
        "model_dtype": engine.dtype,
        "model_device_type": engine.device,
        "model_pipeline_tag": None,
        "max_concurrent_requests": config.max_concurrent_requests,
        "max_best_of": config.max_best_of,
        "max_stop_sequences": config.max_stop_sequences,
        "max_input_length": service.max_input_length,
        "max_total_tokens": service.max_total_tokens,
        "waiting_served_ratio": 0.0,  # LoRAX's settings of a scheduler that is not ours, and likewise below
        "max_batch_total_tokens": engine.num_blocks * engine.block_size,
        "max_waiting_tokens": 0,
        "validation_workers": 0,
        "eager_prefill": True,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "request_logger_url": None,
    }


def _models(service: Service, key: Key, allowed: list[tuple[str, Named]]) -> list[dict[str, Any]]:
    """Describe the models that the caller may use: the base model, and these adapters."""
    names, config = service.model_names, service.config
    common = {
        "object": "model",
        "created": service.created,
        "owned_by": "lorax",
        "max_model_len": service.max_total_tokens,
    }
    bases = dict.fromkeys((names.primary, *config.served_names)) if key.base_model else ()
    models = [{"id": name, **common, "root": config.model_id, "parent": None} for name in bases]
    adapters = ({"id": alias, **common, "root": name.name, "parent": names.primary} for alias, name in allowed)
    return [*models, *adapters]
