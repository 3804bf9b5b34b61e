"""Change order, confirmations and stored changes."""

import asyncio

import pytest

from lorax_server.scale import change_registry as module
from lorax_server.scale.change_registry import LEASE_S, MAX_UNLOADS, ChangeRegistry, MissedUnloadError, RegistryEntry
from lorax_server.server.http.replica_protocol import AdapterChange


def load(name: str, alias: str = "", pin: bool | None = None) -> AdapterChange:
    return AdapterChange(True, "hub", name, alias, pin)


def unload(name: str, alias: str = "") -> AdapterChange:
    return AdapterChange(False, "hub", name, alias)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RegistryFixture:
    """A registry with a clock and stored changes."""

    def __init__(self, stored: bytes | None = None) -> None:
        self.clock, self.stored = Clock(), stored
        self.registry = ChangeRegistry(stored, self._save, self.clock)

    def _save(self, content: bytes) -> None:
        self.stored = content


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)


async def follow(registry_fixture: RegistryFixture, replica: str, count: int) -> list[str]:
    """Confirm `count` changes and return their adapters."""
    made, confirmed = list[str](), 0
    while len(made) < count:
        for entry in await registry_fixture.registry.poll(replica, confirmed, f"{replica}:1"):
            made.append(entry.change.name)
            confirmed = entry.version
    await registry_fixture.registry.poll(replica, confirmed, f"{replica}:1")
    return made


def test_change_completes_after_all_replicas_confirm() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        for name in ("a", "b", "c"):
            assert await registry_fixture.registry.join(name, 0, f"{name}:1") == []
        followers = [asyncio.create_task(follow(registry_fixture, name, 3)) for name in ("a", "b", "c")]
        for adapter in ("x", "y", "z"):
            assert await registry_fixture.registry.record(load(adapter)) == []
        assert [await follower for follower in followers] == [["x", "y", "z"]] * 3
        assert await registry_fixture.registry.members() == {"a": "a:1", "b": "b:1", "c": "c:1"}

    asyncio.run(run())


def test_replica_that_requested_change_must_confirm_it() -> None:
    """The replica could otherwise apply concurrent changes in a different order."""

    async def run() -> None:
        registry_fixture = RegistryFixture()
        await registry_fixture.registry.join("a", 0, "a:1")
        recording = asyncio.create_task(registry_fixture.registry.record(load("x")))
        (entry,) = await registry_fixture.registry.poll("a", 0, "a:1")
        assert not recording.done()
        await registry_fixture.registry.poll("a", entry.version, "a:1")
        assert await recording == []

    asyncio.run(run())


def test_changes_and_confirmations_are_notified_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notifications do not wait for the next poll."""
    monkeypatch.setattr(module, "POLL_S", 10_000.0)

    async def run() -> None:
        registry_fixture = RegistryFixture()
        polls = [asyncio.create_task(registry_fixture.registry.poll(name, 0, f"{name}:1")) for name in ("a", "b")]
        await asyncio.sleep(0)
        recording = asyncio.create_task(registry_fixture.registry.record(load("x"), "a"))
        news = [await poll for poll in polls]
        assert news == [[RegistryEntry(1, load("x"), "a")]] * 2
        later = [asyncio.create_task(registry_fixture.registry.poll(name, 1, f"{name}:1")) for name in ("a", "b")]
        assert await recording == []
        for poll in later:
            poll.cancel()

    asyncio.run(run())


def test_replica_with_expired_lease_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        await registry_fixture.registry.join("a", 0, "a:1")
        await registry_fixture.registry.join("silent", 0, "s:1")
        recording = asyncio.create_task(registry_fixture.registry.record(load("x")))
        await asyncio.sleep(0.03)
        assert not recording.done()
        registry_fixture.clock.now = LEASE_S + 1
        assert await recording == []
        # After it reconnects, it receives the missed changes.
        assert [entry.change.name for entry in await registry_fixture.registry.join("silent", 0, "s:1")] == ["x"]

    asyncio.run(run())


def test_unconfirmed_replica_is_returned_after_timeout() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        await registry_fixture.registry.join("late", 0, "l:1")
        recording = asyncio.create_task(registry_fixture.registry.record(load("x")))
        for _ in range(3):
            await registry_fixture.registry.poll("late", 0, "l:1")
        registry_fixture.clock.now = LEASE_S - 1
        await registry_fixture.registry.poll("late", 0, "l:1")
        assert not recording.done()
        registry_fixture.clock.now = module.CONFIRM_TIMEOUT_S + 1
        await registry_fixture.registry.join("late", 0, "l:1")
        assert await recording == ["late"]

    asyncio.run(run())


def test_later_load_replaces_earlier_across_restart() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        for change in (load("x", "my-x"), load("y"), load("z", "my-x"), unload("y")):
            await registry_fixture.registry.record(change)
        again = RegistryFixture(registry_fixture.stored)
        kept = await again.registry.join("b", 0, "b:1")
        assert kept == [RegistryEntry(3, load("z", "my-x")), RegistryEntry(4, unload("y"))]
        again.clock.now = LEASE_S + 1
        await again.registry.record(load("w"))
        last = RegistryFixture(again.stored)
        assert [entry.version for entry in await last.registry.join("c", 0, "c:1")] == [3, 4, 5]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("loaded", "unloaded"),
    [
        (load("x{}"), unload("x{}")),
        (load("x{}", pin=True), unload("x{}")),
        (load("x{}"), unload("x{}", "x{}")),  # local name in a request without a source
        (load("x", "my-{}", pin=True), unload("x", "my-{}")),
    ],
)
def test_only_recent_unloads_are_stored(loaded: AdapterChange, unloaded: AdapterChange) -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        await registry_fixture.registry.record(load("standing"))
        await record_pairs(registry_fixture, 3 * MAX_UNLOADS, loaded, unloaded)
        kept = await registry_fixture.registry.join("new", 0, "n:1")
        assert kept[0] == RegistryEntry(1, load("standing"))
        assert [entry.change.is_load for entry in kept[1:]] == [False] * MAX_UNLOADS
        assert kept[-1].version == 1 + 6 * MAX_UNLOADS  # a replica that has applied them all is up to date
        assert await RegistryFixture(registry_fixture.stored).registry.join("new", 0, "n:1") == kept

    asyncio.run(run())


async def record_pairs(
    registry_fixture: RegistryFixture, count: int, loaded: AdapterChange, unloaded: AdapterChange
) -> None:
    """Record load and unload pairs with numbered names."""
    for number in range(count):
        for change in (loaded, unloaded):
            numbered = change._replace(name=change.name.format(number), alias=change.alias.format(number))
            await registry_fixture.registry.record(numbered)


def test_unload_removes_alias_and_unpins_other_aliases() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        for change in (load("x", "first", pin=True), load("x", pin=True), load("x", "second", pin=True)):
            await registry_fixture.registry.record(change)
        await registry_fixture.registry.record(unload("x", "first"))
        await registry_fixture.registry.record(load("x", "third", pin=True))
        loads = [
            entry.change for entry in await registry_fixture.registry.join("new", 0, "n:1") if entry.change.is_load
        ]
        assert loads == [load("x", "second"), load("x", "third", pin=True)]

    asyncio.run(run())


def test_unload_applies_to_last_loaded_adapter() -> None:
    """Another replica may have assigned the alias to another adapter in the meantime."""

    async def run() -> None:
        registry_fixture = RegistryFixture()
        await registry_fixture.registry.record(load("old", "mine"))
        await registry_fixture.registry.record(load("new", "mine", pin=True))
        await registry_fixture.registry.record(unload("old", "mine"))
        assert await registry_fixture.registry.join("b", 0, "b:1") == [RegistryEntry(3, unload("new", "mine"))]

    asyncio.run(run())


def test_late_replica_receives_unloads() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        await record_pairs(registry_fixture, 2 * MAX_UNLOADS, load("x{}"), unload("x{}"))
        behind = 2 * MAX_UNLOADS + 2  # version of the oldest stored unload
        missed = await registry_fixture.registry.poll("behind", behind, "b:1")
        assert [entry.change.name for entry in missed] == [f"x{n}" for n in range(MAX_UNLOADS + 1, 2 * MAX_UNLOADS)]

    asyncio.run(run())


def test_late_replica_receives_unload_before_reload() -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        for change in (load("x", pin=True), unload("x"), load("x")):
            await registry_fixture.registry.record(change)
        missed = await registry_fixture.registry.poll("behind", 1, "b:1")
        assert [entry.change for entry in missed] == [unload("x"), load("x")]

    asyncio.run(run())


@pytest.mark.parametrize("confirmed", [0, 1])
def test_replica_that_missed_unload_gets_error(confirmed: int) -> None:
    async def run() -> None:
        registry_fixture = RegistryFixture()
        await record_pairs(registry_fixture, MAX_UNLOADS + 1, load("x{}"), unload("x{}"))
        for registry in (registry_fixture.registry, RegistryFixture(registry_fixture.stored).registry):
            with pytest.raises(MissedUnloadError, match="replica late is more than 100 unloads behind"):
                await registry.poll("late", confirmed, "l:1")

    asyncio.run(run())
