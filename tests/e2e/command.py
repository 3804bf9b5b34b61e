"""Runs `lorax` with settings that have no flag, and with a forked engine, which starts faster.

`python -m tests.e2e.command SETTINGS ADDRESS serve ...`: SETTINGS are server config fields as JSON. ADDRESS is the
address of a fork server (`tests/forks.py`) that has imported torch, or empty. A forked engine is not a child process of
the command, so the command prints its process ID.
"""

import json
import os
import sys
from dataclasses import replace
from multiprocessing import context, forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from lorax_server import cli, launch
from lorax_server.config import ServerConfig

FORKED_PREFIX = "forked an engine:"


class LoggedForkProcess(ForkServerProcess):
    def start(self) -> None:
        super().start()
        print(FORKED_PREFIX, self.pid, file=sys.stderr, flush=True)


class LoggedForkContext(ForkServerContext):
    Process = LoggedForkProcess


def fork_engines_from(address: str) -> None:
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # child processes do not keep the fork server alive
    server.ensure_running = resource_tracker.ensure_running
    context._concrete_contexts["spawn"] = LoggedForkContext()  # type: ignore[attr-defined]


def serve_with(settings: dict[str, Any]) -> None:
    serve = launch.serve_forever

    def serve_forever(config: ServerConfig) -> int:
        return serve(replace(config, **settings))

    launch.serve_forever = serve_forever


if __name__ == "__main__":
    serve_with(json.loads(sys.argv[1]))
    if sys.argv[2]:
        fork_engines_from(sys.argv[2])
    sys.exit(cli.main(sys.argv[3:]))
