"""The common part of OpenAI's two routes: rules of parameters, and the frame of answers."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lorax_server import __version__
from lorax_server.errors import AdapterNotFoundError, LoraxError
from lorax_server.generation.candidates import candidate_seed
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.access.keys import HUB
from lorax_server.server.access.model_names import Choice, ModelNames, Named
from lorax_server.server.adapter_lookup import ResolvedModel
from lorax_server.server.checks import MAX_BIASES, check, check_stops, pick_sampling, to_bias
from lorax_server.server.generations import RemoteGeneration, count_cached
from lorax_server.server.http.sse import DONE, EventStream, event, write_events
from lorax_server.server.request_context import RequestContext, RequestOptions
from lorax_server.server.routes.lorax import choose_merged
from lorax_server.server.schemas.openai import CommonRequest, OpenAIErrorResponse
from lorax_server.server.service import Service
from lorax_server.structured_output import request_formats
from lorax_server.types import MAX_SEED, FinishReason, SamplingParams, StopParams, Structure

TAG = "OpenAI Compatible"
STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503, 504)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorResponse} for status in STATUSES}
FINGERPRINT = f"lorax-{__version__}"

# --- Adapters ---------------------------------------------------------------------------------------------------------


def choose_model(context: RequestContext, body: CommonRequest) -> Choice | LoraxError:
    """Return the model that a request names, or the error, which `resolve` raises once the request is admitted.

    The name is recorded first, so that a rejected request is counted for its adapter, unless it cannot exist.
    """
    try:
        choice = _choose(body, context.service.model_names)
    except LoraxError as error:
        return error
    context.record_model(choice)
    return choice


async def resolve(context: RequestContext, body: CommonRequest, choice: Choice | LoraxError) -> ResolvedModel:
    if isinstance(choice, Choice):
        return await context.resolve(choice)
    if isinstance(choice, AdapterNotFoundError):
        names = context.service.model_names
        named = Named(names.default_source, body.adapter_id or names.without_base(body.model))
        # First, so that a caller who may not use the name does not learn that it is missing.
        await context.lookup.check_may_use(named, named.source == HUB, None)
        raise await context.lookup.add_nearest(choice, named.name, None) from None
    raise choice


def _choose(body: CommonRequest, names: ModelNames) -> Choice:
    """Choose what `model` names, or LoRAX's `adapter_id` or `merged_adapters` where it names no adapter."""
    model, token = names.without_base(body.model), body.api_token or None
    if body.merged_adapters is not None:
        check(not model, "`model` and `merged_adapters` name different adapters; name one")
        check(not body.adapter_id, "at most one of `adapter_id` or `merged_adapters` may be provided")
        seed = None if body.seed is None else body.seed & MAX_SEED
        return choose_merged(body.merged_adapters, body.adapter_source, token, names, seed)
    if body.adapter_id and body.adapter_id != model:
        check(not model, "`model` and `adapter_id` name different adapters; name one")
        return names.by_adapter(body.adapter_id, body.adapter_source, token)
    return names.by_model(body.model, body.adapter_source, token)


# --- Parameters -------------------------------------------------------------------------------------------------------


def check_stopping(service: Service, body: CommonRequest) -> None:
    check_stops(_stop_strings(body), service.config)
    count = len(body.stop_token_ids or ())
    check(count <= MAX_BIASES, f"`stop_token_ids` has at most {MAX_BIASES} tokens. Given: {count}")


def check_count(service: Service, count: int) -> None:
    most = service.config.max_choices
    check(count >= 1, "`n` must be at least 1")
    check(count <= most, f"`n`: at most {most} answers are given to a request, not {count}")


def to_options(
    service: Service,
    body: CommonRequest,
    count: int,
    num_alternatives: int,
    max_new_tokens: int | None,
    default_new_tokens: int | None,
    raw_logprobs: bool,
) -> RequestOptions:
    """Return the options that both routes have in common; each adds its own.

    Only a request that needs log probabilities asks for raw ones: a structure's tokens could not come several at once.
    """
    sampling = replace(_sampling(service, body, num_alternatives), raw_logprobs=raw_logprobs)
    stop = StopParams(
        max_new_tokens=max_new_tokens or default_new_tokens or service.max_total_tokens,
        min_new_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos_token or body.ignore_eos),
        stop_strings=tuple(_stop_strings(body)),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=False,
    )
    seed = secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED
    seeds = [candidate_seed(seed, index) for index in range(count)]
    return RequestOptions(sampling, stop, seeds, may_shorten=max_new_tokens is None, salt=body.cache_salt or "")


async def choose_structure(body: CommonRequest) -> Structure | None:
    """Return the output format of an admitted request. Schemas are analyzed on a thread."""
    fields = {name: value for name in request_formats.FIELDS if (value := getattr(body, name)) is not None}
    return await asyncio.to_thread(request_formats.choose_structure, fields) if fields else None


def _sampling(service: Service, body: CommonRequest, num_alternatives: int) -> SamplingParams:
    defaults, max_logprobs = service.defaults, service.config.max_logprobs
    fields: dict[str, Any] = {"temperature": 1.0, "top_k": 0} | pick_sampling(body, defaults)
    if body.temperature is None and defaults.do_sample is False:
        fields["temperature"] = 0.0
    check(0 <= fields["temperature"] <= 2, "`temperature` must be >= 0 and <= 2")
    check(
        num_alternatives <= max_logprobs,
        f"`return_k_alternatives` must be <= {max_logprobs}. Given: {num_alternatives}",
    )
    check(fields["top_k"] >= -1, "`top_k` must be >= 1, or -1 or 0 for all")
    fields["top_k"] = max(0, fields["top_k"])
    return SamplingParams(
        **fields,
        do_sample=fields["temperature"] > 0,
        logit_bias=to_bias(body.logit_bias),
        num_alternatives=num_alternatives,
    )


def _stop_strings(body: CommonRequest) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []


# --- Answers ----------------------------------------------------------------------------------------------------------


def make_frame(context: RequestContext, body: CommonRequest, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields around the choices of an answer, and of each event. The model has the request's name for it."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.adapter_id or body.model or context.service.model_names.primary,
        "system_fingerprint": FINGERPRINT,
    }


def count_usage(context: RequestContext, is_scoring: bool = False) -> dict[str, Any]:
    """Count the tokens of all answers, also of those that were generated and not chosen."""
    generations: Sequence[RemoteGeneration] = context.generations
    num_prompt_tokens = context.record.prompt_tokens
    num_generated = 0 if is_scoring else sum(len(generation.completion.token_ids) for generation in generations)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": count_cached(generations)},
    }


def finish_reason(reason: FinishReason | None) -> str | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


Write = Callable[[int, list[TokenEvent], bool], list[dict[str, Any]]]
"""Makes choices of a generation's index, its new tokens, and whether they are its first."""


async def stream_choices(
    context: RequestContext, body: CommonRequest, frame: dict[str, Any], write: Write
) -> EventStream:
    """Respond with the events of all generations, as they arrive."""
    num_left, extra = len(context.generations), dict(context.first_event)
    no_usage = {"usage": None} if body.wants_usage else {}

    def write_choices(index: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
        nonlocal num_left
        chunks: list[dict[str, Any]] = [
            {**frame, "choices": [choice], **no_usage} for choice in write(index, token_events, is_first)
        ]
        num_left -= token_events[-1].finish_reason is not None
        if body.says_nothing_of_usage and not num_left:
            chunks[-1]["usage"] = count_usage(context)
        if chunks:
            chunks[0] |= extra
            extra.clear()
        return write_events(chunks)

    def write_end() -> bytes:
        usage = event(frame | {"choices": [], "usage": count_usage(context)}) if body.wants_usage else b""
        return usage + DONE

    return await context.stream(write_choices, write_end)
