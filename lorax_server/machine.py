"""The memory that this process may use: the machine's, or its container's share; how Python and malloc keep it; and
what an engine takes of it where no setting says so."""

import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NEW_FILES, OLD_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
ARENA_MAX, MAX_ARENAS = -8, 2  # the name of a setting of glibc's malloc, and its value
TRIM_THRESHOLD, MMAP_THRESHOLD, LARGE_BLOCK = -1, -3, 2**20  # likewise
PURGE_DELAY, PURGE_MS = "MIMALLOC_PURGE_DELAY", 1000  # a variable that another malloc reads, and its value, not 10
FULL_COLLECTIONS = 1000  # of the youngest but one between two of all objects, instead of 10
TURN_S = 1e-5  # how long a thread runs Python while another one waits for its turn, instead of 5 ms
TIMER_SLACK, SLACK_NS = 29, 1000  # the name of a setting of Linux, and its value, instead of 50 us
PARENT_SIGNAL = 1  # likewise
ROWS, LARGE_GPU_ROWS = 64, 256  # sequences at once, and on a GPU of so many bytes and more:
LARGE_GPU_BYTES = 40 * 10**9
GPU_ADAPTER_SHARE = 4  # adapters get one part in so many of what the weights leave of a GPU,
LEAST_GPU_ADAPTER_BYTES = 2**28  # but not less than this,
HOST_ADAPTER_SHARE = 4  # and one part in so many of the host's memory
GRAMMAR_CACHE_BYTES = 2**28  # compiled grammars in an engine process
ADAPTER_TABLE_SHARE = 64  # tables beside the adapters get one part in so many of these
RECLAIMABLE = ("inactive_file", "total_inactive_file")  # names of it in the two kinds of groups


def count_cores() -> int:
    """Return the number of cores that this process may use, or whose time its container may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cores_of_groups()]))


def machine_bytes() -> int:
    """Return all of the memory, used or not."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _groups())])


def free_bytes() -> int:
    """Return the free memory, counting caches of files that the system would drop."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return machine_bytes() // 2
    return max(0, min([available, *(limit - used for limit, used in _groups())]))


def resident_bytes() -> int:
    """Return the memory that this process has in RAM (RSS)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS: the most so far, in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def share_arenas() -> None:
    """Let the threads that this process starts from now on share a few arenas of malloc. By default glibc has eight for
    each core, and threads of one cannot use free memory of another."""
    _call_libc("mallopt", ARENA_MAX, MAX_ARENAS)


def return_large_blocks() -> None:
    """Let malloc return large blocks to the system as soon as they are freed. By default glibc keeps more and more, up
    to 64 MiB in each arena, which suits a process that needs as much again in its next step."""
    _call_libc("mallopt", MMAP_THRESHOLD, LARGE_BLOCK)
    _call_libc("mallopt", TRIM_THRESHOLD, LARGE_BLOCK)


def keep_between_steps() -> None:
    """Let torch keep freed memory for a second, in processes that this one starts. On ARM it has a malloc that returns
    it to the system after less time than a step takes: to get the memory of scores again takes 5 % of a step."""
    os.environ.setdefault(PURGE_DELAY, str(PURGE_MS))


def give_back_memory() -> None:
    """Return freed memory, which malloc keeps, to the system: as much as the largest step ever needed."""
    _call_libc("malloc_trim", 0)


def shorten_turns() -> None:
    """Let this thread, and those that it starts from now on, have their turns at Python soon while others are busy.

    A step gives up its turn at each of its operations. While an adapter is read or prepared, it would wait each time: a
    step of 7 ms took 20 with turns of half a millisecond. Linux adds its slack to every wait.
    """
    sys.setswitchinterval(TURN_S)  # for the whole process
    _call_libc("prctl", TIMER_SLACK, SLACK_NS, 0, 0, 0)


def end_with_parent() -> None:
    """Have the system end this process when the one that forked it has ended, where there is such a setting."""
    _call_libc("prctl", PARENT_SIGNAL, signal.SIGKILL, 0, 0, 0)


def spare_steps() -> None:
    """Let Python look through all objects rarely, and never through those of now, which stay. Each time would hold up a
    step: for a tenth of a second with the objects of now, for milliseconds with those of some thousand requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)


def _call_libc(name: str, *args: int) -> None:
    """Call a function of glibc or Linux, if there is one: other systems need none of this, or have no such thing."""
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*args)


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use of the control groups that this process is in. A container sees its own group as the root.

    The use is that of all processes of a group, without caches of files that the system would drop.
    """
    for folder in _folders():
        for limit, used in (NEW_FILES, OLD_FILES):
            try:
                yield int((folder / limit).read_text()), int((folder / used).read_text()) - _reclaimable(folder)
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue


def _cores_of_groups() -> Iterator[int]:
    """Yield the cores, rounded up, whose time the control groups of this process may use."""
    for folder in {*_folders(), GROUPS / "cpu"}:
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = (int(word) for file in files for word in (folder / file).read_text().split())
            except (OSError, ValueError):  # no such group, or its quota is "max"
                continue
            if quota > 0 and period > 0:
                yield -(-quota // period)


def _folders() -> set[Path]:
    """Return the folders of the process's groups and of all groups around them."""
    folders = {GROUPS, GROUPS / "memory"}
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:  # number:controllers:/path
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            own = (GROUPS / controllers).joinpath(path.lstrip("/"))
            folders |= {own, *(folder for folder in own.parents if folder.is_relative_to(GROUPS))}
    return folders


def _reclaimable(folder: Path) -> int:
    try:
        pairs = [line.partition(" ") for line in (folder / "memory.stat").read_text().splitlines()]
        return max((int(value) for name, _, value in pairs if name in RECLAIMABLE), default=0)
    except (OSError, ValueError):
        return 0
