"""A folder whose subfolders are adapters: looked at every now and then, so that who puts one there need not tell."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from lorax_server.adapters.sources.local import is_plain
from lorax_server.files.names import CONFIG_FILE

logger = logging.getLogger(__name__)

EVERY_S = 2.0  # often enough for people, seldom enough for a network's file system
MAX_ADAPTERS = 100_000
MAX_TOLD = 100  # folders that are not served, of which the log tells


class Findings(NamedTuple):
    """The subfolders of a folder that hold an adapter."""

    names: list[str]
    left_out: dict[str, str]  # those that no request could name, and why


class FolderWatch:
    """Tells the names of the adapters in a folder, at first and whenever they change, on a thread of its own.

    What a name's files are is looked at when it is asked for; here it is only which names there are.
    """

    def __init__(self, folder: Path, tell: Callable[[Iterable[str]], None], every_s: float = EVERY_S) -> None:
        self._folder = folder
        self._tell = tell
        self._every_s = every_s
        self._names: list[str] | None = None
        self._left_out: dict[str, str] = {}
        self._is_lost = False
        self._is_closed = threading.Event()

    def start(self) -> None:
        self.look()
        threading.Thread(target=self._run, name="adapters-dir", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def look(self) -> None:
        """Once, now."""
        try:
            names, left_out = find_adapters(self._folder)
        except OSError as error:
            if not self._is_lost:
                logger.warning("the adapters' folder cannot be read: %s", error)
            self._is_lost = True
            if not isinstance(error, FileNotFoundError):
                return  # perhaps only for a moment: it is served as it was
            names, left_out = [], {}
        else:
            self._is_lost = False
        self._tell_left_out(left_out)
        if names != self._names:
            logger.info("adapters in %s: %d", self._folder.name, len(names))
            self._names = names
            self._tell(names)

    def _tell_left_out(self, left_out: dict[str, str]) -> None:
        """Once for each, in the log."""
        for name, why in left_out.items():
            if name not in self._left_out:
                logger.warning("%r in the adapters' folder is not served: %s", name, why)
        self._left_out = left_out

    def _run(self) -> None:
        while not self._is_closed.wait(self._every_s):
            self.look()


def find_adapters(folder: Path) -> Findings:
    """Tell the subfolders that hold an adapter. One that may not be entered is as if it were not there."""
    root, names = os.path.realpath(folder), []
    left_out: dict[str, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if os.path.isfile(f"{entry.path}/{CONFIG_FILE}"):
                problem = _find_problem(entry, root)
                if problem is None:
                    names.append(entry.name)
                elif len(left_out) < MAX_TOLD:
                    left_out[entry.name] = problem
    return Findings(sorted(names)[:MAX_ADAPTERS], left_out)


def _find_problem(entry: "os.DirEntry[str]", root: str) -> str | None:
    """The reason why no request could name it, if there is one: the same rules as the source's."""
    if not is_plain(entry.name):
        return "names with `%` or `\\`, with `~` at first or with what cannot be printed are refused; rename it"
    if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
        return "it is a link out of the folder; name the folder that it leads to by --local-adapters, or copy it"
    return None
