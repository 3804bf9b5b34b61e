"""The disk cache."""

import os
from pathlib import Path

import pytest

from lorax_server.files.disk_cache import cache_folder, load, make_key, store


def test_stored_content_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "not/there/yet"
    assert load(path) is None
    store(path, b"content")
    store(path, b"other content")
    assert load(path) == b"other content"
    assert [file.name for file in path.parent.iterdir()] == ["yet"]


@pytest.mark.parametrize("damaged", [b"", b"short", b"0" * 32, b"0" * 40])
def test_damaged_file_is_ignored(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(damaged)
    assert load(tmp_path / "kept") is None


def test_unwritable_folder_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    store(tmp_path / "file/kept", b"content")
    assert "cannot write to the cache" in caplog.text


def test_different_parts_have_different_keys() -> None:
    names = [make_key("a", "bc"), make_key("ab", "c"), make_key("abc"), make_key("a", "bc", ""), make_key()]
    assert len(set(names)) == len(names)
    assert make_key("a", b"bc") == names[0]


def test_cache_folder_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAX_CACHE", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / "kernels"
    monkeypatch.delenv("LORAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(tmp_path, "cache"))
    assert cache_folder("kernels") == tmp_path / "cache/lorax/kernels"


def test_user_without_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LORAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    path = cache_folder("configs") / "name"
    store(path, b"content")
    assert "cannot write to the cache" in caplog.text
    assert load(path) is None


def test_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    store(tmp_path / "kept", b"content")
    assert list(tmp_path.iterdir()) == []
