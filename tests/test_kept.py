"""Files that save the next start some seconds."""

import os
from pathlib import Path

import pytest

from lorax_server.files.kept import keep, kept_folder, make_name, read_kept


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    path = tmp_path / "not/there/yet"
    assert read_kept(path) is None
    keep(path, b"content")
    keep(path, b"other content")
    assert read_kept(path) == b"other content"
    assert [file.name for file in path.parent.iterdir()] == ["yet"]


@pytest.mark.parametrize("damaged", [b"", b"short", b"0" * 32, b"0" * 40])
def test_a_damaged_file_is_as_none(damaged: bytes, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(damaged)
    assert read_kept(tmp_path / "kept") is None


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    keep(tmp_path / "file/kept", b"content")
    assert "cannot be kept" in caplog.text


def test_other_parts_have_other_names() -> None:
    names = [make_name("a", "bc"), make_name("ab", "c"), make_name("abc"), make_name("a", "bc", ""), make_name()]
    assert len(set(names)) == len(names)
    assert make_name("a", b"bc") == names[0]


def test_the_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAX_CACHE", str(tmp_path))
    assert kept_folder("kernels") == tmp_path / "kernels"
    monkeypatch.delenv("LORAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(tmp_path, "cache"))
    assert kept_folder("kernels") == tmp_path / "cache/lorax/kernels"


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LORAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    path = kept_folder("configs") / "name"
    keep(path, b"content")
    assert "cannot be kept" in caplog.text
    assert read_kept(path) is None


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    keep(tmp_path / "kept", b"content")
    assert list(tmp_path.iterdir()) == []
