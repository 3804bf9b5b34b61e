"""CORS middleware whose error responses are JSON."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorax_server.server.http.error_responses import make_http_error

FLAG_BY_FAILURE = {"origin": "--cors-allow-origin", "method": "--cors-allow-method", "headers": "--cors-allow-header"}


class JsonCorsMiddleware(CORSMiddleware):
    """Starlette's CORS middleware with JSON error responses instead of plain text."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        return response if response.status_code < 400 else _JsonRejection(response)


class _JsonRejection(Response):
    """Response that rejects a preflight request with a JSON error in the route's format."""

    def __init__(self, rejection: Response) -> None:
        _, _, failures = bytes(rejection.body).decode().partition("CORS ")
        flags = [FLAG_BY_FAILURE[failure] for failure in failures.split(", ") if failure in FLAG_BY_FAILURE]
        hint = f"; the server operator can allow it with {', '.join(flags)}" if flags else ""
        self._message = f"cross-origin request rejected because of its {failures}{hint}"
        self._extra_headers = {
            name: value for name, value in rejection.headers.items() if name not in ("content-type", "content-length")
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = make_http_error(400, self._message, self._extra_headers).to_response(scope["path"])
        await response(scope, receive, send)
