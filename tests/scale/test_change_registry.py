"""The order of changes, who has to confirm them, and what is kept of them."""

import asyncio
import json
from typing import Any

import pytest

from lorax_server.scale import registry as module
from lorax_server.scale.registry import LEASE_S, MAX_UNLOADS, ChangeRegistry, Entry, MissedUnloadError

LOAD, UNLOAD = "/v1/adapters/load", "/v1/adapters/unload"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A registry, its clock, and what it has stored."""

    def __init__(self, stored: bytes | None = None) -> None:
        self.clock, self.stored = Clock(), stored
        self.registry = ChangeRegistry(stored, self._save, self.clock)

    def _save(self, content: bytes) -> None:
        self.stored = content


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)


def body(name: str) -> dict[str, Any]:
    return {"adapter_id": name, "name": f"my-{name}"}


async def follow(world: World, replica: str, count: int) -> list[str]:
    """Confirm changes until there were `count`, and return their bodies' ids."""
    made, confirmed = list[str](), 0
    while len(made) < count:
        for entry in await world.registry.poll(replica, confirmed, f"{replica}:1"):
            made.append(entry.body["adapter_id"])
            confirmed = entry.version
    await world.registry.poll(replica, confirmed, f"{replica}:1")
    return made


def test_a_change_is_made_when_all_have_confirmed_it() -> None:
    async def run() -> None:
        world = World()
        for name in ("a", "b", "c"):
            assert await world.registry.join(name, 0, f"{name}:1") == []
        followers = [asyncio.create_task(follow(world, name, 3)) for name in ("a", "b", "c")]
        for adapter in ("x", "y", "z"):
            assert await world.registry.record(LOAD, body(adapter)) == []
        assert [await follower for follower in followers] == [["x", "y", "z"]] * 3
        assert world.registry.members() == {"a": "a:1", "b": "b:1", "c": "c:1"}

    asyncio.run(run())


def test_the_replica_that_has_answered_confirms_too() -> None:
    """Else it could keep its own change where another came before that one in the order."""

    async def run() -> None:
        world = World()
        await world.registry.join("a", 0, "a:1")
        recording = asyncio.create_task(world.registry.record(LOAD, body("x")))
        (entry,) = await world.registry.poll("a", 0, "a:1")
        assert not recording.done()
        await world.registry.poll("a", entry.version, "a:1")
        assert await recording == []

    asyncio.run(run())


def test_a_replica_hears_of_a_change_at_once_and_so_does_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the next time that somebody asks."""
    monkeypatch.setattr(module, "POLL_S", 10_000.0)

    async def run() -> None:
        world = World()
        polls = [asyncio.create_task(world.registry.poll(name, 0, f"{name}:1")) for name in ("a", "b")]
        await asyncio.sleep(0)
        recording = asyncio.create_task(world.registry.record(LOAD, body("x"), "a"))
        news = [await poll for poll in polls]
        assert news == [[Entry(1, LOAD, body("x"), "a")]] * 2
        later = [asyncio.create_task(world.registry.poll(name, 1, f"{name}:1")) for name in ("a", "b")]
        assert await recording == []
        for poll in later:
            poll.cancel()

    asyncio.run(run())


def test_a_token_is_kept_nowhere() -> None:
    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, {**body("x"), "api_token": "hf_secret"})
        (entry,) = await world.registry.join("a", 0, "a:1")
        assert entry.body == body("x")
        assert world.stored is not None
        assert b"secret" not in world.stored
        assert b"api_token" not in world.stored

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "content", "called"),
    [
        (LOAD, {"adapter_id": "x", "name": "mine"}, "mine"),
        (LOAD, {"adapter_id": "x"}, ""),
        (LOAD, {"adapter_id": "x", "adapter_source": "hub", "name": "mine"}, "mine"),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "x"}, "mine"),
        (UNLOAD, {"adapter_id": "mine"}, "mine"),
        (UNLOAD, {"adapter_id": "x", "adapter_source": "hub"}, ""),
        ("/v1/unload_lora_adapter", {"lora_name": "mine"}, "mine"),
    ],
)
def test_the_name_that_comes_and_goes(path: str, content: dict[str, Any], called: str) -> None:
    assert Entry(1, path, content).called == called


def test_a_replica_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        world = World()
        await world.registry.join("a", 0, "a:1")
        await world.registry.join("silent", 0, "s:1")
        recording = asyncio.create_task(world.registry.record(LOAD, body("x")))
        await asyncio.sleep(0.03)
        assert not recording.done()
        world.clock.now = LEASE_S + 1
        assert await recording == []
        # It comes back, and gets what it has missed.
        assert [entry.body["adapter_id"] for entry in await world.registry.join("silent", 0, "s:1")] == ["x"]

    asyncio.run(run())


def test_a_replica_that_polls_and_does_not_confirm_is_named() -> None:
    async def run() -> None:
        world = World()
        await world.registry.join("late", 0, "l:1")
        recording = asyncio.create_task(world.registry.record(LOAD, body("x")))
        for _ in range(3):
            await world.registry.poll("late", 0, "l:1")
        world.clock.now = LEASE_S - 1
        await world.registry.poll("late", 0, "l:1")
        assert not recording.done()
        world.clock.now = module.CONFIRM_S + 1
        await world.registry.join("late", 0, "l:1")
        assert await recording == ["late"]

    asyncio.run(run())


def test_only_what_still_matters_is_kept_and_versions_go_on_after_a_restart() -> None:
    async def run() -> None:
        world = World()
        for path, name in ((LOAD, "x"), (LOAD, "y"), (LOAD, "x"), (UNLOAD, "y")):
            await world.registry.record(path, body(name))
        again = World(world.stored)
        kept = await again.registry.join("b", 0, "b:1")
        assert [(entry.version, entry.path, entry.body["adapter_id"]) for entry in kept] == [
            (3, LOAD, "x"),
            (4, UNLOAD, "y"),
        ]
        await again.registry.leave("b")
        await again.registry.record(LOAD, body("z"))
        last = World(again.stored)
        assert [entry.version for entry in await last.registry.join("c", 0, "c:1")] == [3, 4, 5]

    asyncio.run(run())


def test_a_name_that_was_removed_stays_so_after_a_restart() -> None:
    """An adapter may be unloaded by the name that it was given, which another request calls its id."""

    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, {"adapter_id": "x", "name": "mine"})
        await world.registry.record(UNLOAD, {"adapter_id": "mine"})
        await world.registry.record(LOAD, body("y"))
        kept = await World(world.stored).registry.join("b", 0, "b:1")
        assert [(entry.path, entry.body["adapter_id"]) for entry in kept] == [
            (LOAD, "x"),
            (UNLOAD, "mine"),
            (LOAD, "y"),
        ]

    asyncio.run(run())


def test_names_of_both_kinds_of_requests_are_the_same_subject() -> None:
    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, {"adapter_id": "x", "name": "mine"})
        await world.registry.record("/v1/unload_lora_adapter", {"lora_name": "mine"})
        kept = await world.registry.join("b", 0, "b:1")
        assert [entry.path for entry in kept] == ["/v1/unload_lora_adapter"]

    asyncio.run(run())


def test_entries_of_an_older_version_are_read_and_lose_their_tokens() -> None:
    old = [[3, LOAD, body("a") | {"api_token": "secret"}, "the replica that made it"], [5, UNLOAD, body("b"), ""]]
    world = World(json.dumps(old).encode())
    assert world.stored is not None
    assert b"secret" not in world.stored
    entries = asyncio.run(world.registry.join("one", 3, "one:1"))
    assert entries == [Entry(5, UNLOAD, body("b"))]
    assert asyncio.run(World(world.stored).registry.join("one", 0, "one:1"))[0] == Entry(3, LOAD, body("a"))


Pair = tuple[str, dict[str, Any], str, dict[str, Any]]
PAIRS: list[Pair] = [
    (LOAD, {"adapter_id": "x{}"}, UNLOAD, {"adapter_id": "x{}"}),
    (LOAD, {"adapter_id": "x{}", "pin": True}, UNLOAD, {"adapter_id": "x{}", "adapter_source": "hub"}),
    (LOAD, {"adapter_id": "x", "name": "my-{}", "pin": True}, UNLOAD, {"adapter_id": "my-{}"}),
    (
        "/v1/load_lora_adapter",
        {"lora_name": "my-{}", "lora_path": "x"},
        "/v1/unload_lora_adapter",
        {"lora_name": "my-{}"},
    ),
]


def numbered(content: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: value.format(number) if isinstance(value, str) else value for name, value in content.items()}


async def record_pairs(world: World, count: int, pair: Pair) -> None:
    load_path, load, unload_path, unload = pair
    for number in range(count):
        await world.registry.record(load_path, numbered(load, number))
        await world.registry.record(unload_path, numbered(unload, number))


@pytest.mark.parametrize("pair", PAIRS)
def test_old_unloads_are_dropped_with_their_loads(pair: Pair) -> None:
    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, body("standing"))
        await record_pairs(world, 3 * MAX_UNLOADS, pair)
        kept = await world.registry.join("new", 0, "n:1")
        assert len(kept) <= 1 + 2 * MAX_UNLOADS
        assert kept[0] == Entry(1, LOAD, body("standing"))
        assert sum(not entry.is_load for entry in kept) == MAX_UNLOADS
        assert kept[-1].version == 1 + 6 * MAX_UNLOADS  # a replica that has made them all is up to date
        again = World(world.stored)
        assert await again.registry.join("new", 0, "n:1") == kept

    asyncio.run(run())


def test_unloads_stored_by_an_older_version_are_dropped() -> None:
    old = [[version, UNLOAD, {"adapter_id": f"x{version}"}, ""] for version in range(1, 2001)]
    world = World(json.dumps(old).encode())
    kept = asyncio.run(world.registry.join("new", 0, "n:1"))
    assert [entry.version for entry in kept] == list(range(2001 - MAX_UNLOADS, 2001))


def test_a_dropped_unload_leaves_other_aliases_unpinned() -> None:
    """An unload unpins its adapter under every name, and removes only its own name."""

    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, {"adapter_id": "x", "name": "first", "pin": True})
        await world.registry.record(LOAD, {"adapter_id": "x", "pin": True})
        await world.registry.record(LOAD, {"adapter_id": "x", "name": "second", "pin": True})
        await world.registry.record(UNLOAD, {"adapter_id": "first"})
        await world.registry.record(LOAD, {"adapter_id": "x", "name": "third", "pin": True})
        await record_pairs(world, MAX_UNLOADS, (LOAD, {"adapter_id": "y{}"}, UNLOAD, {"adapter_id": "y{}"}))
        loads = [entry for entry in await world.registry.join("new", 0, "n:1") if entry.is_load]
        assert [entry.body for entry in loads] == [
            {"adapter_id": "x", "name": "second"},
            {"adapter_id": "x", "name": "third", "pin": True},
        ]

    asyncio.run(run())


def test_a_replica_that_is_behind_still_gets_unloads() -> None:
    async def run() -> None:
        world = World()
        await record_pairs(world, 2 * MAX_UNLOADS, PAIRS[0])
        behind = 2 * MAX_UNLOADS + 2  # it has made the first unload that is still kept
        missed = await world.registry.poll("behind", behind, "b:1")
        unloads = [entry.body["adapter_id"] for entry in missed if not entry.is_load]
        assert unloads == [f"x{number}" for number in range(MAX_UNLOADS + 1, 2 * MAX_UNLOADS)]

    asyncio.run(run())


def test_an_unload_reaches_a_replica_that_is_behind_after_the_name_is_loaded_again() -> None:
    async def run() -> None:
        world = World()
        await world.registry.record(LOAD, {"adapter_id": "x", "pin": True})
        await world.registry.record(UNLOAD, {"adapter_id": "x"})
        await world.registry.record(LOAD, {"adapter_id": "x"})
        missed = await world.registry.poll("behind", 1, "b:1")
        assert [entry.path for entry in missed] == [UNLOAD, LOAD]

    asyncio.run(run())


@pytest.mark.parametrize("confirmed", [0, 1])
def test_a_replica_that_missed_a_dropped_unload_is_told(confirmed: int) -> None:
    async def run() -> None:
        world = World()
        await record_pairs(world, MAX_UNLOADS + 1, PAIRS[0])
        for registry in (world.registry, World(world.stored).registry):
            with pytest.raises(MissedUnloadError, match="replica late is more than 100 unloads behind"):
                await registry.poll("late", confirmed, "l:1")

    asyncio.run(run())
