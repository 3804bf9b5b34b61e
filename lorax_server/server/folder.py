"""A folder whose subfolders are adapters: looked at every now and then, so that who puts one there need not tell."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from lorax_server.adapters.checkpoint import CONFIG_FILE

logger = logging.getLogger(__name__)

EVERY_S = 2.0  # often enough for people, seldom enough for a network's file system
MAX_ADAPTERS = 100_000


class FolderWatch:
    """Tells the names of the adapters in a folder, at first and whenever they change, on a thread of its own.

    What a name's files are is looked at when it is asked for; here it is only which names there are.
    """

    def __init__(self, folder: Path, tell: Callable[[Iterable[str]], None], every_s: float = EVERY_S) -> None:
        self._folder = folder
        self._tell = tell
        self._every_s = every_s
        self._names: list[str] | None = None
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
            names = find_adapters(self._folder)
        except OSError as error:
            if not self._is_lost:
                logger.warning("the adapters' folder cannot be read: %s", error)
            self._is_lost = True
            if not isinstance(error, FileNotFoundError):
                return  # perhaps only for a moment: it is served as it was
            names = []
        else:
            self._is_lost = False
        if names != self._names:
            logger.info("adapters in %s: %d", self._folder.name, len(names))
            self._names = names
            self._tell(names)

    def _run(self) -> None:
        while not self._is_closed.wait(self._every_s):
            self.look()


def find_adapters(folder: Path) -> list[str]:
    """The names of the subfolders that hold an adapter."""
    names = (name for name in os.listdir(folder) if name.isprintable())
    # One that may not be entered is as if it were not there.
    return sorted(name for name in names if os.path.isfile(folder / name / CONFIG_FILE))[:MAX_ADAPTERS]
