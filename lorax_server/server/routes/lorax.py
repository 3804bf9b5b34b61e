"""The LoRAX routes for text generation: `/`, `/invocations`, `/generate` and `/generate_stream`."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.config import ServerConfig
from lorax_server.generation.candidates import candidate_seed, sort_candidates
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.access.model_names import ModelNames, ModelSelection
from lorax_server.server.checks import check, check_stop_strings, collect_sampling_fields, parse_logit_bias
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.sse import encode_events
from lorax_server.server.request_context import RequestContext, RequestOptions, constrain
from lorax_server.server.schemas.lorax import (
    CommonOptions,
    CompatGenerateRequest,
    ErrorResponse,
    FanOutResponse,
    GenerateChoice,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    MergedAdapters,
)
from lorax_server.server.schemas.pooling import PoolingParameters
from lorax_server.server.schemas.unsupported_fields import GENERATE, reject_misplaced
from lorax_server.server.service import Service
from lorax_server.structured_output import request_formats
from lorax_server.types import MAX_MERGED_ADAPTERS, Merge, SamplingParams, StopParams, Structure

OPENAPI_TAG = "LoRAX"
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 408, 413, 415, 422, 424, 429, 500, 503, 504)
}


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[OPENAPI_TAG])

    response, choices = GenerateResponse | FanOutResponse, list[GenerateChoice | GenerateResponse]

    @router.post("/generate", operation_id="generate", response_model=response, responses=ERROR_RESPONSES)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Complete a prompt."""
        return await RequestContext(service, request).run(
            lambda context: _generate_response(context, body, as_list=False)
        )

    @router.post("/generate_stream", operation_id="generate_stream", response_class=Response, responses=ERROR_RESPONSES)
    async def generate_stream(request: Request, body: GenerateRequest) -> Response:
        """Complete a prompt and stream its tokens. Each event is a `StreamResponse`; the last has `generated_text`."""
        return await RequestContext(service, request).run(lambda context: _generate_stream(context, body))

    async def compat(request: Request, body: CompatGenerateRequest) -> Response:
        """Complete a prompt. The response is a list with one item, or a stream if `stream` is true."""
        if body.stream:
            return await generate_stream(request, body)
        return await RequestContext(service, request).run(
            lambda context: _generate_response(context, body, as_list=True)
        )

    for path, name in (("/", "answer"), ("/invocations", "invoke")):
        router.post(path, operation_id=name, response_model=choices, responses=ERROR_RESPONSES)(compat)
    return router


async def _prepare(context: RequestContext, body: GenerateRequest, is_stream: bool) -> list[RemoteGeneration]:
    service, parameters = context.service, body.parameters or GenerateParameters()
    selections = choose_adapters(parameters, service.model_names)
    context.record_models(selections)
    reject_misplaced(body.model_extra, GenerateParameters.model_fields)
    context.check_unknown_fields(GENERATE, body)
    context.check_unknown_fields(GENERATE, parameters)
    options = to_options(service, body.inputs, parameters, is_stream)
    await context.admit(len(options.seeds) * len(selections), is_stream, len(selections))
    options = constrain(service, options, await read_structure(parameters))
    models = [await context.resolve(selection) for selection in selections]
    context.record_identities(models)
    return [each for model in models for each in await context.prepare(model, body.inputs, options)]


async def _generate_response(context: RequestContext, body: GenerateRequest, as_list: bool) -> Response:
    generations = await _prepare(context, body, is_stream=False)
    await finish_all(generations)
    return await context.build_response(lambda: _write_response(context, body, generations, as_list))


def _write_response(
    context: RequestContext, body: GenerateRequest, generations: list[RemoteGeneration], as_list: bool
) -> Response:
    parameters = body.parameters or GenerateParameters()
    if parameters.adapter_ids is not None:
        headers = context.response_headers(sum(len(each.completion.token_ids) for each in generations))
        choices = [
            _write_best(body, [generation]) | {"index": index, "adapter_id": adapter_id}
            for index, (generation, adapter_id) in enumerate(zip(generations, parameters.adapter_ids, strict=True))
        ]
        return json_response(choices if as_list else {"choices": choices}, 200, headers)
    order = sort_candidates([generation.completion.logprobs for generation in generations])
    content, best = _write_best(body, [generations[index] for index in order]), generations[order[0]]
    headers = context.response_headers(len(best.completion.token_ids))
    return json_response([content] if as_list else content, 200, headers)


def _write_best(body: GenerateRequest, generations: list[RemoteGeneration]) -> dict[str, Any]:
    """Return the response for the first generation. The details contain the other generations."""
    best, *others = generations
    parameters = body.parameters or GenerateParameters()
    prefix = body.inputs if parameters.return_full_text else ""
    content: dict[str, Any] = {"generated_text": prefix + best.text}
    if parameters.details or parameters.decoder_input_details:
        details = _format_details(best) | {
            "prompt_tokens": len(best.request.prompt_ids),
            "skipped_tokens": best.completion.num_skipped,
        }
        if others:
            details["best_of_sequences"] = [
                _format_details(other) | {"generated_text": prefix + other.text} for other in others
            ]
        content["details"] = details
    return content


async def _generate_stream(context: RequestContext, body: GenerateRequest) -> Response:
    generations = await _prepare(context, body, is_stream=True)
    parameters, extra = body.parameters or GenerateParameters(), dict(context.first_event_fields)

    def write(index: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
        generation = generations[index]
        events: list[dict[str, Any]] = [
            {"token": _format_token(generation, token_event), "generated_text": None, "details": None}
            for token_event in token_events
        ]
        if token_events[-1].finish_reason is not None:
            prefix = body.inputs if parameters.return_full_text else ""
            events[-1]["generated_text"] = prefix + generation.text
            if parameters.details:
                prompt_tokens = len(generation.request.prompt_ids)
                events[-1]["details"] = _format_summary(generation) | {"prompt_tokens": prompt_tokens}
        if parameters.adapter_ids is not None:
            choice = {"index": index, "adapter_id": parameters.adapter_ids[index]}
            events = [event | choice for event in events]
        elif is_first:
            events[0] |= extra
        return encode_events(events)

    return await context.stream_events(write)


def _format_summary(generation: RemoteGeneration) -> dict[str, Any]:
    completion = generation.completion
    assert completion.finish_reason is not None
    return {
        "finish_reason": completion.finish_reason.name.lower(),
        "generated_tokens": len(completion.token_ids),
        "seed": generation.seed,
    }


def _format_details(generation: RemoteGeneration) -> dict[str, Any]:
    tokens = [_format_token(generation, token_event) for token_event in generation.events]
    return _format_summary(generation) | {"prefill": _format_prefill(generation), "tokens": tokens}


def _format_token(generation: RemoteGeneration, token_event: TokenEvent) -> dict[str, Any]:
    detokenizer = generation.tokenizer.detokenizer
    is_special = detokenizer.is_special(token_event.token_id)
    token = {
        "id": token_event.token_id,
        "text": detokenizer.token_text(token_event.token_id) if is_special else token_event.text,
        "logprob": token_event.logprob,
        "special": is_special,
        "skipped": token_event.skipped,
    }
    if token_event.alternatives is not None:
        token["alternative_tokens"] = [
            {"id": token_id, "text": detokenizer.token_text(token_id), "logprob": logprob}
            for token_id, logprob in zip(*token_event.alternatives, strict=True)
        ]
    return token


def _format_prefill(generation: RemoteGeneration) -> list[dict[str, Any]]:
    """Return the prompt tokens with their log probabilities, except that the first token has no log probability."""
    logprobs = generation.completion.prompt_logprobs
    if logprobs is None:
        return []
    token_text = generation.tokenizer.detokenizer.token_text
    pairs = zip(generation.request.prompt_ids, [None, *logprobs], strict=True)
    return [{"id": token_id, "text": token_text(token_id), "logprob": logprob} for token_id, logprob in pairs]


# --- Parameters: the checks, their order and their messages match LoRAX -----------------------------------------------


def choose_adapter(parameters: GenerateParameters | PoolingParameters, names: ModelNames) -> ModelSelection:
    merged, token = parameters.merged_adapters, parameters.api_token or None
    check(
        parameters.adapter_id is None or merged is None,
        "at most one of `adapter_id` or `adapters` may be provided",
    )
    if merged is None:
        return names.select_adapter_id(parameters.adapter_id, parameters.adapter_source, token)
    return choose_merged_adapters(merged, parameters.adapter_source, token, names, parameters.seed)


def choose_adapters(parameters: GenerateParameters, names: ModelNames) -> list[ModelSelection]:
    """Return the adapters that complete the prompt: a single adapter, or the adapters in `adapter_ids`."""
    if parameters.adapter_ids is None:
        return [choose_adapter(parameters, names)]
    is_alone = parameters.adapter_id is None and parameters.merged_adapters is None
    check(is_alone, "at most one of `adapter_id`, `adapters` or `adapter_ids` may be provided")
    check((parameters.best_of or 1) == 1, "`best_of` != 1 is not supported with `adapter_ids`")
    source, token = parameters.adapter_source, parameters.api_token or None
    return [names.select_adapter_id(each, source, token) for each in parameters.adapter_ids]


def choose_merged_adapters(
    merged: MergedAdapters, source: str | None, token: str | None, names: ModelNames, seed: int | None
) -> ModelSelection:
    check(bool(merged.ids), "at least one adapter ID must be provided when setting `adapters`")
    check(
        len(merged.ids) <= MAX_MERGED_ADAPTERS,
        f"at most {MAX_MERGED_ADAPTERS} adapters can be merged. Given: {len(merged.ids)}",
    )
    weights = merged.weights or [1.0] * len(merged.ids)
    check(len(merged.ids) == len(weights), "number of adapter IDs must match number of adapter weights")
    if len(merged.ids) == 1:  # a single adapter is used unchanged, without merging
        return names.select_adapter_id(merged.ids[0], source, token)
    return names.select_merged_adapters(merged.ids, _make_merge(merged, weights, seed), source, token)


def to_options(service: Service, inputs: str, parameters: GenerateParameters, is_stream: bool) -> RequestOptions:
    _check_parameters(parameters, service.config)
    check(bool(inputs), "`inputs` cannot be empty")
    truncate, max_length = parameters.truncate, service.max_input_length
    check(
        truncate is None or 1 <= truncate <= max_length,
        f"`truncate` must be strictly positive and less than {max_length}. Given: {truncate}",
    )
    best_of = parameters.best_of or 1
    check(not is_stream or best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
    check(
        not (is_stream and parameters.decoder_input_details),
        "`decoder_input_details` == true is not supported when streaming tokens",
    )
    sampling = SamplingParams(
        **collect_sampling_fields(parameters),
        do_sample=_uses_sampling(parameters),
        logit_bias=parse_logit_bias(parameters.logit_bias),
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
        may_clamp_max_new_tokens=parameters.max_new_tokens is None,
        truncate=truncate,
        logprobs=bool(parameters.details or parameters.decoder_input_details),
        prompt_logprobs=bool(parameters.decoder_input_details),
        speculation=parameters.speculation != "off",
    )


async def read_structure(body: CommonOptions) -> Structure | None:
    """Return the request's grammar, or None. Call this after admission, because analyzing schemas is expensive.

    Unlike in LoRAX, the response format `text` applies no constraint.
    """
    names = type(body).model_fields.keys() & set(request_formats.FORMAT_FIELDS)
    dumped = body.model_dump(include=names, by_alias=True)
    fields = {name: value for name, value in dumped.items() if value is not None}
    return await asyncio.to_thread(request_formats.read_structure, fields) if fields else None


def _make_merge(merged: MergedAdapters, weights: list[float], seed: int | None) -> Merge:
    """Return the merge parameters. The request's seed is used only for DARE, which drops weights at random.

    Without a seed, DARE uses seed 0, so that requests can share the merged adapter.
    """
    strategy = (merged.merge_strategy or "linear").lower()
    # LoRAX's default of 0 would drop all weights; clients that omit `density` expect to keep all weights.
    density = merged.density or 1.0
    is_random = strategy.startswith("dare") and density < 1
    sign_method = (merged.majority_sign_method or "total").lower()
    return Merge(tuple(weights), strategy, density, sign_method, seed=seed if seed and is_random else 0)


def _check_parameters(parameters: GenerateParameters, config: ServerConfig) -> None:
    best_of, limit = parameters.best_of, config.max_best_of
    if best_of is not None and not 0 <= best_of <= limit:
        check(limit > 1, "`best_of` != 1 is not allowed for this endpoint")
        check(False, f"`best_of` must be > 0 and <= {limit}. Given: {best_of}")
    has_candidates = (best_of or 1) > 1
    check(
        not has_candidates or _uses_sampling(parameters, counts_any_temperature=True),
        "you must use sampling when `best_of` is > 1",
    )
    _check_ranges(parameters, config)
    check_stop_strings(parameters.stop or [], config)
    check(not has_candidates or parameters.seed is None, "`seed` must not be set when `best_of` > 1")


def _check_ranges(parameters: GenerateParameters, config: ServerConfig) -> None:
    alternatives, max_alternatives = parameters.return_k_alternatives, config.max_logprobs
    rules: tuple[tuple[float | None, Callable[[float], bool], str], ...] = (
        (parameters.temperature, lambda value: value >= 0, "`temperature` must be non-negative"),
        (parameters.repetition_penalty, lambda value: value > 0, "`repetition_penalty` must be strictly positive"),
        (parameters.frequency_penalty, _is_valid_penalty, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        (parameters.presence_penalty, _is_valid_penalty, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        (parameters.top_p, lambda value: 0 < value <= 1, "`top_p` must be > 0.0 and < 1.0"),
        (parameters.typical_p, lambda value: 0 < value < 1, "`typical_p` must be > 0.0 and < 1.0"),
        (parameters.top_k, lambda value: value >= 1, "`top_k` must be strictly positive"),
        (parameters.top_k, lambda value: value < 2**31, f"`top_k` must be less than {2**31}"),
        (alternatives, lambda value: value >= 1, "`return_k_alternatives` must be strictly positive"),
        (
            alternatives,
            lambda value: value <= max_alternatives,
            f"`return_k_alternatives` must be <= {max_alternatives}. Given: {alternatives}",
        ),
        (parameters.max_new_tokens, lambda value: value >= 1, "`max_new_tokens` must be strictly positive"),
    )
    for value, is_valid, message in rules:
        check(value is None or is_valid(value), message)  # NaN fails every rule


def _is_valid_penalty(value: float) -> bool:
    return -2 <= value <= 2


def _uses_sampling(parameters: GenerateParameters, counts_any_temperature: bool = False) -> bool:
    """Return True if the parameters enable sampling, according to LoRAX's rules.

    With `counts_any_temperature`, values without effect also count, such as a temperature of 1. LoRAX does this for
    `best_of`.
    """
    temperature = parameters.temperature
    by_temperature = temperature is not None and (counts_any_temperature or temperature not in (0, 1))
    top_p, typical_p = parameters.top_p, parameters.typical_p
    return bool(
        parameters.do_sample
        or by_temperature
        or parameters.top_k is not None
        or parameters.min_p
        or (top_p is not None and (counts_any_temperature or top_p < 1))
        or (typical_p is not None and (counts_any_temperature or typical_p < 1))
    )
