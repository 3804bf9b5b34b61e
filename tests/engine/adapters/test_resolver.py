"""Adapter resolution returns the current identity, respects tokens, and does not block on unrelated work."""

import gc
import itertools
import json
import logging
import os
import pickle
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cachetools import Cache

from lorax_server.adapters.checkpoint import read_header
from lorax_server.adapters.config import parse_config
from lorax_server.adapters.identity import compute_identity
from lorax_server.adapters.sources import finder
from lorax_server.adapters.sources import source as source_module
from lorax_server.adapters.sources.hub import HubSource
from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterFiles, AdapterSources, Source, read_json
from lorax_server.adapters.spec import MIN_STAMP_AGE_NS, AdapterCheckpoint, AdapterSpec
from lorax_server.engine.adapters import resolutions
from lorax_server.engine.adapters import resolver as resolver_module
from lorax_server.engine.adapters.resolver import AdapterResolver
from lorax_server.errors import (
    AdapterAccessError,
    AdapterError,
    AdapterNotFoundError,
    EngineError,
    InputError,
    LoraxError,
    OverloadedError,
    SourceError,
)
from lorax_server.files.adapter_files import REQUIRED_FILES, TEMPLATES_FOLDER
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.files.regular_file import Stamp, read_stamp, read_stamp_or_none
from lorax_server.types import AdapterRef, Merge, ResolvedAdapter
from tests.adapters.sources.hub_server import HubServer, Repo
from tests.adapters.sources.server import Fault, Reply, running
from tests.adapters.test_checkpoint import entry, file_bytes

RAW = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
NUM_ELEMENTS = 12
SECRET = "hf_do_not_show_this"
HUB_NAME = "owner/adapter"
TIMEOUT_S = 120  # only reached if a test fails


# --- Helpers ----------------------------------------------------------------------------------------------------------


def files_of(number: int, **changes: Any) -> dict[str, bytes]:
    """Return adapter files for a version number. All versions have the same size."""
    header = {"q": entry([2, 4], 0, 32), "v": entry([4], 32, 48)}
    data = random.Random(number).randbytes(48)
    return {CONFIG_FILE: json.dumps(RAW | changes).encode(), WEIGHTS_FILE: file_bytes(header, data)}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


def replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace each file atomically."""
    for file, content in files.items():
        new = folder / f"{file}.{threading.get_ident()}"
        new.write_bytes(content)
        os.replace(new, folder / file)


def identity_of(tmp_path: Path, files: Mapping[str, bytes]) -> str:
    folder = write(tmp_path / "expected", files)
    path = folder / WEIGHTS_FILE
    return compute_identity(parse_config(json.loads(files[CONFIG_FILE]), "any"), path, read_header(path, "any"))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ignore(*arguments: object) -> None:
    pass


class FakeSource(Source):
    """A folder source with a configurable kind. The hook `before` may block or fail."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.root = root
        self.resolved_names: list[str] = []
        self.bases_asked: list[str] = []
        self.base_types: dict[str, str] = {}
        self.sizes: dict[str, int] = {}  # existing files
        self.before: Callable[[str], None] = ignore
        self.after_fetch: Callable[[Sequence[str]], None] = ignore

    def authorize(self, name: str, token: str | None) -> None:
        pass

    def find(self, name: str, token: str | None) -> AdapterFiles:
        self.resolved_names.append(name)
        self.before(name)
        if not (self.root / name).is_dir():
            raise AdapterNotFoundError(f"adapter {name!r}: there is none")
        sizes = self.sizes or {path.name: path.stat().st_size for path in (self.root / name).iterdir()}
        return AdapterFiles(self.kind, name, "1", sizes)

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        self.after_fetch(wanted)
        return self.root / files.name

    def base_model_type(self, name: str, token: str | None) -> str | None:
        self.bases_asked.append(name)
        return self.base_types.get(name)


class Gate:
    """Blocks all callers until it is opened."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, name: str = "") -> None:
        self.arrived.release()
        assert self.opened.wait(TIMEOUT_S)

    def wait_for(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.arrived.acquire(timeout=TIMEOUT_S)


class ResolverHarness:
    """A resolver with fake sources and a fake clock."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.root = tmp_path / "root"
        self.root.mkdir()
        self.clock = Clock()
        self.fake = FakeSource("fake", self.root)
        self.other = FakeSource("other", self.root)
        self.made: list[AdapterResolver] = []
        self.gates: list[Gate] = []
        self.resolver = self.make()

    def make(self, *more: Source, time_ns: Callable[[], int] = lambda: 0, **options: Any) -> AdapterResolver:
        """Make a resolver. By default, all files are recent and are read for each request, even in a slow test."""
        kinds: list[Source] = [LocalSource([self.root]), self.fake, self.other, *more]
        sources = AdapterSources({source.kind: source for source in kinds}, max_bytes=2**30, clock=self.clock)
        found_by = finder.AdapterFinder(
            sources, model_type="llama", model_class="LlamaForCausalLM", clock=self.clock, time_ns=time_ns
        )
        self.made.append(AdapterResolver(found_by, clock=self.clock, **options))
        return self.made[-1]

    def gate(self) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]

    def put(self, name: str, number: int, **changes: Any) -> str:
        """Write a new adapter and return its identity."""
        files = files_of(number, **changes)
        write(self.root / name, files)
        return identity_of(self.tmp_path, files)

    def submit(self, name: str, source: str = "fake", token: str | None = None) -> "Future[Any]":
        return self.resolver.resolve([AdapterRef(source, name, token)])

    def resolve_identity(self, name: str, source: str = "fake", token: str | None = None) -> str:
        return result(self.submit(name, source, token))[0].identity

    def error(self, name: str, source: str = "fake", token: str | None = None) -> Any:
        return error_of(self.submit(name, source, token))

    def close(self) -> None:
        for gate in self.gates:
            gate.opened.set()
        for made in self.made:
            made.close()


def result(future: "Future[Any]") -> tuple[AdapterSpec, ResolvedAdapter]:
    result: tuple[AdapterSpec, ResolvedAdapter] = future.result(TIMEOUT_S)
    return result


def error_of(future: "Future[Any]") -> BaseException:
    error = future.exception(TIMEOUT_S)
    assert error is not None
    return error


def fail_with(error: BaseException) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise error

    return fail


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ResolverHarness]:
    made = ResolverHarness(tmp_path)
    yield made
    made.close()


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the weight files that are read."""
    read: list[Path] = []

    def counted(config: Any, path: Path, *rest: Any) -> str:
        read.append(path)
        return compute_identity(config, path, *rest)

    monkeypatch.setattr(finder, "compute_identity", counted)
    return read


# --- Single adapters --------------------------------------------------------------------------------------------------


def test_local_adapter_resolves_to_spec_and_tokenizer_files(harness: ResolverHarness) -> None:
    identity = harness.put("team/tuned", 1)
    folder = write(harness.root / "team/tuned", {"tokenizer.json": b"{}", "README.md": b"no"})
    spec, resolved = result(harness.submit("team/tuned", "local"))
    config = parse_config(RAW, "team/tuned")
    part = AdapterCheckpoint(folder, config, read_stamp(folder / WEIGHTS_FILE), identity, is_settled=False)
    assert spec == AdapterSpec(identity, "team/tuned", (part,), NUM_ELEMENTS)
    stamps = (read_stamp(folder / "tokenizer.json"),)
    assert resolved == ResolvedAdapter(identity, str(folder), ("tokenizer.json",), tokenizer_stamps=stamps)


def test_resolved_spec_is_picklable_after_pattern_use(harness: ResolverHarness) -> None:
    pattern = {"target_modules": r".*\.(q|v)_proj", "rank_pattern": {"1.*": 2}, "modules_to_save": ["head"]}
    harness.put("tuned", 1, **pattern)
    spec, _ = result(harness.submit("tuned", "local"))
    modules = [f"model.layers.{index}.self_attn.{name}_proj" for index in range(3) for name in "qkv"]

    def query_all(spec: AdapterSpec) -> list[Any]:
        config = spec.checkpoints[0].config
        return [(config.rank(module), config.scale(module), config.is_target(module)) for module in modules]

    expected = query_all(spec)
    spec.checkpoints[0].config._pattern_matcher._seconds_left = 0.0  # a copied pattern has a separate time budget
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert query_all(copied) == expected
    assert query_all(pickle.loads(pickle.dumps(copied))) == expected


@pytest.mark.parametrize("source", ["local", "fake"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"auto_mapping": {"base_model_class": "GPT2LMHeadModel"}}, "trained on a GPT2LMHeadModel"),
        ({"base_model_name_or_path": "owner/gpt2"}, "model_type 'gpt2'"),
    ],
)
def test_adapter_that_does_not_fit_base_model_is_rejected(
    harness: ResolverHarness, source: str, changes: dict[str, Any], reason: str
) -> None:
    harness.fake.base_types["owner/gpt2"] = "gpt2"
    write(harness.root / "tuned", files_of(1, **changes))
    with pytest.raises(AdapterError, match=reason) as caught:
        harness.resolve_identity("tuned", source)
    assert caught.value.retry_after_s == 1


def test_base_model_type_is_read_once(harness: ResolverHarness) -> None:
    """Even for local folders, the base model type is read once, because it may be on a hub that hangs."""
    harness.fake.base_types["owner/llama"] = "llama"
    for name, base in (("known", "owner/llama"), ("unknown", "owner/secret"), ("odd", "x" * 10**5)):
        harness.put(name, 1, base_model_name_or_path=base)
    for _ in range(5):
        for name in ("known", "unknown", "odd"):
            harness.resolve_identity(name, "local")
    assert Counter(harness.fake.bases_asked) == {"owner/llama": 1, "owner/secret": 1}
    harness.clock.now += finder.UNKNOWN_BASE_TTL_S
    for name in ("known", "unknown"):
        harness.resolve_identity(name, "local")
    assert Counter(harness.fake.bases_asked) == {"owner/llama": 1, "owner/secret": 2}


# --- Changed files ----------------------------------------------------------------------------------------------------


def rewrite(folder: Path, files: Mapping[str, bytes]) -> None:
    """Rewrite the weights in place with the same inode, size and time."""
    path = folder / WEIGHTS_FILE
    times = os.stat(path)
    path.write_bytes(files[WEIGHTS_FILE])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def swap_link(folder: Path, files: Mapping[str, bytes]) -> None:
    """Switch a symbolic link, as deployments with several versions do."""
    new = write(folder.with_name(f"version {random.getrandbits(64)}"), files)
    link = folder.with_name("new link")
    link.symlink_to(new.name)
    if not folder.is_symlink():
        folder.rename(folder.with_name("first version"))
    os.replace(link, folder)


@pytest.mark.parametrize("change", [replace, rewrite, swap_link])
def test_new_weights_have_new_identity(harness: ResolverHarness, change: Any) -> None:
    first = harness.put("tuned", 1)
    assert harness.resolve_identity("tuned", "local") == first
    files = files_of(2)
    change(harness.root / "tuned", files)
    assert harness.resolve_identity("tuned", "local") == identity_of(harness.tmp_path, files) != first


def test_new_config_has_new_identity(harness: ResolverHarness) -> None:
    first = harness.put("tuned", 1)
    assert harness.resolve_identity("tuned", "local") == first
    replace(harness.root / "tuned", {CONFIG_FILE: json.dumps(RAW | {"lora_alpha": 9}).encode()})
    assert harness.resolve_identity("tuned", "local") != first


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[replace], [rewrite], [replace, rewrite]])
def test_concurrent_changes_never_return_old_identity(harness: ResolverHarness, ways: list[Any]) -> None:
    """Change files faster than the file system clock ticks, so that stamps repeat."""
    chance = random.Random(7)
    versions = [files_of(number, lora_alpha=number % 3 + 1) for number in range(6)]
    identities = [identity_of(harness.tmp_path, files) for files in versions]
    folder, now = write(harness.root / "tuned", versions[0]), 0
    for _ in range(1000):
        if chance.random() < 0.5:
            now = chance.randrange(len(versions))
            replace(folder, {CONFIG_FILE: versions[now][CONFIG_FILE]})
            chance.choice(ways)(folder, versions[now])
        else:
            assert harness.resolve_identity("tuned", "local") == identities[now]


def test_request_after_change_gets_new_version(harness: ResolverHarness) -> None:
    versions = [files_of(number) for number in range(300)]
    number_of = {identity_of(harness.tmp_path, files): number for number, files in enumerate(versions)}
    folder = write(harness.root / "tuned", versions[0])
    done, wrong, found_versions = 0, [], []

    def resolve_repeatedly() -> None:
        while done < len(versions) - 1:
            least = done
            try:
                actual = number_of[result(harness.submit("tuned", "local"))[0].identity]
            except SourceError:
                # Changed too often during the read: an error, but never an old version. Not retried for 1 s.
                harness.resolver.forget("local", "tuned")
                continue
            found_versions.append(actual)
            if actual < least:
                wrong.append((actual, least))

    threads = [threading.Thread(target=resolve_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, len(versions)):
        replace(folder, {WEIGHTS_FILE: versions[number][WEIGHTS_FILE]})
        done = number
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found_versions
    assert not wrong
    assert number_of[harness.resolve_identity("tuned", "local")] == len(versions) - 1


def test_request_during_local_fetch_starts_next_fetch(harness: ResolverHarness, monkeypatch: Any) -> None:
    harness.put("tuned", 1)
    swap_link(harness.root / "tuned", files_of(1))
    gate, second = harness.gate(), files_of(2)

    def slow(*args: Any) -> str:
        identity = compute_identity(*args)
        if not gate.opened.is_set():
            gate()
        return identity

    monkeypatch.setattr(finder, "compute_identity", slow)
    first = harness.submit("tuned", "local")
    gate.wait_for()
    swap_link(harness.root / "tuned", second)  # invisible to the first fetch
    later = [harness.submit("tuned", "local") for _ in range(3)]
    assert not any(future.done() for future in later)
    gate.opened.set()
    assert {result(future)[0].identity for future in later} == {identity_of(harness.tmp_path, second)}
    assert result(first)[0].identity == identity_of(harness.tmp_path, files_of(1))


@pytest.mark.parametrize("source", ["local", "fake"])
def test_unchanged_weights_are_read_once(harness: ResolverHarness, source: str, count_reads: list[Path]) -> None:
    first = harness.put("tuned", 1)
    now_ns = read_stamp(harness.root / "tuned" / WEIGHTS_FILE)[-1] + MIN_STAMP_AGE_NS + 1
    harness.resolver = harness.make(time_ns=lambda: now_ns, revalidate_s=0)
    for token in (None, None, "other"):
        assert harness.resolve_identity("tuned", source, token) == first
    assert len(count_reads) == 1
    replace(harness.root / "tuned", {CONFIG_FILE: json.dumps(RAW | {"lora_dropout": 0.5}).encode()})
    assert harness.resolve_identity("tuned", source) == first
    assert len(count_reads) == 1, "what only mattered for training is no reason to read"
    replace(harness.root / "tuned", {CONFIG_FILE: json.dumps(RAW | {"lora_alpha": 9}).encode()})
    second = harness.resolve_identity("tuned", source)
    assert second != first
    os.utime(harness.root / "tuned" / WEIGHTS_FILE)
    assert harness.resolve_identity("tuned", source) == second
    assert len(count_reads) == 3


@pytest.mark.parametrize("age_ns", [-(10**12), 0, MIN_STAMP_AGE_NS])
def test_recently_changed_file_is_read_again(harness: ResolverHarness, count_reads: list[Path], age_ns: int) -> None:
    harness.put("tuned", 1)
    now_ns = read_stamp(harness.root / "tuned" / WEIGHTS_FILE)[-1] + age_ns
    harness.resolver = harness.make(time_ns=lambda: now_ns)
    assert harness.resolve_identity("tuned", "local") == harness.resolve_identity("tuned", "local")
    assert len(count_reads) == 2


@pytest.mark.parametrize("times", [1, 2, 3, 100])
def test_changed_file_is_read_again_up_to_limit(harness: ResolverHarness, monkeypatch: Any, times: int) -> None:
    harness.put("tuned", 0)
    numbers = iter(range(1, times + 1))

    def disturbed(config: Any, path: Path, *rest: Any) -> str:
        identity = compute_identity(config, path, *rest)
        for number in itertools.islice(numbers, 1):
            replace(path.parent, files_of(number))
        return identity

    monkeypatch.setattr(finder, "compute_identity", disturbed)
    if times < finder.MAX_ATTEMPTS:
        spec, _ = result(harness.submit("tuned", "local"))
        assert spec.identity == identity_of(harness.tmp_path, files_of(times))
        assert spec.checkpoints[0].stamp == read_stamp(harness.root / "tuned" / WEIGHTS_FILE)
    else:
        with pytest.raises(SourceError, match=r"'tuned'.* changed while it was read; try again"):
            harness.resolve_identity("tuned", "local")


def test_change_during_read_is_not_reported_as_damage(harness: ResolverHarness, monkeypatch: Any) -> None:
    first = harness.put("tuned", 1)
    broken = iter([True])

    def cut(path: Path, *rest: Any) -> Any:
        if next(broken, False):
            replace(path.parent, {WEIGHTS_FILE: files_of(1)[WEIGHTS_FILE]})
            raise AdapterError("half of it is missing")
        return read_header(path, *rest)

    monkeypatch.setattr(finder, "read_header", cut)
    assert harness.resolve_identity("tuned", "local") == first


def test_config_and_weights_replaced_during_fetch_are_consistent(harness: ResolverHarness) -> None:
    """Replace config and weights after the source's last check, config first."""
    harness.put("tuned", 1)
    second = files_of(2, lora_alpha=99)

    def change(wanted: Sequence[str]) -> None:
        if WEIGHTS_FILE in wanted:
            harness.fake.after_fetch = ignore
            replace(harness.root / "tuned", second)

    harness.fake.after_fetch = change
    assert harness.resolve_identity("tuned") == identity_of(harness.tmp_path, second)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json"])
def test_fetch_fails_only_if_required_file_is_deleted(harness: ResolverHarness, file: str) -> None:
    harness.put("tuned", 1)
    write(harness.root / "tuned", {"tokenizer.json": b"{}"})

    def remove(wanted: Sequence[str]) -> None:
        if len(wanted) > 1:
            (harness.root / "tuned" / file).unlink(missing_ok=True)

    harness.fake.after_fetch = remove
    if file == "tokenizer.json":
        assert result(harness.submit("tuned"))[1].tokenizer_files == ()
    else:
        assert isinstance(harness.error("tuned"), AdapterError)


# --- Merges -----------------------------------------------------------------------------------------------------------


def test_merge_resolves_to_one_adapter(harness: ResolverHarness) -> None:
    identities = [harness.put(name, number) for number, name in enumerate("ab")]
    merge = Merge((0.5, 2.0), "ties", 0.5)
    spec, resolved = result(harness.resolver.resolve([AdapterRef("local", "a"), AdapterRef("fake", "b")], merge))
    parts = [result(harness.submit(name))[0].checkpoints[0] for name in "ab"]
    assert spec == AdapterSpec(merge.identity(identities), "a,b", tuple(parts), 2 * NUM_ELEMENTS, merge)
    assert resolved == ResolvedAdapter(spec.identity)


def test_merge_of_duplicates_fetches_adapter_once(harness: ResolverHarness) -> None:
    identity = harness.put("a", 1)
    for count in (1, 2):
        merge = Merge((0.5,) * count)
        spec, _ = result(harness.resolver.resolve([AdapterRef("fake", "a")] * count, merge))
        assert (spec.identity, len(spec.checkpoints)) == (merge.identity([identity] * count), count)
    assert harness.fake.resolved_names == ["a"]


@pytest.mark.parametrize(("count", "weights"), [(0, None), (2, None), (1, 2), (3, 2), (0, 1)])
def test_merge_needs_one_weight_per_adapter(harness: ResolverHarness, count: int, weights: int | None) -> None:
    merge = None if weights is None else Merge((1.0,) * weights)
    assert isinstance(error_of(harness.resolver.resolve([AdapterRef("fake", "a")] * count, merge)), InputError)
    assert not harness.fake.resolved_names


def test_pending_merge_uses_no_thread(harness: ResolverHarness) -> None:
    """Use a single thread and several merges that share parts."""
    harness.resolver = harness.make(num_threads=1)
    names = [str(number) for number in range(6)]
    for number, name in enumerate(names):
        harness.put(name, number)
    gate = harness.fake.before = harness.gate()
    pairs = list(itertools.permutations(names, 2))
    merges = [harness.resolver.resolve([AdapterRef("fake", name) for name in pair], Merge((1, 1))) for pair in pairs]
    gate.opened.set()
    assert len({result(future)[0].identity for future in merges}) == len(pairs)
    assert sorted(harness.fake.resolved_names) == names


def test_merge_fails_with_first_failed_part(harness: ResolverHarness) -> None:
    harness.put("slow", 1)
    gate = harness.fake.before = harness.gate()
    future = harness.resolver.resolve([AdapterRef("fake", "slow"), AdapterRef("other", "missing")], Merge((1, 1)))
    assert isinstance(error_of(future), AdapterNotFoundError)
    gate.opened.set()
    assert result(harness.submit("slow"))


# --- Concurrent callers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["fake", "local"])
def test_concurrent_requests_share_one_fetch(harness: ResolverHarness, source: str, monkeypatch: Any) -> None:
    identity = harness.put("tuned", 1)
    gate, looks = harness.gate(), []

    def slow(path: Path, name: str, *rest: Any) -> Any:
        looks.append(name)
        gate()
        return read_header(path, name, *rest)

    monkeypatch.setattr(finder, "read_header", slow)
    futures = [harness.submit("tuned", source) for _ in range(100)]
    gate.wait_for()
    futures += [harness.submit("tuned", source) for _ in range(100)]
    assert harness.resolver.num_fetching == 1
    gate.opened.set()
    assert {result(future)[0].identity for future in futures} == {identity}
    # Callers after the first file check share a second fetch.
    assert len(looks) <= (1 if source == "fake" else 2)
    assert harness.resolver.num_fetching == 0


def test_requests_with_different_tokens_do_not_share_fetches(harness: ResolverHarness) -> None:
    harness.put("tuned", 1)
    gate = harness.fake.before = harness.gate()
    futures = [harness.submit("tuned", token=token) for token in (None, "", "a", "b", "a")]
    gate.wait_for(3)
    assert harness.resolver.num_fetching == 3
    gate.opened.set()
    assert len({result(future)[0].identity for future in futures}) == 1
    assert len(harness.fake.resolved_names) == 3


def test_hanging_source_does_not_block_other_sources(harness: ResolverHarness) -> None:
    harness.resolver = harness.make(num_threads=2)
    identity, held = harness.put("tuned", 1), []
    for number in range(50):
        harness.put(f"slow{number}", number)
    for source in (harness.fake, harness.other):
        source.before = harness.gate()
        held += [harness.submit(f"slow{number}", source.kind) for number in range(50) for _ in range(3)]
        source.before.wait_for(2)
    assert harness.resolver.num_fetching == 100
    for _ in range(5):
        assert harness.resolve_identity("tuned", "local") == identity
    assert isinstance(harness.error("tuned", "nowhere"), AdapterError)
    assert not any(future.done() for future in held)


def test_cached_adapter_resolves_while_source_hangs(harness: ResolverHarness) -> None:
    harness.resolver = harness.make(num_threads=1)
    identity = harness.put("tuned", 1)
    assert harness.resolve_identity("tuned") == identity
    gate = harness.fake.before = harness.gate()
    held = harness.submit("slow")
    gate.wait_for()
    known = harness.submit("tuned")
    assert result(known)[0].identity == identity
    assert not held.done()


def test_cancelled_caller_does_not_affect_other_callers(harness: ResolverHarness, caplog: Any) -> None:
    identity = harness.put("tuned", 1)
    gate = harness.fake.before = harness.gate()
    futures = [harness.submit("tuned") for _ in range(3)]
    merge = harness.resolver.resolve([AdapterRef("fake", "tuned")] * 2, Merge((1, 1)))
    gate.wait_for()
    assert futures[0].cancel()
    assert merge.cancel()
    gate.opened.set()
    assert [result(future)[0].identity for future in futures[1:]] == [identity] * 2
    with pytest.raises(CancelledError):
        futures[0].result(TIMEOUT_S)
    assert harness.resolve_identity("tuned") == identity
    assert not caplog.records


def test_done_callback_can_call_resolve(harness: ResolverHarness) -> None:
    """Call `resolve` from a callback on the resolver's thread, which holds no lock then."""
    identities = [harness.put(name, number) for number, name in enumerate("ab")]
    harness.resolver = harness.make(num_threads=1)
    second: Future[Any] = Future()
    first = harness.submit("a")
    first.add_done_callback(lambda _: second.set_result(harness.submit("b")))
    assert result(first)[0].identity == identities[0]
    assert result(second.result(TIMEOUT_S))[0].identity == identities[1]


def test_too_many_pending_fetches_are_rejected(harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver_module, "MAX_PENDING_FETCHES", 3)
    harness.put("0", 1)
    gate = harness.fake.before = harness.gate()
    held = [harness.submit(str(number)) for number in range(3)]
    error = harness.error("4")
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 1
    joined = harness.submit("0")
    gate.opened.set()
    assert result(joined) == result(held[0])


# --- Expiry -----------------------------------------------------------------------------------------------------------


def test_resolution_is_revalidated_after_expiry(harness: ResolverHarness) -> None:
    first = harness.put("tuned", 1)
    assert [harness.resolve_identity("tuned", token=SECRET) for _ in range(3)] == [first] * 3
    assert len(harness.fake.resolved_names) == 1
    harness.clock.now += 59.9
    assert harness.resolve_identity("tuned", token=SECRET) == first
    assert len(harness.fake.resolved_names) == 1
    harness.clock.now += 0.1
    assert harness.resolve_identity("tuned", token=SECRET) == first
    assert len(harness.fake.resolved_names) == 2
    harness.clock.now += 59.9
    assert harness.resolve_identity("tuned", token=SECRET) == first
    assert len(harness.fake.resolved_names) == 2


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json"])
@pytest.mark.parametrize("change", ["gone", "other"])
def test_deleted_files_are_not_served(harness: ResolverHarness, file: str, change: str) -> None:
    harness.put("tuned", 1)
    path = write(harness.root / "tuned", {"tokenizer.json": b"{}"}) / file
    harness.resolve_identity("tuned")
    if change == "gone":
        path.unlink()

        def write_again(_: str) -> None:
            write(path.parent, files_of(1) | {"tokenizer.json": b"{}"})

        harness.fake.before = write_again
    else:
        replace(path.parent, {file: (files_of(2, r=2) | {"tokenizer.json": b"[]"})[file]})
    harness.resolve_identity("tuned")
    assert len(harness.fake.resolved_names) == 2


def test_source_failure_delay_doubles(harness: ResolverHarness) -> None:
    identity = harness.put("tuned", 1)
    harness.fake.before = fail_with(SourceError("it is down"))
    for count, delay_s in enumerate((1, 2, 4, 8, 16, 30, 30), start=1):
        errors = [harness.error("tuned")]
        harness.clock.now += delay_s - 0.25
        errors.append(harness.error("tuned"))
        assert len(harness.fake.resolved_names) == count
        assert [type(error) for error in errors] == [SourceError] * 2
        assert [error.retry_after_s for error in errors] == [delay_s, 0.25]
        assert len({id(error) for error in errors}) == 2, "raising an error changes it"
        harness.clock.now += 0.25
    harness.fake.before = ignore
    assert harness.resolve_identity("tuned") == identity
    harness.fake.before = fail_with(SourceError("it is down"))
    harness.resolver.forget("fake", "tuned")
    assert harness.error("tuned").retry_after_s == 1


def test_success_resets_failure_delay(harness: ResolverHarness) -> None:
    harness.put("tuned", 1)
    harness.fake.before = fail_with(SourceError("it is down"))
    assert [harness.error("tuned").retry_after_s, harness.clock.now] == [1, 1000]
    harness.clock.now += 1
    assert harness.error("tuned").retry_after_s == 2
    harness.clock.now += 2
    harness.fake.before = ignore
    harness.resolve_identity("tuned")
    shutil.rmtree(harness.root / "tuned")
    harness.fake.before = fail_with(SourceError("it is down"))
    assert harness.error("tuned").retry_after_s == 1


@pytest.mark.parametrize("error", [AdapterError, AdapterNotFoundError, AdapterAccessError, LoraxError])
def test_adapter_failure_is_cached_for_one_second(harness: ResolverHarness, error: type[LoraxError]) -> None:
    identity = harness.put("tuned", 1)
    harness.fake.before = fail_with(error("it is no good"))
    for count in (1, 2, 3):
        assert harness.error("tuned").retry_after_s == 1
        harness.clock.now += 0.75
        again = harness.error("tuned")
        assert (type(again), str(again), again.retry_after_s) == (error, "it is no good", 0.25)
        assert len(harness.fake.resolved_names) == count
        harness.clock.now += 0.25
    harness.fake.before = ignore
    assert harness.resolve_identity("tuned") == identity


def test_failures_are_cached_per_token(harness: ResolverHarness) -> None:
    identity = harness.put("tuned", 1)
    harness.fake.before = fail_with(AdapterAccessError("not for you"))
    assert isinstance(harness.error("tuned", token="a"), AdapterAccessError)
    harness.fake.before = ignore
    assert harness.resolve_identity("tuned", token="b") == identity
    assert isinstance(harness.error("tuned", token="a"), AdapterAccessError)


def test_unexpected_error_reaches_only_its_caller(harness: ResolverHarness) -> None:
    identity, bug = harness.put("tuned", 1), ZeroDivisionError("ours")
    harness.resolver = harness.make(num_threads=1)
    for error in (bug, SystemExit(1)):
        harness.fake.before = fail_with(error)
        assert harness.error("tuned", token=SECRET) is error
    harness.fake.before = ignore
    assert harness.resolve_identity("tuned", token=SECRET) == identity
    harness.fake.before = fail_with(bug)
    harness.clock.now += 60
    assert harness.error("tuned", token=SECRET) is bug
    assert harness.resolver.num_fetching == 0
    assert isinstance(error_of(harness.resolver.resolve([None])), AttributeError)  # type: ignore[list-item]


# --- Unavailable sources ----------------------------------------------------------------------------------------------


TOO_OLD_S = 60 * (1 + resolutions.MAX_STALE_FACTOR)  # after which a resolution is not served without revalidation


def test_unavailable_source_serves_cached_adapter(harness: ResolverHarness, caplog: pytest.LogCaptureFixture) -> None:
    first = harness.put("tuned", 1)
    known = result(harness.submit("tuned"))
    harness.clock.now += TOO_OLD_S
    harness.fake.before = fail_with(SourceError("adapter 'tuned': it is down"))
    with caplog.at_level(logging.DEBUG):
        assert result(harness.submit("tuned")) == known
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "'tuned': it is down" in caplog.text
    # Not queried for one second, then for two seconds.
    for wait_s, num_queries in ((0.9, 2), (0.1, 3), (1.9, 3), (0.1, 4)):
        harness.clock.now += wait_s
        assert harness.resolve_identity("tuned") == first
        assert len(harness.fake.resolved_names) == num_queries
    # Callers with other tokens get an error.
    assert isinstance(harness.error("tuned", token="other"), SourceError)
    second = harness.put("tuned", 2)
    assert isinstance(harness.error("tuned"), SourceError), "its files are others now"
    harness.fake.before = ignore
    harness.clock.now += 30
    assert harness.resolve_identity("tuned") == second


def test_token_access_expires_while_source_is_down(harness: ResolverHarness) -> None:
    """Reject the token, because it may have been revoked."""
    identity = harness.put("tuned", 1)
    assert harness.resolve_identity("tuned", token=SECRET) == identity
    harness.fake.before = fail_with(SourceError("it is down"))
    harness.clock.now += 59
    assert harness.resolve_identity("tuned", token=SECRET) == identity
    for wait_s in (1, 0.5, 3600, 86400):
        harness.clock.now += wait_s
        error = harness.error("tuned", token=SECRET)
        assert isinstance(error, SourceError)
        assert error.retry_after_s
    harness.fake.before = ignore
    harness.clock.now += 30
    assert harness.resolve_identity("tuned", token=SECRET) == identity


@pytest.mark.parametrize("error", [AdapterAccessError, AdapterNotFoundError, AdapterError])
def test_rejected_adapter_is_not_served_after_outage(harness: ResolverHarness, error: type[LoraxError]) -> None:
    harness.put("tuned", 1)
    harness.resolve_identity("tuned", token=SECRET)
    for failure in (error("no more"), SourceError("it is down"), SourceError("it is down")):
        harness.clock.now += 60
        harness.fake.before = fail_with(failure)
        assert type(harness.error("tuned", token=SECRET)) is type(failure)


def test_rejection_after_outage_is_reported(harness: ResolverHarness) -> None:
    identity = harness.put("tuned", 1)
    harness.resolve_identity("tuned")
    harness.clock.now += TOO_OLD_S
    harness.fake.before = fail_with(SourceError("it is down"))
    assert harness.resolve_identity("tuned") == identity
    harness.clock.now += 1
    harness.fake.before = fail_with(AdapterAccessError("no more"))
    assert isinstance(harness.error("tuned"), AdapterAccessError)


def test_local_folder_has_no_outage_fallback(harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A previous version that still exists must not be served just because the folder changed."""
    harness.put("tuned", 1)
    harness.resolve_identity("tuned", "local")
    monkeypatch.setattr(LocalSource, "fetch", lambda *_: fail_with(SourceError("it changed"))(""))
    for _ in range(2):
        assert isinstance(harness.error("tuned", "local"), SourceError)


# --- Forgetting -------------------------------------------------------------------------------------------------------


def test_forget_queries_source_again(harness: ResolverHarness) -> None:
    for name in ("tuned", "other"):
        harness.put(name, 1)
        for token in (None, "a", "b"):
            harness.resolve_identity(name, token=token)
    harness.fake.resolved_names.clear()
    harness.resolver.forget("fake", "tuned")
    harness.resolver.forget("local", "other")
    harness.resolver.forget("fake", "unheard of")
    for name in ("tuned", "other"):
        for token in (None, "a", "b"):
            harness.resolve_identity(name, token=token)
    assert harness.fake.resolved_names == ["tuned"] * 3


def test_forget_clears_failure(harness: ResolverHarness) -> None:
    harness.error("tuned")
    identity = harness.put("tuned", 1)
    assert isinstance(harness.error("tuned"), AdapterNotFoundError)
    harness.resolver.forget("fake", "tuned")
    assert harness.resolve_identity("tuned") == identity


@pytest.mark.parametrize("fails", [False, True])
def test_forget_discards_result_of_running_fetch(harness: ResolverHarness, fails: bool) -> None:
    harness.put("tuned", 1)
    gate = harness.gate()

    def before(name: str) -> None:
        gate()
        if fails:
            raise AdapterError("it is no good")

    harness.fake.before = before
    old = harness.submit("tuned", token=SECRET)
    gate.wait_for()
    harness.resolver.forget("fake", "tuned")
    harness.fake.before = ignore
    second = harness.put("tuned", 2)
    assert harness.resolve_identity("tuned", token=SECRET) == second, "it does not wait for the old one either"
    harness.clock.now += 30
    gate.opened.set()
    assert (old.exception(TIMEOUT_S) is not None) == fails
    assert harness.resolve_identity("tuned", token=SECRET) == second
    assert len(harness.fake.resolved_names) == 2
    harness.clock.now += 30
    assert harness.resolve_identity("tuned", token=SECRET) == second
    assert len(harness.fake.resolved_names) == 3, "it did not make what is known look younger"
    assert harness.resolver.num_fetching == 0


@pytest.mark.parametrize("is_known", [True, False])
def test_caches_are_bounded(harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    for module, limit in (
        *((resolutions, name) for name in ("MAX_RESOLUTIONS", "MAX_FAILURES")),
        *((finder, name) for name in ("MAX_IDENTITIES", "MAX_BASE_TYPES")),
    ):
        monkeypatch.setattr(module, limit, 3)
    harness.resolver = harness.make(time_ns=lambda: 2**63)
    harness.fake.base_types = {f"base{number}": "llama" for number in range(6) if is_known}
    for number in range(6):
        harness.put(f"good{number}", number, base_model_name_or_path=f"base{number}")
        harness.resolve_identity("good0")
        harness.resolve_identity(f"good{number}")
        harness.error(f"bad{number}")
    remembered = {**vars(harness.resolver._resolutions), **vars(harness.resolver._finder)}
    sizes = {name: len(held) for name, held in remembered.items() if isinstance(held, Cache)}
    assert sizes == {"_resolutions": 3, "_failures": 3, "_identities": 3, "_base_types": 3}
    assert harness.fake.resolved_names.count("good0") == 1
    harness.fake.resolved_names.clear()
    for name in ("good0", "good5", "good1"):
        harness.resolve_identity(name)
    assert harness.fake.resolved_names == ["good1"], "those that are asked for stay"


# --- File checks ------------------------------------------------------------------------------------------------------


class FileAccessCounter:
    """Counts file reads and stats by thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats: list[Path] = []
        self.reads: list[Path] = []
        self.threads: set[int] = set()
        monkeypatch.setattr(finder, "read_stamp_or_none", self._stamp)
        monkeypatch.setattr(source_module, "read_json", self._read)
        monkeypatch.setattr(finder, "read_json", self._read)

    def _stamp(self, path: Path) -> Stamp | None:
        self.stats.append(path)
        self.threads.add(threading.get_ident())
        return read_stamp_or_none(path)

    def _read(self, path: Path, *rest: Any) -> dict[str, Any]:
        self.reads.append(path)
        return read_json(path, *rest)

    def clear(self) -> None:
        self.stats.clear()
        self.reads.clear()


def make_resolver_with_old_files(harness: ResolverHarness) -> AdapterResolver:
    """Create a resolver for which all existing files are old."""
    now_ns = time.time_ns() + MIN_STAMP_AGE_NS + 10**9
    return harness.make(time_ns=lambda: now_ns)


@pytest.mark.parametrize("source", ["local", "fake"])
def test_cached_resolution_checks_each_file_once_off_caller_thread(
    harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    identity = harness.put("tuned", 1)
    folder = write(harness.root / "tuned", {"tokenizer.json": b"{}"})
    harness.resolver = make_resolver_with_old_files(harness)
    assert harness.resolve_identity("tuned", source) == identity
    looks, real = FileAccessCounter(monkeypatch), LocalSource.find
    result: list[str] = []

    def find(source: LocalSource, name: str, token: str | None) -> AdapterFiles:
        result.append(name)
        return real(source, name, token)

    monkeypatch.setattr(LocalSource, "find", find)
    harness.fake.resolved_names.clear()
    for _ in range(3):
        looks.clear()
        assert harness.resolve_identity("tuned", source) == identity
        folders = {folder, folder / TEMPLATES_FOLDER} if source == "local" else set()
        assert sorted(looks.stats) == sorted({folder / file for file in (*REQUIRED_FILES, "tokenizer.json")} | folders)
        assert not looks.reads
    assert not result
    assert not harness.fake.resolved_names
    assert threading.get_ident() not in looks.threads, "a file system that hangs would stop whoever asks"


def put_earlier(harness: ResolverHarness) -> None:
    write(harness.tmp_path / "earlier" / "tuned", files_of(2))


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        (lambda harness: replace(harness.root / "tuned", files_of(2)), True),
        (lambda harness: rewrite(harness.root / "tuned", files_of(2)), True),
        (lambda harness: swap_link(harness.root / "tuned", files_of(2)), True),
        (lambda harness: replace(harness.root / "tuned", {CONFIG_FILE: files_of(1, lora_alpha=9)[CONFIG_FILE]}), True),
        (put_earlier, True),
        (lambda harness: write(harness.root / "tuned", {"tokenizer.json": b"{}"}), False),
        (lambda harness: write(harness.root / "tuned" / TEMPLATES_FOLDER, {"tools.jinja": b"{}"}), False),
        (lambda harness: write(harness.root / "tuned", {"README.md": b""}), False),
    ],
    ids=["replaced", "rewritten", "link swapped", "config", "an earlier root", "tokenizer", "template", "readme"],
)
def test_next_request_sees_changed_file(
    harness: ResolverHarness, change: Callable[[ResolverHarness], None], is_another: bool
) -> None:
    first = harness.put("tuned", 1)
    (harness.root / "tuned" / TEMPLATES_FOLDER).mkdir()
    sources = {"local": LocalSource([harness.tmp_path / "earlier", harness.root])}
    now_ns = time.time_ns() + MIN_STAMP_AGE_NS + 10**9
    found_by = finder.AdapterFinder(
        AdapterSources(sources, max_bytes=2**30),
        model_type="llama",
        model_class="LlamaForCausalLM",
        time_ns=lambda: now_ns,
    )
    harness.resolver = AdapterResolver(found_by)
    harness.made.append(harness.resolver)
    known = result(harness.submit("tuned", "local"))
    assert result(harness.submit("tuned", "local")) == known
    change(harness)
    spec, resolved = result(harness.submit("tuned", "local"))
    assert (spec.identity != first) == is_another
    listed = ("tokenizer.json", f"{TEMPLATES_FOLDER}/tools.jinja")
    assert resolved.tokenizer_files == tuple(file for file in listed if (harness.root / "tuned" / file).exists())


def test_hanging_file_system_blocks_only_its_requests(
    harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = harness.put("tuned", 1)
    harness.resolve_identity("tuned", "fake")
    harness.resolver = make_resolver_with_old_files(harness)
    harness.resolve_identity("tuned", "fake")
    gate = harness.gate()

    def hang(found: finder.FoundAdapter) -> bool:
        gate()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(finder.FoundAdapter, "is_unchanged", hang)
        held = [harness.submit("tuned", "fake") for _ in range(5)]  # returns before the file check
        gate.wait_for(resolver_module.NUM_CHECK_THREADS)
        assert harness.resolve_identity("tuned", "other") == identity
        assert not any(future.done() for future in held)
        gate.opened.set()
        assert {result(future)[0].identity for future in held} == {identity}


def test_too_many_pending_checks_are_rejected(harness: ResolverHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.put("tuned", 1)
    harness.resolve_identity("tuned")
    gate = harness.gate()
    monkeypatch.setattr(resolver_module, "MAX_PENDING_FETCHES", 3)

    def is_unchanged(_: finder.FoundAdapter) -> bool:
        gate()
        return True

    monkeypatch.setattr(finder.FoundAdapter, "is_unchanged", is_unchanged)
    held = [harness.submit("tuned") for _ in range(3)]
    assert isinstance(harness.error("tuned"), OverloadedError)
    gate.opened.set()
    for future in held:
        result(future)


def test_fetched_tier_is_returned_only_if_request_waited(harness: ResolverHarness) -> None:
    harness.put("tuned", 1)
    write(harness.root / "empty", {CONFIG_FILE: files_of(1)[CONFIG_FILE]})
    assert result(harness.submit("tuned"))[1].tier == "", "it was here already"
    harness.fake.sizes = {file: len(content) for file, content in files_of(1).items()}

    def bring(wanted: Sequence[str]) -> None:
        if WEIGHTS_FILE in wanted:
            write(harness.root / "empty", files_of(1))

    harness.fake.after_fetch = bring
    assert result(harness.submit("empty"))[1].tier == "fetched"
    assert result(harness.submit("empty"))[1].tier == ""
    (harness.root / "empty" / WEIGHTS_FILE).unlink()
    merge = harness.resolver.resolve([AdapterRef("fake", name) for name in ("tuned", "empty")], Merge((1, 1)))
    assert result(merge)[1].tier == "fetched"


# --- Stale resolutions during revalidation ----------------------------------------------------------------------------


def wait_for_fetches(harness: ResolverHarness) -> None:
    """Wait until no fetch is running, since a second request would share it."""
    while harness.resolver.num_fetching:
        time.sleep(0.001)


def test_stale_resolution_is_served_during_revalidation(harness: ResolverHarness) -> None:
    first = harness.put("tuned", 1)
    assert harness.resolve_identity("tuned") == first
    harness.clock.now += 60
    gate = harness.fake.before = harness.gate()
    assert [harness.resolve_identity("tuned") for _ in range(5)] == [first] * 5, "it waits for the source"
    gate.wait_for()
    assert len(harness.fake.resolved_names) == 2, "once is enough"
    gate.opened.set()
    wait_for_fetches(harness)
    harness.clock.now += 59
    assert harness.resolve_identity("tuned") == first
    assert len(harness.fake.resolved_names) == 2


@pytest.mark.parametrize(("token", "age_s"), [(SECRET, 60), (None, TOO_OLD_S)], ids=["a token", "too old"])
def test_request_with_token_waits_for_revalidation(harness: ResolverHarness, token: str | None, age_s: float) -> None:
    harness.put("tuned", 1)
    harness.resolve_identity("tuned", token=token)
    harness.clock.now += age_s
    gate = harness.fake.before = harness.gate()
    held = harness.submit("tuned", token=token)
    gate.wait_for()
    assert not held.done()
    gate.opened.set()
    result(held)


@pytest.mark.parametrize("error", [AdapterAccessError, AdapterNotFoundError])
def test_stale_resolution_ends_with_source_rejection(harness: ResolverHarness, error: type[LoraxError]) -> None:
    first = harness.put("tuned", 1)
    harness.resolve_identity("tuned")
    harness.clock.now += 60
    harness.fake.before = fail_with(error("no more"))
    assert harness.resolve_identity("tuned") == first
    wait_for_fetches(harness)
    assert isinstance(harness.error("tuned"), error)


def test_unavailable_source_is_not_queried_for_every_request(harness: ResolverHarness) -> None:
    first = harness.put("tuned", 1)
    harness.resolve_identity("tuned")
    harness.clock.now += 60
    harness.fake.before = fail_with(SourceError("it is down"))
    for _ in range(5):
        assert harness.resolve_identity("tuned") == first
        wait_for_fetches(harness)
    assert len(harness.fake.resolved_names) == 2


def test_new_hub_version_is_found_in_background(harness: ResolverHarness, hub: HubServer) -> None:
    first, second = (identity_of(harness.tmp_path, files_of(number)) for number in (1, 2))
    assert result(harness.submit(HUB_NAME, "hub"))[1].tier == "fetched"
    hub.repos[HUB_NAME] = Repo(files_of(2))
    harness.clock.now += 60
    assert harness.resolve_identity(HUB_NAME, "hub") == first
    wait_for_fetches(harness)
    spec, resolved = result(harness.submit(HUB_NAME, "hub"))
    assert spec.identity == second
    assert resolved.tier == "", "it was fetched for nobody"


# --- Hostile callers --------------------------------------------------------------------------------------------------

NAMES = [
    *(
        "",
        ".",
        "..",
        "../outside",
        "/etc",
        "a\0b",
        "a\nb",
        "\ud800",
        "~root",
        "x" * 513,
        "x" * 10**6,
        "a/../../outside",
    ),
    *("https://evil/x", "%2e%2e/outside", "outside", "\u202egnp", "owner/name@" + "r" * 400, "{name}", "%s%n"),
]


@pytest.mark.parametrize("source", ["local", "hub", "nowhere", "", "\ud800", "x" * 10**6])
def test_hostile_names_and_tokens_are_rejected(harness: ResolverHarness, source: str, tmp_path: Path) -> None:
    write(tmp_path / "outside", files_of(1))
    identity = harness.put("tuned", 1)
    harness.resolver = harness.make(HubSource(tmp_path / "cache", "http://127.0.0.1:9", offline=True))
    for name, token in itertools.product(NAMES, [None, "a\r\nb: c", "\ud800", "x" * 10**5]):
        assert isinstance(harness.error(name, source, token), AdapterError)
    assert harness.resolve_identity("tuned", "local") == identity
    kept = [key for key in harness.resolver._resolutions._failures if len(key[0]) + len(key[1]) > 1000]
    assert not kept, "what is no name is not worth remembering"


def find_referenced_objects(start: object) -> Iterator[object]:
    """Yield all objects that an object references, except modules and classes."""
    seen, waiting = {id(start)}, [start]
    while waiting:
        result = waiting.pop()
        yield result
        for child in gc.get_referents(result):
            is_module = isinstance(child, type | type(gc)) or (isinstance(child, dict) and "__spec__" in child)
            if id(child) not in seen and not is_module:
                seen.add(id(child))
                waiting.append(child)


def test_token_is_not_stored_or_logged(harness: ResolverHarness, caplog: pytest.LogCaptureFixture) -> None:
    secret = "".join(["hf_", "kept", "nowhere"])  # built at run time, so it is not in the function's constants
    harness.put("tuned", 1, base_model_name_or_path="owner/base")

    def fail(name: str) -> None:
        if name != "tuned":
            try:
                raise ValueError(f"Bearer {secret}")
            except ValueError as error:
                raise SourceError("it is down") from error

    harness.fake.before = fail
    with caplog.at_level(logging.DEBUG):
        for name in ("tuned", "tuned", "down", "down"):
            harness.submit(name, token=secret).exception(TIMEOUT_S)
    harness.fake.before = ignore
    for threads in harness.resolver._threads.values():
        threads.submit(lambda: None)  # a thread keeps its last task until it gets another
    harness.resolver.close()
    harness.resolver = harness.make()
    for name in ("tuned", "tuned", "down"):
        harness.submit(name, token=secret).exception(TIMEOUT_S)
    held = [
        text for text in find_referenced_objects(vars(harness.resolver)) if isinstance(text, str) and secret in text
    ]
    assert not held
    assert secret not in caplog.text


def test_concurrent_operations_return_correct_identities(harness: ResolverHarness) -> None:
    """Mix all operations in several threads. Results must be correct, and all state must be released."""
    names = [f"adapter{number}" for number in range(8)]
    expected = {name: harness.put(name, number) for number, name in enumerate(names)}
    harness.resolver = harness.make(num_threads=3)
    wrong: list[Any] = []

    def hammer(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            chosen = chance.choices(names, k=chance.choice([1, 1, 2, 3]))
            refs = [AdapterRef(chance.choice(["fake", "local"]), name, chance.choice([None, "a"])) for name in chosen]
            merge = Merge((1.0,) * len(chosen)) if len(chosen) > 1 else None
            future = harness.resolver.resolve(refs, merge)
            action = chance.random()
            if action < 0.1:
                harness.resolver.forget(refs[0].source, refs[0].name)
            if action > 0.9:
                future.cancel()
                continue
            identities = [expected[name] for name in chosen]
            actual = result(future)[0].identity
            if actual != (merge.identity(identities) if merge else identities[0]):
                wrong.append((chosen, actual))

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    for name in names:
        harness.resolve_identity(name, "local")
    assert harness.resolver.num_fetching == 0
    assert not harness.resolver._fetches


# --- Close ------------------------------------------------------------------------------------------------------------


def test_close_fails_pending_resolves(harness: ResolverHarness, monkeypatch: Any) -> None:
    harness.resolver = harness.make(num_threads=1)
    gate = harness.fake.before = harness.gate()
    for name in ("a", "b", "known"):
        harness.put(name, 1)
    harness.resolve_identity("known", "other")
    monkeypatch.setattr(finder, "read_header", lambda _, name, *_rest: gate(name))
    futures = [harness.submit(name, source) for name in "ab" for source in ("fake", "local")]
    gate.wait_for(2)
    futures.append(harness.submit("a", "local"))  # starts another fetch after the first
    futures.append(harness.resolver.resolve([AdapterRef("fake", "a"), AdapterRef("other", "known")], Merge((1, 1))))
    assert not any(thread.daemon is False for thread in threading.enumerate() if "adapters of" in thread.name)
    harness.resolver.close()
    assert all(isinstance(error_of(future), EngineError) for future in futures)
    assert isinstance(harness.error("known", "other"), EngineError)
    assert harness.resolver.num_fetching == 0
    gate.opened.set()
    harness.resolver.close()


def test_close_stops_threads(harness: ResolverHarness) -> None:
    harness.resolver = harness.make(num_threads=4)
    before = set(threading.enumerate())
    for number in range(8):
        harness.put(str(number), number)
        harness.resolve_identity(str(number))
    started = set(threading.enumerate()) - before
    assert len(started) == 4
    harness.resolver.close()
    for thread in started:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


# --- Real hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def local_hub_environment() -> Iterator[None]:
    """Use a local hub and one SSL context, because reading system certificates is slow."""
    context = httpx2.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(httpx2, "create_ssl_context", lambda: context)
        yield


@pytest.fixture
def hub(harness: ResolverHarness) -> Iterator[HubServer]:
    with running(HubServer()) as server:
        server.repos[HUB_NAME] = Repo(files_of(1) | {"tokenizer.json": b"{}", "README.md": b"a"})
        harness.resolver = harness.make(HubSource(harness.tmp_path / "cache", server.url, timeout_s=TIMEOUT_S))
        yield server


def test_hub_is_revalidated_after_expiry(harness: ResolverHarness, hub: HubServer) -> None:
    first, second = (identity_of(harness.tmp_path, files_of(number)) for number in (1, 2))
    spec, resolved = result(harness.submit(HUB_NAME, "hub", SECRET))
    assert spec.identity == first
    assert resolved.folder is not None
    assert (Path(resolved.folder) / "tokenizer.json").read_bytes() == b"{}"
    num_requests = len(hub.seen)
    hub.repos[HUB_NAME] = Repo(files_of(2))
    assert harness.resolve_identity(HUB_NAME, "hub", SECRET) == first
    assert len(hub.seen) == num_requests
    harness.clock.now += 60
    assert harness.resolve_identity(HUB_NAME, "hub", SECRET) == second
    assert read_stamp(spec.checkpoints[0].folder / WEIGHTS_FILE) == spec.checkpoints[0].stamp, (
        "who uses the first may go on"
    )


def test_emptied_cache_is_downloaded_again(harness: ResolverHarness, hub: HubServer) -> None:
    first = harness.resolve_identity(HUB_NAME, "hub")
    shutil.rmtree(harness.tmp_path / "cache")
    spec, _ = result(harness.submit(HUB_NAME, "hub"))
    assert spec.identity == first
    assert spec.checkpoints[0].stamp == read_stamp(spec.checkpoints[0].folder / WEIGHTS_FILE)


def test_cached_adapter_is_served_during_hub_outage(harness: ResolverHarness, hub: HubServer) -> None:
    hub.repos["owner/late"] = Repo(files_of(2))
    first = harness.resolve_identity(HUB_NAME, "hub")
    harness.clock.now += 60
    for fault in ("info", CONFIG_FILE):
        hub.faults[fault] = Fault(reply=Reply(503))
    assert harness.resolve_identity(HUB_NAME, "hub") == first
    assert isinstance(harness.error("owner/late", "hub"), SourceError)
    hub.close()
    harness.clock.now += 30
    assert harness.resolve_identity(HUB_NAME, "hub") == first
    shutil.rmtree(harness.tmp_path / "cache")
    harness.clock.now += 30
    assert isinstance(harness.error(HUB_NAME, "hub"), SourceError)


def test_revoked_hub_token_is_rejected_after_expiry(harness: ResolverHarness, hub: HubServer) -> None:
    hub.repos[HUB_NAME].token = SECRET
    first = harness.resolve_identity(HUB_NAME, "hub", SECRET)
    for token in (None, "another"):
        assert isinstance(harness.error(HUB_NAME, "hub", token), AdapterAccessError)
    hub.repos[HUB_NAME].token = "a new one"
    assert harness.resolve_identity(HUB_NAME, "hub", SECRET) == first, "for as long as an answer holds"
    harness.clock.now += 60
    assert isinstance(harness.error(HUB_NAME, "hub", SECRET), AdapterAccessError)
    hub.faults["info"] = hub.faults[CONFIG_FILE] = Fault(reply=Reply(500))
    harness.clock.now += 60
    assert isinstance(harness.error(HUB_NAME, "hub", SECRET), SourceError)


def test_adapter_deleted_on_hub_is_not_found(harness: ResolverHarness, hub: HubServer) -> None:
    harness.resolve_identity(HUB_NAME, "hub", SECRET)
    del hub.repos[HUB_NAME]
    harness.clock.now += 60
    assert isinstance(harness.error(HUB_NAME, "hub", SECRET), AdapterNotFoundError)
