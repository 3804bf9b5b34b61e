"""Measure prefill with the Llama-3.1-8B shape on one GPU through `LLM`, and how much prompts delay decoding sequences.

64 prompts of 1,024 random tokens arrive together and generate one token each; no two prompts share a prefix. Then 64
such prompts arrive while 32 sequences decode. The time between tokens of these sequences is measured until the last
prompt has generated its token. `--step-tokens` compares token budgets per step. The peer is vLLM 0.26, with default
settings and tuned, measured earlier on the same kind of GPU (H200). Matrix products alone would allow 46,000 tokens per
second.
"""

import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from harness.engine import Adapter, Bench, Mark, add_quantize_flag, make_parser, open_bench, plain_adapters
from harness.files import TINY
from harness.report import Record, percentile, report

from lorax_server.types import Output

PROMPTS, LENGTH, RUNS = 64, 1024, 3
TINY_LENGTH, TINY_RUNS = 64, 1
MAX_LENGTH = 2048
DECODING_SEQUENCES, DECODING_PROMPT_TOKENS, DECODING_TOKENS, STEPS_BEFORE_PREFILL = 32, 128, 300, 20
FIRST_ID = 10**9  # of requests that the LLM does not know


class PrefillCase(NamedTuple):
    """Prompts with different adapters. The goal and the peer results are tokens per second."""

    name: str
    adapters: tuple[Adapter, ...]
    goal: float
    default_result: float
    tuned_result: float | None = None

    @property
    def peer(self) -> str:
        tuned_result = "" if self.tuned_result is None else f", {self.tuned_result:.0f} at its best"
        return f"vLLM {self.default_result:.0f}{tuned_result}"


CASES = (
    PrefillCase("no adapters", (), 40_000, 41_300),
    PrefillCase("1 adapter", plain_adapters(1), 38_000, 22_500, 32_900),
    PrefillCase("64 adapters", plain_adapters(PROMPTS), 37_000, 18_700, 27_500),
)
# Tokens per second by value of `--quantize` and number of adapters.
QUANTIZED_GOALS = {("fp8-dynamic", 64): 60_000, ("int4", 64): 34_000, ("bitsandbytes-nf4", 64): 34_000}


class TokenLatencies:
    """The times between tokens of decoding sequences, before prompts arrive and while they arrive."""

    def __init__(self, bench: Bench, prompts: list[list[int]]) -> None:
        self.during_prefill: list[float] = []
        self.before_prefill: list[float] = []
        self.seconds = 0.0  # until the last prompt has its token
        self._bench, self._prompts = bench, prompts
        self._last: dict[int, float] = {}
        self._full, self._num_left, self._arrived_at = 0, len(prompts), 0.0

    def record_step(self, mark: Mark, outputs: list[Output]) -> None:
        is_active = self._arrived_at > 0 and self._num_left > 0
        for output in outputs:
            if output.failure is not None:
                raise output.failure.to_error()
            if output.request_id >= FIRST_ID:
                self._num_left -= 1
            else:
                if output.request_id in self._last and (is_active or not self._arrived_at):
                    latencies = self.during_prefill if is_active else self.before_prefill
                    latencies.append(mark.at - self._last[output.request_id])
                self._last[output.request_id] = mark.at
        if is_active and not self._num_left:
            self.seconds = mark.at - self._arrived_at
        self._full += mark.num_tokens == DECODING_SEQUENCES
        if self._full == STEPS_BEFORE_PREFILL and not self._arrived_at:
            self._bench.add_to_engine(FIRST_ID, self._prompts, 1)
            self._arrived_at = time.perf_counter()


def measure(bench: Bench, case: PrefillCase, length: int, seed: int) -> float:
    """Return the input tokens per second of one run."""
    names = [case.adapters[i * len(case.adapters) // PROMPTS].name if case.adapters else None for i in range(PROMPTS)]
    prompts = bench.draw_prompts(PROMPTS, length, seed)
    start_time = time.perf_counter()
    bench.generate(prompts, 1, names)
    return PROMPTS * length / (time.perf_counter() - start_time)


def measure_token_latencies(bench: Bench, length: int, seed: int) -> TokenLatencies:
    latencies = TokenLatencies(bench, bench.draw_prompts(PROMPTS, length, seed))
    decoders = bench.draw_prompts(DECODING_SEQUENCES, min(DECODING_PROMPT_TOKENS, length), seed + 1)
    with bench.clock.observed(latencies.record_step):
        bench.generate(decoders, DECODING_TOKENS, [None] * DECODING_SEQUENCES)
    assert latencies.seconds, "the decoding sequences finished before the prompts"
    return latencies


def set_step_tokens(bench: Bench, step_tokens: int) -> None:
    """Change the token budget without a restart, which takes longer than all runs."""
    scheduler = bench.llm._engine._scheduler
    scheduler.limits = replace(scheduler.limits, max_step_tokens=step_tokens)


def measure_budget(bench: Bench, budget: int, length: int, num_runs: int) -> list[Record]:
    records = []
    for number, case in enumerate(CASES):
        runs = [measure(bench, case, length, seed=1000 * budget + 10 * number + run) for run in range(num_runs)]
        value = statistics.median(runs)
        each = " ".join(f"{run:.0f}" for run in runs)
        print(f"{budget:6} tokens a step, {case.name:12} {value:8.0f} tokens/s  ({each})", flush=True)
        goal = case.goal if bench.quantize is None else QUANTIZED_GOALS.get((bench.quantize, len(case.adapters)))
        goal = None if bench.shape is TINY else goal
        records.append(Record(f"prompts, {case.name}, {budget} a step", value, "tokens/s", case.peer, goal))
    latencies = measure_token_latencies(bench, length, seed=1000 * budget + 500)
    before_prefill = statistics.median(latencies.before_prefill) * 1e3
    for name, value in (("P50", 0.5), ("P99", 0.99), ("longest", 1.0)):
        ms = percentile(latencies.during_prefill, value) * 1e3
        records.append(
            Record(
                f"{name} time between tokens during prefill, {budget} a step", ms, "ms", f"{before_prefill:.1f} before"
            )
        )
    return records


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--step-tokens", type=int, nargs="+", metavar="N", help="token budgets (default: the engine's budget)"
    )
    parser.add_argument("--runs", type=int, help=f"runs per case (default: {RUNS})")
    add_quantize_flag(parser)
    args = parser.parse_args()
    length = TINY_LENGTH if args.tiny else LENGTH
    adapters = list(CASES[-1].adapters)
    max_budget = None if args.step_tokens is None else max(args.step_tokens)
    records = []
    with open_bench(args, adapters, max_length=MAX_LENGTH, max_step_tokens=max_budget) as bench:
        print(f"{len(adapters)} adapters loaded in {bench.load(adapters):.1f} s")
        for budget in args.step_tokens or [bench.llm._engine.capabilities.max_step_tokens]:
            set_step_tokens(bench, budget)
            measure(bench, CASES[-1], length, seed=budget)  # warm-up
            records += measure_budget(bench, budget, length, args.runs or (TINY_RUNS if args.tiny else RUNS))
    report(records, args.json)


if __name__ == "__main__":
    main()
