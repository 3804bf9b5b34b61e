"""The adapters that were loaded by API, and the replicas that have to know of them.

`ChangeRegistry` decides, without Ray: it puts all changes in one order, and a change is made when every replica has
confirmed it. `RegistryActor` is the one of an application: a detached actor with a name, which Ray starts again if it
dies, and which keeps its changes in Ray's own store.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from lorax_server.errors import EngineError

logger = logging.getLogger(__name__)

LOAD_PATHS = ("/v1/adapters/load", "/v1/load_lora_adapter")
ADMIN_PATHS = (*LOAD_PATHS, "/v1/adapters/unload", "/v1/unload_lora_adapter")
TOKEN = "api_token"  # for an adapter's source: it belongs to the caller, and is kept nowhere
STORE = "lorax_server"  # our part of Ray's store
POLL_S = 1.0  # the longest that a replica waits for news before it asks again
LEASE_S = 5.0  # a replica that has not asked for so long is taken for dead
CONFIRM_S = 30.0
MAX_UNLOADS = 100  # kept for replicas that are behind; a new replica has nothing to unload
REACH_S = 5.0  # to find the actor, and to get an answer that needs no other replica


class RegistryError(EngineError):
    """A registry that cannot be reached, or replicas that did not confirm."""

    retry_after_s = 1.0


class MissedUnloadError(Exception):
    """A replica is so far behind that the registry may have dropped an unload that the replica needs."""


class Entry(NamedTuple):
    """A change by API: the path and the body of an admin's request that one replica has answered with success."""

    version: int
    path: str
    body: dict[str, Any]
    answered_by: str = ""  # the replica that has made it already; "" after a restart of the registry

    @property
    def is_load(self) -> bool:
        return self.path in LOAD_PATHS

    @property
    def called(self) -> str:
        """The name that a load gives, or that an unload may take away; "" if there is none."""
        body = self.body
        if self.is_load:
            return str(body.get("lora_name") or body.get("name") or "")
        return "" if body.get("adapter_source") else str(body.get("lora_name") or body.get("adapter_id"))

    @property
    def subject(self) -> tuple[str, ...]:
        """The name that it is about: of two entries with the same, the later one is enough."""
        body = self.body
        if "lora_name" in body:
            return "alias", str(body["lora_name"])
        if body.get("name"):
            return "alias", str(body["name"])
        return "id", str(body.get("adapter_source")), str(body.get("adapter_id"))

    @property
    def adapter_id(self) -> str:
        """The adapter ID, or the alias where an unload names an adapter by its alias."""
        body = self.body
        return str(body.get("adapter_id") or body.get("lora_path") or body.get("lora_name"))

    def has_same_adapter(self, other: "Entry") -> bool:
        """Return True if both entries name the same adapter. An entry without a source matches any source."""
        sources = {each.body.get("adapter_source") for each in (self, other)} - {None}
        return self.adapter_id == other.adapter_id and len(sources) < 2


class Member(NamedTuple):
    """A replica that follows."""

    confirmed: int  # the version that it has made
    seen_at: float
    address: str


class ChangeRegistry:
    """All changes that still matter, in their order, and the replicas that follow."""

    def __init__(self, stored: bytes | None, save: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        # Entries of older versions may hold a token, which is given up here.
        entries = [Entry(fields[0], fields[1], _keep(fields[2])) for fields in json.loads(stored or b"[]")]
        self._entries = _drop_old_unloads(entries)
        self._version = max((entry.version for entry in entries), default=0)
        self._save, self._clock = save, clock
        if entries:
            self._save(json.dumps(self._entries).encode())
        self._members: dict[str, Member] = {}
        self._news = asyncio.Condition()

    # --- Replicas -----------------------------------------------------------------------------------------------------

    async def join(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        """Let a replica follow from now on, and return what it still has to make before it takes requests."""
        self._members[replica] = Member(confirmed, self._clock(), address)
        return [entry for entry in self._entries if entry.version > confirmed]

    async def poll(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        """Note that a replica has made all changes up to a version, and return the next ones when there are any.

        Raise MissedUnloadError if the replica is behind the oldest of `MAX_UNLOADS` unloads: older ones are gone.
        """
        async with self._news:
            unloads = [entry.version for entry in self._entries if not entry.is_load]
            if len(unloads) == MAX_UNLOADS and confirmed < unloads[0]:
                raise MissedUnloadError(f"replica {replica} is more than {MAX_UNLOADS} unloads behind")
            self._members[replica] = Member(confirmed, self._clock(), address)
            self._news.notify_all()
            try:
                async with asyncio.timeout(POLL_S):
                    await self._news.wait_for(lambda: self._version > confirmed)
            except TimeoutError:
                return []
            return [entry for entry in self._entries if entry.version > confirmed]

    async def leave(self, replica: str) -> None:
        async with self._news:
            self._members.pop(replica, None)
            self._news.notify_all()

    def members(self) -> dict[str, str]:
        """Return the addresses of the replicas that follow."""
        self._drop_dead()
        return {name: member.address for name, member in self._members.items()}

    # --- Changes ------------------------------------------------------------------------------------------------------

    async def record(self, path: str, body: Mapping[str, Any], answered_by: str = "") -> list[str]:
        """Record a change, and return when all replicas have made it. Return those that have not in time.

        Also the replica that has answered takes it in turn, so that the last change of a name is the same for all.
        """
        async with self._news:
            self._version += 1
            entry = Entry(self._version, path, _keep(body), answered_by)
            # Only loads are replaced: an unload must still reach replicas that are behind.
            kept = [other for other in self._entries if other.subject != entry.subject or not other.is_load]
            self._entries = _drop_old_unloads([*kept, entry])
            self._save(json.dumps(self._entries).encode())
            self._news.notify_all()
        deadline = self._clock() + CONFIRM_S
        while (late := self._find_late(entry)) and self._clock() < deadline:
            async with self._news:
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._news.wait()
                except TimeoutError:
                    continue
        return late

    def _find_late(self, entry: Entry) -> list[str]:
        self._drop_dead()
        return [name for name, member in self._members.items() if member.confirmed < entry.version]

    def _drop_dead(self) -> None:
        now = self._clock()
        self._members = {name: each for name, each in self._members.items() if now - each.seen_at < LEASE_S}


def _drop_old_unloads(entries: list[Entry]) -> list[Entry]:
    """Drop all but the latest unloads, and what they undid, so that a new replica does not need them."""
    unloads = [entry for entry in entries if not entry.is_load]
    for unload in unloads[:-MAX_UNLOADS]:
        entries = _apply_unload(unload, entries)
    return entries


def _apply_unload(unload: Entry, entries: list[Entry]) -> list[Entry]:
    """Remove an unload from the entries, with the alias that it removed and the pins of its adapter."""
    before = [entry for entry in entries if entry.is_load and entry.version < unload.version]
    removed = [entry for entry in before if entry.called and entry.called == unload.called]
    unpinned = [entry for entry in before if any(map(entry.has_same_adapter, (unload, *removed)))]
    gone = [unload, *removed, *(entry for entry in unpinned if not entry.called)]
    return [_unpin(entry) if entry in unpinned else entry for entry in entries if entry not in gone]


def _unpin(entry: Entry) -> Entry:
    return entry._replace(body={name: entry.body[name] for name in entry.body if name != "pin"})


def _keep(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in body if name != TOKEN}


class RegistryActor:
    """The registry of an application, as an actor."""

    def __init__(self, app: str) -> None:
        key = f"registry:{app}".encode()
        stored = _internal_kv_get(key, namespace=STORE)
        self._registry = ChangeRegistry(
            stored, lambda content: _internal_kv_put(key, content, namespace=STORE), time.monotonic
        )

    async def join(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        return await self._registry.join(replica, confirmed, address)

    async def poll(self, replica: str, confirmed: int, address: str) -> list[Entry]:
        return await self._registry.poll(replica, confirmed, address)

    async def leave(self, replica: str) -> None:
        await self._registry.leave(replica)

    async def members(self) -> dict[str, str]:
        return self._registry.members()

    async def record(self, path: str, body: dict[str, Any], answered_by: str = "") -> list[str]:
        return await self._registry.record(path, body, answered_by)


def find_registry(app: str) -> ActorHandle:
    """Find an application's registry, or start it."""
    actor = ray.remote(RegistryActor)
    options: dict[str, Any] = {"name": f"{STORE}:{app}", "namespace": STORE, "lifetime": "detached"}
    options |= {"get_if_exists": True, "num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    found: ActorHandle = actor.options(max_concurrency=10_000, **options).remote(app)
    return found


def share_key(app: str) -> str:
    """Return the key by which an application's ingress shows its replicas who it is: the first to ask makes it."""
    name = f"ingress:{app}".encode()
    _internal_kv_put(name, secrets.token_urlsafe(32).encode(), overwrite=False, namespace=STORE)
    key: bytes = _internal_kv_get(name, namespace=STORE)
    return key.decode()


def end_registry(app: str) -> None:
    """End an application's registry. Its changes stay in Ray's store as long as that is there."""
    ray.kill(ray.get_actor(f"{STORE}:{app}", namespace=STORE))
