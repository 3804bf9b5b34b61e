"""`python -m lorax_server.cli` is `lorax`."""

import sys

from lorax_server.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
