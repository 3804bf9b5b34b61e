"""A client of the server for the commands: requests, streams of events, and errors in one line."""

import io
import json
import sys
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from lorax_server.cli.flags import Parser
from lorax_server.errors import ConfigError, LoraxError

DEFAULT_URL = "http://127.0.0.1:3000"
NEARBY = ("127.0.0.1", "localhost", "::1")
MAX_EVENT_BYTES = 2**26
CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


class Api:
    """A server at an address, used with a key."""

    def __init__(self, args: Namespace) -> None:
        self._url = args.url.rstrip("/")
        self._timeout_s = args.timeout
        self._settings = client_settings(self._url, args.api_key, args.timeout)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post a body, or get a path without one, and return the answer's JSON."""
        with self._send(path, body) as response:
            return read_json(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any]:
        """Yield the events of an answer. Closing the iterator gives the answer up."""
        events = EventReader()
        with self._send(path, body) as response:
            for chunk in response.iter_bytes():
                yield from map(read_event, events.feed(chunk))
            yield from map(read_event, events.feed(b"\n"))

    @contextmanager
    def _send(self, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx2.Response]:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        with (
            explaining(self._url, self._timeout_s),
            httpx2.Client(**self._settings) as client,
            client.stream(method, self._url + path, content=content) as response,
        ):
            if not response.is_success:
                raise refusal(response.status_code, response.read())
            yield response


class EventReader:
    """Splits bytes into the data of server-sent events. Only a line feed ends a line: text may hold others."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise LoraxError("the server sends an event without an end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def client_settings(url: str, key: str | None, timeout_s: float) -> dict[str, Any]:
    """Return the settings of an httpx2 client. Proxies are not used for a server on this machine."""
    try:
        address = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no address: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"--url {url!r} is no address such as {DEFAULT_URL}")
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("the key has characters that no key has; check LORAX_API_KEY and LORAX_ADMIN_KEY")
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    return {
        "headers": headers | ({"authorization": f"Bearer {key}"} if key else {}),
        "timeout": httpx2.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
        "trust_env": address.host not in NEARBY,
        "verify": address.scheme == "https",  # without TLS, reading certificates is lost time
    }


@contextmanager
def explaining(url: str, timeout_s: float) -> Iterator[None]:
    """Turn errors of the connection into one line that says what to do."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise LoraxError(
            f"no server answers at {url}: is it running? Start one with `lorax serve`, or say where it is by --url "
            f"({_reason(error)})"
        ) from error
    except httpx2.TimeoutException as error:
        raise LoraxError(f"the server at {url} said nothing for {timeout_s:g} s; see --timeout") from error
    except httpx2.HTTPError as error:
        raise LoraxError(f"the connection to {url} broke: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def read_event(data: bytes) -> Any:
    """Return an event's object, or None for the word that ends a stream."""
    if data == b"[DONE]":
        return None
    event = read_json(data)
    if isinstance(event, dict) and "error" in event:
        raise LoraxError(error_text(event))
    return event


def read_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        shown = content[:80].decode(errors="replace")
        raise LoraxError(f"the server's answer is no JSON: {shown!r}; is it a lorax server?") from error


def refusal(status: int, content: bytes) -> LoraxError:
    try:
        said = error_text(json.loads(content))
    except (ValueError, RecursionError):
        said = content[:200].decode(errors="replace") or "no reason given"
    hint = "; give a key by --api-key or LORAX_API_KEY, for `adapters` --admin-key or LORAX_ADMIN_KEY"
    return LoraxError(f"the server refuses with status {status}: {said}{hint if status == 401 else ''}")


def error_text(body: Any) -> str:
    """Return the message of an error in LoRAX's form or in OpenAI's."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return clean(str(message))[:1000]


def last_details(event: Any) -> Any:
    """Return the details of a stream's last event, which must have the whole text."""
    if not isinstance(event, dict) or event.get("generated_text") is None:
        raise LoraxError("the stream ended before the answer did")
    return event.get("details")


def count_of(details: Any, name: str) -> int:
    """Return a number of an answer's details, or 0 if it is missing."""
    value = details.get(name) if isinstance(details, dict) else None
    return value if isinstance(value, int) else 0


def clean(text: str) -> str:
    """Remove the characters that a terminal would obey."""
    return text.translate(CONTROLS)


def say(text: str) -> None:
    """Write to standard output at once. A file gets all of the text, a terminal only the clean one."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tolerate_any_text() -> None:
    """Show question marks for letters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def add_connection(parser: Parser, environ: Mapping[str, str]) -> None:
    group = parser.add_argument_group("server")
    url = environ.get("LORAX_URL") or DEFAULT_URL
    group.add_argument("--url", default=url, help=f"its address (default: {DEFAULT_URL}) [LORAX_URL]")
    key = environ.get("LORAX_API_KEY") or None
    group.add_argument("--api-key", default=key, metavar="KEY", help="a client's key [LORAX_API_KEY]")
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds it may be silent (default: 300)"
    )
