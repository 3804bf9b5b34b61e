"""The shares of memory that the cache and the adapters get."""

import logging

import torch

from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import Field, LinearWeights
from lorax_server.kernels.panels import PanelMatrix
from lorax_server.machine import free_bytes, machine_bytes
from lorax_server.models.custom_modeling.paged import PagedCausalLM
from lorax_server.worker.adapter_memory import AdapterMemory
from lorax_server.worker.warm_up import CacheShape, make_believe, run_prompts

logger = logging.getLogger(__name__)

CPU_ADAPTER_BYTES = 2**30
CPU_CACHE_SHARE = 4  # one part in so many of the free memory
GPU_ADAPTER_SHARE = 10
HOST_ADAPTER_SHARE = 8
ADAPTER_TABLE_SHARE = 64  # of the bytes for adapters, beside them
LEAST_ADAPTER_ROWS = 64


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


def model_bytes(model: PagedCausalLM) -> int:
    """Return the bytes of all tensors that a model holds, each once."""
    tensors: dict[int, torch.Tensor] = {}
    packed = 0  # copies by oneDNN, which tells no address
    for module in model.modules():
        for value in vars(module).values():
            held = (value.weight, value.bias) if isinstance(value, LinearWeights) else (value,)
            for one in held:
                tensor = one.panels if isinstance(one, PanelMatrix) else one
                if isinstance(tensor, torch.Tensor):
                    tensors[tensor.data_ptr()] = tensor
            if isinstance(value, LinearWeights) and value.packed is not None:
                packed += value.weight.shape[0] * value.weight.shape[1] * value.weight.dtype.itemsize
    return packed + sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def report_memory(model: PagedCausalLM, num_adapter_bytes: int, num_blocks: int, block_size: int) -> None:
    """Say what the start takes of the memory."""
    logger.info(
        "memory: %.1f MB for the model's weights, %.1f MB for adapters, %.1f MB for keys and values of %d tokens",
        model_bytes(model) / 1e6,
        num_adapter_bytes / 1e6,
        num_blocks * block_bytes(model, block_size) / 1e6,
        num_blocks * block_size,
    )


def block_bytes(model: PagedCausalLM, block_size: int) -> int:
    num_kv_heads, head_dim = model.kv_shape
    return 2 * model.num_layers * num_kv_heads * head_dim * block_size * model.kv_dtype.itemsize


def count_blocks(
    model: PagedCausalLM,
    config: EngineConfig,
    step_tokens: int,
    max_length: int,
    memory: AdapterMemory | None = None,
    reserved: int = 0,
) -> int:
    """Count the blocks that fit beside `reserved` bytes, but not more than all sequences at once can ever need."""
    size = block_bytes(model, config.block_size)
    available = config.cache_bytes
    if available is None and model.device.type == "cuda":
        available = _free_on_gpu(model, config, step_tokens, max_length, memory) - reserved
    elif available is None:
        available = free_bytes() // CPU_CACHE_SHARE
    count = min(available // size, -(-config.max_rows * max_length // config.block_size))
    if count < 1:
        raise ConfigError(
            f"{available} bytes for keys and values do not hold a block of {size}: raise cache_bytes, or lower "
            "adapter_bytes"
        )
    return count


def _free_on_gpu(
    model: PagedCausalLM, config: EngineConfig, step_tokens: int, max_length: int, memory: AdapterMemory | None
) -> int:
    """Measure the memory that the model, the adapters and the largest step leave free."""
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    shape = CacheShape(max_length, config.block_size)
    run_prompts(model, step_tokens, shape, None if memory is None else make_believe(memory, step_tokens))
    needed = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(free - needed - total * (1 - config.gpu_memory_fraction))
