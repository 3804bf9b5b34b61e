"""Measure the step time without the model: scheduling, building inputs, sampling, updating sequences and sending
outputs.

The script uses the real engine, scheduler, adapter table, worker, runner and channel with a fake model, whose hidden
states are zeros. The vocabulary has eight tokens, and the same token is always sampled. All sequences decode, each with
one of 16 adapters or the base model. A vocabulary of normal size is measured separately, because its sampling time
depends on kernels.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import zmq
from harness.report import Record, make_parser, report

from lorax_server.adapters.host import HostAdapter, empty_table
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.engine.engine import Engine
from lorax_server.engine.remote import messages
from lorax_server.engine.remote.channel import EngineChannel
from lorax_server.kernels import select_ops
from lorax_server.plan import Capabilities, PrepareResult
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.runner import PagedRunner
from lorax_server.worker.worker import Worker

SEQUENCES = (8, 64, 128, 256)
GOALS_MS = (0.4, None, None, 2.0)
NUM_ADAPTERS = 16
PROMPT, LENGTH, BLOCK_SIZE = 128, 1024, 16
STEPS = 300
VOCAB = 8
LARGE_VOCAB = 49152
GREEDY, DRAWN = SamplingParams(), SamplingParams(do_sample=True, temperature=0.8, top_p=0.9)


class ZeroModel:
    """A paged model whose forward pass returns zeros, so that only the engine's own work takes time."""

    device = torch.device("cpu")
    ops = select_ops(device)

    def __init__(self, vocab_size: int) -> None:
        """Create the model. With a large vocabulary, a few tokens have nearly all of the probability."""
        self.logits = -torch.arange(vocab_size).float().repeat(max(SEQUENCES) if vocab_size == VOCAB else 8, 1)
        if vocab_size > VOCAB:
            self.logits.normal_(std=2.0, generator=torch.Generator().manual_seed(0))
            self.logits[:, :20] += 9.0
        self.logits[:, 3] = 1.0 + self.logits.amax()
        self.hidden = torch.zeros(max(SEQUENCES) * PROMPT, 1)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> list[Any]:
        return []

    def __call__(self, input_ids: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, None]:
        return self.hidden[: len(input_ids)], None

    def lm_head(self, hidden: torch.Tensor, adapter_data: Any) -> tuple[torch.Tensor, None]:
        return self.logits[: len(hidden)], None


class ReadyPreparer:
    """A preparer whose adapters are empty and ready immediately."""

    def __init__(self) -> None:
        self.notify = lambda: None
        self.results: list[PrepareResult] = []

    def enqueue(self, spec: AdapterSpec) -> None:
        self.results.append(PrepareResult(spec.identity, 1, 256, LARGE_VOCAB))

    def get(self, identity: str) -> HostAdapter:
        return HostAdapter(torch.zeros(64), empty_table(0), torch.zeros(0), LARGE_VOCAB, 1)

    def pop_results(self) -> list[PrepareResult]:
        taken, self.results = self.results, []
        return taken

    def close(self) -> None: ...


class MessageReader:
    """The API process's side of the channel. It reads all messages at the end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(f"ipc://{self._folder.name}/from_engine")
        self.channel = EngineChannel(self._folder.name)
        self.channel.open()

    def close(self, num_messages: int) -> None:
        for _ in range(num_messages):
            self._socket.recv()
        self.channel.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()


def make_engine(num_rows: int, vocab_size: int) -> Engine:
    num_blocks = num_rows * LENGTH // BLOCK_SIZE
    memory = AdapterMemory({}, torch.float32, torch.device("cpu"), 64)
    runner = PagedRunner(
        ZeroModel(vocab_size),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_length=LENGTH,
        memory=memory,
    )
    capabilities = Capabilities(
        vocab_size, num_rows, LENGTH, num_blocks, BLOCK_SIZE, max_step_tokens=num_rows * PROMPT, num_adapter_units=64
    )
    config = EngineConfig(ModelConfig(Path("none")), max_num_seqs=num_rows)
    return assemble_engine(config, Worker(capabilities, runner, memory, ReadyPreparer()))  # type: ignore[arg-type]


def measure(
    num_rows: int, params: SamplingParams = GREEDY, answer: int = LENGTH - PROMPT, vocab_size: int = VOCAB
) -> float:
    """Return the milliseconds per step. When a sequence finishes, a new sequence starts."""
    engine, reader = make_engine(num_rows, vocab_size), MessageReader()
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
        add(answer if answer == LENGTH - PROMPT else 1 + i % answer)  # so that they finish at different steps
    while engine.status().running < num_rows or engine.status().generated_tokens < 4 * num_rows:
        for output in engine.step():
            if output.finish_reason is not None:
                add(answer)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        outputs = engine.step()
        reader.channel.send(messages.Outputs(outputs))
        for output in outputs:
            if output.finish_reason is not None:
                add(answer)
        times.append(time.perf_counter() - start)
        assert len(outputs) == num_rows
    engine.close()
    reader.close(STEPS)
    return statistics.median(times) * 1e3


def main() -> None:
    args = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    found = {count: min(measure(count) for _ in range(3)) for count in SEQUENCES}
    records = [
        Record(f"step without the model, {count} sequences", found[count], "ms", "", goal, at_most=True)
        for count, goal in zip(SEQUENCES, GOALS_MS, strict=True)
    ]
    growth = found[256] / found[64]
    records.append(Record("growth from 64 to 256 sequences", growth, "x", "", 256 / 64, at_most=True))
    sampled = min(measure(8, DRAWN) for _ in range(3))
    records.append(Record("8 sequences that sample", sampled, "ms"))
    for name, params in (("are greedy", GREEDY), ("sample", DRAWN)):
        large = min(measure(8, params, vocab_size=LARGE_VOCAB) for _ in range(3))
        records.append(Record(f"8 sequences that {name}, {LARGE_VOCAB} tokens, 1 thread", large, "ms"))
    churn = min(measure(256, DRAWN, answer=256) for _ in range(3))
    records.append(Record("256 sequences that sample, one ends and one comes each step", churn, "ms"))
    report(records, args.json)


if __name__ == "__main__":
    main()
