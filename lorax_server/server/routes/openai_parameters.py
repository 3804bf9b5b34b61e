"""From OpenAI's parameters to what the engine understands, for both routes. The rules are OpenAI's."""

import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lorax_server import __version__
from lorax_server.config import ServerConfig
from lorax_server.errors import AdapterNotFoundError, LoraxError
from lorax_server.generation.candidates import candidate_seed
from lorax_server.server.access.keys import HUB
from lorax_server.server.access.model_names import Choice, ModelNames, Named
from lorax_server.server.exchange import Exchange, Question
from lorax_server.server.generations import Job, count_cached
from lorax_server.server.http.foreign_fields import refuse_foreign
from lorax_server.server.routes.checks import MAX_BIASES, check, check_stops, not_yet, to_bias
from lorax_server.server.routes.lorax_parameters import choose_merged
from lorax_server.server.routes.openai_schemas import CommonRequest
from lorax_server.text.generation_defaults import GenerationDefaults
from lorax_server.types import MAX_SEED, FinishReason, SamplingParams

FINGERPRINT = f"lorax-{__version__}"


@dataclass(frozen=True)
class Heading:
    """What stands at the top of an answer and of each of its chunks."""

    prefix: str
    object: str
    model: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.key}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def expect_adapter(body: CommonRequest, call: Exchange) -> None:
    """Note who is named, so that a request which is refused is counted there; a name that nobody can have is not."""
    with suppress(LoraxError):
        call.expect(_named_by(body, call.parts.model_names))


async def choose_adapter(body: CommonRequest, call: Exchange) -> Choice:
    names = call.parts.model_names
    try:
        return _named_by(body, names)
    except AdapterNotFoundError as error:
        named = Named(names.default_source, body.adapter_id or names.without_base(body.model))
        await call.check_may_use(named, named.source == HUB, None)  # else who may not use it learns that it is missing
        raise await call.with_nearest(error, named.name, None) from None


def _named_by(body: CommonRequest, names: ModelNames) -> Choice:
    """Find what `model` names, or LoRAX's `adapter_id` or `merged_adapters` where it names no adapter."""
    model, token = names.without_base(body.model), body.api_token or None
    if body.merged_adapters is not None:
        check(not model, "`model` and `merged_adapters` name different adapters; name one")
        check(not body.adapter_id, "at most one of `adapter_id` or `merged_adapters` may be provided")
        return choose_merged(
            body.merged_adapters, body.adapter_source, token, names, None if body.seed is None else body.seed & MAX_SEED
        )
    if body.adapter_id and body.adapter_id != model:
        check(not model, "`model` and `adapter_id` name different adapters; name one")
        return names.by_adapter(body.adapter_id, body.adapter_source, token)
    return names.by_model(body.model, body.adapter_source, token)


def model_of(body: CommonRequest, call: Exchange) -> str:
    """Name the model that answers, by the name that the request has for it."""
    return body.adapter_id or body.model or call.parts.model_names.primary


def refuse_unsupported(route: str, body: CommonRequest) -> None:
    asked = body.response_format
    if asked is not None:
        not_yet(asked.get("type") != "text", f"`response_format` {str(asked.get('type'))[:32]!r}")
    refuse_foreign(route, body.model_extra, vars(body))


def sampling(
    body: CommonRequest, defaults: GenerationDefaults, config: ServerConfig, num_alternatives: int = 0
) -> SamplingParams:
    """Log probabilities are the model's own, whatever the answer was drawn with."""
    usual = 0.0 if defaults.do_sample is False else defaults.temperature
    temperature = _first(body.temperature, usual, 1.0)
    check(0 <= temperature <= 2, "`temperature` must be >= 0 and <= 2")
    check(
        num_alternatives <= config.max_logprobs,
        f"`return_k_alternatives` must be <= {config.max_logprobs}. Given: {num_alternatives}",
    )
    top_k = _first(body.top_k, defaults.top_k, 0)
    check(top_k >= -1, "`top_k` must be >= 1, or -1 or 0 for all")
    return SamplingParams(
        do_sample=temperature > 0,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        typical_p=_first(body.typical_p, defaults.typical_p, 1.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=to_bias(body.logit_bias),
        num_alternatives=num_alternatives,
        raw_logprobs=True,
    )


def to_question(body: CommonRequest, prompt: str | Sequence[int], how: SamplingParams, count: int) -> Question:
    """What both routes say in the same words; each adds its own."""
    seed = secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED
    return Question(
        prompt,
        how,
        [candidate_seed(seed, place) for place in range(count)],
        min_new_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos_token or body.ignore_eos),
        stop_strings=tuple(_stops(body)),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=False,
        salt=body.cache_salt or "",
    )


def check_stopping(body: CommonRequest, config: ServerConfig) -> None:
    check_stops(_stops(body), config)
    count = len(body.stop_token_ids or ())
    check(count <= MAX_BIASES, f"`stop_token_ids` has at most {MAX_BIASES} tokens. Given: {count}")


def check_count(count: int, config: ServerConfig) -> None:
    check(count >= 1, "`n` must be at least 1")
    check(count <= config.max_choices, f"`n`: at most {config.max_choices} answers are given to a request, not {count}")


def usage(jobs: Sequence[Job], num_prompt_tokens: int, generated: int | None = None) -> dict[str, Any]:
    """Of all answers, also of those that were drawn and not chosen."""
    num_generated = sum(len(job.completion.token_ids) for job in jobs) if generated is None else generated
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": count_cached(jobs)},
    }


def finish_reason(reason: FinishReason | None) -> str | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


def _first(*values: Any) -> Any:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _stops(body: CommonRequest) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []
