"""Costs that one caller can cause for all others, now and before: lists of many adapters, misspelt names, many keys,
watermarks.

    python benchmarks/shared_costs.py [--json FILE]

All figures are CPU time of one thread: of the event loop, of the engine's step, or, for near names, of a thread beside
them. "as before" is how it was done until it was bounded: every name looked for in a list of all, every state
described, every key compared, the vocabulary shuffled for each row and step.
"""

import asyncio
import hmac
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
from report import Record, parse_args, report

from lorax_server.adapters.spec import AdapterSpec
from lorax_server.engine.adapters.table import AdapterTable
from lorax_server.plan import Capabilities
from lorax_server.sampling.watermark import favour_green, hash_tokens
from lorax_server.server.access.keys import Key, KeyRing
from lorax_server.server.access.model_names import ModelNames, Named
from lorax_server.server.access.nearest import find_nearest
from lorax_server.server.adapter_listing import PageQuery, list_page
from lorax_server.server.adapter_name_index import AdapterNameIndex
from lorax_server.types import AdapterState

COUNT = 10_000
VOCAB, ROWS = 128_256, 32
ROUNDS = 20
WORDS = ("poet", "bard", "tutor", "legal", "medical", "support", "sql", "json", "summary", "german", "french")
MISSPELT = ("team-poet-brad-000017", "x", "z" * 128, "teem-legal-sql-000500")


def milliseconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median of this thread's CPU time."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return 1000 * sorted(times)[rounds // 2]


def record(name: str, value: float, goal: float | None = None) -> Record:
    return Record(name, value, "ms", "", goal, at_most=True)


def make_names() -> list[str]:
    draw = random.Random(0)
    return [f"team-{draw.choice(WORDS)}-{draw.choice(WORDS)}-{number:06}" for number in range(COUNT)]


def make_table(names: Sequence[str]) -> AdapterTable:
    """Make an engine's table that knows all adapters."""
    capabilities = Capabilities(300, 8, 128, 8, 16, num_adapter_units=8)
    table = AdapterTable(capabilities, host_bytes=2**30)
    for name in names:
        table.register(AdapterSpec(f"hash of {name}", name, (), 1000), prefetch=False)
    return table


def list_as_before(names: ModelNames, seen: AdapterNameIndex) -> list[str]:
    """List adapters by the former loop, for one caller, while nothing is loaded yet."""
    states: dict[str, AdapterState] = {}
    listed, named = [], sorted(dict(names.adapters))
    for name in (*named, *dict.fromkeys(name for name in () if name not in named)):
        (ref,) = names.find(name, None).refs
        found = [identity for identity in seen.identities(Named(ref.source, ref.name)) if identity in states]
        if found or name in named:
            listed.append(name)
    return listed


def measure_list() -> list[Record]:
    names, seen = ModelNames("base-model", default_source="local"), AdapterNameIndex()
    names.set_folder(make_names())
    for name in names.adapters:
        seen.add(f"hash of {name}", Named("local", name))
    table = make_table(list(names.adapters))
    everything = [f"hash of {name}" for name in names.adapters]
    states = {each: table.list_adapters([each])[0] for each in everything}

    async def answer(identities: Sequence[str]) -> list[AdapterState]:
        return [states[identity] for identity in identities]  # the engine's work is measured below

    service: Any = SimpleNamespace(model_names=names, adapter_index=seen, engine=SimpleNamespace(list_adapters=answer))
    page = everything[:1000]
    last = PageQuery(after=f"name:{names.listing.names[-1001]}")

    def describe_all() -> None:
        for place in range(0, COUNT, len(page)):
            table.list_adapters(everything[place : place + len(page)])

    def turn(asked: PageQuery) -> float:
        return milliseconds(lambda: asyncio.run(list_page(service, Key(), asked)))

    return [
        record("the whole list, as before, event loop", milliseconds(lambda: list_as_before(names, seen), 3)),
        record("a page of 1,000, event loop", turn(PageQuery()), 20),
        record("the last page, event loop", turn(last), 20),
        record("a page of 100, event loop", turn(PageQuery(100)), 5),
        record("all states, as before, step thread", milliseconds(describe_all, 3)),
        record("a page's states of 1,000, step thread", milliseconds(lambda: table.list_adapters(page)), 5),
        record("a page's states of 100, step thread", milliseconds(lambda: table.list_adapters(page[:100])), 0.5),
    ]


def measure_names() -> list[Record]:
    names = ModelNames("base-model", default_source="local")
    names.set_folder(make_names())
    records = []
    patterns = {"anybody": None, "a key with a pattern": ("team-poet-*",), "a key with 100": ("x*",) * 100}
    for who, adapters in patterns.items():
        look = partial(find_nearest, source=None, names=names, key=Key("k", adapters=adapters))
        worst = max(milliseconds(partial(look, name)) for name in MISSPELT)
        records.append(record(f"near names, for {who}", worst, 150))
    return records


def measure_keys() -> list[Record]:
    keys = [secrets.token_hex(16) for _ in range(COUNT)]
    ring, digests = KeyRing(keys), [sha256(key.encode()).digest() for key in keys]

    def compare_all() -> list[bool]:
        given = sha256(keys[0].encode()).digest()
        return [hmac.compare_digest(digest, given) for digest in digests]

    return [
        record("a key of 10,000, as before, event loop", milliseconds(compare_all)),
        record("a key of 10,000, event loop", milliseconds(lambda: ring.identify(f"Bearer {keys[0]}")), 0.1),
    ]


def measure_watermark() -> list[Record]:
    """Measure the watermark of a vocabulary of 128k, for 32 rows."""
    torch.set_num_threads(1)  # so that this thread does all work
    scores, hashes = torch.randn(ROWS, VOCAB), hash_tokens(VOCAB)
    previous = torch.randint(VOCAB, (ROWS,))

    def shuffle_all() -> None:
        for row, token in zip(scores, previous.tolist(), strict=True):
            generator = torch.Generator().manual_seed(15485863 * token)
            row[torch.randperm(VOCAB, generator=generator)[: VOCAB // 2]] += 2.0

    return [
        record("a watermark, as before, for each row and step", milliseconds(shuffle_all, 5) / ROWS),
        record(
            "a watermark, for each row and step",
            milliseconds(lambda: favour_green(scores, previous, hashes)) / ROWS,
            0.2,
        ),
    ]


def main() -> None:
    args = parse_args(__doc__)
    print(f"{COUNT} adapters, {COUNT} keys, {VOCAB} tokens; milliseconds of CPU")
    report([*measure_list(), *measure_names(), *measure_keys(), *measure_watermark()], args.json)


if __name__ == "__main__":
    main()
