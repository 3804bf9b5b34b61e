"""Measure `LLM.update_adapter` while eight sequences with this adapter decode.

The latency is the time from the call to the end of the first step that uses the new weights. Unfinished requests move
to the new weights. The largest gap between two steps during an update is compared with the median step.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

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
NUM_TOKENS = 400  # per sequence; the updates stop early if all sequences have finished
Tensors = Mapping[str, torch.Tensor]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--large", action="store_true", help="8B model, for a GPU (default: 135M)")
    parser.add_argument("--sequences", type=int, default=8, help="decoding sequences (default: 8)")
    args = parser.parse_args()
    shape = TINY if args.tiny else LLAMA_8B if args.large else SHAPE_135M
    with scratch_folder() as scratch:
        folder = args.folder or scratch
        make_files(folder, shape, plain_adapters(2))
        weights = [load_file(folder / "adapters" / one.name / "adapter_model.safetensors") for one in plain_adapters(2)]
        with LLM(folder / "model", folder / "adapters", max_num_seqs=max(8, args.sequences)) as llm:
            records = measure(Bench(llm, StepClock(llm), shape, folder), weights, args)
    report(records, args.json)


def measure(bench: Bench, weights: list[Tensors], args: argparse.Namespace) -> list[Record]:
    llm, marks = bench.llm, bench.clock.marks
    prompts = bench.draw_prompts(args.sequences, 16, seed=0)
    bench.generate(prompts, 4, [ADAPTER] * len(prompts))
    latencies, gaps = list[float](), list[float]()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(bench.generate, prompts, NUM_TOKENS, [ADAPTER] * len(prompts))
        wait_for_steps(bench, 20 + len(prompts), running)
        steady = [after.at - before.at for before, after in zip(marks[-11:-1], marks[-10:], strict=True)]
        for number in range(NUM_UPDATES):
            if running.done():
                break
            first, started = len(marks) - 1, time.perf_counter()
            llm.update_adapter(ADAPTER, weights[number % 2], running="move")
            done = time.perf_counter()
            wait_for_steps(bench, 1, running)
            if marks[-1].at <= done:  # the completions are finished
                break
            visible = next(mark.at for mark in marks[first:] if mark.at > done)
            during = [mark.at for mark in marks[first:] if mark.at <= visible]
            latencies.append(visible - started)
            gaps.append(max(after - before for before, after in pairwise(during)))
            wait_for_steps(bench, STEPS_BETWEEN, running)
    step = statistics.median(steady)
    return [
        Record("update visible, median", 1000 * statistics.median(latencies), "ms"),
        Record("update visible, slowest", 1000 * max(latencies), "ms"),
        Record("median step", 1000 * step, "ms"),
        Record("median of the largest gaps, in steps", percentile(gaps, 0.5) / step, "x"),
        Record("largest gap, in steps", max(gaps) / step, "x"),
    ]


def wait_for_steps(bench: Bench, count: int, running: "Future[list[list[int]]]") -> None:
    """Wait until the engine has run `count` more steps, or until all completions are finished."""
    target = len(bench.clock.marks) + count
    while len(bench.clock.marks) < target and not running.done():
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
