"""The disk budget for downloaded adapters: eviction, protected versions and interrupted downloads."""

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
    MIN_IN_USE_PERIOD_S,
    DiskBudget,
    compute_in_use_period_s,
    mark_downloaded,
    mark_path,
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
LATER = MIN_IN_USE_PERIOD_S + 1


class Clock:
    """A clock far ahead of the file times, so that only versions marked by a test are in use."""

    def __init__(self) -> None:
        self.now: float = 10**9 + 10**6

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def hash_folder_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def write_version(root: Path, name: str, used_at: float, num_bytes: int = MB, file: str = WEIGHTS) -> Path:
    """Write a version in the cache layout."""
    folder = root / hash_folder_name(name) / "snapshots" / "version"
    blob = root / hash_folder_name(name) / "blobs" / file
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"")
    os.truncate(blob, num_bytes)
    if blob.suffix != ".part":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(blob)
    mark_downloaded(folder)
    os.utime(mark_path(folder), (used_at, used_at))
    return folder


def blob_of(root: Path, name: str, suffix: str = "") -> Path:
    return root / hash_folder_name(name) / "blobs" / f"{WEIGHTS}{suffix}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "s3"


def make_budget(tmp_path: Path, clock: Clock, max_bytes: int | None = 5 * MB) -> DiskBudget:
    budget = DiskBudget(tmp_path, max_bytes, now=clock)
    budget.add_cache(tmp_path / "s3")
    return budget


def remaining_files(root: Path, *names: str) -> list[str]:
    return [name for name in names if (root / hash_folder_name(name)).exists()]


# --- eviction


def test_least_recently_used_is_evicted_first(tmp_path: Path, root: Path, clock: Clock) -> None:
    for index, name in enumerate("cabd"):
        write_version(root, name, 1000.0 + index)
    with make_budget(tmp_path, clock).reserve_space("adapter", 2 * MB):
        # Evict down to 90 %, including the two new versions.
        assert remaining_files(root, *"abcd") == ["b", "d"]


def test_no_eviction_below_limit(tmp_path: Path, root: Path, clock: Clock) -> None:
    for name in "abc":
        write_version(root, name, 1000.0)
    with make_budget(tmp_path, clock).reserve_space("adapter", 2 * MB):
        assert remaining_files(root, *"abc") == ["a", "b", "c"]


def test_recently_used_version_is_kept(tmp_path: Path, root: Path, clock: Clock) -> None:
    for index, name in enumerate("abcd"):
        write_version(root, name, 1000.0 + index)
    mark = mark_path(root / hash_folder_name("a") / "snapshots" / "version")
    os.utime(mark, (clock.now - 1, clock.now - 1))
    with make_budget(tmp_path, clock).reserve_space("adapter", 3 * MB):
        assert remaining_files(root, *"abcd") == ["a"]


def test_last_use_in_the_future_does_not_prevent_eviction(tmp_path: Path, root: Path, clock: Clock) -> None:
    write_version(root, "a", clock.now + 10**6, 4 * MB)
    with make_budget(tmp_path, clock).reserve_space("adapter", 3 * MB):
        assert remaining_files(root, "a") == []


def test_version_locked_by_another_process_is_kept(tmp_path: Path, root: Path, clock: Clock) -> None:
    write_version(root, "a", 1000.0, 4 * MB)
    room = make_budget(tmp_path, clock).reserve_space("adapter", 3 * MB)
    with FileLock(blob_of(root, "a", ".lock")), pytest.raises(SourceError, match="other adapters are in use"), room:
        pass
    assert remaining_files(root, "a") == ["a"]


def test_error_if_all_versions_are_in_use(tmp_path: Path, root: Path, clock: Clock) -> None:
    write_version(root, "a", clock.now - 1, 4 * MB)
    budget = make_budget(tmp_path, clock)
    with (
        pytest.raises(
            SourceError,
            match=r"adapter 'x': needs 2000000 bytes of disk space, the limit for all adapters is 5000000 and",
        ),
        budget.reserve_space("adapter 'x'", 2 * MB),
    ):
        pass
    with budget.reserve_space("adapter 'y'", MB):  # a rejected adapter uses no space
        pass
    clock.now += LATER
    with budget.reserve_space("adapter 'x'", 2 * MB):
        assert remaining_files(root, "a") == []


def test_error_for_adapter_larger_than_budget_names_flag(tmp_path: Path, root: Path, clock: Clock) -> None:
    room = make_budget(tmp_path, clock).reserve_space("adapter 'x'", 6 * MB)
    with pytest.raises(AdapterError, match="raise --adapter-disk-bytes") as caught, room:
        pass
    assert type(caught.value) is AdapterError  # a retry would not help


@pytest.mark.parametrize("reason", ["larger than the budget", "others are in use"])
def test_oversized_download_evicts_nothing(tmp_path: Path, root: Path, clock: Clock, reason: str) -> None:
    """Evict no version for an adapter that cannot fit, because one request could empty the cache."""
    for index, name in enumerate("abc"):
        write_version(root, name, 1000.0 + index)
    write_version(root, "used", clock.now - 1 if reason == "others are in use" else 1000.0, 2 * MB)
    num_bytes = 6 * MB if reason == "larger than the budget" else 4 * MB
    with pytest.raises(AdapterError), make_budget(tmp_path, clock).reserve_space("adapter 'x'", num_bytes):
        pass
    assert remaining_files(root, "a", "b", "c", "used") == ["a", "b", "c", "used"]


@pytest.mark.parametrize(
    ("timeout_s", "in_use_s"), [(120.0, MIN_IN_USE_PERIOD_S), (900.0, 960.0), (float("inf"), 86400.0)]
)
def test_version_is_not_evicted_within_adapter_timeout(
    tmp_path: Path, root: Path, clock: Clock, timeout_s: float, in_use_s: float
) -> None:
    budget = DiskBudget(tmp_path, 5 * MB, in_use_s=compute_in_use_period_s(timeout_s), now=clock)
    budget.add_cache(root)
    write_version(root, "a", clock.now - in_use_s + 1, 4 * MB)
    with pytest.raises(SourceError), budget.reserve_space("adapter", 2 * MB):
        pass
    clock.now += 1
    with budget.reserve_space("adapter", 2 * MB):
        assert remaining_files(root, "a") == []


def test_adapter_timeout_is_passed_to_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []

    def make(*_: Any, **options: Any) -> DiskBudget:
        made.append(options)
        return DiskBudget(tmp_path)

    monkeypatch.setattr(build, "DiskBudget", make)
    build.build_sources(SourceConfig(cache=tmp_path), 900.0)
    assert made == [{"in_use_s": 960.0}]


def test_last_use_is_updated_once_per_minute(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "version"
    mark_downloaded(folder)
    for age_s, is_marked in ((3600, True), (50, False)):
        before = time.time() - age_s
        os.utime(mark_path(folder), (before, before))
        mark_used(folder, 60.0)
        assert (mark_path(folder).stat().st_mtime > before + 1) == is_marked
    mark_used(folder.with_name("gone"))
    assert not mark_path(folder.with_name("gone")).exists()


# --- measuring


@pytest.mark.parametrize("is_known", [True, False], ids=["measured before", "first measurement"])
def test_partial_files_count_towards_budget(tmp_path: Path, root: Path, clock: Clock, is_known: bool) -> None:
    budget = make_budget(tmp_path, clock)
    path = blob_of(root, "a")

    def break_off() -> None:
        write_version(root, "a", clock.now, 2 * MB, file=f"{WEIGHTS}.part")
        os.utime(blob_of(root, "a", ".part"), (clock.now, clock.now))
        raise OSError("broke")

    if is_known:
        with pytest.raises(OSError, match="broke"), budget.reserve_space("one", 3 * MB, [path]):
            break_off()
    else:
        with pytest.raises(OSError, match="broke"):
            break_off()
    with pytest.raises(SourceError, match="other adapters are in use"), budget.reserve_space("two", 4 * MB):
        pass
    with budget.reserve_space("three", 3 * MB):
        pass
    clock.now += LATER  # no process resumes it
    with budget.reserve_space("four", 5 * MB):
        assert not path.with_name(f"{WEIGHTS}.part").exists()


@pytest.mark.parametrize("max_bytes", [5 * MB, None])
def test_partial_download_is_not_counted_twice(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """The limit is 5 of 10 free MB. A 3 MB download counts as 3 MB, independent of its progress."""
    budget = make_budget(tmp_path, clock, max_bytes)
    free = 10 * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    second = blob_of(root, "a")
    first = second.with_name("config")
    with budget.reserve_space("one", 3 * MB, [first, second]):
        write_version(root, "a", clock.now, MB, "config")
        write_version(root, "a", clock.now, MB, f"{WEIGHTS}.part")
        os.utime(blob_of(root, "a", ".part"), (clock.now, clock.now))
        free -= 2 * MB
        clock.now += 61
        with budget.reserve_space("two", 2 * MB), pytest.raises(SourceError), budget.reserve_space("three", MB):
            pass


def test_running_downloads_count_towards_budget(tmp_path: Path, root: Path, clock: Clock) -> None:
    budget = make_budget(tmp_path, clock)
    with budget.reserve_space("one", 3 * MB):
        with pytest.raises(SourceError), budget.reserve_space("two", 3 * MB):
            pass
        with budget.reserve_space("three", 2 * MB):
            pass
    with pytest.raises(OSError, match="broke"), budget.reserve_space("four", MB):  # and was not downloaded
        raise OSError("broke")


def test_cache_size_is_not_measured_for_each_download(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[DiskBudget] = []
    remove_interrupted_downloads = DiskBudget.remove_interrupted_downloads

    def look(budget: DiskBudget) -> dict[Path, int]:
        looks.append(budget)
        return remove_interrupted_downloads(budget)

    monkeypatch.setattr(DiskBudget, "remove_interrupted_downloads", look)
    budget = make_budget(tmp_path, clock)
    for _ in range(5):
        with budget.reserve_space("adapter", MB // 10):
            pass
    assert len(looks) == 1
    clock.now += 61  # another process may have used the space
    write_version(root, "of another process", 1000.0, 5 * MB)
    with budget.reserve_space("adapter", MB // 10):
        assert remaining_files(root, "of another process") == []
    assert len(looks) == 2


@pytest.mark.parametrize(("max_bytes", "is_kept"), [(None, False), (8 * MB, False), (5 * MB, True)])
def test_disk_size_limits_budget(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None, is_kept: bool
) -> None:
    """With 2 MB free and 4 MB cached, the default limit is 3 MB and a limit of 8 MB becomes 6 MB."""
    write_version(root, "a", 1000.0, 4 * MB)
    free = 2 * MB
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with make_budget(tmp_path, clock, max_bytes).reserve_space("adapter", MB if is_kept else 3 * MB):
        assert remaining_files(root, "a") == (["a"] if is_kept else [])


def test_failed_removal_does_not_block_other_removals(
    tmp_path: Path, root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for index, name in enumerate("ab"):
        write_version(root, name, 1000.0 + index, 2 * MB)
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path == blob_of(root, "a"):
            raise PermissionError(13, "not yours")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    with caplog.at_level(logging.WARNING), make_budget(tmp_path, clock).reserve_space("adapter", 2 * MB):
        assert remaining_files(root, "a", "b") == ["a"]
    assert "cannot be removed" in caplog.text


def test_unknown_files_are_not_removed(tmp_path: Path, root: Path, clock: Clock) -> None:
    write_version(root, "a", 1000.0, 4 * MB)
    for other in ("models--owner--base/blobs/weights", "s3-models/x/weights", "s3/notes.txt", "s3/mine/weights"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_bytes(b"x")
    (root / hash_folder_name("link")).symlink_to(tmp_path / "s3-models")
    with make_budget(tmp_path, clock).reserve_space("adapter", 5 * MB):
        pass
    assert (tmp_path / "s3-models" / "x" / "weights").exists()
    assert (root / "notes.txt").exists()
    assert (root / "mine" / "weights").exists()
    assert (tmp_path / "models--owner--base" / "blobs" / "weights").exists()


# --- interrupted downloads


def old_part(path: Path, clock: Clock, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half of it")
    os.utime(path, (clock.now - age_s, clock.now - age_s))
    return path


def test_only_old_partial_files_are_removed(tmp_path: Path, root: Path, clock: Clock) -> None:
    old = old_part(blob_of(root, "a", ".part"), clock, LATER)
    young = old_part(blob_of(root, "b", ".part"), clock, 10)
    written = old_part(blob_of(root, "c", ".part"), clock, LATER)
    with FileLock(blob_of(root, "c", ".lock")):
        make_budget(tmp_path, clock).remove_interrupted_downloads()
    assert (old.exists(), young.exists(), written.exists()) == (False, True, True)


def test_missing_cache_folder_is_ignored(tmp_path: Path, clock: Clock) -> None:
    make_budget(tmp_path / "none", clock).remove_interrupted_downloads()


# --- hub cache layout


NAME = "owner/adapter"


@pytest.fixture(scope="module")
def one_hub() -> Iterator[HubServer]:
    context = httpx2.create_ssl_context()  # reading certificates is slow
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


def set_last_use(tmp_path: Path, used_at: float) -> None:
    for mark in (tmp_path / "hub").glob("*/.lorax/*"):
        os.utime(mark, (used_at, used_at))


def repo_folder(tmp_path: Path, name: str = NAME) -> Path:
    return tmp_path / "hub" / f"models--{name.replace('/', '--')}"


def test_evicted_repository_is_downloaded_again(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    first = fetch(source, NAME)
    set_last_use(tmp_path, 1000.0)
    other = fetch(source, "owner/other")
    assert not repo_folder(tmp_path).exists()  # locks and refs are removed too
    assert (other.folder / WEIGHTS).read_bytes() == b"of the other" * 10_000
    set_last_use(tmp_path, 1000.0)
    assert fetch(source, NAME) == first
    check_contents(first)


def test_eviction_keeps_shared_blobs(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    old = fetch(source, NAME)
    hub.repos[NAME].files["tokenizer.json"] = b'{"version": "2.0"}'
    new = fetch(source, NAME)  # the shared weights are cached and counted once
    set_last_use(tmp_path, 1000.0)
    mark = repo_folder(tmp_path) / ".lorax" / new.version
    os.utime(mark, (clock.now, clock.now))
    with budget_of(source).reserve_space("another", 450_000 - sum(map(len, hub.repos[NAME].files.values()))):
        assert not old.folder.exists()
    check_contents(new, {**ADAPTER, "tokenizer.json": b'{"version": "2.0"}'})
    assert len([path for path in (repo_folder(tmp_path) / "blobs").iterdir() if path.suffix != ".lock"]) == 4


def test_repositories_without_lorax_folder_are_never_evicted(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    fetch(source, NAME)
    shutil.rmtree(repo_folder(tmp_path) / ".lorax")  # as written by huggingface_hub
    check_contents(fetch(source, NAME))  # using a version does not mark it
    set_last_use(tmp_path, 1000.0)
    with budget_of(source).reserve_space("another", 450_000):
        check_contents(fetch(source, NAME))


def test_repository_with_new_download_is_not_evicted(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts a download between two steps of the eviction."""
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
    set_last_use(tmp_path, 1000.0)
    with budget_of(source).reserve_space("another", 450_000):
        pass
    assert (repo / "blobs" / "weights.part").exists()
    assert (repo / ".lorax" / "new").exists()
    assert not any((repo / "snapshots").glob("*"))


@pytest.mark.parametrize("after_s", [61, 3600], ids=["known", "stands in"])
def test_version_served_while_hub_is_down_is_kept(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Keep the version, because it could not be downloaded again. Other sources must evict other versions."""
    hub.repos[NAME] = Repo(SMALL)
    source = hub_source(hub, tmp_path, clock, 450_000)
    times = SimpleNamespace(now=0.0)
    resolver = make_resolver(source, lambda: times.now)
    try:
        spec, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
        set_last_use(tmp_path, 1000.0)
        for fault in ("info", "adapter_config.json"):
            hub.faults[fault] = Fault(reply=Reply(503))
        times.now += after_s
        assert resolver.resolve([AdapterRef("hub", NAME)]).result(30)[0] == spec
        clock.now = int(time.time()) + 1
        with pytest.raises(SourceError), budget_of(source).reserve_space("another", 450_000):
            pass
        assert resolver.resolve([AdapterRef("hub", NAME)]).result(30)[0] == spec
    finally:
        resolver.close()


CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
SMALL = {"adapter_config.json": json.dumps(CONFIG).encode(), WEIGHTS: save({"x.lora_A.weight": zeros(1, 4)})}


def make_resolver(source: HubSource, times: Callable[[], float] = time.monotonic) -> AdapterResolver:
    sources = AdapterSources({"hub": source}, max_bytes=2**30, clock=times)
    finder = AdapterFinder(sources, model_type="llama", model_class="Llama", clock=times)
    return AdapterResolver(finder, clock=times)


def test_evicted_adapter_is_downloaded_on_next_request(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    """A cached resolution is not enough: the files are needed when the copy in memory is evicted."""
    hub.repos[NAME] = Repo(SMALL)
    source = hub_source(hub, tmp_path, clock, 450_000)
    resolver = make_resolver(source)
    try:
        spec, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
        set_last_use(tmp_path, 1000.0)
        with budget_of(source).reserve_space("another", 450_000):
            assert not spec.checkpoints[0].folder.exists()
        with pytest.raises(SourceError, match=f"{WEIGHTS} was removed from this machine; try again"):
            StoredAdapter(spec.checkpoints[0].folder, spec.checkpoints[0].config, {}, spec.checkpoints[0].stamp)
        again, _ = resolver.resolve([AdapterRef("hub", NAME)]).result(30)
    finally:
        resolver.close()
    assert again.identity == spec.identity
    assert again.checkpoints != spec.checkpoints  # so that the adapter table retries the load
    assert (again.checkpoints[0].folder / WEIGHTS).read_bytes() == SMALL[WEIGHTS]


def test_adapter_is_downloaded_again_after_interrupted_eviction(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    first = fetch(source, NAME)
    set_last_use(tmp_path, 1000.0)

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt), budget_of(source).reserve_space("another", 450_000):
            pass
    with budget_of(source).reserve_space("another", 450_000):
        pass
    assert fetch(source, NAME) == first
    check_contents(first)


def test_unlinked_blobs_are_counted_and_removed(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    source = hub_source(hub, tmp_path, clock, 450_000)
    hub.faults["tokenizer.json"] = Fault(reply=Reply(503))
    with pytest.raises(SourceError):
        fetch(source, NAME)
    assert not [path for path in repo_folder(tmp_path).glob("snapshots/*/*") if path.name != "adapter_config.json"]
    set_last_use(tmp_path, clock.now)
    with (
        pytest.raises(SourceError, match="other adapters are in use"),
        budget_of(source).reserve_space("another", 100_000),
    ):
        pass
    clock.now += LATER
    with budget_of(source).reserve_space("another", 450_000):
        assert not repo_folder(tmp_path).exists()
    hub.faults.clear()
    check_contents(fetch(source, NAME))


def test_partial_hub_file_is_removed(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    part = old_part(repo_folder(tmp_path) / "blobs" / f"{'0' * 64}.part", clock, LATER)
    budget_of(hub_source(hub, tmp_path, clock, 10**9)).remove_interrupted_downloads()
    assert not part.exists()


def test_no_eviction_in_offline_mode(hub: HubServer, tmp_path: Path, clock: Clock) -> None:
    fetch(hub_source(hub, tmp_path, clock, 10**9), NAME)
    set_last_use(tmp_path, 1000.0)
    budget = DiskBudget(tmp_path, 450_000, now=clock)
    source = HubSource(tmp_path / "hub", hub.url, offline=True, budget=budget)
    with budget.reserve_space("adapter 'x' of another source", 450_000):
        check_contents(fetch(source, NAME))


def test_last_use_is_updated_during_long_download(
    hub: HubServer, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark is renewed during long downloads."""
    marked: list[Path] = []
    monkeypatch.setattr(remote, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(remote, "mark_used", lambda folder, *_: marked.append(folder))
    folder = fetch(hub_source(hub, tmp_path, clock, 10**9), NAME).folder
    assert len(marked) > 6
    assert set(marked) == {folder}
