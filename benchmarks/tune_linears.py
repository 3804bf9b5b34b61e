"""Make the table of settings of Hopper's linears: measure the shapes of models that people serve, and keep the best.

Run it on the GPU that the table is for: `python benchmarks/tune_linears.py`. It changes
`lorax_server/kernels/hopper/settings.json`, where the shapes of other GPUs stay. The peer is the guess that shapes
without an entry get.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_timing import capture, measure
from report import Record, report

import lorax_server.kernels.hopper as package
from lorax_server.kernels.hopper.driver import Kernels
from lorax_server.kernels.hopper.linear import FusedLinear
from lorax_server.kernels.hopper.settings import LONG_STAGES, SHORT_STAGES, TABLE, LinearSetting, guess_setting
from lorax_server.kernels.hopper.sources import HEIGHTS, LinearVariant
from lorax_server.kernels.ops import Field, LinearWeights, LoraBatch, LoraTarget

RANK = 16
CLUSTERS = (1, 2)
BYTES = 400e6  # of weights in one graph: more than stay in L2


class Model(NamedTuple):
    hidden: int
    queries: int
    keys: int
    inner: int
    parallel: tuple[int, ...]  # numbers of ranks


MODELS = {
    "70B": Model(8192, 8192, 1024, 28672, (1, 2, 4, 8)),
    "Qwen 7B": Model(3584, 3584, 512, 18944, (1,)),
    "1B": Model(2048, 2048, 512, 8192, (1,)),
    "3B": Model(3072, 3072, 1024, 8192, (1,)),
    "Qwen 14B": Model(5120, 5120, 1024, 13824, (1,)),
    "8B": Model(4096, 4096, 1024, 14336, (1, 2, 4)),
    "Qwen 32B": Model(5120, 5120, 1024, 27648, (2, 4)),
}


class Shape(NamedTuple):
    inputs: int
    widths: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return sum(self.widths)


def shapes(model: Model) -> Iterator[Shape]:
    for ranks in model.parallel:
        queries, keys, inner = model.queries // ranks, max(model.keys // ranks, 128), model.inner // ranks
        yield Shape(model.hidden, (queries, keys, keys))
        yield Shape(queries, (model.hidden,))
        yield Shape(model.hidden, (inner, inner))
        yield Shape(inner, (model.hidden,))


class Bench:
    """Some matrices of one shape, and adapters for them."""

    def __init__(self, fused: FusedLinear, shape: Shape, buffer: torch.Tensor) -> None:
        self.fused, self.shape, self.buffer = fused, shape, buffer
        count = max(2, int(BYTES / (2 * shape.inputs * shape.outputs)))
        self.weights = [
            LinearWeights(
                torch.empty(shape.outputs, shape.inputs, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            )
            for _ in range(count)
        ]
        stops = list(itertools.accumulate(shape.widths))
        columns = [slice(stop - width, stop) for stop, width in zip(stops, shape.widths, strict=True)]
        slices = len(columns)
        self.targets = [[LoraTarget(i * slices + s, c) for s, c in enumerate(columns)] for i in range(count)]

    def batch(self, rows: int) -> LoraBatch:
        """Give each row an adapter of its own, up to 64."""
        adapters, targets = min(rows, 64), len(self.weights) * len(self.shape.widths)
        sizes = torch.tensor([(self.shape.inputs * RANK, width * RANK) for width in self.shape.widths])
        sizes = sizes.repeat(len(self.weights), 1).expand(adapters + 1, targets, 2)
        starts = (sizes.flatten().cumsum(0).view_as(sizes) - sizes) % (self.buffer.numel() - 2**22) // 128 * 128
        table = torch.full((adapters + 1, targets, len(Field)), -1, dtype=torch.int64)
        table[..., [Field.A, Field.B]], table[..., Field.RANK :], table[..., Field.RANK] = starts, 0, RANK
        indices = torch.tensor([1 + row * adapters // rows for row in range(rows)], dtype=torch.int32, device="cuda")
        scales = torch.ones(adapters + 1, targets, device="cuda")
        return LoraBatch(self.buffer, table.cuda(), scales, scales, indices, table, [], [])

    def time(self, rows: int, setting: LinearSetting, lora: LoraBatch | None) -> float:
        x = torch.randn(rows, self.shape.inputs, device="cuda", dtype=torch.bfloat16)

        def run() -> None:
            for weights, targets in zip(self.weights, self.targets, strict=True):
                self.fused.linear(x, weights, lora, targets, setting)

        return measure(capture(run), count=7, warm=2) / len(self.weights)


def candidates(tiles: int, height: int, num_sms: int) -> Iterator[tuple[int, int]]:
    """Yield stages and clusters."""
    for stages in sorted({LONG_STAGES[height], SHORT_STAGES[height]}):
        for cluster in CLUSTERS:
            if cluster == 1 or tiles * cluster <= 2 * num_sms:
                yield stages, cluster


def all_variants() -> list[LinearVariant]:
    return [
        LinearVariant(torch.bfloat16, height, stages, cluster, lora)
        for height in HEIGHTS
        for stages, cluster in candidates(1, height, 1)
        for lora in (False, True)
    ]


def tune(bench: Bench, height: int, num_sms: int) -> tuple[LinearSetting, float]:
    """Return the best setting, and its time with adapters."""
    tiles = -(-bench.shape.outputs // 128)
    plain = {
        (stages, cluster, early): bench.time(height, LinearSetting(stages, cluster, 0, 0, early), None)
        for stages, cluster in candidates(tiles, height, num_sms)
        for early in (2, 3)
    }
    best = sorted(plain, key=lambda key: plain[key])
    lora, with_lora = bench.batch(height), {}
    for stages, cluster in list(dict.fromkeys(key[:2] for key in best))[:2]:
        for blocks in sorted({max(24, num_sms - tiles * cluster), num_sms // 2, num_sms * 3 // 4, num_sms}):
            for early in (1, 3):
                setting = LinearSetting(stages, cluster, blocks // cluster * cluster, early, 0)
                with_lora[setting] = bench.time(height, setting, lora)
    chosen = min(with_lora, key=lambda setting: with_lora[setting])
    early = min((2, 3), key=lambda early: plain[chosen.stages, chosen.cluster, early])
    return chosen._replace(early=early), with_lora[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--table", type=Path, default=Path(package.__path__[0]) / TABLE, help="the table to change")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels = Kernels(torch.device("cuda", 0))
    fused = FusedLinear(kernels, torch.bfloat16)
    kernels.compile(all_variants())
    buffer = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    table = json.loads(args.table.read_text())
    entries, ratios = table.setdefault(str(fused.num_sms), {}), []
    for shape in dict.fromkeys(shape for name in args.models for shape in shapes(MODELS[name])):
        bench = Bench(fused, shape, buffer)
        for height in HEIGHTS:
            setting, with_lora = tune(bench, height, fused.num_sms)
            guess = guess_setting(shape.outputs, height, fused.num_sms)
            guessed = bench.time(height, guess, bench.batch(height))
            entries[f"{shape.inputs} {shape.outputs} {height}"] = list(setting)
            ratios.append(with_lora / guessed)
            print(f"{shape} {height}: {setting} {1000 * with_lora:.1f} us, guess {1000 * guessed:.1f} us", flush=True)
        rows = ",\n".join(f'    "{key}": {json.dumps(value)}' for key, value in entries.items())
        others = {gpu: values for gpu, values in table.items() if gpu != str(fused.num_sms)}
        assert not others, "one GPU so far: write the others too"
        args.table.write_text(f'{{\n  "{fused.num_sms}": {{\n{rows}\n  }}\n}}\n')
    report(
        [Record("time with adapters, median over shapes", statistics.median(ratios), "x", "guess", 1.0, at_most=True)],
        args.json,
    )


if __name__ == "__main__":
    main()
