"""Several API processes in front of one engine: the tokens per second that they carry, against one of them.

The engine computes nothing, and emits tokens at a fixed rate for all streams together (`stand_in_server.py`). Load
generators, as many as there are API processes, read the streams (`http_client.py`) and keep all tokens, which must be
those that the engine sent, in their order. API processes and load generators need a core each, and the engine and the
parent one more: for four of them take a machine with at least ten cores.

There are two rates. At 40,000 tokens/s the time between tokens counts, and the goal of three times the tokens of one
API process where one carries less than a third of them; where it carries more, nobody can. A rate of 0 lets the engine
go as fast as it can, and has that goal in any case; a stream's tokens then come many at once, and the time between them
says nothing. Nothing is fetched from anywhere. On 16 cores all of it takes about four minutes.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from gpu_model import TINY, make_model
from http_streams import END_S, ROOT, RUN_S, make_body, percentile
from report import Record, report
from server_log import wait_for_url

PATH = "/generate_stream"  # its events have the ids of tokens
GOALS = {4: 3.0}  # times the tokens/s of one API process
US = "us for each token"


@dataclass(frozen=True)
class Load:
    """A crowd of streams, and the engine's rate."""

    streams: int
    tokens: int
    rate: float


@dataclass(frozen=True)
class Carried:
    """The streams as the load generators saw them, and the CPU time that all API processes took."""

    samples: list[dict[str, Any]]
    seconds: float
    api_cpu_s: float

    @property
    def tokens(self) -> int:
        return sum(sample["tokens"] for sample in self.samples)

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def p99_ms(self) -> float:
        """The seconds between events of a stream; events that came together have none between them."""
        gaps = []
        for sample in self.samples:
            for (before, _), (at, count) in pairwise(sample["arrivals"]):
                gaps += [at - before] + [0.0] * (count - 1)
        return percentile(gaps, 0.99) * 1e3

    def count_wrong(self, tokens: int) -> int:
        """Count the streams that have lost a token, or have them in another order than the engine sent."""
        from stand_in_server import make_tokens

        made = make_tokens()
        expected = [made[left % len(made)].token_id for left in reversed(range(tokens))]
        return sum(sample["token_ids"] != expected for sample in self.samples)


def main() -> None:
    args = parse_args()
    records = [Record("cores", len(os.sched_getaffinity(0)), "", "", None)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", TINY)
        for rate, streams in itertools.product(args.rate, args.streams):
            load = Load(streams, args.tokens, rate)
            best = {workers: take_best(folder, workers, load, args.repeat) for workers in (1, *args.workers)}
            for workers, carried in best.items():
                limit = f"{rate:,.0f} tokens/s" if rate else "no limit"
                label = f"{streams} streams, {limit}, {workers} API processes"
                records += describe(label, workers, carried, best[1], load)
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--workers", type=int, nargs="+", default=[4], metavar="N", help="API processes, besides one")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000], metavar="N", help="how many at once")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="of each stream")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[40_000, 0], metavar="N", help="tokens/s of the engine; 0: no limit"
    )
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="runs, of which the fastest counts")
    return parser.parse_args()


def take_best(folder: Path, workers: int, load: Load, repeat: int) -> Carried:
    return max((measure(folder, workers, load) for _ in range(repeat)), key=lambda carried: carried.per_s)


def measure(folder: Path, workers: int, load: Load) -> Carried:
    with serving(folder / "model", workers, load.rate, folder / "seen.json") as (url, parent):
        before = cpu_s(parent, workers)
        results = run_clients(folder, url, workers, load)
        used_s = cpu_s(parent, workers) - before
    samples = [sample for result in results for sample in result["samples"]]
    failed = [sample["error"] for sample in samples if sample["error"]]
    assert not failed, failed[0]
    begin = min(result["start"] for result in results)
    end = max(result["start"] + result["seconds"] for result in results)
    return Carried(samples, end - begin, used_s)


def run_clients(folder: Path, url: str, count: int, load: Load) -> list[dict[str, Any]]:
    """Run load generators at the same time, each with its part of the streams."""
    running = []
    for index in range(count):
        bodies, result = folder / f"bodies-{index}.json", folder / f"result-{index}.json"
        part = [make_body(PATH, number, load.tokens) for number in range(index, load.streams, count)]
        bodies.write_text(json.dumps(part))
        command = [sys.executable, str(Path(__file__).with_name("http_client.py")), url, str(bodies), "--token-ids"]
        command += ["--path", PATH, "--at-once", str(len(part)), "--json", str(result)]
        running.append((subprocess.Popen(command, stdout=subprocess.DEVNULL), result))
    for process, _ in running:
        assert process.wait(RUN_S) == 0
    return [json.loads(result.read_text()) for _, result in running]


def describe(name: str, workers: int, carried: Carried, one: Carried, load: Load) -> list[Record]:
    records = [
        Record(f"{name}: tokens", carried.per_s, "1/s", "", None),
        Record(f"{name}: CPU of all API processes", carried.api_cpu_s / carried.tokens * 1e6, US, "", None),
        Record(f"{name}: streams not as sent", carried.count_wrong(load.tokens), "", "", 0, at_most=True),
    ]
    if workers == 1:
        return [*records, Record(f"{name}: P99 between tokens", carried.p99_ms, "ms", "", None)]
    peer = "one API process"
    most_ms = one.p99_ms if load.rate else None
    goal = GOALS.get(workers)
    is_possible = goal is not None and (not load.rate or goal * one.per_s <= load.rate)
    return [
        *records,
        Record(f"{name}: P99 between tokens", carried.p99_ms, "ms", peer, most_ms, at_most=True),
        Record(f"{name}: tokens against one", carried.per_s / one.per_s, "x", peer, goal if is_possible else None),
    ]


def cpu_s(parent: psutil.Process, workers: int) -> float:
    """Return the CPU time of all API processes: of those that have a process for templates, the engine has none."""
    ours = [parent] if workers == 1 else [child for child in parent.children() if child.children()]
    assert len(ours) == workers, f"there are {len(ours)} API processes"
    return sum(times.user + times.system for times in (process.cpu_times() for process in ours))


@contextmanager
def serving(model: Path, workers: int, rate: float, seen: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run the stand-in; return its address and its first process."""
    log = seen.with_suffix(".log")
    script = str(Path(__file__).with_name("stand_in_server.py"))
    command = [sys.executable, script, str(model), "0", str(seen), str(workers), str(rate)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as file, subprocess.Popen(command, stderr=file, cwd=ROOT, env=environment) as process:
        try:
            yield wait_for_url(process, log), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(END_S)


if __name__ == "__main__":
    main()
