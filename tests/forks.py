"""Fast processes for tests: forked from one that has imported torch already."""

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
    """Start a process to fork from; it ends with the last of its children."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.preload"])
    forkserver.ensure_running()
    try:
        yield made
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def engines_of(made: ForkServerContext) -> Iterator[None]:
    """Fork the engines that start meanwhile, instead of starting them from scratch."""
    contexts = context._concrete_contexts  # type: ignore[attr-defined]
    spawn, contexts["spawn"] = contexts["spawn"], made
    try:
        yield
    finally:
        contexts["spawn"] = spawn


def run_apart(
    forks: ForkServerContext, folder: Path, function: Callable[..., Any], *args: Any
) -> tuple[int | None, str]:
    """Call a function in a process; return the exit code and the output."""
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
