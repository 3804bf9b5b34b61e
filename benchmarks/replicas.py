"""Replicas behind our router, behind Ray's default and behind chance; and a simulation of a hundred of them.

Three replicas of the demo model run on this machine, on a Ray of their own. 200 adapters of rank 64 lie in a folder,
and a replica's memory holds 80 of them, on the device and a few in host memory. Clients ask for short answers, for
adapters by Zipf's law. After a warm-up the figures are the share of requests whose adapter was on the device, the time
to the first token, and requests per second. Every router gets replicas that start anew and the same requests.

A second measurement (`--only hub`) is the same where adapters have to be loaded from afar. They lie on a hub of this
machine, and every replica has a disk of its own, which is empty when it starts. An adapter takes three answers of the
hub, each of which begins after 300 ms, and its 10 MB come at 5 MB/s. So a load takes 3 s, as that of 100 MB at 50 MB/s:
an adapter of a model with eight billion parameters. Each adapter is named once while the hub is quick; then the hub is
slow, and requests are measured. A replica that meets an adapter for the first time loads it from the hub, and later
finds it on its disk. So this is a cluster whose replicas have not met all adapters yet, as one with very many never
has. The measurement from a folder is the other end: each of its replicas has all adapters on its disk.

A third one (`--only names`) loads adapters by API, each under a new name, and takes the time until every replica has
answered a request for it: the load itself, the word to all others, their own loads and answers.

The simulation has 100 replicas and 100,000 adapters, and the same code decides (`lorax_server/scale/placement.py`).
"""

import argparse
import http.client
import itertools
import json
import logging
import os
import random
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from replica_simulation import Cluster, Simulation
from report import Record, report
from slow_hub import RunningHub, Speed, running_hub

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "lorax_server/demo"
ROUTERS = {"adapters": "our router", "ray": "Ray's default", "random": "chance"}
PLACES = {"replicas": "from a folder", "hub": "from a slow hub, 3 s each"}
SLOW = Speed(latency_s=0.3, bytes_per_s=5e6)
ADMIN = "the-admins"
RANK = 64
TOKENS = 2


@dataclass(frozen=True)
class Amounts:
    """The size of the load."""

    replicas: int = 3
    adapters: int = 200
    held: int = 80  # adapters on a device
    clients: int = 12
    warm_up: int = 300  # requests after those that name each adapter once; none where adapters come from a hub
    requests: int = 800
    names: int = 20  # adapters that are loaded by API
    simulated: Cluster = field(default_factory=Cluster)
    simulated_requests: int = 100_000


QUICK = Amounts(2, 12, 5, 2, 0, 20, 2, Cluster(10, 1_000, 120), 5_000)


class Asked(NamedTuple):
    """One request, as its client saw it."""

    tier: str  # where its adapter was
    first_token_s: float


class Outcome(NamedTuple):
    """Figures of one router."""

    hits: float  # share of requests whose adapter was on the device
    fetched: float  # share of those whose adapter came from the hub
    first_token_s: float  # the median
    late_token_s: float  # P95
    per_s: float
    cpu_s: float  # of all processes but this one, for each request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--quick", action="store_true", help="small amounts, to see that it runs")
    parser.add_argument("--only", choices=("simulation", "names", *PLACES), help="one part")
    parser.add_argument(
        "--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), help="only these, in this order"
    )
    arguments = parser.parse_args()
    amounts = QUICK if arguments.quick else Amounts()
    records: list[Record] = []
    if arguments.only in (None, "simulation"):
        records += simulate(amounts)
    for place in PLACES:
        if arguments.only in (None, place):
            records += measure(place, amounts, arguments.routers)
    if arguments.only in (None, "names"):
        records += measure_names(amounts)
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


def measure(place: str, amounts: Amounts, routers: Sequence[str]) -> list[Record]:
    outcomes: dict[str, Outcome] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        num_bytes = make_adapters(folder / "adapters", amounts.adapters)
        flags: dict[str, str | int] = {"adapters_dir": str(folder / "adapters")}
        hub = None
        if place == "hub":
            hub = stack.enter_context(running_hub(folder / "adapters"))
            flags = {"hub": "true", "hub_endpoint": hub.url, "new_adapters_per_minute": 10**6}
        flags |= {"adapter_bytes": int(1.02 * amounts.held * num_bytes), "adapter_host_bytes": 4 * num_bytes}
        port = stack.enter_context(running_ray(folder))
        for router in routers:
            with disks_of_their_own(folder / f"disks-{router}"), serving(flags, amounts.replicas, router):
                outcomes[router] = measure_router(port, hub, amounts)
            told = f"{PLACES[place]}, {ROUTERS[router]}: {outcomes[router]}"
            print(f"{told}; load of the machine {os.getloadavg()[0]:.1f}", flush=True)
    return [record for router in outcomes for record in describe(place, router, outcomes[router])] + [
        Record(f"{PLACES[place]}: requests/s of our router", outcomes["adapters"].per_s / outcomes[other].per_s,
               "x", ROUTERS[other], goal)
        for other, goal in (("random", 2.0), ("ray", None))
        if {"adapters", other} <= outcomes.keys()
    ]  # fmt: skip


def describe(place: str, router: str, outcome: Outcome) -> list[Record]:
    name = f"{PLACES[place]}, {ROUTERS[router]}"
    return [
        Record(f"{name}: hits", outcome.hits, "", "", 0.95 if router == "adapters" else None),
        Record(f"{name}: fetched", outcome.fetched, "", "", None),
        Record(f"{name}: time to first token", 1e3 * outcome.first_token_s, "ms", "", None),
        Record(f"{name}: P95 of it", 1e3 * outcome.late_token_s, "ms", "", None),
        Record(f"{name}: requests", outcome.per_s, "/s", "", None),
        Record(f"{name}: CPU of a request", 1e3 * outcome.cpu_s, "ms", "", None),
    ]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder whose name is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def disks_of_their_own(folder: Path) -> Iterator[None]:
    """Give each replica a disk of its own for what it fetches, as if it were on a machine of its own."""
    from lorax_server.scale import ray_app
    from lorax_server.scale.server_process import ServerOptions

    shared = ray_app.ServerReplica

    class OwnDisk(shared):  # type: ignore[misc, valid-type]
        async def __init__(self, options: ServerOptions, *arguments: Any) -> None:
            folder.mkdir(exist_ok=True)
            cache = f"--huggingface-hub-cache={tempfile.mkdtemp(dir=folder)}"
            await super().__init__(options._replace(flags=[*options.flags, cache]), *arguments)

    ray_app.ServerReplica = OwnDisk  # type: ignore[misc]
    try:
        yield
    finally:
        ray_app.ServerReplica = shared  # type: ignore[misc]
        shutil.rmtree(folder, ignore_errors=True)


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
    os.environ |= {"RAY_worker_niceness": "0"}  # as `lorax serve --replicas` has it
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


@contextmanager
def serving(flags: dict[str, str | int], replicas: int, router: str) -> Iterator[None]:
    """Run replicas that start anew."""
    from ray import serve

    from lorax_server.scale.ray_app import build

    own = {"device": "cpu", "replicas": replicas, "router": router, "host": "127.0.0.1", "log_level": "warning"}
    serve.run(build({**flags, **own}), name="lorax")
    try:
        yield
    finally:
        serve.delete("lorax")


def measure_router(port: int, hub: RunningHub | None, amounts: Amounts) -> Outcome:
    source = "local" if hub is None else "hub"
    warm_up, names = choose_names(amounts, 0 if hub else amounts.warm_up)
    if hub:
        hub.set_speed(Speed())
    ask_all(port, source, warm_up, amounts.clients)
    if hub:
        hub.set_speed(SLOW)
    begin, cpu_s = time.perf_counter(), count_cpu()
    asked = ask_all(port, source, names, amounts.clients)
    seconds, cpu_s = time.perf_counter() - begin, count_cpu() - cpu_s
    times = sorted(each.first_token_s for each in asked)
    return Outcome(
        sum(each.tier == "device" for each in asked) / len(asked),
        sum(each.tier == "fetched" for each in asked) / len(asked),
        statistics.median(times), times[int(0.95 * len(times))], len(asked) / seconds, cpu_s / len(asked),
    )  # fmt: skip


def count_cpu() -> float:
    """Count CPU seconds: of Ray, replicas and hub. Where other work shares the cores, they tell more than time."""
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(each.user + each.system for each in times)


def choose_names(amounts: Amounts, warm_up: int) -> tuple[list[str], list[str]]:
    """Choose adapters by Zipf's law, the same ones each time: those of the warm-up, which begins with all of them, and
    those that are measured."""
    chance = random.Random(0)
    names = [f"adapter-{index:03}" for index in range(amounts.adapters)]
    weights = [1 / rank for rank in range(1, len(names) + 1)]
    drawn = chance.choices(names, weights, k=warm_up + amounts.requests)
    return [*chance.sample(names, len(names)), *drawn[:warm_up]], drawn[warm_up:]


def ask_all(port: int, source: str, names: Sequence[str], clients: int) -> list[Asked]:
    """Ask for all, by so many clients at once, each on a connection of its own."""
    asked, numbers = list[Asked](), itertools.count()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        while (number := next(numbers)) < len(names):
            asked.append(ask(connection, source, names[number], number))
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == len(names), "a client has failed"
    return asked


def ask(connection: http.client.HTTPConnection, source: str, name: str, number: int) -> Asked:
    adapter = f"bench/{name}" if source == "hub" else name
    parameters = {"adapter_id": adapter, "adapter_source": source, "max_new_tokens": TOKENS}
    body = {"inputs": f"{number} kites, and", "parameters": parameters}
    begin = time.perf_counter()
    connection.request("POST", "/generate_stream", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read1()
    first_token_s = time.perf_counter() - begin
    tier = response.headers["x-adapter-tier"]
    response.read()
    return Asked(tier, first_token_s)


# --- Names that are given by API --------------------------------------------------------------------------------------


def measure_names(amounts: Amounts) -> list[Record]:
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        make_adapters(folder / "adapters", amounts.names)
        port = stack.enter_context(running_ray(folder))
        flags: dict[str, str | int] = {"adapters_dir": str(folder / "adapters"), "admin_key": ADMIN}
        stack.enter_context(serving(flags, amounts.replicas, "adapters"))
        ports = find_ports()
        assert len(ports) == amounts.replicas
        for each in ports:  # a replica's first answer takes longer than all others
            post(each, "/generate", {"inputs": "Kites, and", "parameters": {"max_new_tokens": 1}})
        times = [spread_name(port, ports, f"adapter-{index:03}", f"name-{index}") for index in range(amounts.names)]
    known_s, answered_s = (statistics.median(column) for column in zip(*times, strict=True))
    name = f"an adapter that is loaded by API, {amounts.replicas} replicas"
    return [
        Record(f"{name}: all know it, median", known_s, "s", "", 1.0, at_most=True),
        Record(f"{name}: all have answered, median", answered_s, "s", "", 1.0, at_most=True),
        Record(f"{name}: all have answered, longest", max(both[1] for both in times), "s", "", None),
    ]


def find_ports() -> list[int]:
    """Find the ports of all replicas."""
    import ray

    from lorax_server.scale.change_registry import find_registry

    members: dict[str, str] = ray.get(find_registry("lorax").members.remote())
    return [int(address.rpartition(":")[2]) for address in members.values()]


@cache
def find_secret() -> str:
    """Return the secret that replicas require."""
    from lorax_server.scale.change_registry import share_secret

    return share_secret("lorax")


def spread_name(port: int, ports: Sequence[int], adapter: str, name: str) -> tuple[float, float]:
    """Give an adapter a name. Return the seconds until the load is answered, which is when all replicas know the name,
    and until all have answered a request for it, at which all are asked at once."""
    begin = time.perf_counter()
    post(port, "/v1/adapters/load", {"adapter_id": adapter, "adapter_source": "local", "name": name})
    known_s = time.perf_counter() - begin
    body = {"inputs": "Kites, and", "parameters": {"adapter_id": name, "max_new_tokens": 1}}
    with ThreadPoolExecutor(len(ports)) as threads:
        list(threads.map(lambda each: post(each, "/generate", body), ports))
    return known_s, time.perf_counter() - begin


def post(port: int, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}", "x-lorax-secret": find_secret()}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    assert response.status == 200, content


if __name__ == "__main__":
    main()
