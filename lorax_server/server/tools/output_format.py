"""Constrains a chat request's output with a grammar, and parses it into text, reasoning and tool calls."""

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.tools.tool_definitions import ToolDefinitions
from lorax_server.server.tools.tool_prompt import add_tool_prompt
from lorax_server.structured_output.grammars import prepare_schema
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools.formats import FORMAT_CLASSES, detect_format, renders_tools
from lorax_server.text.tools.grammar import (
    FunctionSchema,
    MarkerWriter,
    ReasoningTags,
    ToolFormat,
    check_size,
    write_optional_call_grammar,
    write_required_call_grammar,
)
from lorax_server.text.tools.parser import ParsedEvent, ReasoningDelta, TextDelta, ToolOutputParser, ToolSet
from lorax_server.text.tools.reasoning_parser import THINK_END, THINK_START, CompletionPart, ReasoningParser
from lorax_server.types import Structure

PLAIN_JSON_FORMAT = "json"  # for models that were not trained on a format
ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class OutputFormat:
    """A request's tools, its tool call format, and its settings for reasoning."""

    tool_format: ToolFormat | None  # None if the request has no tools
    tools: ToolDefinitions | None
    separate_reasoning: bool  # return reasoning separately from the content
    has_reasoning: bool  # the model may write `<think>` blocks
    describes_tools: bool = False  # the template does not render tools, so they are written into the system message

    @property
    def markers(self) -> tuple[str, ...]:
        """Tool call and reasoning markers. The detokenizer must keep them even if they are special tokens."""
        markers = self.tool_format.markers if self.tool_format is not None else ()
        return (*markers, THINK_START, THINK_END)

    def describe_tools(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the tools in the system message, and with tool calls and results as text."""
        assert self.tool_format is not None
        assert self.tools is not None
        return add_tool_prompt(messages, self.tools.rendered, self.tool_format)

    def build_grammar(self, tokenizer: TextTokenizer, prompt: str, text_grammar: Structure | None) -> Structure | None:
        """Return the grammar for completions of `prompt`. `text_grammar` constrains completions without tool calls.

        Call this on a thread after the request is admitted, because analyzing schemas is expensive.
        """
        tool_format, tools = self.tool_format, self.tools
        if tool_format is None or tools is None:
            return text_grammar
        tool_format.prepare(tools.functions)
        if not (tools.needs_grammar or text_grammar is not None):
            return text_grammar
        if text_grammar is not None and not tools.is_required and "{" in tool_format.start_characters:
            raise NotSupportedError(
                "`response_format` is not supported together with `tools` for a model that writes tool calls as plain "
                "JSON; leave one of them out, or set `tool_choice` to required"
            )
        # Reject large schemas before they are analyzed.
        check_size(sum(len(json.dumps(function.parameters)) for function in tools.functions))
        functions = [_prepare_function(function) for function in tools.functions]
        grammar_args = (
            tool_format,
            functions,
            tools.is_parallel,
            MarkerWriter(tokenizer.token_to_id),
            self._find_reasoning_tags(prompt),
        )
        if tools.is_required or text_grammar is not None:
            return Structure(
                write_required_call_grammar(
                    *grammar_args, "" if tools.is_required or text_grammar is None else text_grammar.grammar
                )
            )
        return Structure(write_optional_call_grammar(*grammar_args))

    def _find_reasoning_tags(self, prompt: str) -> ReasoningTags | None:
        if not self.has_reasoning or prompt.rstrip().endswith(THINK_END):
            return None
        return ReasoningTags(THINK_START, THINK_END, is_inside_reasoning(prompt))

    def make_parser(self, prompt: str, is_enforced: bool) -> "OutputParser":
        # Without tools, a grammar constrains the output from the first character, so it contains no reasoning.
        excludes_reasoning = is_enforced and self.tool_format is None
        may_reason = self.has_reasoning and not excludes_reasoning
        splitter = ReasoningParser(is_inside_reasoning(prompt)) if may_reason else None
        parser = None
        if self.tool_format is not None and self.tools is not None:
            schemas = {function.name: function.parameters for function in self.tools.functions}
            parser = ToolOutputParser(self.tool_format, ToolSet(schemas, is_enforced))
        return OutputParser(splitter, parser, self.separate_reasoning)

    def make_call_id(self) -> str:
        """Return a new tool call ID. Mistral templates require exactly nine letters and digits."""
        is_short = self.tool_format is not None and self.tool_format.has_short_ids
        random_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(9 if is_short else 24))
        return random_id if is_short else f"call_{random_id}"


def _prepare_function(function: FunctionSchema) -> FunctionSchema:
    try:
        return function._replace(parameters=prepare_schema(function.parameters))
    except InputError as error:
        raise InputError(f"`tools`: `parameters` of {function.name!r}: {error}") from error


def is_inside_reasoning(prompt: str) -> bool:
    """Return True if the chat template already opened a reasoning block at the end of the prompt."""
    return prompt.rstrip().endswith(THINK_START)


def choose_output_format(
    config: ServerConfig, adapter: str | None, template: str, tools: ToolDefinitions | None, separate_reasoning: bool
) -> OutputFormat | None:
    """Return the output format, or None if completions are plain text."""
    if tools is None:
        return OutputFormat(None, None, True, True) if separate_reasoning else None
    parser, is_rendered = find_adapter_setting(config.tool_parsers, adapter), renders_tools(template)
    return OutputFormat(
        _find_tool_format(parser, template, is_rendered, tools.is_required),
        tools,
        separate_reasoning,
        separate_reasoning or "<think>" in template,
        describes_tools=config.describe_tools and parser is not None and not is_rendered,
    )


def _find_tool_format(name: str | None, template: str, is_rendered: bool, is_required: bool) -> ToolFormat:
    """Return the tool format that `--tool-parser` sets, or the format that the chat template indicates.

    If the template does not render tools, only required calls are supported, which a grammar enforces.
    """
    if name is None:
        if not (is_rendered or is_required):
            raise NotSupportedError(
                "`tools`: the model's chat template does not render tools; set `tool_choice` to required or to a "
                "function, use an adapter whose template renders tools, or start the server with --tool-parser"
            )
        name = detect_format(template) if is_rendered else PLAIN_JSON_FORMAT
        if not name:
            raise NotSupportedError(
                "`tools`: the chat template uses an XML tool call format that is not supported (only Qwen3-Coder's is)"
            )
    return FORMAT_CLASSES[name]()


def find_adapter_setting(settings: Sequence[str], adapter: str | None) -> str | None:
    """Return the value from `adapter=value` for this adapter, or the default value from an entry without `=`."""
    default = None
    for setting in settings:
        name, has_adapter, value = setting.rpartition("=")
        if has_adapter and name == adapter:
            return value
        if not has_adapter:
            default = value
    return default


class OutputParser:
    """Splits one completion into text, reasoning and tool calls while it is generated."""

    def __init__(
        self, splitter: ReasoningParser | None, parser: ToolOutputParser | None, separate_reasoning: bool
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._separate_reasoning = separate_reasoning

    @property
    def is_reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.is_reasoning

    def feed(self, text: str) -> list[ParsedEvent]:
        if self._splitter is None:
            return self._parse_text(text)
        return [event for part in self._splitter.feed(text) for event in self._parse_part(part)]

    def finish(self) -> list[ParsedEvent]:
        parts = [] if self._splitter is None else self._splitter.finish()
        events = [event for part in parts for event in self._parse_part(part)]
        return events + ([] if self._parser is None else self._parser.finish())

    def _parse_part(self, part: CompletionPart) -> Sequence[ParsedEvent]:
        if not part.is_reasoning:
            return self._parse_text(part.text if self._separate_reasoning else part.raw_text)
        if not self._separate_reasoning:
            return [TextDelta(part.raw_text)]
        return [ReasoningDelta(part.text)] if part.text else []

    def _parse_text(self, text: str) -> list[ParsedEvent]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [TextDelta(text)] if text else []
