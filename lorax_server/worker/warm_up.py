"""Compiles all GPU kernels at startup, because compiling a kernel during a request would delay it by seconds."""

import itertools
import logging
import time
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from lorax_server.adapters.batch import AdapterArena, AdapterBatchData, AdapterBatchMetadata
from lorax_server.adapters.target import TargetKind
from lorax_server.kernels import MAX_RANK, Field, LinearWeights
from lorax_server.kernels.device import is_host
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.sampling.batch import TokenMasks
from lorax_server.sampling.sampler import History, Sampler, SequenceSampling
from lorax_server.types import SamplingParams, StopParams
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.inputs import count_mask_words
from lorax_server.worker.runner import PROMPT_LOGPROB_CHUNK_TOKENS

logger = logging.getLogger(__name__)

# Kernels have variants for small steps, short prompts and long prompts.
PROMPT_TOKEN_COUNTS = (200, 1024, 2304)
MAX_LOGIT_ROWS = 256  # maximum rows of logits in warm-up steps
MAX_MEMORY_SAMPLING = SamplingParams(
    do_sample=True, temperature=0.7, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, num_alternatives=20
)


class CacheShape(NamedTuple):
    """The maximum sequence length and the KV block size, in tokens."""

    max_length: int
    block_size: int


def warm_up(
    model: PagedCausalLM,
    memory: AdapterMemory | None,
    decode_batch_sizes: Collection[int],
    step_tokens: int,
    shape: CacheShape,
) -> None:
    """Run prefill and decode steps, with and without a dummy adapter that targets every module.

    `decode_batch_sizes` excludes sizes with graphs, because each graph capture includes a warm-up run.
    """
    if is_host(model.device):
        return
    start = time.monotonic()
    model.ops.prepare(find_linears(model), with_lora=memory is not None)
    for tokens in sorted({min(count, step_tokens) for count in PROMPT_TOKEN_COUNTS}):
        run_prompts(model, tokens, shape)
        if memory is not None:
            run_prompts(model, tokens, shape, make_dummy_lora_batch(memory, tokens))
    for rows in sorted(decode_batch_sizes, reverse=True):  # largest first, so that smaller batches reuse its memory
        run_decode(model, rows, shape)
    run_decode(model, 1, CacheShape(1, shape.block_size))  # short sequences use unsplit attention kernels
    if memory is not None:
        run_decode(model, 1, shape, make_dummy_lora_batch(memory, 1))
        _run_head_lora(model, make_dummy_lora_batch(memory, 1))
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()
    logger.info("compiled kernels in %.1f s", time.monotonic() - start)


def find_linears(model: nn.Module) -> list[LinearWeights]:
    found = [getattr(module, "linear", None) for module in model.modules()]
    return [linear for linear in found if isinstance(linear, LinearWeights)]


def make_dummy_lora_batch(memory: AdapterMemory, tokens: int) -> AdapterBatchData:
    """Return the adapter data for a batch with a dummy adapter that targets every module. Its weights are the first
    bytes of the adapter buffer.
    """
    arena, device = memory.arena, memory.arena.buffer.device
    table = torch.cat([arena.host_table[:1], torch.zeros_like(arena.host_table[:1])])
    linears = [target for target in arena.targets.values() if target.kind is TargetKind.LINEAR]
    widest = max((max(target.inputs.size, target.outputs.size) for target in linears), default=1)
    table[1, :, Field.RANK] = min(MAX_RANK, arena.buffer.numel() // widest)
    for index, target in enumerate(arena.targets.values()):
        if target.experts is not None:
            size = target.experts.num_experts * max(target.inputs.size, target.outputs.size)
            table[1, index, Field.RANK] = min(MAX_RANK, arena.buffer.numel() // size)
    dummy_arena = AdapterArena(
        arena.buffer, table.to(device), arena.scales[:2], table, arena.vocab_sizes[:1] * 2, arena.targets
    )
    indices = torch.ones(tokens, dtype=torch.int32, device=device)
    return AdapterBatchData(AdapterBatchMetadata(indices, [0, tokens], [1]), dummy_arena)


def _run_head_lora(model: PagedCausalLM, data: AdapterBatchData) -> None:
    """Run the separate LoRA kernels for the LM head, which the server uses if an adapter replaces LM head rows."""
    head = model.lm_head
    outputs, inputs = head.linear.weight.shape
    x = torch.zeros(len(data.meta.adapter_indices), inputs, dtype=head.linear.weight.dtype, device=model.device)
    logits = x.new_zeros(len(x), outputs)
    targets = data.find_targets(head.targets)
    model.ops.add_lora(logits, x, data.lora, targets)
    model.ops.scale_and_shift(logits, data.lora, targets)


def run_decode(
    model: PagedCausalLM, rows: int, shape: CacheShape, adapter_data: AdapterBatchData | None = None
) -> None:
    """Run a decode step with `rows` sequences, and block tables for the maximum sequence length."""
    indices = torch.arange(rows, device=model.device)
    ones = torch.ones_like(indices)
    lengths = Seqlen(ones, torch.zeros_like(ones), None, 1, 1, ones)
    table = torch.zeros(rows, -(-shape.max_length // shape.block_size), dtype=torch.int32, device=model.device)
    table[:, 0] = indices
    model(
        torch.zeros_like(ones),
        torch.zeros_like(ones).int(),
        None,
        model.allocate_kv_cache(rows, shape.block_size),
        table,
        indices * shape.block_size,
        lengths,
        1,
        adapter_data,
    )


def make_permissive_masks(model: PagedCausalLM, rows: int) -> TokenMasks:
    """Return token masks for `rows` rows that allow all tokens."""
    num_words = count_mask_words(model.lm_head.vocab_size)
    masks = torch.full((rows, num_words), -1, dtype=torch.int32, device=model.device)
    return TokenMasks(torch.arange(rows, device=model.device), masks)


def run_sampling(model: PagedCausalLM, rows: int, max_length: int, masks: TokenMasks) -> None:
    """Sample with the most memory-intensive parameters and with masks, and compute prompt log probabilities."""
    device, head = model.device, model.lm_head
    dtype = head.linear.weight.dtype
    logits = torch.zeros(rows, head.vocab_size, dtype=dtype, device=device)
    sampling = SequenceSampling.from_params(MAX_MEMORY_SAMPLING, StopParams())
    lengths = torch.ones(rows, dtype=torch.int64, device=device)
    history = History(lengths, lengths, torch.zeros(rows, max_length, dtype=torch.int64, device=device))
    Sampler([sampling] * rows, head.vocab_size, device, model.ops)(logits, history, masks)
    del history
    logits = torch.zeros(PROMPT_LOGPROB_CHUNK_TOKENS, head.vocab_size, dtype=dtype, device=device)
    logits.float().log_softmax(-1).topk(min(MAX_MEMORY_SAMPLING.num_alternatives, head.vocab_size), dim=-1)


def count_prompt_blocks(step_tokens: int, shape: CacheShape) -> int:
    """Return the number of KV blocks that `run_prompts` allocates."""
    return sum(-(-length // shape.block_size) for length in _split_into_prompts(step_tokens, shape))


def _split_into_prompts(step_tokens: int, shape: CacheShape) -> list[int]:
    """Return prompt lengths that fill a step with as few prompts as possible."""
    full, rest = divmod(step_tokens, shape.max_length)
    return [shape.max_length] * full + [rest] * (rest > 0)


def run_prompts(
    model: PagedCausalLM, step_tokens: int, shape: CacheShape, adapter_data: AdapterBatchData | None = None
) -> None:
    """Run a prefill step, including the LM head, with as few prompts as possible, each as long as possible."""
    block_size, device = shape.block_size, model.device
    lengths = _split_into_prompts(step_tokens, shape)
    blocks = [-(-length // block_size) for length in lengths]  # number of consecutive blocks per prompt
    firsts = list(itertools.accumulate(blocks, initial=0))
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    for row, (first, count) in enumerate(zip(firsts, blocks, strict=False)):
        table[row, :count] = torch.arange(first, first + count)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    starts = torch.tensor(firsts[:-1], device=device).repeat_interleave(torch.tensor(lengths, device=device))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    sizes, longest = torch.tensor(lengths, device=device), max(lengths)
    model(
        torch.zeros_like(positions),
        positions.int(),
        bounds,
        model.allocate_kv_cache(firsts[-1], block_size),
        table,
        starts * block_size + positions,
        Seqlen(sizes, torch.zeros_like(sizes), bounds, longest, longest, sizes, stores_all=True),
        longest,
        adapter_data,
        lm_head_indices=torch.arange(min(step_tokens, MAX_LOGIT_ROWS), device=device),
    )
