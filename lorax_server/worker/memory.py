"""Divides device memory between the KV cache, adapters and steps, and rejects configurations that do not fit."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import ExpertWeights, Field, LinearWeights, StoredMatrix
from lorax_server.kernels.device import is_host
from lorax_server.machine import (
    ADAPTER_TABLE_DIVISOR,
    DEFAULT_MAX_NUM_SEQS,
    GPU_ADAPTER_DIVISOR,
    GRAMMAR_CACHE_BYTES,
    HOST_ADAPTER_DIVISOR,
    LARGE_GPU_BYTES,
    LARGE_GPU_DEFAULT_MAX_NUM_SEQS,
    MIN_GPU_ADAPTER_BYTES,
    free_memory_bytes,
    resident_memory_bytes,
    total_memory_bytes,
)
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.models.pooled_model import PooledModel
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.graphs import GraphSizes, measure_graphs
from lorax_server.worker.inputs import SlotTables, count_mask_bytes
from lorax_server.worker.warm_up import (
    CacheShape,
    count_prompt_blocks,
    make_dummy_lora_batch,
    make_permissive_masks,
    run_prompts,
    run_sampling,
)

logger = logging.getLogger(__name__)

CPU_ADAPTER_BYTES = 2**30  # maximum; the system allocates memory on first use
CPU_CACHE_DIVISOR = 4  # KV cache size = free memory / this
MIN_ADAPTER_ROWS = 64


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if the error is a GPU out-of-memory error from torch or a CUDA library."""
    return isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error) or "out of memory" in str(error)


class StepMemory(NamedTuple):
    """The GPU memory for steps, in bytes. It does not include the weights, the adapters and the KV cache."""

    step: int = 0  # peak memory of the largest step
    graphs: int = 0
    tables: int = 0  # slot tables and token masks


def find_max_num_seqs(config: EngineConfig, device: torch.device) -> int:
    """Return the maximum number of running sequences, from the config or a default for the device."""
    if config.max_num_seqs is not None:
        return config.max_num_seqs
    is_large = not is_host(device) and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    max_num_seqs = LARGE_GPU_DEFAULT_MAX_NUM_SEQS if is_large else DEFAULT_MAX_NUM_SEQS
    return max_num_seqs if config.max_step_tokens is None else min(max_num_seqs, config.max_step_tokens)


def resolve_sizes(config: EngineConfig, model: PagedCausalLM) -> EngineConfig:
    """Return the config with sizes in tokens, or as a fraction of GPU memory, converted to bytes."""
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
    """Return the device memory for adapters in bytes. Call this after loading the weights."""
    if config.adapter_bytes is not None:
        return config.adapter_bytes
    if is_host(device):
        return CPU_ADAPTER_BYTES
    free, _ = _get_free_gpu_bytes(config, device)
    return max(free // GPU_ADAPTER_DIVISOR, MIN_GPU_ADAPTER_BYTES)


def count_adapter_rows(num_bytes: int, num_targets: int) -> int:
    """Return the number of adapter table rows, including the base model's row."""
    row_bytes = num_targets * (len(Field) * torch.int64.itemsize + torch.float32.itemsize)
    return max(num_bytes // ADAPTER_TABLE_DIVISOR // max(row_bytes, 1), MIN_ADAPTER_ROWS)


def adapter_host_bytes(config: EngineConfig) -> int:
    """Return the host memory for adapters per rank, in bytes. All ranks run on the same machine."""
    return config.adapter_host_bytes or total_memory_bytes() // HOST_ADAPTER_DIVISOR // config.tensor_parallel


def model_bytes(model: PagedCausalLM | PooledModel) -> int:
    """Return the total size of the model's tensors in bytes. Shared tensors count once."""
    return sum(tensor.nbytes for tensor in _find_tensors(model))


def find_weight_format(model: PagedCausalLM | PooledModel) -> str:
    """Return the formats of the quantized weights. If no weights are quantized, return the dtype of most weights."""
    if model.weight_format:
        return model.weight_format
    sizes: Counter[torch.dtype] = Counter()
    for tensor in _find_tensors(model):
        sizes[tensor.dtype] += tensor.nbytes
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _find_tensors(model: PagedCausalLM | PooledModel) -> Collection[torch.Tensor]:
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for value in vars(module).values():
            for one in _find_parts(value):
                parts = one.tensors if isinstance(one, StoredMatrix) else (one,)
                tensors |= {part.data_ptr(): part for part in parts if isinstance(part, torch.Tensor)}
    return tensors.values()


def _find_parts(value: Any) -> Sequence[Any]:
    """Return the matrices and biases in a module's attribute."""
    if isinstance(value, ExpertWeights):
        if value.stacked is not None:
            return [part for stack in value.stacked for part in stack]
        return [part for linear in (*value.gate_up, *value.down) for part in _find_parts(linear)]
    if isinstance(value, list):
        return [part for each in value for part in _find_parts(each)]
    return (value.weight, value.bias) if isinstance(value, LinearWeights) else (value,)


def block_bytes(model: PagedCausalLM, block_size: int) -> int:
    num_kv_heads, head_dim = model.kv_shape
    num_tensors = 1 if model.shares_kv else 2
    return num_tensors * model.num_layers * num_kv_heads * head_dim * block_size * model.kv_dtype.itemsize


def measure_step_memory(
    model: PagedCausalLM,
    memory: AdapterMemory | None,
    graph_sizes: GraphSizes,
    max_num_seqs: int,
    step_tokens: int,
    shape: CacheShape,
) -> StepMemory:
    """Return the GPU memory for steps, measured by running the largest step and capturing the largest graphs."""
    if is_host(model.device):
        return StepMemory()
    data = None if memory is None else make_dummy_lora_batch(memory, step_tokens)
    prompts = _measure_peak(model, lambda: run_prompts(model, step_tokens, shape, data))
    blocks = count_prompt_blocks(step_tokens, shape)  # subtracted, because they belong to the KV cache
    prompts -= blocks * block_bytes(model, shape.block_size)
    row_bytes = model.lm_head.linear.weight.shape[1] * model.lm_head.linear.weight.dtype.itemsize
    hidden = step_tokens * row_bytes
    masks = make_permissive_masks(model, max_num_seqs)
    choice = _measure_peak(model, lambda: run_sampling(model, max_num_seqs, shape.max_length, masks))
    tables = SlotTables(max_num_seqs, shape.max_length, shape.block_size, model.device)
    graphs = measure_graphs(model, memory, graph_sizes, tables)
    # Block tables exist three times: in slot tables, step inputs and graph inputs. Graphs also store token embeddings.
    held = tables.token_ids.nbytes + 3 * tables.blocks.nbytes + max((0, *graph_sizes.mixed)) * row_bytes
    held += count_mask_bytes(max_num_seqs, model.lm_head.vocab_size)
    return StepMemory(max(prompts, hidden + choice), graphs, held)


def count_blocks(
    model: PagedCausalLM,
    config: EngineConfig,
    max_num_seqs: int,
    max_length: int,
    step_memory: StepMemory | None = None,
) -> int:
    """Return how many KV blocks fit into memory, up to the number that all slots can use.

    Raise ConfigError if no block fits.
    """
    size, needed = block_bytes(model, config.block_size), sum(step_memory or ())
    max_blocks = -(-max_num_seqs * max_length // config.block_size)
    if is_host(model.device):
        free = max(0, free_memory_bytes() - GRAMMAR_CACHE_BYTES)
        available = free // CPU_CACHE_DIVISOR if config.cache_bytes is None else config.cache_bytes
    else:
        usable, free = _get_free_gpu_bytes(config, model.device)
        available = usable - needed if config.cache_bytes is None else config.cache_bytes
        if min(available // size, max_blocks) * size > free - needed:
            raise ConfigError(
                f"cache_bytes = {available} does not fit: {free} bytes of GPU memory are free and steps need {needed}; "
                "lower cache_bytes, adapter_bytes, max_num_seqs or max_step_tokens"
            )
    count = min(available // size, max_blocks)
    if count < 1:
        raise ConfigError(
            f"{available} bytes for the KV cache are less than one block ({size} bytes): raise cache_bytes, or lower "
            f"adapter_bytes, max_num_seqs or max_step_tokens; weights take {model_bytes(model)} bytes, steps {needed}"
        )
    return count


def warn_if_cache_is_small(model: PagedCausalLM, config: EngineConfig, num_blocks: int, max_length: int) -> None:
    """Log a warning if the KV cache is too small for one request of the maximum length."""
    num_tokens = num_blocks * config.block_size
    if num_tokens < max_length:
        needed = -(-max_length // config.block_size) * block_bytes(model, config.block_size)
        logger.warning(
            "the KV cache holds %d tokens, so requests are limited to %d instead of %d tokens; --cache-bytes %d holds "
            "one request of the maximum length",
            *(num_tokens, num_tokens, max_length, needed),
        )


class MemoryReportLine(NamedTuple):
    """A line in the memory report, with the current size and the limit in bytes, and the flag that changes
    the limit.
    """

    name: str
    used_bytes: int
    limit: int | None = None
    flag: str = ""


def report_memory(
    model: PagedCausalLM, config: EngineConfig, memory: AdapterMemory | None, num_blocks: int, step_memory: StepMemory
) -> list[MemoryReportLine]:
    """Log and return how the device's memory is used. On a CPU, the last line is the resident memory of the process."""
    cache, arena = num_blocks * block_bytes(model, config.block_size), None if memory is None else memory.arena
    buffer = 0 if arena is None else arena.buffer.nbytes
    tables = 0 if arena is None else arena.host_table.nbytes + arena.scales.nbytes
    weights, is_lazy = model_bytes(model), is_host(model.device)
    rows = [
        MemoryReportLine("weights", weights),
        MemoryReportLine("adapters", tables if is_lazy else tables + buffer, tables + buffer, "--adapter-bytes"),
        MemoryReportLine(
            f"KV cache for {num_blocks * config.block_size} tokens", 0 if is_lazy else cache, cache, "--cache-bytes"
        ),
    ]
    if is_lazy:
        rows.append(MemoryReportLine("compiled grammars", 0, GRAMMAR_CACHE_BYTES))
        rows.append(MemoryReportLine("adapters in host memory", 0, adapter_host_bytes(config), "--adapter-host-bytes"))
        total = resident_memory_bytes()
        rows.append(MemoryReportLine("Python, torch and other libraries", total - sum(row.used_bytes for row in rows)))
        rows.append(MemoryReportLine("resident memory of this process", total, total_memory_bytes()))
    else:
        rows += [MemoryReportLine(name, num_bytes) for name, num_bytes in step_memory._asdict().items()]
        free, total = torch.cuda.mem_get_info(model.device)
        rows.append(MemoryReportLine("left free", free - step_memory.step, total))
    for row in rows:
        limit = "" if row.limit is None else f" of up to {row.limit / 1e6:.0f} MB"
        limit += f" ({row.flag})" if row.flag else ""
        logger.info("memory: %-40s %8.0f MB%s", row.name, row.used_bytes / 1e6, limit)
    return rows


def out_of_memory_error(model: PagedCausalLM, num_adapter_bytes: int) -> ConfigError:
    """Return the error for the case that GPU memory is not sufficient after the weights are loaded."""
    free, total = torch.cuda.mem_get_info(model.device)
    return ConfigError(
        f"GPU memory of {total} bytes is not sufficient: weights take {model_bytes(model)}, adapters may take "
        f"{num_adapter_bytes}, {free} are free; lower cache_bytes, adapter_bytes, max_num_seqs or max_step_tokens"
    )


def _get_free_gpu_bytes(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Return the free bytes within the limit `gpu_memory_fraction`, and the total free bytes."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - total * (1 - config.gpu_memory_fraction))), free


def _measure_peak(model: PagedCausalLM, run: Callable[[], None]) -> int:
    """Return the peak memory that `run` allocates, in bytes."""
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run()
    return int(torch.cuda.max_memory_allocated(model.device) - before)
