"""Every architecture in half precision with Hopper kernels, compared with transformers.

The oracle is transformers in float32 with weights that are exact in half precision. The error limit is the error of
transformers and PEFT in half precision.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lorax_server.adapters.batch import AdapterArena
from lorax_server.build import assemble_engine
from lorax_server.config import EngineConfig, ModelConfig
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import Ops, reference, select_ops
from lorax_server.layers.targets import collect_adapter_targets
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import build_model
from lorax_server.types import Request, SamplingParams, StopParams
from lorax_server.weights import Weights
from lorax_server.worker.worker import build_paged_worker
from tests.lora import Factors, make_arena, merged, random_factors
from tests.paged import PagedDriver
from tests.parity.half_models import LEFT_TO_TRITON, MODELS, VOCAB
from tests.parity.oracle import Float8Cache

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
GPU = torch.device("cuda")
SPREAD = 0.05  # parameter scale that gives attention scores and layer outputs of about one
CASES = [*((name, BF16) for name in MODELS), ("llama-gqa-64", FP16), ("gpt2-64", FP16)]

# Number of tokens of each sequence in each forward (0: not started). Prompts run whole and in chunks, alone and mixed
# with decode.
DECODE = [1] * 6
FEEDS = [
    [1, *DECODE],
    [150, *DECODE],
    [70, 130, *DECODE],
    [16, 1, 40, *DECODE],
    [0, 0, 140, *DECODE],
    [0, 0, 0, 5, 129, *DECODE],
    [33, *DECODE],
]
ADAPTERS = [1, 0, 3, 2, 2, 4, 1]  # adapter index of each sequence; 0: base model
RANKS = (1, 3, 16)
# Models whose logits hardly depend on one layer's queries: Gemma scales its embedding up, and the feed-forward layers
# of Phi and GPT-J do not read the attention output.
LOW_QUERY_SENSITIVITY = ("gemma-256", "phi-80", "gptj-256")
MAX_ERROR_RATIO = 1.5  # ratio to transformers' error
MIN_ERROR = 1e-3  # relative to the largest logit


class CountingKernel:
    """Wraps a kernel and counts its launches and fallbacks."""

    def __init__(self, kernel: Any) -> None:
        self.launches = self.num_unsupported = 0
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.launches += 1
        self._kernel(*args, **kwargs)

    def supports(self, *args: Any) -> bool:
        is_supported: bool = self._kernel.supports(*args)
        self.num_unsupported += not is_supported
        return is_supported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


class Pair:
    """A model in this server in half precision, and in transformers in float32 and half precision."""

    def __init__(self, name: str, dtype: torch.dtype, ops: Ops) -> None:
        self.name, self.dtype, self.ops = name, dtype, ops
        self.oracle = make_oracle(name, dtype)
        self.peer = deepcopy(self.oracle).to(dtype)
        self.ours = self.make_ours(ops)

    def make_ours(self, ops: Ops, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> PagedCausalLM:
        config = MODELS[self.name].config()
        for name, value in changes.items():
            setattr(config, name, value)
        tensors = dict(self.oracle.state_dict()) | (tensors or {})
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight")
        weights = Weights(tensors, device=GPU, dtype=self.dtype, process_group=FakeGroup(), ops=ops)
        return build_model(config, weights)


@torch.no_grad()
def make_oracle(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(MODELS[name].config(), dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        parameter.normal_(0, SPREAD)
        if parameter_name.endswith("weight") and (parameter.dim() == 1 or "_norm" in parameter_name):
            parameter.add_(MODELS[name].norm_mean)
        parameter.copy_(parameter.to(dtype).float())
    return model.to(GPU)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops(GPU)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{str(case[1]).removeprefix('torch.')}")
def pair(request: pytest.FixtureRequest, ops: Ops) -> Pair:
    name, dtype = request.param
    return Pair(name, dtype, ops)


@pytest.fixture
def counted_kernels(ops: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[CountingKernel, CountingKernel]:
    """Watch the decode and prefill attention kernels."""
    assert type(ops).__name__ == "HopperOps"
    decode, prefill = CountingKernel(ops._decode), CountingKernel(ops._prefill)
    monkeypatch.setattr(ops, "_decode", decode)
    monkeypatch.setattr(ops, "_prefill", prefill)
    return decode, prefill


@pytest.fixture
def best_kernels(counted_kernels: tuple[CountingKernel, CountingKernel], pair: Pair) -> Iterator[None]:
    """Check that Hopper's kernels ran all attention, or none if they do not support the model."""
    yield
    for kernel in counted_kernels:
        if pair.name in LEFT_TO_TRITON:
            assert not kernel.launches
        else:
            assert kernel.launches
            assert not kernel.num_unsupported


def make_rows() -> list[list[int]]:
    draw = random.Random(0)
    return [draw.choices(range(3, VOCAB), k=sum(feeds)) for feeds in FEEDS]


def run_batches(
    model: PagedCausalLM, rows: Sequence[Sequence[int]], arena: AdapterArena | None = None
) -> list[torch.Tensor]:
    """Return the logits of all tokens of each row, fed as FEEDS says."""
    driver = PagedDriver(model, num_blocks=128, block_size=16, as_served=True)
    seqs = [driver.add(adapter if arena else 0, len(row)) for adapter, row in zip(ADAPTERS, rows, strict=True)]
    waiting, got = [deque(feeds) for feeds in FEEDS], [[] for _ in rows]  # type: ignore[var-annotated]
    while any(waiting):
        counts = {row: waiting[row].popleft() for row in range(len(rows)) if waiting[row]}
        members = [row for row, count in counts.items() if count]
        feeds = []
        for row in members:
            start = driver.lengths[seqs[row]]
            feeds.append((seqs[row], rows[row][start : start + counts[row]]))
        for row, logits in zip(members, driver.forward(feeds, arena), strict=True):
            got[row].append(logits)
    return [torch.cat(pieces).float() for pieces in got]


@torch.no_grad()
def compute_logits(model: Any, ids: Sequence[int], **options: Any) -> torch.Tensor:
    """Return a transformers model's logits for each token."""
    logits: torch.Tensor = model(torch.tensor([list(ids)], device=GPU), **options).logits[0]
    return logits.float()


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def check_errors(
    found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], peers: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Compare row by row. Return the largest error and the largest ratio to transformers' error."""
    ratios, errors = [], []
    for row, (ours, oracle, peer) in enumerate(zip(found, exact, peers, strict=True)):
        assert ours.shape == oracle.shape
        assert bool(ours.isfinite().all()), f"row {row} is not finite"
        error, limit, size = rms(ours - oracle), rms(peer - oracle), rms(oracle)
        ratios.append(error / limit)
        errors.append(error / size)
        first = int((ours - oracle).square().mean(-1).argmax())
        assert error <= MAX_ERROR_RATIO * limit + MIN_ERROR * size, (
            f"row {row}: {error:.2e}, transformers {limit:.2e}, worst at {first} of {len(ours)}"
        )
        largest, allowed = float((ours - oracle).abs().max()), float((peer - oracle).abs().max())
        assert largest <= 2 * MAX_ERROR_RATIO * allowed + MIN_ERROR * size, (
            f"row {row}: at most {largest:.2e} off, not {allowed:.2e}"
        )
    return max(errors), max(ratios)


@pytest.mark.usefixtures("best_kernels")
def test_logit_errors_match_transformers_in_half_precision(pair: Pair, record_property: Any) -> None:
    rows = make_rows()
    result = run_batches(pair.ours, rows)
    exact, peers = ([compute_logits(model, row) for row in rows] for model in (pair.oracle, pair.peer))
    error, ratio = check_errors(result, exact, peers)
    record_property("seen", f"error {error:.1e} of the logits, {ratio:.2f} x transformers")


def adapted(peer: Any, factors: Factors, scale: float) -> Any:
    """Return a model with LoRA hooks on its linear layers, computed as in PEFT in the model's dtype."""

    def add(a: torch.Tensor, b: torch.Tensor, _: Any, inputs: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out + F.linear(F.linear(inputs[0], a), b) * scale

    model = deepcopy(peer)
    for name, (lora_a, lora_b) in factors.items():
        a, b = (x.to(GPU, peer.dtype) for x in (lora_a, lora_b))
        model.get_submodule(name).register_forward_hook(partial(add, a, b))
    return model


def make_adapters(pair: Pair) -> list[tuple[Factors, float]]:
    """Create adapters that are exact in half precision. The last one has a single target."""
    targets, adapters = collect_adapter_targets(pair.ours), []
    for rank in RANKS:
        factors = random_factors(targets, rank, seed=rank)
        rounded = {name: (a.to(pair.dtype).float(), b.to(pair.dtype).float()) for name, (a, b) in factors.items()}
        adapters.append((rounded, 0.25 / 2 ** (rank // 8)))
    first = adapters[0][0]
    one = next(iter(first))
    return [*adapters, ({one: first[one]}, 0.25)]


@pytest.mark.usefixtures("best_kernels")
def test_adapter_logit_errors_match_peft_in_half_precision(pair: Pair, record_property: Any) -> None:
    rows, adapters = make_rows(), make_adapters(pair)
    arena = make_arena(collect_adapter_targets(pair.ours), adapters, GPU, pair.dtype)
    result = run_batches(pair.ours, rows, arena)
    oracles = [pair.oracle, *(merged(pair.oracle, *adapter) for adapter in adapters)]
    peers = [pair.peer, *(adapted(pair.peer, *adapter) for adapter in adapters)]
    exact, near = (
        [compute_logits(models[i], row) for i, row in zip(ADAPTERS, rows, strict=True)] for models in (oracles, peers)
    )
    error, ratio = check_errors(result, exact, near)
    record_property("seen", f"error {error:.1e} of the logits, {ratio:.2f} x transformers")
    plain = compute_logits(pair.oracle, rows[1])
    effects = [rms(compute_logits(oracle, rows[1]) - plain) / rms(plain) for oracle in oracles[1:]]
    assert min(effects[:-1]) > 0.1, "they do something"
    assert effects[-1] > (0.05 if pair.name in LOW_QUERY_SENSITIVITY else 0.1), "so does the one at a single target"


def generate(model: PagedCausalLM, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Generate greedily in the engine, with graphs; steps are too small for the longest prompt."""
    config = EngineConfig(
        ModelConfig(Path("in-memory"), device="cuda"),
        max_num_seqs=len(prompts),
        max_step_tokens=64,
        max_length=256,
        cache_bytes=2**26,
        adapter_bytes=0,
        cuda_graphs=True,
    )
    engine = assemble_engine(config, build_paged_worker(model, config, FakeGroup()))
    tokens: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.add(Request(i, prompt, SamplingParams(), StopParams(max_new_tokens=count, ignore_eos=True)))
    while engine.has_work:
        for output in engine.step():
            assert output.failure is None, output.failure
            tokens[output.request_id] += [token.token_id for token in output.tokens]
    assert engine.status().chunks > 0
    engine.close()
    return tokens


@pytest.mark.usefixtures("best_kernels")
def test_greedy_tokens_match_transformers(pair: Pair, record_property: Any) -> None:
    """Compare greedy tokens with transformers in float32 and half precision, up to near ties."""
    prompts = [row[:length] for row, length in zip(make_rows()[1:], (1, 9, 150, 40), strict=False)]
    compared = same = 0
    for prompt, tokens in zip(prompts, generate(pair.ours, prompts, 40), strict=True):
        assert len(tokens) == 40
        ids, chosen = [*prompt, *tokens[:-1]], torch.tensor(tokens, device=GPU)
        exact, peer = (compute_logits(model, ids)[len(prompt) - 1 :] for model in (pair.oracle, pair.peer))
        error = (peer - exact).abs().amax(-1)
        first, second = exact.topk(2).values.unbind(-1)
        is_clear = first - second > 2 * error
        assert torch.equal(chosen[is_clear], exact.argmax(-1)[is_clear])
        assert torch.equal(chosen[is_clear], peer.argmax(-1)[is_clear])
        gap = first - exact.gather(-1, chosen[:, None])[:, 0]
        assert bool((gap <= 2 * MAX_ERROR_RATIO * error).all())
        compared, same = compared + int(is_clear.sum()), same + int((chosen == exact.argmax(-1)).sum())
    record_property("seen", f"{compared} of 160 clear, {same} the best in float32")
    assert compared > 100


def test_float8_cache_error_is_bounded(
    ops: Ops, counted_kernels: tuple[CountingKernel, CountingKernel], record_property: Any
) -> None:
    """The error is at most the sum of the float8 and half precision errors, with fused kernels and plain torch."""
    pair = Pair("llama-gqa-64", BF16, ops)
    scales = [(0.01 * (layer + 1), 0.02 * (layer + 1)) for layer in range(3)]
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in "kv"]
    given = dict(zip(names, map(torch.tensor, sum(scales, ())), strict=True))
    models = [pair.make_ours(each, given, quantize="fp8-kv") for each in (ops, reference)]
    assert models[0].kv_dtype == torch.float8_e4m3fn
    rows = make_rows()
    ours, plain = (run_batches(model, rows) for model in models)
    decode, prefill = counted_kernels
    assert decode.launches
    assert not decode.num_unsupported
    assert prefill.num_unsupported  # the prefill kernel does not support float8 caches
    seen = []
    for row, ids in enumerate(rows):
        exact, half = compute_logits(pair.oracle, ids), compute_logits(pair.peer, ids)
        rounded = compute_logits(
            pair.oracle, ids, past_key_values=Float8Cache(scales, pair.oracle.config), use_cache=True
        )
        size = rms(exact)
        errors = [rms(x) / size for x in (rounded - exact, half - exact, ours[row] - exact, ours[row] - rounded)]
        float8, bf16, actual, beyond = errors
        seen.append((*errors, rms(ours[row] - plain[row]) / size))
        assert actual <= MAX_ERROR_RATIO * (float8 + bf16) + MIN_ERROR, f"row {row}"
        assert beyond <= MAX_ERROR_RATIO * (float8 + bf16) + MIN_ERROR, f"row {row}"
        assert seen[-1][-1] <= float8 + bf16 + MIN_ERROR, f"row {row}"
    worst = [max(column) for column in zip(*seen, strict=True)]
    names = ["float8 alone", "bfloat16 alone", "ours", "ours to float8 in float32", "ours to plain torch"]
    record_property("seen", ", ".join(f"{name} {value:.1e}" for name, value in zip(names, worst, strict=True)))
