"""Fetched adapters on the disk: versions that leave, versions that stay, and leftovers of interrupted work."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from filelock import FileLock
from safetensors.torch import save
from torch import zeros

from lorax_server import build
from lorax_server.adapters.sources import remote
from lorax_server.adapters.sources.disk_budget import (
    IN_USE_S,
    DiskBudget,
    find_in_use_s,
    mark_downloaded,
    mark_of,
    mark_used,
)
from lorax_server.adapters.sources.finder import AdapterFinder
from lorax_server.adapters.sources.hub import HubSource
from lorax_server.adapters.sources.source import AdapterSources
from lorax_server.adapters.weights import StoredAdapter
from lorax_server.config import SourceConfig
from lorax_server.engine.adapters.resolver import AdapterResolver
from lorax_server.errors import AdapterError, SourceError
from lorax_server.types import AdapterRef
from tests.adapters.sources.adapters import ADAPTER, WEIGHTS, check_contents, fetch
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import Fault, Reply, running

MB = 10**6
LATER = IN_USE_S + 1


class Clock:
    """A clock far ahead of files just written, so that only versions that a test marks are in use."""

    def __init__(self) -> None:
        self.now: float = 10**9 + 10**6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def place(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def put(root: Path, name: str, used_at: float, num_bytes: int = MB, file: str = WEIGHTS) -> Path:
    """Write a version as a source leaves it."""
    folder = root / place(name) / "snapshots" / "version"
    blob = root / place(name) / "blobs" / file
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"")
    os.truncate(blob, num_bytes)
    if blob.suffix != ".part":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(blob)
    mark_downloaded(folder)
    os.utime(mark_of(folder), (used_at, used_at))
    return folder


def blob_of(root: Path, name: str, suffix: str = "") -> Path:
    return root / place(name) / "blobs" / f"{WEIGHTS}{suffix}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s3"


def make_budget(tmp_path: Path, clock: Clock, max_bytes: int | None = 5 * MB) -> DiskBudget:
    budget = DiskBudget(tmp_path, max_bytes, now=clock)
    budget.add(tmp_path / "s3")
    return budget


def names_left(root: Path, *names: str) -> list[str]:
    return [name for name in names if (root / place(name)).exists()]


# --- which leave


def test_the_longest_unused_leave_first(tmp_path: Path, root: Path, clock: Clock) -> None:
    for index, name in enumerate("cabd"):
        put(root, name, 1000.0 + index)
    with make_budget(tmp_path, clock).room_for("adapter", 2 * MB):
        # Remove some more than needed: keep 90 %, which include the two that are coming.
        assert names_left(root, *"abcd") == ["b", "d"]


def test_nothing_leaves_while_there_is_room(tmp_path: Path, root: Path, clock: Clock) -> None:
    for name in "abc":
        put(root, name, 1000.0)
    with make_budget(tmp_path, clock).room_for("adapter", 2 * MB):
        assert names_left(root, *"abc") == ["a", "b", "c"]


def test_a_version_that_was_used_a_moment_ago_stays(tmp_path: Path, root: Path, clock: Clock) -> None:
    for index, name in enumerate("abcd"):
        put(root, name, 1000.0 + index)
    mark = mark_of(root / place("a") / "snapshots" / "version")
    os.utime(mark, (clock.now - 1, clock.now - 1))
    with make_budget(tmp_path, clock).room_for("adapter", 3 * MB):
        assert names_left(root, *"abcd") == ["a"]


def test_a_version_whose_time_is_in_the_future_does_not_stay_for_ever(tmp_path: Path, root: Path, clock: Clock) -> None:
    put(root, "a", clock.now + 10**6, 4 * MB)
    with make_budget(tmp_path, clock).room_for("adapter", 3 * MB):
        assert names_left(root, "a") == []


def test_a_version_that_another_process_fetches_stays(tmp_path: Path, root: Path, clock: Clock) -> None:
    put(root, "a", 1000.0, 4 * MB)
    room = make_budget(tmp_path, clock).room_for("adapter", 3 * MB)
    with FileLock(blob_of(root, "a", ".lock")), pytest.raises(SourceError, match="others use now"), room:
        pass
    assert names_left(root, "a") == ["a"]


def test_all_in_use_is_an_error_of_the_one_request(tmp_path: Path, root: Path, clock: Clock) -> None:
    put(root, "a", clock.now - 1, 4 * MB)
    budget = make_budget(tmp_path, clock)
    with (
        pytest.raises(SourceError, match=r"adapter 'x': takes 2000000 bytes of the disk, where adapters have 5000000,"),
        budget.room_for("adapter 'x'", 2 * MB),
    ):
        pass
    with budget.room_for("adapter 'y'", MB):  # a refused adapter takes no room
        pass
    clock.now += LATER
    with budget.room_for("adapter 'x'", 2 * MB):
        assert names_left(root, "a") == []


def test_an_adapter_larger_than_the_budget_says_what_to_raise(tmp_path: Path, root: Path, clock: Clock) -> None:
    room = make_budget(tmp_path, clock).room_for("adapter 'x'", 6 * MB)
    with pytest.raises(AdapterError, match="raise --adapter-disk-bytes") as refused, room:
        pass
    assert type(refused.value) is AdapterError  # to try again would not help


@pytest.mark.parametrize("reason", ["larger than the budget", "others are in use"])
def test_what_cannot_fit_removes_nothing(tmp_path: Path, root: Path, clock: Clock, reason: str) -> None:
    """Remove nothing for an adapter that cannot fit: else one request could empty the cache for nothing."""
    for index, name in enumerate("abc"):
        put(root, name, 1000.0 + index)
    put(root, "used", clock.now - 1 if reason == "others are in use" else 1000.0, 2 * MB)
    num_bytes = 6 * MB if reason == "larger than the budget" else 4 * MB
    with pytest.raises(AdapterError), make_budget(tmp_path, clock).room_for("adapter 'x'", num_bytes):
        pass
    assert names_left(root, "a", "b", "c", "used") == ["a", "b", "c", "used"]


@pytest.mark.parametrize(("timeout_s", "in_use_s"), [(120.0, IN_USE_S), (900.0, 960.0), (float("inf"), 86400.0)])
def test_a_version_stays_as_long_as_a_request_may_wait_for_it(
    tmp_path: Path, root: Path, clock: Clock, timeout_s: float, in_use_s: float
) -> None:
    budget = DiskBudget(tmp_path, 5 * MB, in_use_s=find_in_use_s(timeout_s), now=clock)
    budget.add(root)
    put(root, "a", clock.now - in_use_s + 1, 4 * MB)
    with pytest.raises(SourceError), budget.room_for("adapter", 2 * MB):
        pass
    clock.now += 1
    with budget.room_for("adapter", 2 * MB):
        assert names_left(root, "a") == []


def test_the_time_that_a_request_waits_reaches_the_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []

    def make(*_: Any, **options: Any) -> DiskBudget:
        made.append(options)
        return DiskBudget(tmp_path)

    monkeypatch.setattr(build, "DiskBudget", make)
    build.build_sources(SourceConfig(cache=tmp_path), 900.0)
    assert made == [{"in_use_s": 960.0}]


def test_what_is_used_all_the_time_is_marked_once_a_minute(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "version"
    mark_downloaded(folder)
    for age_s, is_marked in ((3600, True), (50, False)):
        before = time.time() - age_s
        os.utime(mark_of(folder), (before, before))
        mark_used(folder, 60.0)
        assert (mark_of(folder).stat().st_mtime > before + 1) == is_marked
    mark_used(folder.with_name("gone"))
    assert not mark_of(folder.with_name("gone")).exists()


# --- what counts


@pytest.mark.parametrize("is_known", [True, False], ids=["looked at before", "at the first look"])
def test_what_came_of_a_fetch_that_failed_counts(tmp_path: Path, root: Path, clock: Clock, is_known: bool) -> None:
    budget = make_budget(tmp_path, clock)
    path = blob_of(root, "a")

    def break_off() -> None:
        put(root, "a", clock.now, 2 * MB, file=f"{WEIGHTS}.part")
        os.utime(blob_of(root, "a", ".part"), (clock.now, clock.now))
        raise OSError("broke")

    if is_known:
        with pytest.raises(OSError, match="broke"), budget.room_for("one", 3 * MB, [path]):
            break_off()
    else:
        with pytest.raises(OSError, match="broke"):
            break_off()
    with pytest.raises(SourceError, match="others use now"), budget.room_for("two", 4 * MB):
        pass
    with budget.room_for("three", 3 * MB):
        pass
    clock.now += LATER  # no process goes on with it
    with budget.room_for("four", 5 * MB):
        assert not path.with_name(f"{WEIGHTS}.part").exists()


@pytest.mark.parametrize("max_bytes", [5 * MB, None])
def test_what_has_come_so_far_does_not_count_twice(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """Adapters may take 5 of 10 free MB. A fetch of 3 MB counts as 3 MB, however much of it has arrived."""
    budget = make_budget(tmp_path, clock, max_bytes)
    free = 10 * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    second = blob_of(root, "a")
    first = second.with_name("config")
    with budget.room_for("one", 3 * MB, [first, second]):
        put(root, "a", clock.now, MB, "config")
        put(root, "a", clock.now, MB, f"{WEIGHTS}.part")
        os.utime(blob_of(root, "a", ".part"), (clock.now, clock.now))
        free -= 2 * MB
        clock.now += 61
        with budget.room_for("two", 2 * MB), pytest.raises(SourceError), budget.room_for("three", MB):
            pass


def test_what_is_coming_counts(tmp_path: Path, root: Path, clock: Clock) -> None:
    budget = make_budget(tmp_path, clock)
    with budget.room_for("one", 3 * MB):
        with pytest.raises(SourceError), budget.room_for("two", 3 * MB):
            pass
        with budget.room_for("three", 2 * MB):
            pass
    with pytest.raises(OSError, match="broke"), budget.room_for("four", MB):  # and did not come
        raise OSError("broke")


def test_the_folder_is_not_looked_at_for_each_one(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[DiskBudget] = []
    sweep = DiskBudget.sweep

    def look(budget: DiskBudget) -> dict[Path, int]:
        looks.append(budget)
        return sweep(budget)

    monkeypatch.setattr(DiskBudget, "sweep", look)
    budget = make_budget(tmp_path, clock)
    for _ in range(5):
        with budget.room_for("adapter", MB // 10):
            pass
    assert len(looks) == 1
    clock.now += 61  # another process may have filled it
    put(root, "of another process", 1000.0, 5 * MB)
    with budget.room_for("adapter", MB // 10):
        assert names_left(root, "of another process") == []
    assert len(looks) == 2


@pytest.mark.parametrize(("max_bytes", "is_kept"), [(None, False), (8 * MB, False), (5 * MB, True)])
def test_the_disk_itself_is_a_limit(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None, is_kept: bool
) -> None:
    """With 2 MB free and 4 MB of ours, no budget means half of 6 MB, and a budget of 8 MB means 6 MB."""
    put(root, "a", 1000.0, 4 * MB)
    free = 2 * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with make_budget(tmp_path, clock, max_bytes).room_for("adapter", MB if is_kept else 3 * MB):
        assert names_left(root, "a") == (["a"] if is_kept else [])


def test_a_version_that_cannot_be_removed_holds_nobody_up(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index, name in enumerate("ab"):
        put(root, name, 1000.0 + index, 2 * MB)
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path == blob_of(root, "a"):
            raise PermissionError(13, "not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    with caplog.at_level(logging.WARNING), make_budget(tmp_path, clock).room_for("adapter", 2 * MB):
        assert names_left(root, "a", "b") == ["a"]
    assert "cannot be removed" in caplog.text


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path, root: Path, clock: Clock) -> None:
    put(root, "a", 1000.0, 4 * MB)
    for other in ("models--owner--base/blobs/weights", "s3-models/x/weights", "s3/notes.txt", "s3/mine/weights"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
    (root / place("link")).symlink_to(tmp_path / "s3-models")
    with make_budget(tmp_path, clock).room_for("adapter", 5 * MB):
        pass
    assert (tmp_path / "s3-models" / "x" / "weights").exists()
    assert (root / "notes.txt").exists()
    assert (root / "mine" / "weights").exists()
    assert (tmp_path / "models--owner--base" / "blobs" / "weights").exists()


# --- what was cut short


def old_part(path: Path, clock: Clock, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half of it")
    os.utime(path, (clock.now - age_s, clock.now - age_s))
    return path


def test_old_parts_go_and_young_ones_stay(tmp_path: Path, root: Path, clock: Clock) -> None:
    old = old_part(blob_of(root, "a", ".part"), clock, LATER)
    young = old_part(blob_of(root, "b", ".part"), clock, 10)
    written = old_part(blob_of(root, "c", ".part"), clock, LATER)
    with FileLock(blob_of(root, "c", ".lock")):
        make_budget(tmp_path, clock).sweep()
    assert (old.exists(), young.exists(), written.exists()) == (False, True, True)


def test_a_folder_that_is_not_there_is_nothing_to_sweep(tmp_path: Path, clock: Clock) -> None:
    make_budget(tmp_path / "none", clock).sweep()


# --- a hub's layout


NAME = "owner/adapter"


@pytest.fixture(scope="module")
def one_hub() -> Iterator[HubServer]:
    context = httpx2.create_ssl_context()  # reading certificates takes long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "create_ssl_context", lambda: context)
        with running(HubServer()) as server:
            yield server


@pytest.fixture
def hub(one_hub: HubServer) -> HubServer:
    one_hub.reset()
    one_hub.repos = {NAME: Repo(dict(ADAPTER)), "owner/other": Repo({**ADAPTER, WEIGHTS: b"of the other" * 10_000})}
    return one_hub


def hub_source(hub: HubServer, tmp_path: Path, clock: Clock, max_bytes: int) -> HubSource:
    return HubSource(tmp_path / "hub", hub.url, budget=DiskBudget(tmp_path, max_bytes, now=clock))


def budget_of(source: HubSource) -> DiskBudget:
    assert source._budget is not None
    return source._budget


def age(tmp_path: Path, used_at: float) -> None:
    for mark in (tmp_path / "hub").glob("*/.lorax/*"):
        os.utime(mark, (used_at, used_at))


def repo_folder(tmp_path: Path, name: str = NAME) -> Path:
    return tmp_path / "hub" / f"models--{name.replace('/', '--')}"


def test_a_repository_makes_room_for_another_and_is_fetched_again(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    first = fetch(source, NAME)
    age(tmp_path, 1000.0)
    other = fetch(source, "owner/other")
    assert not repo_folder(tmp_path).exists()  # nor its locks and refs
    assert (other.folder / WEIGHTS).read_bytes() == b"of the other" * 10_000
    age(tmp_path, 1000.0)
    assert fetch(source, NAME) == first
    check_contents(first)


def test_files_that_versions_share_stay_with_the_other(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    old = fetch(source, NAME)
    hub.repos[NAME].files["tokenizer.json"] = b'{"version": "2.0"}'
    new = fetch(source, NAME)  # its weights are there, and take no room twice
    age(tmp_path, 1000.0)
    mark = repo_folder(tmp_path) / ".lorax" / new.version
    os.utime(mark, (clock.now, clock.now))
    with budget_of(source).room_for("another", 450_000 - sum(map(len, hub.repos[NAME].files.values()))):
        assert not old.folder.exists()
    check_contents(new, {**ADAPTER, "tokenizer.json": b'{"version": "2.0"}'})
    assert len([path for path in (repo_folder(tmp_path) / "blobs").iterdir() if path.suffix != ".lock"]) == 4


def test_what_others_keep_in_the_same_cache_is_never_removed(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    fetch(source, NAME)
    shutil.rmtree(repo_folder(tmp_path) / ".lorax")  # as huggingface_hub leaves a repository
    check_contents(fetch(source, NAME))  # to use it does not make it ours
    age(tmp_path, 1000.0)
    with budget_of(source).room_for("another", 450_000):
        check_contents(fetch(source, NAME))


def test_a_repository_in_which_a_fetch_begins_is_not_removed(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process begins a fetch between two steps of the removal."""
    source = hub_source(hub, tmp_path, clock, 450_000)
    fetch(source, NAME)
    repo, rmdir = repo_folder(tmp_path), Path.rmdir

    def begin(folder: Path) -> None:
        rmdir(folder)
        if folder.name == "blobs":
            mark_downloaded(repo / "snapshots" / "new")
            folder.mkdir()
            (folder / "weights.part").write_bytes(b"half of it")

    monkeypatch.setattr(Path, "rmdir", begin)
    age(tmp_path, 1000.0)
    with budget_of(source).room_for("another", 450_000):
        pass
    assert (repo / "blobs" / "weights.part").exists()
    assert (repo / ".lorax" / "new").exists()
    assert not any((repo / "snapshots").glob("*"))


@pytest.mark.parametrize("after_s", [61, 3600], ids=["known", "stands in"])
def test_what_is_served_while_the_hub_is_down_stays(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Keep the version: it could not be fetched again. A fetch of another source must make room elsewhere."""
    hub.repos[NAME] = Repo(SMALL)
    source = hub_source(hub, tmp_path, clock, 450_000)
    times = SimpleNamespace(now=0.0)
    resolver = bench_of(source, lambda: times.now)
    try:
        spec, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
        age(tmp_path, 1000.0)
        for fault in ("info", "adapter_config.json"):
            hub.faults[fault] = Fault(reply=Reply(503))
        times.now += after_s
        assert resolver.resolve([AdapterRef("hub", NAME)]).result(30)[0] == spec
        clock.now = int(time.time()) + 1
        with pytest.raises(SourceError), budget_of(source).room_for("another", 450_000):
            pass
        assert resolver.resolve([AdapterRef("hub", NAME)]).result(30)[0] == spec
    finally:
        resolver.close()


CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
SMALL = {"adapter_config.json": json.dumps(CONFIG).encode(), WEIGHTS: save({"x.lora_A.weight": zeros(1, 4)})}


def bench_of(source: HubSource, times: Callable[[], float] = time.monotonic) -> AdapterResolver:
    sources = AdapterSources({"hub": source}, max_bytes=2**30, clock=times)
    finder = AdapterFinder(sources, model_type="llama", model_class="Llama", clock=times)
    return AdapterResolver(finder, clock=times)


def test_an_adapter_that_left_the_disk_is_fetched_again_when_it_is_named(
    hub: HubServer, tmp_path: Path, clock: Clock
) -> None:
    """A remembered name is not enough: its files are needed as soon as the copy in memory has gone."""
    hub.repos[NAME] = Repo(SMALL)
    source = hub_source(hub, tmp_path, clock, 450_000)
    resolver = bench_of(source)
    try:
        spec, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
        age(tmp_path, 1000.0)
        with budget_of(source).room_for("another", 450_000):
            assert not spec.parts[0].folder.exists()
        with pytest.raises(SourceError, match=f"{WEIGHTS} is not on this machine any more; try again"):
            StoredAdapter(spec.parts[0].folder, spec.parts[0].config, {}, spec.parts[0].stamp)
        again, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
    finally:
        resolver.close()
    assert again.identity == spec.identity
    assert again.parts != spec.parts  # so that a table that remembers a failure forgets it
    assert (again.parts[0].folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]


def test_a_version_whose_removal_was_interrupted_is_downloaded_again(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    first = fetch(source, NAME)
    age(tmp_path, 1000.0)

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt), budget_of(source).room_for("another", 450_000):
            pass
    with budget_of(source).room_for("another", 450_000):
        pass
    assert fetch(source, NAME) == first
    check_contents(first)


def test_files_of_an_incomplete_version_count_and_leave(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    hub.faults["tokenizer.json"] = Fault(reply=Reply(503))
    with pytest.raises(SourceError):
        fetch(source, NAME)
    assert not [path for path in repo_folder(tmp_path).glob("snapshots/*/*") if path.name != "adapter_config.json"]
    age(tmp_path, clock.now)
    with pytest.raises(SourceError, match="others use now"), budget_of(source).room_for("another", 100_000):
        pass
    clock.now += LATER
    with budget_of(source).room_for("another", 450_000):
        assert not repo_folder(tmp_path).exists()
    hub.faults.clear()
    check_contents(fetch(source, NAME))


def test_a_part_of_a_hubs_file(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    part = old_part(repo_folder(tmp_path) / "blobs" / f"{'0' * 64}.part", clock, LATER)
    budget_of(hub_source(hub, tmp_path, clock, 10**9)).sweep()
    assert not part.exists()


def test_offline_nothing_is_removed(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    fetch(hub_source(hub, tmp_path, clock, 10**9), NAME)
    age(tmp_path, 1000.0)
    budget = DiskBudget(tmp_path, 450_000, now=clock)
    source = HubSource(tmp_path / "hub", hub.url, offline=True, budget=budget)
    with budget.room_for("adapter 'x' of another source", 450_000):
        check_contents(fetch(source, NAME))


def test_a_long_download_is_in_use(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is renewed during the download, however long that takes."""
    marked: list[Path] = []
    monkeypatch.setattr(remote, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(remote, "mark_used", lambda folder, *_: marked.append(folder))
    folder = fetch(hub_source(hub, tmp_path, clock, 10**9), NAME).folder
    assert len(marked) > 6
    assert set(marked) == {folder}
