"""The waits of other clients while long prompts arrive: of a running stream, and of `/health`.

    python benchmarks/long_prompts.py [--json FILE] [--rounds N] [--quick]

A server with the bundled model streams one answer after the other to a client. While nothing else happens, and while
each kind of long request arrives, the longest time between two events of a stream is measured, and the slowest
`/health`. Each round does all of it; a machine with other work to do shows it in the medians, so the best round is
told as well, and the load of all other processes of the machine. The peer of every figure is
the same one of the same rounds while no long request is there.

The loads are sent by threads that hold nothing: bodies are made beforehand, and sockets wait without Python's lock.
"""

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from report import Record, report
from soak import Server, serving

GOAL_MS = 100.0
GOAL_MB = 64.0
IDLE_S = 3.0
BETWEEN_S = 0.02  # probes of health
SETTLE_S = 1.0
REFUSED, TAKEN = (400, 422), (200,)
STREAM = {"inputs": "Tell me a story.", "parameters": {"max_new_tokens": 400, "ignore_eos_token": True}}


@dataclass(frozen=True)
class Load:
    """Requests of one kind that are sent at once."""

    name: str
    path: str
    body: bytes
    count: int
    statuses: tuple[int, ...]


@dataclass
class Seen:
    """The waits of others in each round, in milliseconds."""

    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


class Watch:
    """A client that reads streams and one that asks for health, each on a thread, until it is closed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._gaps: list[float] = []
        self._health: list[float] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._read_streams, self._ask_health)]
        for thread in self._threads:
            thread.start()

    def during(self, work: Callable[[], object]) -> tuple[float, float]:
        """Return the longest gap and the slowest health while `work` goes on, in milliseconds."""
        self._gaps, self._health = [], []
        work()
        time.sleep(2 * BETWEEN_S)
        gaps, health = self._gaps, self._health
        if not gaps or not health:
            raise SystemExit("the load was over before anything could be measured")
        return 1000 * max(gaps), 1000 * max(health)

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _read_streams(self) -> None:
        while not self._is_over.is_set():
            with connected(self._server) as connection:
                post(connection, "/generate_stream", json.dumps(STREAM).encode())
                response, last = connection.getresponse(), None
                while not self._is_over.is_set() and (line := response.readline()):
                    if line.startswith(b"data:"):
                        now = time.perf_counter()
                        if last is not None:
                            self._gaps.append(now - last)
                        last = now

    def _ask_health(self) -> None:
        with connected(self._server) as connection:
            while not self._is_over.wait(BETWEEN_S):
                began = time.perf_counter()
                connection.request("GET", "/health")
                connection.getresponse().read()
                self._health.append(time.perf_counter() - began)


class Others:
    """The share of the machine that processes other than the server and this script use."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._began, self._ours, self._all = time.monotonic(), self._own_s(), busy_s()

    def percent(self) -> float:
        seconds = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        others = busy_s() - self._all - (self._own_s() - self._ours)
        return max(0.0, 100 * others / seconds)

    def _own_s(self) -> float:
        times = [process.cpu_times() for process in (psutil.Process(), *self._server.processes())]
        return sum(each.user + each.system for each in times)


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as name, serving(Path(name, "log"), []) as server:
        records = measure(server, make_loads(args.quick), 1 if args.quick else args.rounds)
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often all is measured (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, with prompts a tenth as long")
    return parser.parse_args()


def make_loads(is_quick: bool) -> list[Load]:
    part = 10 if is_quick else 1
    text, cut = "word " * (380_000 // part), {"truncate": 1, "max_new_tokens": 1}
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 25} for i in range(4096 // part)]
    return [
        make_load("8 prompts of 1.9 MB", "/generate", {"inputs": text}, 8, REFUSED),
        make_load("8 of them, cut to fit", "/generate", {"inputs": text, "parameters": cut}, 8, TAKEN),
        make_load("4 x /tokenize of 260,000", "/tokenize", {"inputs": text[: 260_000 // part]}, 4, TAKEN),
        make_load("4 chats of 4,096", "/v1/chat/completions", {"model": "", "messages": messages}, 4, REFUSED),
    ]


def make_load(name: str, path: str, body: dict[str, Any], count: int, statuses: tuple[int, ...]) -> Load:
    return Load(name, path, json.dumps(body).encode(), count, statuses)


def measure(server: Server, loads: Sequence[Load], rounds: int) -> list[Record]:
    idle, seen = Seen(), {load.name: Seen() for load in loads}
    watch, others = Watch(server), Others(server)
    try:
        time.sleep(SETTLE_S)
        before = resident_mb(server)
        for _ in range(rounds):
            note(idle, watch, lambda: time.sleep(IDLE_S))
            for load in loads:
                note(seen[load.name], watch, lambda load=load: send_all(server, load))
        time.sleep(SETTLE_S)
        after, peak, percent = resident_mb(server), peak_mb(server), others.percent()
    finally:
        watch.close()
    records = [record for name, each in {"idle": idle, **seen}.items() for record in judge(name, each, idle)]
    return [
        *records,
        Record("API process, resident before", before, "MB", "", None),
        Record("API process, at most", peak, "MB", "", None),
        Record("API process, kept afterwards", after - before, "MB", "", GOAL_MB, at_most=True),
        Record("machine, busy with other work", percent, "%", "", None),
    ]


def note(seen: Seen, watch: Watch, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    gap, health = watch.during(work)
    seen.load_s.append(time.perf_counter() - began)
    seen.gaps.append(gap)
    seen.health.append(health)


def judge(name: str, seen: Seen, idle: Seen) -> Iterator[Record]:
    is_idle = seen is idle
    kinds = (("longest gap in a stream", seen.gaps, idle.gaps), ("slowest /health", seen.health, idle.health))
    for what, found, without in kinds:
        for which, choose in (("best", min), ("median", statistics.median)):
            peer = "" if is_idle else f"{choose(without):.0f} ms without"
            yield Record(
                f"{name}: {what}, {which}", choose(found), "ms", peer, None if is_idle else GOAL_MS, at_most=True
            )
    if not is_idle:
        yield Record(f"{name}: until all are answered, median", statistics.median(seen.load_s), "s", "", None)


# --- Requests ---------------------------------------------------------------------------------------------------------


def send_all(server: Server, load: Load) -> None:
    """Send all requests at once, and wait for their answers."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(send(server, load))) for _ in range(load.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(statuses) != load.count or not set(statuses) <= set(load.statuses):
        raise SystemExit(f"{load.name}: the answers had the statuses {sorted(statuses)}, not {load.statuses}")


def send(server: Server, load: Load) -> int:
    with connected(server) as connection:
        post(connection, load.path, load.body)
        response = connection.getresponse()
        while response.read(2**16):
            pass
        return response.status


@contextmanager
def connected(server: Server) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.host or "", server.port)
    try:
        yield connection
    finally:
        connection.close()


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body, {"content-type": "application/json"})


# --- Processes --------------------------------------------------------------------------------------------------------


def resident_mb(server: Server) -> float:
    return server.usage()["API"].rss / 1e6


def peak_mb(server: Server) -> float:
    """Return the API process's peak memory, as Linux counts it."""
    lines = Path(f"/proc/{server.processes()[0].pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), 0.0)


def busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


if __name__ == "__main__":
    main()
