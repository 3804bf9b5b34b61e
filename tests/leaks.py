"""A pytest plugin that fails tests that leak threads, processes, sockets or temporary files.

A resource that exists after a test, but not before it, fails the test and is named. Module and session fixtures may
hold resources until they are torn down.
"""

import gc
import multiprocessing.util
import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

GRACE_S = 30.0  # time for threads and processes to exit, on a busy machine
PAUSE_S = 0.002
MARK = "LEAKS_OF"  # environment variable that all descendants inherit
DATA = (Path, str, type(None))  # fixtures with these types start nothing after setup
HELPERS = ("multiprocessing.resource_tracker",)  # processes that Python keeps until exit
CACHES = ("torchinductor_",)  # created when torch is imported, shared by all processes
FOREVER = ("pytest_timeout ",)  # without signals, it lives until the session finishes


class Resource(NamedTuple):
    """A resource that a test can leak: its kind, and its key within that kind."""

    kind: str
    key: Any


# --- Existing resources -----------------------------------------------------------------------------------------------


def find_all() -> set[Resource]:
    return {*find_threads(), *find_processes(), *find_sockets(), *find_files()}


def find_everything() -> set[Resource]:
    return find_all() | set(find_orphans())


def find_threads() -> Iterator[Resource]:
    for thread in threading.enumerate():
        if not thread.name.startswith(FOREVER):
            yield Resource("thread", thread)


def find_processes() -> Iterator[Resource]:
    """Find running children. Zombies are ignored."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return  # no children, the fast case
    for child in _children():
        if _runs(child):
            yield Resource("process", child)


def _children() -> Iterator[psutil.Process]:
    """Find children by thread if Linux lists them. Otherwise scan all processes, which takes 3 ms per test."""
    lists = [*Path("/proc/self/task").glob("*/children")]
    if not lists:
        yield from psutil.Process().children()
    for path in lists:
        with suppress(OSError):  # the thread has exited
            for pid in path.read_text().split():
                with suppress(psutil.Error):  # the child has exited
                    yield psutil.Process(int(pid))


def find_orphans() -> Iterator[Resource]:
    """Find descendants whose parents have exited. Reading the environment of all processes takes 10 ms."""
    mark = f"{MARK}={os.getpid()}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = mark in path.read_bytes().split(b"\0")
            process = psutil.Process(int(path.parent.name))
            is_lost = is_ours and os.getpid() not in (process.pid, *[each.pid for each in process.parents()])
        except (OSError, psutil.Error):
            continue
        if is_lost and _runs(process):
            yield Resource("process", process)


def _runs(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(name in command for name in HELPERS)
    except psutil.Error:
        return False


def find_sockets() -> Iterator[Resource]:
    for name in os.listdir("/dev/fd"):
        try:
            result = os.fstat(int(name))
        except OSError:
            continue  # the descriptor of this listing
        if stat.S_ISSOCK(result.st_mode):
            yield Resource("socket", (result.st_dev, result.st_ino))


def find_files() -> Iterator[Resource]:
    for name in os.listdir(tempfile.gettempdir()):
        if not name.startswith(CACHES):
            yield Resource("temporary file", name)


# --- Descriptions -----------------------------------------------------------------------------------------------------


def describe(thing: Resource) -> str:
    try:
        return f"{thing.kind} {DESCRIBE[thing.kind](thing.key)}"
    except (OSError, psutil.Error):
        return f"{thing.kind} that has just ended"


def describe_thread(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    frame = sys._current_frames().get(thread.ident or 0)
    place = f", at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    return f"{thread.name!r} (runs {getattr(target, '__qualname__', target)}{place})"


def describe_process(process: psutil.Process) -> str:
    return f"{process.pid}: {' '.join(process.cmdline())[:300]}"


def describe_socket(key: tuple[int, int]) -> str:
    for name in os.listdir("/dev/fd"):
        try:
            result = os.fstat(int(name))
        except OSError:
            continue
        if (result.st_dev, result.st_ino) == key:
            with socket.socket(fileno=os.dup(int(name))) as it:
                return f"{name} ({it.family.name}, {_ends(it)})"
    return "that has just been closed"


def _ends(it: socket.socket) -> str:
    here = it.getsockname() or "no address"
    try:
        return f"from {here} to {it.getpeername() or 'its pair'}"
    except OSError:
        return f"at {here}"


def describe_file(name: str) -> str:
    path = Path(tempfile.gettempdir()) / name
    return f"{path}{' (a folder)' if path.is_dir() else ''}"


DESCRIBE: dict[str, Callable[[Any], str]] = {
    "thread": describe_thread,
    "process": describe_process,
    "socket": describe_socket,
    "temporary file": describe_file,
}


# --- Owners -----------------------------------------------------------------------------------------------------------


class Watch:
    """Tracks existing resources and fixture resources, and reports the rest as leaks."""

    def __init__(self) -> None:
        self._known = find_all()
        self._of_session: dict[Resource, str] = {}  # by resource: the fixture that created it
        self._of_module: dict[Resource, str] = {}  # by resource: the fixture or test that created it

    def hold(self, scope: str, owner: str, things: set[Resource]) -> None:
        held = self._of_session if scope in ("session", "package") else self._of_module
        held.update((thing, held.get(thing, owner)) for thing in things - self._known)

    def after_test(self, owner: str, is_shared: bool) -> str:
        """Report leaks of a test. If `is_shared`, a fixture may own them, so wait for the end of the module."""
        allowed = self._known | self._of_session.keys() | self._of_module.keys()
        left = find_all() - allowed
        if left and not is_shared:
            left = _wait_for(allowed)
        if not left:
            return ""
        self._of_module |= dict.fromkeys(left, owner)
        return "" if is_shared else self._report(dict.fromkeys(left, ""))

    def after_module(self, is_last: bool) -> str:
        """Report leaks of a module, and after the last module leaks of session fixtures."""
        held = self._of_module | (self._of_session if is_last else {})
        allowed = self._known if is_last else self._known | self._of_session.keys()
        left = _wait_for(allowed, find_everything)
        self._of_module = {}
        return self._report({thing: f", made by {held[thing]}" if thing in held else "" for thing in left})

    def _report(self, left: dict[Resource, str]) -> str:
        self._known |= left.keys()  # only one test fails for each leak
        return "\n".join(sorted(f"  {describe(thing)}{origin}" for thing, origin in left.items()))


def _wait_for(allowed: set[Resource], find: Callable[[], set[Resource]] = find_all) -> set[Resource]:
    """Return the resources that are not in `allowed`. If there are any, check again after a grace period."""
    if not (left := find() - allowed):
        return left
    gc.collect()  # closes unreferenced sockets; Python warns about unclosed sockets, which fails the test
    end = time.monotonic() + GRACE_S
    while (left := find() - allowed) and time.monotonic() < end:
        time.sleep(PAUSE_S)
    return left


# --- Hooks ------------------------------------------------------------------------------------------------------------

WATCH = pytest.StashKey[Watch]()
FOLDER = pytest.StashKey[tuple[str, str | None, str | None]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Set a temporary folder for each test process, and mark its descendants."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # runs no tests, and would delete the folder before its workers exit
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # stays where it is looked for
    multiprocessing.util.get_temp_dir()  # Python keeps it until exit
    folder = tempfile.mkdtemp(prefix="t-")  # short, because socket paths are limited
    config.stash[FOLDER] = folder, tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    os.environ[MARK] = str(os.getpid())
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # the driver keeps a socket open
    config.stash[WATCH] = Watch()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if FOLDER not in session.config.stash:
        return
    folder, tempfile.tempdir, variable = session.config.stash[FOLDER]
    os.environ.pop("TMPDIR")
    if variable is not None:
        os.environ["TMPDIR"] = variable
    shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.scope == "function":
        return (yield)
    find = find_all if fixturedef.scope in ("class", "module") else find_everything
    before = find()
    try:
        return (yield)
    finally:
        request.config.stash[WATCH].hold(fixturedef.scope, fixturedef.argname, find() - before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    is_shared = any(_may_grow(each[-1]) for each in _fixtures(item))
    result = yield
    watch = item.config.stash[WATCH]
    left = watch.after_test(item.name, is_shared)
    is_last = nextitem is None or nextitem.getparent(pytest.Module) is not item.getparent(pytest.Module)
    if not left and is_last:
        left = watch.after_module(nextitem is None)
    if left:
        pytest.fail(f"left behind:\n{left}", pytrace=False)
    return result


def _fixtures(item: pytest.Item) -> list[Any]:
    result = getattr(item, "_fixtureinfo", None)
    return list(result.name2fixturedefs.values()) if result else []


def _may_grow(fixture: pytest.FixtureDef[Any]) -> bool:
    """Return True if a module fixture created an object that may start a thread later."""
    made = fixture.cached_result
    return fixture.scope in ("module", "class") and made is not None and not isinstance(made[0], DATA)
