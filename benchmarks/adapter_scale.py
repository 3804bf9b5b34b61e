"""Measure 2,000 adapters on disk with device memory for only 64 adapters, and compare with 16 resident adapters.

Each request uses an adapter drawn from a Zipf distribution (exponent 1). 32 requests are in flight; when a request
finishes, a new request is resolved and queued until its adapter is on the device. The run includes a cold start, so the
first request for each adapter reads, checks and prepares its files. The model is tiny, which is the hardest case,
because little computation overlaps with loading.
"""

import random
import statistics
import tempfile
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from harness.models import write_adapter
from harness.report import Record, make_parser, report
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lorax_server.adapters.host import UNIT_BYTES
from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.process_tuning import set_gil_switch_interval
from lorax_server.types import AdapterRef, EngineStatus, Request, ResolvedAdapter, SamplingParams, StopParams

MANY, FEW, PLACES = 2000, 16, 64
REQUESTS, MAX_CONCURRENCY = 4000, 32
PROMPT, ANSWER = 32, 32
HIDDEN, LAYERS, RANK, VOCAB = 256, 4, 8, 1024
MODULES = ("q_proj", "v_proj")
RUNS = 2


@dataclass
class Run:
    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    status: EngineStatus | None = None

    @property
    def requests_per_s(self) -> float:
        return REQUESTS / self.seconds


def main() -> None:
    args = make_parser(__doc__).parse_args()
    transformers_logging.disable_progress_bar()
    best: dict[int, Run] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_files(folder)
        for _ in range(RUNS):
            for count in (FEW, MANY):
                run = measure(folder, count)
                print(f"{count} adapters: {run.requests_per_s:.1f} requests/s", run.status, flush=True)
                if count not in best or run.seconds < best[count].seconds:
                    best[count] = run
    few, many = best[FEW], best[MANY]
    late = [statistics.quantiles(run.first_tokens, n=100)[98] * 1e3 for run in (few, many)]
    report(
        [
            Record(f"requests per second, {FEW} adapters", few.requests_per_s, "1/s"),
            Record(f"requests per second, {MANY} adapters", many.requests_per_s, "1/s"),
            Record("throughput", many.requests_per_s / few.requests_per_s, "x", f"{FEW} adapters", 0.8),
            Record(f"P99 time to first token, {FEW} adapters", late[0], "ms"),
            Record(f"P99 time to first token, {MANY} adapters", late[1], "ms"),
            Record("P99 time to first token", late[1] / late[0], "x", f"{FEW} adapters", None),
            Record("adapters prepared", many.status.adapters_prepared, ""),
            Record("adapters loaded to the device", many.status.adapters_loaded, ""),
            Record("adapters evicted from the device", many.status.adapters_evicted_from_device, ""),
        ],
        args.json,
    )


def make_files(folder: Path) -> None:
    """Write a model and random adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for i in range(MANY):
        write_adapter(folder / f"adapter-{i}", rng, RANK, HIDDEN, LAYERS, MODULES)


def make_engine(folder: Path) -> Engine:
    set_gil_switch_interval()  # as in a separate process
    units = -(-RANK * HIDDEN * 4 // UNIT_BYTES) * 2 * len(MODULES) * LAYERS
    return build_engine(
        EngineConfig(
            ModelConfig(folder / "model"),
            max_num_seqs=MAX_CONCURRENCY,
            cache_bytes=2**27,
            adapter_bytes=PLACES * units * UNIT_BYTES,
            sources=SourceConfig((folder,)),
        )
    )


def measure(folder: Path, num_adapters: int) -> Run:
    rng = random.Random(0)
    popularity = [1 / (rank + 1) for rank in range(num_adapters)]
    names = [f"adapter-{i}" for i in rng.choices(range(num_adapters), popularity, k=REQUESTS)]
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in names]
    engine = make_engine(folder)
    run, stop = Run(), StopParams(max_new_tokens=ANSWER)
    came: dict[int, float] = {}
    resolving: dict[int, Future[ResolvedAdapter]] = {}
    next_id = num_done = 0
    start = time.perf_counter()
    while num_done < REQUESTS:
        while next_id < REQUESTS and next_id - num_done < MAX_CONCURRENCY:
            came[next_id] = time.perf_counter()
            resolving[next_id] = engine.resolve([AdapterRef("local", names[next_id])])
            next_id += 1
        for i in [i for i, found in resolving.items() if found.done()]:
            identity = resolving.pop(i).result().identity
            engine.add(Request(i, prompts[i], SamplingParams(), stop, identity, tenant=identity))
        if not engine.is_busy:
            engine.wake.wait(0.001)
        engine.wake.clear()
        for output in engine.step():
            assert output.failure is None, output.failure
            if output.request_id in came:
                run.first_tokens.append(time.perf_counter() - came.pop(output.request_id))
            num_done += output.finish_reason is not None
    run.seconds = time.perf_counter() - start
    run.status = engine.status()
    engine.close()
    return run


if __name__ == "__main__":
    main()
