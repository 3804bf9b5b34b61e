"""`ChangeReplicator` during loads and engine restarts. `tests/scale/test_two_servers.py` uses real servers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lorax_server.errors import AdapterNotFoundError, EngineError
from lorax_server.server.access.model_names import AdapterKey
from lorax_server.server.http.replica_protocol import AdapterChange
from lorax_server.server.routes import replica as module
from lorax_server.server.routes.replica import ChangeReplicator

NAME = AdapterKey("local", "json")
OWN, OTHER = True, False


class FakeServer:
    """Fakes the functions that load and pin adapters. Loads finish when `may_load` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: set[str], latest: str) -> None:
        self.may_load, self.num_loads, self.num_failures = asyncio.Event(), 0, 0
        self.known, self.latest, self.pinned = known, latest, dict[str, bool]()
        self.forgotten = 0
        for function in (self.load_adapter, self.pin_adapter, self.unload_adapter):
            monkeypatch.setattr(module, function.__name__, function)
        monkeypatch.setattr(module, "LOAD_RETRY_S", 0.0)
        service: Any = SimpleNamespace(
            engine=SimpleNamespace(forget=self.forget),
            adapter_index=SimpleNamespace(latest_identity=lambda name: self.latest),  # noqa: ARG005
            model_names=SimpleNamespace(
                select_adapter=lambda *name: name, add_alias=lambda *_: None, remove_alias=lambda *_: None
            ),
        )
        self.replicator = ChangeReplicator(service)

    async def forget(self, *name: str) -> None:
        assert name == NAME
        self.forgotten += 1

    async def load_adapter(self, *_: Any) -> str:
        self.num_loads += 1
        await self.may_load.wait()
        self.known.add("found")
        return "found"

    async def pin_adapter(self, _service: Any, identity: str, _name: AdapterKey, pin: bool) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineError("the engine restarts")
        if identity not in self.known:
            raise AdapterNotFoundError("it is not known any more")
        self.pinned[identity] = pin

    async def unload_adapter(self, *_: Any) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineError("the engine restarts")
        raise AdapterNotFoundError("it is not loaded")

    async def finish(self) -> None:
        self.may_load.set()
        while self.replicator._loads:
            await asyncio.sleep(0)


def load(alias: str = "", pin: bool | None = None) -> AdapterChange:
    return AdapterChange(True, *NAME, alias, pin)


UNLOAD = AdapterChange(False, *NAME)


@pytest.mark.parametrize(
    ("changes", "known", "latest", "pinned", "num_loads"),
    [
        ([(load(pin=True), OTHER)], [], "", {"found": True}, 1),
        ([(load(pin=True), OWN)], ["own"], "own", {"own": True}, 0),
        ([(load(pin=False), OWN)], ["own"], "own", {"own": False}, 0),
        # Adapters not used on this server are loaded by the first request. Older versions are replaced.
        ([(load(), OTHER)], [], "", {}, 0),
        ([(load(), OTHER)], ["old"], "old", {}, 1),
        ([(load(), OWN)], ["own"], "own", {}, 0),
        ([(load(), OTHER), (load(), OWN)], ["own"], "own", {}, 1),
        # A change without a pin keeps the pin of a pending load.
        ([(load(pin=True), OTHER), (load("mine"), OTHER)], [], "", {"found": True}, 2),
        ([(load(pin=True), OTHER), (load("mine"), OWN)], ["own"], "own", {"found": True}, 2),
        ([(load(pin=True), OTHER), (load(pin=False), OTHER)], [], "", {"found": False}, 2),
        # This server's version may be older than the version of another server's earlier change.
        ([(load(pin=True), OTHER), (load(pin=True), OWN)], ["own"], "own", {"found": True}, 2),
        # The engine has lost the adapter.
        ([(load(pin=True), OWN)], [], "own", {"found": True}, 1),
        ([(load(pin=True), OWN)], [], "", {"found": True}, 1),
        ([(load(pin=True), OTHER), (UNLOAD, OTHER)], [], "", {}, 1),
    ],
)
def test_changes_result_in_expected_pins_and_loads(
    monkeypatch: pytest.MonkeyPatch,
    changes: list[tuple[AdapterChange, bool]],
    known: list[str],
    latest: str,
    pinned: dict[str, bool],
    num_loads: int,
) -> None:
    async def run() -> None:
        server = FakeServer(monkeypatch, set(known), latest)
        for change, is_own in changes:
            await server.replicator.apply(change, is_own)
            await asyncio.sleep(0)  # a load starts
        await server.finish()
        assert server.pinned == pinned
        assert server.num_loads == num_loads
        assert server.forgotten == sum(change.is_load and not is_own for change, is_own in changes)

    asyncio.run(run())


def test_consecutive_own_changes_do_not_resolve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second change may arrive before the first is pinned. Only the admin's requests had the access token."""

    async def run() -> None:
        server = FakeServer(monkeypatch, {"own"}, "own")
        for change in (load(pin=True), load("mine")):
            await server.replicator.apply(change, OWN)
        await server.finish()
        assert (server.pinned, server.num_loads) == ({"own": True}, 0)

    asyncio.run(run())


def test_pin_is_retried_during_engine_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is not resolved again, because only the admin's request had the access token."""

    async def run() -> None:
        server = FakeServer(monkeypatch, {"own"}, "own")
        server.num_failures = 3
        await server.replicator.apply(load(pin=True), OWN)
        await server.finish()
        assert (server.pinned, server.num_loads) == ({"own": True}, 0)

    asyncio.run(run())


def test_change_raises_only_if_engine_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = FakeServer(monkeypatch, set(), "")
        server.num_failures = 1
        with pytest.raises(EngineError):
            await server.replicator.apply(UNLOAD, OTHER)
        await server.replicator.apply(UNLOAD, OTHER)

    asyncio.run(run())
