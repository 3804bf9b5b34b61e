"""Computes memory layout and batch size per replica, and the number of replicas for the expected traffic."""

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lorax_server import machine
from lorax_server.cli.planning import step_time
from lorax_server.cli.planning.model_sizes import HALF_PRECISION_BYTES, ModelSizes
from lorax_server.config import ROUNDED_FORMATS, WEIGHT_BITS, EngineConfig, Settings, setting
from lorax_server.errors import ConfigError

MAX_BYTES = 2**60  # maximum of the memory settings
MAX_STEP_TOKENS = 4096  # assumed maximum number of tokens in a step
# Estimated activations per token, as multiples of the hidden size and of the widest matrix.
NUM_HIDDEN_ACTIVATIONS, NUM_WIDEST_ACTIVATIONS = 6, 3
BYTES_PER_LOGIT = 16  # per logit during sampling
GRAPH_BYTES = 2**30  # estimate for CUDA graphs and the CUDA context


@dataclass(frozen=True)
class ReplicaSettings(Settings):
    """The hardware and the limits of one replica."""

    gpu: str | None = setting(None, f"one of {', '.join(step_time.GPUS)}")
    gpu_memory_bytes: int | None = setting(None, "GPU memory, such as 80G", flag="--gpu-memory", at_most=MAX_BYTES)
    gpu_bandwidth: float | None = setting(None, "published memory bandwidth in GB/s", above=0, at_most=10**6)
    gpu_tflops: float | None = setting(None, "published dense bfloat16 TFLOPS", above=0, at_most=10**6)
    host_memory_bytes: int = setting(2**36, "host memory", flag="--host-memory", at_most=MAX_BYTES)
    gpu_memory_fraction: float = setting(
        EngineConfig.gpu_memory_fraction, "share of GPU memory to use", above=0, at_most=1
    )
    adapter_bytes: int | None = setting(
        None, "GPU memory for adapters", none="the server's", at_least=0, at_most=MAX_BYTES
    )
    quantize: str | None = setting(
        None,
        "the server's --quantize: a weight format, or fp8-kv, which stores keys and values as float8",
        choices=("fp8-kv", *WEIGHT_BITS, *ROUNDED_FORMATS),
    )
    max_num_seqs: int | None = setting(
        None, "maximum batch size", none="the server's", at_most=2**16, aliases=("--max-rows",)
    )
    inter_token_latency_ms: float | None = setting(
        None, "highest allowed time between tokens", above=0, aliases=("--token-ms",)
    )
    max_utilization: float = setting(0.8, "highest replica utilization", above=0, at_most=1, aliases=("--load",))

    @property
    def has_float8_cache(self) -> bool:
        return self.quantize == "fp8-kv"


@dataclass(frozen=True)
class Traffic(Settings):
    """The expected traffic. The traffic of the k-th most popular adapter is proportional to 1 / k ** zipf_exponent."""

    requests_per_s: float = setting(1.0, "requests per second over all replicas", above=0)
    prompt_tokens: int = setting(512, "mean prompt length")
    completion_tokens: int = setting(128, "mean completion length", aliases=("--answer-tokens",))
    zipf_exponent: float = setting(
        1.0, "Zipf exponent for adapter popularity; 0 is uniform", flag="--zipf", at_least=0, at_most=10
    )


@dataclass(frozen=True)
class AdapterMix:
    """The number of adapters and their size on the device."""

    count: int
    total_bytes: int
    largest_bytes: int

    @classmethod
    def from_ranks(
        cls, sizes: ModelSizes, ranks: list[tuple[int, int]], modules: Collection[str], has_magnitudes: bool = False
    ) -> "AdapterMix":
        """Create an adapter mix from (rank, count) pairs."""
        each = [(count, sizes.adapter_bytes(rank, modules, has_magnitudes)) for rank, count in ranks if count]
        total = sum(count * num_bytes for count, num_bytes in each)
        return cls(sum(count for count, _ in each), total, max((num_bytes for _, num_bytes in each), default=0))

    @property
    def mean_bytes(self) -> float:
        return self.total_bytes / self.count if self.count else 0.0


class Popularity:
    """Each adapter's share of requests according to Zipf's law, most popular adapter first."""

    def __init__(self, count: int, exponent: float) -> None:
        weights = np.arange(1.0, count + 1) ** -exponent
        self._shares = np.minimum(weights / weights.sum(), 1 - 1e-12)  # avoid log(0)

    def request_share_of_top(self, count: int) -> float:
        """Return the share of requests for the `count` most popular adapters."""
        return float(self._shares[:count].sum())

    def expected_distinct_adapters(self, requests: float) -> float:
        """Return the expected number of distinct adapters among this many requests."""
        return float(-np.expm1(requests * np.log1p(-self._shares)).sum())


@dataclass
class Planner:
    """Plans how to serve a model with its adapters on one type of GPU."""

    sizes: ModelSizes
    adapter_mix: AdapterMix
    traffic: Traffic
    gpu: step_time.Gpu
    settings: ReplicaSettings

    def __post_init__(self) -> None:
        traffic, is_large = self.traffic, self.gpu.memory_bytes >= machine.LARGE_GPU_BYTES
        self._max_batch_size = self.settings.max_num_seqs or (
            machine.LARGE_GPU_DEFAULT_MAX_NUM_SEQS if is_large else machine.DEFAULT_MAX_NUM_SEQS
        )
        self._popularity = Popularity(self.adapter_mix.count, traffic.zipf_exponent)
        self._has_adapters = self.adapter_mix.count > 0
        self._mean_length = traffic.prompt_tokens + traffic.completion_tokens / 2  # mean length of running sequences
        flop = self.sizes.prompt_flops(traffic.prompt_tokens)
        self._prefill_tokens_per_s = step_time.prefill_tokens_per_s(self.gpu, flop, self._has_adapters)
        self._memory = self._plan_memory()

    def plan(self) -> dict[str, Any]:
        """Return the memory layout, the replica performance and the number of replicas."""
        memory, max_utilization = self._memory, self.settings.max_utilization
        device_share, host_share = (
            self._popularity.request_share_of_top(count) if self._has_adapters else 1.0
            for count in (memory["device_adapters"], memory["device_adapters"] + memory["host_adapters"])
        )
        batch_size, limit = self._find_batch_size()
        replica = self._plan_replica(batch_size, limit, 1 - device_share)
        return {
            "gpu": self.gpu._asdict(),
            "traffic": asdict(self.traffic),
            "adapters": {
                "count": self.adapter_mix.count,
                "bytes": self.adapter_mix.total_bytes,
                "mean_bytes": self.adapter_mix.mean_bytes,
                "device_share": device_share,
                "host_share": host_share,
            },
            "memory": memory,
            "has_quantized_weights": self.sizes.is_quantized,
            "replica": replica,
            "max_utilization": max_utilization,
            "replicas": max(1, math.ceil(self.traffic.requests_per_s / (replica["requests_per_s"] * max_utilization))),
        }

    def _find_batch_size(self) -> tuple[int, str]:
        """Return the largest possible batch size, and the limit that prevents a larger batch."""
        target_ms = self.settings.inter_token_latency_ms
        if target_ms is not None and (least_ms := self._ms_per_token(1)) > target_ms:
            raise ConfigError(
                f"--inter-token-latency-ms {target_ms:g} cannot be reached: a single sequence takes {least_ms:.1f} ms "
                "per token on this GPU; raise the limit, or use a faster GPU"
            )
        batch_sizes = range(1, self._max_batch_size + 1)
        batch_size = bisect_left(batch_sizes, True, key=lambda size: bool(self._find_exceeded_limit(size)))
        return batch_size, self._find_exceeded_limit(batch_size + 1) or "batch_size"

    def _find_exceeded_limit(self, batch_size: int) -> str | None:
        target_ms = self.settings.inter_token_latency_ms
        if batch_size * self._mean_length > self._memory["cache_tokens"]:
            return "cache"
        if batch_size > self._max_batch_size:
            return "batch_size"
        if self._expected_adapters(batch_size) > max(self._memory["device_adapters"], 1):
            return "adapters"
        return "latency" if target_ms is not None and self._ms_per_token(batch_size) > target_ms else None

    def _plan_replica(self, batch_size: int, limit: str, miss_share: float) -> dict[str, Any]:
        """Return the latency and throughput of one replica.

        `miss_share` is the share of adapter requests whose adapter must be copied from host memory.
        """
        traffic, step = self.traffic, self._decode_step_ms(batch_size)
        requests_per_s = self._requests_per_s(batch_size)
        copied = miss_share * self.adapter_mix.mean_bytes
        if requests_per_s * copied > step_time.HOST_COPY_BYTES_PER_S:
            requests_per_s, limit = step_time.HOST_COPY_BYTES_PER_S / copied, "copies"
        if requests_per_s * traffic.completion_tokens > step_time.API_TOKENS_PER_S:
            requests_per_s, limit = step_time.API_TOKENS_PER_S / traffic.completion_tokens, "api"
        prompt_share = requests_per_s * traffic.prompt_tokens / self._prefill_tokens_per_s
        return {
            "batch_size": batch_size,
            "limit": limit,
            "is_busy_with_prompts": prompt_share > 0.5,
            "distinct_adapters": self._expected_adapters(batch_size),
            "step_ms": sum(step.values()),
            "step_parts_ms": step,
            "floor_ms": step_time.read_ms(self.gpu, sum(self._count_bytes_read(batch_size).values())),
            # Includes prefills of other requests.
            "inter_token_latency_ms": 1e3 * batch_size / (requests_per_s * traffic.completion_tokens),
            "prompt_tokens_per_s": self._prefill_tokens_per_s,  # prefill only
            "prompt_share": prompt_share,
            "requests_per_s": requests_per_s,
            "tokens_per_s": requests_per_s * traffic.completion_tokens,
        }

    def _expected_adapters(self, batch_size: int) -> float:
        return self._popularity.expected_distinct_adapters(batch_size) if self._has_adapters else 0.0

    def _count_bytes_read(self, batch_size: int) -> dict[str, float]:
        """Return how many bytes of weights, adapters and KV cache a decode step reads."""
        return {
            "weights": self.sizes.count_bytes_read(batch_size),
            "adapters": self._expected_adapters(batch_size) * self.adapter_mix.mean_bytes,
            "cache": batch_size * self._mean_length * self.sizes.token_bytes,
        }

    def _decode_step_ms(self, batch_size: int) -> dict[str, float]:
        return step_time.decode_step_ms(
            self.gpu, batch_size, self._count_bytes_read(batch_size), self.sizes.layers, self.settings.has_float8_cache
        )

    def _requests_per_s(self, batch_size: int) -> float:
        """Return the request rate that keeps `batch_size` sequences running. Each prefill delays all sequences."""
        decode_s = self.traffic.completion_tokens * sum(self._decode_step_ms(batch_size).values()) / 1e3
        prefill_s = self.traffic.prompt_tokens / self._prefill_tokens_per_s
        return step_time.HTTP_THROUGHPUT_SHARE * batch_size / (decode_s + batch_size * prefill_s)

    def _ms_per_token(self, batch_size: int) -> float:
        return 1e3 * batch_size / (self._requests_per_s(batch_size) * self.traffic.completion_tokens)

    def _plan_memory(self) -> dict[str, int]:
        """Return how GPU memory is divided, as in `worker/memory.py`. The step memory is estimated, not measured."""
        sizes, gpu = self.sizes, self.gpu.name
        weights, usable = sizes.weight_bytes, int(self.gpu.memory_bytes * self.settings.gpu_memory_fraction)
        free = usable - weights
        if free <= 0:
            raise ConfigError(
                f"the model does not fit: its weights take {format_gb(weights)}, and {format_gb(usable)} of the {gpu} "
                "can be used. Use a larger GPU or a smaller model; `lorax plan` does not support tensor parallelism"
            )
        adapters = self.settings.adapter_bytes
        if adapters is None:
            adapters = max(free // machine.GPU_ADAPTER_DIVISOR, machine.MIN_GPU_ADAPTER_BYTES)
        if self._has_adapters and self.adapter_mix.largest_bytes > adapters:
            raise ConfigError(
                f"the largest adapter takes {format_gb(self.adapter_mix.largest_bytes)}, but only "
                f"{format_gb(adapters)} are reserved for adapters: raise --adapter-bytes, or use a larger GPU"
            )
        widest = max(matrix.outputs for matrix in sizes.matrices)
        values_per_token = NUM_HIDDEN_ACTIVATIONS * sizes.hidden_size + NUM_WIDEST_ACTIVATIONS * widest
        steps = GRAPH_BYTES + MAX_STEP_TOKENS * values_per_token * HALF_PRECISION_BYTES
        steps += self._max_batch_size * sizes.vocab_size * BYTES_PER_LOGIT
        cache = max(free - adapters - adapters // machine.ADAPTER_TABLE_DIVISOR - steps, 0)
        block_size = EngineConfig.block_size
        block_bytes = block_size * sizes.token_bytes // (2 if self.settings.has_float8_cache else 1)
        tokens = min(cache // block_bytes, self._max_batch_size * sizes.max_length // block_size) * block_size
        needed = self.traffic.prompt_tokens + self.traffic.completion_tokens
        if tokens < needed:
            raise ConfigError(
                f"the KV cache on the {gpu} holds only {tokens} tokens after {format_gb(weights)} for weights, "
                f"{format_gb(adapters)} for adapters and {format_gb(steps)} for steps, but a request has {needed}: "
                "lower --adapter-bytes, or use a larger GPU"
            )
        mean, host = self.adapter_mix.mean_bytes, self.settings.host_memory_bytes // machine.HOST_ADAPTER_DIVISOR
        on_device, on_host = (
            min(int(size // mean), self.adapter_mix.count) if mean else 0 for size in (adapters, host)
        )
        return {
            "total": int(self.gpu.memory_bytes),
            "weights": weights,
            "adapters": adapters,
            "steps": steps,
            "cache": cache,
            "device_adapters": on_device,
            "host_adapters": on_host,
            "cache_tokens": tokens,
        }


def format_gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
