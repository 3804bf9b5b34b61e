"""The commands `lorax` and `lorax-launcher`."""

from lorax_server.cli.command import launcher, main

__all__ = ["launcher", "main"]
