"""The commands that use a running server: `lorax generate`, `chat`, `adapters` and `bench`."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlencode

from lorax_server.cli.bench import add_bench_flags, bench
from lorax_server.cli.flags import Parser
from lorax_server.cli.http import (
    ApiClient,
    add_connection_flags,
    find_details,
    remove_control_characters,
    replace_unencodable_characters,
    write_output,
)
from lorax_server.errors import ConfigError, LoraxError, NoTemplateError

SAMPLING_FLAGS: Mapping[str, tuple[type, str]] = {
    "temperature": (float, "sampling temperature; 0 always selects the most likely token"),
    "top_p": (float, "sample from the most likely tokens with this total probability"),
    "top_k": (int, "sample from this number of most likely tokens"),
    "repetition_penalty": (float, "values above 1 make repeated tokens less likely"),
    "seed": (int, "random seed, for reproducible completions"),
}
CHAT_HELP = "/adapter NAME selects an adapter (without NAME: the base model), /reset starts a new chat, /quit exits"
ADAPTER_ACTIONS = {"load": "loaded", "unload": "unloaded", "pin": "loaded and pinned", "unpin": "no longer pinned"}
PIN_BY_ACTION = {"load": None, "pin": True, "unpin": False}  # None does not change the pin
MAX_ERROR_CHARACTERS = 1000
TABLE_COLUMNS = ("id", "source", "state", "bytes", "pinned", "requests", "hash")


def run(command: str, argv: list[str], environ: Mapping[str, str]) -> int:
    """Run a command and return its exit code."""
    replace_unencodable_characters()
    add_flags, run_command = {
        "generate": (_add_generate_flags, _run_generate),
        "chat": (_add_chat_flags, _run_chat),
        "adapters": (_add_adapters_flags, _run_adapters_command),
        "bench": (add_bench_flags, bench),
    }[command]
    parser = Parser(prog=f"lorax {command}")
    add_flags(parser)
    add_connection_flags(parser, environ)
    args = parser.parse_args(argv)
    if command == "adapters":
        args.api_key = args.admin_key or environ.get("LORAX_ADMIN_KEY") or args.api_key
    with ApiClient(args) as api:
        return run_command(api, args)


# --- generate ---------------------------------------------------------------------------------------------------------


def _add_generate_flags(parser: Parser) -> None:
    parser.description = (
        "Respond to a prompt, and print each token as it is generated. If the model or the adapter has a chat\n"
        "template, the prompt is sent as a chat message."
    )
    parser.epilog = (
        'examples:\n  lorax generate "Write a haiku." --adapter poet --max-new-tokens 100\n'
        '  lorax generate --raw "Once upon a time"           complete the text without a chat template\n'
        "  lorax generate - < prompt.txt                     read the prompt from a file"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="prompt; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="complete the prompt without the chat template")
    _add_sampling_flags(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop sequence; repeatable")
    parser.add_argument("--details", action="store_true", help="print token counts and speed at the end")
    parser.add_argument("--no-stream", action="store_true", help="print the whole completion at the end")


def _add_sampling_flags(parser: Parser) -> None:
    parser.add_argument("--adapter", metavar="NAME", help="adapter to use (default: the base model)")
    parser.add_argument("--adapter-source", metavar="SOURCE", help="hub, local or s3 (default: the server's)")
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt; needs a chat template")
    limit = "maximum number of generated tokens (default: up to the context length)"
    parser.add_argument("--max-new-tokens", "--max-tokens", type=int, metavar="N", help=limit)
    for name, (kind, text) in SAMPLING_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X" if kind is float else "N", help=text)


def _drop_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _make_chat_body(args: Namespace, adapter_id: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    source = args.adapter_source if adapter_id else None
    body = _drop_none(model=adapter_id, messages=messages, adapter_source=source, max_tokens=args.max_new_tokens)
    return body | _collect_sampling_parameters(args)


def _collect_sampling_parameters(args: Namespace) -> dict[str, Any]:
    return _drop_none(**{name: getattr(args, name) for name in SAMPLING_FLAGS})


def _run_generate(api: ApiClient, args: Namespace) -> int:
    if args.raw and args.system:
        raise ConfigError("--system needs the chat template; leave out --raw")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    started, first_s = time.perf_counter(), None
    details: dict[str, Any] = {}
    texts = _generate_text(api, args, prompt, details)
    for text in ["".join(texts)] if args.no_stream else texts:
        first_s = first_s or time.perf_counter() - started
        write_output(text)
    total_s = time.perf_counter() - started
    write_output("\n")
    if args.details:
        names = ("finish_reason", "prompt_tokens", "generated_tokens", "seed")
        figures = [f"{name} {details.get(name)}" for name in names]
        figures += [f"first token after {first_s:.3f} s"] if first_s is not None and not args.no_stream else []
        figures += [f"{total_s:.3f} s", f"{details.get('generated_tokens', 0) / total_s:.1f} tokens/s"]
        print(remove_control_characters(", ".join(figures)), file=sys.stderr)
    return 0


def _generate_text(api: ApiClient, args: Namespace, prompt: str, details: dict[str, Any]) -> Generator[str]:
    """Yield a chat response, or a text completion if there is no chat template. Set `details` at the end."""
    if not args.raw:
        try:
            yield from _stream_chat_reply(api, args, prompt, details)
            return
        except NoTemplateError:
            if args.system:
                raise
    yield from _stream_completion(api, args, prompt, details)


def _stream_chat_reply(api: ApiClient, args: Namespace, prompt: str, details: dict[str, Any]) -> Generator[str]:
    """Yield the response to a chat message."""
    system = [{"role": "system", "content": args.system}] if args.system else []
    body = _make_chat_body(args, args.adapter or "", [*system, {"role": "user", "content": prompt}])
    body |= _drop_none(stop=args.stop, temperature=None if _uses_sampling(args) else 0)
    return stream_chat(api, body, details)


def _stream_completion(api: ApiClient, args: Namespace, prompt: str, details: dict[str, Any]) -> Generator[str]:
    """Yield a text completion of the prompt."""
    parameters = _drop_none(
        adapter_id=args.adapter,
        adapter_source=args.adapter_source,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop or [],
        do_sample=_uses_sampling(args),
        details=args.details,
        **_collect_sampling_parameters(args),
    )
    body, last = {"inputs": prompt, "parameters": parameters}, None
    for last in api.stream("/generate_stream", body):
        token = last.get("token") if isinstance(last, dict) else None
        if not isinstance(token, dict):
            raise LoraxError("the server's events have no token; is it a lorax server?")
        yield "" if token.get("special") else str(token.get("text", ""))
    details |= find_details(last)


def _uses_sampling(args: Namespace) -> bool:
    """Return True if a flag enables sampling. Otherwise, decoding is greedy."""
    sampling = _collect_sampling_parameters(args)
    return bool({"temperature", "top_p", "top_k"} & sampling.keys()) and sampling.get("temperature") != 0


# --- chat -------------------------------------------------------------------------------------------------------------


def _add_chat_flags(parser: Parser) -> None:
    parser.description = f"Chat with a model. {CHAT_HELP}.\nCtrl-C stops a response, Ctrl-D exits."
    parser.epilog = "examples:\n  lorax chat --adapter poet --system 'You are a poet.'\n  echo 'Hello!' | lorax chat"
    _add_sampling_flags(parser)


class Conversation:
    """Chat messages and the selected adapter."""

    def __init__(self, api: ApiClient, args: Namespace) -> None:
        self._api = api
        self._args = args
        self._start = [{"role": "system", "content": args.system}] if args.system else []
        self.adapter_id = args.adapter or ""
        self.messages = [*self._start]

    def handle(self, line: str) -> None:
        """Run a chat command, or send a message and print the response."""
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.messages = [*self._start]
        elif word == "/adapter":
            self.adapter_id = rest.strip()
        elif word == "/help":
            print(CHAT_HELP, file=sys.stderr)
        elif line:
            message = {"role": "user", "content": line}
            text = self._print_response([*self.messages, message])
            if text:
                self.messages += [message, {"role": "assistant", "content": text}]

    def _print_response(self, messages: list[dict[str, str]]) -> str:
        """Print a response and return its text, which may be truncated by Ctrl-C."""
        text = ""
        try:
            body = _make_chat_body(self._args, self.adapter_id, messages)
            with closing(stream_chat(self._api, body, {})) as chunks:
                for chunk in chunks:
                    text += chunk
                    write_output(chunk)
        except KeyboardInterrupt:
            write_output(" ...")
        write_output("\n")
        return text


def stream_chat(api: ApiClient, body: Mapping[str, Any], details: dict[str, Any]) -> Generator[str]:
    """Yield the text of a chat completion as it is generated.

    Set the finish reason and the token counts in `details`, with LoRAX's names.
    """
    is_complete = False
    with closing(api.stream("/v1/chat/completions", {**body, "stream": True})) as events:
        for event in events:
            try:
                choice = ((event or {"choices": []})["choices"] or [{}])[0]
                text = str((choice.get("delta") or {}).get("content") or "")
                is_complete |= event is None or bool(choice.get("finish_reason"))
                usage = (event or {}).get("usage") or {}
                details |= _drop_none(
                    finish_reason=choice.get("finish_reason"),
                    prompt_tokens=usage.get("prompt_tokens"),
                    generated_tokens=usage.get("completion_tokens"),
                )
            except (KeyError, TypeError, AttributeError) as error:
                raise LoraxError("the server's events have no choices; is it a lorax server?") from error
            yield text
    if not is_complete:
        raise LoraxError("the stream stopped before the completion was finished")


def _run_chat(api: ApiClient, args: Namespace) -> int:
    conversation = Conversation(api, args)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{CHAT_HELP}; Ctrl-D exits too.", file=sys.stderr)
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
            return input(f"{remove_control_characters(conversation.adapter_id)}> ").strip()
        except (KeyboardInterrupt, EOFError) as error:
            print(file=sys.stderr)
            if isinstance(error, EOFError):
                return None


# --- adapters ---------------------------------------------------------------------------------------------------------


def _add_adapters_flags(parser: Parser) -> None:
    parser.description = "List, load, unload and pin adapters on a server. Adapter errors are printed below the list."
    parser.epilog = "examples:\n  lorax adapters\n  LORAX_ADMIN_KEY=secret lorax adapters pin poet --source local"
    parser.add_argument("action", nargs="?", default="list", choices=("list", *ADAPTER_ACTIONS), help="(default: list)")
    parser.add_argument("name", nargs="?", metavar="NAME", help="adapter to change")
    parser.add_argument("--source", metavar="SOURCE", help="hub, local or s3 (default: the server's)")
    parser.add_argument("--json", action="store_true", help="print the server's response as JSON")
    parser.add_argument("--admin-key", metavar="KEY", help="required for all actions except list [LORAX_ADMIN_KEY]")


def _run_adapters_command(api: ApiClient, args: Namespace) -> int:
    if (args.action == "list") != (args.name is None):
        raise ConfigError(f"lorax adapters {args.action} " + ("needs a NAME" if args.name is None else "takes no NAME"))
    if args.action == "list":
        response = _list_adapters(api)
        text = _format_table(response["data"])
    else:
        body = _drop_none(adapter_id=args.name, adapter_source=args.source)
        route = "load" if args.action in PIN_BY_ACTION else "unload"
        response = api.request(
            f"/v1/adapters/{route}", body | ({"pin": PIN_BY_ACTION[args.action]} if route == "load" else {})
        )
        text = f"{args.name}: {ADAPTER_ACTIONS[args.action]}"
    print(json.dumps(response, indent=2) if args.json else text)
    return 0


def _list_adapters(api: ApiClient) -> dict[str, Any]:
    """Return all pages of the server's adapter list as one response."""
    joined: dict[str, Any] = {}
    path = "/v1/adapters"
    while True:
        page = api.request(path)
        adapters = page.get("data") if isinstance(page, dict) else None
        if not isinstance(adapters, list) or not all(isinstance(item, dict) for item in adapters):
            raise LoraxError("the server's response contains no adapter list; is it a lorax server?")
        joined = page | {"data": [*joined.get("data", []), *adapters]}
        if not page.get("next"):
            return joined
        path = f"/v1/adapters?{urlencode({'after': page['next']})}"


def _format_table(adapters: list[dict[str, Any]]) -> str:
    if not adapters:
        return "no adapters"
    rows = [TABLE_COLUMNS, *([_format_cell(name, item.get(name)) for name in TABLE_COLUMNS] for item in adapters)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for item in adapters:
        if item.get("error"):
            lines.append(f"{_format_cell('id', item.get('id'))}: {_format_line(item['error'])}")
    return "\n".join(lines)


def _format_line(text: Any) -> str:
    return " ".join(remove_control_characters(str(text)).split())[:MAX_ERROR_CHARACTERS]


def _format_cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name == "bytes" and isinstance(value, int):
        return f"{value / 2**20:.1f} MiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return remove_control_characters(str(value))[: 12 if name == "hash" else 80]
