"""Small float32 models for CPU benchmarks, configs of published models, and forward passes with a paged KV cache."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, Gemma2Config, LlamaConfig, Phi3Config, PreTrainedTokenizerFast

from lorax_server.adapters.batch import AdapterBatchData
from lorax_server.distributed import FakeGroup
from lorax_server.kernels import HostLengths, select_ops
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.registry import build_model
from lorax_server.weights import Weights

VOCAB = 32000
BLOCK_SIZE = 64
SIZE_160M: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": VOCAB,
}
LLAMA_160M = LlamaConfig(**SIZE_160M, max_position_embeddings=2304)
SIZE_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
GEMMA_2_9B = {
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
PHI_4 = {
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_configs(**changes: Any) -> dict[str, Any]:
    """Return configs of published models that are not Llamas, keyed by name."""
    return {
        "Gemma-2-9B": Gemma2Config(**{**GEMMA_2_9B, **changes}),
        "Phi-4": Phi3Config(**{**PHI_4, **changes}),
    }


def list_attentions(config: Any) -> tuple[str, ...]:
    """Return transformers' attention implementations that support the config without additional packages."""
    return ("eager",) if getattr(config, "attn_logit_softcapping", None) else ("sdpa", "eager")


# --- Files ------------------------------------------------------------------------------------------------------------


def write_adapter(
    folder: Path, rng: np.random.Generator, rank: int, hidden: int, layers: int, modules: Sequence[str]
) -> None:
    """Write a random float32 adapter for square attention matrices, as PEFT saves it."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(modules)}))
    tensors = {}
    for layer in range(layers):
        for module in modules:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.normal(0, 0.1, (rank, hidden)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.normal(0, 0.1, (hidden, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: place for place, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **special)


# --- Forwards ---------------------------------------------------------------------------------------------------------


def build_ours(config: Any, tensors: dict[str, torch.Tensor]) -> PagedCausalLM:
    device = torch.device("cpu")
    ops = select_ops(device)
    weights = Weights(tensors, device=device, dtype=torch.float32, process_group=FakeGroup(), ops=ops)
    return build_model(config, weights)


class Paged:
    """A paged model with `batch` sequences in its KV cache, whose blocks are in random order."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        blocks_each = -(-length // BLOCK_SIZE)
        self.model = model
        self.kv_cache = model.allocate_kv_cache(batch * blocks_each, BLOCK_SIZE)
        self.tables = torch.randperm(batch * blocks_each).view(batch, blocks_each).int()
        self.batch = batch

    def forward(self, ids: torch.Tensor, cached: int, adapter_data: AdapterBatchData | None = None) -> torch.Tensor:
        """Return the last logits of each sequence. `ids` is `[batch, new tokens]`."""
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
    """Fill the paged cache and transformers' cache with the same random values."""
    num_heads, dim = paged.model.kv_shape
    missing = paged.tables.shape[1] * BLOCK_SIZE - context
    for layer, stored in enumerate(paged.kv_cache):
        past = (torch.randn(2, paged.batch, num_heads, context, dim) * 0.1).to(stored[0].dtype)
        cache.update(past[0], past[1], layer)
        for side, noise in zip(stored, past, strict=True):
            filled = torch.nn.functional.pad(noise, (0, 0, 0, missing))
            side[paged.tables.long()] = filled.unflatten(2, (-1, BLOCK_SIZE)).transpose(1, 2)


def best_of(runs: int, *sides: Callable[[], object]) -> list[float]:
    """Return the fastest run of each function in seconds. The functions alternate."""
    best = [float("inf")] * len(sides)
    for _ in range(runs):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[index] = min(best[index], time.perf_counter() - start)
    return best
