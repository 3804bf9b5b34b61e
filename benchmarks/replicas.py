"""Replicas behind our router, behind Ray's default and behind chance; and a simulation of a hundred of them.

Three replicas of the demo model run on this machine, on a Ray of their own. 200 adapters of rank 64 lie in a folder,
and a replica's memory holds 80 of them, on the device and a few in host memory. Clients ask for short answers, for
adapters by Zipf's law. After a warm-up the figures are the share of requests whose adapter was on the device, the time
to the first token, and requests per second. Every router gets replicas that start anew and the same requests.

The simulation has 100 replicas and 100,000 adapters, and the same code decides (`lorax_server/scale/placement.py`).
"""

import argparse
import http.client
import itertools
import json
import logging
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
from replica_simulation import Cluster, Simulation
from report import Record, report

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "lorax_server/demo"
ROUTERS = {"adapters": "our router", "ray": "Ray's default", "random": "chance"}
RANK = 64
TOKENS = 2


@dataclass(frozen=True)
class Amounts:
    """The size of the load."""

    replicas: int = 3
    adapters: int = 200
    held: int = 80  # adapters on a device
    clients: int = 12
    warm_up: int = 500  # requests
    requests: int = 800
    simulated: Cluster = field(default_factory=Cluster)
    simulated_requests: int = 100_000


QUICK = Amounts(2, 12, 5, 2, 12, 20, Cluster(10, 1_000, 120), 5_000)


class Asked(NamedTuple):
    """One request, as its client saw it."""

    is_hit: bool
    first_token_s: float


class Outcome(NamedTuple):
    """Figures of one router."""

    hits: float
    first_token_s: float  # the median
    late_token_s: float  # P95
    per_s: float
    cpu_s: float  # of all processes but this one, for each request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--quick", action="store_true", help="small amounts, to see that it runs")
    parser.add_argument("--only", choices=("replicas", "simulation"), help="one half")
    arguments = parser.parse_args()
    amounts = QUICK if arguments.quick else Amounts()
    records: list[Record] = []
    if arguments.only != "replicas":
        records += simulate(amounts)
    if arguments.only != "simulation":
        records += measure(amounts)
    report(records, arguments.json)


# --- The simulation ---------------------------------------------------------------------------------------------------


def simulate(amounts: Amounts) -> list[Record]:
    records = []
    where = f"{amounts.simulated.replicas} replicas, {amounts.simulated.adapters:,} adapters"
    for router in ("ours", "two choices", "random"):
        simulation = Simulation(amounts.simulated, router)
        simulation.warm_up()
        outcome = simulation.run(amounts.simulated_requests)
        is_ours, spread = router == "ours", f"{where}, {router}: largest load"
        records += [
            Record(f"{where}, {router}: hits", outcome.hits, "", "", 0.95 if is_ours else None),
            Record(spread, outcome.load_spread, "of the mean", "", 1.3 if is_ours else None, at_most=True),
        ]
        if is_ours:
            records += leave(simulation, amounts)
    return records


def leave(simulation: Simulation, amounts: Amounts) -> list[Record]:
    """Let 10 % of the replicas go. At least their own adapters have to move."""
    before = simulation.owners()
    gone = set(simulation.leave(0.1))
    after = simulation.owners()
    moved = [adapter for adapter in before if before[adapter] != after[adapter]]
    needless = sum(before[adapter] not in gone for adapter in moved)
    following = simulation.run(amounts.simulated_requests // 5)
    return [
        Record("10 % leave: adapters that move", len(moved) / len(before), "", "", 0.12, at_most=True),
        Record("10 % leave: others that move", needless, "adapters", "", 0, at_most=True),
        Record("10 % leave: hits of the next requests", following.hits, "", "", None),
        Record("10 % leave: largest load", following.load_spread, "of the mean", "", 1.3, at_most=True),
    ]


# --- Real replicas ----------------------------------------------------------------------------------------------------


def measure(amounts: Amounts) -> list[Record]:
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        adapters = Path(folder, "adapters")
        num_bytes = make_adapters(adapters, amounts.adapters)
        with running_ray(Path(folder)) as port:
            for router, name in ROUTERS.items():
                outcomes[router] = measure_router(router, port, adapters, num_bytes, amounts)
                print(f"{name}: {outcomes[router]}", flush=True)
    records = []
    for router, outcome in outcomes.items():
        is_ours = router == "adapters"
        records += [
            Record(f"{ROUTERS[router]}: hits", outcome.hits, "", "", 0.95 if is_ours else None),
            Record(f"{ROUTERS[router]}: time to first token", 1e3 * outcome.first_token_s, "ms", "", None),
            Record(f"{ROUTERS[router]}: P95 of it", 1e3 * outcome.late_token_s, "ms", "", None),
            Record(f"{ROUTERS[router]}: requests", outcome.per_s, "/s", "", None),
            Record(f"{ROUTERS[router]}: CPU of a request", 1e3 * outcome.cpu_s, "ms", "", None),
        ]
    ours, chance, default = outcomes["adapters"], outcomes["random"], outcomes["ray"]
    records += [
        Record("requests/s of our router", ours.per_s / chance.per_s, "x", "chance", 2.0),
        Record("requests/s of our router", ours.per_s / default.per_s, "x", "Ray's default", None),
    ]
    return records


def make_adapters(folder: Path, count: int) -> int:
    """Make adapters with numbers of their own at all linears that a demo adapter has. Return the size of one."""
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
    """Run a Ray of this machine only, and yield the port of its proxy."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    import ray
    from ray import serve

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ray.init(
        num_cpus=8, include_dashboard=False, _temp_dir=str(folder), log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


def measure_router(router: str, port: int, adapters: Path, num_bytes: int, amounts: Amounts) -> Outcome:
    from ray import serve

    from lorax_server.scale.ray_app import build

    memory = int(1.02 * amounts.held * num_bytes)
    flags = {
        "device": "cpu",
        "adapters_dir": str(adapters),
        "adapter_bytes": memory,
        "adapter_host_bytes": 4 * num_bytes,
    }
    serve.run(
        build({**flags, "replicas": amounts.replicas, "router": router, "host": "127.0.0.1", "log_level": "warning"}),
        name="lorax",
    )
    try:
        names = choose_names(amounts)
        ask_all(port, names[: amounts.warm_up], amounts.clients)
        begin, cpu_s = time.perf_counter(), count_cpu()
        asked = ask_all(port, names[amounts.warm_up :], amounts.clients)
        seconds, cpu_s = time.perf_counter() - begin, count_cpu() - cpu_s
    finally:
        serve.delete("lorax")
    times = sorted(each.first_token_s for each in asked)
    return Outcome(
        sum(each.is_hit for each in asked) / len(asked), statistics.median(times), times[int(0.95 * len(times))],
        len(asked) / seconds, cpu_s / len(asked),
    )  # fmt: skip


def count_cpu() -> float:
    """Count the CPU seconds of Ray and all replicas. Where other work shares the cores, they tell more than time."""
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(each.user + each.system for each in times)


def choose_names(amounts: Amounts) -> list[str]:
    """Choose adapters by Zipf's law, the same ones each time. At first each is named once."""
    chance = random.Random(0)
    names = [f"adapter-{index:03}" for index in range(amounts.adapters)]
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    drawn = chance.choices(names, weights, k=amounts.warm_up + amounts.requests)
    return [*chance.sample(names, len(names)), *drawn][: amounts.warm_up + amounts.requests]


def ask_all(port: int, names: Sequence[str], clients: int) -> list[Asked]:
    """Ask for all, by so many clients at once, each on a connection of its own."""
    asked, numbers = list[Asked](), itertools.count()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while (number := next(numbers)) < len(names):
            asked.append(ask(connection, names[number], number))
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == len(names), "a client has failed"
    return asked


def ask(connection: http.client.HTTPConnection, name: str, number: int) -> Asked:
    body = {"inputs": f"{number} kites, and", "parameters": {"adapter_id": name, "max_new_tokens": TOKENS}}
    begin = time.perf_counter()
    connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read1()
    first_token_s = time.perf_counter() - begin
    tier = response.headers["x-adapter-tier"]
    response.read()
    return Asked(tier == "device", first_token_s)


if __name__ == "__main__":
    main()
