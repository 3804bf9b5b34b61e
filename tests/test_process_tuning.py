"""Process settings. Each is tested in a separate process, because it cannot be undone."""

import os
import subprocess
import sys

import pytest

from lorax_server import process_tuning
from lorax_server.process_tuning import (
    GIL_SWITCH_INTERVAL_S,
    MIMALLOC_PURGE_DELAY,
    TUNING_VARIABLE,
    set_mimalloc_purge_delay,
    short_gil_switch_interval,
    trim_malloc,
)

SWITCH_INTERVAL = (
    "import ctypes, sys\n"
    "from lorax_server.process_tuning import set_gil_switch_interval\n"
    "set_gil_switch_interval()\n"
    "print(sys.getswitchinterval(), ctypes.CDLL(None).prctl(30))\n"  # 30: PR_GET_TIMERSLACK
)
GC = (
    "import gc\n"
    "from lorax_server.process_tuning import tune_gc\n"
    "youngest = gc.get_threshold()[:2]\n"
    "tune_gc()\n"
    "print(gc.get_freeze_count() > 1000, gc.isenabled(), gc.get_threshold()[:2] == youngest, gc.get_threshold()[2])"
)
ARENAS = (
    "import ctypes, threading\n"
    "from lorax_server.process_tuning import limit_malloc_arenas\n"
    "limit_malloc_arenas()\n"
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
THRESHOLDS = (
    "import ctypes\n"
    "from lorax_server.process_tuning import set_malloc_thresholds\n"
    "set_malloc_thresholds()\n"
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
TITLE = (
    "from pathlib import Path\n"
    "from lorax_server.process_tuning import set_process_title\n"
    "def read(name): return Path('/proc/self', name).read_bytes().rstrip(bytes(1)).decode().strip()\n"
    "before = read('environ')\n"
    "set_process_title('engine')\n"
    "print(read('cmdline'), read('comm'), read('environ') == before, sep='|')\n"
)
ALL = (
    "import ctypes, gc, os, sys\n"
    "from lorax_server import process_tuning\n"
    "def name(): return open('/proc/self/comm').read(), len(os.environ)\n"
    "def read(): return sys.getswitchinterval(), gc.get_threshold(), ctypes.CDLL(None).prctl(30), name()\n"
    "calls, before = [], read()\n"
    "process_tuning._call_libc = lambda name, *args: calls.append(name)\n"
    "process_tuning.set_process_title('engine')\n"
    "process_tuning.set_gil_switch_interval()\n"
    "process_tuning.freeze_gc()\n"
    "process_tuning.tune_gc()\n"
    "process_tuning.limit_malloc_arenas()\n"
    "process_tuning.set_malloc_thresholds()\n"
    "process_tuning.set_mimalloc_purge_delay()\n"
    "process_tuning.trim_malloc()\n"
    "print(read() == before, gc.get_freeze_count(), calls)\n"
)


def run(script: str, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in (TUNING_VARIABLE, MIMALLOC_PURGE_DELAY)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ | variables
    )
    return done.stdout


def test_process_title_keeps_environment_readable() -> None:
    assert run(TITLE).strip() == "lorax: engine|lorax: engine|True"


def test_gil_switch_interval_and_timer_slack_are_set() -> None:
    words = [float(word) for word in run(SWITCH_INTERVAL).split()]
    assert words == pytest.approx([process_tuning.GIL_SWITCH_INTERVAL_S, process_tuning.TIMER_SLACK_NS])


def test_full_gc_runs_are_rare_and_skip_startup_objects() -> None:
    assert run(GC).split() == ["True", "True", "True", str(process_tuning.FULL_COLLECTION_THRESHOLD)]


def test_threads_share_malloc_arenas() -> None:
    assert run(ARENAS).count("<heap nr=") <= process_tuning.MAX_ARENAS


def test_malloc_returns_freed_large_blocks() -> None:
    """Large blocks are returned even after an earlier free, and even if a small block follows them in memory."""
    assert int(run(THRESHOLDS)) < 2**23, "bytes that are free and kept"


@pytest.mark.parametrize("value", ["0", "false", "off", " NO "])
def test_environment_variable_disables_tuning(value: str) -> None:
    assert run(ALL, **{TUNING_VARIABLE: value}).strip() == "True 0 []"


@pytest.mark.parametrize("variables", [{}, {TUNING_VARIABLE: "1"}])
def test_tuning_is_enabled_by_default(variables: dict[str, str]) -> None:
    is_same, num_frozen, *calls = run(ALL, **variables).split(maxsplit=2)
    assert is_same == "False"
    assert int(num_frozen) > 0
    assert calls == ["['prctl', 'mallopt', 'mallopt', 'mallopt', 'malloc_trim']\n"]


def test_trim_malloc_does_not_fail() -> None:
    trim_malloc()


def test_user_mimalloc_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIMALLOC_PURGE_DELAY, "7")
    set_mimalloc_purge_delay()
    assert os.environ[MIMALLOC_PURGE_DELAY] == "7"


@pytest.mark.parametrize("value", ["1", "0"])
def test_switch_interval_is_restored(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNING_VARIABLE, value)
    before = sys.getswitchinterval()
    with short_gil_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(GIL_SWITCH_INTERVAL_S if value == "1" else before)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_overlapping_contexts_restore_the_switch_interval() -> None:
    before = sys.getswitchinterval()
    first, second = short_gil_switch_interval(), short_gil_switch_interval()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)
