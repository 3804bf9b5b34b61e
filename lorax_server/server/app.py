"""Creates the ASGI application, which contains all routes, the middleware and the error handlers for a `Service`."""

import asyncio
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute

from lorax_server import __version__
from lorax_server.errors import LoraxError
from lorax_server.server.http.error_responses import (
    ErrorResponse,
    json_response,
    make_error_response,
    make_http_error,
    make_validation_error,
)
from lorax_server.server.http.middleware import RequestMiddleware, find_methods
from lorax_server.server.http.replica_protocol import ReplicaAccess
from lorax_server.server.openapi import describe_limits
from lorax_server.server.routes import (
    adapter_versions,
    adapters,
    chat,
    completions,
    info,
    lorax,
    playground,
    pooling,
    replica,
)
from lorax_server.server.routes.responses import route as responses
from lorax_server.server.service import Service

OPENAPI_PATH = "/api-doc/openapi.json"
DESCRIPTION = "Serves many fine-tuned models on one base model: name a LoRA adapter in your request."


def make_app(service: Service, address: str = "") -> FastAPI:
    """Create the application. `address` is the listening socket's address, or "" without a socket."""
    app: FastAPI = FastAPIOffline(
        redoc_url=None,
        static_url="/docs/static",
        title="lorax_server",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=OPENAPI_PATH,
        redirect_slashes=False,
    )
    routes: list[BaseRoute] = []
    for module in (lorax, completions, chat, responses, pooling, info, adapters, adapter_versions, playground):
        router = module.make_router(service)
        app.include_router(router)
        routes += router.routes
    _add_openapi(app, service)
    _add_handlers(app, routes)
    app.add_middleware(RequestMiddleware, routes=routes, service=service, address=address)
    app.add_middleware(CORSMiddleware, **vars(service.config.cors))
    if service.config.replica_secret:
        app.add_middleware(
            ReplicaAccess, secret=service.config.replica_secret, control=replica.make_control_app(service)
        )
    return app


def _add_openapi(app: FastAPI, service: Service) -> None:
    """Add the OpenAPI routes. A thread generates the document on first use, because it takes almost a second."""
    lock = asyncio.Lock()

    @cache
    def make_openapi() -> dict[str, Any]:
        document = FastAPI.openapi(app)
        describe_limits(document, service)
        return document

    async def get_openapi(_: Request) -> Response:
        async with lock:
            return json_response(await asyncio.to_thread(make_openapi))

    app.openapi = make_openapi  # type: ignore[method-assign]
    # FastAPI's route would generate the document on the event loop.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != OPENAPI_PATH]
    for path in (OPENAPI_PATH, "/openapi.json"):
        app.add_route(path, get_openapi, include_in_schema=False)


def _add_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Add handlers that convert exceptions to JSON error responses in the route's format (LoRAX or OpenAI)."""

    @app.exception_handler(LoraxError)
    async def handle_lorax_error(request: Request, error: LoraxError) -> Response:
        return _reject(request, make_error_response(error, request.url.path))

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = first.get("ctx", {}).get("error", "unexpected end of input")
            return _reject(request, make_http_error(400, f"Failed to parse the request body as JSON: {reason}"))
        return _reject(request, make_validation_error(error.errors(), request.url.path))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        message = str(error.detail)
        allowed = find_methods(request.url.path, routes)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
            headers["allow"] = ", ".join(sorted(allowed))  # Starlette lists only the first matching route's methods
        if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI's JSON parser does not catch these
            message = f"Failed to parse the request body as JSON: {_describe_json_error(error.__cause__)}"
        return _reject(request, make_http_error(error.status_code, message, headers))

    @app.exception_handler(Exception)
    async def handle_unexpected_error(request: Request, error: Exception) -> Response:
        return make_error_response(error, request.url.path).to_response(request.url.path)


def _reject(request: Request, error_response: ErrorResponse) -> Response:
    """Return the error response for a request without a `RequestContext`, and store the error for the log."""
    request.state.error_response = error_response
    return error_response.to_response(request.url.path)


def _describe_json_error(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else "a number is too long"
