"""Runs the application on a local Ray cluster, controlled by JSON lines: `python -m tests.scale.driver FOLDER PORT`.

A separate process, because Ray leaves threads behind. Each line is a call such as ["run", {...}], and each output line
is the result or the error.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_put
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from lorax_server import __version__
from lorax_server.scale import ray_app
from lorax_server.scale.change_registry import STORE_NAMESPACE
from tests.scale.cluster import SECRET

APP = "lorax"
DEPLOY_S = 240  # long enough for a busy machine


def run(arguments: dict[str, Any], name: str = APP, route: str = "/", version: str = __version__) -> None:
    """Run an application that was built with a package version."""
    with patch.object(ray_app, "__version__", version):
        application = ray_app.build(arguments)
    serve.run(application, name=name, route_prefix=route, logging_config={"log_level": "WARNING"})


def deploy(arguments: dict[str, Any], replicas: int | None) -> None:
    """Deploy like `serve deploy` with a config file. `replicas` is optional."""
    application: dict[str, Any] = {"name": APP, "import_path": "lorax_server.scale.ray_app:build", "args": arguments}
    if replicas is not None:
        application |= {"deployments": [{"name": "servers", "num_replicas": replicas}]}
    config = {"applications": [application], "http_options": {"host": "127.0.0.1", "port": int(sys.argv[2])}}
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    client._wait_for_application_running(APP, timeout_s=DEPLOY_S)


def status(name: str = APP) -> dict[str, str]:
    application = serve.status().applications[name]
    return {name: f"{each.status} {each.message}" for name, each in application.deployments.items()}


def delete(name: str) -> None:
    serve.delete(name)


def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    actions: dict[str, Any] = {"run": run, "deploy": deploy, "status": status, "delete": delete}
    ray.init(
        num_cpus=8, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False, logging_level=logging.ERROR
    )
    _internal_kv_put(f"secret:{APP}".encode(), SECRET.encode(), namespace=STORE_NAMESPACE)  # for requests to replicas
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print_result(None)
        for line in sys.stdin:
            action, *arguments = json.loads(line)
            try:
                print_result(actions[action](*arguments))
            except Exception as error:
                print_result({"error": f"{type(error).__name__}: {error}"})
        serve.shutdown()
    finally:
        ray.shutdown()


def print_result(answer: Any) -> None:
    print(f"answer: {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
