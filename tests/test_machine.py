"""Memory and CPU limits of the machine or its container."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lorax_server import machine
from lorax_server.machine import count_cores, free_memory_bytes, total_memory_bytes

PHYSICAL, LIMIT, USED, OF_FILES = 2**40, 2**26, 3 * 2**24, 2**22
CGROUP_V2 = {"memory.max": LIMIT, "memory.current": USED, "memory.stat": f"anon 5\ninactive_file {OF_FILES}\n"}
CGROUP_V1 = {
    "memory.limit_in_bytes": LIMIT,
    "memory.usage_in_bytes": USED,
    "memory.stat": f"inactive_file 1\ntotal_inactive_file {OF_FILES}\n",
}


@pytest.fixture(autouse=True)
def big_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": PHYSICAL}.__getitem__)


def write(folder: Path, files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("place", "files", "own"),
    [
        pytest.param("", CGROUP_V2, "0::/", id="container"),
        pytest.param("", CGROUP_V2, "0::/some/job", id="group around ours"),
        pytest.param("some/job", CGROUP_V2, "0::/some/job", id="group of ours"),
        pytest.param("memory", CGROUP_V1, "4:memory:/", id="old container"),
        pytest.param("memory/some/job", CGROUP_V1, "5:cpu:/\n4:memory:/some/job\n0::/", id="old group"),
        pytest.param("", CGROUP_V2, None, id="no list of groups"),
    ],
)
def test_cgroup_limits_memory(place: str, files: Mapping[str, object], own: str | None, tmp_path: Path) -> None:
    write(tmp_path / place, files)
    if own is not None:
        write(tmp_path, {"own": own})
    assert total_memory_bytes() == LIMIT
    assert free_memory_bytes() == LIMIT - USED + OF_FILES


@pytest.mark.parametrize(
    ("place", "files", "cores"),
    [
        ("", {"cpu.max": "150000 100000"}, 2),
        ("some/job", {"cpu.max": "100000 100000"}, 1),
        ("cpu", {"cpu.cfs_quota_us": 300000, "cpu.cfs_period_us": 100000}, 3),
        ("cpu", {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}, 8),
        ("", {"cpu.max": "max 100000"}, 8),
        ("", {"cpu.max": "1000 100000"}, 1),
        ("", {"cpu.max": "damaged"}, 8),
    ],
)
def test_cgroup_limits_cores(
    place: str, files: Mapping[str, object], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    write(tmp_path / place, files)
    write(tmp_path, {"own": "0::/some/job"})
    assert count_cores() == cores


@pytest.mark.parametrize("limit", ["max", 2**62, ""])
def test_unlimited_cgroup_uses_physical_memory(limit: object, tmp_path: Path) -> None:
    write(tmp_path, {**CGROUP_V2, "memory.max": limit})
    assert total_memory_bytes() == PHYSICAL
    assert 0 < free_memory_bytes() < PHYSICAL


def test_missing_cgroup_uses_physical_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert total_memory_bytes() == PHYSICAL
    monkeypatch.setattr("builtins.open", _no_file)  # nor is it Linux
    assert free_memory_bytes() == PHYSICAL // 2


def test_full_cgroup_has_no_free_memory(tmp_path: Path) -> None:
    write(tmp_path, {**CGROUP_V2, "memory.current": LIMIT + 2 * OF_FILES})
    assert free_memory_bytes() == 0


def _no_file(*args: Any, **kwargs: Any) -> Any:
    raise FileNotFoundError
