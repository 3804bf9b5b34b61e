"""Flags and report for `lorax plan`."""

import argparse
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lorax_server.cli.flags import Parser, parse_size, write_json
from lorax_server.cli.planning.capacity import AdapterMix, Planner, Traffic, format_gb
from lorax_server.cli.planning.model_sizes import ModelSizes, make_llama_sizes, read_sizes
from lorax_server.cli.planning.step_time import GPUS, HTTP_THROUGHPUT_SHARE, Gpu, find_gpu
from lorax_server.config import EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import MAX_RANK

EXAMPLES = """\
examples:
  lorax plan --model ./my-model --gpu H200 --adapters 1000 --rank 16 --requests-per-s 50
  lorax plan --model ./my-model/config.json --gpu L40S --ranks 8:700,16:200,64:100 --requests-per-s 5 \\
      --inter-token-latency-ms 50
  lorax plan --layers 32 --hidden-size 4096 --intermediate-size 14336 --heads 32 --kv-heads 8 --vocab-size 128256 \\
      --gpu-memory 80G --gpu-bandwidth 3350 --gpu-tflops 989 --adapters 100 --requests-per-s 10

The figures are extrapolated from tensor sizes and from times measured on an H200; docs/capacity.md describes their
accuracy. The model is not run, and no GPU is needed.
"""
# Llama config fields by flag.
MODEL_SIZE_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
REQUIRED_SIZE_FLAGS = [*MODEL_SIZE_FIELDS][:5]
LIMIT_REASONS = {
    "batch_size": "the batch size limit; larger batches raise throughput and latency (--max-num-seqs)",
    "latency": "memory bandwidth and the highest allowed time between tokens (--inter-token-latency-ms)",
    "cache": "KV cache memory",
    "adapters": "memory for the adapters in a batch (--adapter-bytes)",
    "api": "CPU time of the API process",
    "copies": "adapter copies from host memory, because too few adapters fit on the device (--adapter-bytes)",
}
PREFILL_BOUND_NOTE = "; prefill takes most of the time"
MAX_ADAPTERS = 10**6
MIN_POSITIVE = 1e-9  # minimum for numbers that must be above 0
METAVAR_BY_TYPE = {int: "N", float: "X", parse_size: "SIZE"}
# Numeric flags by group: name, type, minimum, maximum, default and help text.
NUMBER_FLAGS: dict[str, list[tuple[str, Any, float, float, Any, str]]] = {
    "model": [
        (f"--{name.replace('_', '-')}", int, 1, 2**32, None, f"Llama {field}, instead of --model")
        for name, field in MODEL_SIZE_FIELDS.items()
    ],
    "replica hardware": [
        ("--gpu-memory", parse_size, 0, 2**60, None, "GPU memory, such as 80G"),
        ("--gpu-bandwidth", float, MIN_POSITIVE, 1e6, None, "published memory bandwidth in GB/s"),
        ("--gpu-tflops", float, MIN_POSITIVE, 1e6, None, "published dense bfloat16 TFLOPS"),
        ("--host-memory", parse_size, 0, 2**60, 2**36, "host memory (default: 64G)"),
        ("--max-num-seqs", int, 1, 2**16, None, "maximum batch size (default: the server's)"),
        ("--adapter-bytes", parse_size, 0, 2**60, None, "GPU memory for adapters (default: the server's)"),
        (
            "--cuda-memory-fraction",
            float,
            MIN_POSITIVE,
            1,
            EngineConfig.gpu_memory_fraction,
            "share of GPU memory to use",
        ),
    ],
    "adapters": [
        ("--adapters", int, 0, MAX_ADAPTERS, None, "number of adapters (default: 0)"),
        ("--rank", int, 1, MAX_RANK, None, "rank of all adapters (default: 16)"),
    ],
    "traffic": [
        ("--requests-per-s", float, MIN_POSITIVE, 1e9, 1.0, "requests per second over all replicas"),
        ("--prompt-tokens", int, 1, 2**31, 512, "mean prompt length"),
        ("--completion-tokens", int, 1, 2**31, 128, "mean completion length"),
        ("--zipf", float, 0, 10, 1.0, "Zipf exponent for adapter popularity; 0 is uniform"),
        ("--base-share", float, 0, 1, 0.0, "share of requests without an adapter"),
        ("--max-utilization", float, MIN_POSITIVE, 1, 0.8, "highest replica utilization"),
        ("--inter-token-latency-ms", float, MIN_POSITIVE, 1e6, None, "highest allowed time between tokens"),
    ],
}

# Earlier names by flag. They are accepted, but not shown in the help text.
ALIASES = {
    "--max-num-seqs": "--max-rows",
    "--completion-tokens": "--answer-tokens",
    "--max-utilization": "--load",
    "--inter-token-latency-ms": "--token-ms",
}


def run(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="lorax plan", usage="lorax plan --model PATH --gpu NAME [flags]", epilog=EXAMPLES)
    parser.description = "Estimate memory use, latency and the number of replicas for some traffic."
    _add_flags(parser)
    args = parser.parse_args(argv)
    figures = make_planner(args).plan(args.inter_token_latency_ms, args.max_utilization)
    if args.json != "-":
        print(format_plan(figures, args.cuda_memory_fraction))
    if args.json:
        write_json(figures, args.json)
    return 0


def make_planner(args: Namespace) -> Planner:
    gpu, sizes = _read_gpu(args), _read_model(args)
    traffic = Traffic(args.requests_per_s, args.prompt_tokens, args.completion_tokens, args.zipf, args.base_share)
    length = traffic.prompt_tokens + traffic.completion_tokens
    if length > sizes.max_length:
        raise ConfigError(f"a request has {length} tokens, but the model supports at most {sizes.max_length}")
    settings = args.host_memory, args.cuda_memory_fraction, args.adapter_bytes, args.max_num_seqs, bool(args.quantize)
    return Planner(sizes, _read_mix(args, sizes), traffic, gpu, *settings)


def _add_flags(parser: Parser) -> None:
    model, machine, adapters, _ = groups = [parser.add_argument_group(title) for title in NUMBER_FLAGS]
    model.add_argument("--model", type=Path, metavar="PATH", help="model folder, or config.json")
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    for group, flags in zip(groups, NUMBER_FLAGS.values(), strict=True):
        for name, kind, minimum, maximum, default, text in flags:
            help_text = text if default is None or kind is parse_size else f"{text} (default: {default})"
            number = _make_number_parser(kind, minimum, maximum)
            group.add_argument(name, type=number, metavar=METAVAR_BY_TYPE[kind], default=default, help=help_text)
            if name in ALIASES:
                key = name.lstrip("-").replace("-", "_")
                group.add_argument(
                    ALIASES[name], dest=key, type=number, default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )
    model.add_argument("--quantize", choices=["fp8-kv"], help="fp8-kv stores keys and values as float8")
    adapters.add_argument("--ranks", metavar="RANK:N,...", help="ranks with adapter counts, such as 8:700,64:100")
    adapters.add_argument("--modules", metavar="NAME,...", help="target modules (default: all linear layers)")
    adapters.add_argument("--dora", action="store_true", help="all adapters use DoRA")
    parser.add_json_flag()


def _make_number_parser(convert: Callable[[str], float], minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argparse type for numbers in a range."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {minimum} to {maximum}")
        return value

    return parse


def _read_model(args: Namespace) -> ModelSizes:
    size_fields = {name: getattr(args, name) for name in MODEL_SIZE_FIELDS if getattr(args, name) is not None}
    if args.model is not None:
        if size_fields:
            raise ConfigError(f"--model already defines the model sizes; omit {_format_flags(size_fields)}")
        return read_sizes(args.model.expanduser())
    missing = [name for name in REQUIRED_SIZE_FLAGS if name not in size_fields]
    if missing:
        hint = f"or add {_format_flags(missing)}" if size_fields else "or all Llama model sizes"
        raise ConfigError(f"set --model to a model folder or config.json, {hint}")
    return make_llama_sizes({MODEL_SIZE_FIELDS[name]: value for name, value in size_fields.items()})


def _format_flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _read_gpu(args: Namespace) -> Gpu:
    gpu_figures = (args.gpu_memory, args.gpu_bandwidth, args.gpu_tflops)
    if args.gpu is None and None in gpu_figures:
        raise ConfigError("set --gpu to a GPU name, or set all of --gpu-memory, --gpu-bandwidth and --gpu-tflops")
    known_gpu = find_gpu(args.gpu) if args.gpu else Gpu("GPU", 0, 0, 0)
    units = (1, 1e9, 1e12)
    figures = [
        old if new is None else new * unit for old, new, unit in zip(known_gpu[1:], gpu_figures, units, strict=True)
    ]
    return Gpu(known_gpu.name, *figures)


def _read_mix(args: Namespace, sizes: ModelSizes) -> AdapterMix:
    if args.ranks is not None and (args.adapters is not None or args.rank is not None):
        raise ConfigError("set --ranks, or --adapters and --rank, but not both")
    ranks = [(args.rank or 16, args.adapters or 0)] if args.ranks is None else _read_ranks(args.ranks)
    names = list(dict.fromkeys(matrix.name for matrix in sizes.matrices))
    modules = names if args.modules is None else [name.strip() for name in args.modules.split(",")]
    unknown = [name[:40] for name in modules if name not in names]
    if unknown:
        raise ConfigError(f"--modules: the model has no module {unknown[0]!r}; its modules are {', '.join(names)}")
    return AdapterMix.from_ranks(sizes, ranks, modules, args.dora)


def _read_ranks(text: str) -> list[tuple[int, int]]:
    if re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text, re.ASCII) is None:
        raise ConfigError(f"--ranks {text[:100]!r} must have the form 8:700,64:100")
    pairs = [pair.split(":") for pair in text.split(",")]
    ranks = [(int(rank), int(count)) for rank, count in pairs]
    if not all(1 <= rank <= MAX_RANK for rank, _ in ranks) or sum(count for _, count in ranks) > MAX_ADAPTERS:
        raise ConfigError(f"--ranks {text[:100]!r} has a rank above {MAX_RANK}, or more than {MAX_ADAPTERS} adapters")
    return ranks


# --- Report -----------------------------------------------------------------------------------------------------------


REPORT_TEMPLATE = """\
memory        {gpu}: {usable} of {total} used
              weights {weights}, adapters {adapters}, steps and graphs {steps}, KV cache {cache}
              KV cache for {cache_tokens:,} tokens
adapters      {adapter_lines}
a replica     batches of {batch_size} sequences with {distinct_adapters:.0f} adapters on average
              decode step: {step_ms:.2f} ms, {floor_ratio:.2f} times the memory bandwidth limit ({step_parts})
              prefill: {prompt_tokens_per_s:,.0f} tokens/s, {prompt_share:.0%} of the time
              {tokens_per_s:,.0f} tokens/s, {requests_per_s:.2f} requests/s, \
{inter_token_latency_ms:.1f} ms between tokens (over HTTP: {served_share:g} of the engine limit)
              limited by {limit_reason}
replicas      {replicas:,} for {wanted:g} requests/s, at {used:.0%} utilization (at most {max_utilization:.0%})"""


def format_plan(figures: dict[str, Any], gpu_memory_fraction: float) -> str:
    """Return the report text: memory use, performance and bottleneck of a replica, and the number of replicas."""
    memory, replica, requests_per_s = figures["memory"], figures["replica"], figures["traffic"]["requests_per_s"]
    return REPORT_TEMPLATE.format(
        **replica,
        **{name: format_gb(memory[name]) for name in ("total", "weights", "adapters", "steps", "cache")},
        gpu=figures["gpu"]["name"],
        usable=format_gb(memory["total"] * gpu_memory_fraction),
        cache_tokens=memory["cache_tokens"],
        adapter_lines=f"\n{'':14}".join(_describe_adapters(figures["adapters"], memory)),
        floor_ratio=replica["step_ms"] / replica["floor_ms"],
        step_parts=", ".join(f"{name} {ms:.2f}" for name, ms in replica["step_parts_ms"].items() if ms),
        served_share=HTTP_THROUGHPUT_SHARE,
        limit_reason=LIMIT_REASONS[replica["limit"]] + PREFILL_BOUND_NOTE * replica["is_busy_with_prompts"],
        replicas=figures["replicas"],
        max_utilization=figures["max_utilization"],
        wanted=requests_per_s,
        used=requests_per_s / (figures["replicas"] * replica["requests_per_s"]),
    )


def _describe_adapters(adapters: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    if not adapters["count"]:
        return ["none; --adapter-bytes 0 leaves more memory for the KV cache"]
    total, mean = adapters["bytes"], adapters["mean_bytes"]
    lines = [
        f"{adapters['count']:,} of {mean / 1e6:.1f} MB on average, {format_gb(total)} in total",
        f"on the GPU {memory['device_adapters']:,}, in host memory {memory['host_adapters']:,}",
        f"{adapters['device_share']:.1%} of requests find their adapter on the GPU, {adapters['host_share']:.1%} on "
        "the GPU or in host memory",
    ]
    if total < memory["adapters"]:
        lines.append(f"all adapters fit on the GPU; --adapter-bytes {total} leaves more memory for the KV cache")
    return lines
