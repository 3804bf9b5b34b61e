"""The HTTP server on a GPU against the engine alone: streams of a model of the 8B shape over 64 adapters.

First `LLM` answers requests in a process of its own, then `lorax serve` answers the same ones, with the same settings,
to several processes that read its streams (`http_client.py`). So many requests are under way at any time; when one
ends, the next comes. Prompts have 128 tokens, answers 128 to 256. All adapters have been used before. Measured is the
middle, from 30 % to 75 % of all tokens: at the beginning all prompts come at once, and at the end fewer requests are
left. Weights are random, in bfloat16. `LLM` turns tokens into text within its loop, as it always does.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from gpu_model import LLAMA_8B, TINY, make_adapters, make_model
from http_streams import percentile
from report import Record, report
from server_log import wait_for_url

from lorax_server.llm import LLM
from lorax_server.types import StopParams

ROOT = Path(__file__).parent.parent
LEAST_SHARE = 0.95
FROM, TO = 0.3, 0.75  # of all tokens
START_S, RUN_S, END_S = 300, 300, 60
MAX_LENGTH, RANK = 1024, 16
ROUNDS = 3  # requests for each that is under way
LETTERS = "abcdefghijklmnopqrstuvwxyz     "
PATH = "/generate_stream"


@dataclass(frozen=True)
class Setup:
    """The size of the model and of the load."""

    folder: Path
    device: str
    is_tiny: bool
    streams: tuple[int, ...]
    adapters: int
    prompt: int
    answers: tuple[int, int]
    clients: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the engine, by the names of `EngineConfig`."""
        rows = {"max_rows": max(self.streams), "max_length": MAX_LENGTH}
        return {**rows, "cache_bytes": 2**28, "adapter_bytes": 2**26} if self.is_tiny else rows

    @property
    def flags(self) -> list[str]:
        """The same settings as flags of the command."""
        names = {"max_length": "max-total-tokens"}
        pairs = [(f"--{names.get(name, name).replace('_', '-')}", str(value)) for name, value in self.settings.items()]
        return [word for pair in pairs for word in pair]


class Wanted(NamedTuple):
    prompt: str
    adapter: str
    answer: int

    @property
    def body(self) -> dict[str, Any]:
        parameters = {"max_new_tokens": self.answer, "ignore_eos_token": True, "adapter_id": self.adapter}
        return {"inputs": self.prompt, "parameters": parameters}


class Middle(NamedTuple):
    """The measured part of a run."""

    tokens_per_s: float
    gaps: list[float]  # between the tokens of a stream, or the steps of the engine, in seconds
    firsts: list[float]  # until a request's first token
    api_us: float = 0.0  # of CPU time, for each token of the whole run


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        setup = make_setup(args, Path(name))
        began = time.monotonic()
        shape = TINY if args.tiny else LLAMA_8B
        make_model(setup.folder / "model", shape)
        make_adapters(setup.folder / "adapters", shape, setup.adapters, RANK)
        print(f"files in {time.monotonic() - began:.1f} s", flush=True)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            alone = process.submit(measure_alone, setup).result()
        served = measure_served(setup)
    records = [record for count in setup.streams for record in compare(count, alone[count], served[count])]
    report(records, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: only crashes can be found by it")
    parser.add_argument("--streams", type=int, nargs="+", metavar="N", help="under way at once (default: 256 64)")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="processes that read the streams")
    parser.add_argument("--folder", type=Path, metavar="PATH", help="for the files; /dev/shm is memory")
    return parser.parse_args()


def make_setup(args: argparse.Namespace, folder: Path) -> Setup:
    streams = tuple(args.streams or ((16, 8) if args.tiny else (256, 64)))
    if args.tiny:
        return Setup(folder, "cpu", True, streams, 4, 16, (8, 16), min(2, args.clients))
    return Setup(folder, "cuda", False, streams, 64, 128, (128, 256), args.clients)


def make_load(setup: Setup, count: int, seed: int) -> list[Wanted]:
    """Make requests; those of another seed have other prompts. A prompt's first token begins the text, the others are
    characters."""
    choice = random.Random(seed)
    return [
        Wanted(
            "".join(choice.choices(LETTERS, k=setup.prompt - 1)),
            f"adapter-{number % setup.adapters:03}",
            choice.randint(*setup.answers),
        )
        for number in range(count)
    ]


def make_warm_up(setup: Setup, at_once: int) -> list[Wanted]:
    """Make short requests for all adapters."""
    return [wanted._replace(answer=4) for wanted in make_load(setup, max(at_once, setup.adapters), seed=-1)]


def say(what: str, middle: Middle, warm_s: float, seconds: float) -> None:
    print(f"{what}: {middle.tokens_per_s:.0f} tokens/s, {seconds:.1f} s, of these {warm_s:.1f} to warm up", flush=True)


def find_middle(arrivals: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """Return when the measured part begins and ends, and its tokens, from sorted times and the tokens that came."""
    total, so_far, begin = sum(count for _, count in arrivals), 0, None
    at_begin = 0
    for moment, count in arrivals:
        so_far += count
        if begin is None and so_far >= FROM * total:
            begin, at_begin = moment, so_far
        if begin is not None and so_far >= TO * total:
            return begin, moment, so_far - at_begin
    raise ValueError("no tokens came")


# --- The engine alone -------------------------------------------------------------------------------------------------


def measure_alone(setup: Setup) -> dict[int, Middle]:
    began = time.monotonic()
    with LLM(setup.folder / "model", setup.folder / "adapters", device=setup.device, **setup.settings) as llm:
        print(f"LLM started in {time.monotonic() - began:.1f} s", flush=True)
        found = {}
        for count in setup.streams:
            began = time.monotonic()
            run_alone(llm, make_warm_up(setup, count), count)
            warm_s = time.monotonic() - began
            found[count] = run_alone(llm, make_load(setup, ROUNDS * count, seed=count), count)
            say(f"{count} at once, LLM", found[count], warm_s, time.monotonic() - began)
        return found


def run_alone(llm: LLM, load: Sequence[Wanted], at_once: int) -> Middle:
    """Keep so many requests under way, by the steps of which `LLM.generate` is made."""
    names = sorted({wanted.adapter for wanted in load})
    resolved = dict(zip(names, llm._resolve_all(names, "raise"), strict=True))
    stops = [StopParams(max_new_tokens=wanted.answer, ignore_eos=True) for wanted in load]
    left = iter(zip(load, stops, strict=True))
    runs: list[Any] = []
    steps: list[tuple[float, int]] = []
    num_tokens = llm.status.generated_tokens
    while True:
        num_ended = llm._num_ended
        runs = [run for run in runs if not run.is_done]
        while len(runs) < at_once and (wanted := next(left, None)) is not None:
            runs.append(llm._make_run(wanted[0].prompt, resolved[wanted[0].adapter], None, wanted[1], None, False))
            llm._start(runs[-1], "raise")
        if not runs:
            break
        while num_ended == llm._num_ended:
            llm._step()
            so_far = llm.status.generated_tokens
            steps.append((time.perf_counter(), so_far - num_tokens))
            num_tokens = so_far
    steps = [(moment, count) for moment, count in steps if count]
    begin, end, tokens = find_middle(steps)
    gaps = [after - before for (before, _), (after, _) in pairwise(steps) if begin <= before < end]
    return Middle(tokens / (end - begin), gaps, [])


# --- The server -------------------------------------------------------------------------------------------------------


def measure_served(setup: Setup) -> dict[int, Middle]:
    with serving(setup) as (url, process):
        found = {}
        for count in setup.streams:
            began = time.monotonic()
            run_clients(setup, url, make_warm_up(setup, count), count)
            warm_s = time.monotonic() - began
            load, cpu_s = make_load(setup, ROUNDS * count, seed=count), sum(process.cpu_times()[:2])
            results = run_clients(setup, url, load, count)
            cpu_s = sum(process.cpu_times()[:2]) - cpu_s
            found[count] = look_at(results)._replace(api_us=cpu_s / sum(wanted.answer for wanted in load) * 1e6)
            say(f"{count} at once, over HTTP", found[count], warm_s, time.monotonic() - began)
        return found


def run_clients(setup: Setup, url: str, load: Sequence[Wanted], at_once: int) -> list[dict[str, Any]]:
    """Divide the load over client processes, and return what became of each."""
    count = setup.clients
    places = [(setup.folder / f"bodies-{i}.json", setup.folder / f"result-{i}.json") for i in range(count)]
    commands = []
    for number, (bodies, result) in enumerate(places):
        bodies.write_text(json.dumps([wanted.body for wanted in load[number::count]]))
        command = [sys.executable, str(Path(__file__).with_name("http_client.py")), url, str(bodies), "--path", PATH]
        commands.append([*command, "--at-once", str(at_once // count), "--json", str(result)])
    clients = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    for client in clients:
        assert client.wait(RUN_S) == 0, "a client failed"
    results = [json.loads(result.read_text()) for _, result in places]
    for number, result in enumerate(results):
        for sample, wanted in zip(result["samples"], load[number::count], strict=True):
            assert sample["tokens"] == wanted.answer, sample["error"] or "tokens are missing"
    return results


def look_at(results: Sequence[dict[str, Any]]) -> Middle:
    """Look at the middle of all clients' streams, on the clock that they share."""
    streams = [(result["start"], sample) for result in results for sample in result["samples"]]
    arrivals = sorted((start + at, count) for start, sample in streams for at, count in sample["arrivals"])
    begin, end, tokens = find_middle(arrivals)
    gaps, firsts = [], []
    for start, sample in streams:
        if begin <= start + sample["sent_s"] < end:
            firsts.append(sample["first_s"] - sample["sent_s"])
        for (before, _), (at, count) in pairwise(sample["arrivals"]):
            if begin <= start + before < end:
                gaps += [at - before] + [0.0] * (count - 1)
    return Middle(tokens / (end - begin), gaps, firsts)


@contextmanager
def serving(setup: Setup) -> Iterator[tuple[str, psutil.Process]]:
    """Run `lorax serve`; return its address and its API process."""
    log, began = setup.folder / "log", time.monotonic()
    folders = {"--model-id": "model", "--adapters-dir": "adapters", "--huggingface-hub-cache": "cache"}
    paths = [word for flag, name in folders.items() for word in (flag, str(setup.folder / name))]
    command = [sys.executable, "-m", "lorax_server.cli", "serve", "--no-hub", "--port", "0", "--device", setup.device]
    with log.open("w") as file, subprocess.Popen([*command, *paths, *setup.flags], stderr=file, cwd=ROOT) as process:
        try:
            url = wait_for_url(process, log, START_S)
            print(f"server started in {time.monotonic() - began:.1f} s", flush=True)
            yield url, psutil.Process(process.pid)
        except BaseException:
            print(log.read_text()[-3000:])
            raise
        finally:
            process.terminate()
            process.wait(END_S)


# --- Figures ----------------------------------------------------------------------------------------------------------


def compare(count: int, alone: Middle, served: Middle) -> list[Record]:
    name, share = f"{count} streams", served.tokens_per_s / alone.tokens_per_s

    def ms(what: str, values: list[float], part: float) -> Record:
        return Record(f"{name}: {what}", percentile(values, part) * 1e3, "ms", "", None)

    return [
        Record(f"{name}: tokens over HTTP", served.tokens_per_s, "1/s", "", None),
        Record(f"{name}: tokens by LLM", alone.tokens_per_s, "1/s", "", None),
        Record(f"{name}: HTTP's share", share, "of 1", "the engine alone", LEAST_SHARE),
        ms("P50 between tokens", served.gaps, 0.5),
        ms("P99 between tokens", served.gaps, 0.99),
        ms("most between tokens", served.gaps, 1.0),
        ms("P50 of the engine's steps alone", alone.gaps, 0.5),
        ms("P99 of the engine's steps alone", alone.gaps, 0.99),
        ms("P50 until the first token", served.firsts, 0.5),
        ms("P99 until the first token", served.firsts, 0.99),
        Record(f"{name}: CPU of the API process", served.api_us, "us for each token", "", None),
    ]


if __name__ == "__main__":
    main()
