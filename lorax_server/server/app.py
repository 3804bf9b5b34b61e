"""The routes put together: one ASGI application around a `Service`."""

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute

from lorax_server import __version__
from lorax_server.errors import LoraxError
from lorax_server.server.http.cors import Cors
from lorax_server.server.http.middleware import RequestMiddleware, methods_at
from lorax_server.server.http.problems import Problem, describe, describe_shape, http_problem, json_response
from lorax_server.server.http.replica_protocol import ReplicaAccess
from lorax_server.server.openapi import describe_limits
from lorax_server.server.routes import adapters, chat, completions, info, lorax, playground, replica
from lorax_server.server.routes.responses import route as responses
from lorax_server.server.service import Service

OPENAPI_PATH = "/api-doc/openapi.json"
DESCRIPTION = "Many fine-tuned models from one base model: name a LoRA adapter in your request."


def make_app(service: Service, address: str = "") -> FastAPI:
    """Make the application. `address` is that of the socket, where there is one."""
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
    for module in (lorax, completions, chat, responses, info, adapters, playground):
        router = module.make_router(service)
        app.include_router(router)
        routes += router.routes
    app.add_route("/openapi.json", lambda _: json_response(app.openapi()), include_in_schema=False)
    _add_handlers(app, routes)
    app.openapi = partial(_make_openapi, app, service)  # type: ignore[method-assign]
    app.add_middleware(RequestMiddleware, routes=routes, service=service, address=address)
    app.add_middleware(Cors, **vars(service.config.cors))
    if service.config.replica_secret:
        app.add_middleware(
            ReplicaAccess, secret=service.config.replica_secret, control=replica.make_control_app(service)
        )
    return app


def _make_openapi(app: FastAPI, service: Service) -> dict[str, Any]:
    """Generate the OpenAPI document when it is first requested: it takes longer than the rest of the application."""
    if app.openapi_schema is None:
        FastAPI.openapi(app)
        describe_limits(app, service)
    assert app.openapi_schema is not None
    return app.openapi_schema


def _add_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer errors as JSON, in the form that the route's clients expect."""

    @app.exception_handler(LoraxError)
    async def refuse(http: Request, error: LoraxError) -> Response:
        return _refuse(http, describe(error, http.url.path))

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(http: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = first.get("ctx", {}).get("error", "it is cut off")
            return _refuse(http, http_problem(400, f"Failed to parse the request body as JSON: {reason}"))
        return _refuse(http, describe_shape(error.errors(), http.url.path))

    @app.exception_handler(HTTPException)
    async def refuse_http(http: Request, error: HTTPException) -> Response:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        message = str(error.detail)
        allowed = methods_at(http.url.path, routes)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
            headers["allow"] = ", ".join(sorted(allowed))  # of all routes with this path, not only of the first
        if isinstance(error.__cause__, ValueError | RecursionError):  # that FastAPI's parser of JSON lets through
            message = f"Failed to parse the request body as JSON: {_reason(error.__cause__)}"
        return _refuse(http, http_problem(error.status_code, message, headers))

    @app.exception_handler(Exception)
    async def fail(http: Request, error: Exception) -> Response:
        return describe(error, http.url.path).response(http.url.path)


def _refuse(http: Request, problem: Problem) -> Response:
    """Answer a request that is refused outside of an `RequestContext`. `RequestMiddleware` logs it."""
    http.state.problem = problem
    return problem.response(http.url.path)


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number is too long"
