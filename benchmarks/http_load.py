"""Measure the HTTP overhead. The same requests are sent to an engine without a server, and over sockets to `lorax
serve`.

64 requests are in flight at any time, each for one of 8 adapters, with completions of 32 to 96 tokens. With `--equal`
all completions have 64 tokens, so that requests start and finish together. The engine without a server runs in a
separate process and receives token IDs. The load generator (`harness/http_client.py`) is another process and reads
every token as an event. Each engine runs on one core and is idle while the other engine is measured. The two systems
are measured alternately.

Then 1,000 streams are opened at the same time; most of these streams wait for a slot.

`--size 135m` measures how much slower a model with 135 million parameters decodes in the server than in `LLM`. It
measures one and eight sequences, with streams and complete responses, and uses torch's default number of threads.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.http_client import STREAM, WHOLE
from harness.models import SIZE_135M, make_tokenizer, write_adapter
from harness.report import Record, make_parser, report
from harness.server import LETTERS, LoadRequest, Server, check_complete, local_flags, serving
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.launch import make_client
from lorax_server.llm import LLM
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams

ADAPTERS = [f"adapter-{number}" for number in range(8)]
RANK, MODULES = 8, ("q_proj", "v_proj")
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ROWS, CACHE_BYTES = 64, 2**28
PROMPT, LONG_PROMPT = 32, 90  # tokens; each is a character
MAX_ADDED_TIME_RATIO = 0.15  # share of the engine's own time
MAX_THROUGHPUT_LOSS = 0.08  # share of the tokens per second of `LLM`
IDLE, STEPS = "lorax_engine_idle_seconds_total", "lorax_engine_steps_total"
US = "us per token"


@dataclass(frozen=True)
class LoadSize:
    """The numbers of runs, requests and streams, and the completion lengths."""

    pairs: int = 3
    requests: int = 256
    max_concurrency: int = 64
    answer: int = 64  # mean tokens
    spread: float = 0.5  # relative deviation of `answer`
    streams: int = 1000
    stream_answer: int = 16


QUICK = LoadSize(pairs=1, requests=24, max_concurrency=8, answer=8, streams=48, stream_answer=4)


@dataclass(frozen=True)
class Run:
    """A run's time, number of tokens and CPU time."""

    seconds: float
    tokens: int
    idle_s: float  # of the engine
    steps: float
    api_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size", choices=("small", "135m"), default="small", help="model size; see above")
    parser.add_argument("--pairs", type=int, metavar="N", help="number of measurements of each side")
    parser.add_argument("--equal", action="store_true", help="completions of equal length")
    parser.add_argument("--quick", action="store_true", help="smallest load, only to see that it runs")
    args = parser.parse_args()
    load_size = QUICK if args.quick else LoadSize()
    load_size = replace(load_size, pairs=args.pairs or load_size.pairs, spread=0.0 if args.equal else load_size.spread)
    transformers_logging.disable_progress_bar()
    if args.size == "135m":
        report(measure_throughput(args.quick, args.pairs or 7), args.json)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # for child processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, SMALL)
        with serving(folder / "log", make_flags(folder, ROWS)) as server:
            engine_runs, http_runs = asyncio.run(measure_pairs(folder, server, load_size))
            many = measure_many_streams(server, load_size)
    report([*compare(engine_runs, http_runs, load_size), *many], args.json)


def make_flags(folder: Path, rows: int) -> dict[str, object]:
    return {**local_flags(folder), "device": "cpu", "max-num-seqs": rows, "cache-bytes": CACHE_BYTES}


async def measure_pairs(folder: Path, server: Server, load_size: LoadSize) -> tuple[list[Run], list[Run]]:
    """Measure the engine and the server in turn. The first pair is a warm-up."""
    engine_runs, http_runs = [], []
    sources = SourceConfig((folder / "adapters",))
    config = EngineConfig(ModelConfig(folder / "model"), max_num_seqs=ROWS, cache_bytes=CACHE_BYTES, sources=sources)
    client = make_client(config)
    await client.start()
    try:
        identities = {name: (await client.resolve([AdapterRef("local", name)])).identity for name in ADAPTERS}
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        for number in range(load_size.pairs + 1):
            load = make_load(
                number, load_size.requests if number else load_size.max_concurrency, load_size.answer, load_size.spread
            )
            requests = [to_request(client, request, identities, tokenizer) for request in load]
            engine_runs.append(await run_engine(client, requests, load_size.max_concurrency))
            http_runs.append(await asyncio.to_thread(run_served, server, load, load_size.max_concurrency))
            print(f"engine {engine_runs[-1].seconds:.2f} s, over HTTP {http_runs[-1].seconds:.2f} s", flush=True)
    finally:
        await client.close()
    return engine_runs[1:], http_runs[1:]


def compare(engine_runs: Sequence[Run], http_runs: Sequence[Run], load_size: LoadSize) -> list[Record]:
    def median(runs: Sequence[Run], select: Callable[[Run], float]) -> float:
        return statistics.median(select(run) for run in runs)

    def make_record_pair(name: str, unit: str, select: Callable[[Run], float]) -> list[Record]:
        sides = (("the engine alone", engine_runs), ("over HTTP", http_runs))
        return [Record(f"{name}, {side}", median(runs, select), unit) for side, runs in sides]

    added = statistics.median(
        ours.seconds / alone.seconds - 1 for alone, ours in zip(engine_runs, http_runs, strict=True)
    )
    return [
        Record("added by the API process", added, "of 1", "the engine alone", MAX_ADDED_TIME_RATIO, at_most=True),
        Record("requests over HTTP", load_size.requests / median(http_runs, lambda run: run.seconds), "1/s"),
        *make_record_pair("tokens", "1/s", lambda run: run.per_second),
        *make_record_pair("time", "s", lambda run: run.seconds),
        *make_record_pair("engine idle time", "of 1", lambda run: run.idle_s / run.seconds),
        *make_record_pair("steps", "", lambda run: run.steps),
        *make_record_pair("time per step", "ms", lambda run: run.seconds / run.steps * 1e3),
        Record("CPU of the API process", median(http_runs, lambda run: run.api_cpu_s / run.tokens * 1e6), US),
        Record("CPU of the load generator", median(http_runs, lambda run: run.client_cpu_s / run.tokens * 1e6), US),
    ]


def measure_many_streams(server: Server, load_size: LoadSize) -> list[Record]:
    """Open many streams at the same time."""
    load = make_load(-1, load_size.streams, load_size.stream_answer, load_size.spread)
    (result,) = server.send(load, load_size.streams)
    pairs = list(zip(result["samples"], load, strict=True))
    for error in sorted({sample["error"] for sample, _ in pairs if sample["error"]})[:3]:
        print(f"a stream failed: {error[:500]!r}")
    complete = sum(not sample["error"] and sample["tokens"] == request.answer for sample, request in pairs)
    return [
        Record("streams open at the same time", result["max_open"], "", goal=len(load)),
        Record("complete streams", complete, "", goal=len(load)),
        Record("time for all streams", result["seconds"], "s"),
    ]


# --- Throughput of the server relative to `LLM` -----------------------------------------------------------------------


def measure_throughput(quick: bool, num_pairs: int) -> list[Record]:
    """Send the same requests to `LLM` in this process and over HTTP, in turn. The first pair is a warm-up."""
    pairs, answer = (1, 4) if quick else (num_pairs, 48)
    cases = [(max_concurrency, path) for max_concurrency in (1, 8) for path in (STREAM, WHOLE)]
    runs: dict[tuple[int, str], list[tuple[float, Run]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, SMALL if quick else SIZE_135M)
        settings = {"device": "cpu", "max_num_seqs": 8, "cache_bytes": CACHE_BYTES}
        with serving(folder / "log", make_flags(folder, 8)) as server, LLM(folder / "model", **settings) as llm:
            seeds = iter(range(10**6))
            for number in range(pairs + 1):
                for max_concurrency, path in cases:
                    alone = run_llm(llm, make_base_model_load(next(seeds), max_concurrency, answer), max_concurrency)
                    served = run_served(
                        server, make_base_model_load(next(seeds), max_concurrency, answer), max_concurrency, path
                    )
                    if number:
                        runs[max_concurrency, path].append((alone, served))
                    print(
                        f"{max_concurrency} concurrent, {path}: {alone:.1f} and {served.per_second:.1f} tokens/s",
                        flush=True,
                    )
    return [record for case in cases for record in make_throughput_records(*case, runs[case])]


def make_base_model_load(seed: int, max_concurrency: int, answer: int) -> list[LoadRequest]:
    """Return at least two requests for the base model."""
    rng = random.Random(-1 - seed)
    prompts = ["".join(rng.choices(LETTERS, k=LONG_PROMPT)) for _ in range(max(2, max_concurrency))]
    return [LoadRequest(prompt, None, answer) for prompt in prompts]


def run_llm(llm: LLM, load: Sequence[LoadRequest], max_concurrency: int) -> float:
    """Return tokens per second."""
    start = time.perf_counter()
    for first in range(0, len(load), max_concurrency):
        chunk = load[first : first + max_concurrency]
        stop = StopParams(max_new_tokens=chunk[0].answer, ignore_eos=True)
        llm.generate([request.prompt for request in chunk], stop=stop)
    return sum(request.answer for request in load) / (time.perf_counter() - start)


def make_throughput_records(max_concurrency: int, path: str, runs: Sequence[tuple[float, Run]]) -> list[Record]:
    what = f"{max_concurrency} concurrent {'streams' if path == STREAM else 'complete responses'}"
    lost = statistics.median(1 - served.per_second / alone for alone, served in runs)
    cpu_us = statistics.median(run.api_cpu_s / run.tokens * 1e6 for _, run in runs)
    return [
        Record(f"lost to the server, {what}", lost, "of 1", "LLM", MAX_THROUGHPUT_LOSS, at_most=True),
        Record(f"tokens, {what}, LLM", statistics.median(alone for alone, _ in runs), "1/s"),
        Record(f"tokens, {what}, over HTTP", statistics.median(served.per_second for _, served in runs), "1/s"),
        Record(f"CPU of the API process, {what}", cpu_us, US),
    ]


# --- Files and requests -----------------------------------------------------------------------------------------------


def make_files(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model, a tokenizer with one token per byte, and adapters."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer)} | shape,
        max_position_embeddings=256,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    letters = [token_id for token, token_id in tokenizer.get_vocab().items() if token.isascii() and len(token) == 1]
    others = sorted(set(range(config.vocab_size)) - set(letters))
    model.lm_head.weight.data[others] = 0.0  # never the best token, so that completions are text
    model.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for name in ADAPTERS:
        write_adapter(folder / "adapters" / name, rng, RANK, config.hidden_size, config.num_hidden_layers, MODULES)


def make_load(seed: int, count: int, answer: int, spread: float) -> list[LoadRequest]:
    """Return the requests of one run. The seed determines the prompts."""
    rng = random.Random(seed)
    return [
        LoadRequest(
            "".join(rng.choices(LETTERS, k=PROMPT)),
            ADAPTERS[rng.randrange(len(ADAPTERS))],
            round(answer * rng.uniform(1 - spread, 1 + spread)),
        )
        for _ in range(count)
    ]


def to_request(client: RemoteEngine, request: LoadRequest, identities: dict[str, str], tokenizer: Tokenizer) -> Request:
    identity = identities[request.adapter or ""]
    stop = StopParams(max_new_tokens=request.answer, ignore_eos=True)
    ids = tokenizer.encode(request.prompt).ids
    return Request(client.new_id(), ids, SamplingParams(), stop, identity, tenant=identity)


async def run_engine(client: RemoteEngine, requests: Sequence[Request], max_concurrency: int) -> Run:
    """Send requests to the engine without a server."""
    left: Iterator[Request] = iter(requests)

    async def work() -> None:
        for request in left:
            tokens = 0
            async for outputs in client.stream(request):
                tokens += len(outputs)
            assert tokens == request.stop.max_new_tokens, f"{tokens} tokens"

    before = await client.status()
    start = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(max_concurrency)])
    seconds = time.perf_counter() - start
    after = await client.status()
    tokens = sum(request.stop.max_new_tokens for request in requests)
    return Run(seconds, tokens, after.idle_s - before.idle_s, after.steps - before.steps)


def run_served(server: Server, load: Sequence[LoadRequest], max_concurrency: int, path: str = STREAM) -> Run:
    since, before, cpu_s = time.perf_counter(), server.metrics(), server.api_cpu_s()
    (result,) = server.send(load, max_concurrency, path)
    passed_s, after, cpu_s = time.perf_counter() - since, server.metrics(), server.api_cpu_s() - cpu_s
    check_complete(load, [result])
    seconds, tokens = result["seconds"], sum(sample["tokens"] for sample in result["samples"])
    # The engine is idle while the load generator starts.
    idle_s = max(0.0, after[IDLE] - before[IDLE] - (passed_s - seconds))
    return Run(seconds, tokens, idle_s, after[STEPS] - before[STEPS], cpu_s, result["cpu_s"])


if __name__ == "__main__":
    main()
