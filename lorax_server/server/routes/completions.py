"""The OpenAI route `/v1/completions`."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from lorax_server.server.schemas.openai import CompletionRequest, CompletionResponse
from lorax_server.server.schemas.unsupported_fields import COMPLETIONS, reject_unsupported
from lorax_server.server.service import Service
from lorax_server.text.prompt import Prompt, list_prompts
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Alternatives

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class _PromptCompletions:
    """The completions of one prompt, and the prompt text if `echo` is set."""

    generations: list[RemoteGeneration]
    echo_text: str = ""  # the prompt text with `echo`, else ""
    token_starts: Sequence[int] = ()  # character offsets of the prompt tokens, with `echo` and `logprobs`


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.TAG])

    @router.post("/v1/completions", operation_id="complete", response_model=CompletionResponse, responses=openai.ERRORS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Complete one or more prompts. With `stream`, the events are chunks in the same format and then `[DONE]`."""
        return await RequestContext(service, request).run(lambda context: _complete(context, body))

    return router


async def _complete(context: RequestContext, body: CompletionRequest) -> Response:
    choice = openai.choose_model(context, body)
    prompts = list_prompts(body.prompt)
    check(bool(prompts) and all(len(prompt) > 0 for prompt in prompts), "`prompt` must not be empty")
    num_choices, num_candidates = body.n or 1, body.best_of or body.n or 1
    options = _to_options(context.service, body, len(prompts), num_choices, num_candidates)
    await context.admit(num_candidates * len(prompts), bool(body.stream))
    options = constrain(context.service, options, await openai.read_structure(body))
    model = await openai.resolve(context, body, choice)
    completions = []
    for prompt in prompts:
        generations = await context.prepare(model, prompt, options)
        completions.append(await _locate_prompt(context.service, body, model.tokenizer, prompt, generations))
        await asyncio.sleep(0)  # let other requests run, because short prompts are tokenized inline
    envelope = openai.make_envelope(context, body, "cmpl", "text_completion")
    if body.stream:
        pairs = [
            (prompt_completions, generation)
            for prompt_completions in completions
            for generation in prompt_completions.generations
        ]

        def write(index: int, token_events: list[TokenEvent], is_first: bool) -> list[dict[str, Any]]:
            return [_choice(body, index, *pairs[index], token_events, is_first)]

        return await openai.stream_choices(context, body, envelope, write)
    await finish_all(context.generations)
    return await context.build_response(lambda: _write(context, body, completions, envelope, num_choices))


def _to_options(
    service: Service, body: CompletionRequest, num_prompts: int, num_choices: int, num_candidates: int
) -> RequestOptions:
    reject_unsupported(COMPLETIONS, body.model_extra, vars(body))
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
    has_logprobs = (
        body.logprobs is not None or num_candidates > num_choices
    )  # also needed to choose the most likely candidates
    return replace(
        openai.to_options(service, body, num_candidates, body.logprobs or 0, max_new_tokens, default, has_logprobs),
        add_special_tokens=body.add_special_tokens is not False,
        logprobs=body.logprobs is not None,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        is_scoring=body.is_scoring,
    )


async def _locate_prompt(
    service: Service,
    body: CompletionRequest,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    generations: list[RemoteGeneration],
) -> _PromptCompletions:
    """Return the prompt's completions. For `echo`, add the prompt text, and with `logprobs` its token offsets."""
    if not body.echo:
        return _PromptCompletions(generations)
    tokenizers = service.tokenizers
    if isinstance(prompt, str):
        text, locate = prompt, partial(tokenizer.find_token_starts, prompt, body.add_special_tokens is not False)
    else:
        text = await tokenizers.decode(tokenizer, prompt)
        locate = partial(find_token_offsets, tokenizer.detokenizer, prompt)
    starts = [] if body.logprobs is None else await tokenizers.run(tokenizer, len(prompt), locate)
    return _PromptCompletions(generations, text, [min(start, len(text)) for start in starts])


# --- Responses --------------------------------------------------------------------------------------------------------


def _write(
    context: RequestContext,
    body: CompletionRequest,
    all_completions: list[_PromptCompletions],
    envelope: dict[str, Any],
    num_choices: int,
) -> Response:
    chosen = [
        (completions, generation) for completions in all_completions for generation in _choose(completions, num_choices)
    ]
    choices = []
    for index, (completions, generation) in enumerate(chosen):
        token_events = [] if body.is_scoring else generation.events
        choices.append(_choice(body, index, completions, generation, token_events, length=len(generation.text)))
    num_shown = 0 if body.is_scoring else sum(len(generation.completion.token_ids) for _, generation in chosen)
    usage = openai.count_usage(context, body.is_scoring)
    return json_response(envelope | {"choices": choices, "usage": usage}, 200, context.response_headers(num_shown))


def _choose(completions: _PromptCompletions, count: int) -> list[RemoteGeneration]:
    """Return the `count` most likely completions. If all completions are returned, they keep their order."""
    generations = completions.generations
    if count == len(generations):
        return generations
    order = sort_candidates([generation.completion.logprobs for generation in generations])
    return [generations[index] for index in order[:count]]


def _choice(
    body: CompletionRequest,
    index: int,
    completions: _PromptCompletions,
    generation: RemoteGeneration,
    token_events: list[TokenEvent],
    is_first: bool = True,
    length: int = sys.maxsize,
) -> dict[str, Any]:
    """Return a response choice with the new tokens. `length` is the number of characters in the completion."""
    is_echoed = is_first and bool(body.echo)
    return {
        "index": index,
        "text": (completions.echo_text if is_echoed else "")
        + "".join([token_event.text for token_event in token_events]),
        "logprobs": _write_logprobs(body, completions, generation, token_events, is_echoed, length),
        # Not from the generation, which may have finished while these events were queued for a slow client.
        "finish_reason": "length" if body.is_scoring else openai.finish_reason(token_events[-1].finish_reason),
    }


# --- Log probabilities ------------------------------------------------------------------------------------------------


def _write_logprobs(
    body: CompletionRequest,
    completions: _PromptCompletions,
    generation: RemoteGeneration,
    token_events: list[TokenEvent],
    is_echoed: bool,
    length: int,
) -> dict[str, Any] | None:
    """Return OpenAI's `logprobs` object, or None. Offsets are at most `length`, because stop strings may be cut off."""
    if body.logprobs is None:
        return None
    tokens: list[tuple[int, int, float | None, Alternatives | None]] = []
    if is_echoed:  # the first prompt token has no log probability
        completion, ids = generation.completion, generation.request.prompt_ids
        alternatives: Sequence[Alternatives | None] = completion.prompt_alternatives or [None] * (len(ids) - 1)
        logprobs = completion.prompt_logprobs or []
        tokens += zip(completions.token_starts, ids, [None, *logprobs], [None, *alternatives], strict=True)
    for event in token_events:
        start = len(completions.echo_text) + min(event.offset, length)
        tokens.append((start, event.token_id, event.logprob, event.alternatives))
    token_text = generation.tokenizer.detokenizer.token_text
    return {
        "text_offset": [start for start, *_ in tokens],
        "token_logprobs": [logprob for _, _, logprob, _ in tokens],
        "tokens": [token_text(token_id) for _, token_id, *_ in tokens],
        "top_logprobs": [_top_logprobs(token_text, *token[1:]) for token in tokens] if body.logprobs else None,
    }


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
