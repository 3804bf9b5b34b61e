"""OpenAI's `/v1/completions`."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.generation.candidates import sort_candidates
from lorax_server.generation.generation import TokenEvent, locate_tokens
from lorax_server.server.checks import check
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.problems import json_response
from lorax_server.server.request_context import RequestContext, RequestOptions
from lorax_server.server.routes import openai
from lorax_server.server.schemas.openai import CompletionRequest, CompletionResponse
from lorax_server.server.schemas.unsupported_fields import COMPLETIONS, reject_unsupported
from lorax_server.server.service import Service
from lorax_server.text.prompt import Prompt, list_prompts
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.types import Alternatives

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class _Answers:
    """The answers to one of the request's prompts."""

    generations: list[RemoteGeneration]
    text: str = ""  # of the prompt, if the answers repeat it
    starts: Sequence[int] = ()  # of the prompt's tokens in its text, if these are reported on


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.TAG])

    @router.post("/v1/completions", operation_id="complete", response_model=CompletionResponse, responses=openai.ERRORS)
    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continue one or several prompts. With `stream` the events are chunks of the same form, then `[DONE]`."""
        return await RequestContext(service, http).answer(lambda context: _complete(context, body))

    return router


async def _complete(context: RequestContext, body: CompletionRequest) -> Response:
    choice = openai.choose_model(context, body)
    prompts = list_prompts(body.prompt)
    check(bool(prompts) and all(len(prompt) > 0 for prompt in prompts), "`prompt` must not be empty")
    num_choices, num_drawn = body.n or 1, body.best_of or body.n or 1
    options = _to_options(context.service, body, len(prompts), num_choices, num_drawn)
    await context.admit(num_drawn * len(prompts), bool(body.stream))
    options = replace(options, structure=await openai.choose_structure(body))
    model = await openai.resolve(context, body, choice)
    answers = []
    for prompt in prompts:
        generations = await context.prepare(model, prompt, options)
        answers.append(await _echo(context.service, body, model.tokenizer, prompt, generations))
        await asyncio.sleep(0)  # short prompts become tokens at once; others are not to wait for all of them
    frame = openai.make_frame(context, body, "cmpl", "text_completion")
    if body.stream:
        pairs = [(each, generation) for each in answers for generation in each.generations]

        def write(index: int, token_events: list[TokenEvent], is_first: bool) -> list[dict[str, Any]]:
            return [_choice(body, index, *pairs[index], token_events, is_first)]

        return await openai.stream_choices(context, body, frame, write)
    await finish_all(context.generations)
    return await context.write(lambda: _write(context, body, answers, frame, num_choices))


def _to_options(
    service: Service, body: CompletionRequest, num_prompts: int, num_choices: int, num_drawn: int
) -> RequestOptions:
    reject_unsupported(COMPLETIONS, body.model_extra, vars(body))
    openai.check_stopping(service, body)
    openai.check_count(service, num_choices)
    check(num_drawn >= num_choices, f"`best_of` ({num_drawn}) must be at least `n` ({num_choices})")
    openai.check_count(service, num_drawn * num_prompts)
    check(num_drawn == num_choices or not body.stream, "`best_of` other than `n` is not possible when streaming")
    check(body.logprobs is None or body.logprobs >= 0, "`logprobs` must not be negative")
    check(body.max_tokens is None or body.max_tokens >= (0 if body.echo else 1), "`max_tokens` must be at least 1")
    check(not (body.is_scoring and body.stream), "`max_tokens` of 0 is not possible when streaming")
    max_new_tokens = 1 if body.is_scoring else body.max_tokens
    default = service.defaults.max_new_tokens or DEFAULT_MAX_TOKENS
    has_logprobs = body.logprobs is not None or num_drawn > num_choices  # the likeliest answers are chosen
    return replace(
        openai.to_options(service, body, num_drawn, body.logprobs or 0, max_new_tokens, default, has_logprobs),
        add_special_tokens=body.add_special_tokens is not False,
        logprobs=body.logprobs is not None,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        is_scoring=body.is_scoring,
    )


async def _echo(
    service: Service,
    body: CompletionRequest,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    generations: list[RemoteGeneration],
) -> _Answers:
    """Find the text that answers repeat, and where its tokens begin, as far as the request asks for it."""
    if not body.echo:
        return _Answers(generations)
    tokenizers = service.tokenizers
    if isinstance(prompt, str):
        text, locate = prompt, partial(tokenizer.locate, prompt, body.add_special_tokens is not False)
    else:
        text = await tokenizers.decode(tokenizer, prompt)
        locate = partial(locate_tokens, tokenizer.detokenizer, prompt)
    starts = [] if body.logprobs is None else await tokenizers.run(tokenizer, len(prompt), locate)
    return _Answers(generations, text, [min(start, len(text)) for start in starts])


# --- Answers ----------------------------------------------------------------------------------------------------------


def _write(
    context: RequestContext,
    body: CompletionRequest,
    all_answers: list[_Answers],
    frame: dict[str, Any],
    num_choices: int,
) -> Response:
    chosen = [(answers, generation) for answers in all_answers for generation in _choose(answers, num_choices)]
    choices = []
    for index, (answers, generation) in enumerate(chosen):
        token_events = [] if body.is_scoring else generation.events
        choices.append(_choice(body, index, answers, generation, token_events, length=len(generation.text)))
    num_shown = 0 if body.is_scoring else sum(len(generation.completion.token_ids) for _, generation in chosen)
    usage = openai.count_usage(context, body.is_scoring)
    return json_response(frame | {"choices": choices, "usage": usage}, 200, context.headers(num_shown))


def _choose(answers: _Answers, count: int) -> list[RemoteGeneration]:
    """Choose the best answers to a prompt. If none is left out, they stay in the order in which they were drawn."""
    generations = answers.generations
    if count == len(generations):
        return generations
    order = sort_candidates([generation.completion.logprobs for generation in generations])
    return [generations[index] for index in order[:count]]


def _choice(
    body: CompletionRequest,
    index: int,
    answers: _Answers,
    generation: RemoteGeneration,
    token_events: list[TokenEvent],
    is_first: bool = True,
    length: int = sys.maxsize,
) -> dict[str, Any]:
    """Describe new tokens of an answer with `length` characters in all."""
    is_echoed = is_first and bool(body.echo)
    return {
        "index": index,
        "text": (answers.text if is_echoed else "") + "".join([token_event.text for token_event in token_events]),
        "logprobs": _write_logprobs(body, answers, generation, token_events, is_echoed, length),
        # Not the generation's own: it may have ended while these events waited for a slow client.
        "finish_reason": "length" if body.is_scoring else openai.finish_reason(token_events[-1].finish_reason),
    }


# --- Log probabilities ------------------------------------------------------------------------------------------------


def _write_logprobs(
    body: CompletionRequest,
    answers: _Answers,
    generation: RemoteGeneration,
    token_events: list[TokenEvent],
    is_echoed: bool,
    length: int,
) -> dict[str, Any] | None:
    """Write OpenAI's lists of tokens. A token may begin in a stop string that is not shown, beyond its `length`."""
    if body.logprobs is None:
        return None
    tokens: list[tuple[int, int, float | None, Alternatives | None]] = []
    if is_echoed:  # nothing comes before the first token, so that it has no log probability
        completion, ids = generation.completion, generation.request.prompt_ids
        alternatives: Sequence[Alternatives | None] = completion.prompt_alternatives or [None] * (len(ids) - 1)
        logprobs = completion.prompt_logprobs or []
        tokens += zip(answers.starts, ids, [None, *logprobs], [None, *alternatives], strict=True)
    for event in token_events:
        start = len(answers.text) + min(event.offset, length)
        tokens.append((start, event.token_id, event.logprob, event.alternatives))
    token_text = generation.tokenizer.detokenizer.token_text
    return {
        "text_offset": [start for start, *_ in tokens],
        "token_logprobs": [logprob for _, _, logprob, _ in tokens],
        "tokens": [token_text(token_id) for _, token_id, *_ in tokens],
        "top_logprobs": [_top(token_text, *token[1:]) for token in tokens] if body.logprobs else None,
    }


def _top(
    token_text: Callable[[int], str], chosen_id: int, logprob: float | None, alternatives: Alternatives | None
) -> dict[str, float] | None:
    if logprob is None:
        return None
    top = dict[str, float]()
    for token_id, other in zip(*(alternatives or ((), ())), strict=True):
        top.setdefault(token_text(token_id), other)
    top[token_text(chosen_id)] = logprob  # whichever else looks the same, such as bytes that are no character
    return top
