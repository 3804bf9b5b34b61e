"""Adapter changes by API, in one order for all replicas.

`ChangeRegistry` works without Ray: it numbers all changes, and a change is complete when every replica has confirmed
it. `RegistryActor` is the registry of a deployment: a detached, named actor that Ray restarts if it dies, and that
stores the changes in Ray's key-value store.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from lorax_server.errors import EngineError
from lorax_server.server.http.replica_protocol import AdapterChange

STORE = "lorax_server"  # our namespace in Ray's store
POLL_S = 1.0  # the longest time that a poll waits for changes
LEASE_S = 5.0  # a replica that has not called for this long is considered dead
CONFIRM_S = 30.0
MAX_UNLOADS = 100  # kept for replicas that are behind; a new replica has nothing to unload


class RegistryError(EngineError):
    """The registry cannot be reached, or replicas did not confirm a change."""

    retry_after_s = 1.0


class MissedUnloadError(Exception):
    """A replica is so far behind that the registry may have dropped an unload that the replica needs."""


class Entry(NamedTuple):
    """A numbered change."""

    version: int
    change: AdapterChange
    served_by: str = ""  # the replica that has processed the request

    @property
    def key(self) -> tuple[str, ...]:
        """The alias or the adapter. A later load with the same key replaces an earlier one."""
        return (self.change.alias,) if self.change.alias else (self.change.source, self.change.name)


class Member(NamedTuple):
    """A replica that applies changes."""

    confirmed: int  # the version that it has applied
    seen_at: float
    address: str


class ChangeRegistry:
    """Loads that are in effect, the latest unloads, and the replicas that apply them."""

    def __init__(self, stored: bytes | None, save: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        rows = json.loads(stored or b"[]")
        entries = [Entry(version, AdapterChange(*change), served_by) for version, change, served_by in rows]
        self._loads = {entry.key: entry for entry in entries if entry.change.is_load}
        self._unloads = [entry for entry in entries if not entry.change.is_load]
        self._version = max((entry.version for entry in entries), default=0)
        self._save, self._clock = save, clock
        self._members: dict[str, Member] = {}
        self._news = asyncio.Condition()

    def _entries_after(self, version: int) -> list[Entry]:
        return sorted(entry for entry in (*self._loads.values(), *self._unloads) if entry.version > version)

    # --- Replicas -----------------------------------------------------------------------------------------------------

    async def join(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        """Register a replica or renew its lease. Return the changes that it has to apply before it takes requests."""
        self._members[replica] = Member(confirmed, self._clock(), address)
        await self._notify()
        return self._entries_after(confirmed)

    async def poll(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        """Record that a replica has applied all changes up to a version, and wait for the next ones.

        Raise MissedUnloadError if the replica is behind the oldest of `MAX_UNLOADS` unloads: older ones are gone.
        """
        if len(self._unloads) == MAX_UNLOADS and confirmed < self._unloads[0].version:
            raise MissedUnloadError(f"replica {replica} is more than {MAX_UNLOADS} unloads behind")
        await self.join(replica, confirmed, address)
        await self._wait_until(lambda: self._version > confirmed)
        return self._entries_after(confirmed)

    async def leave(self, replica: str) -> None:
        self._members.pop(replica, None)
        await self._notify()

    async def members(self) -> dict[str, str]:
        """Return the addresses of all live replicas."""
        return {name: member.address for name, member in self._live_members().items()}

    def _live_members(self) -> dict[str, Member]:
        oldest = self._clock() - LEASE_S
        self._members = {name: member for name, member in self._members.items() if member.seen_at > oldest}
        return self._members

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, at most `POLL_S`: no notification is sent when a lease expires."""
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S), self._news:
                await self._news.wait_for(condition)

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def record(self, change: AdapterChange, served_by: str = "") -> list[str]:
        """Record a change, wait until all replicas have applied it, and return the replicas that have not in time.

        The replica that has processed the request applies the change too, so that all replicas end with the same one.
        """
        self._version += 1
        entry = Entry(self._version, change, served_by)
        if change.is_load:
            self._loads[entry.key] = entry
        else:
            self._unload(entry)
        self._save(json.dumps(self._entries_after(0)).encode())
        await self._notify()
        deadline = self._clock() + CONFIRM_S
        while (late := self._find_late(entry.version)) and self._clock() < deadline:
            await self._wait_until(lambda: not self._find_late(entry.version))
        return late

    def _unload(self, entry: Entry) -> None:
        """Undo loads: remove the alias and the adapter's own name, and unpin the adapter under other aliases."""
        removed = self._loads.pop(entry.key, None)
        if removed is not None:  # the alias may have been loaded for another adapter since the request was processed
            meant = entry.change._replace(source=removed.change.source, name=removed.change.name)
            entry = entry._replace(change=meant)
        adapter = (entry.change.source, entry.change.name)
        self._loads.pop(adapter, None)
        for key, load in self._loads.items():
            if (load.change.source, load.change.name) == adapter:
                self._loads[key] = load._replace(change=load.change._replace(pin=None))
        self._unloads = [*self._unloads, entry][-MAX_UNLOADS:]

    def _find_late(self, version: int) -> list[str]:
        return [name for name, member in self._live_members().items() if member.confirmed < version]


class RegistryActor(ChangeRegistry):
    """The registry of a deployment, as an actor."""

    def __init__(self, app: str) -> None:
        key = f"registry:{app}".encode()
        stored = _internal_kv_get(key, namespace=STORE)
        super().__init__(stored, lambda content: _internal_kv_put(key, content, namespace=STORE), time.monotonic)


def find_registry(app: str) -> ActorHandle:
    """Return the handle of a deployment's registry; the first caller starts it. It stays valid when Ray restarts it."""
    options: dict[str, Any] = {"name": f"{STORE}:{app}", "namespace": STORE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    registry: ActorHandle = ray.remote(RegistryActor).options(max_concurrency=10_000, **options).remote(app)
    return registry


def share_secret(app: str) -> str:
    """Return the secret of a deployment from Ray's store; the first caller creates it."""
    name = f"secret:{app}".encode()
    _internal_kv_put(name, secrets.token_urlsafe(32).encode(), overwrite=False, namespace=STORE)
    secret: bytes = _internal_kv_get(name, namespace=STORE)
    return secret.decode()
