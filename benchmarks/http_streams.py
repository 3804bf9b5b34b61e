"""The speed of the API process by itself: streams over real sockets, in front of an engine that computes nothing.

The engine gives every stream a token in each step, at a fixed pace (`stand_in_server.py`). A load generator in another
process reads the streams (`http_client.py`). Two paces are measured: one at which the API process keeps up, for its
CPU time for each token; and as fast as the engine can, for the tokens per second that one core of the API process
takes. (Tokens of a stream that wait together are written together then.)
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from gpu_model import TINY, make_model
from http_client import EVENTS
from report import Record, report
from server_log import wait_for_url

ROOT = Path(__file__).parent.parent
RUN_S, END_S = 600, 30
PROMPT = "the quick brown fox jumps over " * 4
US = "us for each token"


@dataclass(frozen=True)
class Served:
    """What the load generator and the server saw."""

    result: dict[str, Any]
    api_cpu_s: float
    seen: dict[str, Any]
    sends: dict[str, float]

    @property
    def tokens(self) -> int:
        return sum(sample["tokens"] for sample in self.result["samples"])

    @property
    def gaps(self) -> list[float]:
        """The seconds between events of a stream; events that came together have none between them."""
        gaps = []
        for sample in self.result["samples"]:
            arrivals = sample["arrivals"]
            for (before, _), (at, count) in pairwise(arrivals):
                gaps += [at - before] + [0.0] * (count - 1)
        return gaps


def main() -> None:
    args = parse_args()
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", TINY)
        for count in args.streams:
            for path in args.paths:
                paced = measure(folder, path, count, args.tokens, count * args.pace_us / 1e3)
                full = measure(folder, path, count, args.tokens, 0.0)
                records += describe(f"{path}, {count} streams", paced, full)
                if args.lines:
                    print_lines(paced)
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], metavar="N", help="how many at once")
    parser.add_argument("--paths", nargs="+", choices=EVENTS, default=list(EVENTS), help="the routes")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each stream")
    parser.add_argument("--pace-us", type=float, default=150.0, metavar="US", help="of a step, for each stream")
    parser.add_argument("--lines", action="store_true", help="print where the API process spends its time")
    return parser.parse_args()


def measure(folder: Path, path: str, streams: int, tokens: int, step_ms: float) -> Served:
    bodies, result, seen = folder / "bodies.json", folder / "result.json", folder / "seen.json"
    bodies.write_text(json.dumps([make_body(path, number, tokens) for number in range(streams)]))
    with serving(folder / "model", step_ms, seen) as (url, process):
        before = process.cpu_times()
        command = [sys.executable, Path(__file__).with_name("http_client.py"), url, bodies, "--path", path]
        command += ["--at-once", str(streams), "--json", result]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_S)
        after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    sends = json.loads(Path(f"{seen}.engine").read_text())
    served = Served(json.loads(result.read_text()), cpu_s, json.loads(seen.read_text()), sends)
    assert served.tokens == streams * tokens, next(filter(None, [each["error"] for each in served.result["samples"]]))
    return served


def make_body(path: str, number: int, tokens: int) -> dict[str, Any]:
    adapter = f"adapter-{number % 64:03}"
    if path == "/generate_stream":
        return {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "adapter_id": adapter}}
    common = {"model": "", "adapter_id": adapter, "adapter_source": "local", "max_tokens": tokens, "stream": True}
    if path == "/v1/completions":
        return {"prompt": PROMPT, **common}
    return {"messages": [{"role": "user", "content": PROMPT}], **common}


def describe(name: str, paced: Served, full: Served) -> list[Record]:
    cpu_us, gaps = paced.api_cpu_s / paced.tokens * 1e6, paced.gaps
    num_samples = sum(paced.seen["parts"].values())
    most = max(paced.sends, key=int)
    return [
        Record(f"{name}: CPU of the API process", cpu_us, US, "", None),
        *[
            Record(f"{name}:   {part}", cpu_us * count / num_samples, US, "", None)
            for part, count in sorted(paced.seen["parts"].items(), key=lambda each: -each[1])
        ],
        Record(f"{name}: P50 between tokens", percentile(gaps, 0.5) * 1e3, "ms", "", None),
        Record(f"{name}: P99 between tokens", percentile(gaps, 0.99) * 1e3, "ms", "", None),
        Record(f"{name}: sending {most} outputs, engine", paced.sends[most] * 1e3, "ms", "", 0.5, at_most=True),
        Record(f"{name}: tokens at full speed", full.tokens / full.result["seconds"], "1/s", "", None),
        Record(f"{name}: CPU at full speed", full.api_cpu_s / full.tokens * 1e6, US, "", None),
    ]


def print_lines(served: Served) -> None:
    for line, count in served.seen["lines"]:
        print(f"{count:6} {line}")


@contextmanager
def serving(model: Path, step_ms: float, seen: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run the stand-in; return its address and its API process."""
    log = seen.with_suffix(".log")
    command: Sequence[str] = [str(Path(__file__).with_name("stand_in_server.py")), str(model), str(step_ms), str(seen)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with (
        log.open("w") as file,
        subprocess.Popen([sys.executable, *command], stderr=file, cwd=ROOT, env=environment) as process,
    ):
        try:
            yield wait_for_url(process, log), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(END_S)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that so many are not above; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


if __name__ == "__main__":
    main()
