"""Granite 3 and Phi-4: a list of calls after `<|tool_call|>`; Granite's first models have a single one."""

from collections.abc import Sequence

from lorax_server.text.tools.grammar import CallGrammar, Marks, write_list
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER, CLOSER = "<|tool_call|>", "<|/tool_call|>"
OTHER_OPENERS = ("<tool_call>", "<function_call>")


class GraniteFormat:
    openers = (OPENER, *OTHER_OPENERS)
    starts = ""
    start_pattern = ""
    markers = (OPENER, CLOSER, *OTHER_OPENERS)

    def make_section(self, opener: str, tools: ToolSet) -> Section:
        return JsonSection(tools, CLOSER)

    def write_rules(self, calls: Sequence[CallGrammar], is_parallel: bool, marks: Marks) -> str:
        return f"calls: list\n{write_list(calls, 'arguments', is_parallel)}"
