"""Prompts become tokens, and what a request asks for is checked against their number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorax_server.errors import ContextLengthError, InputError
from lorax_server.server.checks import check_text
from lorax_server.server.service import Service
from lorax_server.text.prompt import Prompt
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import SamplingParams, StopParams, Structure


@dataclass(frozen=True)
class RequestOptions:
    """Everything that a request asks for besides its prompt and its model, in the same form for all routes."""

    sampling: SamplingParams  # of every answer but for its seed
    stop: StopParams  # without the model's own eos tokens
    seeds: Sequence[int]  # one for each answer
    may_shorten: bool = False  # generate fewer than `max_new_tokens` where all do not fit, instead of refusing
    add_special_tokens: bool = True
    truncate: int | None = None
    logprobs: bool = False  # the answer lists those of its tokens
    prompt_logprobs: bool = False
    is_scoring: bool = False  # only the prompt matters; the one token that is generated is not shown
    salt: str = ""
    structure: Structure | None = None

    def count_logprobs(self, num_prompt_tokens: int, num_tokens: int, is_streamed: bool) -> int:
        """Count the log probabilities that are in memory at once. A stream has those of its tokens one by one."""
        count = 0
        if not is_streamed and (self.logprobs or self.sampling.num_alternatives):
            count += num_tokens
        if self.prompt_logprobs:
            count += num_prompt_tokens
        return count * (1 + self.sampling.num_alternatives) * len(self.seeds)


async def encode_prompt(
    service: Service, tokenizer: TextTokenizer, prompt: Prompt, options: RequestOptions
) -> list[int]:
    if isinstance(prompt, str):
        check_text(prompt)
        count = tokenizer.count_at_least(prompt)
        if options.truncate is None and count > service.max_input_length:
            fit_stop(service, tokenizer, options, count, at_least="at least ")  # before time is spent on its tokens
        ids = await service.tokenizers.encode(tokenizer, prompt, options.add_special_tokens, options.truncate)
    else:
        ids = list(prompt)
        vocab_size = max(service.engine.info.vocab_size, tokenizer.num_ids)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InputError(f"`inputs` has tokens beyond the vocabulary of {vocab_size}")
        if options.truncate is not None:
            ids = ids[-options.truncate :]
    if not ids:
        raise InputError("`inputs` cannot be empty")
    return ids


def fit_stop(
    service: Service, tokenizer: TextTokenizer, options: RequestOptions, num_ids: int, at_least: str = ""
) -> StopParams:
    """Return the stop rules of a prompt with so many tokens, or refuse it if it is too long for them."""
    total, max_new_tokens = service.max_total_tokens, options.stop.max_new_tokens
    if options.may_shorten:
        max_new_tokens = min(max_new_tokens, max(total - num_ids, 1))
    elif num_ids + max_new_tokens > total:
        raise ContextLengthError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
            f"Given: {at_least}{num_ids} `inputs` tokens and {max_new_tokens} `max_new_tokens`"
        )
    if num_ids > service.max_input_length:
        raise ContextLengthError(
            f"`inputs` must have less than {service.max_input_length} tokens. Given: {at_least}{num_ids}"
        )
    eos_token_ids = service.defaults.eos_token_ids | tokenizer.eos_token_ids
    return replace(options.stop, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
