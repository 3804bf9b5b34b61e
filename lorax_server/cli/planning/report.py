"""The figures of a plan: in words, and as JSON."""

from dataclasses import asdict
from typing import Any

from lorax_server.cli.planning.capacity import LIMITS, Planner, ReplicaPlan
from lorax_server.cli.planning.measured import SERVED_SHARE


def list_figures(planner: Planner, replica: ReplicaPlan, load: float) -> dict[str, Any]:
    """List all figures, in bytes, milliseconds and seconds as their names say."""
    traffic, mix, sizes = planner.traffic, planner.mix, planner.sizes
    return {
        "gpu": planner.machinery.gpu._asdict(),
        "traffic": asdict(traffic),
        "adapters": {
            "count": mix.count,
            "bytes": mix.all_bytes(sizes),
            "mean_bytes": mix.mean_bytes(sizes),
            "device_share": replica.device_share,
            "host_share": replica.host_share,
        },
        "memory": asdict(planner.memory),
        "replica": {
            "rows": replica.rows,
            "limit": replica.limit,
            "is_busy_with_prompts": replica.is_busy_with_prompts,
            "distinct_adapters": replica.distinct_adapters,
            "step_ms": replica.step.total,
            "step_parts_ms": replica.step._asdict(),
            "floor_ms": replica.floor_ms,
            "token_ms": replica.token_ms,
            "prompt_tokens_per_s": replica.prompt_tokens_per_s,
            "prompt_share": replica.prompt_share,
            "requests_per_s": replica.requests_per_s,
            "tokens_per_s": replica.requests_per_s * traffic.answer_tokens,
        },
        "load": load,
        "replicas": planner.count_replicas(replica, load),
    }


def format_plan(planner: Planner, replica: ReplicaPlan, load: float) -> str:
    """Say in a few lines what fits, how fast it is, what limits it, and how many replicas are needed."""
    return "\n".join(
        [
            *_describe_memory(planner),
            *_describe_adapters(planner, replica),
            *_describe_replica(planner, replica),
            *_describe_need(planner, replica, load),
        ]
    )


def _describe_memory(planner: Planner) -> list[str]:
    memory, gpu = planner.memory, planner.machinery.gpu
    usable = memory.total * planner.machinery.gpu_memory_fraction
    return [
        f"{'memory':14}{gpu.name}, {_gb(memory.total)}, of which {_gb(usable)} are used",
        f"{'':14}weights {_gb(memory.weights)}, adapters {_gb(memory.adapters)}, steps and graphs {_gb(memory.steps)}, "
        f"keys and values {_gb(memory.cache)}",
        f"{'':14}room for {memory.cache_tokens:,} tokens of keys and values",
    ]


def _describe_adapters(planner: Planner, replica: ReplicaPlan) -> list[str]:
    memory, mix = planner.memory, planner.mix
    if not mix.count:
        return [f"{'adapters':14}none; --adapter-bytes 0 gives their memory to keys and values"]
    all_bytes, mean = mix.all_bytes(planner.sizes), mix.mean_bytes(planner.sizes)
    lines = [
        f"{'adapters':14}{mix.count:,} of {mean / 1e6:.1f} MB on average, {_gb(all_bytes)} in all",
        f"{'':14}on the GPU {memory.device_adapters:,}, in host memory {memory.host_adapters:,}",
        f"{'':14}{replica.device_share:.1%} of requests find theirs on the GPU, {replica.host_share:.1%} there or in "
        "host memory",
    ]
    if all_bytes < memory.adapters:
        lines.append(f"{'':14}all fit on the GPU: --adapter-bytes {all_bytes} leaves more for keys and values")
    return lines


def _describe_replica(planner: Planner, replica: ReplicaPlan) -> list[str]:
    step = replica.step
    tokens_per_s = replica.requests_per_s * planner.traffic.answer_tokens
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in step._asdict().items() if ms)
    return [
        f"{'a replica':14}{replica.rows} sequences at once, of {replica.distinct_adapters:.0f} adapters on average",
        f"{'':14}a step takes {step.total:.2f} ms, {step.total / replica.floor_ms:.2f} times its floor ({parts})",
        f"{'':14}prompts: {replica.prompt_tokens_per_s:,.0f} tokens/s alone, {replica.prompt_share:.0%} of the time",
        f"{'':14}{tokens_per_s:,.0f} tokens/s, {replica.requests_per_s:.2f} requests/s, {replica.token_ms:.1f} ms "
        f"between tokens (served: {SERVED_SHARE:g} of what steps allow)",
        f"{'':14}limited by {LIMITS[replica.limit]}"
        + (", and busy with prompts for most of the time" if replica.is_busy_with_prompts else ""),
    ]


def _describe_need(planner: Planner, replica: ReplicaPlan, load: float) -> list[str]:
    count, wanted = planner.count_replicas(replica, load), planner.traffic.requests_per_s
    used = wanted / (count * replica.requests_per_s)
    return [
        f"{'replicas':14}{count:,} for {wanted:g} requests/s at {load:.0%} of their greatest load at most ({used:.0%})"
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
