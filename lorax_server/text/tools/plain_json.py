"""Any other model: an answer that is a JSON object with `name` and `arguments`, or a list of them."""

from collections.abc import Sequence

from lorax_server.text.tools.grammar import OBJECT_START, CallGrammar, Marks, write_list
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet


class PlainJsonFormat:
    openers: tuple[str, ...] = ()
    starts = "{["
    start_pattern = OBJECT_START
    markers: tuple[str, ...] = ()

    def make_section(self, opener: str, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, calls: Sequence[CallGrammar], is_parallel: bool, marks: Marks) -> str:
        choice = "object | list" if is_parallel else "object"
        return f"calls: {choice}\n{write_list(calls, 'arguments', is_parallel)}"
