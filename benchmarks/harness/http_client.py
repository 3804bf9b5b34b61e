"""A load generator, which sends many requests to `/generate_stream` or `/generate` from a separate process.

To leave CPU time for the server, it does not parse JSON. It searches the stream for byte sequences that mark a token
event or the last chunk and cannot occur inside a JSON string. For responses without streaming, it reads the token count
from a header.
"""

import argparse
import asyncio
import json
import re
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

STREAM, WHOLE = "/generate_stream", "/generate"
HEAD = "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
OK, HEAD_END, STREAM_END = b"HTTP/1.1 200 ", b"\r\n\r\n", b"\r\n0\r\n\r\n"
TOKEN_EVENT = b'"token":{'
GENERATED = re.compile(rb"x-generated-tokens: (\d+)")
LENGTH = re.compile(rb"content-length: (\d+)")


@dataclass
class Sample:
    """The client-side result of one request. Times are seconds since the first request was sent."""

    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and number of token events


class Connection(asyncio.Protocol):
    """A connection that sends streaming requests one after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []
        self._tail = b""
        self._response_done: asyncio.Future[str] | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}")

    async def request(self, request: bytes) -> str:
        """Send a request and wait for the end of the response. Return the error, or an empty string."""
        self.tokens, self.arrivals, self._tail = 0, [], b""
        self._response_done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response_done

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(OK):
            self._fail(data.decode(errors="replace"))
            return
        data = self._tail + data
        count = data.count(TOKEN_EVENT)
        if count:
            self.arrivals.append((time.perf_counter(), count))
            self.tokens += count
        if data.endswith(STREAM_END):
            self._finish("" if self.tokens else data.decode(errors="replace"))
        self._tail = data[1 - len(TOKEN_EVENT) :]  # too short to count an event twice

    def close(self) -> None:
        self._transport.close()

    def _finish(self, error: str) -> None:
        if self._response_done is not None and not self._response_done.done():
            self._response_done.set_result(error)

    def _fail(self, error: str) -> None:
        """Close the connection without waiting for the rest of the response."""
        self.is_open = False
        self._transport.close()
        self._finish(error)


class NonStreamingConnection(Connection):
    """A connection that sends requests without streaming one after the other."""

    def data_received(self, data: bytes) -> None:
        self._tail += data
        head, mark, body = self._tail.partition(HEAD_END)
        if not mark:
            return
        length, generated = LENGTH.search(head), GENERATED.search(head)
        if not head.startswith(OK) or length is None or generated is None:
            self._fail(self._tail.decode(errors="replace"))
        elif len(body) >= int(length[1]):
            self.tokens = int(generated[1])
            self.arrivals = [(time.perf_counter(), self.tokens)]
            self._finish("")


class Load:
    """All requests and their results."""

    def __init__(self, url: str, path: str, bodies: Sequence[Any]) -> None:
        parsed = urlsplit(url)
        self._kind = NonStreamingConnection if path == WHOLE else Connection
        self.samples = [Sample() for _ in bodies]
        self.max_open = 0
        self._num_open = 0
        self._host, self._port = parsed.hostname, parsed.port
        self._requests = [_request(path, body, parsed.netloc) for body in bodies]
        self._remaining: Iterator[int] = iter(range(len(bodies)))
        self.start = 0.0

    async def run(self, max_concurrency: int) -> float:
        """Run all requests. Return the time in seconds."""
        self.start = time.perf_counter()
        await asyncio.gather(*[self._work() for _ in range(min(max_concurrency, len(self.samples)))])
        return max(sample.end_s for sample in self.samples)

    async def _work(self) -> None:
        """Send one request after the other, on the same connection while it is open."""
        connection = None
        for number in self._remaining:
            sample = self.samples[number]
            self._num_open += 1
            self.max_open = max(self.max_open, self._num_open)
            sample.sent_s = time.perf_counter() - self.start
            try:
                if connection is None or not connection.is_open:
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(self._kind, self._host, self._port)
                sample.error = await connection.request(self._requests[number])
                sample.tokens = connection.tokens
                sample.arrivals = [(at - self.start, count) for at, count in connection.arrivals]
                sample.first_s = sample.arrivals[0][0] if sample.arrivals else 0.0
            except OSError as error:
                sample.error = str(error)
            sample.end_s = time.perf_counter() - self.start
            self._num_open -= 1
        if connection is not None:
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("bodies", type=Path, help="JSON file with a list of request bodies")
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--path", choices=(STREAM, WHOLE), default=STREAM)
    parser.add_argument("--max-concurrency", type=int, default=64, help="concurrent requests")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(args.url, args.path, json.loads(args.bodies.read_text()))
    cpu_s = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = runner.run(load.run(args.max_concurrency))
    result = {
        "start": load.start,  # on the machine's shared clock
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_s,
        "max_open": load.max_open,
        "samples": [asdict(sample) for sample in load.samples],
    }
    args.result.write_text(json.dumps(result))


def _request(path: str, body: Any, host: str) -> bytes:
    content = json.dumps(body).encode()
    return HEAD.format(path=path, host=host, length=len(content)).encode() + content


if __name__ == "__main__":
    main()
