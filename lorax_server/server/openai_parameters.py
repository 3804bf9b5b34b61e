"""From OpenAI's parameters to what the engine understands, for both routes. The rules are OpenAI's."""

import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lorax_server import __version__
from lorax_server.candidates import candidate_seed
from lorax_server.config import ServerConfig
from lorax_server.errors import AdapterNotFoundError, LoraxError
from lorax_server.generation_defaults import GenerationDefaults
from lorax_server.server.call import Call, Question
from lorax_server.server.jobs import Job, count_cached
from lorax_server.server.keys import HUB
from lorax_server.server.names import Choice, Named
from lorax_server.server.openai_schemas import CommonRequest
from lorax_server.server.rules import check, check_stops, not_yet
from lorax_server.types import MAX_SEED, FinishReason, SamplingParams

FINGERPRINT = f"lorax-{__version__}"
MAX_BIASES = 1024
# What vLLM takes and would change the answer.
NOT_YET = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids"),
    *("bad_words", "use_beam_search", "chat_template", "continue_final_message", "truncate_prompt_tokens"),
    "include_stop_str_in_output",
)


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


def expect_adapter(body: CommonRequest, call: Call) -> None:
    """Note who is named, so that a request which is refused is counted there; a name that nobody can have is not."""
    with suppress(LoraxError):
        call.expect(call.parts.names.by_model(body.model, body.adapter_source, None))


async def choose_adapter(body: CommonRequest, call: Call) -> Choice:
    names = call.parts.names
    try:
        return names.by_model(body.model, body.adapter_source, body.api_token or None)
    except AdapterNotFoundError as error:
        named = Named(names.default_source, names.without_base(body.model))
        await call.check_may_use(named, named.source == HUB, None)  # else who may not use it learns that it is missing
        raise await call.with_nearest(error, body.model, None) from None


def refuse_unsupported(body: CommonRequest) -> None:
    asked = body.response_format
    if asked is not None:
        not_yet(asked.get("type") != "text", f"`response_format` {str(asked.get('type'))[:32]!r}")
    for name in NOT_YET:
        not_yet(getattr(body, name) not in (None, False, []), f"`{name}`")


def sampling(
    body: CommonRequest, defaults: GenerationDefaults, config: ServerConfig, num_alternatives: int = 0
) -> SamplingParams:
    """Log probabilities are the model's own, whatever the answer was drawn with."""
    usual = 0.0 if defaults.do_sample is False else defaults.temperature
    temperature = _first(body.temperature, usual, 1.0)
    check(0 <= temperature <= 2, "`temperature` must be >= 0 and <= 2")
    check(num_alternatives <= config.max_logprobs, f"at most {config.max_logprobs} log probabilities are reported")
    top_k = _first(body.top_k, defaults.top_k, 0)
    check(top_k >= -1, "`top_k` must be >= 1, or -1 or 0 for all")
    return SamplingParams(
        do_sample=temperature > 0,
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        typical_p=_first(defaults.typical_p, 1.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
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
    check(count <= config.max_choices, f"at most {config.max_choices} answers are given to a request, not {count}")


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


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    check(len(given) <= MAX_BIASES, f"`logit_bias` has at most {MAX_BIASES} tokens. Given: {len(given)}")
    for token_id, bias in given.items():
        check(token_id.isascii() and token_id.isdigit() and len(token_id) < 10, "`logit_bias` is keyed by token ids")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        check(is_number and -100 <= bias <= 100, f"`logit_bias` of token {token_id} must be >= -100 and <= 100")
    return {int(token_id): bias for token_id, bias in given.items()}


def _first(*values: Any) -> Any:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _stops(body: CommonRequest) -> list[str]:
    return [body.stop] if isinstance(body.stop, str) else body.stop or []
