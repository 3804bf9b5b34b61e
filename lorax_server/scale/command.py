"""`lorax serve --replicas N`: runs the application on a local Ray cluster until a signal arrives."""

import os
import re
import signal
import sys
from collections.abc import Sequence

import ray
from ray import serve

from lorax_server.cli.command import run_program
from lorax_server.cli.settings import parse
from lorax_server.machine import count_cores
from lorax_server.scale.ray_app import ScaleConfig, build_application
from lorax_server.scale.server_process import ReplicaError, find_port
from lorax_server.server.access.model_names import list_base_names
from lorax_server.server.http.hosts import is_loopback

APP_NAME = "lorax"
LOCALHOST = "127.0.0.1"
# Ray's default niceness of 15 gives all other processes priority over replicas.
NICENESS_VARIABLE = "RAY_worker_niceness"
FAILURE_PATTERN = re.compile(r"ReplicaError: (.*)")


def main(argv: Sequence[str]) -> int:
    return run_program("lorax", lambda: serve_replicas(list(argv)))


def serve_replicas(argv: list[str]) -> int:
    """Serve until a signal arrives, and return the exit code."""
    parsed = parse(argv, os.environ, "serve")
    config, replicas = parsed.make_config(None), parsed.values["replicas"]
    cores, port = count_cores(), config.port or find_port(config.host)
    scale = ScaleConfig(replicas=replicas, host=LOCALHOST, cpus=max(1, cores // replicas))
    if not config.allowed_hosts and not is_loopback(config.host):
        argv = [*argv, "--allowed-host=*"]  # replicas listen on localhost, where the Host header is checked
    os.environ.setdefault(NICENESS_VARIABLE, "0")
    ray.init(num_cpus=max(cores, int(scale.cpus * replicas)), include_dashboard=False)
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, because it replaces the signal handlers
        signal.signal(number, signal.default_int_handler)
    try:
        serve.start(http_options={"host": config.host, "port": port})
        _deploy(build_application(scale, argv))
        name, *_ = list_base_names(config.model_id, config.served_names)
        print(f"ready: http://{config.host}:{port} serves {name} with {replicas} replicas", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
    finally:
        ray.shutdown()
    return 0


def _deploy(application: serve.Application) -> None:
    try:
        serve.run(application, name=APP_NAME)
    except RuntimeError as error:
        deployments = serve.status().applications[APP_NAME].deployments.values()
        reasons = [reason for each in deployments for reason in FAILURE_PATTERN.findall(each.message)]
        raise ReplicaError(reasons[-1] if reasons else str(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
