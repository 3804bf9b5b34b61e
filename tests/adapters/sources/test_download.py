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
    """Return a download of `content` in chunks of 256 bytes."""

    @contextmanager
    def open_at(offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        yield offset, (content[start : start + 256] for start in range(offset, len(content), 256))

    given: dict[str, Any]
    given = {"is_valid": lambda part: part.read_bytes() == CONTENT, "open_at": open_at, "timeout_s": 10.0}
    return Download(label="the file", path=path, size=len(CONTENT), **given | options)


def test_download_creates_file(tmp_path: Path) -> None:
    download(fake(tmp_path / "new" / "folder" / "file"))
    assert (tmp_path / "new" / "folder" / "file").read_bytes() == CONTENT


def test_resume_requests_only_missing_bytes(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    download(fake(tmp_path / "file", b"?" * 1000 + CONTENT[1000:]))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_complete_partial_file_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT)
    download(fake(tmp_path / "file", open_at=None))
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [CONTENT + b"x", b"?" * len(CONTENT), b"?" * 10])
def test_invalid_partial_file_is_deleted(tmp_path: Path, part: bytes) -> None:
    (tmp_path / "file.part").write_bytes(part)
    with pytest.raises(SourceError, match="the file: the size or checksum is wrong"):
        download(fake(tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.lock"]
    download(fake(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_wait_for_concurrent_download_times_out(tmp_path: Path) -> None:
    with FileLock(tmp_path / "file.lock"), pytest.raises(SourceError, match="the file: another request is still"):
        download(fake(tmp_path / "file", timeout_s=0.1))
