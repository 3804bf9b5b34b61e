"""Runs the `lorax` command for `python -m lorax_server.cli`."""

import sys

from lorax_server.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
