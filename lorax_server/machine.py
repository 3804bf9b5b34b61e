"""The memory that this process may use: the machine's, or what its container has been given of it."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NEW_FILES, OLD_FILES = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
ARENA_MAX, MAX_ARENAS = -8, 2  # the name of a setting of glibc's malloc, and its value
TRIM_THRESHOLD, MMAP_THRESHOLD, LARGE_BLOCK = -1, -3, 2**20  # likewise
RECLAIMABLE = ("inactive_file", "total_inactive_file")  # as the two kinds of groups call it


class _ControlGroup(NamedTuple):
    limit: int
    used: int  # by all of its processes, less what files keep in memory only because nothing else needs it


def machine_bytes() -> int:
    """All of the memory, used or not."""
    return min([_physical_bytes(), *(group.limit for group in _groups())])


def free_bytes() -> int:
    """The memory that is left, counting what files keep only because nothing else needs it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        available = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return machine_bytes() // 2
    return max(0, min([available, *(group.limit - group.used for group in _groups())]))


def share_arenas() -> None:
    """Have the threads that this process starts from now on allocate from the same few arenas. By default glibc has
    eight for each core, and what is free in one is of no use to threads of another."""
    _call_malloc("mallopt", ARENA_MAX, MAX_ARENAS)


def return_large_blocks() -> None:
    """Have malloc return what is large to the system as soon as it is freed. By default glibc keeps ever more of it, up
    to 64 MiB in each arena, which suits a process that needs as much again in its next step."""
    _call_malloc("mallopt", MMAP_THRESHOLD, LARGE_BLOCK)
    _call_malloc("mallopt", TRIM_THRESHOLD, LARGE_BLOCK)


def give_back_memory() -> None:
    """Return to the system what malloc keeps of what was freed, which is as much as the largest step ever needed."""
    _call_malloc("malloc_trim", 0)


def _call_malloc(name: str, *args: int) -> None:
    """Other systems than glibc's have other ways, and need none of this."""
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is not None:
        function(*args)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups() -> Iterator[_ControlGroup]:
    """Control groups with a limit that holds for this process. Within a container its own is seen as the root."""
    for folder in _folders():
        for limit, used in (NEW_FILES, OLD_FILES):
            try:
                group = _ControlGroup(int((folder / limit).read_text()), int((folder / used).read_text()))
                yield group._replace(used=group.used - _reclaimable(folder))
            except (OSError, ValueError):  # no such group, or its limit is "max"
                continue


def _folders() -> set[Path]:
    """Those of the process's groups and of all around them."""
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
