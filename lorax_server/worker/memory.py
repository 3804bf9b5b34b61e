"""How much memory there is, and how it is shared out between the cache and the adapters."""

import os
from pathlib import Path

import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.layers.attention import Seqlen
from lorax_server.models.custom_modeling.paged import PagedCausalLM

CPU_ADAPTER_BYTES = 2**30
CPU_CACHE_SHARE = 4  # one part in so many of the free memory
GPU_ADAPTER_SHARE = 10
HOST_ADAPTER_SHARE = 8


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes() -> int:
    """Of this machine, counting what files keep in memory only because nobody else needs it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = dict(line.split(":", 1) for line in file)
        return min(int(found["MemAvailable"].split()[0]) * 1024, _container_bytes())
    except (OSError, KeyError):  # not Linux
        return machine_bytes() // 2


def _container_bytes() -> int:
    """What is left of the limit that a container has been given; all there is if it has none."""
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # no container, or "max"
        return machine_bytes()


def adapter_bytes(config: EngineConfig, device: torch.device) -> int:
    """For adapters on the device."""
    if config.adapter_bytes is not None:
        return config.adapter_bytes
    if device.type != "cuda":
        return CPU_ADAPTER_BYTES
    return torch.cuda.get_device_properties(device).total_memory // GPU_ADAPTER_SHARE


def adapter_host_bytes(config: EngineConfig) -> int:
    """On every rank, all of which are on this machine."""
    all_bytes = min(machine_bytes(), _container_bytes())
    return config.adapter_host_bytes or all_bytes // HOST_ADAPTER_SHARE // config.tensor_parallel


def block_bytes(model: PagedCausalLM, block_size: int) -> int:
    num_kv_heads, head_dim = model.kv_shape
    return 2 * model.num_layers * num_kv_heads * head_dim * block_size * model.kv_dtype.itemsize


def count_blocks(model: PagedCausalLM, config: EngineConfig, step_tokens: int, most_tokens: int) -> int:
    """Blocks that fit, but not more than so many tokens can ever need."""
    size = block_bytes(model, config.block_size)
    available = config.cache_bytes
    if available is None:
        available = _free_on_gpu(model, config, step_tokens) if model.device.type == "cuda" else _free_on_cpu()
    count = min(available // size, -(-most_tokens // config.block_size))
    if count < 1:
        raise ConfigError(
            f"{available} bytes for keys and values do not hold a block of {size}: raise cache_bytes, or lower "
            "adapter_bytes"
        )
    return count


def _free_on_cpu() -> int:
    return free_bytes() // CPU_CACHE_SHARE


def _free_on_gpu(model: PagedCausalLM, config: EngineConfig, step_tokens: int) -> int:
    """What is left beside the model, the adapters and the largest step."""
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    _largest_step(model, step_tokens)
    needed = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(free - needed - total * (1 - config.gpu_memory_fraction))


def _largest_step(model: PagedCausalLM, step_tokens: int) -> None:
    """One prompt that fills a step, through the model and its head."""
    block_size = 16
    count = -(-step_tokens // block_size)
    positions = torch.arange(step_tokens, device=model.device)
    bounds = torch.tensor([0, step_tokens], dtype=torch.int32, device=model.device)
    lengths = torch.tensor([step_tokens], device=model.device)
    model(
        torch.zeros_like(positions),
        positions.int(),
        bounds,
        model.allocate_kv_cache(count, block_size),
        torch.arange(count, dtype=torch.int32, device=model.device)[None],
        positions,
        Seqlen(lengths, torch.zeros_like(lengths), bounds, step_tokens, step_tokens, lengths),
        step_tokens,
        None,
        lm_head_indices=positions[:256],
    )
