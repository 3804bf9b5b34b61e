"""The shares of memory that the cache and the adapters get, and the refusal to start where something does not fit."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import Field, LinearWeights, PanelMatrix
from lorax_server.kernels.device import is_host
from lorax_server.machine import (
    ADAPTER_TABLE_SHARE,
    GPU_ADAPTER_SHARE,
    GRAMMAR_CACHE_BYTES,
    HOST_ADAPTER_SHARE,
    LARGE_GPU_BYTES,
    LARGE_GPU_MAX_NUM_SEQS,
    LEAST_GPU_ADAPTER_BYTES,
    MAX_NUM_SEQS,
    free_bytes,
    machine_bytes,
    resident_bytes,
)
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.graphs import GraphSizes, measure_graphs
from lorax_server.worker.inputs import SlotTables, count_mask_bytes
from lorax_server.worker.warm_up import (
    CacheShape,
    allow_all,
    count_prompt_blocks,
    make_believe,
    run_choice,
    run_prompts,
)

logger = logging.getLogger(__name__)

CPU_ADAPTER_BYTES = 2**30  # a bound, as that of the cache: a CPU's memory is taken as adapters and tokens come
CPU_CACHE_SHARE = 4  # the cache may grow to one part in so many of the free memory
LEAST_ADAPTER_ROWS = 64


def lacks_memory(error: RuntimeError) -> bool:
    """Tell whether an error is for lack of memory on a GPU, of torch or of a library that asks for its own."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error)


class Needs(NamedTuple):
    """Bytes that steps take on a GPU besides weights, adapters and cache."""

    step: int = 0  # the largest step, while it runs
    graphs: int = 0
    tables: int = 0  # of the rows, and their masks


def find_max_num_seqs(config: EngineConfig, device: torch.device) -> int:
    """Return the number of sequences that run at once."""
    if config.max_rows is not None:
        return config.max_rows
    is_large = not is_host(device) and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    max_num_seqs = LARGE_GPU_MAX_NUM_SEQS if is_large else MAX_NUM_SEQS
    return max_num_seqs if config.max_step_tokens is None else min(max_num_seqs, config.max_step_tokens)


def resolve_sizes(config: EngineConfig, model: PagedCausalLM) -> EngineConfig:
    """Convert sizes in tokens, and as a share of a GPU, to bytes."""
    if config.cache_tokens is not None:
        num_blocks = -(-config.cache_tokens // config.block_size)
        num_bytes = num_blocks * block_bytes(model, config.block_size)
        config = replace(config, cache_bytes=num_bytes, cache_tokens=None)
    share = config.adapter_memory_fraction
    if share is not None and is_host(model.device):
        logger.warning("--adapter-memory-fraction has no effect on a CPU: use --adapter-bytes")
    elif share is not None:
        total = torch.cuda.get_device_properties(model.device).total_memory
        config = replace(config, adapter_bytes=int(share * total), adapter_memory_fraction=None)
    return config


def adapter_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes for adapters on the device, once the model's weights are there."""
    if config.adapter_bytes is not None:
        return config.adapter_bytes
    if is_host(device):
        return CPU_ADAPTER_BYTES
    free, _ = _free_on_gpu(config, device)
    return max(free // GPU_ADAPTER_SHARE, LEAST_GPU_ADAPTER_BYTES)


def adapter_rows(num_bytes: int, num_targets: int) -> int:
    """Return the number of adapters, the base model among them, that the tables beside the buffer have rows for."""
    row_bytes = num_targets * (len(Field) * torch.int64.itemsize + torch.float32.itemsize)
    return max(num_bytes // ADAPTER_TABLE_SHARE // max(row_bytes, 1), LEAST_ADAPTER_ROWS)


def adapter_host_bytes(config: EngineConfig) -> int:
    """Return the bytes for adapters in host memory on every rank, all of which are on this machine."""
    return config.adapter_host_bytes or machine_bytes() // HOST_ADAPTER_SHARE // config.tensor_parallel


def model_bytes(model: PagedCausalLM) -> int:
    """Return the bytes of all tensors that a model holds, each once."""
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for value in vars(module).values():
            held = (value.weight, value.bias) if isinstance(value, LinearWeights) else (value,)
            for one in held:
                tensor = one.panels if isinstance(one, PanelMatrix) else one
                if isinstance(tensor, torch.Tensor):
                    tensors[tensor.data_ptr()] = tensor
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def block_bytes(model: PagedCausalLM, block_size: int) -> int:
    num_kv_heads, head_dim = model.kv_shape
    return 2 * model.num_layers * num_kv_heads * head_dim * block_size * model.kv_dtype.itemsize


def measure_needs(
    model: PagedCausalLM,
    memory: AdapterMemory | None,
    graph_sizes: GraphSizes,
    max_num_seqs: int,
    step_tokens: int,
    shape: CacheShape,
) -> Needs:
    """Measure, on a GPU, by running the largest step and capturing some graphs."""
    if is_host(model.device):
        return Needs()
    data = None if memory is None else make_believe(memory, step_tokens)
    prompts = _measure_peak(model, lambda: run_prompts(model, step_tokens, shape, data))
    blocks = count_prompt_blocks(step_tokens, shape)  # which the cache will have
    prompts -= blocks * block_bytes(model, shape.block_size)
    row_bytes = model.lm_head.linear.weight.shape[1] * model.lm_head.linear.weight.dtype.itemsize
    hidden = step_tokens * row_bytes
    masks = allow_all(model, max_num_seqs)
    choice = _measure_peak(model, lambda: run_choice(model, max_num_seqs, shape.max_length, masks))
    tables = SlotTables(max_num_seqs, shape.max_length, shape.block_size, model.device)
    graphs = measure_graphs(model, memory, graph_sizes, tables)
    # Steps take blocks out of the tables, graphs have a place of their own for them and for embedded tokens.
    held = tables.token_ids.nbytes + 3 * tables.blocks.nbytes + max((0, *graph_sizes.mixed)) * row_bytes
    held += count_mask_bytes(max_num_seqs, model.lm_head.vocab_size)
    return Needs(max(prompts, hidden + choice), graphs, held)


def count_blocks(
    model: PagedCausalLM, config: EngineConfig, max_num_seqs: int, max_length: int, needs: Needs | None = None
) -> int:
    """Count the blocks that fit, but not more than all sequences at once can ever need. Refuse if none does."""
    size, needed = block_bytes(model, config.block_size), sum(needs or ())
    most = -(-max_num_seqs * max_length // config.block_size)
    if is_host(model.device):
        free = max(0, free_bytes() - GRAMMAR_CACHE_BYTES)
        available = free // CPU_CACHE_SHARE if config.cache_bytes is None else config.cache_bytes
    else:
        usable, free = _free_on_gpu(config, model.device)
        available = usable - needed if config.cache_bytes is None else config.cache_bytes
        if min(available // size, most) * size > free - needed:
            raise ConfigError(
                f"cache_bytes = {available} do not fit: {free} bytes of the GPU are free, and steps need {needed} of "
                "them; lower cache_bytes, adapter_bytes, max_rows or max_step_tokens"
            )
    count = min(available // size, most)
    if count < 1:
        raise ConfigError(
            f"{available} bytes for keys and values do not hold a block of {size}: raise cache_bytes, or lower "
            f"adapter_bytes, max_rows or max_step_tokens; weights take {model_bytes(model)} bytes, steps {needed}"
        )
    return count


class MemoryRow(NamedTuple):
    """A line of the report: the bytes that something takes now, and the most that it may grow to."""

    name: str
    in_use: int
    limit: int | None = None


def report_memory(
    model: PagedCausalLM, config: EngineConfig, memory: AdapterMemory | None, num_blocks: int, needs: Needs
) -> list[MemoryRow]:
    """Log, and return, what the memory of the device is used for. On a CPU the lines add up to the process's RSS."""
    cache, arena = num_blocks * block_bytes(model, config.block_size), None if memory is None else memory.arena
    buffer = 0 if arena is None else arena.buffer.nbytes
    tables = 0 if arena is None else arena.host_table.nbytes + arena.scales.nbytes
    weights, is_lazy = model_bytes(model), is_host(model.device)
    rows = [
        MemoryRow("weights", weights),
        MemoryRow("adapters", tables if is_lazy else tables + buffer, tables + buffer),
        MemoryRow(f"keys and values of {num_blocks * config.block_size} tokens", 0 if is_lazy else cache, cache),
    ]
    if is_lazy:
        rows.append(MemoryRow("compiled grammars", 0, GRAMMAR_CACHE_BYTES))
        rows.append(MemoryRow("adapters ready to load", 0, adapter_host_bytes(config)))
        total = resident_bytes()
        rows.append(MemoryRow("Python, torch and other libraries", total - sum(row.in_use for row in rows)))
        rows.append(MemoryRow("resident memory of this process", total, machine_bytes()))
    else:
        rows += [MemoryRow(name, num_bytes) for name, num_bytes in needs._asdict().items()]
        free, total = torch.cuda.mem_get_info(model.device)
        rows.append(MemoryRow("left free", free - needs.step, total))
    for row in rows:
        limit = "" if row.limit is None else f" of up to {row.limit / 1e6:.0f} MB"
        logger.info("memory: %-40s %8.0f MB%s", row.name, row.in_use / 1e6, limit)
    return rows


def explain_lack(model: PagedCausalLM, num_adapter_bytes: int) -> ConfigError:
    """Return the error of a start for which a GPU's memory did not suffice, once weights were loaded."""
    free, total = torch.cuda.mem_get_info(model.device)
    return ConfigError(
        f"the GPU's memory of {total} bytes does not suffice: weights take {model_bytes(model)}, adapters may take "
        f"{num_adapter_bytes}, {free} are free; lower cache_bytes, adapter_bytes, max_rows or max_step_tokens"
    )


def _free_on_gpu(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Return the bytes that are free within the share that may be used, and all that are free."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - total * (1 - config.gpu_memory_fraction))), free


def _measure_peak(model: PagedCausalLM, run: Callable[[], None]) -> int:
    """Return the most bytes that something takes while it runs."""
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run()
    return int(torch.cuda.max_memory_allocated(model.device) - before)
