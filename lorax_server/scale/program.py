"""The program of a replica's server: `lorax serve` with an address and a key of the replica's own.

The replica writes one line of JSON to the standard input and keeps it open. When it ends, whatever ended the replica,
this program ends at once: its memory and its GPU are needed by the replica that takes its place.
"""

import json
import os
import sys
import threading
from dataclasses import replace
from typing import NoReturn

from lorax_server.cli.command import read_config
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.launch import serve_forever


def main() -> int:
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_replica, daemon=True).start()
    try:
        if order["folder"]:  # of the command that was given, for paths that are relative to it
            os.chdir(order["folder"])
        config = read_config(order["flags"], os.environ)
    except LoraxError as error:
        print(f"lorax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    # All clients come through the ingress, which is one address, and keep the names by which they call it.
    own = replace(
        config,
        host=order["host"],
        port=order["port"],
        replica_key=order["key"],
        ingress_key=order["ingress_key"],
        allowed_hosts=config.allowed_hosts or tuple(order["allowed_hosts"]),
    )
    return serve_forever(own)


def _end_with_replica() -> NoReturn:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
