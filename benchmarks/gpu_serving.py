"""Compare the HTTP server with the engine alone: streams with the Llama-3.1-8B shape over 64 adapters on one GPU.

`LLM` runs in a separate process first. Then `lorax serve` gets the same requests with the same settings from
several client processes (`harness/http_client.py`). The number of requests in flight is constant. Prompts have 128
tokens, completions 128 to 256. All adapters have been used before. The middle of each run is measured, from 30 % to
75 % of all tokens, because all prompts arrive together at the start. Weights are random, in bfloat16.
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

MIN_SHARE = 0.95
FROM, TO = 0.3, 0.75  # measured part, as shares of all tokens
MAX_LENGTH, RANK = 1024, 16
ROUNDS = 3  # requests per request in flight


@dataclass(frozen=True)
class Setup:
    """Size of the model and of the load."""

    folder: Path
    streams: Sequence[int]
    clients: int
    device: str = "cuda"
    adapters: int = 64
    prompt: int = 128
    answers: tuple[int, int] = (128, 256)

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


class Middle(NamedTuple):
    """The measured part of a run."""

    tokens_per_s: float
    gaps: list[float]  # seconds between stream tokens or engine steps
    firsts: list[float]  # seconds to first token
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
            alone = process.submit(measure_alone, setup).result()
        served = measure_served(setup)
    report([record for count in setup.streams for record in compare(count, alone[count], served[count])], args.json)


def make_load(setup: Setup, count: int, seed: int) -> list[LoadRequest]:
    """Return the requests of one run. The tokenizer adds one token to each prompt."""
    choice = random.Random(seed)
    return [
        LoadRequest(
            "".join(choice.choices(LETTERS, k=setup.prompt - 1)),
            f"adapter-{number % setup.adapters:03}",
            choice.randint(*setup.answers),
        )
        for number in range(count)
    ]


def make_warm_up(setup: Setup, at_once: int) -> list[LoadRequest]:
    """Return short requests for all adapters."""
    load = make_load(setup, max(at_once, setup.adapters), seed=-1)
    return [LoadRequest(wanted.prompt, wanted.adapter, 4) for wanted in load]


def find_middle(arrivals: Sequence[tuple[float, int]]) -> tuple[float, float, int]:
    """Return start, end and token count of the measured part. `arrivals` are sorted times and token counts."""
    total, so_far, begin = sum(count for _, count in arrivals), 0, None
    at_begin = 0
    for moment, count in arrivals:
        so_far += count
        if begin is None and so_far >= FROM * total:
            begin, at_begin = moment, so_far
        if begin is not None and so_far >= TO * total:
            return begin, moment, so_far - at_begin
    raise ValueError("no tokens arrived")


def measure_alone(setup: Setup) -> dict[int, Middle]:
    with LLM(setup.folder / "model", setup.folder / "adapters", **setup.settings) as llm:
        found = {}
        for count in setup.streams:
            run_alone(llm, make_warm_up(setup, count), count)
            found[count] = run_alone(llm, make_load(setup, ROUNDS * count, seed=count), count)
            print(f"{count} at once, LLM: {found[count].tokens_per_s:.0f} tokens/s", flush=True)
        return found


def run_alone(llm: LLM, load: Sequence[LoadRequest], at_once: int) -> Middle:
    """Keep `at_once` requests in flight, with the internal steps of `LLM.generate`."""
    names = sorted({wanted.adapter for wanted in load if wanted.adapter})
    resolved = dict(zip(names, llm._resolve_all(names, "raise"), strict=True))
    left = iter(load)
    runs: list[Any] = []
    steps: list[tuple[float, int]] = []
    num_tokens = llm.status.generated_tokens
    while True:
        num_ended = llm._num_ended
        runs = [run for run in runs if not run.is_done]
        while len(runs) < at_once and (wanted := next(left, None)) is not None:
            stop = StopParams(max_new_tokens=wanted.answer, ignore_eos=True)
            runs.append(llm._make_run(wanted.prompt, resolved[wanted.adapter or ""], None, stop, None, False))
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


def measure_served(setup: Setup) -> dict[int, Middle]:
    with serving(setup.folder / "log", local_flags(setup.folder) | setup.flags) as server:
        found = {}
        for count in setup.streams:
            server.send(make_warm_up(setup, count), count, num_clients=setup.clients)
            load, cpu_s = make_load(setup, ROUNDS * count, seed=count), server.api_cpu_s()
            results = server.send(load, count, num_clients=setup.clients)
            check_complete(load, results)
            cpu_s = server.api_cpu_s() - cpu_s
            found[count] = find_gaps(results)._replace(api_us=cpu_s / sum(wanted.answer for wanted in load) * 1e6)
            print(f"{count} at once, over HTTP: {found[count].tokens_per_s:.0f} tokens/s", flush=True)
        return found


def find_gaps(results: Sequence[dict[str, Any]]) -> Middle:
    """Return latencies from the streams of all clients, whose times use one clock."""
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


def compare(count: int, alone: Middle, served: Middle) -> list[Record]:
    name, share = f"{count} streams", served.tokens_per_s / alone.tokens_per_s

    def ms(what: str, values: list[float], part: float) -> Record:
        return Record(f"{name}: {what}", percentile(values, part) * 1e3, "ms")

    return [
        Record(f"{name}: tokens over HTTP", served.tokens_per_s, "1/s"),
        Record(f"{name}: tokens by LLM", alone.tokens_per_s, "1/s"),
        Record(f"{name}: share of the server", share, "of 1", "LLM", MIN_SHARE),
        ms("P50 between tokens", served.gaps, 0.5),
        ms("P99 between tokens", served.gaps, 0.99),
        ms("longest time between tokens", served.gaps, 1.0),
        ms("P50 engine step, LLM", alone.gaps, 0.5),
        ms("P99 engine step, LLM", alone.gaps, 0.99),
        ms("P50 time to first token", served.firsts, 0.5),
        ms("P99 time to first token", served.firsts, 0.99),
        Record(f"{name}: CPU of the API process", served.api_us, "us per token"),
    ]


if __name__ == "__main__":
    main()
