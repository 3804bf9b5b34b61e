import logging
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from lorax_server.adapters.sources.local import LocalSource
from lorax_server.errors import AdapterError
from lorax_server.server.access import folder_watcher
from lorax_server.server.access.folder_watcher import FolderScan, FolderWatcher, find_adapters

PATIENCE_S = 60


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_config.json").write_text("{}")


def test_scan_finds_folders_with_adapter_config(tmp_path: Path) -> None:
    put(tmp_path, "second", "first", "ünïcode", ".hidden")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / "adapter_config.json").mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "first")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    put(tmp_path / "first", "nested")
    assert find_adapters(tmp_path) == ([".hidden", "elsewhere", "first", "second", "ünïcode"], {})


def test_scan_skips_invalid_names(tmp_path: Path) -> None:
    odd = ["line\nend", "\x1b[2J", "\u202e", "bad\udcff", "a%2Fb", "percent%20name", "back\\slash", "~home"]
    put(tmp_path, "good", *odd)
    result = find_adapters(tmp_path)
    assert result.names == ["good"]
    assert result.skipped.keys() == set(odd)
    for name in odd:
        with pytest.raises(AdapterError):
            LocalSource([tmp_path]).find(name, None)


def test_scan_skips_external_links_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "elsewhere", "far")
    put(tmp_path / "here", "near")
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "elsewhere" / "far")
    (tmp_path / "here" / "beside").symlink_to("near")
    expected: list[list[str]] = []
    watch = FolderWatcher(tmp_path / "here", lambda names: expected.append(list(names)))
    watch.scan()
    watch.scan()
    assert expected == [["beside", "near"]]
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith(
        "'linked' in the adapters folder is not served: it is a symlink to a path outside the folder"
    )
    with pytest.raises(AdapterError, match="such links are not allowed"):
        LocalSource([tmp_path / "here"]).find("linked", None)


def test_number_of_scanned_adapters_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "c", "a", "b")
    monkeypatch.setattr(folder_watcher, "MAX_ADAPTERS", 2)
    assert find_adapters(tmp_path).names == ["a", "b"]


def test_watcher_reports_only_changes(tmp_path: Path) -> None:
    expected: list[list[str]] = []
    watch = FolderWatcher(tmp_path, lambda names: expected.append(list(names)))
    watch.scan()
    watch.scan()
    put(tmp_path, "one")
    watch.scan()
    watch.scan()
    (tmp_path / "one" / "adapter_config.json").unlink()
    watch.scan()
    assert expected == [[], ["one"], []]


def test_unreadable_folder_keeps_known_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected: list[list[str]] = []
    put(tmp_path, "one")
    watch = FolderWatcher(tmp_path, lambda names: expected.append(list(names)))
    watch.scan()

    def fail(folder: Path) -> FolderScan:
        raise OSError(5, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(folder_watcher, "find_adapters", fail)
        watch.scan()
        watch.scan()
    put(tmp_path, "two")
    watch.scan()
    assert expected == [["one"], ["one", "two"]]
    assert sum("cannot read the adapters folder" in each.getMessage() for each in caplog.records) == 1


def test_missing_folder_has_no_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected: list[list[str]] = []
    watch = FolderWatcher(tmp_path / "later", lambda names: expected.append(list(names)))
    with caplog.at_level(logging.WARNING):
        watch.scan()
        watch.scan()
    assert len(caplog.records) == 1  # not every two seconds
    put(tmp_path / "later", "one")
    watch.scan()
    (tmp_path / "later").rename(tmp_path / "gone")
    watch.scan()
    assert expected == [[], ["one"], []]
    assert "cannot read the adapters folder" in caplog.text


def test_watcher_rescans_until_closed(tmp_path: Path) -> None:
    put(tmp_path, "one")
    expected: list[list[str]] = []
    has_two = threading.Event()

    def tell(names: Iterable[str]) -> None:
        expected.append(list(names))
        if expected[-1] == ["one", "two"]:
            has_two.set()

    watch = FolderWatcher(tmp_path, tell, interval_s=0.001)
    watch.start()
    assert expected == [["one"]]  # the first look comes before `start` returns
    put(tmp_path, "two")
    assert has_two.wait(PATIENCE_S)
    (thread,) = [each for each in threading.enumerate() if each.name == "adapters-dir"]
    watch.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert thread.daemon
