"""The wait of one tenant's small requests beside another tenant's large one: tenants share the rows.

A server is started as users start it, with the demo model and without keys. From one address (127.0.0.1) comes a
request for 128 long answers, which takes all rows. From another (127.0.0.2) come small requests for an adapter, one
after the other, and likewise from the same address as the large one. The figures are the time to the first token of
each, and the cost of the small ones for the large one. The large one has a seed, and must get the same answers alone
and beside others.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from report import Record, report
from server_log import wait_for_url

ROOT = Path(__file__).parent.parent
LARGE_FROM, OTHER = "127.0.0.1", "127.0.0.2"
MOST_S = 1.0
PAUSE_S = 0.5  # between small requests
TAKEN_BACK = "lorax_rows_taken_back_total "


@dataclass(frozen=True)
class Amounts:
    """The size of the load."""

    choices: int = 128
    tokens: int = 256
    rows: int = 64
    small: int = 8  # requests
    small_tokens: int = 8


QUICK = Amounts(choices=8, tokens=24, rows=4, small=2, small_tokens=2)


@dataclass(frozen=True)
class Large:
    """A request for many answers."""

    seconds: float
    texts: list[str]
    tokens: int


def main() -> None:
    args = parse_args()
    amounts = QUICK if args.quick else Amounts()
    with serving(amounts.rows) as url:
        report(measure(url, amounts), args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--quick", action="store_true", help="so little that only crashes can be found by it")
    return parser.parse_args()


def measure(url: str, amounts: Amounts) -> list[Record]:
    ask_small(url, OTHER, amounts)  # brings the adapter
    ask_large(url, replace(amounts, tokens=16))  # warm
    alone = [ask_small(url, OTHER, amounts) for _ in range(amounts.small)]
    large = ask_large(url, amounts)
    beside, crowded, taken = beside_large(url, amounts, OTHER)
    same, also_crowded, _ = beside_large(url, amounts, LARGE_FROM)
    assert large.texts == crowded.texts == also_crowded.texts, "a neighbour has changed an answer"
    rates = [each.tokens / each.seconds for each in (large, crowded)]
    return [
        Record("first token of a small request, alone", statistics.median(alone), "s", "", None),
        Record("the slowest beside a large one of another address", max(beside), "s", "", MOST_S, at_most=True),
        Record("the median of these", statistics.median(beside), "s", "", None),
        Record("the slowest beside a large one of the same address", max(same), "s", "", MOST_S, at_most=True),
        Record("small requests beside the large one", len(beside), "", "", None),
        Record("rows taken back for them", taken, "", "", None),
        Record("tokens of the large one, alone", rates[0], "1/s", "", None),
        Record("tokens of the large one, beside small ones", rates[1], "1/s", "", None),
    ]


def beside_large(url: str, amounts: Amounts, address: str) -> tuple[list[float], Large, float]:
    """Send small requests while a large one runs; return their waits, the large one, and the rows it gave back."""
    before = read_counter(url)
    with ThreadPoolExecutor(1) as pool:
        large: Future[Large] = pool.submit(ask_large, url, amounts)
        time.sleep(PAUSE_S)  # by now it has all rows
        waits = [ask_small(url, address, amounts)]
        while not large.done():
            time.sleep(PAUSE_S)
            waits.append(ask_small(url, address, amounts))
        return waits, large.result(), read_counter(url) - before


def ask_large(url: str, amounts: Amounts) -> Large:
    body = {"model": "", "prompt": "Once upon a time", "n": amounts.choices, "max_tokens": amounts.tokens}
    since = time.perf_counter()
    answer = json.loads(b"".join(post(url, LARGE_FROM, "/v1/completions", body | {"seed": 7, "ignore_eos": True})))
    tokens = answer["usage"]["completion_tokens"]
    return Large(time.perf_counter() - since, [choice["text"] for choice in answer["choices"]], tokens)


def ask_small(url: str, address: str, amounts: Amounts) -> float:
    """Return the seconds to the first token."""
    parameters = {"adapter_id": "json", "max_new_tokens": amounts.small_tokens, "ignore_eos_token": True}
    since = time.perf_counter()
    lines = post(url, address, "/generate_stream", {"inputs": "Klonny went", "parameters": parameters})
    first_s = next(time.perf_counter() - since for line in lines if line.startswith(b"data:"))
    for _ in lines:
        pass
    return first_s


def post(url: str, address: str, path: str, body: dict[str, Any]) -> Iterator[bytes]:
    """Send a request and yield the lines of its answer."""
    there = urlsplit(url)
    connection = http.client.HTTPConnection(there.hostname or "", there.port, source_address=(address, 0))
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise SystemExit(f"{path}: {response.status} {response.read()[:500]!r}")
        yield from response
    finally:
        connection.close()


def read_counter(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(float(line.removeprefix(TAKEN_BACK)) for line in lines if line.startswith(TAKEN_BACK))


@contextmanager
def serving(rows: int) -> Iterator[str]:
    """Run a server with the demo model, and yield its address."""
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--port", "0", "--max-rows", str(rows)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT) as process:
            try:
                yield wait_for_url(process, log)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
