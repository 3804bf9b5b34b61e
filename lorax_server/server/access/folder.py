"""A folder whose subfolders are adapters. It is scanned now and then, so that an adapter only has to be put there.

Notices of the file system (inotify) would be quicker, but they tell nothing of changes by other machines of a network's
file system, and nothing after a linked folder was switched.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lorax_server.adapters.sources.local import is_plain
from lorax_server.files.names import CONFIG_FILE

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0  # often enough for people, seldom enough for a network's file system
MAX_ADAPTERS = 100_000
MAX_LOGGED = 100  # folders that are not served


class Scan(NamedTuple):
    """The subfolders of a folder that hold an adapter."""

    names: list[str]
    left_out: dict[str, str]  # those that no request could name, and why


class FolderWatch:
    """Calls `on_change` with the names of the adapters in a folder, at first and when they change, on its own thread.

    Only names count here: an adapter's files are looked at when a request names it.
    """

    def __init__(
        self, folder: Path, on_change: Callable[[Iterable[str]], None], interval_s: float = INTERVAL_S
    ) -> None:
        self._folder = folder
        self._on_change = on_change
        self._interval_s = interval_s
        self._names: list[str] | None = None
        self._left_out: dict[str, str] = {}
        self._is_lost = False
        self._is_closed = threading.Event()

    def start(self) -> None:
        self.scan()
        threading.Thread(target=self._run, name="adapters-dir", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def scan(self) -> None:
        """Look at the folder once, now."""
        was_lost, self._is_lost = self._is_lost, False
        try:
            names, left_out = find_adapters(self._folder)
        except OSError as error:
            if not was_lost:
                logger.warning("the adapters' folder cannot be read: %s", error)
            self._is_lost = True
            if not isinstance(error, FileNotFoundError):
                return  # perhaps only for a moment: its adapters are served as before
            names, left_out = [], {}
        for name, problem in left_out.items():
            if name not in self._left_out:
                logger.warning("%r in the adapters' folder is not served: %s", name, problem)
        self._left_out = left_out
        if names != self._names:
            logger.info("adapters in %s: %d", self._folder.name, len(names))
            self._names = names
            self._on_change(names)

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            self.scan()


def find_adapters(folder: Path) -> Scan:
    """List the subfolders that hold an adapter. One that the server may not enter is not there for it."""
    root, names = os.path.realpath(folder), []
    left_out: dict[str, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if os.path.isfile(f"{entry.path}/{CONFIG_FILE}"):
                problem = _find_problem(entry, root)
                if problem is None:
                    names.append(entry.name)
                elif len(left_out) < MAX_LOGGED:
                    left_out[entry.name] = problem
    return Scan(sorted(names)[:MAX_ADAPTERS], left_out)


def _find_problem(entry: "os.DirEntry[str]", root: str) -> str | None:
    """Return why no request could name a subfolder, if there is a reason. The rules are those of `LocalSource`."""
    if not is_plain(entry.name):
        return "names with `%` or `\\`, with `~` at first or with what cannot be printed are refused; rename it"
    if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
        return "it is a link out of the folder; name the folder that it leads to by --local-adapters, or copy it"
    return None
