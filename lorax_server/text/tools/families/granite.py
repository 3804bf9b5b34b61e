"""Granite 3 and Phi-4: a list of calls after `<|tool_call|>`; Granite's first models have a single one."""

from lorax_server.text.tools.grammar import CallRules, ToolFormat, write_list
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER, CLOSER = "<|tool_call|>", "<|/tool_call|>"
OTHER_OPENERS = ("<tool_call>", "<function_call>")


class GraniteFormat(ToolFormat):
    openers = (OPENER, *OTHER_OPENERS)
    markers = (OPENER, CLOSER, *OTHER_OPENERS)

    def make_section(self, tools: ToolSet) -> Section:
        return JsonSection(tools, CLOSER)

    def write_rules(self, rules: CallRules) -> list[str]:
        return ["calls: list\n", *write_list(rules, "arguments")]
