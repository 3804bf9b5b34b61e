"""Llama 3.1 to 3.3: an answer that is a JSON object with `name` and `parameters`, or several with `;` between them."""

from collections.abc import Sequence

from lorax_server.text.tools.grammar import OBJECT_START, CallGrammar, Marks, write_objects
from lorax_server.text.tools.json_section import JsonSection
from lorax_server.text.tools.parser import Section, ToolSet

OPENER = "<|python_tag|>"


class LlamaJsonFormat:
    openers = (OPENER,)
    starts = "{"
    start_pattern = OBJECT_START
    markers = (OPENER,)

    def make_section(self, opener: str, tools: ToolSet) -> Section:
        return JsonSection(tools, separator=";")

    def write_rules(self, calls: Sequence[CallGrammar], is_parallel: bool, marks: Marks) -> str:
        more = ' ("; " object)*' if is_parallel else ""
        tag = f"{marks.token(OPENER)}? " if marks.has_token(OPENER) else ""
        return f"calls: {tag}object{more}\n{write_objects(calls, 'parameters')}"
