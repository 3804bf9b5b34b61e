"""OpenAI's `/v1/completions`."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.generation.answer import locate_tokens
from lorax_server.generation.candidates import sort_candidates
from lorax_server.generation.completion import Chunk
from lorax_server.server.exchange import Exchange, Found, Question
from lorax_server.server.generations import Job, finish_all, interleave
from lorax_server.server.http.foreign_fields import COMPLETIONS
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import DONE, EventStream, event
from lorax_server.server.routes.checks import check
from lorax_server.server.routes.openai_parameters import (
    Heading,
    check_count,
    check_stopping,
    choose_adapter,
    expect_adapter,
    finish_reason,
    model_of,
    refuse_unsupported,
    sampling,
    to_question,
    usage,
)
from lorax_server.server.routes.openai_schemas import CompletionRequest, CompletionResponse, OpenAIErrorResponse
from lorax_server.server.service import Service
from lorax_server.types import Alternatives

TAG = "OpenAI Compatible"
DEFAULT_MAX_TOKENS = 16
STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503, 504)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": OpenAIErrorResponse} for status in STATUSES}

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class _Prompt:
    """One of the request's prompts, its text, and the answers to it."""

    text: str  # only if it is to be repeated
    starts: list[int]  # of its tokens in the text, only if these are reported on
    jobs: list[Job]


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])

    @router.post("/v1/completions", operation_id="complete", response_model=CompletionResponse, responses=ERRORS)
    async def completions(http: Request, body: CompletionRequest) -> Response:
        """Continue one or several prompts. With `stream` the events are chunks of the same form, then `[DONE]`."""
        return await service.answer(http, lambda call: _complete(call, body))

    return router


async def _complete(call: Exchange, body: CompletionRequest) -> Response:
    expect_adapter(body, call)
    prompts = _prompts(body)
    num_choices, num_drawn = body.n or 1, body.best_of or body.n or 1
    question = _question(call, body, prompts, num_choices, num_drawn)
    call.admit(num_drawn * len(prompts), bool(body.stream))
    found = await call.find(await choose_adapter(body, call))
    asked = []
    for prompt in prompts:
        jobs = await call.ask(found, replace(question, prompt=prompt))
        asked.append(await _repeat(call, body, found, prompt, jobs))
        await asyncio.sleep(0)  # short ones become tokens at once; others are not to wait for all of them
    heading = Heading("cmpl", "text_completion", model_of(body, call))
    if body.stream:
        events = await call.open_stream(_events(call, body, asked, heading))
        return EventStream(events, call.parts.config.keep_alive_s, call.stream_headers())
    await finish_all(call.jobs)
    return await call.write(lambda: _answer(call, body, asked, heading, num_choices))


async def _repeat(call: Exchange, body: CompletionRequest, found: Found, prompt: Prompt, jobs: list[Job]) -> _Prompt:
    if not body.echo:
        return _Prompt("", [], jobs)
    tokenizer, tokenizers, starts = found.tokenizer, call.parts.tokenizers, list[int]()
    text = prompt if isinstance(prompt, str) else await tokenizers.decode(tokenizer, prompt)
    if body.logprobs is not None:
        if isinstance(prompt, str):
            starts = await tokenizers.locate(tokenizer, prompt, body.add_special_tokens is not False)
        else:
            work = partial(locate_tokens, tokenizer.detokenizer, prompt)
            starts = await tokenizers.run(tokenizer, len(prompt), work)
    return _Prompt(text, [min(start, len(text)) for start in starts], jobs)


def _answer(
    call: Exchange, body: CompletionRequest, prompts: list[_Prompt], heading: Heading, num_choices: int
) -> Response:
    chosen = [(prompt, job) for prompt in prompts for job in _choose(prompt, num_choices)]
    choices = [_choice(body, index, prompt, job) for index, (prompt, job) in enumerate(chosen)]
    is_scoring = body.max_tokens == 0  # then the token that was drawn is nobody's
    used = usage(call.jobs, call.record.prompt_tokens, 0 if is_scoring else None)
    num_shown = 0 if is_scoring else sum(len(job.completion.token_ids) for _, job in chosen)
    return json_response(heading.of(choices) | {"usage": used}, 200, call.headers(num_shown))


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    listed: list[Any] = list(prompt) if isinstance(prompt, list) and not _is_ids(prompt) else [prompt]
    check(bool(listed) and all(len(each) > 0 for each in listed), "`prompt` must not be empty")
    return listed


def _is_ids(prompt: list[Any]) -> bool:
    return len(prompt) > 0 and isinstance(prompt[0], int)


def _question(
    call: Exchange, body: CompletionRequest, prompts: list[Prompt], num_choices: int, num_drawn: int
) -> Question:
    config, defaults = call.parts.config, call.parts.defaults
    refuse_unsupported(COMPLETIONS, body)
    check_stopping(body, config)
    check_count(num_choices, config)
    check(num_drawn >= num_choices, f"`best_of` ({num_drawn}) must be at least `n` ({num_choices})")
    check_count(num_drawn * len(prompts), config)
    check(num_drawn == num_choices or not body.stream, "`best_of` other than `n` is not possible when streaming")
    check(body.logprobs is None or body.logprobs >= 0, "`logprobs` must not be negative")
    is_scoring = body.max_tokens == 0
    check(body.max_tokens is None or body.max_tokens >= (0 if body.echo else 1), "`max_tokens` must be at least 1")
    check(not (is_scoring and body.stream), "`max_tokens` of 0 is not possible when streaming")
    how = sampling(body, defaults, config, body.logprobs or 0)
    return replace(
        to_question(body, "", how, num_drawn),
        max_new_tokens=1 if is_scoring else body.max_tokens,
        default_new_tokens=defaults.max_new_tokens or DEFAULT_MAX_TOKENS,
        add_special_tokens=body.add_special_tokens is not False,
        logprobs=body.logprobs is not None,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        is_scoring=is_scoring,
    )


def _choose(prompt: _Prompt, count: int) -> list[Job]:
    """The best answers to a prompt; all of them, in the order in which they were drawn, if none is left out."""
    jobs = prompt.jobs
    if count == len(jobs):
        return jobs
    return [jobs[place] for place in sort_candidates([job.completion.logprobs for job in jobs])[:count]]


def _choice(body: CompletionRequest, index: int, prompt: _Prompt, job: Job) -> dict[str, Any]:
    is_scoring = body.max_tokens == 0
    chunks = [] if is_scoring else job.chunks_so_far
    logprobs = None
    if body.logprobs is not None:
        logprobs = _Logprobs(job, body.logprobs, prompt)
        if body.echo:
            logprobs.add_prompt()
        logprobs.add(chunks, most=len(job.text))
    return {
        "index": index,
        "text": prompt.text + ("" if is_scoring else job.text),
        "logprobs": None if logprobs is None else logprobs.take(),
        "finish_reason": "length" if is_scoring else finish_reason(job.completion.finish_reason),
    }


class _Logprobs:
    """OpenAI's lists of log probabilities, for the whole answer or as it comes."""

    def __init__(self, job: Job, count: int, prompt: _Prompt) -> None:
        self._job = job
        self._count = count
        self._prompt = prompt
        self._lists: dict[str, list[Any]] = self._empty()

    def add_prompt(self) -> None:
        completion, text_of = self._job.completion, self._job.tokenizer.detokenizer.token_text
        first, *others = map(text_of, self._job.request.prompt_ids)
        start, *starts = self._prompt.starts
        self._put(first, start, None, None)  # nothing comes before it
        logprobs = completion.prompt_logprobs or []
        alternatives: Sequence[Alternatives | None] = completion.prompt_alternatives or [None] * len(logprobs)
        for token, start, logprob, top in zip(others, starts, logprobs, alternatives, strict=True):
            self._put(token, start, logprob, self._top(token, logprob, top))

    def add(self, chunks: list[Chunk], most: int = sys.maxsize) -> None:
        """Tokens of an answer, which has `most` characters: what stops it may have begun, and then not be shown."""
        for chunk in chunks:
            token = self._job.tokenizer.detokenizer.token_text(chunk.token_id)
            top = self._top(token, chunk.logprob, chunk.alternatives)
            self._put(token, len(self._prompt.text) + min(chunk.offset, most), chunk.logprob, top)

    def _top(self, token: str, logprob: float, alternatives: Alternatives | None) -> dict[str, float]:
        text_of, top = self._job.tokenizer.detokenizer.token_text, dict[str, float]()
        for token_id, other in zip(*(alternatives or ((), ())), strict=True):
            top.setdefault(text_of(token_id), other)
        top[token] = logprob  # whichever else looks the same, such as bytes that are no character
        return top

    def take(self) -> dict[str, Any]:
        lists, self._lists = self._lists, self._empty()
        return lists if self._count else {**lists, "top_logprobs": None}

    def _put(self, token: str, start: int, logprob: float | None, top: dict[str, float] | None) -> None:
        self._lists["tokens"].append(token)
        self._lists["token_logprobs"].append(logprob)
        self._lists["top_logprobs"].append(top)
        self._lists["text_offset"].append(start)

    @staticmethod
    def _empty() -> dict[str, list[Any]]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


async def _events(
    call: Exchange, body: CompletionRequest, prompts: list[_Prompt], heading: Heading
) -> AsyncGenerator[bytes, None]:
    jobs = call.jobs
    prompt_of = [prompt for prompt in prompts for _ in prompt.jobs]
    logprobs = [
        None if body.logprobs is None else _Logprobs(job, body.logprobs, prompt)
        for job, prompt in zip(jobs, prompt_of, strict=True)
    ]
    has_begun, first = [False] * len(jobs), call.first_event
    num_left = len(jobs)
    async with aclosing(interleave(jobs)) as stream:
        async for place, chunks in stream:
            text, logs = "".join([chunk.text for chunk in chunks]), logprobs[place]
            if body.echo and not has_begun[place]:
                text = prompt_of[place].text + text
                if logs is not None:
                    logs.add_prompt()
            has_begun[place] = True
            if logs is not None:
                logs.add(chunks)
            reason = finish_reason(jobs[place].completion.finish_reason)
            num_left -= reason is not None
            answer = heading.of(
                [
                    {
                        "index": place,
                        "text": text,
                        "logprobs": None if logs is None else logs.take(),
                        "finish_reason": reason,
                    }
                ]
            )
            if body.wants_usage:
                answer["usage"] = None
            elif body.says_nothing_of_usage and not num_left:
                answer["usage"] = usage(jobs, call.record.prompt_tokens)
            yield event(answer | first)
            first = {}
    if body.wants_usage:
        yield event(heading.of([]) | {"usage": usage(jobs, call.record.prompt_tokens)})
    yield DONE
