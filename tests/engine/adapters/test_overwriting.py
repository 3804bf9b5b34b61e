"""Overwritten adapter folders: the old version is served for a limited time, and never a mixture."""

import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorax_server.adapters.sources.local import LocalSource
from lorax_server.engine.adapters.resolutions import INCOMPLETE_WRITE_S, LOCAL_RETRY_S, RETRY_S
from lorax_server.engine.engine import Engine
from lorax_server.errors import AdapterError, AdapterNotFoundError, SourceError
from lorax_server.files.names import CONFIG_FILE, WEIGHTS_FILE
from lorax_server.types import AdapterRef, AdapterStage, Failure, Merge, ResolvedAdapter
from tests.engine.adapters.test_resolver import ResolverHarness, files_of, identity_of, result

OLD, NEW = files_of(1), files_of(2)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[ResolverHarness]:
    made = ResolverHarness(tmp_path)
    made.put("tuned", 1)
    made.resolve_identity("tuned", "local")
    yield made
    made.close()


def overwrite(harness: ResolverHarness, file: str, content: bytes) -> None:
    """Overwrite a file in place, as `cp` does."""
    with (harness.root / "tuned" / file).open("wb") as opened:
        opened.write(content)


def resolve(harness: ResolverHarness) -> ResolvedAdapter:
    return result(harness.submit("tuned", "local"))[1]


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE])
def test_partially_overwritten_adapter_serves_old_version(harness: ResolverHarness, file: str) -> None:
    files = {**OLD, file: files_of(2, lora_alpha=77)[file]}
    old, new = identity_of(harness.tmp_path, OLD), identity_of(harness.tmp_path, files)
    content = files[file]
    for size in range(0, len(content), 7):
        overwrite(harness, file, content[:size])
        harness.clock.now += RETRY_S / 100
        result = resolve(harness)
        assert result.identity == old
        assert result.stale is not None
        assert (result.stale.kind, result.stale.status) == ("AdapterError", 424)
        assert "'tuned'" in result.stale.message
    overwrite(harness, file, content)
    harness.clock.now += RETRY_S
    assert resolve(harness)._replace(folder=None, tier="") == ResolvedAdapter(new)


def test_stale_adapter_is_logged(harness: ResolverHarness, caplog: pytest.LogCaptureFixture) -> None:
    overwrite(harness, WEIGHTS_FILE, b"half")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            resolve(harness)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("adapter 'tuned': ")
    assert line.endswith("; serving the previous version of the adapter")


def test_incomplete_folder_fails_after_timeout(harness: ResolverHarness) -> None:
    overwrite(harness, WEIGHTS_FILE, b"half")
    first = resolve(harness)
    harness.clock.now += INCOMPLETE_WRITE_S - RETRY_S / 2
    assert resolve(harness).identity == first.identity
    harness.clock.now += RETRY_S / 2
    for _ in range(3):
        error = harness.error("tuned", "local")
        assert type(error) is AdapterError
        assert first.stale is not None
        assert str(error) == first.stale.message
        harness.clock.now += RETRY_S
    overwrite(harness, WEIGHTS_FILE, NEW[WEIGHTS_FILE])
    assert harness.resolve_identity("tuned", "local") == identity_of(harness.tmp_path, NEW)
    overwrite(harness, WEIGHTS_FILE, b"half")
    assert resolve(harness).identity == identity_of(harness.tmp_path, NEW)  # the time starts again


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE, None])
def test_deleted_adapter_is_not_served(harness: ResolverHarness, file: str | None) -> None:
    if file is None:
        shutil.rmtree(harness.root / "tuned")
        assert isinstance(harness.error("tuned", "local"), AdapterNotFoundError)
    else:
        (harness.root / "tuned" / file).unlink()
        assert f"has no {file}" in str(harness.error("tuned", "local"))


def test_link_outside_root_is_not_served(harness: ResolverHarness) -> None:
    shutil.move(harness.root / "tuned", harness.tmp_path / "elsewhere")
    (harness.root / "tuned").symlink_to(harness.tmp_path / "elsewhere")
    assert "such links are not allowed" in str(harness.error("tuned", "local"))


def test_incomplete_new_adapter_is_rejected(harness: ResolverHarness) -> None:
    harness.put("other", 1)
    (harness.root / "other" / WEIGHTS_FILE).write_bytes(b"half")
    assert type(harness.error("other", "local")) is AdapterError


def test_explicit_load_of_stale_adapter_fails(harness: ResolverHarness) -> None:
    overwrite(harness, WEIGHTS_FILE, b"half")
    resolve(harness)
    harness.resolver.forget("local", "tuned")
    assert type(harness.error("tuned", "local")) is AdapterError


def test_changed_files_are_checked_again_soon(harness: ResolverHarness, monkeypatch: Any) -> None:
    """Changed files may be complete: the old version is served only if the new one is damaged."""
    fetch = LocalSource.fetch

    def changed(*_: Any) -> Path:
        raise SourceError("it changed")

    overwrite(harness, WEIGHTS_FILE, NEW[WEIGHTS_FILE])
    monkeypatch.setattr(LocalSource, "fetch", changed)
    error = harness.error("tuned", "local")
    assert isinstance(error, SourceError)
    assert error.retry_after_s == LOCAL_RETRY_S
    monkeypatch.setattr(LocalSource, "fetch", fetch)
    harness.clock.now += LOCAL_RETRY_S
    overwrite(harness, WEIGHTS_FILE, b"half")
    old = resolve(harness).identity
    monkeypatch.setattr(LocalSource, "fetch", changed)
    for _ in range(10):
        harness.clock.now += RETRY_S
        assert resolve(harness).identity == old


def test_truncated_files_count_as_incomplete_write(harness: ResolverHarness, monkeypatch: Any) -> None:
    old = resolve(harness).identity
    overwrite(harness, WEIGHTS_FILE, NEW[WEIGHTS_FILE][:-1])

    def changed(*_: Any) -> Path:
        raise SourceError("it changed")

    monkeypatch.setattr(LocalSource, "fetch", changed)
    for _ in range(10):
        result = resolve(harness)
        assert (result.identity, result.stale and result.stale.kind) == (old, "SourceError")
        harness.clock.now += RETRY_S
    harness.clock.now += INCOMPLETE_WRITE_S
    assert isinstance(harness.error("tuned", "local"), SourceError)


def test_file_check_is_repeated_after_change(harness: ResolverHarness, monkeypatch: Any) -> None:
    fetch, disturbed = LocalSource.fetch, iter([True, True])

    def sometimes(*arguments: Any) -> Path:
        if next(disturbed, False):
            raise SourceError("it changed")
        return fetch(*arguments)

    overwrite(harness, WEIGHTS_FILE, NEW[WEIGHTS_FILE])
    monkeypatch.setattr(LocalSource, "fetch", sometimes)
    assert harness.resolve_identity("tuned", "local") == identity_of(harness.tmp_path, NEW)


def test_atomic_replace_is_served_immediately(harness: ResolverHarness) -> None:
    half, whole = harness.tmp_path / "half", harness.tmp_path / "whole"
    half.write_bytes(NEW[WEIGHTS_FILE][:40])
    whole.write_bytes(NEW[WEIGHTS_FILE])
    os.replace(whole, harness.root / "tuned" / WEIGHTS_FILE)
    assert harness.resolve_identity("tuned", "local") == identity_of(harness.tmp_path, NEW)
    os.replace(half, harness.root / "tuned" / WEIGHTS_FILE)
    assert resolve(harness).identity == identity_of(harness.tmp_path, NEW)


def test_merge_with_stale_adapter_is_marked_stale(harness: ResolverHarness) -> None:
    overwrite(harness, WEIGHTS_FILE, b"half")
    refs = [AdapterRef("local", "tuned"), AdapterRef("fake", "whole")]
    harness.put("whole", 3)
    _, resolved = result(harness.resolver.resolve(refs, Merge((1.0, 1.0))))
    assert resolved.stale is not None


# --- Engine, which knows which adapters are in memory -----------------------------------------------------------------


@pytest.mark.parametrize("state", [*AdapterStage, None])
def test_stale_adapter_is_served_only_from_memory(state: AdapterStage | None) -> None:
    """An old version that is not in memory cannot be served: its files have changed."""
    stale = ResolvedAdapter("old", stale=Failure("AdapterError", 424, "half of it is missing"))
    result: Future[Any] = Future()
    result.set_result((SimpleNamespace(identity="old", merge=None, checkpoints=()), stale))
    executor = SimpleNamespace(capabilities=None, on_event=lambda *_: None)
    table = SimpleNamespace(find_error=lambda *_: None, state=lambda *_: state)
    resolver = SimpleNamespace(resolve=lambda *_: result)
    engine = Engine(executor, None, None, table, resolver)  # type: ignore[arg-type]
    answer = engine.resolve([AdapterRef("local", "tuned")])
    if state in (AdapterStage.DEVICE, AdapterStage.LOADING, AdapterStage.HOST):
        assert answer.result().stale == stale.stale
    else:
        with pytest.raises(AdapterError, match="half of it is missing"):
            answer.result()
