"""Finds the CPU and memory limits of this process or its container, and derives default sizes from them."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CGROUP_V2_FILES, CGROUP_V1_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
DEFAULT_MAX_NUM_SEQS, LARGE_GPU_DEFAULT_MAX_NUM_SEQS = 64, 256  # default maximum number of running sequences
LARGE_GPU_BYTES = 40 * 10**9
GPU_ADAPTER_DIVISOR = 4  # adapter memory = free GPU memory after loading the weights / this
MIN_GPU_ADAPTER_BYTES = 2**28  # minimum adapter memory on a GPU
HOST_ADAPTER_DIVISOR = 4  # adapter memory on the host = host memory / this
GRAMMAR_CACHE_BYTES = 2**28  # cache size for compiled grammars, per engine process
ADAPTER_TABLE_DIVISOR = 64  # adapter table size = adapter memory / this
RECLAIMABLE_FIELDS = ("inactive_file", "total_inactive_file")  # field names in memory.stat, in cgroup v2 and v1


def count_cores() -> int:
    """Return the number of usable CPU cores, limited by CPU affinity and cgroup quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_cgroup_cores()]))


def total_memory_bytes() -> int:
    """Return the machine's total memory in bytes, limited by cgroups."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_memory())])


def free_memory_bytes() -> int:
    """Return the available memory in bytes, including reclaimable file cache."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return total_memory_bytes() // 2
    return max(0, min([available, *(limit - used for limit, used in _cgroup_memory())]))


def resident_memory_bytes() -> int:
    """Return the resident set size (RSS) of this process in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS: peak RSS in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes for each cgroup of this process. A container sees its cgroup as the root.

    Usage covers all processes in the cgroup, without reclaimable file cache.
    """
    for folder in _cgroup_folders():
        for limit, used in (CGROUP_V2_FILES, CGROUP_V1_FILES):
            try:
                yield (
                    int((folder / limit).read_text()),
                    int((folder / used).read_text()) - _count_reclaimable_bytes(folder),
                )
            except (OSError, ValueError):  # missing file, or the limit is "max"
                continue


def _cgroup_cores() -> Iterator[int]:
    """Yield the CPU quota of each cgroup in cores, rounded up."""
    for folder in {*_cgroup_folders(), CGROUP_ROOT / "cpu"}:
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = (int(word) for file in files for word in (folder / file).read_text().split())
            except (OSError, ValueError):  # missing file, or the quota is "max"
                continue
            if quota > 0 and period > 0:
                yield -(-quota // period)


def _cgroup_folders() -> set[Path]:
    """Return the folders of this process's cgroups and their parents."""
    folders = {CGROUP_ROOT, CGROUP_ROOT / "memory"}
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:  # each line is number:controllers:/path
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            own_folder = (CGROUP_ROOT / controllers).joinpath(path.lstrip("/"))
            folders |= {own_folder, *(folder for folder in own_folder.parents if folder.is_relative_to(CGROUP_ROOT))}
    return folders


def _count_reclaimable_bytes(folder: Path) -> int:
    try:
        pairs = [line.partition(" ") for line in (folder / "memory.stat").read_text().splitlines()]
        return max((int(value) for name, _, value in pairs if name in RECLAIMABLE_FIELDS), default=0)
    except (OSError, ValueError):
        return 0
