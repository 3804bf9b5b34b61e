"""Measure what structured output costs on one GPU: decode steps of a Llama-3.1-8B with 64 sequences through `LLM`,
unconstrained, with one schema for all sequences, and with a schema each.

The model is random, in bfloat16, and its tokenizer is made: 128k tokens of words and bytes. The schemas cannot end
before the measurement does. A step is timed from its end to the end of the next, text included, and counts if all
sequences get a token in both. The time per token counts all steps, including steps in which a sequence gets no token
because its mask is late. Rounds are interleaved. The first cases sample each token in a step of its own; in the cases
with `fast forward`, forced tokens are consumed ahead of the model; a server does that with up to 16 sequences.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from gpu_engine import Bench, Mark, describe_device, make_parser, open_bench
from report import Record, report
from structured import make_schema

from lorax_server.engine.engine import Engine
from lorax_server.process_tuning import set_gil_switch_interval
from lorax_server.types import Output, SamplingParams, StopParams, Structure
from lorax_server.worker.worker import Worker

ROWS, PROMPT, STEPS, ROUNDS = 64, 128, 128, 5
SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS = 8, 24, 1  # of a tiny model
MAX_LENGTH = 1024
GOAL = 1.05
FAST_FORWARD = ", fast forward"
SAMPLED = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9, seed=1)
PHASES = {
    "schedule": "schedule the step",
    "submit": "submit it, which starts the forward",
    "collect": "wait for the tokens of the step before",
    "advance": "start computing their next masks",
    "update": "update the sequences",
    "gather": "wait for masks",
    "mask": "copy masks to the device",
}


class Speed(NamedTuple):
    """Milliseconds per step in which all sequences get a token, and per token of all sequences."""

    step_ms: float
    token_ms: float


def measure(bench: Bench, structures: list[Structure | None], params: SamplingParams, steps: int) -> Speed:
    """Return the speed while all sequences decode."""
    rows = len(structures)
    budget = bench.llm._engine.capabilities.max_step_tokens - rows  # for prompts, while other sequences decode already
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
    """Generate `num_tokens` for a prompt with each structure. `LLM` tries a new grammar in its sandbox first."""
    stops = [StopParams(max_new_tokens=num_tokens, ignore_eos=structure is None) for structure in structures]
    prompts = bench.draw_prompts(len(structures), PROMPT, seed=len(structures))
    bench.llm.generate(prompts, params, stops, structure=structures, progress=False)


def count_tokens(outputs: list[Output]) -> int:
    return sum(len(output.tokens) for output in outputs)


# --- Where the time goes ----------------------------------------------------------------------------------------------


class Phases:
    """Time the parts of an engine's steps on the host."""

    def __init__(self, engine: Engine) -> None:
        self._spent: dict[str, list[float]] = defaultdict(list)
        owners: dict[str, Any] = {
            **dict.fromkeys(("submit", "collect", "mask"), engine._executor),
            **dict.fromkeys(("schedule", "update"), engine._scheduler),
            **dict.fromkeys(("advance", "gather"), engine._structured_output),
        }
        for name, owner in owners.items():
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def clear(self) -> None:
        self._spent.clear()

    def describe(self) -> list[str]:
        """Return lines with the median milliseconds of each phase."""
        spent = {name: statistics.median(self._spent[name]) * 1e3 for name in PHASES if name in self._spent}
        return [f"    {spent_ms:7.3f} ms  {PHASES[name]}" for name, spent_ms in spent.items()]

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                self._spent[name].append(time.perf_counter() - started)

        return run


class DeviceIdle:
    """Measure how long a GPU is idle, by events around submitted work."""

    def __init__(self, worker: Worker) -> None:
        self._stream = worker._stream
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # start and end of work
        for name in ("submit", "mask"):
            setattr(worker, name, self._marked(name, getattr(worker, name)))

    def clear(self) -> None:
        self._events.clear()

    def describe(self) -> str:
        """Return the mean idle milliseconds before sampling, when masks are late, and before forwards."""
        torch.cuda.synchronize()
        idle: dict[str, list[float]] = {"mask": [], "submit": []}
        for (_, _, ended), (name, started, _) in pairwise(self._events):
            idle[name].append(ended.elapsed_time(started))
        masks, forwards = (statistics.mean(times or [0.0]) for times in idle.values())
        return f"    the device waits {masks:.3f} ms for masks and {forwards:.3f} ms for the host"

    def _marked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = self._record()
            result = work(*args)
            self._events.append((name, started, self._record()))
            return result

        return run

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class Breakdown:
    """Print where the time of steps goes: host phases, and idle time of the device."""

    def __init__(self, bench: Bench) -> None:
        self._phases = Phases(bench.llm._engine)
        self._idle = DeviceIdle(bench.llm._engine._executor) if torch.cuda.is_available() else None

    def clear(self) -> None:
        self._phases.clear()
        if self._idle is not None:
            self._idle.clear()

    def print(self) -> None:
        if self._idle is not None:
            print(self._idle.describe())
        print(*self._phases.describe(), sep="\n", flush=True)


# --- Cases ------------------------------------------------------------------------------------------------------------


def measure_all(
    bench: Bench, params: SamplingParams, rows: int, steps: int, rounds: int, breakdown: Breakdown | None = None
) -> dict[str, Speed]:
    """Return the median speeds over all rounds, by case."""
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
    for structures in cases.values():  # compile the schemas, so that later all sequences start together
        run(bench, structures, params, 1)
    for _ in range(rounds):
        for case, structures in cases.items():
            structured_output.fast_forward = case.endswith(FAST_FORWARD)
            if breakdown is not None:
                breakdown.clear()
            speed = measure(bench, structures, params, steps)
            found[case].append(speed)
            print(f"  {case:24}  {speed.step_ms:7.3f} ms per step, {speed.token_ms:7.3f} ms per token", flush=True)
            if breakdown is not None:
                breakdown.print()
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
    parser.add_argument("--phases", action="store_true", help="print where the time goes, which takes time too")
    args = parser.parse_args()
    set_gil_switch_interval()  # as the engine process does
    rows, steps, rounds = (SHORT_ROWS, SHORT_STEPS, SHORT_ROUNDS) if args.tiny else (ROWS, STEPS, ROUNDS)
    steps, rounds = args.steps or steps, args.rounds or rounds
    print(f"{describe_device()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    records: list[Record] = []
    with open_bench(args, [], max_length=MAX_LENGTH) as bench:
        breakdown = Breakdown(bench) if args.phases else None
        for name, params in (("greedy", SamplingParams()), ("top-p 0.9", SAMPLED)):
            print(f"{rows} rows, {name}")
            speeds = measure_all(bench, params, rows, steps, rounds, breakdown)
            records += describe(f"{rows} rows, {name}", speeds, args.tiny)
    report(records, args.json)


if __name__ == "__main__":
    main()
