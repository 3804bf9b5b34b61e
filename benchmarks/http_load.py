"""The cost of HTTP: the same requests to a bare engine, and over sockets to a server in front of one.

64 requests are under way at any time, each for one of 8 adapters, with answers of 32 to 96 tokens; when one ends, the
next comes. (With `--equal` all have 64, so that all end and come together, which no crowd does.) The bare engine runs
in a process of its own, as always, and is given token ids; its output is not turned into text. The server is the
command as users start it, read by a load generator in a process of its own (`http_client.py`), every token as an event.
Either engine computes on one core, and takes part in no measurement but its own. Both are warm, prompts are never the
same twice, and the two are measured in turn, since machines have moods.

At last 1,000 streams are opened at once, of which most wait for a place.

`--size 135m` measures something else: how much slower a model of 135 million parameters decodes behind the server than
in `LLM`, one sequence and eight, streams and whole answers, with as many threads as torch takes by itself.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from adapter_scale import write_adapter
from report import Record, report
from server_log import wait_for_url
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.launch import make_client
from lorax_server.llm import LLM
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams

ADAPTERS, RANK = 8, 8
HIDDEN, LAYERS, HEADS, INNER = 256, 6, 4, 512
MODULES = ("q_proj", "v_proj")
ROWS, CACHE_BYTES = 64, 2**28
PROMPT = 32  # tokens, each a character
EOS = "</s>"
MOST_ADDED = 0.15  # of the engine's own time
MOST_LOST = 0.08  # of the tokens that `LLM` makes in a second
STREAM, WHOLE = "/generate_stream", "/generate"
RUN_S = 1200
IDLE, STEPS = "lorax_engine_idle_seconds_total", "lorax_engine_steps_total"
US = "us for each token"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Amounts:
    """The size of the load."""

    pairs: int = 3
    requests: int = 256
    at_once: int = 64
    answer: int = 64  # tokens, on average
    spread: float = 0.5  # how much shorter or longer they may be
    streams: int = 1000
    stream_answer: int = 16


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int = HEADS
    inner: int = INNER
    vocab: int | None = None  # None: as many as the tokenizer has


SMALL = Shape()
LARGE = Shape(hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocab=49152)

QUICK = Amounts(pairs=1, requests=24, at_once=8, answer=8, streams=48, stream_answer=4)


@dataclass(frozen=True)
class Wanted:
    prompt: str
    adapter: str | None
    answer: int

    @property
    def body(self) -> dict[str, Any]:
        parameters = {"max_new_tokens": self.answer, "ignore_eos_token": True}
        if self.adapter is not None:
            parameters["adapter_id"] = self.adapter
        return {"inputs": self.prompt, "parameters": parameters}


@dataclass(frozen=True)
class Run:
    """A load that was served."""

    seconds: float
    tokens: int
    idle_s: float  # of the engine
    steps: float
    api_cpu_s: float = 0.0
    client_cpu_s: float = 0.0


def main() -> None:
    args = parse_args()
    amounts = QUICK if args.quick else Amounts()
    amounts = replace(amounts, spread=0.0) if args.equal else amounts
    amounts = replace(amounts, pairs=args.pairs or amounts.pairs)
    transformers_logging.disable_progress_bar()
    if args.size == "135m":
        report(measure_shares(args.quick, args.pairs), args.json)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that this one starts
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        with serving(folder) as server:
            bare, http = asyncio.run(measure_pairs(folder, server, amounts))
            crowd = make_load(-1, amounts.streams, amounts.stream_answer, amounts.spread)
            many = server.run(crowd, amounts.streams)
    report([*compare(bare, http, amounts), *count(many, crowd)], args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--size", choices=("small", "135m"), default="small", help="of the model; see above")
    parser.add_argument("--pairs", type=int, metavar="N", help="how often each is measured")
    parser.add_argument("--equal", action="store_true", help="answers of the same length")
    parser.add_argument("--quick", action="store_true", help="so little that only crashes can be found by it")
    return parser.parse_args()


async def measure_pairs(folder: Path, server: "Server", amounts: Amounts) -> tuple[list[Run], list[Run]]:
    """Measure the bare engine and the server, in turn."""
    bare, http = [], []
    client = make_client(engine_config(folder))
    await client.start()
    try:
        identities = await resolve_all(client)
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        for number in range(amounts.pairs + 1):
            load = make_load(number, amounts.requests if number else amounts.at_once, amounts.answer, amounts.spread)
            requests = [to_request(client, wanted, identities, tokenizer) for wanted in load]
            bare.append(await run_bare(client, requests, amounts.at_once))
            served = await asyncio.to_thread(server.run, load, amounts.at_once)
            assert served.num_whole(load) == len(load), served.errors
            http.append(served.run)
            print(f"bare {bare[-1].seconds:.2f} s, over HTTP {http[-1].seconds:.2f} s", flush=True)
    finally:
        await client.close()
    return bare[1:], http[1:]  # the first of either has what is slow only once


def compare(bare: Sequence[Run], http: Sequence[Run], amounts: Amounts) -> list[Record]:
    seconds = statistics.median(run.seconds for run in http)
    added = statistics.median(ours.seconds / alone.seconds - 1 for alone, ours in zip(bare, http, strict=True))

    def median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
        return statistics.median(of(run) for run in runs)

    def both(name: str, unit: str, of: Callable[[Run], float]) -> list[Record]:
        sides = (("the engine alone", bare), ("over HTTP", http))
        return [Record(f"{name}, {side}", median(runs, of), unit, "", None) for side, runs in sides]

    return [
        Record("added by the API process", added, "of 1", "the engine alone", MOST_ADDED, at_most=True),
        Record("requests over HTTP", amounts.requests / seconds, "1/s", "", None),
        *both("tokens", "1/s", lambda run: run.tokens / run.seconds),
        *both("time", "s", lambda run: run.seconds),
        *both("idle share of the engine", "of 1", lambda run: run.idle_s / run.seconds),
        *both("steps", "", lambda run: run.steps),
        *both("a step, with what is between them", "ms", lambda run: run.seconds / run.steps * 1e3),
        Record("CPU of the API process", median(http, lambda run: run.api_cpu_s / run.tokens * 1e6), US, "", None),
        Record("CPU of the load", median(http, lambda run: run.client_cpu_s / run.tokens * 1e6), US, "", None),
    ]


def count(many: "Served", crowd: Sequence[Wanted]) -> list[Record]:
    for error in many.errors[:3]:
        print(f"a stream failed: {error[:500]!r}")
    return [
        Record("streams that were open at once", many.result["most_open"], "", "", len(crowd)),
        Record("of these, complete with all tokens", many.num_whole(crowd), "", "", len(crowd)),
        Record("time for all of them", many.run.seconds, "s", "", None),
    ]


# --- Throughput of the server as a share of `LLM`'s -------------------------------------------------------------------


def measure_shares(quick: bool, num_pairs: int | None) -> list[Record]:
    """Send the same requests to `LLM` in this process and over HTTP, in turn, while the other one is idle."""
    pairs, answer = (1, 4) if quick else (num_pairs or 7, 48)
    cases = [(at_once, path) for at_once in (1, 8) for path in (STREAM, WHOLE)]
    lost: dict[tuple[int, str], list[tuple[float, float, Run]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, SMALL if quick else LARGE)
        settings = {"max_rows": 8, "cache_bytes": CACHE_BYTES}
        with serving(folder, {"--max-rows": 8}) as server, LLM(folder / "model", device="cpu", **settings) as llm:
            seeds = iter(range(10**6))
            for number in range(pairs + 1):
                for at_once, path in cases:
                    alone = in_script(llm, plain_load(next(seeds), at_once, answer), at_once)
                    load = plain_load(next(seeds), at_once, answer)
                    served = server.run(load, at_once, path)
                    assert served.num_whole(load) == len(load), served.errors
                    if number:  # the first of either has what is slow only once
                        lost[at_once, path].append((alone, rate_of(served.run), served.run))
                    print(f"{at_once} at once, {path}: {alone:.1f} and {rate_of(served.run):.1f} tokens/s", flush=True)
    return [record for case in cases for record in share_records(case, lost[case])]


def rate_of(run: Run) -> float:
    return run.tokens / run.seconds


def plain_load(seed: int, at_once: int, answer: int) -> list[Wanted]:
    """Make requests for the base model; two of them if one runs at a time."""
    chance = random.Random(-1 - seed)
    prompts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz     ", k=90)) for _ in range(max(2, at_once))]
    return [Wanted(prompt, None, answer) for prompt in prompts]


def in_script(llm: LLM, load: Sequence[Wanted], at_once: int) -> float:
    """Return the tokens per second."""
    start = time.perf_counter()
    for first in range(0, len(load), at_once):
        some = load[first : first + at_once]
        stop = StopParams(max_new_tokens=some[0].answer, ignore_eos=True)
        llm.generate([wanted.prompt for wanted in some], stop=stop)
    return sum(wanted.answer for wanted in load) / (time.perf_counter() - start)


def share_records(case: tuple[int, str], runs: Sequence[tuple[float, float, Run]]) -> list[Record]:
    at_once, path = case
    what = f"{at_once} at once, {'streams' if path == STREAM else 'whole answers'}"
    lost = statistics.median(1 - served / alone for alone, served, _ in runs)
    return [
        Record(f"lost to the server, {what}", lost, "of 1", "LLM", MOST_LOST, at_most=True),
        Record(f"tokens, {what}, LLM", statistics.median(alone for alone, _, _ in runs), "1/s", "", None),
        Record(f"tokens, {what}, over HTTP", statistics.median(served for _, served, _ in runs), "1/s", "", None),
        Record(
            f"CPU of the API process, {what}",
            statistics.median(run.api_cpu_s / run.tokens * 1e6 for _, _, run in runs),
            US,
            "",
            None,
        ),
    ]


# --- Files and requests -----------------------------------------------------------------------------------------------


def make_files(folder: Path, shape: Shape = SMALL) -> None:
    """Write a model, its tokenizer, and adapters as PEFT writes them."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab or len(tokenizer),
        max_position_embeddings=256,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    letters = [token_id for token, token_id in tokenizer.get_vocab().items() if token.isascii() and len(token) == 1]
    others = sorted(set(range(config.vocab_size)) - set(letters))
    model.lm_head.weight.data[others] = 0.0  # never the best, so that answers are text, as they usually are
    model.save_pretrained(folder / "model")
    chance = np.random.default_rng(0)
    for number in range(ADAPTERS):
        write_adapter(folder / "adapters" / name_of(number), chance, RANK, shape.hidden, shape.layers, MODULES)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def name_of(adapter: int) -> str:
    return f"adapter-{adapter}"


def make_load(seed: int, count: int, answer: int, spread: float) -> list[Wanted]:
    """Make requests, with other prompts for another seed."""
    chance = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    return [
        Wanted(
            "".join(chance.choices(letters, k=PROMPT)),
            name_of(chance.randrange(ADAPTERS)),
            round(answer * chance.uniform(1 - spread, 1 + spread)),
        )
        for _ in range(count)
    ]


# --- The engine alone -------------------------------------------------------------------------------------------------


def engine_config(folder: Path) -> EngineConfig:
    """Return the same config as the server's."""
    sources = SourceConfig((folder / "adapters",))
    return EngineConfig(ModelConfig(folder / "model"), max_rows=ROWS, cache_bytes=CACHE_BYTES, sources=sources)


async def resolve_all(client: RemoteEngine) -> dict[str, str]:
    names = [name_of(number) for number in range(ADAPTERS)]
    return {name: (await client.resolve([AdapterRef("local", name)])).identity for name in names}


def to_request(client: RemoteEngine, wanted: Wanted, identities: dict[str, str], tokenizer: Tokenizer) -> Request:
    identity = identities[wanted.adapter]
    stop = StopParams(max_new_tokens=wanted.answer, ignore_eos=True)
    ids = tokenizer.encode(wanted.prompt).ids
    return Request(client.new_id(), ids, SamplingParams(), stop, identity, tenant=identity)


async def run_bare(client: RemoteEngine, requests: Sequence[Request], at_once: int) -> Run:
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


# --- The server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    run: Run
    result: dict[str, Any]  # of the load generator

    @property
    def errors(self) -> list[str]:
        return sorted({sample["error"] for sample in self.result["samples"] if sample["error"]})

    def num_whole(self, load: Sequence[Wanted]) -> int:
        """Return the number of answers with all of their tokens."""
        pairs = zip(self.result["samples"], load, strict=True)
        return sum(not sample["error"] and sample["tokens"] == wanted.answer for sample, wanted in pairs)


class Server:
    """A running server, in a process of its own."""

    def __init__(self, url: str, process_id: int, folder: Path) -> None:
        self._url = url
        self._process = psutil.Process(process_id)
        self._bodies, self._result = folder / "bodies.json", folder / "result.json"

    def run(self, load: Sequence[Wanted], at_once: int, path: str = STREAM) -> Served:
        self._bodies.write_text(json.dumps([wanted.body for wanted in load]))
        script = Path(__file__).with_name("http_client.py")
        command = [sys.executable, script, self._url, self._bodies, "--at-once", str(at_once), "--path", path]
        command += ["--json", self._result]
        since, before, cpu_s = time.perf_counter(), self._read_metrics(), self._cpu_s()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_S)
        passed_s, after, cpu_s = time.perf_counter() - since, self._read_metrics(), self._cpu_s() - cpu_s
        result = json.loads(self._result.read_text())
        seconds, tokens = result["seconds"], sum(sample["tokens"] for sample in result["samples"])
        # While the load generator was starting there was nothing to do.
        idle_s = max(0.0, after[IDLE] - before[IDLE] - (passed_s - seconds))
        run = Run(seconds, tokens, idle_s, after[STEPS] - before[STEPS], cpu_s, result["cpu_s"])
        return Served(run, result)

    def _read_metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/metrics") as response:
            text = response.read().decode()
        return {name: float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]) for name in (IDLE, STEPS)}

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


@contextmanager
def serving(folder: Path, more: dict[str, object] | None = None) -> Iterator[Server]:
    """Run `lorax serve`."""
    log = folder / "log"
    flags = {
        "--model-id": folder / "model",
        "--adapters-dir": folder / "adapters",
        "--huggingface-hub-cache": folder / "cache",
        "--device": "cpu",
        "--max-rows": ROWS,
        "--cache-bytes": CACHE_BYTES,
        "--port": 0,
        **(more or {}),
    }
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--no-hub"]
    command += [str(word) for pair in flags.items() for word in pair]
    with log.open("w") as file, subprocess.Popen(command, stderr=file, cwd=ROOT) as process:
        try:
            yield Server(wait_for_url(process, log), process.pid, folder)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
