"""A sandbox task that renders chat templates, which are untrusted code."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from lorax_server.sandbox.task import TaskError

MAX_COMPILED_TEMPLATES = 32
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names of the same field, most common first


# --- Template functions, as in transformers ----------------------------------------------------------------


class GenerationTag(Extension):
    """The Jinja tag `{% generation %}`, which marks the assistant's text for training. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 requires this form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Macro) -> str:
        return str(caller())


class PlainNamespace(Namespace):
    """A namespace that rejects names with leading underscores."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class DictMaker:
    """`dict(...)` and `dict.fromkeys(...)` without access to the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@cache
def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _make_namespace,
        "dict": DictMaker(),
    }
    return environment


def _make_namespace(*args: Any, **kwargs: Any) -> Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _check_name(name)
    return PlainNamespace(attributes)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace names must not start with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the HTML escapes of Jinja's `tojson` filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- Rendering --------------------------------------------------------------------------------------------------------


def render(source: str, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any], max_characters: int) -> bytes:
    """Return the prompt as UTF-8. Raise `TaskError` if the template is invalid or rejects the messages."""
    try:
        json.dumps([messages, variables], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TaskError("the messages contain lone surrogates, which are not valid text") from None
    values = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    values["messages"] = [_with_reasoning(message) for message in messages]
    texts, count = [], 0
    try:
        for text in _compile(source).generate(values):
            texts.append(text)
            count += len(text)
            if count > max_characters:
                raise TaskError(f"the template writes more than {max_characters} characters")
        return "".join(texts).encode()
    except (MemoryError, TaskError):
        raise
    except RecursionError:
        raise TaskError("the template is nested too deeply, or recurses without end") from None
    except UnicodeEncodeError:
        raise TaskError("the template writes lone surrogates, which are not valid text") from None
    except Exception as error:  # a template may raise any exception
        raise TaskError(_describe(error)) from None


@lru_cache(MAX_COMPILED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    return _make_environment().from_string(source)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under all field names that templates use."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _describe(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno} of the template)"
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
