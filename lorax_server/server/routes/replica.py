"""Routes by which a replica's Ray actor controls its server. `ReplicaAccess` keeps clients out."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorax_server.errors import LoraxError
from lorax_server.server.http.problems import json_response
from lorax_server.server.http.replica_protocol import AdapterChange
from lorax_server.server.routes.change_replicator import ChangeReplicator
from lorax_server.server.service import MAX_ASKED, Service
from lorax_server.types import AdapterStage

MAX_REPORTED = 2 * MAX_ASKED  # adapters, the most recently resolved ones
TIERS = {AdapterStage.DEVICE.value: "device", AdapterStage.LOADING.value: "device", AdapterStage.HOST.value: "host"}
TIERS |= {AdapterStage.DISK.value: "disk", AdapterStage.PREPARING.value: "disk"}


def make_control_app(service: Service) -> Starlette:
    """Make the application for requests of the actor. They need no API key, and work while the server drains."""
    replicator = ChangeReplicator(service)

    async def state(_: Request) -> Response:
        """Describe the load for the autoscaler, and adapter locations for the request router."""
        status, info = await service.engine.status(), service.engine.info
        content = {
            "is_draining": service.is_draining,
            "running": status.running,
            "waiting": status.waiting + status.waiting_for_adapters,
            "tokens": (status.num_blocks - status.free_blocks) * info.block_size,
            "on_device": status.adapters_on_device,
            "evictions": status.adapters_evicted_from_device,
            "names": await _list_names(service),
        }
        return json_response(content)

    async def apply_change(http: Request) -> Response:
        """Apply a load or unload. Respond before the adapter is loaded."""
        body = await http.json()
        await replicator.apply(AdapterChange(**body["change"]), body["is_own"])
        return Response()

    async def fail(_: Request, error: Exception) -> Response:
        return Response(str(error), 503)

    routes = [Route("/replica/state", state), Route("/replica/changes", apply_change, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers={LoraxError: fail})


async def _list_names(service: Service) -> dict[str, list[str]]:
    """List adapters by tier, each under every name and alias that requests may use."""
    seen, listed = service.adapter_index, dict[str, list[str]]()
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
