"""The memory that there is: the machine's, unless a container has less of it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lorax_server import machine
from lorax_server.machine import (
    PURGE_DELAY,
    count_cores,
    free_bytes,
    give_back_memory,
    keep_between_steps,
    machine_bytes,
)

PHYSICAL, LIMIT, USED, OF_FILES = 2**40, 2**26, 3 * 2**24, 2**22
NEW = {"memory.max": LIMIT, "memory.current": USED, "memory.stat": f"anon 5\ninactive_file {OF_FILES}\n"}
OLD = {
    "memory.limit_in_bytes": LIMIT,
    "memory.usage_in_bytes": USED,
    "memory.stat": f"inactive_file 1\ntotal_inactive_file {OF_FILES}\n",
}


@pytest.fixture(autouse=True)
def big_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": PHYSICAL}.__getitem__)


def write(folder: Path, files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("place", "files", "own"),
    [
        pytest.param("", NEW, "0::/", id="container"),
        pytest.param("", NEW, "0::/some/job", id="group around ours"),
        pytest.param("some/job", NEW, "0::/some/job", id="group of ours"),
        pytest.param("memory", OLD, "4:memory:/", id="old container"),
        pytest.param("memory/some/job", OLD, "5:cpu:/\n4:memory:/some/job\n0::/", id="old group"),
        pytest.param("", NEW, None, id="no list of groups"),
    ],
)
def test_a_container_has_less_than_its_host(
    place: str, files: Mapping[str, object], own: str | None, tmp_path: Path
) -> None:
    write(tmp_path / place, files)
    if own is not None:
        write(tmp_path, {"own": own})
    assert machine_bytes() == LIMIT
    assert free_bytes() == LIMIT - USED + OF_FILES


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
def test_a_container_may_use_the_time_of_fewer_cores(
    place: str, files: Mapping[str, object], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    write(tmp_path / place, files)
    write(tmp_path, {"own": "0::/some/job"})
    assert count_cores() == cores


@pytest.mark.parametrize("limit", ["max", 2**62, ""])
def test_a_container_without_a_limit_has_all(limit: object, tmp_path: Path) -> None:
    write(tmp_path, {**NEW, "memory.max": limit})
    assert machine_bytes() == PHYSICAL
    assert 0 < free_bytes() < PHYSICAL


def test_without_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_bytes() == PHYSICAL
    monkeypatch.setattr("builtins.open", _no_file)  # nor is it Linux
    assert free_bytes() == PHYSICAL // 2


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, {**NEW, "memory.current": LIMIT + 2 * OF_FILES})
    assert free_bytes() == 0


def test_threads_take_short_turns() -> None:
    """A thread that waits for its turn at Python does not wait for long, nor does Linux make it longer."""
    script = (
        "import ctypes, sys\n"
        "from lorax_server.machine import shorten_turns\n"
        "shorten_turns()\n"
        "print(sys.getswitchinterval(), ctypes.CDLL(None).prctl(30))\n"  # 30: the slack of this thread
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [float(word) for word in done.stdout.split()] == pytest.approx([machine.TURN_S, machine.SLACK_NS])


def test_steps_are_spared_collections_of_all_objects() -> None:
    script = (
        "import gc\n"
        "from lorax_server.machine import spare_steps\n"
        "youngest = gc.get_threshold()[:2]\n"
        "spare_steps()\n"
        "print(gc.get_freeze_count() > 1000, gc.isenabled(), gc.get_threshold()[:2] == youngest, gc.get_threshold()[2])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", str(machine.FULL_COLLECTIONS)]


def test_malloc_can_be_told() -> None:
    give_back_memory()


def test_threads_share_arenas() -> None:
    """Run in a process of its own, since it cannot be undone."""
    script = (
        "import ctypes, threading\n"
        "from lorax_server.machine import share_arenas\n"
        "share_arenas()\n"
        "malloc, all_here, go = ctypes.CDLL(None).malloc, threading.Barrier(9), threading.Barrier(9)\n"
        "malloc.restype = ctypes.c_void_p\n"
        "def work(): malloc(2**16), all_here.wait(), go.wait()\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "all_here.wait()\n"
        "ctypes.CDLL(None).malloc_info(0, ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'stdout'))\n"
        "ctypes.CDLL(None).fflush(None)\n"
        "go.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("<heap nr=") <= machine.MAX_ARENAS


def test_large_blocks_are_returned_when_they_are_freed() -> None:
    """Return them although malloc would keep blocks after a first free, and though a small block lies behind them."""
    script = (
        "import ctypes\n"
        "from lorax_server.machine import return_large_blocks\n"
        "return_large_blocks()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "def take(size):\n"
        "    block = libc.malloc(size)\n"
        "    ctypes.memset(ctypes.c_void_p(block), 1, size)\n"
        "    return block\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "libc.free(take(2**24))\n"
        "before = resident()\n"
        "blocks = [take(2**23), take(2**23)]\n"
        "small = take(2**16)\n"
        "[libc.free(block) for block in blocks]\n"
        "print(resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**23, "bytes that are free and kept"


def _no_file(*args: Any, **kwargs: Any) -> Any:
    raise FileNotFoundError


def test_what_the_user_says_of_torchs_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PURGE_DELAY, "7")
    keep_between_steps()
    assert os.environ[PURGE_DELAY] == "7"
