"""LoRAX's own routes for text: `/`, `/invocations`, `/generate` and `/generate_stream`."""

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.generation.candidates import sort_candidates
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import write_events
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes.lorax_parameters import choose_adapter, choose_structure, to_options
from lorax_server.server.schemas.lorax import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
)
from lorax_server.server.schemas.unsupported_fields import reject_misplaced
from lorax_server.server.service import Service

TAG = "LoRAX"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504)
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])

    @router.post("/generate", operation_id="generate", response_model=GenerateResponse, responses=ERRORS)
    async def generate(http: Request, body: GenerateRequest) -> Response:
        """Answer a prompt."""
        return await RequestContext(service, http).answer(lambda context: _answer_whole(context, body, as_list=False))

    @router.post("/generate_stream", operation_id="generate_stream", response_class=Response, responses=ERRORS)
    async def generate_stream(http: Request, body: GenerateRequest) -> Response:
        """Answer a prompt token by token. Each event is a `StreamResponse`; the last one has `generated_text`."""
        return await RequestContext(service, http).answer(lambda context: _answer_stream(context, body))

    async def compat(http: Request, body: CompatGenerateRequest) -> Response:
        """Answer a prompt, in a list of one answer; or token by token if `stream` is true."""
        if body.stream:
            return await generate_stream(http, body)
        return await RequestContext(service, http).answer(lambda context: _answer_whole(context, body, as_list=True))

    for path, name in (("/", "answer"), ("/invocations", "invoke")):
        router.post(path, operation_id=name, response_model=list[GenerateResponse], responses=ERRORS)(compat)
    return router


async def _prepare(context: RequestContext, body: GenerateRequest, is_streamed: bool) -> list[RemoteGeneration]:
    service, parameters = context.service, body.parameters or GenerateParameters()
    choice = choose_adapter(parameters, service.model_names)
    context.record_model(choice)
    reject_misplaced(body.model_extra, GenerateParameters.model_fields)
    options = to_options(service, body.inputs, parameters, is_streamed)
    await context.admit(len(options.seeds), is_streamed)
    options = replace(options, structure=await choose_structure(parameters))
    return await context.prepare(await context.resolve(choice), body.inputs, options)


async def _answer_whole(context: RequestContext, body: GenerateRequest, as_list: bool) -> Response:
    generations = await _prepare(context, body, is_streamed=False)
    await finish_all(generations)
    return await context.write(lambda: _write(context, body, generations, as_list))


def _write(
    context: RequestContext, body: GenerateRequest, generations: list[RemoteGeneration], as_list: bool
) -> Response:
    order = sort_candidates([generation.completion.logprobs for generation in generations])
    best, *others = [generations[index] for index in order]
    parameters = body.parameters or GenerateParameters()
    prefix = body.inputs if parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": prefix + best.text}
    if parameters.details or parameters.decoder_input_details:
        details = _details(best) | {"prompt_tokens": len(best.request.prompt_ids), "skipped_tokens": 0}
        if others:
            details["best_of_sequences"] = [
                _details(other) | {"generated_text": prefix + other.text} for other in others
            ]
        answer["details"] = details
    headers = context.headers(len(best.completion.token_ids))
    return json_response([answer] if as_list else answer, 200, headers)


async def _answer_stream(context: RequestContext, body: GenerateRequest) -> Response:
    (generation,) = await _prepare(context, body, is_streamed=True)
    parameters, extra = body.parameters or GenerateParameters(), dict(context.first_event)

    def write(_: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
        events: list[dict[str, Any]] = [
            {"token": _token(generation, token_event), "generated_text": None, "details": None}
            for token_event in token_events
        ]
        if token_events[-1].finish_reason is not None:
            prefix = body.inputs if parameters.return_full_text else ""
            events[-1]["generated_text"] = prefix + generation.text
            if parameters.details:
                prompt_tokens = len(generation.request.prompt_ids)
                events[-1]["details"] = _summary(generation) | {"prompt_tokens": prompt_tokens}
        if is_first:
            events[0] |= extra
        return write_events(events)

    return await context.stream(write)


def _summary(generation: RemoteGeneration) -> dict[str, Any]:
    completion = generation.completion
    assert completion.finish_reason is not None
    return {
        "finish_reason": completion.finish_reason.name.lower(),
        "generated_tokens": len(completion.token_ids),
        "seed": generation.seed,
    }


def _details(generation: RemoteGeneration) -> dict[str, Any]:
    tokens = [_token(generation, token_event) for token_event in generation.events]
    return _summary(generation) | {"prefill": _prefill(generation), "tokens": tokens}


def _token(generation: RemoteGeneration, token_event: TokenEvent) -> dict[str, Any]:
    detokenizer = generation.tokenizer.detokenizer
    is_special = detokenizer.is_special(token_event.token_id)
    token = {
        "id": token_event.token_id,
        "text": detokenizer.token_text(token_event.token_id) if is_special else token_event.text,
        "logprob": token_event.logprob,
        "special": is_special,
        "skipped": False,
    }
    if token_event.alternatives is not None:
        token["alternative_tokens"] = [
            {"id": token_id, "text": detokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(*token_event.alternatives, strict=True)
        ]
    return token


def _prefill(generation: RemoteGeneration) -> list[dict[str, Any]]:
    """Describe the prompt's tokens; the first one has no log probability."""
    logprobs = generation.completion.prompt_logprobs
    if logprobs is None:
        return []
    token_text = generation.tokenizer.detokenizer.token_text
    pairs = zip(generation.request.prompt_ids, [None, *logprobs], strict=True)
    return [{"id": token_id, "text": token_text(token_id), "logprob": logprob} for token_id, logprob in pairs]
