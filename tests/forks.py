"""Processes for tests that are there in no time: forked from one that has imported torch already."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver
from multiprocessing.context import ForkServerContext


@contextmanager
def forking() -> Iterator[ForkServerContext]:
    """A process to fork from; it ends with the last of its children."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.preload"])
    forkserver.ensure_running()
    try:
        yield made
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def engines_of(made: ForkServerContext) -> Iterator[None]:
    """Engines that start meanwhile are forked instead of being started from scratch."""
    contexts = context._concrete_contexts  # type: ignore[attr-defined]
    spawn, contexts["spawn"] = contexts["spawn"], made
    try:
        yield
    finally:
        contexts["spawn"] = spawn
