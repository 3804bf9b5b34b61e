"""The formats by name, and the one that a chat template asks for."""

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

FORMATS: Mapping[str, Callable[[], ToolFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": LlamaJsonFormat,
    "pythonic": PythonicFormat,
    "mistral": MistralFormat,
    "granite": GraniteFormat,
    "qwen3_coder": Qwen3CoderFormat,
    "json": PlainJsonFormat,
}
# The first that a template has decides. For other forms of XML it decides for none: they are not read.
SIGNS: tuple[tuple[str, str], ...] = (
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<parameter=", "qwen3_coder"),
    (r"<function=|<arg_key>|<invoke name=", ""),
    (r"<\|tool_call\|>|<function_call>", "granite"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_start\|>|\[func_name1\(|\[function_name\(", "pythonic"),
    (r"<\|python_tag\|>|<\|start_header_id\|>", "llama3_json"),
)


def renders_tools(template: str) -> bool:
    """Tell whether a chat template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


def choose_format(template: str) -> str:
    """Name the format that a template's model writes calls in; empty if it is none that can be read."""
    return next((name for sign, name in SIGNS if re.search(sign, template)), "json")
