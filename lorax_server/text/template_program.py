"""Render chat templates in a process of its own that may be killed: a template is untrusted code.

`chat_template.TemplateRenderer` starts it. Frames go through its standard input and output: four bytes of length, then
JSON. It imports only jinja2 and Python's own modules.
"""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct(">I")
TOO_LONG = signal.SIGPROF  # ends a process whose template takes too long
NUM_COMPILED = 32
MAX_ERROR = 2000  # characters: a template may write an error of any length
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field, the usual one first


class RenderLimits(NamedTuple):
    """Limits of a render. `cpu_s` is the CPU time of this process: waiting is not charged."""

    max_output: int
    max_memory: int
    cpu_s: float


# --- Functions for templates, as transformers has them ----------------------------------------------------------------


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here it has no effect on its content."""

    tags = {"generation"}  # noqa: RUF012 - the form that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Macro) -> str:
        return str(caller())


class PlainNamespace(Namespace):
    """A namespace that refuses names with a meaning to Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class DictMaker:
    """`dict(...)` and `dict.fromkeys(...)`, without the class and its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def make_environment() -> ImmutableSandboxedEnvironment:
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
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- One render -------------------------------------------------------------------------------------------------------


class Program:
    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._compiled: Callable[[str], jinja2.Template] = lru_cache(NUM_COMPILED)(make_environment().from_string)
        self.is_spent = False  # it has used memory that the next template would lack

    def answer(self, request: bytes) -> bytes:
        """Return the reply to a frame, whatever the template does."""
        try:
            return json.dumps({"text": self._render(json.loads(request))}, ensure_ascii=False).encode()
        except MemoryError:
            self.is_spent = True
            problem = f"the template needs more than {self._limits.max_memory} bytes of memory"
        except RecursionError:
            problem = "the template is nested too deeply, or calls itself without end"
        except UnicodeEncodeError:
            problem = "the template writes characters that are no text (lone surrogates)"
        except Exception as error:  # a template may raise anything
            problem = _describe(error)
        return json.dumps({"error": problem[:MAX_ERROR]}).encode()

    def _render(self, request: Mapping[str, Any]) -> str:
        template = self._compiled(request["source"])
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, **request["variables"]}
        messages = [_with_reasoning(message) for message in request["messages"]]
        texts, count = [], 0
        for text in template.generate({**variables, "messages": messages}):
            texts.append(text)
            count += len(text)
            if count > self._limits.max_output:
                raise jinja2.TemplateError(f"the template writes more than {self._limits.max_output} characters")
        return "".join(texts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose reasoning has all the names that templates use."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _describe(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno} of the template)"
    return str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"


# --- The process ------------------------------------------------------------------------------------------------------


def serve(source: BinaryIO, sink: BinaryIO, limits: RenderLimits) -> None:
    """Answer frames until the input ends or a new process is better. After each reply, a second frame tells which."""
    program = Program(limits)
    _write(sink, b"")  # ready
    while (request := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # its signal ends the process, whatever Python does
        reply = program.answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = program.is_spent or memory_in_use() > limits.max_memory // 2
        _write(sink, reply)
        _write(sink, b"last" if is_last else b"")
        if is_last:
            return


def limit_memory(max_bytes: int) -> None:
    """Limit the memory as far as the system can; the parent's timeout is the other limit."""
    for kind, limit in ((resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(kind, (limit, limit))


def memory_in_use() -> int:
    """Return the bytes of address space, which is limited."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux; there the maximum includes the memory of the parent before the start
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * resource.getpagesize()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return source.read(length)


def _write(sink: BinaryIO, content: bytes) -> None:
    sink.write(LENGTH.pack(len(content)) + content)
    sink.flush()


def main() -> None:
    max_output, max_memory, cpu_s = sys.argv[1:]
    limits = RenderLimits(int(max_output), int(max_memory), float(cpu_s))
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with frames
    limit_memory(limits.max_memory)
    serve(sys.stdin.buffer, sink, limits)


if __name__ == "__main__":
    main()
