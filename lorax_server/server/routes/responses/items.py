"""The items of a conversation become messages of a chat."""

from collections.abc import Mapping
from typing import Any

from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.checks import check

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


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
