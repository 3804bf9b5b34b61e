"""Measure decode steps with the Llama-3.1-8B shape on one GPU through `LLM`, including scheduling, adapters, sampling
and text.

Model and adapters are random bfloat16 files; adapters are loaded by requests, after the CUDA graphs were captured.
Prompts have 128 tokens. A step is timed from the end of the previous step. It counts only if all sequences receive a
token in both steps. The byte floor is the time to read weights, KV cache and adapters once at 4.1 TB/s. The peer is
vLLM 0.26, with default settings and tuned, measured earlier on the same kind of GPU (H200), without quantization.
"""

import statistics
from itertools import pairwise
from typing import Any, NamedTuple

from harness.engine import QUANTIZE_BYTES, Adapter, Bench, add_quantize_flag, make_parser, open_bench, plain_adapters
from harness.files import TINY, ModelShape
from harness.report import Record, report

PROMPT, STEPS, RUNS = 128, 128, 3
MAX_LENGTH = 1024
BANDWIDTH = 4.1e12  # bytes per second that an H200 reaches
SHORT_STEPS, SHORT_RUNS = 8, 1  # with a tiny model
MIXED_RANKS = (8,) * 30 + (16,) * 16 + (32,) * 10 + (64,) * 6
LARGE = Adapter("large", rank=512)
PARTIAL = Adapter("partial", modules=("q_proj", "v_proj"))
MIXED = (*(Adapter(f"mixed-{i:02}", rank) for i, rank in enumerate(MIXED_RANKS)), LARGE, PARTIAL)
DORA = tuple(Adapter(f"dora-{i}", use_dora=True) for i in range(8))
# Milliseconds per step with quantized weights.
QUANTIZED_GOALS = {
    "fp8": {"1/base": 2.6, "1/1": 2.7, "16/16": 3.2, "64/base": 3.7, "64/1": 4.2, "64/64": 5.4, "256/64": 10.0},
    "int4": {"1/base": 2.1, "1/1": 2.2, "16/16": 2.8, "64/base": 3.7, "64/1": 4.2, "64/64": 5.4, "256/64": 12.9},
    "bitsandbytes-nf4": {
        **{"1/base": 2.3, "1/1": 2.4, "16/16": 3.1, "64/base": 3.8, "64/1": 4.3, "64/64": 5.5, "256/64": 13.2}
    },
}
CHECKED = (None, *plain_adapters(2), LARGE, PARTIAL, *DORA[:2], None)
CHECKED_TOKENS = 32


class DecodeCase(NamedTuple):
    """A batch of `rows` sequences with different adapters. The goal and the peer results are milliseconds per step."""

    key: str
    rows: int
    adapters: tuple[Adapter, ...]
    goal: float | None = None
    default_result: float | None = None
    tuned_result: float | None = None
    note: str = ""
    sampling: dict[str, Any] = {}  # noqa: RUF012 - never modified

    @property
    def name(self) -> str:
        return f"{count(self.rows, 'row')}, {count(len(self.adapters), 'adapter')}{self.note}"

    @property
    def peer(self) -> str:
        tuned_result = "" if self.tuned_result is None else f", {self.tuned_result} at its best"
        return "" if self.default_result is None else f"vLLM {self.default_result}{tuned_result}"

    @property
    def row_adapters(self) -> list[str | None]:
        """Return the adapter of each sequence."""
        if not self.adapters:
            return [None] * self.rows
        return [self.adapters[i * len(self.adapters) // self.rows].name for i in range(self.rows)]


def count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _plain(rows: int, count: int, goal: float, default_result: float, tuned_result: float | None = None) -> DecodeCase:
    return DecodeCase(f"{rows}/{count or 'base'}", rows, plain_adapters(count), goal, default_result, tuned_result)


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


class Measured(NamedTuple):
    """Milliseconds per step, and the mean sequence length."""

    ms: float
    context: float


def measure(bench: Bench, case: DecodeCase, steps: int) -> Measured:
    """Return the median time of steps in which all sequences decode."""
    budget = (
        bench.llm._engine.capabilities.max_step_tokens - case.rows
    )  # tokens for prompts while other sequences decode
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


def find_floor_ms(case: DecodeCase, bench: Bench, context: float) -> float:
    """Return the time in milliseconds to read all weights, adapters and KV cache entries once."""
    shape: ModelShape = bench.shape
    linears = shape.num_hidden_layers * sum(outputs * inputs for outputs, inputs in shape.linears.values())
    head_bytes = QUANTIZE_BYTES["int8"] if bench.quantize in ("int4", "int8") else 2
    weights = linears * QUANTIZE_BYTES.get(bench.quantize or "", 2) + shape.vocab_size * shape.hidden_size * head_bytes
    cached = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * context * case.rows
    adapters = sum(adapter.count_bytes(shape) for adapter in case.adapters)
    return (weights + 2 * cached + adapters) / BANDWIDTH * 1e3


def measure_case(bench: Bench, case: DecodeCase, steps: int, num_runs: int) -> list[Record]:
    """Return the step time, its ratio to the byte floor, and the time to load adapters."""
    num_before = bench.llm.status.adapters_loaded
    seconds = bench.load(case.adapters)
    num_loaded = bench.llm.status.adapters_loaded - num_before
    runs = [measure(bench, case, steps) for _ in range(num_runs)]
    ms = statistics.median(run.ms for run in runs)
    floor = find_floor_ms(case, bench, runs[0].context)
    each = " ".join(f"{run.ms:.2f}" for run in runs)
    print(f"{case.name:66}  {ms:6.2f}  {floor:6.2f}  {ms / floor:7.2f}  ({each})", flush=True)
    goal = case.goal if bench.quantize is None else QUANTIZED_GOALS.get(bench.quantize, {}).get(case.key)
    goal = None if bench.shape is TINY else goal
    records = [
        Record(f"step, {case.name}", ms, "ms", case.peer, goal, at_most=True),
        Record(f"  over its floor, {case.name}", ms / floor, "x", f"{floor:.2f} ms"),
    ]
    if num_loaded > 0:
        print(f"  {count(num_loaded, 'adapter')} loaded in {seconds:.1f} s")
        records.append(Record(f"  {count(num_loaded, 'adapter')} loaded", seconds, "s"))
    return records


def check(bench: Bench) -> list[Record]:
    """Decode sequences with all kinds of adapters in one batch and compare their tokens with transformers and PEFT."""
    from harness.reference import Sample, compare  # needs PEFT

    prompts = bench.draw_prompts(len(CHECKED), PROMPT, seed=1)
    names = [adapter and adapter.name for adapter in CHECKED]
    completions = bench.generate(prompts, CHECKED_TOKENS, names)
    samples = [Sample(*one) for one in zip(names, prompts, completions, strict=True)]
    return compare(bench.folder, samples).make_records("check")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=[case.key for case in CASES], metavar="CASE", help="%(choices)s")
    parser.add_argument("--steps", type=int, help=f"steps per run (default: {STEPS})")
    parser.add_argument("--runs", type=int, help=f"runs per case (default: {RUNS})")
    parser.add_argument("--check", action="store_true", help="also compare tokens with transformers and PEFT")
    parser.add_argument("--no-graphs", action="store_true", help="run without CUDA graphs")
    add_quantize_flag(parser)
    args = parser.parse_args()
    if args.check and args.quantize:
        parser.error("--check compares unquantized models; omit --quantize")
    cases = [case for case in CASES if args.cases is None or case.key in args.cases]
    steps = args.steps or (SHORT_STEPS if args.tiny else STEPS)
    needed = [adapter for case in cases for adapter in case.adapters]
    needed += [adapter for adapter in CHECKED if adapter is not None and args.check]
    settings = {"max_length": MAX_LENGTH, "cuda_graphs": False if args.no_graphs else None}
    records: list[Record] = []
    with open_bench(args, list(dict.fromkeys(needed)), **settings) as bench:
        for case in cases:
            records += measure_case(bench, case, steps, args.runs or (SHORT_RUNS if args.tiny else RUNS))
        records += check(bench) if args.check else []
    report(records, args.json)


if __name__ == "__main__":
    main()
