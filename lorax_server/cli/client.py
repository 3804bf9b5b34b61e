"""`lorax generate`, `chat`, `adapters` and `bench`: the commands that use a running server."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlencode

from lorax_server.cli.bench import add_bench, bench
from lorax_server.cli.flags import Parser
from lorax_server.cli.http import Api, add_connection, clean, find_details, replace_unknown_letters, say
from lorax_server.errors import ConfigError, LoraxError

SAMPLING: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "randomness of the choice; 0 always takes the likeliest token"),
    "top_p": (float, "choose among the likeliest tokens with this probability together"),
    "top_k": (int, "choose among this number of likeliest tokens"),
    "repetition_penalty": (float, "above 1 makes tokens of the text so far less likely"),
    "seed": (int, "make the same choices every time"),
}
CHAT_HELP = "/adapter NAME changes the adapter (without a name: the base model), /reset forgets, /quit leaves"
ACTIONS = {"load": "loaded", "unload": "unloaded", "pin": "loaded and pinned", "unpin": "no longer pinned"}
PINS = {"load": None, "pin": True, "unpin": False}  # None leaves it as it is
COLUMNS = ("id", "source", "state", "bytes", "pinned", "requests", "hash")


def run(command: str, argv: list[str], environ: Mapping[str, str]) -> int:
    """Run a command and return its exit code."""
    replace_unknown_letters()
    add_flags, run_command = {
        "generate": (_add_generate, _generate),
        "chat": (_add_chat, _chat),
        "adapters": (_add_adapters, _adapters),
        "bench": (add_bench, bench),
    }[command]
    parser = Parser(prog=f"lorax {command}")
    add_flags(parser)
    add_connection(parser, environ)
    args = parser.parse_args(argv)
    if command == "adapters":
        args.api_key = args.admin_key or environ.get("LORAX_ADMIN_KEY") or args.api_key
    with Api(args) as api:
        return run_command(api, args)


# --- generate ---------------------------------------------------------------------------------------------------------


def _add_generate(parser: Parser) -> None:
    parser.description = "Continue a text, and write each token as it comes."
    parser.epilog = (
        'examples:\n  lorax generate "Once upon a time" --adapter poet --max-new-tokens 100\n'
        "  lorax generate - < prompt.txt                     the prompt from a file"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from standard input")
    _add_sampling(parser)
    limit = "tokens of the answer at most (default: what there is room for)"
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=limit)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; repeatable")
    parser.add_argument("--details", action="store_true", help="report the number of tokens and their speed afterwards")
    parser.add_argument("--no-stream", action="store_true", help="wait for the whole answer")


def _add_sampling(parser: Parser) -> None:
    parser.add_argument("--adapter", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument("--adapter-source", metavar="SOURCE", help="hub, local or s3 (default: the server's)")
    for name, (kind, text) in SAMPLING.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X" if kind is float else "N", help=text)


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _sampling(args: Namespace) -> dict[str, Any]:
    return _without_none(**{name: getattr(args, name) for name in SAMPLING})


def _generate(api: Api, args: Namespace) -> int:
    sampling = _sampling(args)
    parameters = _without_none(
        adapter_id=args.adapter,
        adapter_source=args.adapter_source,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop or [],
        do_sample=bool({"temperature", "top_p", "top_k"} & sampling.keys()) and sampling.get("temperature") != 0,
        details=args.details,
        **sampling,
    )
    body = {"inputs": sys.stdin.read() if args.prompt == "-" else args.prompt, "parameters": parameters}
    started, first_s, last = time.perf_counter(), None, None
    if args.no_stream:
        last = api.request("/generate", body)
        if not isinstance(last, dict) or not isinstance(last.get("generated_text"), str):
            raise LoraxError("the server's answer has no generated_text; is it a lorax server?")
        say(last["generated_text"])
    else:
        for last in api.stream("/generate_stream", body):
            first_s = first_s or time.perf_counter() - started
            token = last.get("token") if isinstance(last, dict) else None
            if not isinstance(token, dict):
                raise LoraxError("the server's events have no token; is it a lorax server?")
            say("" if token.get("special") else str(token.get("text", "")))
    details, total_s = find_details(last), time.perf_counter() - started
    say("\n")
    if args.details:
        names = ("finish_reason", "prompt_tokens", "generated_tokens", "seed")
        figures = [f"{name} {details.get(name)}" for name in names]
        figures += [f"first token after {first_s:.3f} s"] if first_s is not None else []
        figures += [f"{total_s:.3f} s", f"{details.get('generated_tokens', 0) / total_s:.1f} tokens/s"]
        print(clean(", ".join(figures)), file=sys.stderr)
    return 0


# --- chat -------------------------------------------------------------------------------------------------------------


def _add_chat(parser: Parser) -> None:
    parser.description = f"Talk to a model. {CHAT_HELP}.\nCtrl-C stops an answer, Ctrl-D leaves."
    parser.epilog = "examples:\n  lorax chat --adapter poet --system 'You are a poet.'\n  echo 'Hello!' | lorax chat"
    _add_sampling(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message, the first of the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most")


class Conversation:
    """The messages so far, and the adapter that answers."""

    def __init__(self, api: Api, args: Namespace) -> None:
        self._api = api
        self._settings = _sampling(args) | _without_none(max_tokens=args.max_tokens)
        self._start = [{"role": "system", "content": args.system}] if args.system else []
        self._adapter_source = args.adapter_source
        self.adapter_id = args.adapter or ""
        self.messages = [*self._start]

    def handle(self, line: str) -> None:
        """Run a chat command, or print the answer to a message."""
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.messages = [*self._start]
        elif word == "/adapter":
            self.adapter_id = rest.strip()
        elif word == "/help":
            print(CHAT_HELP, file=sys.stderr)
        elif line:
            question = {"role": "user", "content": line}
            answer = self._print_answer([*self.messages, question])
            if answer:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def _print_answer(self, messages: list[dict[str, str]]) -> str:
        """Print an answer and return its text, or the part that was printed before Ctrl-C."""
        answer = ""
        try:
            with closing(self._stream_text(messages)) as pieces:
                for piece in pieces:
                    answer += piece
                    say(piece)
        except KeyboardInterrupt:
            say(" ...")
        say("\n")
        return answer

    def _stream_text(self, messages: list[dict[str, str]]) -> Generator[str]:
        body = {"model": self.adapter_id, "messages": messages, "stream": True, **self._settings}
        if self.adapter_id and self._adapter_source:
            body["adapter_source"] = self._adapter_source
        is_complete = False
        with closing(self._api.stream("/v1/chat/completions", body)) as events:
            for event in events:
                try:
                    choice = ((event or {"choices": []})["choices"] or [{}])[0]
                    text = str((choice.get("delta") or {}).get("content") or "")
                    is_complete |= event is None or bool(choice.get("finish_reason"))
                except (KeyError, TypeError, AttributeError) as error:
                    raise LoraxError("the server's events have no choices; is it a lorax server?") from error
                yield text
        if not is_complete:
            raise LoraxError("the stream ended before the answer did")


def _chat(api: Api, args: Namespace) -> int:
    conversation = Conversation(api, args)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{CHAT_HELP}; Ctrl-D leaves too.", file=sys.stderr)
    while (line := _read_line(conversation, is_terminal)) not in (None, "/quit"):
        try:
            conversation.handle(str(line))
        except LoraxError as error:
            if not is_terminal:
                raise
            print(f"\n{error}", file=sys.stderr)
    return 0


def _read_line(conversation: Conversation, is_terminal: bool) -> str | None:
    if not is_terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    while True:
        try:
            return input(f"{clean(conversation.adapter_id)}> ").strip()
        except (KeyboardInterrupt, EOFError) as end:
            print(file=sys.stderr)
            if isinstance(end, EOFError):
                return None


# --- adapters ---------------------------------------------------------------------------------------------------------


def _add_adapters(parser: Parser) -> None:
    parser.description = "List the adapters that a server knows, or load, unload and pin them."
    parser.epilog = "examples:\n  lorax adapters\n  LORAX_ADMIN_KEY=secret lorax adapters pin poet --source local"
    parser.add_argument("action", nargs="?", default="list", choices=("list", *ACTIONS), help="(default: list)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="adapter to change")
    parser.add_argument("--source", metavar="SOURCE", help="hub, local or s3 (default: the server's)")
    parser.add_argument("--json", action="store_true", help="write the server's answer as JSON")
    parser.add_argument("--admin-key", metavar="KEY", help="needed to change anything [LORAX_ADMIN_KEY]")


def _adapters(api: Api, args: Namespace) -> int:
    if (args.action == "list") != (args.name is None):
        raise ConfigError(f"lorax adapters {args.action} " + ("needs a NAME" if args.name is None else "takes no NAME"))
    if args.action == "list":
        response = _list_adapters(api)
        text = _format_table(response["data"])
    else:
        body = _without_none(adapter_id=args.name, adapter_source=args.source)
        route = "load" if args.action in PINS else "unload"
        response = api.request(f"/v1/adapters/{route}", body | ({"pin": PINS[args.action]} if route == "load" else {}))
        text = f"{args.name}: {ACTIONS[args.action]}"
    print(json.dumps(response, indent=2) if args.json else text)
    return 0


def _list_adapters(api: Api) -> dict[str, Any]:
    """Return the server's list with all of its pages joined."""
    joined: dict[str, Any] = {}
    marks = [""]
    while True:
        page = api.request("/v1/adapters" + (f"?{urlencode({'after': marks[-1]})}" if marks[-1] else ""))
        listed = page.get("data") if isinstance(page, dict) else None
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise LoraxError("the server's answer lists no adapters; is it a lorax server?")
        joined = page | {"data": [*joined.get("data", []), *listed]}
        if not page.get("next"):
            return joined
        marks.append(str(page["next"]))
        if marks[-1] in marks[:-1]:
            raise LoraxError(
                f"the server's pages of adapters come again after {clean(marks[-1])[:80]!r}; try again later"
            )


def _format_table(listed: list[dict[str, Any]]) -> str:
    if not listed:
        return "no adapters are known"
    rows = [COLUMNS, *([_cell(name, item.get(name)) for name in COLUMNS] for item in listed)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name == "bytes" and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return clean(str(value))[: 12 if name == "hash" else 80]
