"""A replica's memory, its largest batch, and the replicas that some traffic needs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lorax_server.cli.planning.demand import AdapterMix, Popularity, Traffic
from lorax_server.cli.planning.gpus import Gpu
from lorax_server.cli.planning.measured import (
    API_TOKENS_PER_S,
    COPIED_BYTES_PER_S,
    SERVED_SHARE,
    StepBytes,
    StepTime,
    find_floor_ms,
    find_prompt_rate,
    find_step_time,
)
from lorax_server.cli.planning.model_sizes import HALF_BYTES, ModelSizes
from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.machine import (
    ADAPTER_TABLE_SHARE,
    GPU_ADAPTER_SHARE,
    HOST_ADAPTER_SHARE,
    LARGE_GPU_BYTES,
    LARGE_GPU_ROWS,
    LEAST_GPU_ADAPTER_BYTES,
    ROWS,
)

STEP_TOKENS = 4096  # of the largest step
STEP_HIDDEN, STEP_WIDEST = 6, 3  # numbers of a token, in units of the hidden size and of the widest matrix
CHOICE_BYTES = 16  # for each score of the rows' tokens
GRAPH_BYTES = 2**30  # graphs, and what CUDA takes for itself


@dataclass(frozen=True)
class Machinery:
    """A replica's GPU and host, and how its server is started. None is the server's own choice."""

    gpu: Gpu
    host_memory: int
    gpu_memory_fraction: float = EngineConfig.gpu_memory_fraction
    adapter_bytes: int | None = None
    max_rows: int | None = None
    is_float8: bool = False
    api_workers: int = 1

    @property
    def rows(self) -> int:
        return self.max_rows or (LARGE_GPU_ROWS if self.gpu.memory >= LARGE_GPU_BYTES else ROWS)


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of a GPU by what takes them, and what these hold."""

    total: int
    weights: int
    adapters: int
    steps: int
    cache: int
    device_adapters: int
    host_adapters: int
    cache_tokens: int


@dataclass(frozen=True)
class ReplicaPlan:
    """The largest batch that a replica can run, and what it does then."""

    rows: int
    limit: str  # of LIMITS
    distinct_adapters: float
    step: StepTime  # milliseconds
    floor_ms: float
    token_ms: float  # between two tokens of a sequence, prompts of others included
    prompt_tokens_per_s: float  # if it did nothing else
    prompt_share: float  # of its time
    requests_per_s: float
    device_share: float  # of requests with an adapter that find it on the device,
    host_share: float  # and of those that find it there or in host memory

    @property
    def is_busy_with_prompts(self) -> bool:
        return self.prompt_share > 0.5


LIMITS = {
    "rows": "the number of rows: more rows give more tokens a second, and more time between them (--max-rows)",
    "latency": "bandwidth and the goal for the time between tokens (--token-ms)",
    "cache": "memory for keys and values",
    "adapters": "memory for the adapters that are needed at once (--adapter-bytes)",
    "api": "the CPU time of the processes that answer requests (--api-workers)",
    "copies": "copies of adapters from host memory, as too few of them stay on the device (--adapter-bytes)",
}


class Planner:
    """One model, its adapters and its traffic on one kind of machine."""

    def __init__(self, sizes: ModelSizes, mix: AdapterMix, traffic: Traffic, machinery: Machinery) -> None:
        self.sizes, self.mix, self.traffic, self.machinery = sizes, mix, traffic, machinery
        self.popularity = Popularity(mix.count, traffic.zipf)
        self.is_adapted = mix.count > 0 and traffic.base_share < 1
        self.memory = self._plan_memory()
        flop = sizes.prompt_flop(traffic.prompt_tokens)
        self._prompt_rate = find_prompt_rate(machinery.gpu, flop, self.is_adapted)

    def count_replicas(self, replica: ReplicaPlan, load: float) -> int:
        """Return the replicas of which each has at most such a share of its greatest load."""
        return max(1, math.ceil(self.traffic.requests_per_s / (replica.requests_per_s * load)))

    def plan_replica(self, goal_ms: float | None = None) -> ReplicaPlan:
        """Find the largest batch. All bounds grow with it, so halving the range finds it."""
        bounds = self._find_bounds(goal_ms)
        broken = self._find_broken(bounds, 1)
        if broken == "latency":
            raise ConfigError(
                f"--token-ms {goal_ms:g} cannot be reached: a single sequence takes {self._token_ms(1):.1f} ms for a "
                "token on this GPU; allow more, or use a faster GPU"
            )
        assert broken is None, broken  # `_plan_memory` has refused it
        least, most = 1, self.machinery.rows + 1  # the first is possible, the last is not
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._find_broken(bounds, middle) is None else (least, middle)
        return self._describe(least, self._find_broken(bounds, least + 1) or "rows")

    def _find_bounds(self, goal_ms: float | None) -> dict[str, Callable[[int], bool]]:
        """Return by its limit whether a number of rows is possible."""
        bounds: dict[str, Callable[[int], bool]] = {
            "cache": lambda rows: rows * self.traffic.mean_length <= self.memory.cache_tokens,
            "rows": lambda rows: rows <= self.machinery.rows,
        }
        if self.is_adapted:
            bounds["adapters"] = lambda rows: self._distinct(rows) <= max(self.memory.device_adapters, 1)
        if goal_ms is not None:
            bounds["latency"] = lambda rows: self._token_ms(rows) <= goal_ms
        return bounds

    def _find_broken(self, bounds: dict[str, Callable[[int], bool]], rows: int) -> str | None:
        return next((limit for limit, allows in bounds.items() if not allows(rows)), None)

    # --- Time ---

    def _distinct(self, rows: int) -> float:
        return self.popularity.expect_distinct(rows * (1 - self.traffic.base_share)) if self.is_adapted else 0.0

    def read(self, rows: int) -> StepBytes:
        """Return the bytes that a step of some rows reads."""
        adapters = self._distinct(rows) * self.mix.mean_bytes(self.sizes)
        cache = rows * self.traffic.mean_length * self.sizes.token_bytes()
        return StepBytes(self.sizes.read_bytes, adapters, cache)

    def _step(self, rows: int) -> StepTime:
        gpu, is_float8 = self.machinery.gpu, self.machinery.is_float8
        return find_step_time(gpu, rows, self.read(rows), self.sizes.layers, is_float8)

    def _requests_per_s(self, rows: int) -> float:
        """Return the requests a second that keep so many rows busy: each takes its prompt's time from all rows."""
        traffic = self.traffic
        answer_s = traffic.answer_tokens * self._step(rows).total / 1e3
        return SERVED_SHARE * rows / (answer_s + rows * traffic.prompt_tokens / self._prompt_rate)

    def _token_ms(self, rows: int) -> float:
        return 1e3 * rows / (self._requests_per_s(rows) * self.traffic.answer_tokens)

    def _describe(self, rows: int, limit: str) -> ReplicaPlan:
        traffic, memory = self.traffic, self.memory
        device_share = self.popularity.share_of_first(memory.device_adapters) if self.is_adapted else 1.0
        host_share = self.popularity.share_of_first(memory.device_adapters + memory.host_adapters)
        requests_per_s = self._requests_per_s(rows)
        copied = (1 - traffic.base_share) * (1 - device_share) * self.mix.mean_bytes(self.sizes)
        if requests_per_s * copied > COPIED_BYTES_PER_S:
            requests_per_s, limit = COPIED_BYTES_PER_S / copied, "copies"
        written = self.machinery.api_workers * API_TOKENS_PER_S
        if requests_per_s * traffic.answer_tokens > written:
            requests_per_s, limit = written / traffic.answer_tokens, "api"
        return ReplicaPlan(
            rows=rows,
            limit=limit,
            distinct_adapters=self._distinct(rows),
            step=self._step(rows),
            floor_ms=find_floor_ms(self.machinery.gpu, self.read(rows)),
            token_ms=1e3 * rows / (requests_per_s * traffic.answer_tokens),
            prompt_tokens_per_s=self._prompt_rate,
            prompt_share=requests_per_s * traffic.prompt_tokens / self._prompt_rate,
            requests_per_s=requests_per_s,
            device_share=device_share,
            host_share=host_share if self.is_adapted else 1.0,
        )

    # --- Memory ---

    def _plan_memory(self) -> MemoryPlan:
        """Divide a GPU's memory as the server does (`worker/memory.py`), which measures what its steps need."""
        sizes, machinery = self.sizes, self.machinery
        usable = int(machinery.gpu.memory * machinery.gpu_memory_fraction)
        free = usable - sizes.weight_bytes
        if free <= 0:
            raise ConfigError(
                f"the model's weights take {_gb(sizes.weight_bytes)}, and {_gb(usable)} of the {machinery.gpu.name} "
                "may be used: it does not fit. Use a larger GPU or a smaller model; replicas of several GPUs are not "
                "planned for"
            )
        own = max(free // GPU_ADAPTER_SHARE, LEAST_GPU_ADAPTER_BYTES)
        adapters = own if machinery.adapter_bytes is None else machinery.adapter_bytes
        steps = self._count_step_bytes()
        cache = free - adapters - adapters // ADAPTER_TABLE_SHARE - steps
        block = EngineConfig.block_size * sizes.token_bytes(machinery.is_float8)
        most = machinery.rows * sizes.max_length // EngineConfig.block_size
        tokens = min(max(cache, 0) // block, most) * EngineConfig.block_size
        self._check_room(adapters, steps, tokens)
        mean, host = self.mix.mean_bytes(sizes), machinery.host_memory // HOST_ADAPTER_SHARE
        on_device, on_host = (min(int(room // mean), self.mix.count) if mean else 0 for room in (adapters, host))
        return MemoryPlan(
            total=int(machinery.gpu.memory),
            weights=sizes.weight_bytes,
            adapters=adapters,
            steps=steps,
            cache=max(cache, 0),
            device_adapters=on_device,
            host_adapters=on_host,
            cache_tokens=tokens,
        )

    def _count_step_bytes(self) -> int:
        hidden, widest = self.sizes.matrices[0].inputs, max(matrix.outputs for matrix in self.sizes.matrices)
        step = STEP_TOKENS * (STEP_HIDDEN * hidden + STEP_WIDEST * widest) * HALF_BYTES
        return step + self.machinery.rows * self.sizes.head // hidden * CHOICE_BYTES + GRAPH_BYTES

    def _check_room(self, adapters: int, steps: int, tokens: int) -> None:
        largest = self.mix.largest_bytes(self.sizes) if self.is_adapted else 0
        if largest > adapters:
            raise ConfigError(
                f"an adapter of the highest rank takes {_gb(largest)}, and adapters get {_gb(adapters)}: raise "
                "--adapter-bytes, or use a larger GPU"
            )
        needed = self.traffic.prompt_tokens + self.traffic.answer_tokens
        if tokens < needed:
            raise ConfigError(
                f"the {self.machinery.gpu.name} has room for {tokens} tokens of keys and values beside "
                f"{_gb(self.sizes.weight_bytes)} of weights, {_gb(adapters)} for adapters and {_gb(steps)} for steps, "
                f"and a request has {needed}: lower --adapter-bytes, or use a larger GPU"
            )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
