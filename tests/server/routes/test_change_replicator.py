"""Changes at a server that does not answer, and that come before a load is done. `test_pair.py` has real servers."""

import asyncio
from typing import Any

import pytest

from lorax_server.scale import follower as module
from lorax_server.scale.follower import ChangeFollower, Name
from lorax_server.scale.registry import Entry
from lorax_server.scale.server_process import ReplicaError, UnavailableServerError

LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"


class AbsentServer:
    """Answers to changes once it is there."""

    def __init__(self) -> None:
        self.is_there, self.meant = True, list[Name | None]()

    async def follow(self, _path: str, _body: dict[str, Any], meant: Name | None, _forgets: bool) -> dict[str, Any]:
        if not self.is_there:
            raise UnavailableServerError("it does not answer")
        self.meant.append(meant)
        return {"source": "local", "name": "json", "pin": None, "latest": ""}


def test_a_change_that_is_not_made_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made when the server is there again, of the adapter that its name meant."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def run() -> None:
        server: Any = AbsentServer()
        follower, unload = ChangeFollower(server, "one"), Entry(2, UNLOAD, {"adapter_id": "mine"})
        await follower.make(Entry(1, LOAD, {"adapter_id": "json", "name": "mine"}))
        server.is_there = False
        for _ in range(2):
            with pytest.raises(UnavailableServerError):
                await follower.make(unload)
            assert follower.confirmed == 1
        server.is_there = True
        await follower.make(unload)
        assert follower.confirmed == 2
        assert server.meant == [None, ("local", "json")]

    asyncio.run(run())


class LoadingServer:
    """Loads when it is told to. It knows the versions of an adapter that it has loaded, and remembers the last one."""

    def __init__(self, known: set[str], latest: str) -> None:
        self.may_load, self.num_loads = asyncio.Event(), 0
        self.known, self.latest, self.pinned = known, latest, dict[str, bool]()
        self.forgets = list[bool]()

    async def follow(self, _path: str, body: dict[str, Any], _meant: Name | None, forgets: bool) -> dict[str, Any]:
        self.forgets.append(forgets)
        return {"source": "local", "name": "json", "pin": body.get("pin"), "latest": self.latest}

    async def load(self, _name: Name) -> str:
        self.num_loads += 1
        await self.may_load.wait()
        self.known.add("found")
        return "found"

    async def pin(self, _name: Name, identity: str, pin: bool) -> None:
        if identity not in self.known:
            raise ReplicaError("it is not known here any more")
        self.pinned[identity] = pin


def load(version: int, answered_by: str = "", **body: Any) -> Entry:
    return Entry(version, LOAD, {"adapter_id": "json", **body}, answered_by)


@pytest.mark.parametrize(
    ("changes", "known", "latest", "pinned", "num_loads"),
    [
        ([load(1, pin=True)], [], "", {"found": True}, 1),
        ([load(1, "one", pin=True)], ["own"], "own", {"own": True}, 0),
        ([load(1, "one", pin=False)], ["own"], "own", {"own": False}, 0),
        # What nobody has asked for here is left to the first request; what was here is loaded again.
        ([load(1)], [], "", {}, 0),
        ([load(1)], ["old"], "old", {}, 1),
        ([load(1, "one")], ["own"], "own", {}, 0),
        ([load(1), load(2, "one")], ["own"], "own", {}, 1),
        # A change without a pin leaves that of a load under way.
        ([load(1, pin=True), load(2, name="mine")], [], "", {"found": True}, 2),
        ([load(1, pin=True), load(2, "one", name="mine")], ["own"], "own", {"found": True}, 2),
        ([load(1, pin=True), load(2, pin=False)], [], "", {"found": False}, 2),
        # What this server has loaded may be older than what another has loaded before, in the order of all.
        ([load(1, pin=True), load(2, "one", pin=True)], ["own"], "own", {"found": True}, 2),
        # The engine has forgotten what it had loaded, and so has the server.
        ([load(1, "one", pin=True)], [], "own", {"found": True}, 1),
        ([load(1, "one", pin=True)], [], "", {"found": True}, 1),
        ([load(1, pin=True), Entry(2, UNLOAD, {"adapter_id": "json"})], [], "", {}, 1),
    ],
)
def test_changes_while_a_load_is_under_way(
    changes: list[Entry], known: list[str], latest: str, pinned: dict[str, bool], num_loads: int
) -> None:
    async def run() -> None:
        server: Any = LoadingServer(set(known), latest)
        follower = ChangeFollower(server, "one")
        for change in changes:
            await follower.make(change)
            await asyncio.sleep(0)  # a load begins
        server.may_load.set()
        await asyncio.gather(*(pending.task for pending in follower._loads.values()))
        assert server.pinned == pinned
        assert server.num_loads == num_loads
        assert server.forgets == [change.answered_by != "one" for change in changes]
        assert not follower._loads

    asyncio.run(run())


def test_two_own_changes_in_a_row_do_not_resolve_again() -> None:
    """They may come before the first one's pin: only the admin's requests had the token."""

    async def run() -> None:
        server: Any = LoadingServer({"own"}, "own")
        follower = ChangeFollower(server, "one")
        for change in (load(1, "one", pin=True), load(2, "one", name="mine")):
            await follower.make(change)
        await asyncio.gather(*(pending.task for pending in follower._loads.values()))
        assert server.pinned == {"own": True}
        assert server.num_loads == 0

    asyncio.run(run())


def test_a_pin_waits_for_a_server_that_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is not resolved again: only the admin's request had the token for it."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)

    async def run() -> None:
        server: Any = LoadingServer({"own"}, "own")
        pin, refusals = server.pin, iter(range(3))

        async def pin_later(name: Name, identity: str, is_pinned: bool) -> None:
            if next(refusals, None) is not None:
                raise UnavailableServerError("the engine begins again")
            await pin(name, identity, is_pinned)

        server.pin = pin_later
        follower = ChangeFollower(server, "one")
        await follower.make(load(1, "one", pin=True))
        while follower._loads:
            await asyncio.sleep(0)
        assert (server.pinned, server.num_loads) == ({"own": True}, 0)

    asyncio.run(run())
