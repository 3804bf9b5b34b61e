"""Send requests for streams or whole answers to a server, many at once, in a process of its own: the other side of
`http_load.py`, `http_streams.py` and `gpu_serving.py`.

It must leave a core to the server, so it parses nothing: a stream is searched for the bytes that an event with a token
and an end look like. Neither can stand within a JSON string, which has its quotes and line ends escaped. OpenAI's
streams say at the end how many tokens they had, since an event may have several. A whole answer says how many tokens
and bytes it has in its headers.
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

WHOLE = "/generate"
EVENTS = {  # what an event with a token looks like
    "/generate_stream": b'"token":{',
    "/v1/completions": b'"text":',
    "/v1/chat/completions": b'"delta":{"content":',
}
PATHS = (*EVENTS, WHOLE)
HEAD = "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
OK = b"HTTP/1.1 200 "
END = b"\r\n0\r\n\r\n"  # the last chunk of a body, which has no length
LAST = 1024  # bytes at the end of a stream, which hold its usage
HEAD_END = b"\r\n\r\n"
GENERATED = re.compile(rb"x-generated-tokens: (\d+)")
COMPLETION = re.compile(rb'"completion_tokens":(\d+)')
TOKEN_ID = re.compile(rb'"token":\{"id":(\d+)')
LENGTH = re.compile(rb"content-length: (\d+)")


@dataclass
class Sample:
    """One request as the client saw it. Times are seconds since the first request was sent."""

    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    tokens: int = 0
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # of data, and the events with a token in it
    token_ids: list[int] = field(default_factory=list)  # in their order, if they are to be kept


class Connection(asyncio.Protocol):
    """A connection for one stream after the other."""

    def __init__(self, event: bytes, keep: bool = False) -> None:
        self.is_open = False
        self.kept: list[bytes] | None = [] if keep else None
        self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []
        self._event = event
        self._tail = self._last = b""
        self._ended: asyncio.Future[str] | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection was lost: {exc}")

    async def ask(self, request: bytes) -> str:
        """Send a request and wait for the end of the answer; return its error, if any."""
        self.tokens, self.arrivals, self._tail, self._last = 0, [], b"", b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._ended

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(OK):
            self._end(data.decode(errors="replace"))
            return
        if self.kept is not None:
            self.kept.append(data)
        data = self._tail + data
        count = data.count(self._event)
        if count:
            self.arrivals.append((time.perf_counter(), count))
            self.tokens += count
        self._last = (self._last + data)[-LAST:]
        if data.endswith(END):
            told = COMPLETION.search(self._last)
            self.tokens = int(told[1]) if told else self.tokens
            self._finish("" if self.tokens else data.decode(errors="replace"))
        self._tail = data[1 - len(self._event) :]  # too little to count an event twice

    def close(self) -> None:
        self._transport.close()

    def _finish(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def _end(self, error: str) -> None:
        """Close the connection without waiting for the rest of the response."""
        self.is_open = False
        self._transport.close()
        self._finish(error)


class WholeConnection(Connection):
    """A connection for one whole answer after the other."""

    def data_received(self, data: bytes) -> None:
        self._tail += data
        head, mark, body = self._tail.partition(HEAD_END)
        if not mark:
            return
        length, generated = LENGTH.search(head), GENERATED.search(head)
        if not head.startswith(OK) or length is None or generated is None:
            self._end(self._tail.decode(errors="replace"))
        elif len(body) >= int(length[1]):
            self.tokens = int(generated[1])
            self.arrivals = [(time.perf_counter(), self.tokens)]
            self._finish("")


class Load:
    """All requests and their results."""

    def __init__(self, url: str, path: str, bodies: Sequence[Any], keep: bool = False) -> None:
        parsed = urlsplit(url)
        self._keep = keep
        self._connections: dict[int, Connection] = {}  # by the number of the request
        self._kind = WholeConnection if path == WHOLE else Connection
        self._event = EVENTS.get(path, b"")
        self.samples = [Sample() for _ in bodies]
        self.most_open = 0
        self._num_open = 0
        self._host, self._port = parsed.hostname, parsed.port
        self._requests = [_request(path, body, parsed.netloc) for body in bodies]
        self._left: Iterator[int] = iter(range(len(bodies)))
        self.start = 0.0

    async def run(self, at_once: int) -> float:
        """Run all requests and return the seconds they took."""
        self.start = time.perf_counter()
        await asyncio.gather(*[self._work() for _ in range(min(at_once, len(self.samples)))])
        return max(sample.end_s for sample in self.samples)

    async def _work(self) -> None:
        """Send the next request as long as there is one, on the same connection if it is still open."""
        connection = None
        for number in self._left:
            sample = self.samples[number]
            self._num_open += 1
            self.most_open = max(self.most_open, self._num_open)
            sample.sent_s = self._now()
            try:
                if connection is None or not connection.is_open:
                    connection = await self._connect()
                self._connections[number] = connection
                sample.error = await connection.ask(self._requests[number])
                sample.tokens = connection.tokens
                sample.arrivals = [(at - self.start, count) for at, count in connection.arrivals]
                sample.first_s = sample.arrivals[0][0] if sample.arrivals else 0.0
            except OSError as error:
                sample.error = str(error)
            sample.end_s = self._now()
            self._num_open -= 1
        if connection is not None:
            connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: self._kind(self._event, self._keep), self._host, self._port
        )
        return connection

    def read_ids(self) -> None:
        """Read the ids of tokens out of streams that were kept, one on each connection."""
        for number, connection in self._connections.items():
            body = b"".join(connection.kept or [])
            self.samples[number].token_ids = [int(each) for each in TOKEN_ID.findall(body)]

    def _now(self) -> float:
        return time.perf_counter() - self.start


def main() -> None:
    args = parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(args.url, args.path, json.loads(args.bodies.read_text()), args.token_ids)
    cpu_s = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds = runner.run(load.run(args.at_once))
    if args.token_ids:
        load.read_ids()
    result = {
        "start": load.start,  # on the clock that all processes of a machine share
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_s,
        "most_open": load.most_open,
        "samples": [asdict(sample) for sample in load.samples],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result))
    tokens, failed = sum(sample.tokens for sample in load.samples), sum(bool(sample.error) for sample in load.samples)
    print(f"{len(load.samples)} requests, {failed} failed, {tokens} tokens, {seconds:.2f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:3000")
    parser.add_argument("bodies", type=Path, help="a file with a JSON list of what to send")
    parser.add_argument("--path", choices=PATHS, default=PATHS[0], help="where to send it (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, metavar="N", help="requests that are under way at once")
    parser.add_argument("--token-ids", action="store_true", help="keep the ids of /generate_stream, to check them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of each request to this file")
    return parser.parse_args()


def _request(path: str, body: Any, host: str) -> bytes:
    content = json.dumps(body).encode()
    return HEAD.format(path=path, host=host, length=len(content)).encode() + content


if __name__ == "__main__":
    main()
