"""The cost of structured output on one GPU: decode steps of a Llama-3.1-8B with 64 rows through `LLM`, without
structures, with one schema for all rows, and with a schema of its own for each.

The model is random, in bfloat16, and its tokenizer is made: 128k tokens of words and bytes. The schemas cannot come to
an end before the measurement does. A step is timed from its end to the end of the next, text included, and counts if
all sequences get a token in both. The time of a token counts all steps, also those in which a sequence gets none since
its mask was late. Rounds are interleaved. First each token has a step of its own; then those that the schemas force
come several at once, as they do in service: `jumping ahead`.
"""

import statistics
from itertools import pairwise
from typing import NamedTuple

import torch
from gpu_engine import Bench, Mark, describe_device, make_parser, open_bench
from mask_path import DeviceIdle, Phases, describe_phases
from report import Record, report
from structured import make_schema

from lorax_server.types import Output, SamplingParams, StopParams, Structure

ROWS, PROMPT, STEPS, ROUNDS = 64, 128, 128, 5
SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS = 8, 24, 1  # of a tiny model
MAX_LENGTH = 1024
GOAL = 1.03
JUMPING = ", jumping ahead"
DRAWN = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, seed=1)


class Speed(NamedTuple):
    """Milliseconds of a step in which all sequences get a token, and of a token of all sequences."""

    step_ms: float
    token_ms: float


def measure(bench: Bench, structures: list[Structure | None], params: SamplingParams, steps: int) -> Speed:
    """Return the times of answers with these structures, while all of them decode."""
    rows = len(structures)
    budget = bench.llm._engine.capabilities.max_step_tokens - rows  # for prompts, while others decode already
    num_tokens = steps + -(-rows * PROMPT // max(budget, 1))
    marks: list[tuple[Mark, int]] = []  # with the number of tokens; a mark has that of sequences
    with bench.clock.observed(lambda mark, outputs: marks.append((mark, count_tokens(outputs)))):
        run(bench, structures, params, num_tokens)
    is_full = [mark.num_tokens == rows for mark, _ in marks]
    pairs = [pair for pair, full in zip(pairwise(marks), pairwise(is_full), strict=True) if all(full)]
    assert pairs, "there are no two steps in which all sequences get a token: masks are late"
    (first, _), (last, _) = pairs[0][0], pairs[-1][1]
    chosen = sum(count for mark, count in marks if first.at < mark.at <= last.at)
    step_s = statistics.median(after.at - before.at for (before, _), (after, _) in pairs)
    return Speed(step_s * 1e3, (last.at - first.at) * rows / chosen * 1e3)


def run(bench: Bench, structures: list[Structure | None], params: SamplingParams, num_tokens: int) -> None:
    """Answer as many prompts as there are structures, with so many tokens each."""
    stops = [StopParams(max_new_tokens=num_tokens, ignore_eos=structure is None) for structure in structures]
    prompts = bench.draw_prompts(len(structures), PROMPT, seed=len(structures))
    bench.llm.generate(prompts, params, stops, structure=structures, progress=False)


def count_tokens(outputs: list[Output]) -> int:
    return sum(len(output.tokens) for output in outputs)


class Breakdown:
    """Prints where the time of steps goes: on the host by phase, and on the device where it has nothing to do."""

    def __init__(self, bench: Bench) -> None:
        self._phases = Phases(bench.llm._engine)
        self._idle = DeviceIdle(bench.llm._engine._executor) if torch.cuda.is_available() else None

    def forget(self) -> None:
        self._phases.forget()
        if self._idle is not None:
            self._idle.forget()

    def print(self) -> None:
        if self._idle is not None:
            print(f"    {self._idle.describe()}")
        print(*describe_phases(self._phases.summarize()), sep="\n", flush=True)


def measure_all(
    bench: Bench, params: SamplingParams, rows: int, steps: int, rounds: int, breakdown: Breakdown | None = None
) -> dict[str, Speed]:
    """Return the medians of some rounds, by case."""
    one, different = [make_schema(0)] * rows, [make_schema(number) for number in range(rows)]
    cases: dict[str, list[Structure | None]] = {
        "no structure": [None] * rows,
        "one schema": [*one],
        f"{rows} schemas": [*different],
        f"one schema{JUMPING}": [*one],
        f"{rows} schemas{JUMPING}": [*different],
    }
    found: dict[str, list[Speed]] = {case: [] for case in cases}
    followed = bench.llm._engine._structures
    assert followed is not None
    for structures in cases.values():  # compile them, and start all at once later
        run(bench, structures, params, 1)
    for _ in range(rounds):
        for case, structures in cases.items():
            followed.jumps = case.endswith(JUMPING)
            if breakdown is not None:
                breakdown.forget()
            speed = measure(bench, structures, params, steps)
            found[case].append(speed)
            print(f"  {case:24}  {speed.step_ms:7.3f} ms a step, {speed.token_ms:7.3f} ms a token", flush=True)
            if breakdown is not None:
                breakdown.print()
    return {case: Speed(*map(statistics.median, zip(*speeds, strict=True))) for case, speeds in found.items()}


def describe(name: str, speeds: dict[str, Speed], is_tiny: bool) -> list[Record]:
    """Return records. Where tokens come several at once, steps have more of them: only the time of a token counts."""
    plain, *_ = speeds.values()
    records = [Record(f"{name}, no structure: a step", plain.step_ms, "ms", "", None)]
    goal = None if is_tiny else GOAL
    for case, speed in list(speeds.items())[1:]:
        is_jumping = case.endswith(JUMPING)
        step, token = speed.step_ms / plain.step_ms, speed.token_ms / plain.token_ms
        if not is_jumping:
            peer = f"none; {speed.step_ms:.3f} ms"
            records.append(Record(f"{name}, {case}: a step", step, "x", peer, goal, at_most=True))
        peer, token_goal = f"none; {speed.token_ms:.3f} ms", None if is_jumping else goal
        records.append(Record(f"{name}, {case}: a token, late masks too", token, "x", peer, token_goal, at_most=True))
    return records


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help=f"steps of a round, instead of {STEPS}")
    parser.add_argument("--rounds", type=int, help=f"rounds, instead of {ROUNDS}")
    parser.add_argument("--phases", action="store_true", help="print where the time goes; this takes some itself")
    args = parser.parse_args()
    rows, steps, rounds = (SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS) if args.tiny else (ROWS, STEPS, ROUNDS)
    steps, rounds = args.steps or steps, args.rounds or rounds
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    records: list[Record] = []
    with open_bench(args, [], max_length=MAX_LENGTH) as bench:
        breakdown = Breakdown(bench) if args.phases else None
        for name, params in (("greedy", SamplingParams()), ("top-p 0.9", DRAWN)):
            print(f"{rows} rows, {name}")
            speeds = measure_all(bench, params, rows, steps, rounds, breakdown)
            records += describe(f"{rows} rows, {name}", speeds, args.tiny)
    report(records, args.json)


if __name__ == "__main__":
    main()
