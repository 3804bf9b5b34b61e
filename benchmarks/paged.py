"""Shared code of the CPU benchmarks: a shape, our model with sequences in its cache, and the timing of runs."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import HostLengths, select_ops
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import build_model
from lorax_server.weights import Weights

VOCAB = 32000
BLOCK_SIZE = 64
LLAMA_160M = LlamaConfig(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    vocab_size=VOCAB,
    max_position_embeddings=2304,
)


def build_ours(config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> PagedCausalLM:
    device = torch.device("cpu")
    weights = Weights(
        tensors,
        device=device,
        dtype=dtype,
        process_group=FakeGroup(),
        ops=select_ops(device),
    )
    return build_model(config, weights)


class Paged:
    """Our model with `batch` sequences in its cache, their blocks handed out in random order."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        blocks_each = -(-length // BLOCK_SIZE)
        self.model = model
        self.kv_cache = model.allocate_kv_cache(batch * blocks_each, BLOCK_SIZE)
        self.tables = torch.randperm(batch * blocks_each).view(batch, blocks_each).int()
        self.batch = batch

    def forward(self, ids: torch.Tensor, cached: int, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        """Return the logits of the last token of each sequence; `ids` is `[batch, new tokens]`."""
        new = ids.shape[1]
        positions = torch.arange(cached, cached + new).repeat(self.batch)
        rows = torch.arange(self.batch).repeat_interleave(new)
        slots = self.tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = torch.full((self.batch,), new)
        cu_seqlen = None if new == 1 else torch.arange(self.batch + 1).int() * new
        host_lengths = HostLengths([new] * self.batch, [cached] * self.batch)
        cached_lengths = torch.full((self.batch,), cached)
        seqlen = Seqlen(lengths, cached_lengths, cu_seqlen, new, cached + new, host_lengths=host_lengths)
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
            adapter_data,
            lm_head_indices=last,
        )[0]
        return logits


def fill(paged: Paged, cache: DynamicCache, context: int) -> None:
    num_heads, dim = paged.model.kv_shape
    missing = paged.tables.shape[1] * BLOCK_SIZE - context
    for layer, stored in enumerate(paged.kv_cache):
        past = (torch.randn(2, paged.batch, num_heads, context, dim) * 0.1).to(stored[0].dtype)
        cache.update(past[0], past[1], layer)
        for side, noise in zip(stored, past, strict=True):
            filled = torch.nn.functional.pad(noise, (0, 0, 0, missing))
            side[paged.tables.long()] = filled.unflatten(2, (-1, BLOCK_SIZE)).transpose(1, 2)


def best_of(runs: int, *sides: Callable[[], object]) -> list[float]:
    """Return the fastest run of each side in seconds, the sides taking turns."""
    best = [float("inf")] * len(sides)
    for _ in range(runs):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[index] = min(best[index], time.perf_counter() - start)
    return best
