"""Cross-origin requests of pages, with refusals as JSON."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorax_server.server.http.problems import http_problem

FLAGS = {"origin": "--cors-allow-origin", "method": "--cors-allow-method", "headers": "--cors-allow-header"}


class Cors(CORSMiddleware):
    """starlette's middleware, whose refusals are text."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code < 400 else _Refusal(response)


class _Refusal(Response):
    """The same refusal as JSON, as the route's clients expect it."""

    def __init__(self, refused: Response) -> None:
        _, _, failures = bytes(refused.body).decode().partition("CORS ")
        flags = [FLAGS[failure] for failure in failures.split(", ") if failure in FLAGS]
        remedy = f"; the server's operator can allow it by {', '.join(flags)}" if flags else ""
        self._message = f"this page may not ask, because of its {failures}{remedy}"
        self._kept = {
            name: value for name, value in refused.headers.items() if name not in ("content-type", "content-length")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = http_problem(400, self._message, self._kept).response(scope["path"])
        await response(scope, receive, send)
