"""From LoRAX's parameters to options of a request. The rules, their order and their words are LoRAX's."""

import asyncio
import secrets
from collections.abc import Callable

from lorax_server.config import ServerConfig
from lorax_server.generation.candidates import candidate_seed
from lorax_server.server.access.model_names import Choice, ModelNames
from lorax_server.server.checks import check, check_stops, pick_sampling, to_bias
from lorax_server.server.prompts import RequestOptions
from lorax_server.server.schemas.lorax import GenerateParameters, MergedAdapters
from lorax_server.server.schemas.unsupported_fields import GENERATE, reject_unsupported
from lorax_server.server.service import Service
from lorax_server.structured_output import request_formats
from lorax_server.types import MAX_MERGED, Merge, SamplingParams, StopParams, Structure


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
    fields = {"type": asked.type, "schema": asked.schema_, "json_schema": asked.json_schema}
    return await asyncio.to_thread(request_formats.choose_structure, {"response_format": fields})


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
