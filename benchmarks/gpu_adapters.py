"""Adapters beyond memory: 1,000 of rank 8 in host memory, room for 200 on the GPU, requests by Zipf's law.

The model has the 8B shape, with random weights; the adapters have contents of their own and are made in host memory (42
GB), since files would take longer to write. 64 requests are under way at any time: 128 tokens each, answers of 32 to
128. The same traffic with one adapter for all is the measure. Steps are timed from one result to the next:

- the longest gap of all steps, against that of the run with one adapter: both have prompts in some steps;
- the longest gap of steps that only decode while adapters are copied, against the median of those that only decode.

Then adapters that are files in the page cache join 64 running requests, one after the other. Their gaps go from the
moment they are named to their first token. The step that computes the prompt stands apart: any prompt takes time.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from adapter_pool import HostPool, Step, Watch, make_hosts, name_of
from gpu_model import LLAMA_8B, TINY, ModelShape, make_adapters, make_model
from report import Record, report

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.build import assemble
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.distributed import FakeGroup
from lorax_server.engine.engine import Engine
from lorax_server.models.registry import get_model
from lorax_server.process_tuning import set_gil_switch_interval, tune_gc
from lorax_server.types import AdapterRef, Request, SampledToken, SamplingParams, StopParams
from lorax_server.worker.worker import paged_worker

AT_ONCE, PROMPT = 64, 128
COLD, COLD_RANK, CHECKED = 5, 16, 6
SHM = Path("/dev/shm")


class Scale(NamedTuple):
    """The size of everything."""

    shape: ModelShape
    device: str
    adapters: int = 1000
    places: int = 200
    rank: int = 8
    warm_up: int = 200  # requests before those that are measured
    requests: int = 1500
    shortest: int = 32  # answer
    longest: int = 128


LARGE = Scale(LLAMA_8B, "cuda:0")
SMALL = Scale(TINY, "cpu", adapters=120, places=70, warm_up=80, requests=80, shortest=24, longest=80)


# --- An engine with adapters in host memory ---------------------------------------------------------------------------


def make_engine(folder: Path, scale: Scale) -> tuple[Engine, Watch]:
    settings = ModelConfig(folder / "model", device=scale.device)
    model = get_model(settings, FakeGroup())
    hosts = make_hosts(model, scale.adapters, scale.rank)
    num_bytes = hosts[0].buffer.nbytes
    cold_bytes = 2 * COLD * num_bytes * COLD_RANK // scale.rank
    config = EngineConfig(
        settings,
        max_rows=AT_ONCE + 1,
        max_length=1024,
        cache_bytes=(AT_ONCE + 1) * 1024 * model.num_layers * 2 * model.kv_shape[0] * model.kv_shape[1] * 4,
        adapter_bytes=num_bytes * scale.places,
        adapter_host_bytes=num_bytes * scale.adapters + cold_bytes,
        sources=SourceConfig((folder / "adapters",)),
    )
    worker = paged_worker(model, config, FakeGroup())
    assert worker.preparer is not None
    worker.preparer.close()
    worker.preparer = HostPool(model, hosts)
    watch = Watch(worker)
    engine = assemble(config, watch)
    for adapter in range(scale.adapters):
        engine._table.register(AdapterSpec(name_of(adapter), name_of(adapter), (), 1))
    while engine.status().adapters_on_host < scale.adapters:
        engine.step()
    return engine, watch


# --- Traffic ----------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What requests ask for, and what became of them, by number."""

    prompts: list[list[int]]
    lengths: list[int]
    adapters: list[str]
    came: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)


@dataclass
class Result:
    """One run, from the first measured request to the last."""

    tokens_per_s: float
    first_tokens: list[float]  # milliseconds
    steps: list[Step]
    loads: int

    def quantile(self, percent: int) -> float:
        return statistics.quantiles(self.first_tokens, n=100)[percent - 1]

    def find_gaps(self, only_decode: bool, only_loading: bool = False) -> list[float]:
        """Return the milliseconds of steps; of those that only decode, of nearly full batches."""
        steps: Iterable[Step] = self.steps
        if only_decode:
            steps = [step for step in steps if not step.has_prompt and step.rows > AT_ONCE - 8]
        return [step.gap * 1e3 for step in steps if step.is_loading or not only_loading]


def make_traffic(scale: Scale, num_adapters: int) -> Traffic:
    """Draw requests. Lengths do not depend on the number of adapters; prompts do, or the cache would have them."""
    chance, count = random.Random(num_adapters), scale.warm_up + scale.requests + AT_ONCE
    prompts = [[chance.randrange(scale.shape.vocab_size // 2) for _ in range(PROMPT)] for _ in range(count)]
    chance = random.Random(0)
    lengths = [chance.randint(scale.shortest, scale.longest) for _ in range(count)]
    chosen = chance.choices(range(num_adapters), [1 / (i + 1) for i in range(num_adapters)], k=count)
    return Traffic(prompts, lengths, [name_of(adapter) for adapter in chosen])


def make_request(number: int, prompt: list[int], length: int, identity: str) -> Request:
    stop = StopParams(max_new_tokens=length, ignore_eos=True)
    return Request(number, prompt, SamplingParams(), stop, adapter_identity=identity, tenant=identity)


def serve(engine: Engine, watch: Watch, scale: Scale, traffic: Traffic, first_id: int) -> Result:
    """Keep `AT_ONCE` requests under way until all of the measured ones have been added."""
    num_added = num_done = num_tokens = first_step = loads = 0
    start = 0.0
    while num_added < scale.warm_up + scale.requests:
        while num_added - num_done < AT_ONCE:
            if num_added == scale.warm_up:
                start, first_step, num_tokens = time.perf_counter(), watch.num_ended, 0
                loads = engine.status().adapters_loaded
            wanted = traffic.prompts[num_added], traffic.lengths[num_added], traffic.adapters[num_added]
            traffic.came[num_added] = time.perf_counter()
            engine.add(make_request(first_id + num_added, *wanted))
            num_added += 1
        for output in engine.step():
            assert output.failure is None, output.failure
            number = output.request_id - first_id
            traffic.first.setdefault(number, time.perf_counter())
            traffic.tokens.setdefault(number, []).extend(output.tokens)
            num_tokens += len(output.tokens)
            num_done += output.finish_reason is not None
    seconds, loads = time.perf_counter() - start, engine.status().adapters_loaded - loads
    steps = watch.steps[first_step : watch.num_ended]
    abort(engine, first_id, num_added)
    measured = [number for number in traffic.first if number >= scale.warm_up]
    first_tokens = [(traffic.first[number] - traffic.came[number]) * 1e3 for number in measured]
    return Result(num_tokens / seconds, first_tokens, steps, loads)


def abort(engine: Engine, first_id: int, count: int) -> None:
    for number in range(count):
        engine.abort(first_id + number)
    while engine.is_busy:
        engine.step()


def fill_places(engine: Engine, scale: Scale) -> None:
    """Load the most wanted adapters, as they would be after a while."""
    loads = [engine.load(name_of(adapter)) for adapter in range(scale.places)]
    while not all(load.done() for load in loads):
        engine.wait()
        engine.step()


def score(engine: Engine, number: int, tokens: list[int], identity: str) -> list[float]:
    """Return the log probabilities of tokens alone, without a cache of what was computed before."""
    stop = StopParams(max_new_tokens=1, ignore_eos=True)
    engine.add(Request(number, tokens, SamplingParams(), stop, identity, salt=str(number), prompt_logprobs=True))
    scores: list[float] = []
    while engine.has_work:
        for output in engine.step():
            assert output.failure is None, output.failure
            scores += output.prompt_logprobs or []
    return scores


def check_alone(engine: Engine, scale: Scale, traffic: Traffic, first_id: int) -> list[Record]:
    """Compare log probabilities of some answers with those alone: by the same adapter, and by another."""
    ended = [number for number, tokens in traffic.tokens.items() if len(tokens) == traffic.lengths[number]]
    measured = [number for number in ended if number >= scale.warm_up]
    differences: tuple[list[float], list[float]] = [], []
    for i, number in enumerate(measured[:: max(1, len(measured) // CHECKED)][:CHECKED]):
        right, wrong = traffic.adapters[number], name_of(scale.adapters - 1 - i)
        tokens = traffic.prompts[number] + [token.token_id for token in traffic.tokens[number]]
        found = [token.logprob for token in traffic.tokens[number]]
        for j, identity in enumerate((right, wrong)):
            alone = score(engine, first_id + 2 * i + j, tokens, identity)[-len(found) :]
            differences[j].append(statistics.fmean(abs(x - y) for x, y in zip(found, alone, strict=True)))
    worst, least, usual = max(differences[0]), min(differences[1]), "mean difference of log probabilities to that alone"
    return [
        Record(f"{CHECKED} answers: {usual}, worst", worst, "", "", None),
        Record("the same if computed with another adapter, least", least, "", "", None),
        Record("worst difference", worst / least, "x", "another adapter", 0.5, at_most=True),
    ]


# --- A cold adapter ---------------------------------------------------------------------------------------------------


class Cold(NamedTuple):
    """One cold adapter that joined: milliseconds to its first token, and of gaps until then."""

    first_token: float
    longest_gap: float
    prompt_gap: float


def join(engine: Engine, watch: Watch, name: str, number: int, prompt: list[int]) -> Cold:
    """Name an adapter that is only in files while other requests run; return when it has given a token."""
    begin, first_step = time.perf_counter(), watch.num_ended
    found, is_added, is_there = engine.resolve([AdapterRef("local", name)]), False, False
    while not is_there:
        if found.done() and not is_added:
            engine.add(make_request(number, prompt, 4, found.result().identity))
            is_added = True
        for output in engine.step():
            assert output.failure is None, output.failure
            is_there |= output.request_id == number
    seconds, steps = time.perf_counter() - begin, watch.steps[first_step : watch.num_ended]
    for _ in range(10):  # to its end: with one row more, steps are longer
        engine.step()
    gaps = [step.gap * 1e3 for step in steps if not step.has_prompt]
    return Cold(seconds * 1e3, max(gaps), max(step.gap * 1e3 for step in steps if step.has_prompt))


def join_all(
    engine: Engine, watch: Watch, scale: Scale, names: Sequence[str], first_id: int
) -> tuple[float, list[Cold]]:
    """Run 64 requests of 64 adapters, and let cold adapters join. Return the median step before, in milliseconds."""
    prompts = [[(i * 31 + j) % 500 + 3 for j in range(PROMPT)] for i in range(AT_ONCE + len(names))]
    for i in range(AT_ONCE):
        engine.add(make_request(first_id + i, prompts[i], 1024 - PROMPT, name_of(i % (scale.places // 2))))
    while engine.status().running < AT_ONCE:
        engine.step()
    for _ in range(60):
        engine.step()
    median = statistics.median(step.gap * 1e3 for step in watch.steps[watch.num_ended - 40 : watch.num_ended])
    colds = [join(engine, watch, name, first_id + AT_ONCE + i, prompts[AT_ONCE + i]) for i, name in enumerate(names)]
    abort(engine, first_id, AT_ONCE + len(names))
    return median, colds


# --- The report -------------------------------------------------------------------------------------------------------


def compare(scale: Scale, one: Result, many: Result) -> list[Record]:
    names, peer = ("one adapter", f"{scale.adapters} adapters"), "one adapter"
    records = []
    for name, run in zip(names, (one, many), strict=True):
        records += [
            Record(f"{name}: tokens per second", run.tokens_per_s, "1/s", "", None),
            Record(f"{name}: P50 time to first token", run.quantile(50), "ms", "", None),
            Record(f"{name}: P99 time to first token", run.quantile(99), "ms", "", None),
            Record(f"{name}: median gap of all steps", statistics.median(run.find_gaps(False)), "ms", "", None),
            Record(f"{name}: longest gap of all steps", max(run.find_gaps(False)), "ms", "", None),
            Record(f"{name}: median gap, only decoding", statistics.median(run.find_gaps(True)), "ms", "", None),
            Record(f"{name}: longest gap, only decoding", max(run.find_gaps(True)), "ms", "", None),
            Record(f"{name}: adapters copied to the device", run.loads, "", "", None),
        ]
    median, loading = statistics.median(many.find_gaps(True)), many.find_gaps(True, only_loading=True)
    longest, late = (max(run.find_gaps(False)) for run in (many, one)), (run.quantile(99) for run in (many, one))
    return [
        *records,
        Record("throughput", many.tokens_per_s / one.tokens_per_s, "x", peer, 0.9),
        Record("P99 time to first token", next(late) / next(late), "x", peer, 2.0, at_most=True),
        Record("longest gap of all steps", next(longest) / next(longest), "x", peer, 1.3, at_most=True),
        Record("steps that only decode while adapters are copied", len(loading), "", "", None),
        Record("their longest gap", max(loading, default=0.0) / median, "x", "the median step", 1.3, at_most=True),
    ]


def describe_cold(median: float, colds: Sequence[Cold]) -> list[Record]:
    worst, usual = max(cold.longest_gap for cold in colds), statistics.median(cold.longest_gap for cold in colds)
    prompt = statistics.median(cold.prompt_gap for cold in colds)
    first = statistics.median(cold.first_token for cold in colds)
    return [
        Record("64 running: median step", median, "ms", "", None),
        Record(f"a cold adapter joins them: time to first token, median of {len(colds)}", first, "ms", "", None),
        Record("its longest gap, median", usual / median, "x", "the median step", None),
        Record("its longest gap, worst", worst / median, "x", "the median step", 1.3, at_most=True),
        Record("the step with its prompt, median", prompt / median, "x", "the median step", None),
    ]


def print_run(run: Result) -> None:
    """Print the throughput and the longest steps."""
    print(f"{run.tokens_per_s:.0f} tokens/s, {run.loads} adapters copied; the longest steps:", end=" ")
    for step in sorted(run.steps, key=lambda step: -step.gap)[:6]:
        notes = [f"{step.rows} rows", *["prompt"] * step.has_prompt, *["copy"] * step.is_loading]
        print(f"{step.gap * 1e3:.1f} ms ({', '.join(notes)})", end="; ")
    print(flush=True)


def measure(folder: Path, scale: Scale) -> list[Record]:
    begin = time.monotonic()
    make_model(folder / "model", scale.shape)
    names = make_adapters(folder / "adapters", scale.shape, COLD, COLD_RANK)
    made = time.monotonic()
    engine, watch = make_engine(folder, scale)
    tune_gc()
    print(f"files in {made - begin:.0f} s, engine in {time.monotonic() - made:.0f} s", flush=True)
    runs = []
    for run, num_adapters in enumerate((1, scale.adapters)):
        if num_adapters > 1:
            fill_places(engine, scale)
        traffic = make_traffic(scale, num_adapters)
        runs.append(serve(engine, watch, scale, traffic, run * 10**6))
        print_run(runs[-1])
    checks = check_alone(engine, scale, traffic, 2 * 10**6)
    median, colds = join_all(engine, watch, scale, names, 3 * 10**6)
    engine.close()
    return [*compare(scale, *runs), *checks, *describe_cold(median, colds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to see that all works")
    args = parser.parse_args()
    set_gil_switch_interval()  # as in a process of its own
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        records = measure(Path(folder), SMALL if args.tiny else LARGE)
    report(records, args.json)


if __name__ == "__main__":
    main()
