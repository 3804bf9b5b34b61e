"""Compile all kernels of a GPU before the first request: a compiler takes seconds."""

import itertools
import logging
import time
from collections.abc import Collection
from typing import NamedTuple

import torch

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
from lorax_server.worker.runner import SCORED_TOKENS

logger = logging.getLogger(__name__)

# Numbers of tokens that kernels are compiled for: few rows, short prompts, long prompts.
TOKEN_COUNTS = (200, 1024, 2304)
MOST_SAMPLED = 256  # rows of the head's output that are taken into account
MOST_DEMANDING = SamplingParams(
    do_sample=True, temperature=0.7, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, num_alternatives=20
)


class CacheShape(NamedTuple):
    """The most tokens of a sequence, and those of a block."""

    max_length: int
    block_size: int


def warm_up(
    model: PagedCausalLM,
    memory: AdapterMemory | None,
    decode_rows: Collection[int],
    step_tokens: int,
    shape: CacheShape,
) -> None:
    """Run steps of all kinds, with an adapter that has everything and without: prompts, and decode steps.

    Decode steps of `decode_rows` are run. Those that become graphs are run again before they are captured.
    """
    if is_host(model.device):
        return
    start = time.monotonic()
    found = [getattr(module, "linear", None) for module in model.modules()]
    linears = [linear for linear in found if isinstance(linear, LinearWeights)]
    model.ops.prepare(linears, with_lora=memory is not None)
    for tokens in sorted({min(count, step_tokens) for count in TOKEN_COUNTS}):
        run_prompts(model, tokens, shape)
        if memory is not None:
            run_prompts(model, tokens, shape, make_believe(memory, tokens))
    for rows in sorted(decode_rows, reverse=True):  # the largest reserves memory for all
        run_decode(model, rows, shape)
    run_decode(model, 1, CacheShape(1, shape.block_size))  # of short sequences, which kernels do not split
    if memory is not None:
        run_decode(model, 1, shape, make_believe(memory, 1))
        _adapt_head(model, make_believe(memory, 1))
    torch.cuda.synchronize(model.device)
    torch.cuda.empty_cache()
    logger.info("kernels are compiled, in %.1f s", time.monotonic() - start)


def make_believe(memory: AdapterMemory, tokens: int) -> AdapterBatchData:
    """Describe tokens of one adapter that changes every target, with the first bytes of the buffer."""
    arena, device = memory.arena, memory.arena.buffer.device
    table = torch.cat([arena.host_table[:1], torch.zeros_like(arena.host_table[:1])])
    linears = [target for target in arena.targets.values() if target.kind is TargetKind.LINEAR]
    widest = max((max(target.inputs.size, target.outputs.size) for target in linears), default=1)
    table[1, :, Field.RANK] = min(MAX_RANK, arena.buffer.numel() // widest)
    believed = AdapterArena(
        arena.buffer, table.to(device), arena.scales[:2], table, arena.vocab_sizes[:1] * 2, arena.targets
    )
    indices = torch.ones(tokens, dtype=torch.int32, device=device)
    return AdapterBatchData(AdapterBatchMetadata(indices, [0, tokens], [1]), believed)


def _adapt_head(model: PagedCausalLM, data: AdapterBatchData) -> None:
    """Change scores as an adapter with rows of its own does: after the product."""
    head = model.lm_head
    outputs, inputs = head.linear.weight.shape
    x = head.linear.plain.new_zeros(len(data.meta.adapter_indices), inputs)
    logits = x.new_zeros(len(x), outputs)
    targets = data.find(head.targets)
    model.ops.add_lora(logits, x, data.lora, targets)
    model.ops.scale_and_shift(logits, data.lora, targets)


def run_decode(
    model: PagedCausalLM, rows: int, shape: CacheShape, adapter_data: AdapterBatchData | None = None
) -> None:
    """Run a step of so many sequences with a token each, with tables for the longest there can be."""
    numbers = torch.arange(rows, device=model.device)
    ones = torch.ones_like(numbers)
    lengths = Seqlen(ones, torch.zeros_like(ones), None, 1, 1, ones)
    table = torch.zeros(rows, -(-shape.max_length // shape.block_size), dtype=torch.int32, device=model.device)
    table[:, 0] = numbers
    model(
        torch.zeros_like(ones),
        torch.zeros_like(ones).int(),
        None,
        model.allocate_kv_cache(rows, shape.block_size),
        table,
        numbers * shape.block_size,
        lengths,
        1,
        adapter_data,
    )


def allow_all(model: PagedCausalLM, rows: int) -> TokenMasks:
    """Make masks for so many rows, which change nothing."""
    num_words = count_mask_words(model.lm_head.vocab_size)
    words = torch.full((rows, num_words), -1, dtype=torch.int32, device=model.device)
    return TokenMasks(torch.arange(rows, device=model.device), words)


def run_choice(model: PagedCausalLM, rows: int, max_length: int, masks: TokenMasks) -> None:
    """Choose tokens as those requests do that need the most memory, under masks, and score tokens of a prompt."""
    device, head = model.device, model.lm_head
    logits = head.linear.plain.new_zeros(rows, head.vocab_size)
    sampling = SequenceSampling.of(MOST_DEMANDING, StopParams())
    lengths = torch.ones(rows, dtype=torch.int64, device=device)
    history = History(lengths, lengths, torch.zeros(rows, max_length, dtype=torch.int64, device=device))
    Sampler([sampling] * rows, head.vocab_size, device, model.ops)(logits, history, masks)
    del history
    logits = head.linear.plain.new_zeros(SCORED_TOKENS, head.vocab_size)
    logits.float().log_softmax(-1).topk(min(MOST_DEMANDING.num_alternatives, head.vocab_size), dim=-1)


def count_prompt_blocks(step_tokens: int, shape: CacheShape) -> int:
    """Count the blocks of the cache that `run_prompts` makes."""
    return sum(-(-length // shape.block_size) for length in _cut_prompts(step_tokens, shape))


def _cut_prompts(step_tokens: int, shape: CacheShape) -> list[int]:
    """Return the lengths of as few prompts as fill a step."""
    full, rest = divmod(step_tokens, shape.max_length)
    return [shape.max_length] * full + [rest] * (rest > 0)


def run_prompts(
    model: PagedCausalLM, step_tokens: int, shape: CacheShape, adapter_data: AdapterBatchData | None = None
) -> None:
    """Run a step full of prompts, as few and as long as they can be, through the model and its head."""
    block_size, device = shape.block_size, model.device
    lengths = _cut_prompts(step_tokens, shape)
    blocks = [-(-length // block_size) for length in lengths]  # of each prompt, one after the other
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
        lm_head_indices=torch.arange(min(step_tokens, MOST_SAMPLED), device=device),
    )
