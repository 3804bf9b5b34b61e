"""Measure single kernels on one GPU: linear layers with LoRA, attention and sampling.

`linears`: all linear layers of Llama-3.1-8B with a norm and an activation between them, as one CUDA graph. The peer is
the same chain with cuBLAS and without adapters. `attention`: 32 query heads, 8 key-value heads, 128 dimensions, KV
blocks of 16 tokens in random order; RoPE and the cache write are included. Decode is compared with the time to read the
cache once at 4.1 TB/s, and prefill with torch's attention. `sampling`: 256 sequences, 128,256 tokens. The peer is
`GeneralSampler`, the same rules in torch.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness.gpu_timing import BYTES_PER_MS, capture, measure, measure_calls
from harness.report import Record, make_parser, report
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorax_server.kernels import (
    Activation,
    AttentionSpec,
    Field,
    HostLengths,
    LayerCache,
    LinearWeights,
    LoraBatch,
    LoraTarget,
    Ops,
    PagedBatch,
    select_ops,
)
from lorax_server.kernels.triton.gated_activation import apply_gate
from lorax_server.kernels.triton.ops import TritonOps
from lorax_server.sampling.general_sampler import GeneralSampler
from lorax_server.sampling.sampler import History, Sampler, SequenceSampling
from lorax_server.types import SamplingParams

# --- Linear layers ----------------------------------------------------------------------------------------------------

HIDDEN, INNER, KV, LAYERS = 4096, 14336, 1024, 32
LINEARS = {
    "qkv": (HIDDEN, (HIDDEN, KV, KV)),
    "o": (HIDDEN, (HIDDEN,)),
    "gate_up": (HIDDEN, (INNER, INNER)),
    "down": (INNER, (HIDDEN,)),
}
WIDTHS = [(inputs, width) for inputs, widths in LINEARS.values() for width in widths]
ADAPTER_ELEMENTS = 16 * LAYERS * sum(map(sum, WIDTHS))  # of rank 16
UNIT = 128  # elements; alignment of LoRA factors
SILU = Activation("silu", F.silu)
MIXED_RANKS = [8, 16, 32, 64] * 16
CHAINS: list[tuple[str, int, list[int], float | None]] = [  # rows, ranks of the adapters, goal in ms
    ("1 row, no adapters", 1, [], 4.02),
    ("64 rows, no adapters", 64, [], 4.46),
    ("256 rows, no adapters", 256, [], 7.61),
    ("1 row, 1 adapter", 1, [16], 3.99),
    ("16 rows, 16 adapters", 16, [16] * 16, 4.53),
    ("64 rows, 1 adapter", 64, [16], 4.79),
    ("64 rows, 64 adapters", 64, [16] * 64, 6.02),
    ("64 rows, 64 adapters of ranks 8 to 64", 64, MIXED_RANKS, 7.54),
    ("64 rows, 64 adapters, one of rank 512", 64, [16] * 63 + [512], 8.13),
    ("256 rows, 64 adapters", 256, [16] * 64, 10.15),
    ("256 rows, 256 adapters", 256, [16] * 256, 14.23),
]


class Chain:
    """The linear layers of Llama-3.1-8B, and adapters with any ranks in one buffer."""

    def __init__(self, ops: Ops, buffer: torch.Tensor) -> None:
        self.ops, self.buffer, self.num_targets = ops, buffer, LAYERS * len(WIDTHS)
        numbers = itertools.count()
        self.layers: list[dict[str, tuple[LinearWeights, list[LoraTarget]]]] = [{} for _ in range(LAYERS)]
        for layer, (name, (inputs, widths)) in itertools.product(self.layers, LINEARS.items()):
            matrix = torch.empty(sum(widths), inputs, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
            pairs = zip(itertools.accumulate(widths), widths, strict=True)
            targets = [LoraTarget(next(numbers), slice(stop - width, stop)) for stop, width in pairs]
            layer[name] = LinearWeights(matrix), targets
        self.norm, self.eps = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), torch.tensor(1e-5, device="cuda")
        ops.prepare([weights for layer in self.layers for weights, _ in layer.values()], with_lora=True)

    def make_lora(self, ranks: Sequence[int], rows: int) -> LoraBatch | None:
        """Return LoRA inputs with the rows spread evenly over adapters of the given ranks."""
        if not ranks:
            return None
        rank = torch.tensor([0, *ranks])[:, None].expand(-1, self.num_targets)
        widths = torch.tensor(WIDTHS * (self.num_targets // len(WIDTHS)))
        sizes = -(-(rank[..., None] * widths) // UNIT) * UNIT
        ends = sizes.flatten().cumsum(0).view_as(sizes)
        assert int(ends.max()) + 16 * INNER <= self.buffer.numel(), "the buffer is too small"
        table = torch.full((*rank.shape, len(Field)), -1, dtype=torch.int64)
        table[..., [Field.A, Field.B]] = ends - sizes
        table[..., Field.RANK :] = 0
        table[..., Field.RANK] = rank
        scales = torch.rand(rank.shape, device="cuda") + 0.5
        adapters = [1 + row * len(ranks) // rows for row in range(rows)]
        bounds = [0, *(i for i in range(1, rows) if adapters[i] != adapters[i - 1]), rows]
        indices = torch.tensor(adapters, dtype=torch.int32, device="cuda")
        segments = [adapters[start] for start in bounds[:-1]]
        return LoraBatch(self.buffer, table.cuda(), scales, widths.cuda(), indices, table, bounds, segments)

    def run(self, x: torch.Tensor, lora: LoraBatch | None, is_plain: bool = False) -> torch.Tensor:
        """Run all layers, with cuBLAS if `is_plain`."""
        residual: torch.Tensor | None = None
        for layer in self.layers:

            def linear(name: str, x: torch.Tensor, layer: dict[str, Any] = layer) -> torch.Tensor:
                weights, targets = layer[name]
                return F.linear(x, weights.plain) if is_plain else self.ops.linear(x, weights, lora, targets)

            x, residual = self.ops.rms_norm(x, residual, self.norm, self.eps, lora, ())
            x = linear("qkv", x)[:, :HIDDEN].contiguous()
            x, residual = self.ops.rms_norm(linear("o", x), residual, self.norm, self.eps)
            weights, targets = layer["gate_up"]
            if is_plain:
                gated = apply_gate(linear("gate_up", x), SILU)
            else:
                gated = self.ops.gated_linear(x, weights, SILU, lora, targets)
            x = linear("down", gated)
        return x


def measure_linears(ops: Ops) -> list[Record]:
    buffer = torch.empty(256 * ADAPTER_ELEMENTS + 16 * INNER, dtype=torch.bfloat16, device="cuda")
    for piece in buffer.split(1 << 30):
        piece.normal_(0, 0.02)
    chain, records = Chain(ops, buffer), []
    base = sum(inputs * sum(widths) for inputs, widths in LINEARS.values())
    for name, rows, ranks, goal in CHAINS:
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        lora = chain.make_lora(ranks, rows)
        if lora is not None:
            ops.refresh_lora_plan(lora, lora)
        (ours,) = measure(capture(partial(chain.run, x, lora)))
        (plain,) = measure(capture(partial(chain.run, x, None, True)))
        floor = 2 * LAYERS * (base + sum(ranks) * sum(map(sum, WIDTHS))) / BYTES_PER_MS
        peer = f"cuBLAS without adapters {plain:.2f}, bytes {floor:.2f}"
        records.append(Record(f"linears, {name}", ours, "ms", peer, goal, at_most=True))
    return records


# --- Attention --------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, BLOCK, NUM_CACHES = 32, 8, 128, 16, 8
SPEC = AttentionSpec(DIM**-0.5)
DECODES = {(64, 512): 1.25, (64, 2048): 1.25, (64, 8192): 1.25, (1, 32768): 1.25, (256, 1024): None, (256, 4096): None}
ATTENTION_PREFILLS = {1024: None, 8192: 450.0, 16384: None}  # tokens: goal in TFLOP/s
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def make_batch(rows: int, new: int, cached: int) -> PagedBatch:
    """Return a batch of sequences with equal lengths and KV blocks in random order."""
    blocks = -(-(new + cached) // BLOCK)
    tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks)
    places = torch.arange(cached, cached + new)
    slots = (tables[:, places // BLOCK].long() * BLOCK + places % BLOCK).flatten()
    bounds = None if new == 1 else (torch.arange(rows + 1) * new).int().cuda()
    return PagedBatch(
        tables.cuda(),
        torch.full((rows,), new).cuda(),
        torch.full((rows,), cached).cuda(),
        slots.cuda(),
        cu_seqlens=bounds,
        host_lengths=HostLengths([new] * rows, [cached] * rows),
        stores_all=True,
    )


def time_attention(ops: Ops, rows: int, new: int, cached: int, dtype: torch.dtype) -> float:
    """Return the time of one layer in milliseconds. Layers have separate caches, which do not fit in L2."""
    batch, num_tokens = make_batch(rows, new, cached), rows * new
    shape = int(batch.block_tables.max()) + 1, KV_HEADS, BLOCK, DIM

    def random_cache() -> LayerCache:
        keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
        return keys, values

    caches = [random_cache() for _ in range(NUM_CACHES)]
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    turns = torch.rand(num_tokens, DIM // 2, device="cuda")
    angles = turns.cos(), turns.sin()

    def forward() -> None:
        if batch.cu_seqlens is None:
            batch.derived.clear()  # so that the graph computes the decode plan
        for cache in caches:
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            ops.attend(q, k, v, angles, cache, batch, SPEC)

    return measure(capture(forward))[0] / NUM_CACHES


def time_torch_attention(tokens: int, backend: SDPBackend) -> float:
    q, k, v = (torch.randn(1, n, tokens, DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS))

    def forward() -> None:
        with sdpa_kernel([backend]):
            for _ in range(NUM_CACHES):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return measure(capture(forward))[0] / NUM_CACHES


def measure_attention(ops: Ops) -> list[Record]:
    records = []
    for ((rows, length), limit), dtype in itertools.product(DECODES.items(), (torch.bfloat16, torch.float8_e4m3fn)):
        ours = time_attention(ops, rows, 1, length, dtype)
        floor = 2 * rows * length * KV_HEADS * DIM * dtype.itemsize / BYTES_PER_MS
        name = f"attention, decode of {rows} x {length} tokens, {str(dtype)[6:]} ({1e3 * ours:.1f} us)"
        goal = limit if dtype == torch.bfloat16 else None
        records.append(Record(name, ours / floor, "x", "bytes at 4.1 TB/s", goal, at_most=True))
    for tokens, goal in ATTENTION_PREFILLS.items():
        tera = 2 * tokens * tokens * HEADS * DIM / 1e9  # TFLOP per second and millisecond
        ours = tera / time_attention(ops, 1, tokens, 0, torch.bfloat16)
        peers = {name: tera / time_torch_attention(tokens, backend) for name, backend in BACKENDS.items()}
        peer = ", ".join(f"{name} of torch {speed:.0f}" for name, speed in peers.items())
        records.append(Record(f"attention, prefill of {tokens} tokens", ours, "TFLOP/s", peer, goal))
    return records


# --- Sampling ---------------------------------------------------------------------------------------------------------

ROWS, VOCAB, TENSORS, HISTORY = 256, 128_256, 4, 1024


class SamplingCase(NamedTuple):
    """Sampling parameters shared by all sequences, and the target time in milliseconds."""

    name: str
    params: dict[str, Any]
    goal: float | None = None


SAMPLING = (
    SamplingCase("greedy", {"do_sample": False}),
    SamplingCase("top-p 0.9", {"top_p": 0.9}, 0.3),
    SamplingCase("top-k 50", {"top_k": 50}),
    SamplingCase("top-k, top-p, min-p", {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}),
    SamplingCase("typical-p 0.9", {"typical_p": 0.9}),
    SamplingCase("penalties, top-p 0.9", {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "top_p": 0.9}),
    SamplingCase("5 alternatives, top-p 0.9", {"num_alternatives": 5, "top_p": 0.9}),
)


def make_logits() -> torch.Tensor:
    """Draw realistic logits with a few likely tokens."""
    likely = torch.randint(VOCAB, (ROWS, 30), device="cuda")
    logits = 2 * torch.randn(ROWS, VOCAB, device="cuda")
    return logits.scatter_(-1, likely, 16 + 2 * torch.randn(ROWS, 30, device="cuda")).bfloat16()


def measure_sampling(ops: Ops) -> list[Record]:
    device, records = torch.device("cuda", 0), []
    tokens, lengths = torch.randint(VOCAB, (ROWS, HISTORY), device=device), torch.full((ROWS,), HISTORY, device=device)
    history = History(lengths, lengths // 2, tokens)
    for case in SAMPLING:
        rows = [
            SequenceSampling(SamplingParams(**{"do_sample": True, "seed": row, **case.params})) for row in range(ROWS)
        ]
        tensors = itertools.cycle([make_logits() for _ in range(TENSORS)])  # more than L2 holds
        sampler, peer = Sampler(rows, VOCAB, device, ops), GeneralSampler(rows, VOCAB, device)
        (ours,) = measure_calls([lambda: sampler(next(tensors), history)], 30)  # noqa: B023 - called here
        (theirs,) = measure_calls([lambda: peer(next(tensors), history)], 4)  # noqa: B023
        records.append(Record(f"sampling, {case.name}", ours, "ms", f"torch {theirs:.2f}", case.goal, at_most=True))
    return records


PARTS: dict[str, Callable[[Ops], list[Record]]] = {
    "attention": measure_attention,
    "sampling": measure_sampling,
    "linears": measure_linears,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    parser.add_argument("--ops", choices=["best", "triton"], default="best", help="kernels to measure (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = TritonOps() if args.ops == "triton" else select_ops(torch.device("cuda", 0))
    report([record for name, part in PARTS.items() if args.only in (None, name) for record in part(ops)], args.json)


if __name__ == "__main__":
    main()
