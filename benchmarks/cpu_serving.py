"""Measure a mixed load for 32 adapters on a CPU, and compare with transformers and PEFT in static batches.

200 requests have prompts of 16 to 128 tokens and completions of 8 to 128 tokens (both log-uniform). Each request uses
one of 32 adapters of rank 4 to 16, drawn from a Zipf distribution. The model is a Llama with 160M parameters. The peer
batches requests in order of arrival, up to `--rows` per batch, with an adapter for each sequence (PEFT's
`adapter_names`), and starts the next batch when all sequences have finished. Its adapters are loaded in advance; ours
are loaded from their folders during the measurement. In the first run, all requests arrive at the start (throughput).
In the second run, they arrive at random times, at 70% of our capacity.
"""

import random
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from harness.models import SIZE_160M, VOCAB
from harness.report import Record, make_parser, report
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from lorax_server.build import build_engine
from lorax_server.config import EngineConfig, ModelConfig, SourceConfig
from lorax_server.engine.engine import Engine
from lorax_server.process_tuning import set_gil_switch_interval
from lorax_server.types import AdapterRef, Request, SamplingParams, StopParams

ADAPTERS = 32
PROMPTS, COMPLETIONS = (16, 128), (8, 128)  # tokens
LOAD_FRACTION = 0.7  # of our capacity
PEER = "transformers + PEFT, static batches"


@dataclass(frozen=True)
class BenchRequest:
    """A request in the benchmark's load."""

    request_id: int
    prompt: list[int]
    num_tokens: int
    adapter: int


@dataclass
class RunResult:
    """Arrival times and tokens of each request. Times are seconds since the start."""

    arrivals: dict[int, float]
    outputs: dict[int, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def seconds(self) -> float:
        return max(times[-1][0] for times in self.outputs.values())

    @property
    def first_token_latencies(self) -> list[float]:
        return [times[0][0] - self.arrivals[i] for i, times in self.outputs.items()]

    @property
    def inter_token_latencies(self) -> list[float]:
        """Return the seconds between tokens."""
        return [b[0] - a[0] for times in self.outputs.values() for a, b in pairwise(times)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="largest batch of each side (%(default)s)")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    load = make_load(args.requests)
    total = sum(request.num_tokens for request in load)
    print(f"{len(load)} requests, {total} tokens, at most {args.rows} concurrent, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer = make_models(folder)
        model, sources = ModelConfig(folder / "model"), SourceConfig((folder,))
        set_gil_switch_interval()  # as the engine process does
        engine = build_engine(EngineConfig(model, max_num_seqs=args.rows, sources=sources, adapter_bytes=2**28))
        run_ours(engine, load[:2], [0.0] * 2)  # warm-up
        run_peer(peer, load[:2], [0.0] * 2, args.rows)
        no_delays = [0.0] * len(load)
        ours, theirs = run_ours(engine, load, no_delays), run_peer(peer, load, no_delays, args.rows)
        print(f"all at the start: {total / ours.seconds:.1f} against {total / theirs.seconds:.1f} tokens/s", flush=True)
        rate = LOAD_FRACTION * len(load) / ours.seconds
        arrivals = poisson(len(load), rate)
        ours_late, theirs_late = run_ours(engine, load, arrivals), run_peer(peer, load, arrivals, args.rows)
        engine.close()
    records = [
        Record("throughput, ours", total / ours.seconds, "tokens/s"),
        Record("throughput, peer", total / theirs.seconds, "tokens/s"),
        Record("throughput", theirs.seconds / ours.seconds, "x", PEER, 3.0),
        Record("requests with the same tokens", same_tokens(ours, theirs), "of 1", PEER),
        *compare("time to first token", ours_late.first_token_latencies, theirs_late.first_token_latencies, goal=1.0),
        *compare("time between tokens", ours_late.inter_token_latencies, theirs_late.inter_token_latencies, goal=None),
    ]
    report(records, args.json)


def compare(name: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None) -> Iterator[Record]:
    for percent in (50, 90, 99):
        mine, other = (statistics.quantiles(values, n=100)[percent - 1] for values in (ours, theirs))
        yield Record(f"{name}, P{percent}, ours", mine * 1e3, "ms")
        yield Record(f"{name}, P{percent}, peer", other * 1e3, "ms")
        yield Record(f"{name}, P{percent}: times shorter", other / mine, "x", PEER, goal if percent == 50 else None)


def same_tokens(ours: RunResult, theirs: RunResult) -> float:
    """Return the fraction of requests whose tokens are equal. Rounding can change tokens whose logits are
    nearly equal.
    """
    tokens = [([t for _, t in ours.outputs[i]], [t for _, t in outputs]) for i, outputs in theirs.outputs.items()]
    return statistics.mean(mine == other for mine, other in tokens)


# --- The load ---------------------------------------------------------------------------------------------------------


def make_load(count: int) -> list[BenchRequest]:
    rng = random.Random(0)
    popularity = [1 / (rank + 1) for rank in range(ADAPTERS)]
    return [
        BenchRequest(
            i,
            [rng.randrange(2, VOCAB) for _ in range(log_uniform(rng, PROMPTS))],
            log_uniform(rng, COMPLETIONS),
            rng.choices(range(ADAPTERS), popularity)[0],
        )
        for i in range(count)
    ]


def log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return round(low * (high / low) ** rng.random())


def poisson(count: int, rate: float) -> list[float]:
    rng = random.Random(1)
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def name_of(adapter: int) -> str:
    return f"adapter-{adapter}"  # PEFT takes a plain number for a layer


def make_models(folder: Path) -> Any:
    """Write the base model and its adapters. Return the PEFT model with all adapters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZE_160M,
        max_position_embeddings=1024,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    model: Any = LlamaForCausalLM.from_pretrained(folder / "model")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(ADAPTERS):
            lora = LoraConfig(r=(4, 8, 16)[i % 3], lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
            if i == 0:
                model = get_peft_model(model, lora, adapter_name=name_of(0))
            else:
                model.add_adapter(name_of(i), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.02)
        model.save_pretrained(folder)
        base = LlamaForCausalLM.from_pretrained(folder / "model")
        peer = PeftModel.from_pretrained(base, folder / name_of(0), adapter_name=name_of(0))
        for i in range(1, ADAPTERS):
            peer.load_adapter(folder / name_of(i), adapter_name=name_of(i))
    return peer.eval()


# --- Ours -------------------------------------------------------------------------------------------------------------


def run_ours(engine: Engine, load: Sequence[BenchRequest], arrivals: Sequence[float]) -> RunResult:
    result = RunResult({request.request_id: arrival for request, arrival in zip(load, arrivals, strict=True)})
    pending, resolving = list(zip(load, arrivals, strict=True)), []
    start = time.perf_counter()
    while pending or resolving or engine.has_work:
        while pending and pending[0][1] <= time.perf_counter() - start:
            request, _ = pending.pop(0)
            resolving.append((request, engine.resolve([AdapterRef("local", name_of(request.adapter))])))
        for request, found in [each for each in resolving if each[1].done()]:
            resolving.remove((request, found))
            identity = found.result().identity
            stop = StopParams(max_new_tokens=request.num_tokens)
            engine_request = Request(
                request.request_id, request.prompt, SamplingParams(), stop, identity, tenant=identity
            )
            engine.add(engine_request)
        if not engine.is_busy:
            engine.wake.wait(0.001)
        engine.wake.clear()
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            result.outputs[output.request_id].append((now, output.tokens[0].token_id))
    return result


# --- The peer ---------------------------------------------------------------------------------------------------------


class TokenTimer:
    """A stopping criterion of `generate` that records the time of each token."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def run_peer(model: Any, load: Sequence[BenchRequest], arrivals: Sequence[float], rows: int) -> RunResult:
    result = RunResult({request.request_id: arrival for request, arrival in zip(load, arrivals, strict=True)})
    pending = list(zip(load, arrivals, strict=True))
    start = time.perf_counter()
    while pending:
        time.sleep(max(0.0, pending[0][1] - (time.perf_counter() - start)))
        now = time.perf_counter() - start
        batch = [request for request, arrival in pending[:rows] if arrival <= now]
        del pending[: len(batch)]
        generate(model, batch, result, start)
    return result


def generate(model: Any, batch: Sequence[BenchRequest], result: RunResult, start: float) -> None:
    width = max(len(request.prompt) for request in batch)
    ids = torch.tensor([[0] * (width - len(request.prompt)) + request.prompt for request in batch])
    mask = torch.tensor([[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch])
    timer = TokenTimer(start)
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        adapter_names=[name_of(request.adapter) for request in batch],
        max_new_tokens=max(request.num_tokens for request in batch),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[timer],
    )
    for row, request in enumerate(batch):
        tokens = output[row, width : width + request.num_tokens].tolist()
        for moment, token_id in zip(timer.times, tokens, strict=False):
            result.outputs[request.request_id].append((moment, token_id))


if __name__ == "__main__":
    main()
