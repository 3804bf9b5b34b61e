"""The start of a server on a GPU: seconds from its command to its first token, and of its engine, phase by phase.

The model has random weights of the 8B shape, in files that are in memory. The first start finds no compiled kernels and
no kept config; of the others the median counts. `--profile` shows where an engine's start spends its time.
"""

import argparse
import cProfile
import os
import pstats
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx2
from gpu_model import LLAMA_8B, TINY, make_model
from gpu_serving import PATH, Setup, serving
from report import Record, report

from lorax_server.llm import LLM

FIRST_GOAL_S, GOAL_S = 60.0, 15.0
PHASES = re.compile(r"started in .*? s: (.*)")
SHOWN = 45  # functions of a profile


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "adapters").mkdir()
        make_model(folder / "model", TINY if args.tiny else LLAMA_8B)
        os.environ["LORAX_CACHE"] = str(folder / "kept")
        rows = 8 if args.tiny else 256
        setup = Setup(folder, "cpu" if args.tiny else "cuda", args.tiny, (rows,), 0, 0, (0, 0), 1)
        first, *others = [measure(setup, args.log) for _ in range(1 + args.starts)]
        records = [Record("the first start ever", first, "s", "", FIRST_GOAL_S, at_most=True)]
        if others:
            records.append(Record("a start", statistics.median(others), "s", "", GOAL_S, at_most=True))
        if args.profile:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                process.submit(profile, setup).result()
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: only crashes can be found by it")
    parser.add_argument("--starts", type=int, default=3, metavar="N", help="after the first (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="of one more start, of an engine in a script")
    parser.add_argument("--log", action="store_true", help="show what each server logged, and when")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="for the files; /dev/shm is memory")
    return parser.parse_args()


def measure(setup: Setup, show_log: bool) -> float:
    """Start a server, ask it for a token, and return the seconds that both took."""
    began = time.monotonic()
    with serving(setup) as (url, _):
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        httpx2.post(f"{url}{PATH}", json=body, timeout=60).raise_for_status()
        seconds = time.monotonic() - began
        phases = PHASES.findall((setup.folder / "log").read_text())
        print(f"the first token after {seconds:.1f} s; engine: {phases}", flush=True)
        if show_log:
            print((setup.folder / "log").read_text(), flush=True)
    return seconds


def profile(setup: Setup) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    with LLM(setup.folder / "model", device=setup.device, **setup.settings) as llm:
        profiler.disable()
        print(f"an engine in a script: {llm.start_seconds}")
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(SHOWN)


if __name__ == "__main__":
    main()
