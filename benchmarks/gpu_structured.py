"""Measure the cost of structured output on one GPU, with the Llama-3.1-8B shape and 64 sequences through `LLM`.
Sequences are unconstrained, share one schema, or have different schemas.

The model is random, in bfloat16; its tokenizer has 128k tokens of words and bytes. The schemas require completions that
are longer than the measurement. A step is timed from the end of the previous step. It counts only if all sequences
receive a token in both steps. The time per token counts all steps, even those in which a sequence receives no token
because its mask is late. Rounds are interleaved. In cases with `fast forward`, forced tokens are consumed ahead of the
model; a server does this if at most 16 sequences are constrained.
"""

import statistics
from itertools import pairwise
from typing import NamedTuple

from harness.engine import Bench, Mark, make_parser, open_bench
from harness.report import Record, report
from harness.schemas import make_schema

from lorax_server.process_tuning import set_gil_switch_interval
from lorax_server.types import Output, SamplingParams, StopParams, Structure

ROWS, PROMPT, STEPS, ROUNDS = 64, 128, 128, 5
SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS = 8, 24, 1  # with a tiny model
MAX_LENGTH = 1024
GOAL = 1.05
FAST_FORWARD = ", fast forward"
SAMPLED = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, seed=1)


class Speed(NamedTuple):
    """Milliseconds per step (if all sequences receive a token), and per token over all sequences."""

    step_ms: float
    token_ms: float


def measure(bench: Bench, structures: list[Structure | None], params: SamplingParams, steps: int) -> Speed:
    """Return the speed while all sequences decode."""
    rows = len(structures)
    budget = bench.llm._engine.capabilities.max_step_tokens - rows  # tokens for prompts while other sequences decode
    num_tokens = steps + -(-rows * PROMPT // max(budget, 1))
    marks: list[tuple[Mark, int]] = []  # with the number of tokens
    with bench.clock.observed(lambda mark, outputs: marks.append((mark, count_tokens(outputs)))):
        run(bench, structures, params, num_tokens)
    is_full = [mark.num_tokens == rows for mark, _ in marks]
    pairs = [pair for pair, full in zip(pairwise(marks), pairwise(is_full), strict=True) if all(full)]
    assert pairs, "in no two steps all sequences get a token: masks are late"
    (first, _), (last, _) = pairs[0][0], pairs[-1][1]
    chosen = sum(count for mark, count in marks if first.at < mark.at <= last.at)
    step_s = statistics.median(after.at - before.at for (before, _), (after, _) in pairs)
    return Speed(step_s * 1e3, (last.at - first.at) * rows / chosen * 1e3)


def run(bench: Bench, structures: list[Structure | None], params: SamplingParams, num_tokens: int) -> None:
    """Generate up to `num_tokens` tokens with each structure. `LLM` first runs a trial compile of each new grammar."""
    stops = [StopParams(max_new_tokens=num_tokens, ignore_eos=structure is None) for structure in structures]
    prompts = bench.draw_prompts(len(structures), PROMPT, seed=len(structures))
    bench.llm.generate(prompts, params, stops, structure=structures, progress=False)


def count_tokens(outputs: list[Output]) -> int:
    return sum(len(output.tokens) for output in outputs)


def measure_all(bench: Bench, params: SamplingParams, rows: int, steps: int, rounds: int) -> dict[str, Speed]:
    """Return the median speeds over all rounds, keyed by case."""
    one, different = [make_schema(0)] * rows, [make_schema(number) for number in range(rows)]
    cases: dict[str, list[Structure | None]] = {
        "no structure": [None] * rows,
        "one schema": [*one],
        f"{rows} schemas": [*different],
        f"one schema{FAST_FORWARD}": [*one],
        f"{rows} schemas{FAST_FORWARD}": [*different],
    }
    found: dict[str, list[Speed]] = {case: [] for case in cases}
    structured_output = bench.llm._engine._structured_output
    assert structured_output is not None
    max_fast_forward = structured_output.max_fast_forward
    for structures in cases.values():  # compile the schemas, so that later all sequences start together
        run(bench, structures, params, 1)
    for _ in range(rounds):
        for case, structures in cases.items():
            structured_output.max_fast_forward = max_fast_forward if case.endswith(FAST_FORWARD) else 0
            speed = measure(bench, structures, params, steps)
            found[case].append(speed)
            print(f"  {case:24}  {speed.step_ms:7.3f} ms per step, {speed.token_ms:7.3f} ms per token", flush=True)
    return {case: Speed(*map(statistics.median, zip(*speeds, strict=True))) for case, speeds in found.items()}


def describe(name: str, speeds: dict[str, Speed], is_tiny: bool) -> list[Record]:
    """Return records. With fast forward, steps compute more tokens, so only the time per token is compared."""
    plain, *_ = speeds.values()
    records = [Record(f"{name}, no structure: step", plain.step_ms, "ms", "", None)]
    goal = None if is_tiny else GOAL
    for case, speed in list(speeds.items())[1:]:
        is_fast_forward = case.endswith(FAST_FORWARD)
        step, token = speed.step_ms / plain.step_ms, speed.token_ms / plain.token_ms
        if not is_fast_forward:
            peer = f"none; {speed.step_ms:.3f} ms"
            records.append(Record(f"{name}, {case}: step", step, "x", peer, goal, at_most=True))
        peer, token_goal = f"none; {speed.token_ms:.3f} ms", None if is_fast_forward else goal
        records.append(Record(f"{name}, {case}: token, with late masks", token, "x", peer, token_goal, at_most=True))
    return records


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help=f"steps per round (default: {STEPS})")
    parser.add_argument("--rounds", type=int, help=f"rounds (default: {ROUNDS})")
    args = parser.parse_args()
    set_gil_switch_interval()  # as the engine process does
    rows, steps, rounds = (SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS) if args.tiny else (ROWS, STEPS, ROUNDS)
    steps, rounds = args.steps or steps, args.rounds or rounds
    records: list[Record] = []
    with open_bench(args, [], max_length=MAX_LENGTH) as bench:
        for name, params in (("greedy", SamplingParams()), ("top-p 0.9", SAMPLED)):
            print(f"{rows} rows, {name}")
            speeds = measure_all(bench, params, rows, steps, rounds)
            records += describe(f"{rows} rows, {name}", speeds, args.tiny)
    report(records, args.json)


if __name__ == "__main__":
    main()
