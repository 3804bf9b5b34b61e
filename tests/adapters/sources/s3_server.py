"""A moto S3 server behind a proxy that records requests and injects faults."""

import http.client

from tests.adapters.sources.server import Reply, Request, Server


class S3Proxy(Server):
    def __init__(self, host: str, port: int) -> None:
        self.etags: dict[str, str] = {}  # real ETag -> reported ETag
        self.supports_ranges = True
        self._address = (host, port)
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.etags.clear()
        self.supports_ranges = True

    def key(self, request: Request) -> str:
        if "list-type=2" in request.path:
            return "list"
        return "head" if request.method == "HEAD" else request.file

    def respond(self, request: Request) -> Reply:
        ignored = {"connection"} if self.supports_ranges else {"connection", "range"}
        headers = {name: self._to_real(value) for name, value in request.headers.items() if name not in ignored}
        connection = http.client.HTTPConnection(*self._address)
        try:
            connection.request(request.method, request.path, headers=headers)
            response = connection.getresponse()
            sent = {
                name: self._to_reported(value) for name, value in response.getheaders() if name.lower() != "connection"
            }
            return Reply(response.status, sent, self._to_reported_body(response.read()))
        finally:
            connection.close()

    def _to_reported(self, text: str) -> str:
        for real, reported in self.etags.items():
            text = text.replace(real, reported)
        return text

    def _to_reported_body(self, body: bytes) -> bytes:
        return self._to_reported(body.decode()).encode() if body.startswith(b"<?xml") else body

    def _to_real(self, text: str) -> str:
        for real, reported in self.etags.items():
            text = text.replace(reported, real)
        return text
