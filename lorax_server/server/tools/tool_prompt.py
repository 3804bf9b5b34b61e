"""Writes tools and tool calls as text, for chat templates that do not render them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lorax_server.text.tools.grammar import Call, ToolFormat

TOOL_PROMPT = """\
You can call these functions. Each line describes one function as JSON:
<tools>
{definitions}
</tools>

To call a function, respond in this format:
{example}"""
EXAMPLE_CALL = Call("FUNCTION_NAME", {"ARGUMENT_NAME": "VALUE"})


def add_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Return the messages with the tool definitions at the end of the system message.

    Tool calls become text in the tool format, and tool results become user messages.
    """
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = tool_format.write_calls([EXAMPLE_CALL])
    prompt = TOOL_PROMPT.format(definitions=definitions, example=example)
    converted = _convert_calls(messages, tool_format)
    if not converted or converted[0]["role"] != "system":
        return [{"role": "system", "content": prompt}, *converted]
    first, *others = converted
    return [{**first, "content": f"{first['content']}\n\n{prompt}".lstrip()}, *others]


def _convert_calls(messages: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    after_result = False  # the last message is a tool result
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"Result of {message.get('name', 'the function')}: {content}"
            is_result = True
        else:
            is_result = False
            if calls := message.get("tool_calls"):
                text = tool_format.write_calls([_read_call(call["function"]) for call in calls])
                content = f"{content}\n{text}" if content else text
        if after_result and role == "user":  # many templates reject consecutive user messages
            converted[-1]["content"] += f"\n{content}"
            continue
        others = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
        converted.append({**others, "role": role, "content": content})
        after_result = is_result
    return converted


def _read_call(function: Mapping[str, Any]) -> Call:
    arguments = function["arguments"]
    return Call(function["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments})
