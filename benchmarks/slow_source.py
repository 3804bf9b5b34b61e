"""The cost of steps while adapters come from a source that takes five seconds or fails, against steps without.

16 requests for the base model decode all the time. In every second phase, requests name adapters that are not here:
each of them is fetched from a source that waits for five seconds and then delivers, or that waits and fails. So in
these phases many fetches are under way at any time, and adapters that arrive are checked, prepared and loaded beside
the steps. Phases take turns, so that both kinds see the same machine.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from adapter_scale import make_files
from report import Record, parse_args, report
from transformers.utils import logging as transformers_logging

from lorax_server.adapters.sources.local import LocalSource
from lorax_server.adapters.sources.source import AdapterFiles
from lorax_server.build import assemble
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.errors import SourceError
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams
from lorax_server.worker.executor import build_executor

DELAY_S = 5.0
PHASES, PHASE_S = 6, 7.0
BETWEEN_S = 0.05  # between two requests for absent adapters
ROWS = 16
ADAPTERS = 1000


class SlowSource(LocalSource):
    """A slow folder."""

    def fetch(self, files: AdapterFiles, wanted: Sequence[str], token: str | None) -> Path:
        time.sleep(DELAY_S / 2)  # it is asked twice: for the config, and for all
        return super().fetch(files, wanted, token)


class FailingSource(LocalSource):
    """A slow source that fails."""

    def find(self, name: str, token: str | None) -> AdapterFiles:
        time.sleep(DELAY_S)
        raise SourceError(f"adapter {name!r}: nobody answers")


class Traffic:
    """Requests that always run, and requests that wait for adapters of slow sources."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids = itertools.count()
        self.names = itertools.count()
        self.running: set[int] = set()
        self.resolving = []
        self.num_adapted = self.num_failed = 0

    def step(self) -> None:
        """Run one step, in which all rows decode but for those that have just come."""
        while len(self.running) < ROWS:
            request_id = next(self.ids)
            prompt = [1 + (request_id + i) % 1000 for i in range(16)]
            stop = StopParams(max_new_tokens=200)
            self.engine.add(Request(request_id, prompt, SamplingParams(), stop))
            self.running.add(request_id)
        outputs = self.engine.step()
        self.running -= {output.request_id for output in outputs if output.finish_reason is not None}

    def ask_far_away(self) -> None:
        i = next(self.names)
        self.resolving.append(self.engine.resolve([AdapterRef(("slow", "failing")[i % 2], f"adapter-{i}")]))

    def take_answers(self) -> None:
        for found in [each for each in self.resolving if each.done()]:
            self.resolving.remove(found)
            if found.exception() is not None:
                self.num_failed += 1
                continue
            self.num_adapted += 1
            stop = StopParams(max_new_tokens=4)
            request = Request(next(self.ids), [1, 2, 3], SamplingParams(), stop, found.result().identity)
            self.engine.add(request)


def main() -> None:
    args = parse_args(__doc__)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder, ADAPTERS)
        config = EngineConfig(ModelConfig(folder / "model"), max_rows=4 * ROWS, cache_bytes=2**27)
        sources = {"slow": SlowSource([folder]), "failing": FailingSource([folder])}
        traffic = Traffic(assemble(config, build_executor(config), sources))
        for _ in range(50):
            traffic.step()
        times: dict[bool, list[float]] = {False: [], True: []}
        for phase in range(PHASES):
            is_busy, start, asked = phase % 2 == 1, time.perf_counter(), 0
            while (now := time.perf_counter() - start) < PHASE_S:
                while is_busy and asked * BETWEEN_S < now:
                    traffic.ask_far_away()
                    asked += 1
                traffic.take_answers()
                traffic.step()
                times[is_busy].append(time.perf_counter() - start - now)
            while traffic.resolving:  # the next phase begins without
                traffic.take_answers()
                traffic.step()
        status = traffic.engine.status()
        traffic.engine.close()
    records = []
    for name, percent, goal in (("median", 50, 1.25), ("P99", 99, None)):
        without, with_slow = (statistics.quantiles(times[busy], n=100)[percent - 1] * 1e3 for busy in (False, True))
        records.append(Record(f"{name} of steps without", without, "ms", "", None))
        records.append(Record(f"{name} of steps with", with_slow, "ms", "", None))
        records.append(
            Record(f"{name}: with / without", with_slow / without, "x", "the same steps", goal, at_most=True)
        )
    records += [
        Record("longest step with", max(times[True]) * 1e3, "ms", "", DELAY_S * 1e3 / 10, at_most=True),
        Record("adapters that arrived and answered", traffic.num_adapted, "", "", 1),
        Record("fetches that failed", traffic.num_failed, "", "", 1),
        Record("adapters loaded", status.adapters_loaded, "", "", None),
    ]
    report(records, args.json)


if __name__ == "__main__":
    main()
