"""The OpenAI route `/v1/completions`."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.generation.candidates import sort_candidates
from lorax_server.generation.generation import TokenEvent, find_token_offsets
from lorax_server.server.checks import check
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.request_context import RequestContext, RequestOptions, constrain
from lorax_server.server.routes import openai
from lorax_server.server.routes.lorax import read_structure
from lorax_server.server.schemas.openai import CompletionRequest, CompletionResponse
from lorax_server.server.schemas.unsupported_fields import COMPLETIONS
from lorax_server.server.service import Service
from lorax_server.text.prompt import Prompt, list_prompts
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Alternatives

DEFAULT_MAX_TOKENS = 16


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.OPENAPI_TAG])

    @router.post(
        "/v1/completions", operation_id="complete", response_model=CompletionResponse, responses=openai.ERROR_RESPONSES
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete one or more prompts. With `stream`, the events are `CompletionChunk` objects followed by
        `[DONE]`.
        """
        return await RequestContext(service, request).run(lambda context: _complete(context, body))

    return router


async def _complete(context: RequestContext, body: CompletionRequest) -> Response:
    openai.record_model(context, body)
    prompts = list_prompts(body.prompt)
    check(bool(prompts) and all(len(prompt) > 0 for prompt in prompts), "`prompt` must not be empty")
    num_choices, num_candidates = body.n or 1, body.best_of or body.n or 1
    context.check_unknown_fields(COMPLETIONS, body)
    bodies = openai.split_models(body, context.service.model_names)
    options = _to_options(context.service, body, len(prompts) * len(bodies), num_choices, num_candidates)
    await context.admit(num_candidates * len(prompts) * len(bodies), bool(body.stream), len(bodies))
    options = constrain(context.service, options, await read_structure(body))
    groups = []
    for model, prompt in product(await openai.resolve_all(context, bodies), prompts):
        generations = await context.prepare(model, prompt, options)
        echo = await _locate_prompt(context.service, body, model.tokenizer, prompt)
        groups.append([_TextCompletion(body, generation, *echo) for generation in generations])
        await asyncio.sleep(0)  # let other requests run, because short prompts are tokenized inline
    envelope = openai.make_envelope(context, body, "cmpl", "text_completion")
    if body.stream:
        return await openai.stream_choices(context, body, envelope, list(chain.from_iterable(groups)))
    await finish_all(context.generations)
    chosen = [choice for group in groups for choice in _choose_best(group, num_choices)]
    return await context.build_response(lambda: _write_response(context, body, chosen, envelope))


def _to_options(
    service: Service, body: CompletionRequest, num_prompts: int, num_choices: int, num_candidates: int
) -> RequestOptions:
    openai.check_stop_conditions(service, body)
    openai.check_num_choices(service, num_choices)
    check(num_candidates >= num_choices, f"`best_of` ({num_candidates}) must be at least `n` ({num_choices})")
    openai.check_num_choices(service, num_candidates * num_prompts)
    check(num_candidates == num_choices or not body.stream, "`best_of` must equal `n` when streaming")
    check(body.logprobs is None or body.logprobs >= 0, "`logprobs` must not be negative")
    check(body.max_tokens is None or body.max_tokens >= (0 if body.echo else 1), "`max_tokens` must be at least 1")
    check(not (body.is_scoring and body.stream), "`max_tokens` must not be 0 when streaming")
    max_new_tokens = 1 if body.is_scoring else body.max_tokens
    default = service.defaults.max_new_tokens or DEFAULT_MAX_TOKENS
    # Log probabilities also decide which candidates are the most likely.
    has_logprobs = body.logprobs is not None or num_candidates > num_choices
    return replace(
        openai.to_options(service, body, num_candidates, body.logprobs or 0, max_new_tokens, default, has_logprobs),
        add_special_tokens=body.add_special_tokens is not False,
        logprobs=body.logprobs is not None,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        is_scoring=body.is_scoring,
    )


async def _locate_prompt(
    service: Service, body: CompletionRequest, tokenizer: TextTokenizer, prompt: Prompt
) -> tuple[str, list[int]]:
    """For `echo`, return the prompt text and, with `logprobs`, the character offset of each prompt token."""
    if not body.echo:
        return "", []
    tokenizers = service.tokenizers
    if isinstance(prompt, str):
        text, locate = prompt, partial(tokenizer.find_token_starts, prompt, body.add_special_tokens is not False)
    else:
        text = await tokenizers.decode(tokenizer, prompt)
        locate = partial(find_token_offsets, tokenizer.detokenizer, prompt)
    starts = [] if body.logprobs is None else await tokenizers.run(tokenizer, len(prompt), locate)
    return text, [min(start, len(text)) for start in starts]


# --- Responses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TextCompletion:
    """A completion, and the prompt text if `echo` is set."""

    body: CompletionRequest
    generation: RemoteGeneration
    echo_text: str  # the prompt text with `echo`, else ""
    token_starts: Sequence[int]  # character offsets of the prompt tokens, with `echo` and `logprobs`

    def write(
        self, index: int, token_events: list[TokenEvent], is_first: bool = True, length: int = sys.maxsize
    ) -> dict[str, Any]:
        """Return a response choice with the new tokens. `length` is the number of characters in the completion."""
        is_scoring, echo_text = self.body.is_scoring, self.echo_text if is_first else ""
        return {
            "index": index,
            "text": echo_text + "".join([token_event.text for token_event in token_events]),
            "logprobs": None if self.body.logprobs is None else self._write_logprobs(token_events, is_first, length),
            # Not from the generation, which may have finished while these events were queued for a slow client.
            "finish_reason": "length" if is_scoring else openai.finish_reason(token_events[-1].finish_reason),
        }

    def write_deltas(self, index: int, token_events: list[TokenEvent], is_first: bool) -> list[dict[str, Any]]:
        return [self.write(index, token_events, is_first)]

    def _write_logprobs(self, token_events: list[TokenEvent], is_first: bool, length: int) -> dict[str, Any]:
        """Return OpenAI's `logprobs` object. Offsets are at most `length`, because stop strings may be removed."""
        tokens: list[tuple[int, int, float | None, Alternatives | None]] = []
        if is_first and self.body.echo:  # the first prompt token has no log probability
            completion, ids = self.generation.completion, self.generation.request.prompt_ids
            alternatives: Sequence[Alternatives | None] = completion.prompt_alternatives or [None] * (len(ids) - 1)
            logprobs = completion.prompt_logprobs or []
            tokens += zip(self.token_starts, ids, [None, *logprobs], [None, *alternatives], strict=True)
        for event in token_events:
            start = len(self.echo_text) + min(event.offset, length)
            tokens.append((start, event.token_id, event.logprob, event.alternatives))
        token_text = self.generation.tokenizer.detokenizer.token_text
        return {
            "text_offset": [start for start, *_ in tokens],
            "token_logprobs": [logprob for _, _, logprob, _ in tokens],
            "tokens": [token_text(token_id) for _, token_id, *_ in tokens],
            "top_logprobs": [_top_logprobs(token_text, *token[1:]) for token in tokens] if self.body.logprobs else None,
        }


def _write_response(
    context: RequestContext, body: CompletionRequest, chosen: list[_TextCompletion], envelope: dict[str, Any]
) -> Response:
    choices, num_shown = [], 0
    for index, choice in enumerate(chosen):
        token_events = [] if body.is_scoring else choice.generation.events
        written = choice.write(index, token_events, length=len(choice.generation.text))
        choices.append(openai.add_model(body, written, len(chosen)))
        num_shown += len(token_events)
    usage = openai.count_usage(context, body.is_scoring)
    return json_response(envelope | {"choices": choices, "usage": usage}, 200, context.response_headers(num_shown))


def _choose_best(group: list[_TextCompletion], count: int) -> list[_TextCompletion]:
    """Return the `count` most likely completions of a prompt. If all completions are returned, they keep
    their order.
    """
    if count == len(group):
        return group
    order = sort_candidates([choice.generation.completion.logprobs for choice in group])
    return [group[index] for index in order[:count]]


def _top_logprobs(
    token_text: Callable[[int], str], chosen_id: int, logprob: float | None, alternatives: Alternatives | None
) -> dict[str, float] | None:
    if logprob is None:
        return None
    top = dict[str, float]()
    for token_id, other in zip(*(alternatives or ((), ())), strict=True):
        top.setdefault(token_text(token_id), other)
    top[token_text(chosen_id)] = logprob  # overrides tokens with the same text, such as partial UTF-8 characters
    return top
