"""Lists the tool call formats by name, and detects the format that a chat template uses."""

import re
from collections.abc import Callable, Mapping

from lorax_server.text.tools.grammar import ToolFormat
from lorax_server.text.tools.json_formats import (
    GraniteFormat,
    HermesFormat,
    LlamaJsonFormat,
    MistralFormat,
    PlainJsonFormat,
)
from lorax_server.text.tools.pythonic import PythonicFormat
from lorax_server.text.tools.qwen3_coder import Qwen3CoderFormat

FORMAT_CLASSES: Mapping[str, Callable[[], ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": LlamaJsonFormat,
    "pythonic": PythonicFormat,
    "mistral": MistralFormat,
    "granite": GraniteFormat,
    "qwen3_coder": Qwen3CoderFormat,
    "json": PlainJsonFormat,
}
# The first pattern that a template contains decides. An empty name stands for XML formats that are not supported.
TEMPLATE_MARKERS: tuple[tuple[str, str], ...] = (
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<parameter=", "qwen3_coder"),
    (r"<function=|<arg_key>|<invoke name=", ""),
    (r"<\|tool_call\|>|<function_call>", "granite"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_start\|>|\[func_name1\(|\[function_name\(", "pythonic"),
    (r"<\|python_tag\|>|<\|start_header_id\|>", "llama3_json"),
)


def renders_tools(template: str) -> bool:
    """Return True if a chat template renders tools."""
    return re.search(r"\btools\b", template) is not None


def detect_format(template: str) -> str:
    """Return the name of the tool call format that a template uses, or an empty string if it is not supported."""
    return next((name for marker, name in TEMPLATE_MARKERS if re.search(marker, template)), "json")
