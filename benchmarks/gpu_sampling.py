"""Sampling on a GPU: our kernel against the same rules in torch, and against the bytes.

256 rows of a vocabulary of 128,256 tokens. The peer is `GeneralSampler`, in the same run. The floor is the time to read
the logits once at 4.1 TB/s. Steps rotate among several tensors of logits, so that the L2 cache does not hold them.
"""

import argparse
import itertools
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_timing import BYTES_PER_MS
from report import Record, report

from lorax_server.kernels import Ops, select_ops
from lorax_server.sampling.general import GeneralSampler
from lorax_server.sampling.sampler import History, RowSampling, Sampler
from lorax_server.types import SamplingParams

ROWS, VOCAB, TENSORS, HISTORY = 256, 128_256, 4, 1024
GOAL = 0.3  # milliseconds, of top-p


class Case(NamedTuple):
    """Parameters of all rows, and the shape of their scores."""

    name: str
    asked: dict[str, Any]
    shape: str = "peaked"
    goal: float | None = None


CASES = (
    Case("greedy", {"do_sample": False}),
    Case("temperature", {"temperature": 0.8}),
    Case("top-p 0.9, few likely", {"top_p": 0.9}, goal=GOAL),
    Case("top-p 0.9, temperature 0.7, few likely", {"top_p": 0.9, "temperature": 0.7}, goal=GOAL),
    Case("top-p 0.9, normal", {"top_p": 0.9}, "normal", GOAL),
    Case("top-p 0.9, temperature 0.7, normal", {"top_p": 0.9, "temperature": 0.7}, "normal", GOAL),
    Case("top-p 0.9, equal", {"top_p": 0.9}, "equal"),
    Case("top-k 50", {"top_k": 50}),
    Case("top-k 50, normal", {"top_k": 50}, "normal"),
    Case(
        "top-k 50, top-p 0.9, min-p 0.02, temperature 0.8",
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    ),
    Case("typical-p 0.9", {"typical_p": 0.9}),
    Case("typical-p 0.9, normal", {"typical_p": 0.9}, "normal"),
    Case("penalties, top-p 0.9", {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "top_p": 0.9}),
    Case("5 alternatives, top-p 0.9", {"num_alternatives": 5, "top_p": 0.9}),
)


def make_logits(shape: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Make scores like a model's, of which a few are likely; or such that tens of thousands are; or all the same."""
    tensors = []
    for _ in range(TENSORS):
        logits = torch.randn(ROWS, VOCAB, device="cuda")
        if shape == "peaked":
            logits *= 2
            likely = torch.randint(VOCAB, (ROWS, 30), device="cuda")
            logits.scatter_(-1, likely, 16 + 2 * torch.randn(ROWS, 30, device="cuda"))
        elif shape == "equal":
            logits[:] = 1.0
        tensors.append(logits.to(dtype))
    return tensors


def measure(step: Callable[[torch.Tensor], object], tensors: list[torch.Tensor], count: int) -> float:
    """Return the median milliseconds of a step."""
    times: list[float] = []
    for index in itertools.islice(itertools.cycle(range(len(tensors))), count + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host is far enough ahead that its time does not count
        start.record()
        step(tensors[index])
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def measure_case(ops: Ops, case: Case, dtype: torch.dtype, with_peer: bool) -> Record:
    device = torch.device("cuda", 0)
    params = [SamplingParams(**{"do_sample": True, "seed": row, **case.asked}) for row in range(ROWS)]
    rows = [RowSampling(each) for each in params]
    tokens = torch.randint(VOCAB, (ROWS, HISTORY), device=device)
    lengths = torch.full((ROWS,), HISTORY, device=device)
    history = History(lengths, lengths // 2, tokens)
    tensors = make_logits(case.shape, dtype)
    sampler = Sampler(rows, VOCAB, device, ops)
    value = measure(lambda logits: sampler(logits, history), tensors, 30)
    peer = None
    if with_peer:
        general = GeneralSampler(rows, VOCAB, device)
        peer = measure(lambda logits: general(logits, history), tensors, 4)
    floor = tensors[0].nbytes / BYTES_PER_MS
    times = "" if peer is None else f", torch {peer:.2f}"
    name = f"{case.name}, {str(dtype).removeprefix('torch.')} (floor {floor:.3f}{times})"
    return Record(name, value, "ms", "torch, same rules", case.goal, at_most=True)


def sampling_records(ops: Ops, pattern: str = "", with_peer: bool = True) -> list[Record]:
    return [
        measure_case(ops, case, dtype, with_peer)
        for dtype in (torch.bfloat16, torch.float32)
        for case in CASES
        if re.search(pattern, case.name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--case", default="", help="only cases whose name has this pattern")
    parser.add_argument("--no-peer", action="store_true", help="do not measure torch")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = select_ops(torch.device("cuda", 0))
    report(sampling_records(ops, args.case, with_peer=not args.no_peer), args.json)


if __name__ == "__main__":
    main()
