"""Entry point for a replica's server process.

The replica writes flags and secret as one JSON line to standard input and keeps it open. When the replica exits,
standard input closes and this process exits, to release memory and GPUs.
"""

import json
import os
import sys
import threading
from dataclasses import replace
from typing import NoReturn

from lorax_server.cli.command import read_config, run_program
from lorax_server.launch import serve_forever


def main() -> int:
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_when_replica_stops, daemon=True).start()
    return run_program("lorax", lambda: _serve(**options))


def _serve(flags: list[str], secret: str) -> int:
    return serve_forever(replace(read_config(flags, os.environ), replica_secret=secret))


def _exit_when_replica_stops() -> NoReturn:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
