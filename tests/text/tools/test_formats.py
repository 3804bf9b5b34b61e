"""Tests for detecting the tool call format from a chat template."""

import pytest

from lorax_server.text.tools.formats import FORMAT_CLASSES, detect_format, renders_tools

TEMPLATES = {
    "hermes": "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> return "
    '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>{% endif %}',
    "llama3_json": "{{- '<|start_header_id|>system<|end_header_id|>' }}{% if tools is not none %}"
    '{"name": function name, "parameters": dictionary of argument name and its value}{% endif %}',
    "pythonic": "{% if tools %}[func_name1(params_name1=params_value1), f2(a)]{% endif %}<|start_header_id|>",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' }}",
    "granite": "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools }}{% endif %}<|tool_call|>",
    "qwen3_coder": "{% if tools %}{{ '<tools>' }}{% endif %}{{ '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}"
    "{{ '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{{ '</function>\\n</tool_call>' }}",
    "json": "{% if tools %}Answer with JSON. Tools: {{ tools }}{% endif %}",
}


def test_every_format_has_a_template() -> None:
    assert TEMPLATES.keys() == FORMAT_CLASSES.keys()


@pytest.mark.parametrize("tool_format", TEMPLATES)
def test_format_is_detected_from_template(tool_format: str) -> None:
    assert renders_tools(TEMPLATES[tool_format])
    assert detect_format(TEMPLATES[tool_format]) == tool_format


def test_templates_without_supported_tools_have_no_format() -> None:
    assert not renders_tools("{% for message in messages %}{{ message.content }}{% endfor %} toolset")
    for calls in ("<function=name>{...}</function>", "<tool_call>name\n<arg_key>", '<invoke name="'):
        assert detect_format("{% if tools %}" + calls + "{% endif %}") == ""
