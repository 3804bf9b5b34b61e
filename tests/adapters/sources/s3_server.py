"""A moto S3 server behind a proxy that records requests and injects faults."""

import http.client

from tests.adapters.sources.server import Reply, Request, Server


class S3Proxy(Server):
    def __init__(self, host: str, port: int) -> None:
        self.etags: dict[str, str] = {}  # real ETag -> reported ETag
        self.knows_ranges = True
        self._address = (host, port)
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.etags.clear()
        self.knows_ranges = True

    def key(self, request: Request) -> str:
        if "list-type=2" in request.path:
            return "list"
        return "head" if request.method == "HEAD" else request.file

    def respond(self, request: Request) -> Reply:
        ignored = {"connection"} if self.knows_ranges else {"connection", "range"}
        headers = {name: self._real(value) for name, value in request.headers.items() if name not in ignored}
        connection = http.client.HTTPConnection(*self._address)
        try:
            connection.request(request.method, request.path, headers=headers)
            response = connection.getresponse()
            sent = {name: self._said(value) for name, value in response.getheaders() if name.lower() != "connection"}
            return Reply(response.status, sent, self._said_in(response.read()))
        finally:
            connection.close()

    def _said(self, text: str) -> str:
        for real, said in self.etags.items():
            text = text.replace(real, said)
        return text

    def _said_in(self, body: bytes) -> bytes:
        return self._said(body.decode()).encode() if body.startswith(b"<?xml") else body

    def _real(self, text: str) -> str:
        for real, said in self.etags.items():
            text = text.replace(said, real)
        return text
