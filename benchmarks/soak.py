"""Find leaks of memory, file descriptors and threads that a server does not release after requests.

`lorax serve` runs a tiny model with six adapters; `--demo` runs the bundled model. Rounds of 400 requests arrive over
sockets, 48 at a time: streams, complete responses and chats with random lengths, for the base model and for every
adapter. Clients abort a quarter of the requests. A tenth of the requests are greedy; the script checks that their
completions are the same when each request is sent alone. After each round, the resources of each process and the free
KV blocks are read. After the warm-up, no process may grow by more than 2% in 20,000 requests.
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.models import make_tokenizer, write_adapter
from harness.report import Record, make_parser, report
from harness.server import Server, Usage, local_flags, serving
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

NAMES = (None, "answer", "json", "pirate", "redact", "sentiment", "sql")
WORDS = ("the", "kite", "from", "harbour", "bought", "seven", "amber", "lanterns", "on", "Friday", "and", "was")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
HIDDEN, LAYERS, RANK = 64, 2, 8
MAX_GROWTH = 0.02
MAX_CONCURRENCY, ROUND, PROBES = 48, 400, 28
CHECKED, CHATS, WHOLE, DROPPED = 0.1, 0.1, 0.2, 0.4  # shares of requests; the last one of streams
QUIET_S, RESPONSE_S = 60, 120
REST_S = 1.5  # until an idle engine has returned unused memory
QUIET = ("lorax_batch_current_size", "lorax_queue_length", "lorax_waiting_for_adapters")
HEAD = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "connection: close\r\n\r\n"
)
TOKEN = b'"token":{'
MIB = 2**20


@dataclass(frozen=True)
class SoakRequest:
    """A request. The client disconnects after `dropped_after` tokens. `expected` is the completion if it is known."""

    path: str
    body: dict[str, Any]
    dropped_after: int | None = None
    expected: str | None = None


@dataclass
class Round:
    """The server's resource usage after a round."""

    requests: int  # since the start
    usage: dict[str, Usage]
    free_blocks: float
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="after the warm-up (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2_000, metavar="N", help="requests before that (%(default)s)")
    parser.add_argument("--demo", action="store_true", help="serve the bundled model and its adapters")
    parser.add_argument("--quick", action="store_true", help="smallest load, only to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.warm_up = 60, 30
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {} if args.demo else make_files(folder)
        with serving(folder / "log", flags) as server:
            rounds = asyncio.run(soak(server, args.warm_up, args.requests, 30 if args.quick else ROUND))
            blocks = server.metrics()["lorax_kv_blocks"]
    report(evaluate(rounds, blocks), args.json)


async def soak(server: Server, warm_up: int, requests: int, requests_per_round: int) -> list[Round]:
    """Run all rounds. Return the rounds after the warm-up."""
    rng, done = random.Random(0), 0
    probes = await make_probes(server, rng)
    rounds: list[Round] = []
    while done < warm_up + requests:
        load = [make_request(rng, probes) for _ in range(requests_per_round)]
        problems = await send_all(server, load)
        done += len(load)
        free_blocks = await wait_until_idle(server)
        rounds.append(Round(done, server.usage(), free_blocks, problems))
        usage = ", ".join(f"{name} {each.rss / MIB:.1f} MiB" for name, each in sorted(rounds[-1].usage.items()))
        print(f"{done:6} requests, {len(problems)} wrong: {usage}", flush=True)
    return [each for each in rounds if each.requests >= warm_up]


async def wait_until_idle(server: Server) -> float:
    """Wait until no request is in flight. Return the number of free KV blocks."""
    deadline = time.monotonic() + QUIET_S
    while any((found := server.metrics())[name] for name in QUIET) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    await asyncio.sleep(REST_S)
    return found["lorax_kv_blocks_free"]


def evaluate(rounds: Sequence[Round], blocks: float) -> list[Record]:
    first, last = rounds[0], rounds[-1]
    problems = [problem for each in rounds for problem in each.problems]
    for problem in problems[:5]:
        print(problem)
    records = [
        Record("requests after the warm-up", last.requests - first.requests, ""),
        Record("wrong completions", len(problems), "", "", 0, at_most=True),
        Record("KV blocks not released", blocks - last.free_blocks, "", "", 0, at_most=True),
        Record("processes started or stopped", len(first.usage.keys() ^ last.usage.keys()), "", "", 0, at_most=True),
    ]
    for name in sorted(first.usage.keys() & last.usage.keys()):
        records += evaluate_process(name, [each.usage[name] for each in rounds if name in each.usage])
    return records


def evaluate_process(name: str, usage: Sequence[Usage]) -> list[Record]:
    """Compare medians of several rounds, because memory use varies from moment to moment."""
    some = max(1, min(5, len(usage) // 4))
    before = statistics.median(each.rss for each in usage[:some])
    after = statistics.median(each.rss for each in usage[-some:])
    first, last = usage[0], usage[-1]
    return [
        Record(f"{name}: resident memory", after / MIB, "MiB"),
        Record(f"{name}: growth", after / before - 1, "of 1", "after the warm-up", MAX_GROWTH, at_most=True),
        Record(f"{name}: more file descriptors", last.files - first.files, "", "", 0, at_most=True),
        Record(f"{name}: more threads", last.threads - first.threads, "", "", 0, at_most=True),
    ]


def make_files(folder: Path) -> dict[str, object]:
    """Write a model and its adapters. Return the server flags."""
    transformers_logging.disable_progress_bar()
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.2,  # so that completions differ
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for name in filter(None, NAMES):
        write_adapter(folder / "adapters" / name, rng, RANK, HIDDEN, LAYERS, ("q_proj", "v_proj"))
    return {**local_flags(folder), "device": "cpu", "cache-bytes": 2**26, "adapter-bytes": 2**26}


# --- Requests ---------------------------------------------------------------------------------------------------------


def make_request(rng: random.Random, probes: Sequence[SoakRequest]) -> SoakRequest:
    kind = rng.random()
    if kind < CHECKED:
        return rng.choice(probes)
    adapter, prompt, count = rng.choice(NAMES), make_prompt(rng), rng.randint(1, 24)
    if kind < CHECKED + CHATS:
        message = {"role": "user", "content": prompt}
        body = {"model": adapter or "", "messages": [message], "max_tokens": count}
        return SoakRequest("/v1/chat/completions", body)
    sampling = {"do_sample": True, "temperature": 1.1, "seed": rng.randrange(2**31)} if rng.random() < 0.5 else {}
    body = make_body(prompt, adapter, count, **sampling)
    if kind < CHECKED + CHATS + WHOLE:
        return SoakRequest("/generate", body)
    return SoakRequest("/generate_stream", body, rng.randint(0, count) if rng.random() < DROPPED else None)


def make_prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) + str(rng.randrange(100)) for _ in range(rng.randint(1, 24)))


def make_body(prompt: str, adapter: str | None, count: int, **parameters: Any) -> dict[str, Any]:
    named = {} if adapter is None else {"adapter_id": adapter}
    return {"inputs": prompt, "parameters": {**named, **parameters, "max_new_tokens": count, "ignore_eos_token": True}}


async def make_probes(server: Server, rng: random.Random) -> list[SoakRequest]:
    """Return greedy requests with their completions, each sent while no other request is in flight."""
    probes = []
    for number in range(PROBES):
        body = make_body(make_prompt(rng), NAMES[number % len(NAMES)], rng.randint(4, 24))
        content = await send(server, SoakRequest("/generate", body))
        probes.append(SoakRequest("/generate", body, expected=json.loads(content)["generated_text"]))
    return probes


async def send_all(server: Server, load: Sequence[SoakRequest]) -> list[str]:
    """Send the load. Return the errors."""
    left, problems = iter(load), []

    async def work() -> None:
        for request in left:
            problem = await find_problem(server, request)
            problems.extend([problem] if problem else [])

    await asyncio.gather(*[work() for _ in range(MAX_CONCURRENCY)])
    return problems


async def find_problem(server: Server, request: SoakRequest) -> str:
    try:
        content = await asyncio.wait_for(send(server, request), RESPONSE_S)
    except (OSError, ValueError, TimeoutError) as error:
        return f"{request.path}: {type(error).__name__}: {str(error)[:500]}"
    if request.expected is not None and json.loads(content)["generated_text"] != request.expected:
        return f"{request.body}: {content.decode()[:500]}, but alone {request.expected!r}"
    return ""


async def send(server: Server, request: SoakRequest) -> bytes:
    """Return the response body (partial if the client disconnects)."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        content = json.dumps(request.body).encode()
        writer.write(HEAD.format(path=request.path, host=server.host, length=len(content)).encode() + content)
        head = await reader.readuntil(b"\r\n\r\n") if request.dropped_after != 0 else b""
        if head and not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError((head + await reader.read()).decode(errors="replace"))
        body = b""
        while request.dropped_after is None or body.count(TOKEN) < request.dropped_after:
            piece = await reader.read(2**16)
            if not piece:
                break
            body += piece
        return body
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    main()
