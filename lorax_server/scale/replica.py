"""A Ray Serve replica, which starts a server process, monitors it and applies adapter changes."""

import asyncio
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve

from lorax_server import __version__
from lorax_server.scale.change_registry import (
    LEASE_S,
    MissedUnloadError,
    RegistryEntry,
    get_or_create_registry,
    get_or_create_secret,
)
from lorax_server.scale.ray_router import pack_report
from lorax_server.scale.server_process import ReplicaError, ServerProcess

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.5
WATCH_INTERVAL_S = 0.2


class ServerReplica:
    """The Ray actor for one replica. Requests bypass the actor and go directly to the server process."""

    async def __init__(self, flags: Sequence[str], app: str, version: str, host: str = "") -> None:  # type: ignore[misc] # Ray awaits it
        check_version(version)
        self._name = serve.get_replica_context().replica_id.unique_id
        secret = await asyncio.to_thread(get_or_create_secret, app)
        self._server = ServerProcess(flags, host or ray.util.get_node_ip_address(), secret)
        self._confirmed = 0  # version of the last adapter change that the server has applied
        self._tasks: list[asyncio.Task[None]] = []
        try:
            await self._server.wait_until_ready()
            self._registry = get_or_create_registry(app)
            while entries := await self._registry.join.remote(self._name, self._confirmed, self._server.address):
                await self._apply(entries)
        except BaseException:
            await self._server.stop()
            raise
        self._tasks = [
            asyncio.create_task(work()) for work in (self._apply_changes, self._renew_lease, self._exit_with_server)
        ]

    # --- Ray Serve hooks ----------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the server address, which the ingress needs."""
        return {"address": self._server.address}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the adapters in each tier, which the request routers need."""
        state = await self._server.read_state()
        return pack_report(state["names"], is_full=state["evictions"] > 0)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of waiting requests and the number of tokens in running sequences.

        `ray_app.QueueAndTokenPolicy` uses both.
        """
        state = await self._server.read_state()
        return {"waiting": state["waiting"], "tokens": state["tokens"]}

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_server"):
            await self._server.stop()

    # --- Background tasks ---------------------------------------------------------------------------------------------

    async def _exit_with_server(self) -> None:
        """Exit if the server process exits, so that Ray replaces the replica immediately."""
        while self._server.is_running:
            await asyncio.sleep(WATCH_INTERVAL_S)
        logger.error("exiting because the server process has stopped: %s", self._server.last_log_lines())
        os._exit(1)

    async def _apply_changes(self) -> None:
        """Poll the registry and apply adapter changes. While the registry is unavailable, adapters stay unchanged."""
        while True:
            try:
                await self._apply(await self._registry.poll.remote(self._name, self._confirmed, self._server.address))
            except MissedUnloadError as error:
                logger.error("exiting because the replica may serve unloaded adapters: %s", error)
                os._exit(1)
            except Exception as error:  # the task must survive, or later changes are lost
                logger.warning("cannot read or apply adapter changes, retrying: %r", error)
                await asyncio.sleep(RETRY_DELAY_S)

    async def _apply(self, entries: Iterable[RegistryEntry]) -> None:
        for entry in entries:
            await self._server.apply(entry.change, is_own=entry.served_by == self._name)
            self._confirmed = entry.version

    async def _renew_lease(self) -> None:
        """Renew the lease periodically, even while a slow change is applied."""
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with suppress(ray.exceptions.RayError):
                await self._registry.join.remote(self._name, self._confirmed, self._server.address)


def check_version(built_version: str) -> None:
    if built_version != __version__:
        raise ReplicaError(
            f"this machine has lorax_server {__version__}, but the application was built with {built_version}; "
            "install the same version on all machines"
        )
