"""The OpenAI route `/v1/chat/completions`."""

import asyncio
import re
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from lorax_server.errors import InputError, MissingVariableError, NotSupportedError
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.checks import check
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.request_context import RequestContext, RequestOptions, constrain
from lorax_server.server.routes import openai
from lorax_server.server.routes.lorax import read_structure
from lorax_server.server.schemas.openai import ChatCompletionRequest, ChatCompletionResponse, Message, TextPart
from lorax_server.server.schemas.unsupported_fields import CHAT
from lorax_server.server.service import Service
from lorax_server.server.tools.messages import MessageWriter, normalize_tool_calls
from lorax_server.server.tools.output_format import OutputFormat, choose_output_format
from lorax_server.server.tools.tool_definitions import ToolDefinitions, parse_tool_definitions
from lorax_server.text.detokenizer import Detokenizer
from lorax_server.text.tokenizer import TextTokenizer

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.OPENAPI_TAG])

    @router.post(
        "/v1/chat/completions",
        operation_id="chat",
        response_model=ChatCompletionResponse,
        responses=openai.ERROR_RESPONSES,
    )
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        """Complete a chat. With `stream`, the events are `chat.completion.chunk` objects followed by `[DONE]`."""
        return await RequestContext(service, request).run(lambda context: _chat(context, body))

    return router


class PreparedChat(NamedTuple):
    """A checked chat request with its prompt and generations, ready to run."""

    generations: list[RemoteGeneration]
    prompt: str
    output_format: OutputFormat | None  # None if completions are plain text


class _RenderedChat(NamedTuple):
    """A prompt, and the tokenizer and the output format for its completions."""

    prompt: str
    tokenizer: TextTokenizer
    output_format: OutputFormat | None


async def _chat(context: RequestContext, body: ChatCompletionRequest) -> Response:
    openai.record_model(context, body)
    choices = []
    for generations, prompt, output_format in await prepare_chats(context, body):
        is_enforced = generations[0].request.structure is not None
        for generation in generations:
            writer = None if output_format is None else MessageWriter(output_format, prompt, is_enforced)
            choices.append(_ChatCompletion(body, generation, writer))
    if body.stream:
        envelope = openai.make_envelope(context, body, "chatcmpl", "chat.completion.chunk")
        return await openai.stream_choices(context, body, envelope, choices)
    await finish_all(context.generations)
    envelope = openai.make_envelope(context, body, "chatcmpl", "chat.completion")
    return await context.build_response(lambda: _write_response(context, choices, envelope))


async def prepare_chat(context: RequestContext, body: ChatCompletionRequest) -> PreparedChat:
    """Return the prepared chat for a request without `models`."""
    (prepared,) = await prepare_chats(context, body)
    return prepared


async def prepare_chats(context: RequestContext, body: ChatCompletionRequest) -> list[PreparedChat]:
    """Check a chat request, render its prompt and create its generations. Return one prepared chat for each model."""
    context.check_unknown_fields(CHAT, body)
    bodies = openai.split_models(body, context.service.model_names)
    options = _to_options(context.service, body, len(bodies))
    await context.admit(len(options.seeds) * len(bodies), bool(body.stream), len(bodies))
    structure, tools = await read_structure(body), None
    if body.tools or body.tool_choice:
        is_parallel = body.parallel_tool_calls is not False
        tools = await asyncio.to_thread(parse_tool_definitions, body.tools, body.tool_choice, is_parallel)
    models, rendered = await openai.resolve_all(context, bodies), dict[TextTokenizer, _RenderedChat]()
    chats = []
    for each, model in zip(bodies, models, strict=True):
        chat = rendered.get(model.tokenizer)
        if chat is None or tools is not None:  # the output format for tools depends on the adapter
            chat = await _render_chat(context, each, model.tokenizer, tools)
            rendered[model.tokenizer] = chat
        output_format, own_structure = chat.output_format, structure
        if output_format is not None and tools is not None:
            build = output_format.build_grammar
            own_structure = await asyncio.to_thread(build, model.tokenizer, chat.prompt, structure)
        may_be_text = tools is not None and not tools.is_required
        may_reason = tools is not None and output_format is not None and output_format.has_reasoning
        has_text = may_be_text or may_reason  # text has no default limit
        constrained = constrain(context.service, options, own_structure)
        own_options = replace(options, structure=own_structure) if has_text else constrained
        generations = await context.prepare(model._replace(tokenizer=chat.tokenizer), chat.prompt, own_options)
        chats.append(PreparedChat(generations, chat.prompt, output_format))
    return chats


async def _render_chat(
    context: RequestContext, body: ChatCompletionRequest, tokenizer: TextTokenizer, tools: ToolDefinitions | None
) -> _RenderedChat:
    service = context.service
    template = service.tokenizers.find_template(tokenizer, tools is not None) or ""
    requested = body.separate_reasoning
    separate_reasoning = service.config.separate_reasoning if requested is None else requested
    output_format = choose_output_format(
        service.config, openai.find_label(context, body), template, tools, separate_reasoning
    )
    prompt = await _render(context, tokenizer, template, body, output_format)
    if output_format is not None:
        tokenizer = tokenizer.with_visible_tokens(output_format.markers)
    return _RenderedChat(prompt, tokenizer, output_format)


def _to_options(service: Service, body: ChatCompletionRequest, num_models: int) -> RequestOptions:
    check(bool(body.messages), "`messages` must not be empty")
    check(not body.top_logprobs or bool(body.logprobs), "`top_logprobs` requires `logprobs` to be true")
    check((body.top_logprobs or 0) >= 0, "`top_logprobs` must not be negative")
    openai.check_stop_conditions(service, body)
    count = 1 if body.n is None else body.n
    openai.check_num_choices(service, count * num_models)
    max_new_tokens, total = body.max_completion_tokens, service.max_total_tokens
    if max_new_tokens is None:
        max_new_tokens = body.max_tokens
        check(max_new_tokens is None or max_new_tokens >= 1, "`max_tokens` must be at least 1")
    else:
        check(max_new_tokens >= 1, "`max_completion_tokens` must be at least 1")
        is_possible = body.max_tokens is None or 1 <= body.max_tokens < total
        check(is_possible, f"`max_tokens` must be between 1 and {total - 1}, even if `max_completion_tokens` is set")
    default, top = service.defaults.max_new_tokens, body.top_logprobs or 0
    options = openai.to_options(service, body, count, top, max_new_tokens, default, bool(body.logprobs))
    # The chat template adds the special tokens.
    return replace(options, add_special_tokens=False, logprobs=bool(body.logprobs))


async def _render(
    context: RequestContext,
    tokenizer: TextTokenizer,
    template: str,
    body: ChatCompletionRequest,
    output_format: OutputFormat | None,
) -> str:
    if body.guideline is None and re.search(r"\bguideline\b", template):
        raise MissingVariableError("Missing template vatiable: guideline")  # LoRAX's message has the same typo
    variables = dict(body.chat_template_kwargs or {})
    for name in RESERVED_VARIABLES:
        check(name not in variables, f"`chat_template_kwargs` must not contain `{name}`")
    if body.guideline is not None:
        variables["guideline"] = body.guideline
    variables["add_generation_prompt"] = body.add_generation_prompt is not False
    tools = None if output_format is None else output_format.tools
    if tools is not None:
        variables["tools"] = tools.rendered
    has_developer = "developer" in template
    messages = [_to_template_message(index, message, has_developer) for index, message in enumerate(body.messages)]
    if any(message.tool_calls is not None or message.role == "tool" for message in body.messages):
        messages = normalize_tool_calls(messages)
    if output_format is not None and output_format.describes_tools:
        messages = output_format.describe_tools(messages)
    return await context.service.tokenizers.render(tokenizer, messages, context.tenant, **variables)


def _to_template_message(index: int, message: Message, has_developer: bool) -> dict[str, Any]:
    """Return a message as chat template input. Null fields are dropped, and text parts are joined.

    The role `developer`, OpenAI's newer name for `system`, is kept only if the template supports it.
    """
    content = _join_text(index, message.content) if isinstance(message.content, list) else message.content
    content = content or ""  # not None, because templates concatenate the content with strings
    role = "system" if message.role == "developer" and not has_developer else message.role
    other_fields = {name: value for name, value in message if name not in ("role", "content") and value is not None}
    return {"role": role, "content": content, **other_fields}


def _join_text(message_index: int, content: list[TextPart | dict[str, Any]]) -> str:
    texts = []
    for index, item in enumerate(content):
        kind, text = (item.type, item.text) if isinstance(item, TextPart) else (item.get("type"), item.get("text"))
        where = f"`messages[{message_index}].content[{index}]`"
        if kind != "text":
            raise NotSupportedError(f"{where}: content of type {str(kind)[:32]!r} is not supported yet; use 'text'")
        if not isinstance(text, str):
            raise InputError(f"{where} has type 'text', so `text` must be a string")
        texts.append(text)
    return "".join(texts)


# --- Responses --------------------------------------------------------------------------------------------------------


class _ChatCompletion(NamedTuple):
    """A completion, and its writer if it may contain tool calls or reasoning."""

    body: ChatCompletionRequest
    generation: RemoteGeneration
    writer: MessageWriter | None

    def write(self, index: int) -> dict[str, Any]:
        """Return the complete response choice."""
        message: dict[str, Any] = {"role": "assistant", "content": self.generation.text, "refusal": None}
        reason = openai.finish_reason(self.generation.completion.finish_reason)
        if self.writer is not None:
            message = self.writer.write_message(self.generation.text)
            reason = self.writer.finish_reason(reason)
        logprobs = write_logprobs(self.body, self.generation, self.generation.events)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def write_deltas(self, index: int, token_events: list[TokenEvent], is_first: bool) -> list[dict[str, Any]]:
        """Return stream choices: first the role, then new content, and the finish reason at the end."""
        deltas = [_make_choice(index, {"role": "assistant", "content": "", "refusal": None})] if is_first else []
        text = "".join([token_event.text for token_event in token_events])
        logprobs = write_logprobs(self.body, self.generation, token_events)
        reason = openai.finish_reason(token_events[-1].finish_reason)
        new_deltas = [{"content": text}] if text else []
        if self.writer is not None:
            new_deltas = self.writer.write_deltas(text, is_last=reason is not None)
            reason = self.writer.finish_reason(reason)
        if logprobs is not None and not new_deltas:
            new_deltas = [{"content": ""}]
        for new_delta in new_deltas:
            deltas.append(_make_choice(index, new_delta, logprobs))
            logprobs = None  # only the first delta contains log probabilities
        if reason is not None:
            deltas.append(_make_choice(index, {}, None, reason))
        return deltas


def _write_response(context: RequestContext, choices: list[_ChatCompletion], envelope: dict[str, Any]) -> Response:
    written, usage = [choice.write(index) for index, choice in enumerate(choices)], openai.count_usage(context)
    written = [openai.add_model(choices[0].body, choice, len(choices)) for choice in written]
    headers = context.response_headers(usage["completion_tokens"])
    return json_response(envelope | {"choices": written, "usage": usage}, 200, headers)


def _make_choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def write_logprobs(
    body: ChatCompletionRequest, generation: RemoteGeneration, token_events: list[TokenEvent]
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    detokenizer, content = generation.tokenizer.detokenizer, []
    for token_event in token_events:
        alternatives = list(zip(*(token_event.alternatives or ((), ())), strict=True))
        top = [_format_logprob(detokenizer, *alternative) for alternative in alternatives[: body.top_logprobs or 0]]
        content.append(_format_logprob(detokenizer, token_event.token_id, token_event.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _format_logprob(detokenizer: Detokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": detokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(detokenizer.token_bytes(token_id)),
    }
