"""Decode steps of a Llama-3.1-8B on one GPU through the whole engine: scheduler, runner, layers, attention, sampling.

The model's weights are random, in bfloat16; adapters have rank 16 at all seven modules of all layers, 84 MB each, and a
place of their own in the GPU's memory. Prompts have 128 tokens. All sequences decode greedily; a step is timed from one
result to the next. The peer is vLLM 0.26, as shipped and at its best, measured on the same kind of GPU (H200) before:
it cannot run beside us.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import Record, report
from transformers import LlamaConfig, LlamaForCausalLM

from lorax_server.adapters.host import UNIT_BYTES, HostAdapter, empty_table
from lorax_server.adapters.spec import AdapterSpec
from lorax_server.adapters.target import Kind
from lorax_server.build import assemble
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.engine.engine import Engine
from lorax_server.kernels import Field, select_ops
from lorax_server.layers.targets import adapter_targets
from lorax_server.models.custom_modeling.flash_llama_modeling import FlashLlamaForCausalLM
from lorax_server.plan import Prepared
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.weights import Weights
from lorax_server.worker.worker import paged_worker

CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
RANK, PROMPT, STEPS, PROFILED = 16, 128, 60, 20
UNIT = UNIT_BYTES // 2
ADAPTER_BYTES = 84 * 2**20


class Case(NamedTuple):
    """So many rows and adapters, the peer's milliseconds as shipped and at its best, and our goal."""

    rows: int
    adapters: int
    shipped: float
    best: float | None
    goal: float


CASES = (
    Case(1, 0, 4.83, None, 4.3),
    Case(64, 0, 6.02, None, 5.2),
    Case(256, 0, 10.87, None, 10),
    Case(1, 1, 7.72, 5.39, 4.3),
    Case(16, 16, 13.39, 6.89, 4.9),
    Case(64, 1, 9.60, 7.00, 5.5),
    Case(64, 64, 33.2, 12.39, 6.8),
    Case(256, 64, 36.9, 20.6, 12.5),
    Case(256, 256, 108.9, None, 16.5),
)


class RandomTensor:
    """A tensor of which a part is drawn when it is asked for."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        parts = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        sizes = [len(range(size)[part]) for size, part in zip(self.shape, parts, strict=True)]
        return torch.empty(sizes, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


class RandomWeights(Mapping[str, Any]):
    """A checkpoint of random tensors."""

    def __init__(self) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM(CONFIG)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def __getitem__(self, name: str) -> RandomTensor:
        return RandomTensor(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Ready:
    """Stands for the preparer: every adapter is one and the same in host memory, and gets a place of its own."""

    def __init__(self, host: HostAdapter) -> None:
        self.notify = lambda: None
        self._host = host
        self._results: list[Prepared] = []

    def enqueue(self, spec: AdapterSpec) -> None:
        self._results.append(Prepared(spec.identity, self._host.units, self._host.buffer.nbytes, CONFIG.vocab_size))
        self.notify()

    def get(self, identity: str) -> HostAdapter:
        return self._host

    def drop(self, identity: str) -> None: ...

    def take_results(self) -> list[Prepared]:
        taken, self._results = self._results, []
        return taken

    def close(self) -> None: ...


def make_host(model: FlashLlamaForCausalLM) -> HostAdapter:
    targets = adapter_targets(model)
    table, at = empty_table(len(targets)), 0
    for index, target in enumerate(targets.values()):
        if target.kind is Kind.LINEAR:
            for field, width in ((Field.A, target.inputs.size), (Field.B, target.outputs.size)):
                table[index, field] = at
                at += -(-RANK * width // UNIT) * UNIT
            table[index, Field.RANK] = RANK
    buffer = torch.empty(at, dtype=torch.bfloat16).normal_(0, 0.02).pin_memory()
    return HostAdapter(buffer, table, torch.ones(len(targets)), CONFIG.vocab_size, at // UNIT)


def make_engine(max_rows: int, max_adapters: int, graphs: bool | None) -> Engine:
    device = torch.device("cuda", 0)
    weights = Weights(
        RandomWeights(), device=device, dtype=torch.bfloat16, process_group=FakeGroup(), ops=select_ops(device)
    )
    model = FlashLlamaForCausalLM("", CONFIG, weights)
    config = EngineConfig(
        ModelConfig(Path("random"), device="cuda:0"),
        max_rows=max_rows,
        max_length=1024,
        cache_bytes=40 * 2**30,
        adapter_bytes=ADAPTER_BYTES * (max_adapters + 2),
        cuda_graphs=graphs,
    )
    worker = paged_worker(model, config, FakeGroup())
    assert worker.preparer is not None
    worker.preparer.close()
    worker.preparer = Ready(make_host(model))  # type: ignore[assignment]
    return assemble(config, worker)


def start(engine: Engine, case: Case, first_id: int) -> None:
    """Add the sequences of a case, and run until all of them decode."""
    for i in range(case.rows):
        identity = f"adapter {i * case.adapters // case.rows}" if case.adapters else ""
        prompt = [(i * 31 + j) % 1000 + 3 for j in range(PROMPT)]
        engine.add(
            Request(
                first_id + i,
                prompt,
                SamplingParams(),
                StopParams(max_new_tokens=STEPS + 200),
                adapter_identity=identity,
                tenant=identity,
            )
        )
    while engine.status().running < case.rows:
        engine.step()


def stop(engine: Engine, case: Case, first_id: int) -> None:
    for i in range(case.rows):
        engine.abort(first_id + i)
    while engine.status().running:
        engine.step()


def measure(engine: Engine, case: Case, first_id: int) -> float:
    """Return the median milliseconds of a step in which all sequences decode."""
    start(engine, case, first_id)
    times, counts = [], []
    while len(times) < STEPS + 20:
        begin = time.perf_counter()
        counts.append(len(engine.step()))
        times.append(time.perf_counter() - begin)
    assert set(counts[-STEPS:]) == {case.rows}, "not all sequences decode in every step"
    stop(engine, case, first_id)
    return statistics.median(times[-STEPS:]) * 1e3


def profile(engine: Engine, case: Case, first_id: int) -> None:
    """Print the time of a step by kernel, and the time in which no kernel runs. Kernels may overlap."""
    start(engine, case, first_id)
    for _ in range(10):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    stop(engine, case, first_id)
    events = [event for event in profiler.events() if event.device_type == torch._C._autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        sums[event.name] += event.time_range.end - event.time_range.start
        counts[event.name] += 1
    step = (end - spans[0][0]) / PROFILED
    print(f"\n{case.rows} rows, {case.adapters or 'no'} adapters: a step of {step:.0f} us; a kernel runs in", end=" ")
    print(f"{busy / PROFILED:.0f} of them ({busy / PROFILED / step:.1%}); all kernels {sums.total() / PROFILED:.0f} us")
    for name, total in sums.most_common(14):
        print(f"  {total / PROFILED:8.1f} us {counts[name] / PROFILED:6.1f} x  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some steps instead")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel on its own")
    args = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    engine = make_engine(256, 256, False if args.no_graphs else None)
    print(f"engine made in {time.monotonic() - begin:.0f} s", flush=True)
    for i in range(256):
        engine._table.register(AdapterSpec(f"adapter {i}", f"adapter {i}", (), 1))
    if args.profile:
        for number, case in enumerate(CASES):
            if case.rows < 256:
                profile(engine, case, number * 1000)
        return engine.close()
    records = []
    for number, case in enumerate(CASES):
        value = measure(engine, case, number * 1000)
        best = "" if case.best is None else f", {case.best} at its best"
        peer = f"vLLM {case.shipped}{best}"
        name = f"decode step, {case.rows} rows, {case.adapters or 'no'} adapters"
        records.append(Record(name, value, "ms", peer, case.goal, at_most=True))
        print(f"{name}: {value:.2f} ms ({peer})", flush=True)
    engine.close()
    report(records, args.json)
    return None


if __name__ == "__main__":
    main()
