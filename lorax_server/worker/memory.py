"""The shares of memory that the cache and the adapters get."""

import itertools

import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import Field
from lorax_server.layers.attention import Seqlen
from lorax_server.machine import free_bytes, machine_bytes
from lorax_server.models.custom_modeling.paged import PagedCausalLM

CPU_ADAPTER_BYTES = 2**30
CPU_CACHE_SHARE = 4  # one part in so many of the free memory
GPU_ADAPTER_SHARE = 10
HOST_ADAPTER_SHARE = 8
ADAPTER_TABLE_SHARE = 64  # of the bytes for adapters, beside them
LEAST_ADAPTER_ROWS = 64
MOST_SAMPLED = 256  # rows of the head's output that are taken into account


def adapter_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes for adapters on the device."""
    if config.adapter_bytes is not None:
        return config.adapter_bytes
    if device.type != "cuda":
        return CPU_ADAPTER_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_ADAPTER_SHARE


def adapter_rows(num_bytes: int, num_targets: int) -> int:
    """Return the number of adapters, the base model among them, that the tables beside the buffer have rows for."""
    row_bytes = num_targets * (len(Field) * torch.int64.itemsize + torch.float32.itemsize)
    return max(num_bytes // ADAPTER_TABLE_SHARE // max(row_bytes, 1), LEAST_ADAPTER_ROWS)


def adapter_host_bytes(config: EngineConfig) -> int:
    """Return the bytes for adapters in host memory on every rank, all of which are on this machine."""
    return config.adapter_host_bytes or machine_bytes() // HOST_ADAPTER_SHARE // config.tensor_parallel


def block_bytes(model: PagedCausalLM, block_size: int) -> int:
    num_kv_heads, head_dim = model.kv_shape
    return 2 * model.num_layers * num_kv_heads * head_dim * block_size * model.kv_dtype.itemsize


def count_blocks(
    model: PagedCausalLM, config: EngineConfig, step_tokens: int, max_length: int, reserved: int = 0
) -> int:
    """Count the blocks that fit beside `reserved` bytes, but not more than all sequences at once can ever need."""
    size = block_bytes(model, config.block_size)
    available = config.cache_bytes
    if available is None and model.device.type == "cuda":
        available = _free_on_gpu(model, config, step_tokens, max_length) - reserved
    elif available is None:
        available = free_bytes() // CPU_CACHE_SHARE
    count = min(available // size, -(-config.max_rows * max_length // config.block_size))
    if count < 1:
        raise ConfigError(
            f"{available} bytes for keys and values do not hold a block of {size}: raise cache_bytes, or lower "
            "adapter_bytes"
        )
    return count


def _free_on_gpu(model: PagedCausalLM, config: EngineConfig, step_tokens: int, max_length: int) -> int:
    """Measure the memory that the model, the adapters and the largest step leave free."""
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    largest_step(model, step_tokens, max_length)
    needed = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(free - needed - total * (1 - config.gpu_memory_fraction))


def largest_step(model: PagedCausalLM, step_tokens: int, max_length: int) -> None:
    """Run a step full of prompts, as few and as long as they can be, through the model and its head."""
    block_size, device = 16, model.device
    full, rest = divmod(step_tokens, max_length)
    lengths = [max_length] * full + [rest] * (rest > 0)
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
        Seqlen(sizes, torch.zeros_like(sizes), bounds, longest, longest, sizes),
        longest,
        None,
        lm_head_indices=torch.arange(min(step_tokens, MOST_SAMPLED), device=device),
    )
