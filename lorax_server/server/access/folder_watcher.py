"""Watches the folder in `--adapters-dir` for new and removed adapters, so that changes need no restart.

The folder is polled, because inotify misses changes that other machines make on a network file system, and replaced
symlinks.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lorax_server.adapters.sources.local import is_unambiguous_name
from lorax_server.files.names import CONFIG_FILE

logger = logging.getLogger(__name__)

SCAN_INTERVAL_S = 2.0  # short enough for users, and long enough not to burden a network file system
MAX_ADAPTERS = 100_000
MAX_LOGGED_FOLDERS = 100  # limits the warnings about skipped folders


class FolderScan(NamedTuple):
    """The names of the subfolders that contain an adapter."""

    names: list[str]
    skipped: dict[str, str]  # name and reason of each folder that requests cannot name


class FolderWatcher:
    """Calls `on_change` with the adapter names in a folder when it starts and after each change.

    After the first call, `on_change` runs on a background thread. Only names are compared. Adapter files are read
    when a request names the adapter.
    """

    def __init__(
        self, folder: Path, on_change: Callable[[Iterable[str]], None], interval_s: float = SCAN_INTERVAL_S
    ) -> None:
        self._folder = folder
        self._on_change = on_change
        self._interval_s = interval_s
        self._names: list[str] | None = None
        self._skipped: dict[str, str] = {}
        self._is_unreadable = False
        self._is_closed = threading.Event()

    def start(self) -> None:
        self.scan()
        threading.Thread(target=self._run, name="adapters-dir", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def scan(self) -> None:
        """Scan the folder once, and call `on_change` if the adapter names changed."""
        was_unreadable, self._is_unreadable = self._is_unreadable, False
        try:
            names, skipped = find_adapters(self._folder)
        except OSError as error:
            if not was_unreadable:
                logger.warning("cannot read the adapters folder: %s", error)
            self._is_unreadable = True
            if not isinstance(error, FileNotFoundError):
                return  # the error may be temporary, so keep serving the known adapters
            names, skipped = [], {}
        for name, reason in skipped.items():
            if name not in self._skipped:
                logger.warning("%r in the adapters folder is not served: %s", name, reason)
        self._skipped = skipped
        if names != self._names:
            logger.info("adapters in %s: %d", self._folder.name, len(names))
            self._names = names
            self._on_change(names)

    def _run(self) -> None:
        while not self._is_closed.wait(self._interval_s):
            self.scan()


def find_adapters(folder: Path) -> FolderScan:
    """Return the subfolders that contain an adapter. Unreadable subfolders are ignored."""
    root, names = os.path.realpath(folder), []
    skipped: dict[str, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if os.path.isfile(f"{entry.path}/{CONFIG_FILE}"):
                reason = _find_skip_reason(entry, root)
                if reason is None:
                    names.append(entry.name)
                elif len(skipped) < MAX_LOGGED_FOLDERS:
                    skipped[entry.name] = reason
    return FolderScan(sorted(names)[:MAX_ADAPTERS], skipped)


def _find_skip_reason(entry: "os.DirEntry[str]", root: str) -> str | None:
    """Return the reason why a subfolder is not listed, or None. The rules match `LocalSource`."""
    if not is_unambiguous_name(entry.name):
        return "names must not contain `%`, `\\` or unprintable characters, or start with `~`; rename the folder"
    if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
        return "it is a symlink to a path outside the folder; allow the target with --local-adapters, or copy it"
    return None
