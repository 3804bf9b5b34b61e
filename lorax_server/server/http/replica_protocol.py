"""The protocol between a Ray deployment and its replica servers.

All processes of a deployment share one random secret. A replica's server rejects requests without this secret, and
trusts the client address in `CLIENT_HEADER` because only the ingress can have sent it.
"""

import hmac
import json
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorax_server.errors import ForbiddenError
from lorax_server.server.http.error_responses import make_error_response

SECRET_HEADER = "x-lorax-secret"  # the deployment's secret, on every request to a replica's server
CLIENT_HEADER = "x-lorax-client"  # the client address, on every request that the ingress forwards
CHANGE_HEADER = "x-lorax-change"  # an `AdapterChange` as JSON, on responses to loads and unloads
# Paths of requests that change adapters on all replicas.
CHANGE_PATHS = ("/v1/adapters/load", "/v1/adapters/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
CONTROL_PREFIX = "/replica/"  # prefix of the routes for the replica's actor


class AdapterChange(NamedTuple):
    """An adapter load or unload that a client requested, as resolved by the server that processed the request."""

    is_load: bool
    source: str
    name: str
    alias: str = ""  # the alias that the load assigns or that the unload removes
    pin: bool | None = None  # None leaves the pin as it is


class ReplicaAccess:
    """ASGI middleware that accepts requests only from the ingress and from the replica's actor.

    Requests without a client address come from the actor and may use the routes of the `control` application.
    """

    def __init__(self, app: ASGIApp, secret: str, control: ASGIApp) -> None:
        self._app, self._secret, self._control = app, secret.encode(), control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_headers, path = Headers(scope=scope), scope["path"]
        client = request_headers.get(CLIENT_HEADER)
        if not hmac.compare_digest(request_headers.get(SECRET_HEADER, "").encode(), self._secret):
            error = ForbiddenError("this server is a replica; send requests to the address of the deployment")
            await make_error_response(error, path).to_response(path)(scope, receive, send)
            return
        if client is None and path.startswith(CONTROL_PREFIX):
            await self._control(scope, receive, send)
            return
        internal_headers = (SECRET_HEADER.encode(), CLIENT_HEADER.encode())
        headers = [pair for pair in scope["headers"] if pair[0] not in internal_headers]
        scope = {**scope, "headers": headers, "state": scope.get("state", {})}
        if client:
            scope["client"] = (client, 0)

        async def send_with_change(message: Message) -> None:
            change = scope["state"].get("adapter_change")
            if message["type"] == "http.response.start" and change is not None:
                MutableHeaders(scope=message)[CHANGE_HEADER] = json.dumps(change._asdict())
            await send(message)

        await self._app(scope, receive, send_with_change)
