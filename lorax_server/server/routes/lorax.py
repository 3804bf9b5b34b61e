"""LoRAX's own routes for text: `/`, `/invocations`, `/generate` and `/generate_stream`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.generation.candidates import sort_candidates
from lorax_server.generation.completion import Chunk
from lorax_server.server.exchange import Exchange
from lorax_server.server.generations import Job, finish_all
from lorax_server.server.http.foreign_fields import refuse_misplaced
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import EventStream, event
from lorax_server.server.routes.lorax_parameters import choose_adapter, to_question
from lorax_server.server.routes.lorax_schemas import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
)
from lorax_server.server.service import Service
from lorax_server.types import FinishReason

TAG = "LoRAX"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504)
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])

    @router.post("/generate", operation_id="generate", response_model=GenerateResponse, responses=ERRORS)
    async def generate(http: Request, body: GenerateRequest) -> Response:
        """Answer a prompt."""
        return await service.answer(http, lambda call: _whole(call, body, as_list=False))

    @router.post("/generate_stream", operation_id="generate_stream", response_class=Response, responses=ERRORS)
    async def generate_stream(http: Request, body: GenerateRequest) -> Response:
        """Answer a prompt token by token. Each event is a `StreamResponse`; the last one has `generated_text`."""
        return await service.answer(http, lambda call: _stream(call, body))

    async def compat(http: Request, body: CompatGenerateRequest) -> Response:
        """Answer a prompt, in a list of one answer; or token by token if `stream` is true."""
        if body.stream:
            return await service.answer(http, lambda call: _stream(call, body))
        return await service.answer(http, lambda call: _whole(call, body, as_list=True))

    for path, name in (("/", "answer"), ("/invocations", "invoke")):
        router.post(path, operation_id=name, response_model=list[GenerateResponse], responses=ERRORS)(compat)
    return router


async def _ask(call: Exchange, body: GenerateRequest, is_streamed: bool) -> list[Job]:
    parts, parameters = call.parts, body.parameters or GenerateParameters()
    choice = choose_adapter(parameters, parts.model_names)
    call.expect(choice)
    refuse_misplaced(body.model_extra, GenerateParameters.model_fields)
    question = to_question(body.inputs, parameters, parts.config, parts.max_input_length, is_streamed)
    call.admit(len(question.seeds), is_streamed)
    return await call.ask(await call.find(choice), question)


async def _whole(call: Exchange, body: GenerateRequest, as_list: bool) -> Response:
    jobs = await _ask(call, body, is_streamed=False)
    await finish_all(jobs)
    return await call.write(lambda: _answer(call, body, jobs, as_list))


def _answer(call: Exchange, body: GenerateRequest, jobs: list[Job], as_list: bool) -> Response:
    best, *others = [jobs[place] for place in sort_candidates([job.completion.logprobs for job in jobs])]
    parameters = body.parameters or GenerateParameters()
    before = body.inputs if parameters.return_full_text else ""
    answer: dict[str, Any] = {"generated_text": before + best.text}
    if parameters.details or parameters.decoder_input_details:
        details = _sequence(best) | {"prompt_tokens": len(best.request.prompt_ids), "skipped_tokens": 0}
        if others:
            details["best_of_sequences"] = [_sequence(job) | {"generated_text": before + job.text} for job in others]
        answer["details"] = details
    headers = call.headers(len(best.completion.token_ids))
    return json_response([answer] if as_list else answer, 200, headers)


async def _stream(call: Exchange, body: GenerateRequest) -> Response:
    jobs = await _ask(call, body, is_streamed=True)
    events = await call.open_stream(_events(call, jobs[0], body))
    return EventStream(events, call.parts.config.keep_alive_s, call.stream_headers())


async def _events(call: Exchange, job: Job, body: GenerateRequest) -> AsyncGenerator[bytes, None]:
    parameters, first = body.parameters or GenerateParameters(), call.first_event
    async with aclosing(job.chunks()) as stream:
        async for chunks in stream:
            answers: list[dict[str, Any]] = [
                {"token": _token(job, chunk), "generated_text": None, "details": None} for chunk in chunks
            ]
            if job.completion.finish_reason is not None:
                answers[-1]["generated_text"] = (body.inputs if parameters.return_full_text else "") + job.text
                answers[-1]["details"] = _stream_details(job) if parameters.details else None
            if answers and first:
                answers[0] |= first
                first = {}
            yield b"".join(map(event, answers))


def _sequence(job: Job) -> dict[str, Any]:
    """One answer in detail."""
    completion = job.completion
    return {
        "finish_reason": _reason(completion.finish_reason),
        "generated_tokens": len(completion.token_ids),
        "seed": job.seed,
        "prefill": _prefill(job),
        "tokens": [_token(job, chunk) for chunk in job.chunks_so_far],
    }


def _stream_details(job: Job) -> dict[str, Any]:
    return {
        "finish_reason": _reason(job.completion.finish_reason),
        "prompt_tokens": len(job.request.prompt_ids),
        "generated_tokens": len(job.completion.token_ids),
        "seed": job.seed,
    }


def _token(job: Job, chunk: Chunk) -> dict[str, Any]:
    detokenizer = job.tokenizer.detokenizer
    is_special = detokenizer.is_special(chunk.token_id)
    token = {
        "id": chunk.token_id,
        "text": detokenizer.token_text(chunk.token_id) if is_special else chunk.text,
        "logprob": chunk.logprob,
        "special": is_special,
        "skipped": False,
    }
    if chunk.alternatives is not None:
        token["alternative_tokens"] = [
            {"id": token_id, "text": detokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(*chunk.alternatives, strict=True)
        ]
    return token


def _prefill(job: Job) -> list[dict[str, Any]]:
    """The prompt's tokens; nothing says how likely the first one was."""
    logprobs = job.completion.prompt_logprobs
    if logprobs is None:
        return []
    text = job.tokenizer.detokenizer.token_text
    pairs = zip(job.request.prompt_ids, [None, *logprobs], strict=True)
    return [{"id": token_id, "text": text(token_id), "logprob": logprob} for token_id, logprob in pairs]


def _reason(reason: FinishReason | None) -> str:
    assert reason is not None
    return reason.name.lower()
