"""`lorax serve --replicas N`: a Ray of this machine only, with the application on it, until a signal comes."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from ipaddress import ip_address

import ray
from ray import serve

from lorax_server.cli.settings import parse
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.machine import count_cores
from lorax_server.scale.ray_app import Scale, build_scaled
from lorax_server.scale.server_process import Order

APP = "lorax"
LOCAL = "127.0.0.1"


def main(argv: Sequence[str]) -> int:
    try:
        return serve_replicas(list(argv))
    except LoraxError as error:
        print(f"lorax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def serve_replicas(argv: list[str]) -> int:
    parsed = parse(argv, os.environ, "serve")
    config, replicas = parsed.make_config(None), parsed.values["replicas"]
    cores = count_cores()
    scale = Scale(replicas=replicas, host=LOCAL, cpus=max(1, cores // replicas))
    order = Order(argv, os.getcwd(), () if _is_local(config.host) else ("*",))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    ray.init(num_cpus=max(cores, int(scale.cpus * replicas)), include_dashboard=False, log_to_driver=True)
    try:
        serve.start(http_options={"host": config.host, "port": config.port})
        serve.run(build_scaled(scale, argv, order), name=APP)
        print(f"ready: http://{config.host}:{config.port} serves {config.model_id} by {replicas} replicas", flush=True)
        stopped.wait()
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
