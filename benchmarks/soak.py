"""The memory, files and threads that a server keeps after its requests: none, if all is well.

`lorax serve` runs a tiny model with six adapters (`--demo`: the bundled ones, which takes six times as long). Rounds of
requests come over sockets, 48 at a time: streams, whole answers and chats, with prompts and answers of random lengths,
for the base model and for every adapter. A quarter of them is dropped by the client after some tokens. Some are greedy
ones that were answered alone at the start, and must be answered the same way in company.

After each round the server is left until it is quiet; then the resident memory, the file descriptors and the threads of
each of its processes are read, and the blocks of the cache that are free. The first requests are for warming up. From
there on no process may grow by more than 2 % in 20,000 requests, and everything else must be what it was.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
import torch
from adapter_scale import write_adapter
from http_load import make_tokenizer
from report import Record, report
from server_log import wait_for_url
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).parent.parent
NAMES = (None, "answer", "json", "pirate", "redact", "sentiment", "sql")
WORDS = ("the", "kite", "from", "harbour", "bought", "seven", "amber", "lanterns", "on", "Friday", "and", "was")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
HIDDEN, LAYERS, HEADS, INNER, RANK = 64, 2, 2, 128, 8
MOST_GROWTH = 0.02
AT_ONCE = 48
DROPPED, CHECKED, CHATS, WHOLE = 0.25, 0.1, 0.1, 0.2  # of the requests
QUIET_S, ANSWER_S = 60, 120
REST_S = 1.5  # until an idle engine has returned unneeded memory
QUIET = {"lorax_batch_current_size": 0.0, "lorax_queue_length": 0.0, "lorax_waiting_for_adapters": 0.0}
BLOCKS, FREE = "lorax_kv_blocks", "lorax_kv_blocks_free"
HEAD = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "connection: close\r\n\r\n"
)
TOKEN = b'"token":{'
MIB = 2**20


@dataclass(frozen=True)
class Amounts:
    """The size of the load."""

    requests: int = 20_000
    warm_up: int = 2_000
    a_round: int = 400
    probes: int = 28
    minutes: float = 0.0


QUICK = Amounts(requests=60, warm_up=30, a_round=30, probes=7)


@dataclass(frozen=True)
class Wanted:
    """One request. `dropped_after` so many tokens the client goes away; `expected` is the answer, if it is known."""

    path: str
    body: dict[str, Any]
    dropped_after: int | None = None
    expected: str | None = None


@dataclass(frozen=True)
class Usage:
    """The memory, files and threads of a process."""

    rss: int
    files: int
    threads: int


@dataclass
class Seen:
    """A round, and the server after it."""

    requests: int  # up to its end
    usage: dict[str, Usage]  # by process
    free_blocks: float
    problems: list[str] = field(default_factory=list)


def main() -> None:
    args = parse_args()
    amounts = QUICK if args.quick else Amounts(requests=args.requests, warm_up=args.warm_up, minutes=args.minutes)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [] if args.demo else make_files(folder)
        with serving(folder / "log", flags) as server:
            seen = asyncio.run(soak(server, amounts))
            blocks = server.metrics()[BLOCKS]
    report(judge(seen, blocks), args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--requests", type=int, default=Amounts.requests, metavar="N", help="after those to warm up")
    parser.add_argument("--warm-up", type=int, default=Amounts.warm_up, metavar="N", help="requests that come first")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="go on for at least so long")
    parser.add_argument("--demo", action="store_true", help="serve the bundled model and its adapters")
    parser.add_argument("--quick", action="store_true", help="so little that only crashes can be found by it")
    return parser.parse_args()


async def soak(server: "Server", amounts: Amounts) -> list[Seen]:
    """Run all rounds; return their results, the one that ends the warm-up first."""
    chance, done = random.Random(0), 0
    probes = await answer_alone(server, chance, amounts.probes)
    end_at = time.monotonic() + amounts.minutes * 60
    seen: list[Seen] = []
    while done < amounts.warm_up + amounts.requests or time.monotonic() < end_at:
        load = [make_request(chance, probes) for _ in range(amounts.a_round)]
        since = time.monotonic()
        problems = await send_all(server, load)
        done += len(load)
        free_blocks = await server.be_quiet()
        seen.append(Seen(done, server.usage(), free_blocks, problems))
        print_round(seen[-1], time.monotonic() - since)
    return [each for each in seen if each.requests >= amounts.warm_up]


def judge(seen: Sequence[Seen], blocks: float) -> list[Record]:
    first, last = seen[0], seen[-1]
    num_requests = last.requests - first.requests
    problems = [problem for each in seen for problem in each.problems]
    for problem in problems[:5]:
        print(problem)
    records = [
        Record("requests after the warm-up", num_requests, "", "", None),
        Record("answers that were wrong", len(problems), "", "", 0, at_most=True),
        Record("blocks that are not free", blocks - last.free_blocks, "", "", 0, at_most=True),
        Record("processes that came or went", len(first.usage.keys() ^ last.usage.keys()), "", "", 0, at_most=True),
    ]
    for name in sorted(first.usage.keys() & last.usage.keys()):
        records += judge_process(name, [each.usage[name] for each in seen if name in each.usage])
    return records


def judge_process(name: str, usage: Sequence[Usage]) -> list[Record]:
    """Judge memory by the median of some rounds, since the amount at one moment is chance."""
    some = max(1, min(5, len(usage) // 4))
    before = statistics.median(each.rss for each in usage[:some])
    after = statistics.median(each.rss for each in usage[-some:])
    first, last = usage[0], usage[-1]
    return [
        Record(f"{name}: resident memory", after / MIB, "MiB", "", None),
        Record(f"{name}: growth", after / before - 1, "of 1", "the warm process", MOST_GROWTH, at_most=True),
        Record(f"{name}: more file descriptors", last.files - first.files, "", "", 0, at_most=True),
        Record(f"{name}: more threads", last.threads - first.threads, "", "", 0, at_most=True),
    ]


def print_round(seen: Seen, seconds: float) -> None:
    usage = ", ".join(
        f"{name} {each.rss / MIB:.1f} MiB {each.files} files {each.threads} threads"
        for name, each in sorted(seen.usage.items())
    )
    wrong = f", {len(seen.problems)} wrong" if seen.problems else ""
    print(f"{seen.requests:6} requests, {seconds:5.1f} s{wrong}: {usage}", flush=True)


# --- Files ------------------------------------------------------------------------------------------------------------


def make_files(folder: Path) -> list[str]:
    """Write a model and its adapters; return the flags to serve them with."""
    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.2,  # answers differ
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    chance = np.random.default_rng(0)
    for name in filter(None, NAMES):
        write_adapter(folder / "adapters" / name, chance, RANK, HIDDEN, LAYERS, ("q_proj", "v_proj"))
    flags = {"--model-id": "model", "--adapters-dir": "adapters", "--huggingface-hub-cache": "cache"}
    paths = [word for flag, name in flags.items() for word in (flag, str(folder / name))]
    return [*paths, "--no-hub", "--device", "cpu", "--cache-bytes", str(2**26), "--adapter-bytes", str(2**26)]


# --- Requests ---------------------------------------------------------------------------------------------------------


def make_request(chance: random.Random, probes: Sequence[Wanted]) -> Wanted:
    kind = chance.random()
    if kind < CHECKED:
        return chance.choice(probes)
    adapter, prompt, count = chance.choice(NAMES), make_prompt(chance), chance.randint(1, 24)
    if kind < CHECKED + CHATS:
        message = {"role": "user", "content": prompt}
        body = {"model": adapter or "", "messages": [message], "max_tokens": count}
        return Wanted("/v1/chat/completions", body)
    path = "/generate" if kind < CHECKED + CHATS + WHOLE else "/generate_stream"
    is_dropped = path == "/generate_stream" and chance.random() < DROPPED / (1 - CHECKED - CHATS - WHOLE)
    sampling = {"do_sample": True, "temperature": 1.1, "seed": chance.randrange(2**31)} if chance.random() < 0.5 else {}
    body = make_body(prompt, adapter, count, **sampling)
    return Wanted(path, body, dropped_after=chance.randint(0, count) if is_dropped else None)


def make_prompt(chance: random.Random) -> str:
    return " ".join(chance.choice(WORDS) + str(chance.randrange(100)) for _ in range(chance.randint(1, 24)))


def make_body(prompt: str, adapter: str | None, count: int, **parameters: Any) -> dict[str, Any]:
    named = {} if adapter is None else {"adapter_id": adapter}
    return {"inputs": prompt, "parameters": {**named, **parameters, "max_new_tokens": count, "ignore_eos_token": True}}


async def answer_alone(server: "Server", chance: random.Random, count: int) -> list[Wanted]:
    """Return greedy requests with their answers, each sent while no other was under way."""
    probes = []
    for number in range(count):
        body = make_body(make_prompt(chance), NAMES[number % len(NAMES)], chance.randint(4, 24))
        answer = await ask(server, Wanted("/generate", body))
        probes.append(Wanted("/generate", body, expected=json.loads(answer)["generated_text"]))
    return probes


async def send_all(server: "Server", load: Sequence[Wanted]) -> list[str]:
    """Send the load and return the problems with its answers."""
    left, problems = iter(load), []

    async def work() -> None:
        for wanted in left:
            problem = await find_problem(server, wanted)
            problems.extend([problem] if problem else [])

    await asyncio.gather(*[work() for _ in range(AT_ONCE)])
    return problems


async def find_problem(server: "Server", wanted: Wanted) -> str:
    try:
        answer = await asyncio.wait_for(ask(server, wanted), ANSWER_S)
    except (OSError, ValueError, TimeoutError) as error:
        return f"{wanted.path}: {type(error).__name__}: {str(error)[:500]}"
    if wanted.expected is not None and json.loads(answer)["generated_text"] != wanted.expected:
        return f"{wanted.body}: {answer.decode()[:500]} where {wanted.expected!r} was the answer alone"
    return ""


async def ask(server: "Server", wanted: Wanted) -> bytes:
    """Return the answer's body; of a dropped request, the part that came."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        content = json.dumps(wanted.body).encode()
        writer.write(HEAD.format(path=wanted.path, host=server.host, length=len(content)).encode() + content)
        head = await reader.readuntil(b"\r\n\r\n") if wanted.dropped_after != 0 else b""
        if head and not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError((head + await reader.read()).decode(errors="replace"))
        return await read_body(reader, wanted.dropped_after)
    finally:
        writer.transport.abort()


async def read_body(reader: asyncio.StreamReader, dropped_after: int | None) -> bytes:
    content = b""
    while dropped_after is None or content.count(TOKEN) < dropped_after:
        piece = await reader.read(2**16)
        if not piece:
            break
        content += piece
    return content


# --- The server -------------------------------------------------------------------------------------------------------


class Server:
    """A running server, and all of its processes."""

    def __init__(self, url: str, process_id: int) -> None:
        parsed = urlsplit(url)
        self.host, self.port = parsed.hostname, parsed.port
        self._url = url
        self._process = psutil.Process(process_id)

    def usage(self) -> dict[str, Usage]:
        """Return the usage by purpose, of the largest process if several have the same."""
        usage: dict[str, Usage] = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # sandbox workers come and go
                name, found = name_of(process), usage_of(process)
                usage[name] = max(found, usage.get(name, found), key=lambda each: each.rss)
        return usage

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self._url}/metrics") as response:
            lines = response.read().decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    async def be_quiet(self) -> float:
        """Wait until nothing is under way; return the number of blocks that are free then."""
        deadline = time.monotonic() + QUIET_S
        while True:
            found = self.metrics()
            if all(found[name] == value for name, value in QUIET.items()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(REST_S)
        return found[FREE]

    def processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


def name_of(process: psutil.Process) -> str:
    """Return the process's purpose, by the way it was started."""
    words = " ".join(process.cmdline())
    kinds = {"resource_tracker": "resource tracker", "spawn_main": "engine", "sandbox.worker": "sandbox worker"}
    return next((name for sign, name in kinds.items() if sign in words), "API")


def usage_of(process: psutil.Process) -> Usage:
    with process.oneshot():
        return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())


@contextmanager
def serving(log: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Run `lorax serve`."""
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0", *flags]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT) as process:
        try:
            yield Server(wait_for_url(process, log), process.pid)
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
