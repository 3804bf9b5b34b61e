"""Norms, gates and embeddings on a GPU, against a plain copy of as many bytes in the same run.

Rows are 4,096 wide, in bfloat16; gates have 14,336 columns. A graph holds several calls on different tensors, so that
what one leaves in L2 is not what the next reads. The goal is 80 % of the copy's speed.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import capture, measure_in_turns
from report import Record, report

from lorax_server.kernels import Activation, Ops, select_ops
from lorax_server.kernels.hopper import small
from lorax_server.kernels.hopper.ops import HopperOps
from lorax_server.kernels.triton.gate import gate
from lorax_server.kernels.triton.ops import TritonOps

WIDTH, INNER, VOCAB = 4096, 14336, 128256
TOKENS = (64, 256, 1024, 8192)
FEWEST = 256  # tokens that have a goal
SHARE = 80.0
ROTATED_BYTES = 256 << 20  # of tensors that are used in turn: several times L2
SILU = Activation("silu", F.silu)
Calls = list[Callable[[], object]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def make_calls(ops: Ops, kind: str, tokens: int, count: int) -> Calls:
    """Make calls on tensors of their own."""
    weight, bias, eps = random(WIDTH), random(WIDTH), torch.tensor(1e-5, device="cuda")
    if kind == "rms norm with residual":
        return [partial(ops.rms_norm, random(tokens, WIDTH), random(tokens, WIDTH), weight, eps) for _ in range(count)]
    if kind == "layer norm":
        return [partial(ops.layer_norm, random(tokens, WIDTH), weight, bias, 1e-5) for _ in range(count)]
    if kind == "embedding":
        table = random(VOCAB, WIDTH)
        return [partial(F.embedding, torch.randint(VOCAB, (tokens,), device="cuda"), table) for _ in range(count)]
    if isinstance(ops, HopperOps):
        return [partial(small.gate, ops._kernels, random(tokens, 2 * INNER), "silu") for _ in range(count)]
    return [partial(gate, random(tokens, 2 * INNER), SILU) for _ in range(count)]


# Elements that are read and written for each token.
MOVED = {
    "rms norm with residual": (2 * WIDTH, 2 * WIDTH),
    "layer norm": (WIDTH, WIDTH),
    "gate": (2 * INNER, INNER),
    "embedding": (WIDTH, WIDTH),
}


def run_all(calls: Calls) -> None:
    for call in calls:
        call()


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for to, source in pairs:
        to.copy_(source)


def small_records(ops: Ops) -> list[Record]:
    found = []
    for kind, moved in MOVED.items():
        for tokens in TOKENS:
            elements = tokens * sum(moved) // 2  # a copy moves each twice
            count = max(2, min(64, ROTATED_BYTES // (4 * elements)))
            pairs = [
                (torch.empty(elements, device="cuda", dtype=torch.bfloat16), random(elements)) for _ in range(count)
            ]
            graphs = [
                capture(partial(copy_all, pairs)),
                capture(partial(run_all, make_calls(ops, kind, tokens, count))),
            ]
            copied, value = (1000 * ms / count for ms in measure_in_turns(graphs, 15))
            goal = SHARE if tokens >= FEWEST else None
            name = f"{kind}, {tokens} tokens ({value:.1f} us, copy {copied:.1f})"
            found.append(Record(name, 100 * copied / value, "% of a copy's speed", "torch's copy", goal))
            print(f"{name}: {100 * copied / value:.0f} %", flush=True)
            del pairs, graphs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--ops", choices=["best", "triton"], default="best", help="the kernels to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    report(small_records(TritonOps() if args.ops == "triton" else select_ops(torch.device("cuda", 0))), args.json)


if __name__ == "__main__":
    main()
