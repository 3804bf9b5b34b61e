"""Compare the HTTP server with `LLM`, for streams with the Llama-3.1-8B shape and 64 adapters on one GPU.

`LLM` runs in a separate process first. Then `lorax serve` receives the same requests with the same settings from
several client processes (`harness/http_client.py`). The number of requests in flight is constant. Prompts have 128
tokens, and completions have 128 to 256 tokens. All adapters have been used before the measurement. The middle of each
run is measured, from 30% to 75% of all tokens, because all prompts arrive together at the start. Weights are random, in
bfloat16.
"""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from harness.files import LLAMA_8B, TINY, make_adapters, make_model, scratch_folder
from harness.report import Record, make_parser, percentile, report
from harness.server import LETTERS, LoadRequest, check_complete, local_flags, serving

from lorax_server.llm import LLM
from lorax_server.types import StopParams

MIN_THROUGHPUT_RATIO = 0.95
MEASURED_FROM, MEASURED_TO = 0.3, 0.75  # measured part, as shares of all tokens
MAX_LENGTH, RANK = 1024, 16
ROUNDS = 3  # requests per request in flight


@dataclass(frozen=True)
class Setup:
    """A run's model folder, device and load."""

    folder: Path
    streams: Sequence[int]
    clients: int
    device: str = "cuda"
    adapters: int = 64
    prompt: int = 128
    completion_tokens: tuple[int, int] = (128, 256)

    @property
    def settings(self) -> dict[str, Any]:
        """Engine settings, named as in `EngineConfig`."""
        rows = {"device": self.device, "max_num_seqs": max(self.streams), "max_length": MAX_LENGTH}
        return {**rows, "cache_bytes": 2**28, "adapter_bytes": 2**26} if self.device == "cpu" else rows

    @property
    def flags(self) -> dict[str, object]:
        """The same settings as flags of `lorax serve`."""
        names = {"max_length": "max-total-tokens"}
        return {names.get(name, name).replace("_", "-"): value for name, value in self.settings.items()}


class RunMetrics(NamedTuple):
    """Throughput and latencies in the measured part of a run."""

    tokens_per_s: float
    inter_token_latencies: list[float]  # seconds between stream tokens or engine steps
    first_token_latencies: list[float]  # seconds to first token
    api_us: float = 0.0  # CPU time per token of the whole run


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny model on the CPU, only to see that it runs")
    parser.add_argument("--streams", type=int, nargs="+", metavar="N", help="requests in flight (default: 256 64)")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="client processes (%(default)s)")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="for temporary files")
    args = parser.parse_args()
    with scratch_folder(args.folder) as folder:
        shape, setup = LLAMA_8B, Setup(folder, args.streams or (256, 64), args.clients)
        if args.tiny:
            shape, setup = TINY, Setup(folder, args.streams or (16, 8), 2, "cpu", 4, 16, (8, 16))
        make_model(folder / "model", shape)
        make_adapters(folder / "adapters", shape, setup.adapters, RANK)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            llm_metrics = process.submit(measure_llm, setup).result()
        server_metrics = measure_server(setup)
    report(
        [record for count in setup.streams for record in compare(count, llm_metrics[count], server_metrics[count])],
        args.json,
    )


def make_load(setup: Setup, count: int, seed: int) -> list[LoadRequest]:
    """Return the requests of one run. The tokenizer adds one token to each prompt."""
    rng = random.Random(seed)
    return [
        LoadRequest(
            "".join(rng.choices(LETTERS, k=setup.prompt - 1)),
            f"adapter-{number % setup.adapters:03}",
            rng.randint(*setup.completion_tokens),
        )
        for number in range(count)
    ]


def make_warm_up(setup: Setup, max_concurrency: int) -> list[LoadRequest]:
    """Return short requests for all adapters."""
    load = make_load(setup, max(max_concurrency, setup.adapters), seed=-1)
    return [LoadRequest(request.prompt, request.adapter, 4) for request in load]


def find_measured_part(arrivals: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """Return the start, the end and the token count of the measured part. `arrivals` are sorted times and
    token counts.
    """
    total, so_far, start_time = sum(count for _, count in arrivals), 0, None
    tokens_at_start = 0
    for timestamp, count in arrivals:
        so_far += count
        if start_time is None and so_far >= MEASURED_FROM * total:
            start_time, tokens_at_start = timestamp, so_far
        if start_time is not None and so_far >= MEASURED_TO * total:
            return start_time, timestamp, so_far - tokens_at_start
    raise ValueError("no tokens arrived")


def measure_llm(setup: Setup) -> dict[int, RunMetrics]:
    with LLM(setup.folder / "model", setup.folder / "adapters", **setup.settings) as llm:
        found = {}
        for count in setup.streams:
            run_llm(llm, make_warm_up(setup, count), count)
            found[count] = run_llm(llm, make_load(setup, ROUNDS * count, seed=count), count)
            print(f"{count} concurrent requests, LLM: {found[count].tokens_per_s:.0f} tokens/s", flush=True)
        return found


def run_llm(llm: LLM, load: Sequence[LoadRequest], max_concurrency: int) -> RunMetrics:
    """Keep `max_concurrency` requests in flight, using the internal methods of `LLM`."""
    names = sorted({request.adapter for request in load if request.adapter})
    resolved = dict(zip(names, llm._resolve_all(names, "raise"), strict=True))
    remaining = iter(load)
    runs: list[Any] = []
    steps: list[tuple[float, int]] = []
    num_tokens = llm.status.generated_tokens
    while True:
        num_finished = llm._num_finished
        runs = [run for run in runs if not run.is_done]
        while len(runs) < max_concurrency and (request := next(remaining, None)) is not None:
            stop = StopParams(max_new_tokens=request.answer, ignore_eos=True)
            runs.append(llm._make_generation(request.prompt, resolved[request.adapter or ""], None, stop, None, False))
            llm._start(runs[-1], "raise")
        if not runs:
            break
        while num_finished == llm._num_finished:
            llm._step()
            so_far = llm.status.generated_tokens
            steps.append((time.perf_counter(), so_far - num_tokens))
            num_tokens = so_far
    steps = [(timestamp, count) for timestamp, count in steps if count]
    start_time, end_time, tokens = find_measured_part(steps)
    inter_token_latencies = [
        after - before for (before, _), (after, _) in pairwise(steps) if start_time <= before < end_time
    ]
    return RunMetrics(tokens / (end_time - start_time), inter_token_latencies, [])


def measure_server(setup: Setup) -> dict[int, RunMetrics]:
    with serving(setup.folder / "log", local_flags(setup.folder) | setup.flags) as server:
        found = {}
        for count in setup.streams:
            server.send(make_warm_up(setup, count), count, num_clients=setup.clients)
            load, cpu_s = make_load(setup, ROUNDS * count, seed=count), server.api_cpu_s()
            results = server.send(load, count, num_clients=setup.clients)
            check_complete(load, results)
            cpu_s = server.api_cpu_s() - cpu_s
            found[count] = compute_metrics(results)._replace(
                api_us=cpu_s / sum(request.answer for request in load) * 1e6
            )
            print(f"{count} concurrent requests, over HTTP: {found[count].tokens_per_s:.0f} tokens/s", flush=True)
        return found


def compute_metrics(results: Sequence[dict[str, Any]]) -> RunMetrics:
    """Compute throughput and latencies from the streams of all clients. All clients use the same clock."""
    streams = [(result["start"], sample) for result in results for sample in result["samples"]]
    arrivals = sorted((start + at, count) for start, sample in streams for at, count in sample["arrivals"])
    start_time, end_time, tokens = find_measured_part(arrivals)
    inter_token_latencies, first_token_latencies = [], []
    for start, sample in streams:
        if start_time <= start + sample["sent_s"] < end_time:
            first_token_latencies.append(sample["first_s"] - sample["sent_s"])
        for (before, _), (at, count) in pairwise(sample["arrivals"]):
            if start_time <= start + before < end_time:
                inter_token_latencies += [at - before] + [0.0] * (count - 1)
    return RunMetrics(tokens / (end_time - start_time), inter_token_latencies, first_token_latencies)


def compare(count: int, llm_metrics: RunMetrics, server_metrics: RunMetrics) -> list[Record]:
    name, ratio = f"{count} streams", server_metrics.tokens_per_s / llm_metrics.tokens_per_s

    def ms(what: str, values: list[float], part: float) -> Record:
        return Record(f"{name}: {what}", percentile(values, part) * 1e3, "ms")

    return [
        Record(f"{name}: tokens over HTTP", server_metrics.tokens_per_s, "1/s"),
        Record(f"{name}: tokens by LLM", llm_metrics.tokens_per_s, "1/s"),
        Record(f"{name}: server throughput relative to LLM", ratio, "of 1", "LLM", MIN_THROUGHPUT_RATIO),
        ms("P50 between tokens", server_metrics.inter_token_latencies, 0.5),
        ms("P99 between tokens", server_metrics.inter_token_latencies, 0.99),
        ms("longest time between tokens", server_metrics.inter_token_latencies, 1.0),
        ms("P50 engine step, LLM", llm_metrics.inter_token_latencies, 0.5),
        ms("P99 engine step, LLM", llm_metrics.inter_token_latencies, 0.99),
        ms("P50 time to first token", server_metrics.first_token_latencies, 0.5),
        ms("P99 time to first token", server_metrics.first_token_latencies, 0.99),
        Record(f"{name}: CPU of the API process", server_metrics.api_us, "us per token"),
    ]


if __name__ == "__main__":
    main()
