"""The memory that this process may use: the machine's, or its container's share; and what an engine takes of it where
no setting says so."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NEW_FILES, OLD_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
MAX_NUM_SEQS, LARGE_GPU_MAX_NUM_SEQS = 64, 256  # sequences at once, and on a GPU of so many bytes and more:
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
