"""Measure `LLM.update_adapter` while eight sequences with this adapter decode.

The latency is the time from the call to the result of the first step that uses the new weights. Unfinished requests
move to the new weights. The largest gap between two steps during an update is compared with the median step.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from harness.engine import Bench, StepClock, make_files, make_parser, plain_adapters
from harness.files import LLAMA_8B, TINY, ModelShape, scratch_folder
from harness.report import Record, percentile, report
from safetensors.torch import load_file

from lorax_server.llm import LLM

SHAPE_135M = ModelShape(49152, 576, 1536, 30, 9, 3, 64, 2048)
ADAPTER = "adapter-000"
NUM_UPDATES = 10
STEPS_BETWEEN = 5
GOAL_MS, GOAL_STEPS = 20, 1.3  # for the 8B model on an H200
NUM_TOKENS = 400  # per sequence; the updates stop early if all sequences have finished
Tensors = Mapping[str, torch.Tensor]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--large", action="store_true", help="8B model, for a GPU (default: 135M)")
    parser.add_argument("--sequences", type=int, default=8, help="decoding sequences (default: 8)")
    parser.add_argument("--on-gpu", action="store_true", help="pass tensors on the GPU (default: on the CPU)")
    args = parser.parse_args()
    shape = TINY if args.tiny else LLAMA_8B if args.large else SHAPE_135M
    with scratch_folder() as scratch:
        folder = args.folder or scratch
        make_files(folder, shape, plain_adapters(2))
        paths = [folder / "adapters" / one.name / "adapter_model.safetensors" for one in plain_adapters(2)]
        weights = [load_file(path, device="cuda" if args.on_gpu else "cpu") for path in paths]
        with LLM(folder / "model", folder / "adapters", max_num_seqs=max(8, args.sequences)) as llm:
            records = measure(Bench(llm, StepClock(llm), shape, folder), weights, args)
    report(records, args.json)


def measure(bench: Bench, weights: Sequence[Tensors], args: argparse.Namespace) -> list[Record]:
    llm, marks = bench.llm, bench.clock.marks
    prompts = bench.draw_prompts(args.sequences, 16, seed=0)
    bench.generate(prompts, 4, [ADAPTER] * len(prompts))
    latencies, calls, gaps = list[float](), list[float](), list[float]()
    num_in_flight = llm._engine.capabilities.max_steps_in_flight
    with ThreadPoolExecutor(1) as threads, record_switches(bench) as switches:
        running = threads.submit(bench.generate, prompts, NUM_TOKENS, [ADAPTER] * len(prompts))
        wait_for_steps(bench, 20 + len(prompts), running)
        steady = [after.at - before.at for before, after in zip(marks[-11:-1], marks[-10:], strict=True)]
        for number in range(NUM_UPDATES):
            if running.done():
                break
            first, started = len(marks) - 1, time.perf_counter()
            llm.update_adapter(ADAPTER, weights[number % 2], running="move")
            call = time.perf_counter() - started
            # The first step after the switch uses the new weights. It finishes after the steps that are in flight.
            visible = switches[-1] + num_in_flight - 1
            wait_for_steps(bench, visible + 1 - len(marks), running)
            if len(marks) <= visible:  # the completions are finished
                break
            during = [mark.at for mark in marks[first : visible + 1]]
            latencies.append(during[-1] - started)
            calls.append(call)
            gaps.append(max(after - before for before, after in pairwise(during)))
            wait_for_steps(bench, STEPS_BETWEEN, running)
    step = statistics.median(steady)
    goal_ms, goal_steps = (GOAL_MS, GOAL_STEPS) if args.large else (None, None)
    return [
        Record("update visible, median", 1000 * statistics.median(latencies), "ms", goal=goal_ms, at_most=True),
        Record("update visible, slowest", 1000 * max(latencies), "ms"),
        Record("update call, median", 1000 * statistics.median(calls), "ms"),
        Record("median step", 1000 * step, "ms"),
        Record("median of the largest gaps, in steps", percentile(gaps, 0.5) / step, "x"),
        Record("largest gap, in steps", max(gaps) / step, "x", goal=goal_steps, at_most=True),
    ]


@contextmanager
def record_switches(bench: Bench) -> Iterator[list[int]]:
    """Yield a list to which each switch to new weights appends the number of steps so far."""
    switches, switch = list[int](), bench.llm._switch

    def record(*args: Any) -> None:
        switch(*args)
        switches.append(len(bench.clock.marks))

    bench.llm._switch = record  # type: ignore[assignment, method-assign]
    yield switches
    del bench.llm._switch


def wait_for_steps(bench: Bench, count: int, running: "Future[list[list[int]]]") -> None:
    """Wait until the engine has run `count` more steps, or until all completions are finished."""
    target = len(bench.clock.marks) + count
    while len(bench.clock.marks) < target and not running.done():
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
