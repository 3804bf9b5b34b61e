"""A collector that receives traces with OTLP over HTTP and parses them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

GUARD_S = 120


class Collector(ThreadingHTTPServer):
    """A server that stores received spans. While `is_slow`, it does not respond."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.is_slow = False
        self.came, self.may_answer = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Any]:
        sent = [result for _, request in self.requests for result in request.resource_spans]
        return [span for resource in sent for scope in resource.scope_spans for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.server.came.set()
        if self.server.is_slow:
            self.server.may_answer.wait(GUARD_S)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server
        finally:
            server.may_answer.set()
            server.shutdown()
            serving.join()


def attributes(span: Any) -> dict[str, Any]:
    result = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        result[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return result
