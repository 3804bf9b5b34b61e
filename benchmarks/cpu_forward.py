"""Prefill and decode of two small models on a CPU, against transformers in the same process and with the same threads.

Both models are random; the shapes are those of GPT-2 small and of a Llama of 160M parameters. Each figure is the best
of several alternating runs, so that both sides see the same machine.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count
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
PREFILL = (8, 256, 4, 1.0)


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


ATTENTIONS = ("sdpa", "eager")


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
    records = [measure_prefill(name, ours, theirs)]
    records += [measure_decode(name, ours, theirs, *case) for case in DECODE]
    return records


def measure_prefill(name: str, ours: Any, theirs: Any) -> Record:
    batch, length, runs, goal = PREFILL
    ids = torch.randint(0, VOCAB, (batch, length))
    paged = Paged(ours, batch, length)

    def mine() -> torch.Tensor:
        return paged.forward(ids, 0)

    def other() -> torch.Tensor:
        return theirs(ids, use_cache=True, logits_to_keep=1).logits[:, 0]  # type: ignore[no-any-return]

    times = {}
    for attention in ATTENTIONS:
        theirs.set_attn_implementation(attention)
        difference = mine() - other()
        times[attention] = best_of(runs, mine, other)
    return compare(f"{name} prefill {batch}x{length}", times, goal, difference)


def measure_decode(name: str, ours: Any, theirs: Any, batch: int, context: int, runs: int, goal: float) -> Record:
    """The caches are filled with the same noise: what is in them does not change the time."""
    ids = torch.randint(0, VOCAB, (batch, 1))
    times = {}
    for attention in ATTENTIONS:
        theirs.set_attn_implementation(attention)
        paged, cache = Paged(ours, batch, context + runs + 1), DynamicCache(config=theirs.config)
        fill(paged, cache, context)
        position = count(context)

        def mine(paged: Paged = paged, position: Iterator[int] = position) -> torch.Tensor:
            return paged.forward(ids, next(position))

        def other(cache: DynamicCache = cache) -> torch.Tensor:
            return theirs(ids, past_key_values=cache, use_cache=True).logits[:, 0]  # type: ignore[no-any-return]

        difference = mine() - other()
        times[attention] = best_of(runs, mine, other)
    return compare(f"{name} decode {batch}@{context}", times, goal, difference)


def fill(paged: Paged, cache: DynamicCache, context: int) -> None:
    num_heads, dim = paged.model.kv_shape
    missing = paged.tables.shape[1] * BLOCK_SIZE - context
    for layer, stored in enumerate(paged.kv_cache):
        past = torch.randn(2, paged.batch, num_heads, context, dim) * 0.1
        cache.update(past[0], past[1], layer)
        for side, noise in zip(stored, past, strict=True):
            filled = torch.nn.functional.pad(noise, (0, 0, 0, missing))
            side[paged.tables.long()] = filled.unflatten(2, (-1, BLOCK_SIZE)).transpose(1, 2)


def compare(name: str, times: dict[str, list[float]], goal: float, difference: torch.Tensor) -> Record:
    """Our best time against the best of their faster attention."""
    mine = min(ours for ours, _ in times.values())
    fastest = min(times, key=lambda attention: times[attention][1])
    other, peer = times[fastest][1], f"transformers ({fastest})"
    print(
        f"{name}: {mine * 1e3:.1f} ms, {peer} {other * 1e3:.1f} ms, {other / mine:.2f}x, "
        f"largest difference of logits {float(difference.abs().max()):.1e}",
        flush=True,
    )
    return Record(name, other / mine, "x", peer, goal)


def main() -> None:
    args = parse_args(__doc__)
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    with torch.inference_mode():
        records = [record for name, config in CONFIGS.items() for record in measure(name, config)]
    report(records, args.json)


if __name__ == "__main__":
    main()
