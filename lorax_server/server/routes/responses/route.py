"""The `/v1/responses` handler: converts the request to a chat request, and its completion to a response."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.checks import check, reject_unsupported_value
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.error_responses import json_response
from lorax_server.server.http.sse import encode_named_event
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes import chat, openai
from lorax_server.server.routes.responses.output import Event, ResponseWriter
from lorax_server.server.schemas.openai import ChatCompletionRequest, CommonRequest
from lorax_server.server.schemas.responses import ResponseObject, ResponsesRequest
from lorax_server.server.schemas.unsupported_fields import RESPONSES
from lorax_server.server.service import Service
from lorax_server.types import FinishReason

TEXT_PART_TYPES = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
LOGPROBS_INCLUDE = "message.output_text.logprobs"
SUPPORTED_INCLUDES = (LOGPROBS_INCLUDE, "reasoning.encrypted_content")  # reasoning is returned unencrypted
RESPONSES_FIELD_NAMES = {"messages": "input", "response_format": "text.format"}  # field names by chat field name


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.OPENAPI_TAG])

    @router.post(
        "/v1/responses", operation_id="respond", response_model=ResponseObject, responses=openai.ERROR_RESPONSES
    )
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Create a response. With `stream`, send the events of OpenAI's Responses API. Responses are not stored."""
        return await RequestContext(service, request).run(lambda context: _respond(context, body))

    return router


async def _respond(context: RequestContext, body: ResponsesRequest) -> Response:
    openai.record_model(context, body)
    context.check_unknown_fields(RESPONSES, body)
    _reject_unsupported(body)
    chat_request = _to_chat(body)
    prepared = await chat.prepare_chat(context, chat_request)
    (generation,), output_format = prepared.generations, prepared.output_format
    is_enforced = generation.request.structure is not None
    parser = None if output_format is None else output_format.make_parser(prepared.prompt, is_enforced)
    writer = ResponseWriter(_make_envelope(context, body), output_format, parser)
    if body.stream:
        context.encode_failure = lambda error_response: _write_events(writer.fail(error_response.message))

        def write(_: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
            events = writer.start() if is_first else []
            if is_first:
                events[0]["response"] |= context.first_event_fields
            events += _feed(writer, chat_request, generation, token_events)
            if token_events[-1].finish_reason is not None:
                events += _finish(context, generation, writer)
            return _write_events(events)

        return await context.stream_events(write)
    await finish_all([generation])
    return await context.build_response(lambda: _write(context, chat_request, generation, writer))


# --- Request ----------------------------------------------------------------------------------------------------------


def _reject_unsupported(body: ResponsesRequest) -> None:
    if body.store:
        raise NotSupportedError("`store`: this server does not store responses; leave it out or set it to false")
    reject_unsupported_value(body.truncation not in (None, "disabled"), "`truncation`")
    for name, other in (("max_tokens", "max_output_tokens"), ("response_format", "text.format")):
        if getattr(body, name) is not None:
            raise NotSupportedError(f"`{name}` is not supported on this route; use `{other}` instead")
    check(body.n in (None, 1), "`n` must be 1 on this route")
    if body.text is not None:
        reject_unsupported_value(body.text.verbosity not in (None, "medium"), "`text.verbosity`")
    for each in body.include or ():
        reject_unsupported_value(each not in SUPPORTED_INCLUDES, f"`include` with {each[:64]!r}")


def _to_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return an equivalent chat request."""
    fields = body.model_dump(include=set(CommonRequest.model_fields), exclude_unset=True)
    fields |= {"messages": to_messages(body.instructions, body.input)}
    fields |= {"max_completion_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls}
    if body.tools:
        fields["tools"] = [to_tool(tool) for tool in body.tools]
    fields["tool_choice"] = body.tool_choice
    if LOGPROBS_INCLUDE in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None:
        fields["separate_reasoning"] = True
        variables |= {} if body.reasoning.effort is None else {"reasoning_effort": body.reasoning.effort}
    fields["chat_template_kwargs"] = variables
    form = body.text.format if body.text is not None else None
    if form is not None and form.get("type") != "text":
        fields["response_format"] = _to_response_format(form)
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise InputError(f"`{RESPONSES_FIELD_NAMES.get(name, name)}`: {first['msg']}") from None


def _to_response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


# --- Response ---------------------------------------------------------------------------------------------------------


def _make_envelope(context: RequestContext, body: ResponsesRequest) -> dict[str, Any]:
    """Return the response fields that are known before the completion."""
    model = body.adapter_id or body.model or context.service.model_names.primary_name
    text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(exclude_none=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
        "store": False,
        "temperature": body.temperature,
        "text": text,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _feed(
    writer: ResponseWriter,
    chat_request: ChatCompletionRequest,
    generation: RemoteGeneration,
    token_events: list[TokenEvent],
) -> list[Event]:
    if not chat_request.logprobs:
        return writer.feed("".join([token_event.text for token_event in token_events]), len(token_events))
    events: list[Event] = []
    for token_event in token_events:  # fed one by one, so that each text delta gets its log probabilities
        logprobs = chat.write_logprobs(chat_request, generation, [token_event])
        events += writer.feed(token_event.text, 1, logprobs["content"] if logprobs is not None else ())
    return events


def _finish(context: RequestContext, generation: RemoteGeneration, writer: ResponseWriter) -> list[Event]:
    is_truncated = generation.completion.finish_reason is FinishReason.LENGTH
    return writer.finish(is_truncated, _count_usage(context, writer))


def _count_usage(context: RequestContext, writer: ResponseWriter) -> dict[str, Any]:
    usage = openai.count_usage(context)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": writer.num_reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


def _write(
    context: RequestContext, chat_request: ChatCompletionRequest, generation: RemoteGeneration, writer: ResponseWriter
) -> Response:
    for token_event in generation.events:
        _feed(writer, chat_request, generation, [token_event])
    _finish(context, generation, writer)
    return json_response(writer.response, 200, context.response_headers(writer.response["usage"]["output_tokens"]))


def _write_events(events: list[Event]) -> bytes:
    return b"".join([encode_named_event(event["type"], event) for event in events])


# --- Input items to chat messages -------------------------------------------------------------------------------------


class MessageBuilder:
    """Builds chat messages from input items. Consecutive assistant items (reasoning, text, calls) form one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def add(self, location: str, item: Mapping[str, Any]) -> None:
        match item.get("type", "message"):
            case "message":
                self._add_message(location, item)
            case "function_call":
                self._add_call(location, item)
            case "function_call_output":
                self._add_result(location, item)
            case "reasoning":
                self._reasoning.append(join_parts(location, item.get("content") or item.get("summary") or ""))
            case "item_reference":
                raise NotSupportedError(
                    f"{location}: item references are not supported because items are not stored; send the items"
                )
            case kind:
                raise NotSupportedError(f"{location}: items of type {str(kind)[:32]!r} are not supported")

    def _add_message(self, location: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), join_parts(location, item.get("content") or "")
        if not isinstance(role, str):
            raise InputError(f"{location} must have a `role`")
        if role == "assistant":
            self.messages.append(self._with_reasoning({"role": role, "content": content}))
        else:
            self.messages.append({"role": role, "content": content})

    def _add_call(self, location: str, item: Mapping[str, Any]) -> None:
        name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
        for field, value in (("name", name), ("call_id", call_id), ("arguments", arguments)):
            check(isinstance(value, str), f"{location} must have a string `{field}`")
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self.messages.append(self._with_reasoning({"role": "assistant", "content": ""}))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _add_result(self, location: str, item: Mapping[str, Any]) -> None:
        call_id = item.get("call_id")
        check(isinstance(call_id, str), f"{location} must have a string `call_id`")
        content = join_parts(location, item.get("output") or "")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        reasoning, self._reasoning = "\n".join(self._reasoning), []
        return {**message, "reasoning_content": reasoning} if reasoning else message


def to_messages(instructions: str | None, input_items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages for `instructions` and `input`."""
    check(bool(input_items), "`input` must not be empty")
    builder = MessageBuilder()
    if instructions:
        builder.messages.append({"role": "system", "content": instructions})
    if isinstance(input_items, str):
        input_items = [{"role": "user", "content": input_items}]
    for index, item in enumerate(input_items):
        builder.add(f"`input[{index}]`", item)
    return builder.messages


def join_parts(location: str, content: Any) -> str:
    """Return content as one string. Content is a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{location}: content must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PART_TYPES:
            raise NotSupportedError(f"{location}: content of type {str(kind)[:32]!r} is not supported yet; use text")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise InputError(f"{location}: a part of type {kind!r} must have a `text` string")
        texts.append(text)
    return "".join(texts)


def to_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the chat format. Built-in tools, which only OpenAI's servers can run, are rejected later."""
    fields = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": tool.get("type", "function"), "function": fields}
