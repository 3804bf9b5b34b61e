"""A replica: one whole server, watched, reported on and kept up to date by an actor of Ray Serve."""

import asyncio
import logging
import os
from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle

from lorax_server import __version__
from lorax_server.scale.follower import RETRY_S, ChangeFollower
from lorax_server.scale.placement import hash_name
from lorax_server.scale.registry import LEASE_S, MissedUnloadError, find_registry, share_key
from lorax_server.scale.server_process import Order, ReplicaError, ServerProcess

logger = logging.getLogger(__name__)

TIERS = ("device", "host", "disk", "broken")
MAX_REPORTED = 2048  # adapters of each tier in a report: every router gets all reports
WATCH_S = 0.2


class ServerReplica:
    """An actor with a server of its own. Requests go to the server, past the actor."""

    async def __init__(self, order: Order, app: str, version: str, host: str = "") -> None:  # type: ignore[misc] # Ray awaits it
        check_version(version)
        self._name = serve.get_replica_context().replica_id.unique_id
        ingress_key = await asyncio.to_thread(share_key, app)
        self._server = ServerProcess(order, host or ray.util.get_node_ip_address(), ingress_key)
        self._address = f"{self._server.host}:{self._server.port}"
        self._most = 0  # adapters on the device at once so far
        self._follower = ChangeFollower(self._server, self._name)
        try:
            await self._server.wait_until_ready()
            self._registry: ActorHandle = find_registry(app)
            while entries := await self._registry.join.remote(self._name, self._follower.confirmed, self._address):
                for entry in entries:
                    await self._follower.make(entry)
        except BaseException:
            await self._server.stop()
            raise
        self._following = asyncio.create_task(self._follow())
        self._renewing = asyncio.create_task(self._renew())
        self._watching = asyncio.create_task(self._watch())

    # --- Hooks of Ray Serve -------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tell where the server listens, for the ingress."""
        return {"host": self._server.host, "port": self._server.port, "pid": self._server.pid}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Tell which adapters are here, as sorted hashes of their names, for routers."""
        state = await self._server.read_state()
        self._most = max(self._most, state["on_device"])
        report: dict[str, Any] = {tier: _pack(state["names"].get(tier, ())) for tier in TIERS}
        # How many adapters fit is known once one had to leave.
        report["capacity"] = self._most if state["evictions"] else None
        report["is_draining"] = state["is_draining"]
        return report

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell how much there is to do, for `scale.autoscaling`."""
        state = await self._server.read_state()
        return {"waiting": state["waiting"], "tokens": state["tokens"]}

    async def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            self._following.cancel()
            self._renewing.cancel()
            self._watching.cancel()
            self._follower.close()
            self._registry.leave.remote(self._name)
        if hasattr(self, "_server"):
            await self._server.stop()

    async def _watch(self) -> None:
        """End with the server, so that Ray puts another replica in its place at once."""
        while self._server.is_running:
            await asyncio.sleep(WATCH_S)
        logger.error("the replica's server has ended, and so does the replica")
        os._exit(1)

    # --- Adapters that were loaded by API -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Make all changes. Without a registry this replica goes on with what it knows."""
        while True:
            try:
                for entry in await self._registry.poll.remote(self._name, self._follower.confirmed, self._address):
                    await self._follower.make(entry)
            except MissedUnloadError as error:
                logger.error("this replica may have adapters that were unloaded, so Ray replaces it: %s", error)
                os._exit(1)
            except ray.exceptions.RayError as error:
                logger.warning("the registry of adapters cannot be reached, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
            except Exception:  # without this task no later change would be made, and nobody would know
                logger.exception("a change of adapters could not be made, trying again")
                await asyncio.sleep(RETRY_S)

    async def _renew(self) -> None:
        """Tell the registry that this replica is there, also while it makes a change that takes long."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(ray.exceptions.RayError):
                await self._registry.join.remote(self._name, self._follower.confirmed, self._address)


def check_version(built: str) -> None:
    if built != __version__:
        raise ReplicaError(
            f"this machine has lorax_server {__version__}, and the application was built with {built}: install the "
            "same version on all machines"
        )


def _pack(names: Iterable[str]) -> bytes:
    """Write hashes of names, the newest of too many. Sorted, since only a report that has changed is passed on."""
    return array("Q", sorted({hash_name(name) for name in list(names)[:MAX_REPORTED]})).tobytes()
