"""Decode steps of a Llama-3.1-8B on one GPU through `LLM`: files, adapters, scheduler, layers, sampling, text.

Model and adapters are random, in bfloat16, and real files; adapters are loaded by requests, after graphs were captured.
Prompts have 128 tokens. A step is timed from its end to the end of the next, text included, and counts if all sequences
get a token in both. The byte floor is the time to read weights, keys and values, and the adapters once at 4.1 TB/s. The
peer is vLLM 0.26, as shipped and at its best, measured on the same kind of GPU (H200) before: it cannot run beside us.
"""

import statistics
import time
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from gpu_engine import Adapter, Bench, Mark, describe_device, make_parser, open_bench, plain_adapters
from gpu_model import TINY, ModelShape
from report import Record, report

from lorax_server.types import Output

PROMPT, STEPS, RUNS, PROFILED = 128, 128, 3, 20
MAX_LENGTH = 1024
BANDWIDTH = 4.1e12  # bytes a second that an H200 reads at best
SHORT_STEPS, SHORT_RUNS = 8, 1  # of a tiny model
MIXED_RANKS = (8,) * 30 + (16,) * 16 + (32,) * 10 + (64,) * 6
LARGE = Adapter("large", rank=512)
PARTIAL = Adapter("partial", modules=("q_proj", "v_proj"))
MIXED = (*(Adapter(f"mixed-{i:02}", rank) for i, rank in enumerate(MIXED_RANKS)), LARGE, PARTIAL)
DORA = tuple(Adapter(f"dora-{i}", use_dora=True) for i in range(8))
CHECKED = (None, *plain_adapters(2), LARGE, PARTIAL, *DORA[:2], None)
CHECKED_TOKENS = 32


class DecodeCase(NamedTuple):
    """So many rows over some adapters, our goal in milliseconds, and the peer's as shipped and at its best."""

    key: str
    rows: int
    adapters: tuple[Adapter, ...]
    goal: float | None = None
    shipped: float | None = None
    best: float | None = None
    note: str = ""
    sampling: dict[str, Any] = {}  # noqa: RUF012 - nothing writes to it

    @property
    def name(self) -> str:
        return f"{count(self.rows, 'row')}, {count(len(self.adapters), 'adapter')}{self.note}"

    @property
    def peer(self) -> str:
        best = "" if self.best is None else f", {self.best} at its best"
        return "" if self.shipped is None else f"vLLM {self.shipped}{best}"

    @property
    def row_adapters(self) -> list[str | None]:
        """The adapters of the rows, as many rows for each."""
        if not self.adapters:
            return [None] * self.rows
        return [self.adapters[i * len(self.adapters) // self.rows].name for i in range(self.rows)]


def count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _plain(rows: int, count: int, goal: float, shipped: float, best: float | None = None) -> DecodeCase:
    return DecodeCase(f"{rows}/{count or 'base'}", rows, plain_adapters(count), goal, shipped, best)


CASES = (
    _plain(1, 0, 4.3, 4.83),
    _plain(64, 0, 5.2, 6.02),
    _plain(256, 0, 10, 10.87),
    _plain(1, 1, 4.3, 7.72, 5.39),
    _plain(16, 16, 4.9, 13.39, 6.89),
    _plain(64, 1, 5.5, 9.60, 7.00),
    _plain(64, 64, 6.8, 33.2, 12.39),
    _plain(256, 64, 12.5, 36.9, 20.6),
    _plain(256, 256, 16.5, 108.9),
    DecodeCase("top-p", 64, plain_adapters(64), note=", top-p 0.9", sampling={"do_sample": True, "top_p": 0.9}),
    DecodeCase("mixed", 64, MIXED, note=" (ranks 8 to 64, one 512, one lacks modules)"),
    DecodeCase("dora", 64, DORA, note=" with DoRA"),
)
PROFILED_CASES = ("64/base", "64/1", "64/64")


class Measured(NamedTuple):
    """The milliseconds of a step, and the tokens of each sequence at that time."""

    ms: float
    context: float


def measure(bench: Bench, case: DecodeCase, steps: int) -> Measured:
    """Return the median of the steps of one run in which all sequences decode."""
    budget = bench.llm._engine.capabilities.max_step_tokens - case.rows  # for prompts, while others decode already
    start_steps = -(-case.rows * PROMPT // max(budget, 1))
    bench.clock.marks.clear()
    bench.generate(
        bench.draw_prompts(case.rows, PROMPT, seed=case.rows), steps + start_steps, case.row_adapters, **case.sampling
    )
    times, contexts, total = [], [], 0
    for before, mark in pairwise(bench.clock.marks):
        total += before.num_tokens
        if before.num_tokens == mark.num_tokens == case.rows:
            times.append(mark.at - before.at)
            contexts.append(PROMPT + total / case.rows)
    assert len(times) >= steps // 2, f"{case.key}: all sequences decode in {len(times)} steps only"
    return Measured(statistics.median(times) * 1e3, statistics.mean(contexts))


def find_floor_ms(case: DecodeCase, shape: ModelShape, context: float) -> float:
    """Return the milliseconds that reading every byte once takes."""
    weights = shape.num_hidden_layers * sum(outputs * inputs for outputs, inputs in shape.linears.values())
    weights += shape.vocab_size * shape.hidden_size  # the head
    cached = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * context * case.rows
    adapters = sum(adapter.count_bytes(shape) for adapter in case.adapters)
    return (2 * (weights + cached) + adapters) / BANDWIDTH * 1e3


def measure_case(bench: Bench, case: DecodeCase, steps: int, num_runs: int) -> tuple[float, list[Record]]:
    """Return the milliseconds of a step, and all that is to be reported of the case."""
    num_before = bench.llm.status.adapters_loaded
    seconds = bench.load(case.adapters)
    num_loaded = bench.llm.status.adapters_loaded - num_before
    runs = [measure(bench, case, steps) for _ in range(num_runs)]
    ms = statistics.median(run.ms for run in runs)
    floor = find_floor_ms(case, bench.shape, runs[0].context)
    each = " ".join(f"{run.ms:.2f}" for run in runs)
    print(f"{case.name:66}  {ms:6.2f}  {floor:6.2f}  {ms / floor:7.2f}  ({each})", flush=True)
    goal = None if bench.shape is TINY else case.goal
    records = [
        Record(f"step, {case.name}", ms, "ms", case.peer, goal, at_most=True),
        Record(f"  over its floor, {case.name}", ms / floor, "x", f"{floor:.2f} ms", None),
    ]
    if num_loaded > 0:
        print(f"  {count(num_loaded, 'adapter')} from files to the device in {seconds:.1f} s")
        records.append(Record(f"  {count(num_loaded, 'adapter')} more on the device", seconds, "s", "", None))
    return ms, records


# --- Profile ----------------------------------------------------------------------------------------------------------


def profile(bench: Bench, case: DecodeCase, step_ms: float) -> None:
    """Print the time of a step by kernel, and the time in which no kernel runs. Kernels may overlap."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    first, full = 10, 0

    def watch(mark: Mark, _: list[Output]) -> None:
        nonlocal full
        if mark.num_tokens == case.rows:
            full += 1
            if full in (first, first + PROFILED):
                torch.cuda.synchronize()
                profiler.start() if full == first else profiler.stop()

    with bench.clock.observed(watch):
        measure(bench, case, first + PROFILED + 10)
    events = [event for event in profiler.events() if event.device_type == torch._C._autograd.DeviceType.CUDA]
    print_kernels(step_ms * 1e3, events)


def print_kernels(step_us: float, events: list[Any]) -> None:
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        sums[event.name] += event.time_range.end - event.time_range.start
        counts[event.name] += 1
    profiled = (end - spans[0][0]) / PROFILED
    print(f"  a step of {step_us:.0f} us, {profiled:.0f} us while profiled; a kernel runs in", end=" ")
    print(f"{busy / PROFILED:.0f} of these ({busy / PROFILED / profiled:.1%}); all kernels", end=" ")
    print(f"{sums.total() / PROFILED:.0f} us ({sums.total() / PROFILED / step_us:.1%} of the step)")
    for name, total in sums.most_common(14):
        print(f"  {total / PROFILED:8.1f} us {counts[name] / PROFILED:6.1f} x  {name[:90]}")


# --- Check ------------------------------------------------------------------------------------------------------------


def check(bench: Bench) -> list[Record]:
    """Compare the tokens of sequences of all kinds of adapters, decoded together, with transformers and PEFT."""
    from gpu_reference import Sample, compare  # needs PEFT

    prompts = bench.draw_prompts(len(CHECKED), PROMPT, seed=1)
    names = [adapter and adapter.name for adapter in CHECKED]
    begin = time.monotonic()
    answers = bench.generate(prompts, CHECKED_TOKENS, names)
    print(f"check: {len(names)} answers with their adapters in {time.monotonic() - begin:.1f} s", flush=True)
    samples = [Sample(*one) for one in zip(names, prompts, answers, strict=True)]
    agreement = compare(bench.folder, samples)
    tokens = agreement.num_tokens
    print(
        f"check: {agreement.num_equal} of {tokens} tokens have the best score in float32, {agreement.peer_equal} of "
        f"those that transformers chooses in bfloat16; {agreement.num_near} of ours are near it: the furthest is "
        f"{agreement.largest_gap:.3f} below, {agreement.tolerance:.3f} allowed; had the reference no adapters, "
        f"{agreement.num_near_base} of {agreement.num_adapted} would be near; {time.monotonic() - begin:.1f} s"
    )
    peer, own_error = "transformers and PEFT in float32", max(agreement.peer_mean_gap, 1e-6)
    return [
        Record("checked tokens within rounding of the best", agreement.num_near / tokens, "share", peer, 1.0),
        Record("checked tokens that are the best", agreement.num_equal / tokens, "share", peer, None),
        Record(
            "their mean distance from the best",
            agreement.mean_gap / own_error,
            "x",
            f"{own_error:.4f} of transformers in bfloat16",
            1.5,
            at_most=True,
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=f"of {', '.join(case.key for case in CASES)}")
    parser.add_argument("--steps", type=int, help=f"steps of a run, instead of {STEPS}")
    parser.add_argument("--runs", type=int, help=f"runs of a case, instead of {RUNS}")
    parser.add_argument(
        "--profile", action="store_true", help=f"print the kernels of {', '.join(PROFILED_CASES)} as well"
    )
    parser.add_argument("--check", action="store_true", help="compare tokens with transformers and PEFT as well")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel on its own")
    args = parser.parse_args()
    unknown = set(args.cases or ()) - {case.key for case in CASES}
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU")
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    cases = [case for case in CASES if args.cases is None or case.key in args.cases]
    steps = args.steps or (SHORT_STEPS if args.tiny else STEPS)
    needed = [adapter for case in cases for adapter in case.adapters]
    needed += [adapter for adapter in CHECKED if adapter is not None and args.check]
    settings = {"max_length": MAX_LENGTH, "cuda_graphs": False if args.no_graphs else None}
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    records: list[Record] = []
    with open_bench(args, list(dict.fromkeys(needed)), **settings) as bench:
        print(f"{'':66}      ms   floor  x floor")
        for case in cases:
            step_ms, found = measure_case(bench, case, steps, args.runs or (SHORT_RUNS if args.tiny else RUNS))
            records += found
            if args.profile and case.key in PROFILED_CASES:
                profile(bench, case, step_ms)
        records += check(bench) if args.check else []
    report(records, args.json)


if __name__ == "__main__":
    main()
