"""Fast test processes, forked from a process that has imported torch."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing import context, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


@contextmanager
def forking() -> Iterator[ForkServerContext]:
    """Start a fork server. It exits with its last child."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.preload"])
    forkserver.ensure_running()
    try:
        yield made
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def forking_engines(made: ForkServerContext) -> Iterator[None]:
    """Fork new engines instead of spawning them."""
    contexts = context._concrete_contexts  # type: ignore[attr-defined]
    spawn, contexts["spawn"] = contexts["spawn"], made
    try:
        yield
    finally:
        contexts["spawn"] = spawn


def run_in_process(
    forks: ForkServerContext, folder: Path, function: Callable[..., Any], *args: Any
) -> tuple[int | None, str]:
    """Call a function in a process, and return the exit code and output."""
    process = forks.Process(target=_run, args=(folder / "printed", function, args))
    process.start()
    process.join()
    return process.exitcode, (folder / "printed").read_text()


def _run(printed: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with printed.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            function(*args)
        except Exception:
            traceback.print_exc()
            raise
