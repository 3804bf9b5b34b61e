"""Process settings that affect speed or memory, but not results. See docs/process-tuning.md.

`LORAX_PROCESS_TUNING=0` disables these settings.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TUNING_VARIABLE = "LORAX_PROCESS_TUNING"
GIL_SWITCH_INTERVAL_S = 1e-5  # Python's default is 5 ms
PR_SET_TIMERSLACK, TIMER_SLACK_NS = 29, 1000  # Linux's default is 50 us
FULL_COLLECTION_THRESHOLD = 1000  # collections of generation 1 between full collections; Python's default is 10
M_ARENA_MAX, MAX_ARENAS = -8, 2  # glibc's default is 8 per core
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES = -1, -3, 2**20  # glibc's defaults grow up to 64 MiB
TITLE_KEEPS_ENVIRONMENT = "SPT_NOENV"  # otherwise setproctitle overwrites /proc/PID/environ
MIMALLOC_PURGE_DELAY, PURGE_DELAY_MS = "MIMALLOC_PURGE_DELAY", 1000  # mimalloc's default is 10 ms


def is_enabled() -> bool:
    return os.environ.get(TUNING_VARIABLE, "1").strip().lower() not in ("0", "false", "no", "off")


def set_process_title(role: str) -> None:
    """Show this process as `lorax: ROLE` in `ps` and `top`."""
    if is_enabled():
        os.environ.setdefault(TITLE_KEEPS_ENVIRONMENT, "1")
        with suppress(ImportError):  # a GPU machine without the server's packages can run `LLM`
            from setproctitle import setproctitle  # noqa: PLC0415

            setproctitle(f"lorax: {role}")


def set_gil_switch_interval() -> None:
    """Reduce the time that threads wait for the GIL and for timers.

    A step releases the GIL in each operation. With Python's default interval, it could wait 5 ms each time for a
    thread that prepares adapters. The timer setting applies to this thread and to threads that it starts later.
    """
    if is_enabled():
        sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
        _call_libc("prctl", PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


@contextmanager
def short_gil_switch_interval() -> Iterator[None]:
    """Reduce the time that threads wait for the GIL while the context is active.

    If contexts of several threads overlap, the first context restores the interval.
    """
    interval = sys.getswitchinterval()
    is_long = is_enabled() and interval > 2 * GIL_SWITCH_INTERVAL_S  # the interval is rounded
    if is_long:
        sys.setswitchinterval(GIL_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        if is_long:
            sys.setswitchinterval(interval)


def freeze_gc() -> None:
    """Exclude current objects from garbage collection. Call this once after startup."""
    if is_enabled():
        gc.collect()
        gc.freeze()


def tune_gc() -> None:
    """Exclude current objects from garbage collection, and make full collections rare."""
    if is_enabled():
        freeze_gc()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_THRESHOLD)


def limit_malloc_arenas() -> None:
    """Make new threads share a few malloc arenas, because a thread cannot reuse free memory in another arena."""
    if is_enabled():
        _call_libc("mallopt", M_ARENA_MAX, MAX_ARENAS)


def set_malloc_thresholds() -> None:
    """Make malloc return large freed blocks to the system immediately."""
    if is_enabled():
        _call_libc("mallopt", M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        _call_libc("mallopt", M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)


def set_mimalloc_purge_delay() -> None:
    """Make mimalloc in child processes keep freed memory between steps. PyTorch uses mimalloc on ARM."""
    if is_enabled():
        os.environ.setdefault(MIMALLOC_PURGE_DELAY, str(PURGE_DELAY_MS))


def trim_malloc() -> None:
    """Return freed memory from malloc to the system."""
    if is_enabled():
        _call_libc("malloc_trim", 0)


def _call_libc(name: str, *args: int) -> None:
    """Call a C library function if it exists. macOS and musl lack some functions."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*args)
