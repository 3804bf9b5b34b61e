"""The route: the items of a request become a chat, and its answer a response."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.generation.generation import TokenEvent
from lorax_server.server.checks import check, not_yet
from lorax_server.server.generations import RemoteGeneration, finish_all
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.sse import named_event
from lorax_server.server.request_context import RequestContext
from lorax_server.server.routes import chat, openai
from lorax_server.server.routes.responses.output import Event, ResponseWriter
from lorax_server.server.schemas.openai import ChatCompletionRequest, CommonRequest
from lorax_server.server.schemas.responses import ResponseObject, ResponsesRequest
from lorax_server.server.schemas.unsupported_fields import RESPONSES, reject_unsupported
from lorax_server.server.service import Service
from lorax_server.types import FinishReason

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # reasoning comes as it is, so that there is nothing to encrypt
NAMES = {"messages": "input", "response_format": "text.format"}  # of a chat's fields, here


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=[openai.TAG])

    @router.post("/v1/responses", operation_id="respond", response_model=ResponseObject, responses=openai.ERRORS)
    async def respond(http: Request, body: ResponsesRequest) -> Response:
        """Answer items. With `stream` the events are those of OpenAI's responses. Nothing is stored."""
        return await RequestContext(service, http).answer(lambda context: _respond(context, body))

    return router


async def _respond(context: RequestContext, body: ResponsesRequest) -> Response:
    choice = openai.choose_model(context, body)
    _refuse_unsupported(body)
    asked = _to_chat(body)
    prepared = await chat.prepare(context, asked, choice)
    (generation,), plan = prepared.generations, prepared.plan
    reader = plan.make_reader(prepared.prompt, generation.request.structure is not None) if plan else None
    writer = ResponseWriter(_make_frame(context, body), plan, reader)
    if body.stream:
        context.write_failure = lambda problem: _write_events(writer.fail(problem.message))

        def write(_: int, token_events: list[TokenEvent], is_first: bool) -> bytes:
            events = writer.begin() if is_first else []
            if is_first:
                events[0]["response"] |= context.first_event
            events += _feed(writer, asked, generation, token_events)
            if token_events[-1].finish_reason is not None:
                events += _end(context, generation, writer)
            return _write_events(events)

        return await context.stream(write)
    await finish_all([generation])
    return await context.write(lambda: _write(context, asked, generation, writer))


# --- The request ------------------------------------------------------------------------------------------------------


def _refuse_unsupported(body: ResponsesRequest) -> None:
    reject_unsupported(RESPONSES, body.model_extra, vars(body))
    if body.store:
        raise NotSupportedError("`store`: this server keeps no responses; leave it out, or set it to false")
    not_yet(body.truncation not in (None, "disabled"), "`truncation`")
    for name, other in (("max_tokens", "max_output_tokens"), ("response_format", "text.format")):
        if getattr(body, name) is not None:
            raise NotSupportedError(f"`{name}` is not known here; use `{other}` instead")
    check(body.n in (None, 1), "`n`: a response is one answer")
    if body.text is not None:
        not_yet(body.text.verbosity not in (None, "medium"), "`text.verbosity`")
    for each in body.include or ():
        not_yet(each not in INCLUDED, f"`include` of {each[:64]!r}")


def _to_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """Write the same request as a chat."""
    fields = body.model_dump(include=set(CommonRequest.model_fields), exclude_unset=True)
    fields |= {"messages": to_messages(body.instructions, body.input)}
    fields |= {"max_completion_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls}
    if body.tools:
        fields["tools"] = [to_tool(index, tool) for index, tool in enumerate(body.tools)]
    fields["tool_choice"] = body.tool_choice
    if LOGPROBS in (body.include or ()):
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
        raise InputError(f"`{NAMES.get(name, name)}`: {first['msg']}") from None


def _to_response_format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


# --- The answer -------------------------------------------------------------------------------------------------------


def _make_frame(context: RequestContext, body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the response that do not change."""
    model = body.adapter_id or body.model or context.service.model_names.primary
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
    writer: ResponseWriter, asked: ChatCompletionRequest, generation: RemoteGeneration, token_events: list[TokenEvent]
) -> list[Event]:
    if not asked.logprobs:
        return writer.feed("".join([token_event.text for token_event in token_events]), len(token_events))
    events: list[Event] = []
    for token_event in token_events:  # one by one: those of a message's text go with it
        logprobs = chat.write_logprobs(asked, generation, [token_event])
        events += writer.feed(token_event.text, 1, logprobs["content"] if logprobs is not None else ())
    return events


def _end(context: RequestContext, generation: RemoteGeneration, writer: ResponseWriter) -> list[Event]:
    is_cut = generation.completion.finish_reason is FinishReason.LENGTH
    return writer.end(is_cut, _count_usage(context, writer))


def _count_usage(context: RequestContext, writer: ResponseWriter) -> dict[str, Any]:
    usage = openai.count_usage(context)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": writer.num_thought_tokens},
        "total_tokens": usage["total_tokens"],
    }


def _write(
    context: RequestContext, asked: ChatCompletionRequest, generation: RemoteGeneration, writer: ResponseWriter
) -> Response:
    for token_event in generation.events:
        _feed(writer, asked, generation, [token_event])
    _end(context, generation, writer)
    return json_response(writer.response, 200, context.headers(writer.response["usage"]["output_tokens"]))


def _write_events(events: list[Event]) -> bytes:
    return b"".join([named_event(event["type"], event) for event in events])


# --- Items become messages of a chat ----------------------------------------------------------------------------------


class MessageList:
    """Puts messages together: an assistant's reasoning, text and calls are several items, and one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        match item.get("type", "message"):
            case "message":
                self._add_message(where, item)
            case "function_call":
                self._add_call(where, item)
            case "function_call_output":
                self._add_result(where, item)
            case "reasoning":
                self._reasoning.append(join_parts(where, item.get("content") or item.get("summary") or ""))
            case "item_reference":
                raise NotSupportedError(f"{where}: there are no items to refer to, nothing is stored; send them again")
            case kind:
                raise NotSupportedError(f"{where}: items of type {str(kind)[:32]!r} are not supported")

    def _add_message(self, where: str, item: Mapping[str, Any]) -> None:
        role, content = item.get("role"), join_parts(where, item.get("content") or "")
        if not isinstance(role, str):
            raise InputError(f"{where} has no `role`")
        if role == "assistant":
            self.messages.append(self._with_reasoning({"role": role, "content": content}))
        else:
            self.messages.append({"role": role, "content": content})

    def _add_call(self, where: str, item: Mapping[str, Any]) -> None:
        name, call_id, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
        for word, value in (("name", name), ("call_id", call_id), ("arguments", arguments)):
            check(isinstance(value, str), f"{where} has no `{word}`, or one that is not a string")
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self.messages.append(self._with_reasoning({"role": "assistant", "content": ""}))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _add_result(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = item.get("call_id")
        check(isinstance(call_id, str), f"{where} has no `call_id`, or one that is not a string")
        content = join_parts(where, item.get("output") or "")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        reasoning, self._reasoning = "\n".join(self._reasoning), []
        return {**message, "reasoning_content": reasoning} if reasoning else message


def to_messages(instructions: str | None, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write what a request says as messages."""
    found = MessageList()
    if instructions:
        found.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        check(bool(given), "`input` must not be empty")
        found.messages.append({"role": "user", "content": given})
        return found.messages
    check(bool(given), "`input` must not be empty")
    for index, item in enumerate(given):
        found.add(f"`input[{index}]`", item)
    return found.messages


def join_parts(where: str, content: Any) -> str:
    """Join the text of content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where}: content is a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise NotSupportedError(f"{where}: content of type {str(kind)[:32]!r} is not supported yet; only text is")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise InputError(f"{where}: a part of type {kind!r} has no text")
        texts.append(text)
    return "".join(texts)


def to_tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Write a function as chats do. Tools that a server would run itself are refused."""
    kind = tool.get("type", "function")
    if kind != "function":
        raise NotSupportedError(
            f"`tools[{index}]`: tools of type {str(kind)[:32]!r} are not supported; only functions are, which you run"
        )
    fields = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": fields}
