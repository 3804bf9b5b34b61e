"""A driver for paged models: allocates blocks, builds forward inputs and returns logits."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.kernels import HostLengths
from lorax_server.layers.attention import Seqlen

Feed = tuple[int, Sequence[int]]  # sequence, its next tokens


class PagedDriver:
    """Sequences in a KV cache with randomly ordered blocks."""

    def __init__(
        self, model: Any, *, num_blocks: int = 96, block_size: int = 4, seed: int = 0, as_served: bool = False
    ) -> None:
        """Create the driver. With `as_served`, batches contain the same host data as in the runner."""
        self.model = model
        self.as_served = as_served
        self.block_size = block_size
        self.kv_cache = model.allocate_kv_cache(num_blocks, block_size)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.prompt_lengths: dict[int, int] = {}
        self.adapters: dict[int, int] = {}

    def add(self, adapter: int = 0, prompt_length: int | None = None) -> int:
        seq = len(self.blocks)
        self.blocks[seq], self.lengths[seq], self.adapters[seq] = [], 0, adapter
        if prompt_length is not None:
            self.prompt_lengths[seq] = prompt_length
        return seq

    @torch.no_grad()
    def forward(self, feeds: Sequence[Feed], arena: AdapterArena | None = None, **kwargs: Any) -> list[torch.Tensor]:
        """Return the logits of all tokens, one tensor per feed."""
        inputs = self.inputs(feeds, arena)
        logits, speculative = self.model(**inputs, **kwargs)
        assert speculative is None
        return list(logits.split([len(tokens) for _, tokens in feeds]))

    def inputs(self, feeds: Sequence[Feed], arena: AdapterArena | None = None) -> dict[str, Any]:
        device = self.model.device
        positions: list[int] = []
        ids, slots, adapters = [], [], []
        new, cached = [], []
        for seq, tokens in feeds:
            start, stop = self.lengths[seq], self.lengths[seq] + len(tokens)
            while len(self.blocks[seq]) * self.block_size < stop:
                self.blocks[seq].append(self.free.pop())
            ids += list(tokens)
            positions += range(start, stop)
            slots += [self.slot(seq, position) for position in range(start, stop)]
            adapters += [self.adapters[seq]] * len(tokens)
            new.append(len(tokens))
            cached.append(start)
            self.lengths[seq] = stop
        width = max(len(self.blocks[seq]) for seq, _ in feeds)
        tables = [self.blocks[seq] + [0] * (width - len(self.blocks[seq])) for seq, _ in feeds]
        cu_seqlen = torch.tensor([0, *new], device=device).cumsum(0).int()
        prefill = any(length != 1 for length in new)
        max_s = max(self.lengths[seq] for seq, _ in feeds)
        prompts = [self.prompt_lengths.get(seq) for seq, _ in feeds]
        known = None if None in prompts else torch.tensor(prompts, device=device)
        seqlen = Seqlen(
            torch.tensor(new, device=device),
            torch.tensor(cached, device=device),
            cu_seqlen if prefill else None,
            max(new),
            max_s,
            known,
            HostLengths(new, cached) if self.as_served else None,
            stores_all=self.as_served,
        )
        data = None
        if arena is not None:
            data = AdapterBatchData(AdapterBatchMetadata.from_indices(torch.tensor(adapters, device=device)), arena)
        return {
            "input_ids": torch.tensor(ids, device=device),
            "position_ids": torch.tensor(positions, device=device, dtype=torch.int32),
            "cu_seqlen_prefill": cu_seqlen if prefill else None,
            "kv_cache": self.kv_cache,
            "block_tables": torch.tensor(tables, device=device, dtype=torch.int32),
            "slots": torch.tensor(slots, device=device),
            "seqlen": seqlen,
            "max_s": max_s,
            "adapter_data": data,
        }

    def slot(self, seq: int, position: int) -> int:
        return self.blocks[seq][position // self.block_size] * self.block_size + position % self.block_size

    def greedy(
        self, prompt: Sequence[int], count: int, arena: AdapterArena | None = None, adapter: int = 0
    ) -> list[int]:
        seq = self.add(adapter, len(prompt))
        tokens, feed = [], list(prompt)
        for _ in range(count):
            feed = [int(self.forward([(seq, feed)], arena)[0][-1].argmax())]
            tokens += feed
        return tokens
