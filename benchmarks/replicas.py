"""Measure the replica router on Ray Serve, and compare it with Ray's default router and with random choice.

Three replicas of the bundled model run on this machine, with 200 adapters of rank 64 in a folder and each replica has
device memory for 80 adapters. Clients request short completions for adapters drawn from a Zipf distribution. Each
router starts with new replicas and the same requests. `tests/scale/test_placement.py` simulates the same router with
100 replicas.
"""

import http.client
import itertools
import json
import logging
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from harness.report import Record, make_parser, percentile, report
from harness.server import ROOT
from ray.serve.request_router import RequestRouter

DEMO = ROOT / "lorax_server/demo"
ROUTERS = {"adapters": "our router", "ray": "Ray's default", "random": "random choice"}
RAY_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"  # Ray's default
RANK = 64


class RandomRouter(RequestRouter):
    """Chooses replicas at random."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]


@dataclass(frozen=True)
class LoadSize:
    """The numbers of replicas, adapters, clients and requests."""

    replicas: int = 3
    adapters: int = 200
    resident: int = 80  # adapters that fit on a device
    clients: int = 12
    warm_up: int = 300
    requests: int = 800


QUICK = LoadSize(2, 12, 5, 2, 0, 20)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="smallest load, only to see that it runs")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), help="(all)")
    args = parser.parse_args()
    report(measure(QUICK if args.quick else LoadSize(), args.routers), args.json)


def measure(load_size: LoadSize, routers: Sequence[str]) -> list[Record]:
    records: list[Record] = []
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        num_bytes = make_adapters(folder / "adapters", load_size.adapters)
        flags: dict[str, str | int] = {"adapters_dir": str(folder / "adapters")}
        flags |= {"adapter_bytes": int(1.02 * load_size.resident * num_bytes), "adapter_host_bytes": 4 * num_bytes}
        with running_ray(folder) as port:
            for router in routers:
                with running_replicas(flags, load_size.replicas, router):
                    records += measure_router(port, router, load_size)
    return records


def make_adapters(folder: Path, count: int) -> int:
    """Write random adapters for the linear layers of the demo adapters. Return the adapter size."""
    import torch
    from safetensors.torch import load_file, save_file

    model = DEMO / "adapters" / "pirate"
    shapes = {name: tensor.shape for name, tensor in load_file(model / "adapter_model.safetensors").items()}
    config = json.loads((model / "adapter_config.json").read_text())
    config |= {"r": RANK, "lora_alpha": RANK, "alpha_pattern": {}, "rank_pattern": {}}
    for index in range(count):
        torch.manual_seed(index)
        adapter = folder / f"adapter-{index:03}"
        adapter.mkdir(parents=True)
        tensors = {
            name: torch.randn((RANK, shape[1]) if "lora_A" in name else (shape[0], RANK)) * 0.01
            for name, shape in shapes.items()
        }
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def running_ray(folder: Path) -> Iterator[int]:
    """Start Ray on this machine only, and yield the port of its proxy."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ |= {"RAY_worker_niceness": "0"}  # as `lorax serve --replicas` does
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve

    from lorax_server.scale.server_process import find_port

    port = find_port("127.0.0.1")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(num_cpus=8, _temp_dir=str(folder), **quiet)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def running_replicas(flags: dict[str, str | int], replicas: int, router: str) -> Iterator[None]:
    from ray import serve

    from lorax_server.scale import ray_app

    own = {"device": "cpu", "replicas": replicas, "host": "127.0.0.1", "log_level": "warning"}
    router_class = {"adapters": ray_app.AdapterRouter, "ray": RAY_ROUTER, "random": RandomRouter}[router]
    with patch.object(ray_app, "AdapterRouter", router_class):
        application = ray_app.build({**flags, **own})
    serve.run(application, name="lorax")
    try:
        yield
    finally:
        serve.delete("lorax")


def measure_router(port: int, router: str, load_size: LoadSize) -> list[Record]:
    rng = random.Random(0)
    names = [f"adapter-{index:03}" for index in range(load_size.adapters)]
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    drawn = rng.choices(names, weights, k=load_size.warm_up + load_size.requests)
    send_all(port, [*rng.sample(names, len(names)), *drawn[: load_size.warm_up]], load_size.clients)
    start_time, cpu_s = time.perf_counter(), count_cpu_s()
    sent = send_all(port, drawn[load_size.warm_up :], load_size.clients)
    seconds, cpu_s = time.perf_counter() - start_time, count_cpu_s() - cpu_s
    times, name = [first_s for _, first_s in sent], ROUTERS[router]
    hits = sum(tier == "device" for tier, _ in sent) / len(sent)
    return [
        Record(f"{name}: hits", hits, "of 1", "", 0.95 if router == "adapters" else None),
        Record(f"{name}: time to first token", 1e3 * statistics.median(times), "ms"),
        Record(f"{name}: P95 time to first token", 1e3 * percentile(times, 0.95), "ms"),
        Record(f"{name}: requests", len(sent) / seconds, "1/s"),
        Record(f"{name}: CPU of all processes", 1e3 * cpu_s / len(sent), "ms per request"),
    ]


def count_cpu_s() -> float:
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return float(sum(each.user + each.system for each in times))


def send_all(port: int, names: Sequence[str], clients: int) -> list[tuple[str, float]]:
    """Send a request for each name. Return each request's adapter tier and seconds to the first token."""
    sent, numbers = list[tuple[str, float]](), itertools.count()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while (number := next(numbers)) < len(names):
            sent.append(send(connection, names[number], number))
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == len(names), "a client failed"
    return sent


def send(connection: http.client.HTTPConnection, name: str, number: int) -> tuple[str, float]:
    parameters = {"adapter_id": name, "adapter_source": "local", "max_new_tokens": 2}
    body = {"inputs": f"{number} kites, and", "parameters": parameters}
    start_time = time.perf_counter()
    connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read1()
    seconds = time.perf_counter() - start_time
    tier = response.headers["x-adapter-tier"] or ""
    response.read()
    return tier, seconds


if __name__ == "__main__":
    main()
