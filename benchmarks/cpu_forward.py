"""Prefill and decode of two small models on a CPU, against transformers in the same process and with the same threads.

Both models are random; the shapes are those of GPT-2 small and of a Llama of 160M parameters. Each figure is the best
of several alternating runs, so that both sides see the same machine.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from report import Record, parse_args, report
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig

from lorax_server.distributed import FakeGroup
from lorax_server.kernels import select_ops
from lorax_server.kernels.packed import can_pack
from lorax_server.layers.attention import Seqlen
from lorax_server.models.registry import build_model
from lorax_server.weights import TensorWeights

VOCAB = 32000
BLOCK_SIZE = 64
CONFIGS = {
    "gpt2": GPT2Config(n_positions=2304),
    "llama-160m": LlamaConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        vocab_size=VOCAB,
        max_position_embeddings=2304,
    ),
}
# batch, context, runs, goal
DECODE = [(1, 256, 30, 1.3), (8, 256, 12, 1.0), (32, 256, 6, 1.0), (8, 2048, 8, 1.3)]
PREFILL = (8, 256, 3, 1.0)


class Paged:
    """Our model with `batch` sequences in its cache, their blocks handed out in random order."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        blocks_each = -(-length // BLOCK_SIZE)
        self.model = model
        self.kv_cache = model.allocate_kv_cache(batch * blocks_each, BLOCK_SIZE)
        self.tables = torch.randperm(batch * blocks_each).view(batch, blocks_each).int()
        self.batch = batch

    def forward(self, ids: torch.Tensor, cached: int) -> torch.Tensor:
        """Logits of the last token of each sequence; `ids` is `[batch, new tokens]`."""
        new = ids.shape[1]
        positions = torch.arange(cached, cached + new).repeat(self.batch)
        rows = torch.arange(self.batch).repeat_interleave(new)
        slots = self.tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = torch.full((self.batch,), new)
        cu_seqlen = None if new == 1 else torch.arange(self.batch + 1).int() * new
        seqlen = Seqlen(lengths, torch.full((self.batch,), cached), cu_seqlen, new, cached + new)
        last = None if new == 1 else torch.arange(1, self.batch + 1) * new - 1
        logits: torch.Tensor = self.model(
            ids.flatten(),
            positions.int(),
            cu_seqlen,
            self.kv_cache,
            self.tables,
            slots,
            seqlen,
            cached + new,
            None,
            lm_head_indices=last,
        )[0]
        return logits


def best_of(runs: int, *sides: Callable[[], object]) -> list[float]:
    """The fastest run of each side in seconds, the sides taking turns."""
    best = [float("inf")] * len(sides)
    for _ in range(runs):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def fastest_attention(theirs: Any, ids: torch.Tensor) -> str:
    """Which of transformers' attentions is faster here, by a prefill of one sequence."""
    times = {}
    for name in ("eager", "sdpa"):
        theirs.set_attn_implementation(name)
        theirs(ids[:1], logits_to_keep=1)
        times[name] = best_of(3, lambda: theirs(ids[:1], logits_to_keep=1))[0]
    return min(times, key=lambda name: times[name])


def measure(name: str, config: Any) -> list[Record]:
    theirs = AutoModelForCausalLM.from_config(config).eval()
    device = torch.device("cpu")
    weights = TensorWeights(
        theirs.state_dict(),
        device=device,
        dtype=torch.float32,
        process_group=FakeGroup(),
        ops=select_ops(device),
        pack=can_pack(device, torch.float32),
    )
    ours = build_model(config, weights)
    ids = torch.randint(0, VOCAB, (32, 2048))
    attention = fastest_attention(theirs, ids[:, :256])
    theirs.set_attn_implementation(attention)
    peer = f"transformers ({attention})"
    records = [_prefill(name, ours, theirs, ids, peer)]
    records += [_decode(name, ours, theirs, ids, peer, *case) for case in DECODE]
    return records


def _prefill(name: str, ours: Any, theirs: Any, ids: torch.Tensor, peer: str) -> Record:
    batch, length, runs, goal = PREFILL
    ids = ids[:batch, :length]
    paged = Paged(ours, batch, length)
    check = (paged.forward(ids, 0) - theirs(ids, logits_to_keep=1).logits[:, 0]).abs().max()
    mine, other = best_of(runs, lambda: paged.forward(ids, 0), lambda: theirs(ids, use_cache=True, logits_to_keep=1))
    return _record(f"{name} prefill {batch}x{length}", mine, other, peer, goal, float(check))


def _decode(
    name: str, ours: Any, theirs: Any, ids: torch.Tensor, peer: str, batch: int, context: int, runs: int, goal: float
) -> Record:
    # The cache is filled with noise and one real prefix: what is in it does not change the time.
    paged = Paged(ours, batch, context + runs + 2)
    cache = DynamicCache(config=theirs.config)
    heads, dim = ours.kv_shape
    for layer, (keys, values) in enumerate(paged.kv_cache):
        past = torch.randn(2, batch, heads, context, dim) * 0.1
        cache.update(past[0], past[1], layer)
        for stored, noise in ((keys, past[0]), (values, past[1])):
            padded = torch.nn.functional.pad(noise, (0, 0, 0, paged.tables.shape[1] * BLOCK_SIZE - context))
            blocks = padded.unflatten(2, (-1, BLOCK_SIZE)).transpose(1, 2)
            stored[paged.tables.long()] = blocks
    position = [context, context]

    def mine() -> torch.Tensor:
        position[0] += 1
        return paged.forward(ids[:batch, :1], position[0] - 1)

    def other() -> torch.Tensor:
        logits: torch.Tensor = theirs(ids[:batch, :1], past_key_values=cache, use_cache=True).logits
        return logits[:, 0]

    check = (mine() - other()).abs().max()
    best = best_of(runs, mine, other)
    return _record(f"{name} decode {batch}@{context}", *best, peer, goal, float(check))


def _record(name: str, mine: float, other: float, peer: str, goal: float, difference: float) -> Record:
    print(
        f"{name}: {mine * 1e3:.1f} ms, {peer} {other * 1e3:.1f} ms, "
        f"{other / mine:.2f}x, largest difference of logits {difference:.1e}",
        flush=True,
    )
    return Record(name, other / mine, "x", peer, goal)


def main() -> None:
    args = parse_args(__doc__)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    with torch.no_grad():
        records = [record for name, config in CONFIGS.items() for record in measure(name, config)]
    report(records, args.json)


if __name__ == "__main__":
    main()
