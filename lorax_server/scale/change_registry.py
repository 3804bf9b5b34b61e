"""Orders adapter loads and unloads, so that all replicas apply them in the same order.

`ChangeRegistry` numbers the changes and does not use Ray. `RegistryActor` runs it as a detached Ray actor and stores
the changes in Ray's key-value store.
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

from lorax_server.server.http.replica_protocol import AdapterChange

STORE_NAMESPACE = "lorax_server"  # Ray namespace for actors and stored keys
POLL_S = 1.0  # longest wait for changes in one poll
LEASE_S = 5.0  # a replica that does not call for this long is considered dead
CONFIRM_TIMEOUT_S = 30.0
MAX_UNLOADS = 100  # unloads stored for replicas that are behind; new replicas do not need them


class MissedUnloadError(Exception):
    """Raised if a replica is so far behind that the registry no longer stores all unloads that it has missed."""


class RegistryEntry(NamedTuple):
    """An adapter load or unload, with its version number in the registry."""

    version: int
    change: AdapterChange
    served_by: str = ""  # the replica that processed the request

    @property
    def key(self) -> tuple[str, ...]:
        """The alias, or the source and name. A later load with the same key replaces an earlier load."""
        return (self.change.alias,) if self.change.alias else (self.change.source, self.change.name)


class ReplicaLease(NamedTuple):
    """A replica's address, last applied change and time of last contact."""

    confirmed_version: int  # version of the last change that the replica has applied
    seen_at: float
    address: str


class ChangeRegistry:
    """Stores current loads, recent unloads, and the leases of all replicas."""

    def __init__(self, stored: bytes | None, save: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        rows = json.loads(stored or b"[]")
        entries = [RegistryEntry(version, AdapterChange(*change), served_by) for version, change, served_by in rows]
        self._loads = {entry.key: entry for entry in entries if entry.change.is_load}
        self._unloads = [entry for entry in entries if not entry.change.is_load]
        self._version = max((entry.version for entry in entries), default=0)
        self._save, self._clock = save, clock
        self._members: dict[str, ReplicaLease] = {}
        self._condition = asyncio.Condition()

    def _entries_after(self, version: int) -> list[RegistryEntry]:
        return sorted(entry for entry in (*self._loads.values(), *self._unloads) if entry.version > version)

    # --- Replicas -----------------------------------------------------------------------------------------------------

    async def join(self, replica: str, confirmed_version: int, address: str) -> list[RegistryEntry]:
        """Register a replica or renew its lease. Return the changes that it has not applied yet."""
        self._members[replica] = ReplicaLease(confirmed_version, self._clock(), address)
        await self._notify()
        return self._entries_after(confirmed_version)

    async def poll(self, replica: str, confirmed_version: int, address: str) -> list[RegistryEntry]:
        """Record that a replica has applied all changes up to `confirmed_version`, and wait for newer changes.

        Raise MissedUnloadError if the replica may have missed unloads that are no longer stored.
        """
        if len(self._unloads) == MAX_UNLOADS and confirmed_version < self._unloads[0].version:
            raise MissedUnloadError(f"replica {replica} is more than {MAX_UNLOADS} unloads behind")
        await self.join(replica, confirmed_version, address)
        await self._wait_until(lambda: self._version > confirmed_version)
        return self._entries_after(confirmed_version)

    async def members(self) -> dict[str, str]:
        """Return the addresses of all live replicas, keyed by replica name."""
        return {name: member.address for name, member in self._live_members().items()}

    def _live_members(self) -> dict[str, ReplicaLease]:
        oldest = self._clock() - LEASE_S
        self._members = {name: member for name, member in self._members.items() if member.seen_at > oldest}
        return self._members

    async def _notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait up to `POLL_S` for a condition. The wait is limited because an expired lease does not trigger
        an event.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S), self._condition:
                await self._condition.wait_for(condition)

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def record(self, change: AdapterChange, served_by: str = "") -> list[str]:
        """Record a change and wait until all replicas have applied it. Return the names of late replicas.

        The replica that processed the request also applies the change, so that the order is the same on all replicas.
        """
        self._version += 1
        entry = RegistryEntry(self._version, change, served_by)
        if change.is_load:
            self._loads[entry.key] = entry
        else:
            self._record_unload(entry)
        self._save(json.dumps(self._entries_after(0)).encode())
        await self._notify()
        deadline = self._clock() + CONFIRM_TIMEOUT_S
        while (late := self._find_late_replicas(entry.version)) and self._clock() < deadline:
            await self._wait_until(lambda: not self._find_late_replicas(entry.version))
        return late

    def _record_unload(self, entry: RegistryEntry) -> None:
        """Store an unload. Remove loads of its alias and adapter name, and unpin the adapter under other aliases."""
        removed = self._loads.pop(entry.key, None)
        if removed is not None:  # a later load may have assigned the alias to another adapter
            change = entry.change._replace(source=removed.change.source, name=removed.change.name)
            entry = entry._replace(change=change)
        adapter = (entry.change.source, entry.change.name)
        self._loads.pop(adapter, None)
        for key, load in self._loads.items():
            if (load.change.source, load.change.name) == adapter:
                self._loads[key] = load._replace(change=load.change._replace(pin=None))
        self._unloads = [*self._unloads, entry][-MAX_UNLOADS:]

    def _find_late_replicas(self, version: int) -> list[str]:
        return [name for name, member in self._live_members().items() if member.confirmed_version < version]


class RegistryActor(ChangeRegistry):
    """A Ray actor that runs a `ChangeRegistry` and stores its changes in Ray."""

    def __init__(self, app: str) -> None:
        key = f"registry:{app}".encode()
        stored = _internal_kv_get(key, namespace=STORE_NAMESPACE)
        super().__init__(
            stored, lambda content: _internal_kv_put(key, content, namespace=STORE_NAMESPACE), time.monotonic
        )


def get_or_create_registry(app: str) -> ActorHandle:
    """Return the deployment's registry, and start it if necessary. The handle stays valid if the registry restarts."""
    options: dict[str, Any] = {"name": f"{STORE_NAMESPACE}:{app}", "namespace": STORE_NAMESPACE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    registry: ActorHandle = ray.remote(RegistryActor).options(max_concurrency=10_000, **options).remote(app)
    return registry


def get_or_create_secret(app: str) -> str:
    """Return the deployment's shared secret from Ray's store, and create it if necessary."""
    name = f"secret:{app}".encode()
    _internal_kv_put(name, secrets.token_urlsafe(32).encode(), overwrite=False, namespace=STORE_NAMESPACE)
    secret: bytes = _internal_kv_get(name, namespace=STORE_NAMESPACE)
    return secret.decode()
