"""The program of a replica's server process: `lorax serve` at an address and with a secret that the replica sets.

The replica writes one line of JSON to the standard input and keeps it open. When the replica ends, for any reason, the
input closes and this process exits: the replica's successor needs its memory and its GPU.
"""

import json
import os
import sys
import threading
from dataclasses import replace
from typing import NoReturn

from lorax_server.cli.command import guarded, read_config
from lorax_server.launch import serve_forever


def main() -> int:
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_replica, daemon=True).start()
    return guarded("lorax", lambda: _serve(**options))


def _serve(flags: list[str], secret: str) -> int:
    return serve_forever(replace(read_config(flags, os.environ), replica_secret=secret))


def _exit_with_replica() -> NoReturn:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
