"""HTTP client for the commands that use a running server, and safe terminal output."""

import io
import json
import sys
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import httpx2

from lorax_server.cli.flags import Parser
from lorax_server.errors import ConfigError, LoraxError, NoTemplateError

DEFAULT_URL = "http://127.0.0.1:3000"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
NO_TEMPLATE_CODE = "no_chat_template"  # error code of the chat route
CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 2**26
CONTROL_CHARACTERS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def add_connection_flags(parser: Parser, environ: Mapping[str, str]) -> None:
    group = parser.add_argument_group("server")
    url, key = environ.get("LORAX_URL") or DEFAULT_URL, environ.get("LORAX_API_KEY") or None
    timeout = "seconds to wait for data (default: 300)"
    group.add_argument("--url", default=url, help=f"server address (default: {DEFAULT_URL}) [LORAX_URL]")
    group.add_argument("--api-key", default=key, metavar="KEY", help="API key [LORAX_API_KEY]")
    group.add_argument("--timeout", type=float, default=300.0, metavar="S", help=timeout)


class ApiClient:
    """A thread-safe client for the server's HTTP API. Errors are raised as one-line `LoraxError`s."""

    def __init__(self, args: Namespace) -> None:
        self._url, self._timeout_s, key = args.url.rstrip("/"), args.timeout, args.api_key
        if not self._timeout_s > 0:
            raise ConfigError(f"--timeout {self._timeout_s} must be above 0")
        try:
            address = httpx2.URL(self._url)
        except httpx2.InvalidURL as error:
            raise ConfigError(f"--url {self._url!r} is not an address: {error}") from error
        if address.scheme not in ("http", "https") or not address.host:
            raise ConfigError(f"--url {self._url!r} is not an address such as {DEFAULT_URL}")
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key contains invalid characters; check LORAX_API_KEY and LORAX_ADMIN_KEY")
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._client = httpx2.Client(
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx2.Timeout(self._timeout_s, connect=min(self._timeout_s, CONNECT_TIMEOUT_S)),
            limits=httpx2.Limits(max_connections=None),
            trust_env=address.host not in LOCAL_HOSTS,  # use no proxy for a local server
            verify=address.scheme == "https",  # skip loading certificates for plain HTTP
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def check(self) -> None:
        """Raise if no healthy server responds."""
        with self._send("/health", None) as response:
            response.read()

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a POST request with a body, or a GET request without one. Return the parsed JSON response."""
        with self._send(path, body) as response:
            return _parse_json(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any]:
        """Send a request and yield its server-sent events, with None for `[DONE]`.

        Closing the generator closes the connection.
        """
        with self._send(path, body) as response:
            for line in _split_lines(response.iter_bytes()):
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    event = None if data == b"[DONE]" else _parse_json(data)
                    if isinstance(event, dict) and "error" in event:
                        raise LoraxError(_find_message(event))
                    yield event

    @contextmanager
    def _send(self, path: str, body: Mapping[str, Any] | None) -> Iterator[httpx2.Response]:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            with self._client.stream(method, self._url + path, content=content) as response:
                if not response.is_success:
                    raise _make_error(response.status_code, response.read())
                yield response
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise LoraxError(
                f"cannot connect to a server at {self._url}; start one with `lorax serve`, or set --url "
                f"({str(error) or type(error).__name__})"
            ) from error
        except httpx2.TimeoutException as error:
            raise LoraxError(
                f"the server at {self._url} sent no data for {self._timeout_s:g} s; see --timeout"
            ) from error
        except httpx2.HTTPError as error:
            raise LoraxError(f"the connection to {self._url} broke: {str(error) or type(error).__name__}") from error


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, split at line feeds only, because generated text may contain other line separators."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise LoraxError("the server sent an event that is too long")
        yield from lines
    yield rest


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        start = content[:80].decode(errors="replace")
        raise LoraxError(f"the server's response is not JSON: {start!r}; is it a lorax server?") from error


def _make_error(status: int, content: bytes) -> LoraxError:
    try:
        body = json.loads(content)
        message = _find_message(body)
    except (ValueError, RecursionError):
        body, message = None, content[:200].decode(errors="replace") or "no message"
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code") == NO_TEMPLATE_CODE:
        return NoTemplateError(message)
    hint = "; set --api-key or LORAX_API_KEY (for `lorax adapters`: --admin-key or LORAX_ADMIN_KEY)"
    return LoraxError(f"the server responded with status {status}: {message}{hint if status == 401 else ''}")


def _find_message(body: Any) -> str:
    """Return the message in a LoRAX or OpenAI error response."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return remove_control_characters(str(message))[:1000]


def find_details(event: Any) -> dict[str, Any]:
    """Return the details in the last stream event. Raise LoraxError if the stream is incomplete."""
    if not isinstance(event, dict) or event.get("generated_text") is None:
        raise LoraxError("the stream stopped before the completion was finished")
    return event.get("details") or {}


def remove_control_characters(text: str) -> str:
    """Remove control characters that a terminal would interpret."""
    return text.translate(CONTROL_CHARACTERS)


def write_output(text: str) -> None:
    """Write to standard output and flush. If it is a terminal, remove control characters."""
    sys.stdout.write(remove_control_characters(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def replace_unencodable_characters() -> None:
    """Print question marks for characters that the terminal's encoding does not support."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
