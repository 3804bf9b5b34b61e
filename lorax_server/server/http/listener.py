"""The port, and the files that a process may open."""

import logging
import resource
import socket
import sys
from dataclasses import replace

from lorax_server.config import ServerConfig
from lorax_server.errors import ConfigError

logger = logging.getLogger(__name__)

BACKLOG = 4096
OTHER_FILES = 512  # that a process has open besides connections: pipes, logs, connections being refused


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


def raise_file_limit() -> int:
    """Allow as many open files as possible, since every stream is one. Return their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def fit_connections(config: ServerConfig, max_files: int) -> ServerConfig:
    """Allow no more connections than files. A connection without a file could not even be refused."""
    most = max(1, max_files - OTHER_FILES)
    if config.max_connections <= most:
        return config
    logger.warning(
        "at most %d connections instead of %d: this process may open %d files; raise that (LimitNOFILE, ulimit -n)",
        most,
        config.max_connections,
        max_files,
    )
    return replace(config, max_connections=most)
