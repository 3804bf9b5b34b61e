"""The listening socket, and the open file limit."""

import resource
import socket

from lorax_server.config import ServerConfig
from lorax_server.errors import ConfigError


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bind_port(config: ServerConfig) -> socket.socket:
    """Bind the port without listening."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port}: {error.strerror}; choose another with --port"
        ) from error
    return listener


def raise_file_limit() -> None:
    """Allow as many open files as possible, since every connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
