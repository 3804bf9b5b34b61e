from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lorax_server.adapters.sources.download import Download, download
from lorax_server.errors import SourceError

CONTENT = bytes(range(256)) * 10


def fake(path: Path, content: bytes = CONTENT, **options: Any) -> Download:
    """A download of `content`, in chunks of 256 bytes."""

    @contextmanager
    def open_at(offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        yield offset, (content[start : start + 256] for start in range(offset, len(content), 256))

    given: dict[str, Any]
    given = {"is_valid": lambda part: part.read_bytes() == CONTENT, "open_at": open_at, "timeout_s": 10.0}
    return Download(what="the file", path=path, size=len(CONTENT), **given | options)


def test_a_file_is_put_in_place(tmp_path: Path) -> None:
    download(fake(tmp_path / "new" / "folder" / "file"))
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == CONTENT


def test_bytes_that_are_here_are_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    download(fake(tmp_path / "file", b"?" * 1000 + CONTENT[1000:]))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_has_all_is_only_checked(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    download(fake(tmp_path / "file", open_at=None))
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [CONTENT + b"x", b"?" * len(CONTENT), b"?" * 10])
def test_a_wrong_part_is_thrown_away(tmp_path: Path, part: bytes) -> None:
    (tmp_path / "file.part").write_bytes(part)
    with pytest.raises(SourceError, match="the file: size or checksum differ"):
        download(fake(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.lock"]
    download(fake(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_another_process_that_never_ends_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with FileLock(tmp_path / "file.lock"), pytest.raises(SourceError, match="the file: another request is still"):
        download(fake(tmp_path / "file", timeout_s=0.1))
