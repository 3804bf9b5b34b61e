"""Attention on a GPU against its floors: the bytes of the cache for decode, the products for prefill.

The heads are those of Llama-3.1-8B: 32 of queries, 8 of keys and values, 128 dimensions each, in blocks of 16 tokens in
random order. Decode runs as a CUDA graph of eight layers with caches of their own, so that nothing is left in L2 from
one to the next; rotation and the write to the cache are part of it. Its floor is one read of all keys and values at
4.1 TB/s. Prefill counts the products of causal attention; torch's own attention is measured in the same run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import BYTES_PER_MS, capture, measure
from report import Record, report
from torch.nn.attention import SDPBackend, sdpa_kernel

from lorax_server.kernels import AttentionSpec, HostLengths, LayerCache, Ops, PagedBatch, select_ops
from lorax_server.kernels.triton.ops import TritonOps

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
LAYERS = 8
SPEC = AttentionSpec(DIM**-0.5)
DECODE = [(64, 512), (64, 2048), (64, 8192), (1, 2048), (1, 32768), (16, 2048), (256, 1024), (256, 4096)]
DECODE_GOALS = {(64, 512), (64, 2048), (64, 8192), (1, 32768)}
MOST_OF_FLOOR = 1.25
PREFILL = [1024, 2048, 4096, 8192, 16384]
PREFILL_GOAL = 8192, 450.0  # tokens, TFLOP/s


def make_batch(lengths: Sequence[tuple[int, int]]) -> PagedBatch:
    """Give sequences of so many new and cached tokens blocks in random order."""
    new, cached = ([*column] for column in zip(*lengths, strict=True))
    counts = [-(-(n + c) // BLOCK) for n, c in lengths]
    blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    slots = torch.cat(
        [
            row[torch.arange(c, c + n) // BLOCK].long() * BLOCK + torch.arange(c, c + n) % BLOCK
            for row, (n, c) in zip(tables, lengths, strict=True)
        ]
    )
    is_decode = set(new) == {1}
    bounds = None if is_decode else torch.tensor([0, *new]).cumsum(0).int().cuda()
    return PagedBatch(
        tables.cuda(),
        torch.tensor(new).cuda(),
        torch.tensor(cached).cuda(),
        slots.cuda(),
        cu_seqlens=bounds,
        host_lengths=HostLengths(new, cached),
        stores_all=True,
    )


def make_caches(batch: PagedBatch, dtype: torch.dtype, count: int) -> list[LayerCache]:
    shape = int(batch.block_tables.max()) + 1, KV_HEADS, BLOCK, DIM

    def random() -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)

    return [(random(), random()) for _ in range(count)]


def time_layers(ops: Ops, batch: PagedBatch, caches: Sequence[LayerCache], num_tokens: int) -> float:
    """Return the microseconds of one layer."""
    qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    turns = torch.rand(num_tokens, DIM // 2, device="cuda")
    angles = turns.cos(), turns.sin()

    def forward() -> None:
        if batch.cu_seqlens is None:
            batch.derived.clear()  # so that a graph works it out; that of prompts comes from the host
        for cache in caches:
            q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            ops.attend(q, k, v, angles, cache, batch, SPEC)

    return 1000 * measure(capture(forward)) / len(caches)


def decode_records(ops: Ops, cases: Sequence[tuple[int, int]]) -> list[Record]:
    records = []
    for rows, length in cases:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            batch = make_batch([(1, length)] * rows)
            floor = 1000 * 2 * rows * length * KV_HEADS * DIM * dtype.itemsize / BYTES_PER_MS
            value = time_layers(ops, batch, make_caches(batch, dtype, LAYERS), rows)
            has_goal = (rows, length) in DECODE_GOALS and dtype == torch.bfloat16
            name = (
                f"decode, {rows} x {length} tokens, {str(dtype)[6:]}, of the floor ({value:.1f} us, floor {floor:.1f})"
            )
            goal = MOST_OF_FLOOR if has_goal else None
            records.append(Record(name, value / floor, "x", "bytes at 4.1 TB/s", goal, at_most=True))
            print(f"{name}: {value / floor:.2f}", flush=True)
    return records


def count_tera(tokens: int) -> float:
    return 4 * tokens * tokens / 2 * HEADS * DIM / 1e12


def time_torch(tokens: int, backend: SDPBackend) -> float:
    q, k, v = (torch.randn(1, n, tokens, DIM, device="cuda", dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS))

    def forward() -> None:
        with sdpa_kernel([backend]):
            for _ in range(LAYERS):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return measure(capture(forward)) / LAYERS


def prefill_records(ops: Ops, cases: Sequence[int]) -> list[Record]:
    records = []
    for tokens in cases:
        batch = make_batch([(tokens, 0)])
        caches = make_caches(batch, torch.bfloat16, LAYERS)
        value = count_tera(tokens) / (time_layers(ops, batch, caches, tokens) / 1e6)
        peers = {}
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            peers[name] = count_tera(tokens) / (time_torch(tokens, backend) / 1e3)
        peer = ", ".join(f"torch's {name} {speed:.0f}" for name, speed in peers.items())
        goal = PREFILL_GOAL[1] if tokens == PREFILL_GOAL[0] else None
        records.append(Record(f"prefill of {tokens} tokens, with rotation and cache", value, "TFLOP/s", peer, goal))
        print(f"prefill of {tokens}: {value:.0f} TFLOP/s; {peer}", flush=True)
    return records


def attention_records(ops: Ops, only: str | None = None) -> list[Record]:
    records = [] if only == "prefill" else decode_records(ops, DECODE)
    return records if only == "decode" else records + prefill_records(ops, PREFILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records to this file")
    parser.add_argument("--only", choices=["decode", "prefill"], help="one part of it")
    parser.add_argument("--ops", choices=["best", "triton"], default="best", help="the kernels to measure")
    args = parser.parse_args()
    torch.manual_seed(0)
    ops = TritonOps() if args.ops == "triton" else select_ops(torch.device("cuda", 0))
    report(attention_records(ops, args.only), args.json)


if __name__ == "__main__":
    main()
