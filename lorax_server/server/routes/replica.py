"""Routes by which a replica on Ray speaks to its own server: the adapters it has, and changes made elsewhere.

They are there only for a server that is a replica, and open only to its key, which no client knows.
"""

import asyncio
import logging
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lorax_server.engine.adapters.entry import State
from lorax_server.errors import ForbiddenError, InputError, LoraxError
from lorax_server.server.access.keys import REPLICA, Key
from lorax_server.server.access.model_names import HUB_NAME, Choice
from lorax_server.server.routes.adapters import load_adapter, unload_adapter
from lorax_server.server.routes.openai_schemas import AdapterRequest, LoadRequest, VllmLoadRequest, VllmUnloadRequest
from lorax_server.server.service import MAX_ASKED, Service
from lorax_server.server.workers.changes import NameAdded

logger = logging.getLogger(__name__)

CLIENT_HEADER = "x-lorax-client"  # the ingress sets it, and drops a client's
MAX_REPORTED = 2 * MAX_ASKED  # adapters, those found last
TIERS = {State.DEVICE.value: "device", State.LOADING.value: "device", State.HOST.value: "host"}
TIERS |= {State.DISK.value: "disk", State.PREPARING.value: "disk"}


class ClientAddress:
    """Takes the client's address from the ingress, by which callers without a key are told apart."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = Headers(scope=scope).get(CLIENT_HEADER) if scope["type"] == "http" else None
        await self._app({**scope, "client": (address, 0)} if address else scope, receive, send)


class FollowRequest(BaseModel):
    """A change that another replica has made: the path and the body of the admin's request."""

    path: str
    body: dict[str, Any]


def make_router(service: Service) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    loads: set[asyncio.Task[None]] = set()

    def check(http: Request) -> Key:
        key = service.keys.identify(http.headers.get("authorization"))
        if key.name != REPLICA:
            raise ForbiddenError("only the replica that this server belongs to may do this")
        return key

    @router.get("/replica/state")
    async def state(http: Request) -> Response:
        """Tell what a router and an autoscaler need to know."""
        check(http)
        content = msgspec.json.encode(await describe_state(service))
        return Response(content, media_type="application/json")

    @router.post("/replica/follow")
    async def follow(http: Request, body: FollowRequest) -> Response:
        """Make a change that another replica has made. Adapters are loaded later: the next request for a name that is
        forgotten here resolves it anew."""
        key = check(http)
        choice, pin = await follow_change(service, key, body)
        if choice is not None:
            task = asyncio.create_task(_load_later(service, key, choice, pin))
            loads.add(task)
            task.add_done_callback(loads.discard)
        return Response()

    return router


async def describe_state(service: Service) -> dict[str, Any]:
    status, info = await service.engine.status(), service.engine.info
    return {
        "is_draining": service.is_draining,
        "running": status.running,
        "waiting": status.waiting + status.waiting_for_adapters,
        "tokens": (status.num_blocks - status.free_blocks) * info.block_size,
        "on_device": status.adapters_on_device,
        "evictions": status.adapters_evicted_from_device,
        "names": await _list_names(service),
    }


async def _list_names(service: Service) -> dict[str, list[str]]:
    """List the names of adapters by where they are: each adapter by all names that requests may give it."""
    seen, listed = service.seen, dict[str, list[str]]()
    aliases: dict[Any, list[str]] = {}
    for alias, named in service.model_names.aliases.items():
        aliases.setdefault(named, []).append(alias)
    identities = seen.newest(MAX_REPORTED)
    for start in range(0, len(identities), MAX_ASKED):
        for state in await service.engine.list_adapters(identities[start : start + MAX_ASKED]):
            names = [name for name in seen.names(state.identity) if seen.latest(name) == state.identity]
            for name in names:
                tier = TIERS.get(state.state, "broken")
                listed.setdefault(tier, []).extend((name.name, *aliases.get(name, ())))
    for name in seen.failed_names():
        listed.setdefault("broken", []).extend((name.name, *aliases.get(name, ())))
    return listed


async def follow_change(service: Service, key: Key, change: FollowRequest) -> tuple[Choice | None, bool | None]:
    """Make a change to names. Return the adapter to load after it, and whether to pin it."""
    names, pin, body = service.model_names, None, change.body
    match change.path:
        case "/v1/adapters/load":
            load = LoadRequest.model_validate(body)
            choice, alias, pin = names.find(load.adapter_id, load.adapter_source, load.api_token), load.name, load.pin
        case "/v1/load_lora_adapter":
            added = VllmLoadRequest.model_validate(body)
            is_hub = HUB_NAME.fullmatch(added.lora_path) and service.config.engine.sources.hub
            choice, alias = names.find(added.lora_path, "hub" if is_hub else "local"), added.lora_name
        case "/v1/adapters/unload":
            unload = AdapterRequest.model_validate(body)
            await _unload(service, key, unload.adapter_id, unload.adapter_source)
            return None, None
        case "/v1/unload_lora_adapter":
            await _unload(service, key, VllmUnloadRequest.model_validate(body).lora_name, None)
            return None, None
        case _:
            raise InputError(f"there is nothing to follow at {change.path[:64]!r}")
    (ref,), (name,) = choice.refs, choice.names
    was_used = bool(service.seen.identities(name))
    await service.engine.forget(ref.source, ref.name)
    if alias:
        await service.change(NameAdded(alias, ref.source, ref.name))
    return (choice if pin or was_used else None), pin


async def _unload(service: Service, key: Key, adapter_id: str, source: str | None) -> None:
    try:
        await unload_adapter(service, key, adapter_id, source)
    except LoraxError as error:  # it may be here by another name, or not at all
        logger.info("adapter %r was unloaded elsewhere; here: %s", adapter_id[:64], error)


async def _load_later(service: Service, key: Key, choice: Choice, pin: bool | None) -> None:
    try:
        await load_adapter(service, key, choice, pin)
    except LoraxError as error:  # `load_adapter` has noted it, and requests for it get the error
        logger.warning("adapter %r was loaded elsewhere, and cannot be here: %s", choice.label[:64], error)
