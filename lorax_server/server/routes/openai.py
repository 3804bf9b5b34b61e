"""Code shared by the OpenAI routes: model selection, parameters, and responses."""

import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from lorax_server import __version__
from lorax_server.errors import AdapterNotFoundError, LoraxError
from lorax_server.generation.candidates import candidate_seed
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.access.keys import HUB_SOURCE
from lorax_server.server.access.model_names import AdapterKey, ModelNames, ModelSelection
from lorax_server.server.adapter_lookup import ResolvedModel
from lorax_server.server.checks import (
    MAX_LOGIT_BIASES,
    check,
    check_no_surrogates,
    check_stop_strings,
    collect_sampling_fields,
    parse_logit_bias,
)
from lorax_server.server.generations import RemoteGeneration, count_cached_tokens
from lorax_server.server.http.sse import DONE_EVENT, EventStream, encode_event, encode_events
from lorax_server.server.request_context import RequestContext, RequestOptions
from lorax_server.server.routes.lorax import choose_merged_adapters
from lorax_server.server.schemas.openai import CommonRequest, FanOutRequest, OpenAIErrorResponse
from lorax_server.server.schemas.pooling import PooledRequest
from lorax_server.server.service import Service
from lorax_server.types import MAX_SEED, FinishReason, SamplingParams, StopParams

OPENAPI_TAG = "OpenAI Compatible"
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorResponse} for status in ERROR_STATUSES}
SYSTEM_FINGERPRINT = f"lorax-{__version__}"

_Body = TypeVar("_Body", bound=CommonRequest | PooledRequest)

# --- Adapters ---------------------------------------------------------------------------------------------------------


def record_model(context: RequestContext, body: CommonRequest | PooledRequest) -> None:
    """Record the requested adapter, so that metrics also count rejected requests for it.

    Errors are raised later by `resolve`, after the request is admitted.
    """
    names = context.service.model_names
    if _listed_models(body):
        context.adapter_field = "models"
    if isinstance(body, CommonRequest) and body.ignore_eos and not body.ignore_eos_token:
        context.renamed_fields = {"ignore_eos_token": "ignore_eos"}
    with suppress(LoraxError):
        context.record_models([_select_model(each, names) for each in split_models(body, names)])


def split_models(body: _Body, names: ModelNames) -> list[_Body]:
    """Return one request for each entry in `models`, with this entry as `model`. Without `models`, return the request
    itself.
    """
    models = _listed_models(body)
    if not models:
        return [body]
    check(not names.strip_base_name(body.model or ""), "`model` and `models` name different models; use only `models`")
    check(not body.adapter_id, "at most one of `adapter_id` or `models` may be provided")
    check(body.merged_adapters is None, "at most one of `merged_adapters` or `models` may be provided")
    return [cast(_Body, body.model_copy(update={"model": name, "models": None})) for name in models]


async def resolve_all(context: RequestContext, bodies: Sequence[CommonRequest]) -> list[ResolvedModel]:
    """Return the models of the requests from `split_models`. Call this after the request is admitted."""
    models = [await resolve(context, each) for each in bodies]
    context.record_identities(models)
    return models


def find_label(context: RequestContext, body: CommonRequest) -> str:
    """Return the name of the requested adapter, which must exist, or "" for the base model."""
    return _select_model(body, context.service.model_names).label


async def resolve(context: RequestContext, body: CommonRequest | PooledRequest) -> ResolvedModel:
    """Return the requested model. Call this after the request is admitted."""
    names = context.service.model_names
    try:
        selection = _select_model(body, names)
    except AdapterNotFoundError as error:
        named = AdapterKey(names.default_source, body.adapter_id or names.strip_base_name(body.model or ""))
        # Check permission first, so that callers cannot probe which adapters exist.
        await context.lookup.check_may_use(named, named.source == HUB_SOURCE, None)
        raise await context.lookup.add_suggestions(error, named.name, None) from None
    return await context.resolve(selection)


def _select_model(body: CommonRequest | PooledRequest, names: ModelNames) -> ModelSelection:
    """Return the model selected by `model`, or by `adapter_id` or `merged_adapters` if `model` names no adapter."""
    model, token = names.strip_base_name(body.model or ""), body.api_token or None
    if body.merged_adapters is not None:
        check(not model, "`model` and `merged_adapters` name different adapters; use only one of them")
        check(not body.adapter_id, "at most one of `adapter_id` or `merged_adapters` may be provided")
        seed = None if body.seed is None else body.seed & MAX_SEED
        return choose_merged_adapters(body.merged_adapters, body.adapter_source, token, names, seed)
    if body.adapter_id and body.adapter_id != model:
        check(not model, "`model` and `adapter_id` name different adapters; use only one of them")
        return names.select_adapter_id(body.adapter_id, body.adapter_source, token)
    return names.select_model(body.model or "", body.adapter_source, token)


# --- Parameters -------------------------------------------------------------------------------------------------------


def check_stop_conditions(service: Service, body: CommonRequest) -> None:
    check_stop_strings(_list_stop_strings(body), service.config)
    count = len(body.stop_token_ids or ())
    check(count <= MAX_LOGIT_BIASES, f"`stop_token_ids` supports up to {MAX_LOGIT_BIASES} tokens. Given: {count}")


def check_num_choices(service: Service, count: int) -> None:
    limit = service.config.max_choices
    check(count <= limit, f"`n`: a request may have at most {limit} completions in total (got {count})")


def to_options(
    service: Service,
    body: CommonRequest,
    count: int,
    num_alternatives: int,
    max_new_tokens: int | None,
    default_new_tokens: int | None,
    raw_logprobs: bool,
) -> RequestOptions:
    """Return the request options that all OpenAI routes have in common.

    `raw_logprobs` is set only if log probabilities are needed, because it disables forced tokens in structured output.
    """
    check_no_surrogates(body.cache_salt or "", "cache_salt")
    sampling = replace(_make_sampling_params(service, body, num_alternatives), raw_logprobs=raw_logprobs)
    stop = StopParams(
        max_new_tokens=max_new_tokens or default_new_tokens or service.max_total_tokens,
        min_new_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos_token or body.ignore_eos),
        stop_strings=tuple(_list_stop_strings(body)),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=False,
    )
    seed = secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED
    seeds = [candidate_seed(seed, index) for index in range(count)]
    return RequestOptions(
        sampling,
        stop,
        seeds,
        may_clamp_max_new_tokens=max_new_tokens is None,
        salt=body.cache_salt or "",
        speculation=body.speculation != "off",
    )


def _make_sampling_params(service: Service, body: CommonRequest, num_alternatives: int) -> SamplingParams:
    defaults, max_logprobs = service.defaults, service.config.max_logprobs
    fields: dict[str, Any] = {"temperature": 1.0, "top_k": 0} | collect_sampling_fields(body, defaults)
    if body.temperature is None and defaults.do_sample is False:
        fields["temperature"] = 0.0
    check(0 <= fields["temperature"] <= 2, "`temperature` must be >= 0 and <= 2")
    check(
        num_alternatives <= max_logprobs,
        f"`return_k_alternatives` must be <= {max_logprobs}. Given: {num_alternatives}",
    )
    fields["top_k"] = max(0, fields["top_k"])
    return SamplingParams(
        **fields,
        do_sample=fields["temperature"] > 0,
        logit_bias=parse_logit_bias(body.logit_bias),
        num_alternatives=num_alternatives,
    )


def _list_stop_strings(body: CommonRequest) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


# --- Responses --------------------------------------------------------------------------------------------------------


def make_envelope(context: RequestContext, body: CommonRequest, prefix: str, kind: str) -> dict[str, Any]:
    """Return all response fields except choices and usage. `model` is the name in the request, or the name of the base
    model.
    """
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": ",".join(_listed_models(body))
        or body.adapter_id
        or body.model
        or context.service.model_names.primary_name,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


def _listed_models(body: CommonRequest | PooledRequest) -> Sequence[str]:
    return (body.models if isinstance(body, FanOutRequest) else None) or ()


def add_model(body: CommonRequest, choice: dict[str, Any], num_choices: int) -> dict[str, Any]:
    """Add the model's name to a choice if the request has `models`. Each model has the same number of choices."""
    models = _listed_models(body)
    return choice | {"model": models[choice["index"] * len(models) // num_choices]} if models else choice


def count_usage(context: RequestContext, is_scoring: bool = False) -> dict[str, Any]:
    """Return `usage` for all completions, including `best_of` candidates that were not chosen."""
    generations: Sequence[RemoteGeneration] = context.generations
    num_prompt_tokens = context.record.prompt_tokens
    num_generated = 0 if is_scoring else sum(len(generation.completion.token_ids) for generation in generations)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": count_cached_tokens(generations)},
    }
    num_drafted = sum(generation.completion.num_drafted for generation in generations)
    num_accepted = sum(generation.completion.num_skipped for generation in generations)
    if num_drafted:
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        }
    return usage


def finish_reason(reason: FinishReason | None) -> str | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


class StreamedChoice(Protocol):
    """A completion in a stream."""

    def write_deltas(self, index: int, token_events: list[TokenEvent], is_first: bool) -> list[dict[str, Any]]:
        """Return the choices for new token events, one per chunk. `index` is the index of the choice."""


async def stream_choices(
    context: RequestContext, body: CommonRequest, envelope: dict[str, Any], choices: Sequence[StreamedChoice]
) -> EventStream:
    """Return a stream with the chunks of all generations as they arrive."""
    num_running, extra = len(context.generations), dict(context.first_event_fields)
    null_usage = {"usage": None} if body.wants_usage else {}

    def write_choices(index: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
        nonlocal num_running
        deltas = choices[index].write_deltas(index, token_events, is_first)
        chunks: list[dict[str, Any]] = [
            {**envelope, "choices": [add_model(body, delta, len(choices))], **null_usage} for delta in deltas
        ]
        num_running -= token_events[-1].finish_reason is not None
        if body.usage_in_last_chunk and not num_running:
            chunks[-1]["usage"] = count_usage(context)
        if chunks:
            chunks[0] |= extra
            extra.clear()
        return encode_events(chunks)

    def write_end() -> bytes:
        usage = encode_event(envelope | {"choices": [], "usage": count_usage(context)}) if body.wants_usage else b""
        return usage + DONE_EVENT

    return await context.stream_events(write_choices, write_end)
