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


def test_adapters_are_folders_that_say_so(tmp_path: Path) -> None:
    put(tmp_path, "second", "first", "ünïcode", ".hidden")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / "adapter_config.json").mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "first")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    put(tmp_path / "first", "nested")
    assert find_adapters(tmp_path) == ([".hidden", "elsewhere", "first", "second", "ünïcode"], {})


def test_names_that_nobody_could_ask_for_are_left_out(tmp_path: Path) -> None:
    odd = ["line\nend", "\x1b[2J", "\u202e", "bad\udcff", "a%2Fb", "percent%20name", "back\\slash", "~home"]
    put(tmp_path, "good", *odd)
    found = find_adapters(tmp_path)
    assert found.names == ["good"]
    assert found.skipped.keys() == set(odd)
    for name in odd:
        with pytest.raises(AdapterError):
            LocalSource([tmp_path]).find(name, None)


def test_links_out_of_the_folder_are_left_out_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "elsewhere", "far")
    put(tmp_path / "here", "near")
    (tmp_path / "here" / "linked").symlink_to(tmp_path / "elsewhere" / "far")
    (tmp_path / "here" / "beside").symlink_to("near")
    told: list[list[str]] = []
    watch = FolderWatcher(tmp_path / "here", lambda names: told.append(list(names)))
    watch.scan()
    watch.scan()
    assert told == [["beside", "near"]]
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith("'linked' in the adapters folder is not served: it is a symlink to a path outside the folder")
    with pytest.raises(AdapterError, match="links out of it are refused"):
        LocalSource([tmp_path / "here"]).find("linked", None)


def test_there_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "c", "a", "b")
    monkeypatch.setattr(folder_watcher, "MAX_ADAPTERS", 2)
    assert find_adapters(tmp_path).names == ["a", "b"]


def test_only_changes_are_told(tmp_path: Path) -> None:
    told: list[list[str]] = []
    watch = FolderWatcher(tmp_path, lambda names: told.append(list(names)))
    watch.scan()
    watch.scan()
    put(tmp_path, "one")
    watch.scan()
    watch.scan()
    (tmp_path / "one" / "adapter_config.json").unlink()
    watch.scan()
    assert told == [[], ["one"], []]


def test_a_folder_that_cannot_be_read_for_a_moment_is_served_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[list[str]] = []
    put(tmp_path, "one")
    watch = FolderWatcher(tmp_path, lambda names: told.append(list(names)))
    watch.scan()

    def fail(folder: Path) -> FolderScan:
        raise OSError(5, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(folder_watcher, "find_adapters", fail)
        watch.scan()
        watch.scan()
    put(tmp_path, "two")
    watch.scan()
    assert told == [["one"], ["one", "two"]]
    assert sum("cannot be read" in each.getMessage() for each in caplog.records) == 1


def test_a_folder_that_is_not_there_has_no_adapters_for_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[list[str]] = []
    watch = FolderWatcher(tmp_path / "later", lambda names: told.append(list(names)))
    with caplog.at_level(logging.WARNING):
        watch.scan()
        watch.scan()
    assert len(caplog.records) == 1  # not every two seconds
    put(tmp_path / "later", "one")
    watch.scan()
    (tmp_path / "later").rename(tmp_path / "gone")
    watch.scan()
    assert told == [[], ["one"], []]
    assert "cannot be read" in caplog.text


def test_it_is_looked_at_again_and_again_until_it_is_closed(tmp_path: Path) -> None:
    put(tmp_path, "one")
    told: list[list[str]] = []
    has_two = threading.Event()

    def tell(names: Iterable[str]) -> None:
        told.append(list(names))
        if told[-1] == ["one", "two"]:
            has_two.set()

    watch = FolderWatcher(tmp_path, tell, interval_s=0.001)
    watch.start()
    assert told == [["one"]]  # the first look comes before `start` returns
    put(tmp_path, "two")
    assert has_two.wait(PATIENCE_S)
    (thread,) = [each for each in threading.enumerate() if each.name == "adapters-dir"]
    watch.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert thread.daemon
