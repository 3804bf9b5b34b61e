"""The linears of a Llama-3.1-8B on a GPU, with and without adapters: our kernels against cuBLAS and against the bytes.

Decode: all linears of 32 layers, with a norm and a gate between them, as one CUDA graph; a copy stands for attention.
The peer is the same chain with cuBLAS and without adapters, in the same run. Goals are the figures of the study that
our kernels follow, 5 % more at most. The floor is the time to read all weights and factors at 4.1 TB/s.

Prefill: a few layers, times 8; the goal is the share that adapters add to the same chain without them.
"""

import argparse
import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_timing import BYTES_PER_MS, capture, measure, measure_in_turns
from report import Record, report

from lorax_server.kernels import Activation, Field, LinearWeights, LoraBatch, LoraTarget, Ops, select_ops
from lorax_server.kernels.triton.gate import gate
from lorax_server.kernels.triton.ops import TritonOps

HIDDEN, INNER, KV, LAYERS = 4096, 14336, 1024, 32
LINEARS = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
WIDTHS = [(inputs, width) for inputs, widths in LINEARS.values() for width in widths]  # of a layer's targets
ADAPTER_ELEMENTS = 16 * LAYERS * sum(map(sum, WIDTHS))  # of rank 16
UNIT = 128
SILU = Activation("silu", torch.nn.functional.silu)
PREFILL_LAYERS = 4
CUBLAS = "cuBLAS without adapters, same chain"


class Case(NamedTuple):
    """So many rows, spread evenly over adapters of these ranks, and what the study measured for the chain."""

    name: str
    rows: int
    ranks: list[int]
    study: float | None = None


DECODE = (
    Case("1 row, base", 1, [], 3.83),
    Case("64 rows, base", 64, [], 4.25),
    Case("128 rows, base", 128, [], 5.04),
    Case("256 rows, base", 256, [], 7.25),
    Case("1 row, 1 adapter", 1, [16], 3.80),
    Case("16 rows, 1 adapter", 16, [16], 4.08),
    Case("16 rows, 8 adapters", 16, [16] * 8),
    Case("16 rows, 16 adapters", 16, [16] * 16, 4.31),
    Case("32 rows, 32 adapters", 32, [16] * 32, 4.70),
    Case("64 rows, 1 adapter", 64, [16], 4.56),
    Case("64 rows, 8 adapters", 64, [16] * 8, 4.62),
    Case("64 rows, 64 adapters", 64, [16] * 64, 5.73),
    Case("64 rows, 64 adapters of rank 8", 64, [8] * 64, 5.11),
    Case("64 rows, 64 adapters of rank 64", 64, [64] * 64, 10.21),
    Case("64 rows, 64 adapters of ranks 8, 16, 32, 64", 64, [8, 16, 32, 64] * 16, 7.18),
    Case("64 rows, 64 adapters, one of rank 512", 64, [16] * 63 + [512], 7.74),
    Case("1 row, 1 adapter of rank 512", 1, [512], 5.79),
    Case("64 rows, 1 adapter of rank 512", 64, [512]),
    Case("128 rows, 1 adapter", 128, [16], 6.06),
    Case("128 rows, 8 adapters", 128, [16] * 8),
    Case("128 rows, 64 adapters", 128, [16] * 64, 6.92),
    Case("128 rows, 64 adapters of ranks 8, 16, 32, 64", 128, [8, 16, 32, 64] * 16),
    Case("256 rows, 8 adapters", 256, [16] * 8),
    Case("256 rows, 64 adapters of ranks 8, 16, 32, 64", 256, [8, 16, 32, 64] * 16),
    Case("256 rows, 1 adapter", 256, [16], 8.82),
    Case("256 rows, 64 adapters", 256, [16] * 64, 9.67),
    Case("256 rows, 256 adapters", 256, [16] * 256, 13.55),
)
PREFILL = [(tokens, adapters) for tokens in (1024, 4096, 8192, 16384) for adapters in (1, 64)]
ADDED_GOALS = {(1024, 1): 0.15, (8192, 1): 0.05, (8192, 64): 0.06}


class Layer(NamedTuple):
    weights: dict[str, LinearWeights]
    targets: dict[str, list[LoraTarget]]


class Chain:
    """All linears of some layers, and adapters of any ranks in one flat buffer."""

    def __init__(self, ops: Ops, num_layers: int, buffer: torch.Tensor) -> None:
        self.ops, self.buffer = ops, buffer
        numbers = itertools.count()
        self.layers = [self._layer(numbers) for _ in range(num_layers)]
        self.num_targets = num_layers * len(WIDTHS)
        self.norm, self.eps = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), torch.tensor(1e-5, device="cuda")
        self.ops.prepare([weights for layer in self.layers for weights in layer.weights.values()], with_lora=True)

    def _layer(self, numbers: "itertools.count[int]") -> Layer:
        weights, targets = {}, {}
        for name, (inputs, widths) in LINEARS.items():
            matrix = torch.empty(sum(widths), inputs, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            stops = list(itertools.accumulate(widths))
            weights[name] = LinearWeights(matrix)
            targets[name] = [
                LoraTarget(next(numbers), slice(stop - width, stop)) for stop, width in zip(stops, widths, strict=True)
            ]
        return Layer(weights, targets)

    def batch(self, ranks: Sequence[int], rows: int) -> LoraBatch:
        """Spread rows over adapters of these ranks, each with factors of its own for all targets."""
        rank = torch.tensor([0, *ranks])[:, None].expand(-1, self.num_targets)
        widths = torch.tensor(WIDTHS * (self.num_targets // len(WIDTHS)))
        sizes = -(-(rank[..., None] * widths) // UNIT) * UNIT
        ends = sizes.flatten().cumsum(0).view_as(sizes)
        assert int(ends.max()) + 16 * INNER <= self.buffer.numel(), "the buffer is too small"
        table = torch.full((*rank.shape, len(Field)), -1, dtype=torch.int64)
        table[..., [Field.A, Field.B]] = ends - sizes
        table[..., Field.RANK :] = 0
        table[..., Field.RANK] = rank
        scales = torch.rand(rank.shape, device="cuda") + 0.5
        adapters = [1 + row * len(ranks) // rows for row in range(rows)]
        bounds = [0, *(i for i in range(1, rows) if adapters[i] != adapters[i - 1]), rows]
        indices = torch.tensor(adapters, dtype=torch.int32, device="cuda")
        segments = [adapters[start] for start in bounds[:-1]]
        return LoraBatch(self.buffer, table.cuda(), scales, widths.cuda(), indices, table, bounds, segments)

    def run(self, x: torch.Tensor, lora: LoraBatch | None, is_plain: bool = False) -> torch.Tensor:
        """Go through all layers; `is_plain` with cuBLAS."""
        residual: torch.Tensor | None = None
        for layer in self.layers:

            def linear(name: str, x: torch.Tensor, layer: Layer = layer) -> torch.Tensor:
                if is_plain:
                    return torch.nn.functional.linear(x, layer.weights[name].plain)
                return self.ops.linear(x, layer.weights[name], lora, layer.targets[name])

            x, residual = self.ops.rms_norm(x, residual, self.norm, self.eps, lora, ())
            x = linear("qkv", x)[:, :HIDDEN].contiguous()
            x, residual = self.ops.rms_norm(linear("o", x), residual, self.norm, self.eps)
            if is_plain:
                gated = gate(linear("gate_up", x), SILU)
            else:
                gated = self.ops.gated_linear(x, layer.weights["gate_up"], SILU, lora, layer.targets["gate_up"])
            x = linear("down", gated)
        return x


def time_chain(chain: Chain, x: torch.Tensor, lora: LoraBatch | None, is_plain: bool = False) -> float:
    return measure(capture(lambda: chain.run(x, lora, is_plain)))


def floor_ms(ranks: Sequence[int]) -> float:
    base = sum(inputs * sum(widths) for inputs, widths in LINEARS.values())
    factors = sum(ranks) * sum(map(sum, WIDTHS))
    return 2 * LAYERS * (base + factors) / BYTES_PER_MS


def decode_records(chain: Chain, pattern: str) -> list[Record]:
    records, plain = [], {}
    for case in DECODE:
        if not re.search(pattern, case.name):
            continue
        x = torch.randn(case.rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        if case.rows not in plain:
            plain[case.rows] = time_chain(chain, x, None, is_plain=True)
        lora = chain.batch(case.ranks, case.rows) if case.ranks else None
        if lora is not None:
            chain.ops.plan_lora(lora, lora)
        value = time_chain(chain, x, lora)
        goal = None if case.study is None else round(case.study * 1.05, 2)
        name = f"{case.name} (floor {floor_ms(case.ranks):.2f}, cuBLAS base {plain[case.rows]:.2f})"
        records.append(Record(name, value, "ms", CUBLAS, goal, at_most=True))
        print(f"{name}: {value:.2f}, study {case.study}", flush=True)
    return records


def prefill_records(chain: Chain) -> list[Record]:
    records = []
    for tokens, adapters in PREFILL:
        goal = ADDED_GOALS.get((tokens, adapters))
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        batches = None, chain.batch([16] * adapters, tokens)
        base, value = measure_in_turns([capture(partial(chain.run, x, lora)) for lora in batches], 9)
        share, limit = value / base - 1, None if goal is None else 100 * goal
        name = f"prefill of {tokens} tokens, {adapters} adapters (base {base * LAYERS / PREFILL_LAYERS:.1f} ms), added"
        records.append(Record(name, 100 * share, "%", "our chain without adapters", limit, at_most=True))
        print(f"{name}: {100 * share:.1f} %", flush=True)
    return records


def linear_records(ops: Ops, only: str | None = None, pattern: str = "") -> list[Record]:
    buffer = torch.empty(256 * ADAPTER_ELEMENTS + 16 * INNER, dtype=torch.bfloat16, device="cuda")
    for piece in buffer.split(1 << 30):
        piece.normal_(0, 0.02)
    records = [] if only == "prefill" else decode_records(Chain(ops, LAYERS, buffer), pattern)
    if only != "decode":
        records += prefill_records(Chain(ops, PREFILL_LAYERS, buffer))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one part of it")
    parser.add_argument("--case", default="", help="only cases of decode whose name has this pattern")
    parser.add_argument("--ops", choices=["best", "triton"], default="best", help="the kernels to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = TritonOps() if args.ops == "triton" else select_ops(torch.device("cuda", 0))
    report(linear_records(ops, args.only, args.case), args.json)


if __name__ == "__main__":
    main()
