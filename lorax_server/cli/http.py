"""What the commands know of a server: requests, streams of events, and errors in one line."""

import io
import json
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2

from lorax_server.cli.flags import Parser
from lorax_server.errors import ConfigError, LoraxError

DEFAULT_URL = "http://127.0.0.1:3000"
NEARBY = ("127.0.0.1", "localhost", "::1")
MAX_EVENT_BYTES = 2**26
# A model may say anything, and a terminal obeys some of it.
CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


class Api:
    """A server at an address, for a caller with a key."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._settings = connection(self.url, key, timeout_s)

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any]:
        """The events of an answer. Closing the iterator gives the answer up."""
        lines = Lines()
        with self._answer("POST", path, body) as response:
            for chunk in response.iter_bytes():
                yield from map(read_event, lines.feed(chunk))
            yield from map(read_event, lines.feed(b"\n"))

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        with self._answer(method, path, body) as response:
            return read_json(response.read())

    @contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx2.Response]:
        with talking(self.url, self._timeout_s), httpx2.Client(**self._settings) as client:
            content = None if body is None else json.dumps(body).encode()
            with client.stream(method, self.url + path, content=content) as response:
                if not response.is_success:
                    raise refusal(response.status_code, response.read())
                yield response


class Lines:
    """Bytes to the data of server-sent events. Only a line feed ends a line: text may hold other separators."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise LoraxError("the server sends an event without an end")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def connection(url: str, key: str | None, timeout_s: float) -> dict[str, Any]:
    """How to make a client of httpx2. A server on this machine is asked directly, whatever proxies there are."""
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--url {url!r} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(f"--url {url!r} is no address such as {DEFAULT_URL}")
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError("the key has characters that no key has; check LORAX_API_KEY and LORAX_ADMIN_KEY")
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    return {
        "headers": headers | ({"authorization": f"Bearer {key}"} if key else {}),
        "timeout": httpx2.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
        "trust_env": parts.host not in NEARBY,
        "verify": parts.scheme == "https",  # reading certificates that nobody needs takes long
    }


@contextmanager
def talking(url: str, timeout_s: float) -> Iterator[None]:
    """What can go wrong on the way, in one line that says what to do."""
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
    """An event's object; None for the word that ends a stream."""
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
    """LoRAX's form of an error, or OpenAI's."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return clean(str(message))[:1000]


def count_of(details: Any, name: str) -> int:
    """A number of what a server says of an answer; 0 if it does not."""
    value = details.get(name) if isinstance(details, dict) else None
    return value if isinstance(value, int) else 0


def clean(text: str) -> str:
    return text.translate(CONTROLS)


def say(text: str) -> None:
    """To standard output, now. A file gets all of it, a terminal nothing that it would obey."""
    sys.stdout.write(clean(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tolerate_any_text() -> None:
    """An answer that the terminal's encoding lacks letters for is shown with question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def add_connection(parser: Parser, environ: Mapping[str, str]) -> None:
    group = parser.add_argument_group("server")
    url = environ.get("LORAX_URL") or DEFAULT_URL
    group.add_argument("--url", default=url, help=f"where it is (default: {DEFAULT_URL}) [LORAX_URL]")
    key = environ.get("LORAX_API_KEY") or None
    group.add_argument("--api-key", default=key, metavar="KEY", help="a caller's key [LORAX_API_KEY]")
    group.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds it may be silent (default: 300)"
    )
