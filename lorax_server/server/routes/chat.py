"""OpenAI's `/v1/chat/completions`."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.errors import InputError, MissingVariableError, NotSupportedError
from lorax_server.generation.completion import Chunk
from lorax_server.server.exchange import Exchange, Found, Question
from lorax_server.server.generations import Job, finish_all, interleave
from lorax_server.server.http.foreign_fields import CHAT
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import DONE, EventStream, event
from lorax_server.server.routes.checks import check, not_yet
from lorax_server.server.routes.completions import ERRORS, TAG
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
from lorax_server.server.routes.openai_schemas import ChatCompletionRequest, ChatCompletionResponse, Message, TextPart
from lorax_server.server.service import Service
from lorax_server.text.detokenizer import Detokenizer

RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[TAG])

    @router.post("/v1/chat/completions", operation_id="chat", response_model=ChatCompletionResponse, responses=ERRORS)
    async def chat_completions(http: Request, body: ChatCompletionRequest) -> Response:
        """Answer messages. With `stream` the events are `chat.completion.chunk`s, then `[DONE]`."""
        return await service.answer(http, lambda call: _chat(call, body))

    return router


async def _chat(call: Exchange, body: ChatCompletionRequest) -> Response:
    expect_adapter(body, call)
    question = _question(call, body)
    call.admit(len(question.seeds), bool(body.stream))
    found = await call.find(await choose_adapter(body, call))
    jobs = await call.ask(found, replace(question, prompt=await _render(call, found, body)))
    model = model_of(body, call)
    if body.stream:
        events = await call.open_stream(_events(call, body, Heading("chatcmpl", "chat.completion.chunk", model)))
        return EventStream(events, call.parts.config.keep_alive_s, call.stream_headers())
    await finish_all(jobs)
    heading = Heading("chatcmpl", "chat.completion", model)
    return await call.write(lambda: _answer(call, body, heading))


def _answer(call: Exchange, body: ChatCompletionRequest, heading: Heading) -> Response:
    used = usage(call.jobs, call.record.prompt_tokens)
    choices = [_choice(body, index, job) for index, job in enumerate(call.jobs)]
    return json_response(heading.of(choices) | {"usage": used}, 200, call.headers(used["completion_tokens"]))


def _question(call: Exchange, body: ChatCompletionRequest) -> Question:
    config, defaults = call.parts.config, call.parts.defaults
    refuse_unsupported(CHAT, body)
    not_yet(body.tools and body.tool_choice != "none", "`tools`")  # an answer without them is the one without tools
    not_yet(body.tool_choice not in (None, "", "none", "auto"), "`tool_choice`")
    check(bool(body.messages), "`messages` must not be empty")
    check(not body.top_logprobs or bool(body.logprobs), "`top_logprobs` needs `logprobs` to be true")
    check((body.top_logprobs or 0) >= 0, "`top_logprobs` must not be negative")
    check_stopping(body, config)
    count = 1 if body.n is None else body.n
    check_count(count, config)
    most, total = body.max_completion_tokens, call.parts.max_total_tokens
    if most is None:
        most = body.max_tokens
        check(most is None or most >= 1, "`max_tokens` must be at least 1")
    else:
        check(most >= 1, "`max_completion_tokens` must be at least 1")
        is_possible = body.max_tokens is None or 1 <= body.max_tokens < total
        check(is_possible, f"`max_tokens` must be 1 to {total - 1}, also where `max_completion_tokens` counts")
    how = sampling(body, defaults, config, body.top_logprobs or 0)
    # The template says which special tokens there are.
    return replace(
        to_question(body, "", how, count),
        max_new_tokens=most,
        default_new_tokens=defaults.max_new_tokens,
        add_special_tokens=False,
        logprobs=bool(body.logprobs),
    )


async def _render(call: Exchange, found: Found, body: ChatCompletionRequest) -> str:
    tokenizers = call.parts.tokenizers
    if body.guideline is None and re.search(r"\bguideline\b", tokenizers.template_of(found.tokenizer) or ""):
        raise MissingVariableError("Missing template vatiable: guideline")  # spelt as LoRAX does
    variables = dict(body.chat_template_kwargs or {})
    for name in RESERVED:
        check(name not in variables, f"`chat_template_kwargs` must not have `{name}`")
    if body.guideline is not None:
        variables["guideline"] = body.guideline
    knows_developers = "developer" in (tokenizers.template_of(found.tokenizer) or "")
    messages = [_message(place, message, knows_developers) for place, message in enumerate(body.messages)]
    return await tokenizers.render(
        found.tokenizer, messages, **{"add_generation_prompt": body.add_generation_prompt is not False, **variables}
    )


def _message(place: int, message: Message, knows_developers: bool) -> dict[str, Any]:
    """As chat templates expect it: what is not there is left out, and text is one string. OpenAI's newer name of
    `system` is for templates that have it."""
    content = _text(place, message.content) if isinstance(message.content, list) else message.content
    if content is None and not message.tool_calls:
        content = ""
    role = "system" if message.role == "developer" and not knows_developers else message.role
    if message.name is None and message.tool_calls is None and message.tool_call_id is None:
        return {"role": role, "content": content}  # as nearly all are, and there may be thousands
    others = message.model_dump(exclude={"role", "content"}, exclude_none=True)
    return {"role": role, "content": content, **others}


def _text(message: int, parts: list[TextPart | dict[str, Any]]) -> str:
    texts = []
    for place, part in enumerate(parts):
        kind, text = (part.type, part.text) if isinstance(part, TextPart) else (part.get("type"), part.get("text"))
        where = f"`messages[{message}].content[{place}]`"
        if kind != "text":
            raise NotSupportedError(f"{where}: content of type {str(kind)[:32]!r} is not supported yet; only text is")
        if not isinstance(text, str):
            raise InputError(f"{where} is of type 'text' and has no `text`, or one that is not a string")
        texts.append(text)
    return "".join(texts)


def _choice(body: ChatCompletionRequest, index: int, job: Job) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": job.text, "refusal": None},
        "logprobs": _logprobs(job, job.chunks_so_far, body.top_logprobs or 0) if body.logprobs else None,
        "finish_reason": finish_reason(job.completion.finish_reason),
    }


def _logprobs(job: Job, chunks: list[Chunk], count: int) -> dict[str, Any]:
    detokenizer = job.tokenizer.detokenizer
    content = []
    for chunk in chunks:
        top = zip(*(chunk.alternatives or ((), ())), strict=True)
        content.append(
            _logprob(detokenizer, chunk.token_id, chunk.logprob)
            | {"top_logprobs": [_logprob(detokenizer, *each) for each in list(top)[:count]]}
        )
    return {"content": content, "refusal": None}


def _logprob(detokenizer: Detokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": detokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(detokenizer.token_bytes(token_id)),
    }


async def _events(call: Exchange, body: ChatCompletionRequest, heading: Heading) -> AsyncGenerator[bytes, None]:
    jobs, has_begun, first = call.jobs, [False] * len(call.jobs), call.first_event
    num_left = len(jobs)
    async with aclosing(interleave(jobs)) as stream:
        async for place, chunks in stream:
            deltas = _deltas(body, jobs[place], place, chunks, is_first=not has_begun[place])
            has_begun[place] = True
            num_left -= chunks[-1].finish_reason is not None
            answers = [heading.of([delta]) | ({"usage": None} if body.wants_usage else {}) for delta in deltas]
            if body.says_nothing_of_usage and not num_left:
                answers[-1]["usage"] = usage(jobs, call.record.prompt_tokens)
            if answers:
                answers[0] |= first
                first = {}
                yield b"".join(map(event, answers))
    if body.wants_usage:
        yield event(heading.of([]) | {"usage": usage(jobs, call.record.prompt_tokens)})
    yield DONE


def _deltas(
    body: ChatCompletionRequest, job: Job, place: int, chunks: list[Chunk], is_first: bool
) -> list[dict[str, Any]]:
    """Who speaks, what is said, that it is over: whatever of it there is."""
    deltas = [_delta(place, {"role": "assistant", "content": "", "refusal": None})] if is_first else []
    text, reason = "".join([chunk.text for chunk in chunks]), finish_reason(chunks[-1].finish_reason)
    logs = _logprobs(job, chunks, body.top_logprobs or 0) if body.logprobs else None
    if text or logs is not None:
        deltas.append(_delta(place, {"content": text}, logs))
    if reason is not None:
        deltas.append(_delta(place, {}, None, reason))
    return deltas


def _delta(
    place: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
