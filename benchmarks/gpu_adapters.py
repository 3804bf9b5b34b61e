"""Measure more adapters than fit on a GPU: 1,000 rank-8 adapters in host memory, GPU memory for 200, and Zipf traffic.

The model has the shape of Llama-3.1-8B with random weights. The adapters are created in host memory (42 GB), because
files would take longer to write. 64 requests are in flight, with prompts of 128 tokens and completions of 32 to 128.
The peer is the same traffic with one adapter for all requests. The time between step results is reported for all steps,
and for steps that only decode while adapters are copied.

Then requests for cold adapters, whose files are in the page cache, arrive one after the other while 64 requests run.
Step times are measured from each request to its first token, without the step that computes the prompt.
"""

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.adapter_pool import HostPool, Step, StepRecorder, make_hosts, name_of
from harness.files import LLAMA_8B, TINY, ModelShape, make_adapters, make_model, scratch_folder
from harness.report import Record, make_parser, percentile, report

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.distributed import FakeGroup
from lorax_server.engine.engine import Engine
from lorax_server.models.registry import get_model
from lorax_server.process_tuning import set_gil_switch_interval, tune_gc
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams
from lorax_server.worker.worker import build_paged_worker

MAX_CONCURRENCY, PROMPT = 64, 128
NUM_COLD_ADAPTERS, COLD_ADAPTER_RANK = 5, 16


class Scale(NamedTuple):
    """Model size and load."""

    shape: ModelShape
    device: str
    adapters: int = 1000
    num_device_adapters: int = 200
    rank: int = 8
    warm_up: int = 200  # requests before the measurement
    requests: int = 1500
    min_tokens: int = 32  # completion
    max_tokens: int = 128


LARGE = Scale(LLAMA_8B, "cuda:0")
SMALL = Scale(TINY, "cpu", adapters=120, num_device_adapters=70, warm_up=80, requests=80, min_tokens=24, max_tokens=80)


# --- An engine with adapters in host memory ---------------------------------------------------------------------------


def make_engine(folder: Path, scale: Scale) -> tuple[Engine, StepRecorder]:
    settings = ModelConfig(folder / "model", device=scale.device)
    model = get_model(settings, FakeGroup())
    hosts = make_hosts(model, scale.adapters, scale.rank)
    num_bytes = hosts[0].buffer.nbytes
    cold_bytes = 2 * NUM_COLD_ADAPTERS * num_bytes * COLD_ADAPTER_RANK // scale.rank
    config = EngineConfig(
        settings,
        max_num_seqs=MAX_CONCURRENCY + 1,
        max_length=1024,
        cache_bytes=(MAX_CONCURRENCY + 1) * 1024 * model.num_layers * 2 * model.kv_shape[0] * model.kv_shape[1] * 4,
        adapter_bytes=num_bytes * scale.num_device_adapters,
        adapter_host_bytes=num_bytes * scale.adapters + cold_bytes,
        sources=SourceConfig((folder / "adapters",)),
    )
    worker = build_paged_worker(model, config, FakeGroup())
    assert worker.preparer is not None
    worker.preparer.close()
    worker.preparer = HostPool(model, hosts)
    recorder = StepRecorder(worker)
    engine = assemble_engine(config, recorder)
    for adapter in range(scale.adapters):
        engine._table.register(AdapterSpec(name_of(adapter), name_of(adapter), (), 1))
    while engine.status().adapters_on_host < scale.adapters:
        engine.step()
    return engine, recorder


# --- Traffic ----------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """The requests, and their arrival and first token times, keyed by request number."""

    prompts: list[list[int]]
    lengths: list[int]
    adapters: list[str]
    arrival_times: dict[int, float] = field(default_factory=dict)
    first_token_times: dict[int, float] = field(default_factory=dict)


@dataclass
class Result:
    """The result of one run, without the warm-up."""

    tokens_per_s: float
    first_tokens: list[float]  # milliseconds
    steps: list[Step]
    loads: int

    def step_times_ms(self, only_decode: bool, only_loading: bool = False) -> list[float]:
        """Return step times in milliseconds. `only_decode` also requires a nearly full batch."""
        steps: Iterable[Step] = self.steps
        if only_decode:
            steps = [step for step in steps if not step.has_prompt and step.rows > MAX_CONCURRENCY - 8]
        return [step.duration_s * 1e3 for step in steps if step.is_loading or not only_loading]


def make_traffic(scale: Scale, num_adapters: int) -> Traffic:
    """Draw requests. Prompts differ for each value of `num_adapters`, so that runs share no cached prefixes."""
    rng, count = random.Random(num_adapters), scale.warm_up + scale.requests + MAX_CONCURRENCY
    prompts = [[rng.randrange(scale.shape.vocab_size // 2) for _ in range(PROMPT)] for _ in range(count)]
    rng = random.Random(0)
    lengths = [rng.randint(scale.min_tokens, scale.max_tokens) for _ in range(count)]
    chosen = rng.choices(range(num_adapters), [1 / (i + 1) for i in range(num_adapters)], k=count)
    return Traffic(prompts, lengths, [name_of(adapter) for adapter in chosen])


def make_request(number: int, prompt: list[int], length: int, identity: str) -> Request:
    stop = StopParams(max_new_tokens=length, ignore_eos=True)
    return Request(number, prompt, SamplingParams(), stop, adapter_identity=identity, tenant=identity)


def serve(engine: Engine, recorder: StepRecorder, scale: Scale, traffic: Traffic, first_id: int) -> Result:
    """Keep `MAX_CONCURRENCY` requests in flight until all measured requests have been added."""
    num_added = num_done = num_tokens = first_step = loads = 0
    start = 0.0
    while num_added < scale.warm_up + scale.requests:
        while num_added - num_done < MAX_CONCURRENCY:
            if num_added == scale.warm_up:
                start, first_step, num_tokens = time.perf_counter(), recorder.num_finished, 0
                loads = engine.status().adapters_loaded
            request = traffic.prompts[num_added], traffic.lengths[num_added], traffic.adapters[num_added]
            traffic.arrival_times[num_added] = time.perf_counter()
            engine.add(make_request(first_id + num_added, *request))
            num_added += 1
        for output in engine.step():
            assert output.failure is None, output.failure
            number = output.request_id - first_id
            traffic.first_token_times.setdefault(number, time.perf_counter())
            num_tokens += len(output.tokens)
            num_done += output.finish_reason is not None
    seconds, loads = time.perf_counter() - start, engine.status().adapters_loaded - loads
    steps = recorder.steps[first_step : recorder.num_finished]
    abort(engine, first_id, num_added)
    measured = [number for number in traffic.first_token_times if number >= scale.warm_up]
    first_tokens = [(traffic.first_token_times[number] - traffic.arrival_times[number]) * 1e3 for number in measured]
    return Result(num_tokens / seconds, first_tokens, steps, loads)


def abort(engine: Engine, first_id: int, count: int) -> None:
    for number in range(count):
        engine.abort(first_id + number)
    while engine.is_busy:
        engine.step()


def load_popular_adapters(engine: Engine, scale: Scale) -> None:
    """Load the most popular adapters."""
    loads = [engine.load(name_of(adapter)) for adapter in range(scale.num_device_adapters)]
    while not all(load.done() for load in loads):
        engine.wait()
        engine.step()


# --- A cold adapter ---------------------------------------------------------------------------------------------------


class ColdAdapterResult(NamedTuple):
    """Time to first token with a cold adapter, and the longest step times for other sequences, in milliseconds."""

    first_token_ms: float
    longest_step_ms: float
    prompt_step_ms: float


def request_cold_adapter(
    engine: Engine, recorder: StepRecorder, name: str, number: int, prompt: list[int]
) -> ColdAdapterResult:
    """Request an adapter that is only on disk while other requests run. Return after its first token."""
    start_time, first_step = time.perf_counter(), recorder.num_finished
    found, is_added, has_first_token = engine.resolve([AdapterRef("local", name)]), False, False
    while not has_first_token:
        if found.done() and not is_added:
            engine.add(make_request(number, prompt, 4, found.result().identity))
            is_added = True
        for output in engine.step():
            assert output.failure is None, output.failure
            has_first_token |= output.request_id == number
    seconds, steps = time.perf_counter() - start_time, recorder.steps[first_step : recorder.num_finished]
    for _ in range(10):  # until it finishes, because steps with one more sequence are longer
        engine.step()
    step_times = [step.duration_s * 1e3 for step in steps if not step.has_prompt]
    return ColdAdapterResult(
        seconds * 1e3, max(step_times), max(step.duration_s * 1e3 for step in steps if step.has_prompt)
    )


def measure_cold_adapters(
    engine: Engine, recorder: StepRecorder, scale: Scale, names: Sequence[str], first_id: int
) -> tuple[float, list[ColdAdapterResult]]:
    """Run 64 requests, then request cold adapters. Return the median step time before them, in milliseconds."""
    prompts = [[(i * 31 + j) % 500 + 3 for j in range(PROMPT)] for i in range(MAX_CONCURRENCY + len(names))]
    for i in range(MAX_CONCURRENCY):
        engine.add(make_request(first_id + i, prompts[i], 1024 - PROMPT, name_of(i % (scale.num_device_adapters // 2))))
    while engine.status().running < MAX_CONCURRENCY:
        engine.step()
    for _ in range(60):
        engine.step()
    median = statistics.median(
        step.duration_s * 1e3 for step in recorder.steps[recorder.num_finished - 40 : recorder.num_finished]
    )
    results = [
        request_cold_adapter(engine, recorder, name, first_id + MAX_CONCURRENCY + i, prompts[MAX_CONCURRENCY + i])
        for i, name in enumerate(names)
    ]
    abort(engine, first_id, MAX_CONCURRENCY + len(names))
    return median, results


# --- Report -----------------------------------------------------------------------------------------------------------


def compare(scale: Scale, one_adapter: Result, many_adapters: Result) -> list[Record]:
    names, peer = ("one adapter", f"{scale.adapters} adapters"), "one adapter"
    records = []
    for name, run in zip(names, (one_adapter, many_adapters), strict=True):
        records += [
            Record(f"{name}: tokens per second", run.tokens_per_s, "1/s"),
            Record(f"{name}: P50 time to first token", percentile(run.first_tokens, 0.5), "ms"),
            Record(f"{name}: P99 time to first token", percentile(run.first_tokens, 0.99), "ms"),
            Record(f"{name}: median step", statistics.median(run.step_times_ms(False)), "ms"),
            Record(f"{name}: longest step", max(run.step_times_ms(False)), "ms"),
            Record(f"{name}: median decode step", statistics.median(run.step_times_ms(True)), "ms"),
            Record(f"{name}: longest decode step", max(run.step_times_ms(True)), "ms"),
            Record(f"{name}: adapters copied to the device", run.loads, ""),
        ]
    median, loading = (
        statistics.median(many_adapters.step_times_ms(True)),
        many_adapters.step_times_ms(True, only_loading=True),
    )
    longest_step_ratio = max(many_adapters.step_times_ms(False)) / max(one_adapter.step_times_ms(False))
    latency_ratio = percentile(many_adapters.first_tokens, 0.99) / percentile(one_adapter.first_tokens, 0.99)
    return [
        *records,
        Record("throughput", many_adapters.tokens_per_s / one_adapter.tokens_per_s, "x", peer, 0.9),
        Record("P99 time to first token", latency_ratio, "x", peer, 2.0, at_most=True),
        Record("longest step", longest_step_ratio, "x", peer, 1.3, at_most=True),
        Record("decode steps while adapters are copied", len(loading), ""),
        Record("longest of these steps", max(loading, default=0.0) / median, "x", "the median step", 1.3, at_most=True),
    ]


def make_cold_adapter_records(median: float, results: Sequence[ColdAdapterResult]) -> list[Record]:
    worst, typical = (
        max(result.longest_step_ms for result in results),
        statistics.median(result.longest_step_ms for result in results),
    )
    prompt = statistics.median(result.prompt_step_ms for result in results)
    first_token_times = statistics.median(result.first_token_ms for result in results)
    return [
        Record("64 requests: median step", median, "ms"),
        Record(f"cold adapter: time to first token, median of {len(results)}", first_token_times, "ms"),
        Record("cold adapter: longest step, median", typical / median, "x", "the median step"),
        Record("cold adapter: longest step, worst", worst / median, "x", "the median step", 1.3, at_most=True),
        Record("cold adapter: step with its prompt, median", prompt / median, "x", "the median step"),
    ]


def measure(folder: Path, scale: Scale) -> list[Record]:
    start_time = time.monotonic()
    make_model(folder / "model", scale.shape)
    names = make_adapters(folder / "adapters", scale.shape, NUM_COLD_ADAPTERS, COLD_ADAPTER_RANK)
    files_done = time.monotonic()
    engine, recorder = make_engine(folder, scale)
    tune_gc()
    print(f"files in {files_done - start_time:.0f} s, engine in {time.monotonic() - files_done:.0f} s", flush=True)
    runs = []
    for run, num_adapters in enumerate((1, scale.adapters)):
        if num_adapters > 1:
            load_popular_adapters(engine, scale)
        runs.append(serve(engine, recorder, scale, make_traffic(scale, num_adapters), run * 10**6))
        print(f"{num_adapters} adapters: {runs[-1].tokens_per_s:.0f} tokens/s", flush=True)
    median, results = measure_cold_adapters(engine, recorder, scale, names, 2 * 10**6)
    engine.close()
    return [*compare(scale, *runs), *make_cold_adapter_records(median, results)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU, only to see that it runs")
    args = parser.parse_args()
    set_gil_switch_interval()  # as the engine process does
    with scratch_folder() as folder:
        records = measure(folder, SMALL if args.tiny else LARGE)
    report(records, args.json)


if __name__ == "__main__":
    main()
