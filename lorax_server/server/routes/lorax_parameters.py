"""From LoRAX's parameters to what the engine understands. The rules, their order and their words are LoRAX's."""

import secrets
from collections.abc import Callable

from lorax_server.config import ServerConfig
from lorax_server.engine.adapters.resolver import MAX_MERGED
from lorax_server.generation.candidates import candidate_seed
from lorax_server.server.access.model_names import Choice, ModelNames
from lorax_server.server.exchange import Question
from lorax_server.server.http.foreign_fields import GENERATE, refuse_foreign
from lorax_server.server.routes.checks import check, check_stops, not_yet, to_bias
from lorax_server.server.routes.lorax_schemas import GenerateParameters, MergedAdapters, ResponseFormat
from lorax_server.types import Merge, SamplingParams


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


def to_question(
    inputs: str, parameters: GenerateParameters, config: ServerConfig, max_input_length: int, is_streamed: bool
) -> Question:
    _check_parameters(parameters, config)
    check(bool(inputs), "`inputs` cannot be empty")
    truncate = parameters.truncate
    check(
        truncate is None or 1 <= truncate <= max_input_length,
        f"`truncate` must be strictly positive and less than {max_input_length}. Given: {truncate}",
    )
    best_of = parameters.best_of or 1
    check(not is_streamed or best_of == 1, "`best_of` != 1 is not supported when streaming tokens")
    check(
        not (is_streamed and parameters.decoder_input_details),
        "`decoder_input_details` == true is not supported when streaming tokens",
    )
    refuse_format(parameters.response_format)
    refuse_foreign(GENERATE, parameters.model_extra, vars(parameters))
    seed = secrets.randbits(64) if parameters.seed is None else parameters.seed
    return Question(
        inputs,
        _sampling(parameters),
        [candidate_seed(seed, place) for place in range(best_of)],
        max_new_tokens=parameters.max_new_tokens,
        min_new_tokens=parameters.min_new_tokens or 0,
        ignore_eos=bool(parameters.ignore_eos_token),
        stop_strings=tuple(parameters.stop or ()),
        truncate=truncate,
        logprobs=bool(parameters.details or parameters.decoder_input_details),
        prompt_logprobs=bool(parameters.decoder_input_details),
    )


def refuse_format(asked: ResponseFormat | None) -> None:
    """`text` asks for nothing; LoRAX took it for JSON all the same."""
    if asked is not None and (asked.type.lower() != "text" or asked.schema_ is not None):
        not_yet(True, f"`response_format` {asked.type[:32]!r}")


def _merge(merged: MergedAdapters, weights: list[float], seed: int | None) -> Merge:
    """The request's seed chooses what DARE drops. Without one the choice is always the same, as it is where nothing is
    drawn: a merge that is made anew for each request could be shared by none."""
    strategy = (merged.merge_strategy or "linear").lower()
    # LoRAX's default keeps nothing of the adapters; what is meant by not saying is all of them.
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


def _check_ranges(given: GenerateParameters, config: ServerConfig) -> None:
    check(_holds(given.temperature, lambda value: value >= 0), "`temperature` must be non-negative")
    check(_holds(given.repetition_penalty, lambda value: value > 0), "`repetition_penalty` must be strictly positive")
    for name in ("frequency_penalty", "presence_penalty"):
        check(_holds(getattr(given, name), lambda value: -2 <= value <= 2), f"`{name}` must be >= -2.0 and <= 2.0")
    check(_holds(given.top_p, lambda value: 0 < value <= 1), "`top_p` must be > 0.0 and < 1.0")
    check(_holds(given.typical_p, lambda value: 0 < value < 1), "`typical_p` must be > 0.0 and < 1.0")
    check(_holds(given.top_k, lambda value: 1 <= value < 2**31), "`top_k` must be strictly positive")
    alternatives = given.return_k_alternatives
    check(_holds(alternatives, lambda value: value >= 1), "`return_k_alternatives` must be strictly positive")
    check(
        _holds(alternatives, lambda value: value <= config.max_logprobs),
        f"`return_k_alternatives` must be <= {config.max_logprobs}. Given: {alternatives}",
    )
    check(_holds(given.max_new_tokens, lambda value: value >= 1), "`max_new_tokens` must be strictly positive")


def _sampling(given: GenerateParameters) -> SamplingParams:
    return SamplingParams(
        do_sample=_samples(given),
        temperature=1.0 if given.temperature is None else given.temperature,
        top_k=given.top_k or 0,
        top_p=1.0 if given.top_p is None else given.top_p,
        min_p=given.min_p or 0.0,
        typical_p=1.0 if given.typical_p is None else given.typical_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        frequency_penalty=given.frequency_penalty or 0.0,
        presence_penalty=given.presence_penalty or 0.0,
        logit_bias=to_bias(given.logit_bias),
        watermark=bool(given.watermark),
        num_alternatives=given.return_k_alternatives or 0,
    )


def _samples(given: GenerateParameters, any_temperature: bool = False) -> bool:
    """A temperature of 1 alone changes nothing, so LoRAX does not draw for it; but it says that one wants to."""
    temperature = given.temperature
    by_temperature = temperature is not None and (any_temperature or temperature not in (0, 1))
    top_p, typical_p = given.top_p, given.typical_p
    return bool(
        given.do_sample
        or by_temperature
        or given.top_k is not None
        or given.min_p
        or (top_p is not None and (any_temperature or top_p < 1))
        or (typical_p is not None and (any_temperature or typical_p < 1))
    )


def _holds(value: float | None, rule: Callable[[float], bool]) -> bool:
    """NaN keeps no rule."""
    return value is None or rule(value)
