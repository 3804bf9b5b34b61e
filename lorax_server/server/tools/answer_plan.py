"""The way to read an answer: its reasoning, its text and its calls, and the grammar that it must follow."""

import json
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

from lorax_server.config import ServerConfig
from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.tools.offer import ToolOffer
from lorax_server.structured_output.grammars import prepare_schema
from lorax_server.text.tokenizer import TextTokenizer
from lorax_server.text.tools import thoughts
from lorax_server.text.tools.formats import FORMATS, choose_format, renders_tools
from lorax_server.text.tools.grammar import (
    FunctionSchema,
    Marks,
    Thought,
    ToolFormat,
    check_size,
    write_optional,
    write_required,
)
from lorax_server.text.tools.parser import ParsedEvent, TextPiece, ThoughtPiece, ToolParser, ToolSet
from lorax_server.text.tools.thoughts import Part, ThoughtSplitter
from lorax_server.types import Structure

ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class AnswerPlan:
    """Everything that is known of the answers to a request before they come."""

    form: ToolFormat | None  # of calls, if there may be any
    offer: ToolOffer | None
    separates: bool  # reasoning is told apart from the answer
    knows_thoughts: bool  # the template has reasoning in it

    @property
    def markers(self) -> tuple[str, ...]:
        """Marks of calls and of reasoning, which have to be part of the text, also if they are special tokens."""
        marks = self.form.markers if self.form is not None else ()
        return (*marks, thoughts.OPENER, thoughts.CLOSER)

    def write_structure(self, tokenizer: TextTokenizer, prompt: str, text: Structure | None) -> Structure | None:
        """Return the grammar of answers to a prompt. `text` is the grammar of an answer without calls.

        This analyzes schemas: call it on a thread, once the request is admitted.
        """
        form, offer = self.form, self.offer
        if form is None or offer is None:
            return text
        form.prepare(offer.functions)
        if not (offer.needs_grammar or text is not None):
            return text
        if text is not None and not offer.is_required and "{" in form.starts:
            raise NotSupportedError(
                "`response_format` is not supported together with `tools` for a model that writes calls as plain JSON: "
                "leave one out, or let `tool_choice` be required"
            )
        check_size(sum(len(json.dumps(function.parameters)) for function in offer.functions))  # before they are read
        functions = [_prepare_function(function) for function in offer.functions]
        parts = form, functions, offer.is_parallel, Marks(tokenizer.token_to_id), self._thought(prompt)
        if offer.is_required or text is not None:
            return Structure(write_required(*parts, "" if offer.is_required or text is None else text.grammar))
        return Structure(write_optional(*parts))

    def _thought(self, prompt: str) -> Thought | None:
        if not self.knows_thoughts or prompt.rstrip().endswith(thoughts.CLOSER):
            return None
        return Thought(thoughts.OPENER, thoughts.CLOSER, has_open_thought(prompt))

    def make_reader(self, prompt: str, is_enforced: bool) -> "AnswerReader":
        has_form = is_enforced and self.form is None  # from the first character on: it leaves no room for reasoning
        has_thoughts = self.knows_thoughts and not has_form
        splitter = ThoughtSplitter(has_open_thought(prompt)) if has_thoughts else None
        parser = None
        if self.form is not None and self.offer is not None:
            schemas = {function.name: function.parameters for function in self.offer.functions}
            parser = ToolParser(self.form, ToolSet(schemas, is_enforced))
        return AnswerReader(splitter, parser, self.separates)

    def make_call_id(self) -> str:
        """Make an id for a call; Mistral's templates want nine letters and digits."""
        is_short = self.form is not None and self.form.has_short_ids
        ending = "".join(secrets.choice(ID_CHARACTERS) for _ in range(9 if is_short else 24))
        return ending if is_short else f"call_{ending}"


def _prepare_function(function: FunctionSchema) -> FunctionSchema:
    try:
        return function._replace(parameters=prepare_schema(function.parameters))
    except InputError as error:
        raise InputError(f"`tools`: `parameters` of {function.name!r}: {error}") from error


def has_open_thought(prompt: str) -> bool:
    """Tell whether a prompt ends within the model's reasoning."""
    return prompt.rstrip().endswith(thoughts.OPENER)


def plan_answer(
    config: ServerConfig, adapter: str | None, template: str, offer: ToolOffer | None, separates: bool
) -> AnswerPlan | None:
    """Decide how answers are read; None if they are nothing but text."""
    if offer is None:
        return AnswerPlan(None, None, True, True) if separates else None
    return AnswerPlan(_find_format(config, adapter, template), offer, separates, separates or "<think>" in template)


def _find_format(config: ServerConfig, adapter: str | None, template: str) -> ToolFormat:
    """Find the format that the operator has set for an adapter or for all, or that the template asks for."""
    name = find_setting(config.tool_parsers, adapter)
    if name is None:
        if not renders_tools(template):
            raise NotSupportedError(
                "`tools`: the model's chat template does not show tools to the model; name an adapter whose template "
                "does, or have the server started with --tool-parser if the model knows its tools without"
            )
        name = choose_format(template)
        if not name:
            raise NotSupportedError(
                "`tools`: the model's template writes calls in a form of XML that is not supported; Qwen3-Coder's is"
            )
    return FORMATS[name]()


def find_setting(settings: Sequence[str], adapter: str | None) -> str | None:
    """Find an adapter's own setting, `adapter=value`, else the one for all, `value`."""
    found = None
    for setting in settings:
        name, is_own, value = setting.rpartition("=")
        if is_own and name == adapter:
            return value
        if not is_own:
            found = value
    return found


class AnswerReader:
    """Reads one answer as it grows."""

    def __init__(self, splitter: ThoughtSplitter | None, parser: ToolParser | None, separates: bool) -> None:
        self._splitter = splitter
        self._parser = parser
        self._separates = separates

    @property
    def is_thinking(self) -> bool:
        return self._splitter is not None and self._splitter.is_thought

    def feed(self, text: str) -> list[ParsedEvent]:
        if self._splitter is None:
            return self._read(text)
        return [event for part in self._splitter.feed(text) for event in self._handle(part)]

    def finish(self) -> list[ParsedEvent]:
        parts = [] if self._splitter is None else self._splitter.finish()
        events = [event for part in parts for event in self._handle(part)]
        return events + ([] if self._parser is None else self._parser.finish())

    def _handle(self, part: Part) -> Sequence[ParsedEvent]:
        if not part.is_thought:
            return self._read(part.text if self._separates else part.raw)
        if not self._separates:
            return [TextPiece(part.raw)]
        return [ThoughtPiece(part.text)] if part.text else []

    def _read(self, text: str) -> list[ParsedEvent]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [TextPiece(text)] if text else []
