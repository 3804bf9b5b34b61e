"""The cost of a step besides the model: deciding it, writing the plan, making the inputs, taking note of the result.

The engine, its scheduler, its adapter table, the worker and the runner with its tables are the real ones. The model is
replaced by one that computes nothing: its hidden states are zeros, and of eight tokens one is always the best. All
sequences decode, each for one of 16 adapters or the base model.
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import Record, parse_args, report

from lorax_server.adapters.host import HostAdapter, empty_table
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.build import assemble
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.plan import Capabilities, Prepared
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.runner import PagedRunner
from lorax_server.worker.worker import Worker

SEQUENCES = (64, 128, 256)
NUM_ADAPTERS = 16
PROMPT, LENGTH, BLOCK_SIZE = 128, 1024, 16
STEPS = 300
VOCAB = 8
GOAL_MS = 2.0
GREEDY = SamplingParams()


class NoModel:
    """The interface of a paged model without the model."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.logits = torch.zeros(max(SEQUENCES), VOCAB)
        self.logits[:, 3] = 1.0
        self.hidden = torch.zeros(max(SEQUENCES) * PROMPT, 1)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> list[Any]:
        return []

    def __call__(self, input_ids: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, None]:
        return self.hidden[: len(input_ids)], None

    def lm_head(self, hidden: torch.Tensor, adapter_data: Any) -> tuple[torch.Tensor, None]:
        return self.logits[: len(hidden)], None


class Ready:
    """Adapters that are loaded at once, and hold nothing."""

    def __init__(self) -> None:
        self.notify = lambda: None
        self.results: list[Prepared] = []

    def enqueue(self, spec: AdapterSpec) -> None:
        self.results.append(Prepared(spec.identity, 1, 256, VOCAB))

    def get(self, identity: str) -> HostAdapter:
        return HostAdapter(torch.zeros(64), empty_table(0), torch.zeros(0), VOCAB, 1)

    def take_results(self) -> list[Prepared]:
        taken, self.results = self.results, []
        return taken

    def close(self) -> None: ...


def make_engine(num_rows: int) -> Engine:
    num_blocks = num_rows * LENGTH // BLOCK_SIZE
    memory = AdapterMemory({}, torch.float32, torch.device("cpu"), 64)
    runner = PagedRunner(
        NoModel(),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_rows=num_rows,
        max_length=LENGTH,
        memory=memory,
    )
    capabilities = Capabilities(
        VOCAB, num_rows, LENGTH, num_blocks, BLOCK_SIZE, max_step_tokens=num_rows * PROMPT, num_adapter_units=64
    )
    config = EngineConfig(ModelConfig(Path("none")), max_rows=num_rows)
    return assemble(config, Worker(capabilities, runner, memory, Ready()))  # type: ignore[arg-type]


def measure(num_rows: int, params: SamplingParams = GREEDY, answer: int = LENGTH - PROMPT) -> float:
    """Return the milliseconds of a step in which so many sequences decode. After short answers, others follow."""
    engine = make_engine(num_rows)
    for i in range(NUM_ADAPTERS):
        engine._table.register(AdapterSpec(str(i), str(i), (), 1))
    ids = itertools.count()

    def add(num_tokens: int) -> None:
        i = next(ids)
        adapter = str(i % (NUM_ADAPTERS + 1)) if i % (NUM_ADAPTERS + 1) < NUM_ADAPTERS else ""
        prompt = [(i * 7 + j) % VOCAB for j in range(PROMPT)]
        stop = StopParams(max_new_tokens=num_tokens)
        engine.add(Request(i, prompt, params, stop, adapter_identity=adapter, tenant=adapter))

    for i in range(num_rows):
        add(answer if answer == LENGTH - PROMPT else 1 + i % answer)  # so that they do not end together
    while engine.status().running < num_rows or engine.status().generated_tokens < 4 * num_rows:
        for output in engine.step():
            if output.finish_reason is not None:
                add(answer)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        outputs = engine.step()
        for output in outputs:
            if output.finish_reason is not None:
                add(answer)
        times.append(time.perf_counter() - start)
        assert len(outputs) == num_rows
    engine.close()
    return statistics.median(times) * 1e3


def main() -> None:
    args = parse_args(__doc__)
    torch.set_num_threads(1)
    found = {count: min(measure(count) for _ in range(3)) for count in SEQUENCES}
    records = [
        Record(f"step without the model, {count} sequences", found[count], "ms", "", goal, at_most=True)
        for count, goal in zip(SEQUENCES, (None, None, GOAL_MS), strict=True)
    ]
    growth = found[SEQUENCES[-1]] / found[SEQUENCES[0]]
    # Linear growth is at most as much as the number of sequences.
    limit = SEQUENCES[-1] / SEQUENCES[0]
    records.append(Record("growth from 64 to 256 sequences", growth, "x", "", limit, at_most=True))
    drawn = SamplingParams(do_sample=True, temperature=0.8, top_p=0.9)
    churn = min(measure(SEQUENCES[-1], drawn, answer=SEQUENCES[-1]) for _ in range(3))
    records.append(Record("256 sequences that sample, one ends and one comes each step", churn, "ms", "", None))
    report(records, args.json)


if __name__ == "__main__":
    main()
