"""Measure the HTTP overhead: the same requests to an engine without a server, and over sockets to `lorax serve`.

64 requests are in flight at any time, each for one of 8 adapters, with completions of 32 to 96 tokens. With `--equal`
all completions have 64 tokens, so that requests start and finish together. The engine without a server runs in a
separate process, as always, and receives token ids. The load generator (`harness/http_client.py`) is another
process and reads every token as an event. Each engine computes on one core and is idle while the other is measured.
Both sides take turns.

Then 1,000 streams are opened at the same time; most of them wait for a slot.

`--size 135m` measures how much slower a model with 135 million parameters decodes behind the server than in `LLM`: one
and eight sequences, streams and whole responses, with torch's default number of threads.
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
MAX_ADDED = 0.15  # share of the engine's own time
MAX_LOST = 0.08  # share of the tokens per second of `LLM`
IDLE, STEPS = "lorax_engine_idle_seconds_total", "lorax_engine_steps_total"
US = "us per token"


@dataclass(frozen=True)
class Amounts:
    """Size of the load."""

    pairs: int = 3
    requests: int = 256
    at_once: int = 64
    answer: int = 64  # mean tokens
    spread: float = 0.5  # relative deviation of `answer`
    streams: int = 1000
    stream_answer: int = 16


QUICK = Amounts(pairs=1, requests=24, at_once=8, answer=8, streams=48, stream_answer=4)


@dataclass(frozen=True)
class Run:
    """The results of one run: time, tokens and CPU time."""

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
    amounts = QUICK if args.quick else Amounts()
    amounts = replace(amounts, pairs=args.pairs or amounts.pairs, spread=0.0 if args.equal else amounts.spread)
    transformers_logging.disable_progress_bar()
    if args.size == "135m":
        report(measure_shares(args.quick, args.pairs or 7), args.json)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # for child processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, SMALL)
        with serving(folder / "log", make_flags(folder, ROWS)) as server:
            bare, http = asyncio.run(measure_pairs(folder, server, amounts))
            many = measure_many(server, amounts)
    report([*compare(bare, http, amounts), *many], args.json)


def make_flags(folder: Path, rows: int) -> dict[str, object]:
    return {**local_flags(folder), "device": "cpu", "max-num-seqs": rows, "cache-bytes": CACHE_BYTES}


async def measure_pairs(folder: Path, server: Server, amounts: Amounts) -> tuple[list[Run], list[Run]]:
    """Measure the engine and the server in turn. The first pair is a warm-up."""
    bare, http = [], []
    sources = SourceConfig((folder / "adapters",))
    config = EngineConfig(ModelConfig(folder / "model"), max_num_seqs=ROWS, cache_bytes=CACHE_BYTES, sources=sources)
    client = make_client(config)
    await client.start()
    try:
        identities = {name: (await client.resolve([AdapterRef("local", name)])).identity for name in ADAPTERS}
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        for number in range(amounts.pairs + 1):
            load = make_load(number, amounts.requests if number else amounts.at_once, amounts.answer, amounts.spread)
            requests = [to_request(client, wanted, identities, tokenizer) for wanted in load]
            bare.append(await run_bare(client, requests, amounts.at_once))
            http.append(await asyncio.to_thread(run_served, server, load, amounts.at_once))
            print(f"engine {bare[-1].seconds:.2f} s, over HTTP {http[-1].seconds:.2f} s", flush=True)
    finally:
        await client.close()
    return bare[1:], http[1:]


def compare(bare: Sequence[Run], http: Sequence[Run], amounts: Amounts) -> list[Record]:
    def median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
        return statistics.median(of(run) for run in runs)

    def both(name: str, unit: str, of: Callable[[Run], float]) -> list[Record]:
        sides = (("the engine alone", bare), ("over HTTP", http))
        return [Record(f"{name}, {side}", median(runs, of), unit) for side, runs in sides]

    added = statistics.median(ours.seconds / alone.seconds - 1 for alone, ours in zip(bare, http, strict=True))
    return [
        Record("added by the API process", added, "of 1", "the engine alone", MAX_ADDED, at_most=True),
        Record("requests over HTTP", amounts.requests / median(http, lambda run: run.seconds), "1/s"),
        *both("tokens", "1/s", lambda run: run.per_second),
        *both("time", "s", lambda run: run.seconds),
        *both("idle share of the engine", "of 1", lambda run: run.idle_s / run.seconds),
        *both("steps", "", lambda run: run.steps),
        *both("time per step", "ms", lambda run: run.seconds / run.steps * 1e3),
        Record("CPU of the API process", median(http, lambda run: run.api_cpu_s / run.tokens * 1e6), US),
        Record("CPU of the load generator", median(http, lambda run: run.client_cpu_s / run.tokens * 1e6), US),
    ]


def measure_many(server: Server, amounts: Amounts) -> list[Record]:
    """Open many streams at the same time."""
    load = make_load(-1, amounts.streams, amounts.stream_answer, amounts.spread)
    (result,) = server.send(load, amounts.streams)
    pairs = list(zip(result["samples"], load, strict=True))
    for error in sorted({sample["error"] for sample, _ in pairs if sample["error"]})[:3]:
        print(f"a stream failed: {error[:500]!r}")
    complete = sum(not sample["error"] and sample["tokens"] == wanted.answer for sample, wanted in pairs)
    return [
        Record("streams open at the same time", result["most_open"], "", goal=len(load)),
        Record("complete streams", complete, "", goal=len(load)),
        Record("time for all streams", result["seconds"], "s"),
    ]


# --- Throughput of the server relative to `LLM` -----------------------------------------------------------------------


def measure_shares(quick: bool, num_pairs: int) -> list[Record]:
    """Send the same requests to `LLM` in this process and over HTTP, in turn. The first pair is a warm-up."""
    pairs, answer = (1, 4) if quick else (num_pairs, 48)
    cases = [(at_once, path) for at_once in (1, 8) for path in (STREAM, WHOLE)]
    runs: dict[tuple[int, str], list[tuple[float, Run]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, SMALL if quick else SIZE_135M)
        settings = {"device": "cpu", "max_num_seqs": 8, "cache_bytes": CACHE_BYTES}
        with serving(folder / "log", make_flags(folder, 8)) as server, LLM(folder / "model", **settings) as llm:
            seeds = iter(range(10**6))
            for number in range(pairs + 1):
                for at_once, path in cases:
                    alone = run_llm(llm, plain_load(next(seeds), at_once, answer), at_once)
                    served = run_served(server, plain_load(next(seeds), at_once, answer), at_once, path)
                    if number:
                        runs[at_once, path].append((alone, served))
                    print(f"{at_once} at once, {path}: {alone:.1f} and {served.per_second:.1f} tokens/s", flush=True)
    return [record for case in cases for record in share_records(*case, runs[case])]


def plain_load(seed: int, at_once: int, answer: int) -> list[LoadRequest]:
    """Return at least two requests for the base model."""
    chance = random.Random(-1 - seed)
    prompts = ["".join(chance.choices(LETTERS, k=LONG_PROMPT)) for _ in range(max(2, at_once))]
    return [LoadRequest(prompt, None, answer) for prompt in prompts]


def run_llm(llm: LLM, load: Sequence[LoadRequest], at_once: int) -> float:
    """Return tokens per second."""
    start = time.perf_counter()
    for first in range(0, len(load), at_once):
        some = load[first : first + at_once]
        stop = StopParams(max_new_tokens=some[0].answer, ignore_eos=True)
        llm.generate([wanted.prompt for wanted in some], stop=stop)
    return sum(wanted.answer for wanted in load) / (time.perf_counter() - start)


def share_records(at_once: int, path: str, runs: Sequence[tuple[float, Run]]) -> list[Record]:
    what = f"{at_once} at once, {'streams' if path == STREAM else 'whole responses'}"
    lost = statistics.median(1 - served.per_second / alone for alone, served in runs)
    cpu_us = statistics.median(run.api_cpu_s / run.tokens * 1e6 for _, run in runs)
    return [
        Record(f"lost to the server, {what}", lost, "of 1", "LLM", MAX_LOST, at_most=True),
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
    chance = np.random.default_rng(0)
    for name in ADAPTERS:
        write_adapter(folder / "adapters" / name, chance, RANK, config.hidden_size, config.num_hidden_layers, MODULES)


def make_load(seed: int, count: int, answer: int, spread: float) -> list[LoadRequest]:
    """Return the requests of one run. The seed determines the prompts."""
    chance = random.Random(seed)
    return [
        LoadRequest(
            "".join(chance.choices(LETTERS, k=PROMPT)),
            ADAPTERS[chance.randrange(len(ADAPTERS))],
            round(answer * chance.uniform(1 - spread, 1 + spread)),
        )
        for _ in range(count)
    ]


def to_request(client: RemoteEngine, wanted: LoadRequest, identities: dict[str, str], tokenizer: Tokenizer) -> Request:
    identity = identities[wanted.adapter or ""]
    stop = StopParams(max_new_tokens=wanted.answer, ignore_eos=True)
    ids = tokenizer.encode(wanted.prompt).ids
    return Request(client.new_id(), ids, SamplingParams(), stop, identity, tenant=identity)


async def run_bare(client: RemoteEngine, requests: Sequence[Request], at_once: int) -> Run:
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
    await asyncio.gather(*[work() for _ in range(at_once)])
    seconds = time.perf_counter() - start
    after = await client.status()
    tokens = sum(request.stop.max_new_tokens for request in requests)
    return Run(seconds, tokens, after.idle_s - before.idle_s, after.steps - before.steps)


def run_served(server: Server, load: Sequence[LoadRequest], at_once: int, path: str = STREAM) -> Run:
    since, before, cpu_s = time.perf_counter(), server.metrics(), server.api_cpu_s()
    (result,) = server.send(load, at_once, path)
    passed_s, after, cpu_s = time.perf_counter() - since, server.metrics(), server.api_cpu_s() - cpu_s
    check_complete(load, [result])
    seconds, tokens = result["seconds"], sum(sample["tokens"] for sample in result["samples"])
    # The engine is idle while the load generator starts.
    idle_s = max(0.0, after[IDLE] - before[IDLE] - (passed_s - seconds))
    return Run(seconds, tokens, idle_s, after[STEPS] - before[STEPS], cpu_s, result["cpu_s"])


if __name__ == "__main__":
    main()
