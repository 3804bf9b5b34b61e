"""`lorax serve --replicas N`: a Ray of this machine only, with the application on it, until a signal comes."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from types import FrameType
from typing import NoReturn

import ray
from ray import serve

from lorax_server.cli.settings import parse
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.machine import count_cores
from lorax_server.scale.ray_app import Scale, build_scaled
from lorax_server.scale.server_process import Order, ReplicaError, find_port

APP = "lorax"
LOCAL = "127.0.0.1"
NICENESS = "RAY_worker_niceness"  # of replicas; Ray's own 15 lets every other process of the machine go first
REASON = re.compile(r"ReplicaError: (.*)")


def main(argv: Sequence[str]) -> int:
    try:
        return serve_replicas(list(argv))
    except LoraxError as error:
        print(f"lorax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def serve_replicas(argv: list[str]) -> int:
    """Serve until a signal comes, and return the exit code."""
    parsed = parse(argv, os.environ, "serve")
    config, replicas = parsed.make_config(None), parsed.values["replicas"]
    cores, port = count_cores(), config.port or find_port(config.host)
    scale = Scale(replicas=replicas, host=LOCAL, cpus=max(1, cores // replicas))
    order = Order(argv, os.getcwd(), () if _is_local(config.host) else ("*",))
    os.environ.setdefault(NICENESS, "0")
    ray.init(num_cpus=max(cores, int(scale.cpus * replicas)), include_dashboard=False)
    for number in (signal.SIGINT, signal.SIGTERM):  # now, since Ray has set its own
        signal.signal(number, _interrupt)
    try:
        serve.start(http_options={"host": config.host, "port": port})
        _deploy(build_scaled(scale, argv, order))
        print(f"ready: http://{config.host}:{port} serves {config.model_id} by {replicas} replicas", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def _deploy(application: serve.Application) -> None:
    try:
        serve.run(application, name=APP)
    except RuntimeError as error:
        told = serve.status().applications[APP].deployments.values()
        reasons = [reason for each in told for reason in REASON.findall(each.message)]
        raise ReplicaError(reasons[-1] if reasons else str(error)) from error


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
