"""GPU data sheets, and decode step and prefill times extrapolated from measurements.

All measurements use one H200, a Llama model with 8B parameters in bfloat16, and rank-16 adapters on all seven modules
(docs/kernels.md and docs/engine.md, 2026-11-17 and 2026-11-18). A decode step takes the time to read its bytes once,
plus an excess for kernel launches and, in large batches, for compute-bound matrix products. The excess is stored
relative to the time to read the weights, so that it applies to other GPUs and models.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from lorax_server.errors import ConfigError

MIB = 2**20


class Gpu(NamedTuple):
    """A GPU: memory in bytes, bandwidth in bytes per second, and dense bfloat16 operations per second."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float

    @property
    def flops_per_byte(self) -> float:
        return self.flops_per_s / self.bytes_per_s


# Memory as reported by the driver, slightly less than in the data sheet.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 183_359 * MIB, 8.0e12, 2250e12),
        Gpu("H200", 143_771 * MIB, 4.8e12, 989e12),
        Gpu("GH200-96GB", 97_871 * MIB, 4.0e12, 989e12),
        Gpu("H100", 81_559 * MIB, 3.35e12, 989e12),
        Gpu("H100-NVL", 95_830 * MIB, 3.9e12, 835e12),
        Gpu("H100-PCIe", 81_559 * MIB, 2.0e12, 756e12),
        Gpu("H20", 97_871 * MIB, 4.0e12, 148e12),
        Gpu("A100-80GB", 81_920 * MIB, 2.039e12, 312e12),
        Gpu("A100-80GB-PCIe", 81_920 * MIB, 1.935e12, 312e12),
        Gpu("A100-40GB", 40_960 * MIB, 1.555e12, 312e12),
        Gpu("A40", 46_068 * MIB, 0.696e12, 149.7e12),
        Gpu("A10", 23_028 * MIB, 0.6e12, 125e12),
        Gpu("L40S", 46_068 * MIB, 0.864e12, 362e12),
        Gpu("L4", 23_034 * MIB, 0.3e12, 121e12),
        Gpu("RTX-4090", 24_564 * MIB, 1.008e12, 165e12),
        Gpu("RTX-3090", 24_576 * MIB, 0.936e12, 71e12),
    )
}

MEASURED_GPU = GPUS["H200"]
BANDWIDTH_SHARE = 4.1 / 4.8  # share of the published bandwidth that kernels reach: 4.1 TB/s on an H200
# The measured model's weights, KV cache bytes per token, and adapter size.
MEASURED_WEIGHT_BYTES, MEASURED_TOKEN_BYTES, MEASURED_ADAPTER_BYTES = 15_009_316_864, 131_072, 83_886_080
MEASURED_CONTEXT_TOKENS = 196  # KV cache tokens per sequence in the measurements
ATTENTION_TIME_RATIO = 1.15  # attention time relative to reading the KV cache: 1.05 to 1.25, from 512 to 8,192 tokens
FLOAT8_TIME_RATIO = 0.8  # attention time with a float8 cache relative to bfloat16: 0.72 to 0.80
HTTP_THROUGHPUT_SHARE = 0.9  # throughput over HTTP relative to the engine limit; 0.90 and 0.91 were measured
# Share of peak FLOPS in prefills without and with adapters: 43,270 and 40,840 tokens/s for 1,024-token prompts.
PREFILL_FLOPS_SHARE, ADAPTER_PREFILL_FLOPS_SHARE = 0.622, 0.587
MEASURED_LAYERS = 32  # number of layers in the measured model
# Scheduling time per step and sequence: 0.47 ms for 64 sequences, 1.26 for 256.
ENGINE_STEP_MS, ENGINE_MS_PER_SEQUENCE = 0.2, 0.0042
API_TOKENS_PER_S = 1 / 36e-6  # the API process needs 36 us of CPU time per streamed token
HOST_COPY_BYTES_PER_S = 12e9  # from host memory to the device: 12 to 15 GB/s
# Batch size and decode step time in milliseconds, without adapters and with a different adapter for each sequence.
BASE_STEP_TIMES = ((1, 4.22), (64, 5.13), (256, 9.27))
ADAPTER_STEP_TIMES = ((1, 4.26), (16, 4.70), (64, 6.84), (256, 15.95))


def find_gpu(name: str) -> Gpu:
    """Find a GPU by name. Case and a vendor prefix are ignored."""
    key = name.lower().removeprefix("nvidia").strip(" -").replace(" ", "-")
    match = next((gpu for gpu in GPUS.values() if gpu.name.lower() == key), None)
    if match is None:
        raise ConfigError(
            f"--gpu {name[:100]!r} is unknown; known GPUs are {', '.join(GPUS)}. For other GPUs, set --gpu-memory, "
            "--gpu-bandwidth and --gpu-tflops"
        )
    return match


def decode_step_ms(
    gpu: Gpu, batch_size: float, bytes_read: Mapping[str, float], layers: int, is_float8: bool = False
) -> dict[str, float]:
    """Return the components of the decode step time in milliseconds.

    `bytes_read` contains the bytes that the step reads for `weights`, `adapters` and `cache`.
    """
    parts = {name: read_ms(gpu, num_bytes) for name, num_bytes in bytes_read.items()}
    parts["cache"] *= ATTENTION_TIME_RATIO * (FLOAT8_TIME_RATIO if is_float8 else 1)
    # Scheduling overlaps with the step, so only the longer time counts.
    scheduling = ENGINE_STEP_MS + ENGINE_MS_PER_SEQUENCE * batch_size
    # The batch size for which the measured GPU has the same ratio of compute time to memory time.
    equivalent = batch_size * MEASURED_GPU.flops_per_byte / gpu.flops_per_byte
    points = _excess_ratios(has_adapters=bytes_read["adapters"] > 0)
    single_ms, weights = points[0][1], parts["weights"]
    # The excess at batch size 1 scales with layers (launches) or weights (bandwidth); assume the larger.
    least = max(weights, layers / MEASURED_LAYERS * read_ms(MEASURED_GPU, MEASURED_WEIGHT_BYTES)) * single_ms
    excess = least + weights * (_interpolate(points, equivalent) - single_ms)
    return parts | {"excess": max(excess, scheduling - sum(parts.values()))}


def read_ms(gpu: Gpu, num_bytes: float) -> float:
    """Return the time in milliseconds to read `num_bytes` from device memory once."""
    return num_bytes / (gpu.bytes_per_s * BANDWIDTH_SHARE) * 1e3


def prefill_tokens_per_s(gpu: Gpu, flop: float, has_adapters: bool) -> float:
    """Return prefill throughput for `flop` FLOPs per token."""
    return gpu.flops_per_s * (ADAPTER_PREFILL_FLOPS_SHARE if has_adapters else PREFILL_FLOPS_SHARE) / flop


def _excess_ratios(has_adapters: bool) -> list[tuple[int, float]]:
    """Return batch sizes and the measured excess relative to the time to read the weights."""
    weights = read_ms(MEASURED_GPU, MEASURED_WEIGHT_BYTES)
    row = ATTENTION_TIME_RATIO * read_ms(MEASURED_GPU, MEASURED_CONTEXT_TOKENS * MEASURED_TOKEN_BYTES)
    row += read_ms(MEASURED_GPU, MEASURED_ADAPTER_BYTES) if has_adapters else 0
    return [
        (batch_size, (ms - batch_size * row) / weights - 1)
        for batch_size, ms in (ADAPTER_STEP_TIMES if has_adapters else BASE_STEP_TIMES)
    ]


def _interpolate(points: list[tuple[int, float]], x: float) -> float:
    """Return the linearly interpolated value at `x`, extrapolated above the last point and clamped below the first."""
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(points) if x <= pair[1][0]), points[-2:])
    return y0 + max(x - x0, 0) * (y1 - y0) / (x1 - x0)
