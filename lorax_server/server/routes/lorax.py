"""LoRAX's own routes for text: `/`, `/invocations`, `/generate` and `/generate_stream`."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.config import ServerConfig
from lorax_server.generation.candidates import candidate_seed, sort_candidates
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.access.model_names import Choice, ModelNames
from lorax_server.server.checks import check, check_stops, pick_sampling, to_bias
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import write_events
from lorax_server.server.request_context import RequestContext, RequestOptions
from lorax_server.server.schemas.lorax import (
    CompatGenerateRequest,
    ErrorResponse,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    MergedAdapters,
)
from lorax_server.server.schemas.unsupported_fields import GENERATE, reject_misplaced, reject_unsupported
from lorax_server.server.service import Service
from lorax_server.structured_output import request_formats
from lorax_server.types import MAX_MERGED, Merge, SamplingParams, StopParams, Structure

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


# --- Parameters: the rules, their order and their words are LoRAX's ---------------------------------------------------


def choose_adapter(parameters: GenerateParameters, names: ModelNames) -> Choice:
    merged, token = parameters.merged_adapters, parameters.api_token or None
    check(
        parameters.adapter_id is None or merged is None,
        "at most one of `adapter_id` or `adapters` may be provided",
    )
    if merged is None:
        return names.by_adapter(parameters.adapter_id, parameters.adapter_source, token)
    return choose_merged(merged, parameters.adapter_source, token, names, parameters.seed)


def choose_merged(
    merged: MergedAdapters, source: str | None, token: str | None, names: ModelNames, seed: int | None
) -> Choice:
    check(bool(merged.ids), "at least one adapter ID must be provided when setting `adapters`")
    check(len(merged.ids) <= MAX_MERGED, f"at most {MAX_MERGED} adapters are merged. Given: {len(merged.ids)}")
    weights = merged.weights or [1.0] * len(merged.ids)
    check(len(merged.ids) == len(weights), "number of adapter IDs must match number of adapter weights")
    if len(merged.ids) == 1:  # nothing to merge it with
        return names.by_adapter(merged.ids[0], source, token)
    return names.merged(merged.ids, _merge(merged, weights, seed), source, token)


def to_options(service: Service, inputs: str, parameters: GenerateParameters, is_streamed: bool) -> RequestOptions:
    _check_parameters(parameters, service.config)
    check(bool(inputs), "`inputs` cannot be empty")
    truncate, max_length = parameters.truncate, service.max_input_length
    check(
        truncate is None or 1 <= truncate <= max_length,
        f"`truncate` must be strictly positive and less than {max_length}. Given: {truncate}",
    )
    best_of = parameters.best_of or 1
    check(not is_streamed or best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
    check(
        not (is_streamed and parameters.decoder_input_details),
        "`decoder_input_details` == true is not supported when streaming tokens",
    )
    reject_unsupported(GENERATE, parameters.model_extra, vars(parameters))
    sampling = SamplingParams(
        **pick_sampling(parameters),
        do_sample=_samples(parameters),
        logit_bias=to_bias(parameters.logit_bias),
        watermark=bool(parameters.watermark),
        num_alternatives=parameters.return_k_alternatives or 0,
    )
    stop = StopParams(
        max_new_tokens=parameters.max_new_tokens or service.max_total_tokens,
        min_new_tokens=parameters.min_new_tokens or 0,
        ignore_eos=bool(parameters.ignore_eos_token),
        stop_strings=tuple(parameters.stop or ()),
    )
    seed = secrets.randbits(64) if parameters.seed is None else parameters.seed
    return RequestOptions(
        sampling,
        stop,
        [candidate_seed(seed, index) for index in range(best_of)],
        may_shorten=parameters.max_new_tokens is None,
        truncate=truncate,
        logprobs=bool(parameters.details or parameters.decoder_input_details),
        prompt_logprobs=bool(parameters.decoder_input_details),
    )


async def choose_structure(parameters: GenerateParameters) -> Structure | None:
    """Return the output format of an admitted request. Schemas are analyzed on a thread.

    Unlike in LoRAX, the type counts: `text` asks for nothing.
    """
    asked = parameters.response_format
    if asked is None:
        return None
    fields = {"response_format": asked.model_dump(by_alias=True)}
    return await asyncio.to_thread(request_formats.choose_structure, fields)


def _merge(merged: MergedAdapters, weights: list[float], seed: int | None) -> Merge:
    """Use the request's seed only where DARE drops numbers by chance.

    Without a seed the choice is always the same: merges with seeds of their own could not be shared by requests.
    """
    strategy = (merged.merge_strategy or "linear").lower()
    # LoRAX's default of 0 keeps nothing of the adapters; clients who leave it out want all of them.
    density = merged.density or 1.0
    is_drawn = strategy.startswith("dare") and density < 1
    sign_method = (merged.majority_sign_method or "total").lower()
    return Merge(tuple(weights), strategy, density, sign_method, seed=seed if seed and is_drawn else 0)


def _check_parameters(parameters: GenerateParameters, config: ServerConfig) -> None:
    best_of, most = parameters.best_of, config.max_best_of
    if best_of is not None and not 0 <= best_of <= most:
        check(most > 1, "`best_of` != 1 is not allowed for this endpoint")
        check(False, f"`best_of` must be > 0 and <= {most}. Given: {best_of}")
    is_several = (best_of or 1) > 1
    check(not is_several or _samples(parameters, any_temperature=True), "you must use sampling when `best_of` is > 1")
    _check_ranges(parameters, config)
    check_stops(parameters.stop or [], config)
    check(not is_several or parameters.seed is None, "`seed` must not be set when `best_of` > 1")


def _check_ranges(parameters: GenerateParameters, config: ServerConfig) -> None:
    alternatives, most = parameters.return_k_alternatives, config.max_logprobs
    rules: tuple[tuple[float | None, Callable[[float], bool], str], ...] = (
        (parameters.temperature, lambda value: value >= 0, "`temperature` must be non-negative"),
        (parameters.repetition_penalty, lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
        (parameters.frequency_penalty, _is_penalty, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (parameters.presence_penalty, _is_penalty, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        (parameters.top_p, lambda value: 0 < value <= 1, "`top_p` must be > 0.0 and < 1.0"),
        (parameters.typical_p, lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
        (parameters.top_k, lambda value: 1 <= value < 2**31, "`top_k` must be strictly positive"),
        (alternatives, lambda value: value >= 1, "`return_k_alternatives` must be strictly positive"),
        (
            alternatives,
            lambda value: value <= most,
            f"`return_k_alternatives` must be <= {most}. Given: {alternatives}",
        ),
        (parameters.max_new_tokens, lambda value: value >= 1, "`max_new_tokens` must be strictly positive"),
    )
    for value, holds, message in rules:
        check(value is None or holds(value), message)  # no rule holds for NaN


def _is_penalty(value: float) -> bool:
    return -2 <= value <= 2


def _samples(parameters: GenerateParameters, any_temperature: bool = False) -> bool:
    """Tell whether parameters ask for sampling. A temperature of 1 alone changes nothing, so LoRAX does not sample for
    it, but accepts it as a wish to (`any_temperature`)."""
    temperature = parameters.temperature
    by_temperature = temperature is not None and (any_temperature or temperature not in (0, 1))
    top_p, typical_p = parameters.top_p, parameters.typical_p
    return bool(
        parameters.do_sample
        or by_temperature
        or parameters.top_k is not None
        or parameters.min_p
        or (top_p is not None and (any_temperature or top_p < 1))
        or (typical_p is not None and (any_temperature or typical_p < 1))
    )
