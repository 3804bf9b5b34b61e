"""Changes of adapters at one server, in the registry's order, whichever replica has answered them.

A replica follows its own changes too: of two that overlap, each replica would otherwise keep the one that it has made
last. Making a change twice does no harm. An adapter that its own server has just loaded is not resolved again: only the
admin's request had the token for it. The server makes changes of names and says what it knows; what is to be loaded and
pinned then is decided here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import aiohttp

from lorax_server.scale.registry import Entry
from lorax_server.scale.server_process import ReplicaError, ServerProcess, UnavailableServerError

logger = logging.getLogger(__name__)

RETRY_S = 0.5
TRIES = 20  # of a change, at a server that does not answer
NOT_YET = (UnavailableServerError, aiohttp.ClientError, TimeoutError)

Name = tuple[str, str]  # of an adapter: its source, and its name there
T = TypeVar("T")


class Pending(NamedTuple):
    """A load under way, and whether the adapter is to be pinned then: None leaves that as it is."""

    task: asyncio.Task[None]
    pin: bool | None
    known: str  # the identity that this server has loaded already; "": it has to resolve the name


class ChangeFollower:
    """Makes changes one after the other. Adapters are loaded beside that, and pinned in turn with changes."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self._server, self._name = server, name  # the replica's
        self.confirmed = 0  # the version of the last change that was made
        self._turn = asyncio.Lock()
        self._aliases: dict[str, Name] = {}  # as changes gave them: the server may be ahead
        self._loads: dict[Name, Pending] = {}

    async def make(self, entry: Entry) -> None:
        """Make a change, and confirm it: also one that this server refuses, since others have made it.

        Raise if the server does not answer for long: it is not confirmed, and is to be made again.
        """
        async with self._turn:
            meant = None if entry.is_load else self._aliases.get(entry.called)
            followed = await self._follow(entry, meant)
            if not entry.is_load:
                self._aliases.pop(entry.called, None)
            if followed is not None:
                name = meant or (followed["source"], followed["name"])
                if entry.is_load and entry.called:
                    self._aliases[entry.called] = name
                self._change_loads(entry, name, followed)
        self.confirmed = entry.version

    def close(self) -> None:
        for name in list(self._loads):
            self._cancel(name)

    async def _follow(self, entry: Entry, meant: Name | None) -> dict[str, Any] | None:
        """Return what the server says of a change; None if it refuses."""
        follow = partial(self._server.follow, entry.path, entry.body, meant, not self._is_own(entry))
        try:
            return await _try(follow, f"a change at {entry.path} is not made yet")
        except NOT_YET:
            raise
        except ReplicaError as error:
            logger.warning("a change at %s cannot be made here: %s", entry.path, error)
            return None

    def _is_own(self, entry: Entry) -> bool:
        return entry.answered_by == self._name

    def _change_loads(self, entry: Entry, name: Name, followed: dict[str, Any]) -> None:
        """Decide what is left to do: a pin that was asked for, and the load of what was here and another changed."""
        pending = self._cancel(name)
        if not entry.is_load:
            return
        pin, latest, is_own = followed["pin"], followed["latest"], self._is_own(entry)
        if pin is None and pending is not None:
            pin = pending.pin
        # What this server has loaded may be older than what another has, whose change has come before.
        known = latest if is_own and (pending is None or pending.known) else ""
        if pin is not None or (latest and not is_own):
            self._loads[name] = Pending(asyncio.create_task(self._load(name, known, pin)), pin, known)

    def _cancel(self, name: Name) -> Pending | None:
        """Give up a load that a later change of the same adapter has made needless, and return it."""
        pending = self._loads.pop(name, None)
        if pending is not None:
            pending.task.cancel()
        return pending

    async def _load(self, name: Name, known: str, pin: bool | None) -> None:
        """Load an adapter unless it is known, which may take long, and then pin it, if no change comes in between."""
        try:
            if not known or not await self._pin_known(name, known, pin):
                await self._pin(name, await self._server.load(name), pin)
        except (ReplicaError, aiohttp.ClientError, TimeoutError) as error:
            logger.warning("adapter %r was loaded by API, and cannot be loaded here: %s", name[1][:64], error)
        finally:
            if name in self._loads and self._loads[name].task is asyncio.current_task():
                del self._loads[name]

    async def _pin_known(self, name: Name, known: str, pin: bool | None) -> bool:
        """Pin an adapter unless what was known is gone, as after a restart; return whether it is done."""
        try:
            await _try(partial(self._pin, name, known, pin), f"adapter {name[1][:64]!r} is not pinned yet")
        except NOT_YET:
            raise
        except ReplicaError:
            return False
        return True

    async def _pin(self, name: Name, identity: str, pin: bool | None) -> None:
        async with self._turn:
            if pin is not None:
                await self._server.pin(name, identity, pin)


async def _try(ask: Callable[[], Awaitable[T]], not_yet: str) -> T:
    """Ask a server, and again for a while if it does not answer."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except NOT_YET as error:
            logger.warning("%s, trying again: %s", not_yet, error)
            await asyncio.sleep(RETRY_S)
    return await ask()
