"""The price of a name: the delay of the first token of a request that names a resident adapter.

Three kinds of requests take turns: for the base model, for an adapter whose name was resolved before, and for an
adapter by its name, as a server serves it: first `resolve`, then the request. Each begins at a random moment, alone and
beside 16 sequences that run all the time. The engine has a process of its own, as always, and computes on one core; the
adapter lies in a folder and is on the device. Figures are differences of medians, in steps: the median time between two
tokens of a sequence that runs at that time.
"""

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from adapter_scale import write_adapter
from report import Record, report
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.remote.remote_engine import RemoteEngine
from lorax_server.launch import make_client
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams

HIDDEN, LAYERS, HEADS, INNER, VOCAB = 512, 4, 8, 1408, 512
RANK, MODULES = 8, ("q_proj", "v_proj")
PROMPT, LENGTH, CROWD = 8, 1024, 16
ADAPTER = AdapterRef("local", "tuned")
GOAL = 0.3  # of a step
SETTLE_S = 2.5  # until the adapter's files are no longer new, as in most servers
KINDS = ("base", "resolved before", "by name")


@dataclass
class Times:
    """Seconds to the first token by kind, and between two tokens of a sequence that runs."""

    first: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    steps: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)

    def more_steps(self, kind: str) -> float:
        """Return the delay against the base model, in steps."""
        return (statistics.median(self.first[kind]) - statistics.median(self.first["base"])) / self.step_s


def main() -> None:
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the engine process
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        time.sleep(0 if args.quick else SETTLE_S)
        idle, busy = asyncio.run(measure(folder, 3 if args.quick else args.rounds))
    records = []
    for when, times in (("alone", idle), (f"beside {CROWD}", busy)):
        base_ms = 1000 * statistics.median(times.first["base"])
        more, apart = times.more_steps("by name"), times.more_steps("resolved before")
        records += [
            Record(f"{when}: an adapter by its name, more than the base model", more, "steps", "", GOAL, at_most=True),
            Record(f"{when}: of these, not for its name", apart, "steps", "", None),
            Record(f"{when}: the base model's first token", base_ms, "ms", "", None),
            Record(f"{when}: a step", 1000 * times.step_s, "ms", "", None),
        ]
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80, help="requests of each kind, alone and beside others")
    parser.add_argument("--quick", action="store_true", help="just enough to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    return parser.parse_args()


def make_files(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_adapter(folder / "adapters" / ADAPTER.name, np.random.default_rng(0), RANK, HIDDEN, LAYERS, MODULES)


async def measure(folder: Path, rounds: int) -> tuple[Times, Times]:
    sources = SourceConfig((folder / "adapters",))
    client = make_client(
        EngineConfig(ModelConfig(folder / "model"), max_rows=2 * CROWD, cache_bytes=2**28, sources=sources)
    )
    await client.start()
    try:
        identity = (await client.resolve([ADAPTER])).identity
        await client.load(identity, pin=True)
        idle, busy = Times(), Times()
        await time_requests(client, identity, rounds, idle, chance=random.Random(1))
        await time_steps(client, LENGTH // 8, idle.steps)
        async with crowd(client, busy):
            await time_requests(client, identity, rounds, busy, chance=random.Random(2))
    finally:
        await client.close()
    return idle, busy


async def time_requests(client: RemoteEngine, identity: str, rounds: int, times: Times, chance: random.Random) -> None:
    for kind in KINDS:  # work that happens only once
        await first_token_s(client, kind, identity, chance)
    for _ in range(rounds):
        for kind in chance.sample(KINDS, len(KINDS)):
            await asyncio.sleep(chance.uniform(0, 0.05))
            times.first[kind].append(await first_token_s(client, kind, identity, chance))


async def first_token_s(client: RemoteEngine, kind: str, identity: str, chance: random.Random) -> float:
    start = time.perf_counter()
    adapter = {"base": "", "resolved before": identity}.get(kind)
    if adapter is None:
        adapter = (await client.resolve([ADAPTER])).identity
    async for _ in client.stream(make_request(client, adapter, 1, chance)):
        return time.perf_counter() - start
    raise SystemExit("a request ended without a token")


async def time_steps(client: RemoteEngine, num_tokens: int, times: list[float]) -> None:
    """Record the times between tokens of one sequence."""
    last = None
    async for _ in client.stream(make_request(client, "", num_tokens, random.Random(0))):
        now = time.perf_counter()
        if last is not None:
            times.append(now - last)
        last = now


@asynccontextmanager
async def crowd(client: RemoteEngine, times: Times) -> AsyncIterator[None]:
    """Run sequences of the base model all the time, and record the times between tokens of the first."""

    async def run(place: int) -> None:
        while True:
            await time_steps(client, LENGTH // 2 + place, times.steps if place == 0 else [])

    tasks = [asyncio.create_task(run(place)) for place in range(CROWD)]
    try:
        await asyncio.sleep(1.0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_request(client: RemoteEngine, adapter: str, num_tokens: int, chance: random.Random) -> Request:
    ids = [chance.randrange(VOCAB) for _ in range(PROMPT)]
    stop = StopParams(max_new_tokens=num_tokens, ignore_eos=True)
    return Request(client.new_id(), ids, SamplingParams(), stop, adapter)


if __name__ == "__main__":
    main()
