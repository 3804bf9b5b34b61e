"""`lorax plan`: its flags and its report."""

import argparse
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lorax_server.cli.flags import Parser, to_size, write_json
from lorax_server.cli.planning.capacity import AdapterMix, Planner, Traffic, format_gb
from lorax_server.cli.planning.model_sizes import ModelSizes, make_llama_sizes, read_sizes
from lorax_server.cli.planning.step_time import GPUS, SERVED_SHARE, Gpu, find_gpu
from lorax_server.config import QUANTIZE, EngineConfig
from lorax_server.errors import ConfigError
from lorax_server.kernels import MAX_RANK

EXAMPLES = """\
examples:
  lorax plan --model ./my-model --gpu H200 --adapters 1000 --rank 16 --requests-per-s 50
  lorax plan --model ./my-model/config.json --gpu L40S --ranks 8:700,16:200,64:100 --requests-per-s 5 --token-ms 50
  lorax plan --layers 32 --hidden-size 4096 --intermediate-size 14336 --heads 32 --kv-heads 8 --vocab-size 128256 \\
      --gpu-memory 80G --gpu-bandwidth 3350 --gpu-tflops 989 --adapters 100 --requests-per-s 10

The figures follow from sizes in bytes and from times measured on one kind of GPU; docs/capacity.md says how far to
trust them. The model is not run, and no GPU is needed.
"""
# A Llama's config fields, by flag.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
REQUIRED_SIZES = [*SIZES][:5]
LIMITS = {
    "rows": "the number of rows: more rows give more tokens a second, and more time between them (--max-rows)",
    "latency": "bandwidth and the goal for the time between tokens (--token-ms)",
    "cache": "memory for keys and values",
    "adapters": "memory for the adapters that are needed at once (--adapter-bytes)",
    "api": "the CPU time of the process that answers requests",
    "copies": "copies of adapters from host memory, as too few of them stay on the device (--adapter-bytes)",
}
PROMPT_NOTE = ", and busy with prompts for most of the time"
MAX_ADAPTERS = 10**6
LEAST = 1e-9  # of numbers that must be above 0
METAVARS = {int: "N", float: "X", to_size: "SIZE"}
# Flags with a number, by group: name, type, least and greatest value, default, and help.
NUMBERS: dict[str, list[tuple[str, Any, float, float, Any, str]]] = {
    "model": [
        (f"--{name.replace('_', '-')}", int, 1, 2**32, None, f"or {field} of a Llama") for name, field in SIZES.items()
    ],
    "machine of a replica": [
        ("--gpu-memory", to_size, 0, 2**60, None, "its memory, such as 80G"),
        ("--gpu-bandwidth", float, LEAST, 1e6, None, "GB/s of its memory, as published"),
        ("--gpu-tflops", float, LEAST, 1e6, None, "dense, in bfloat16, as published"),
        ("--host-memory", to_size, 0, 2**60, 2**36, "64G unless given"),
        ("--max-rows", int, 1, 2**16, None, "sequences at once; the server's default unless given"),
        ("--adapter-bytes", to_size, 0, 2**60, None, "memory for adapters on the GPU; the server's unless given"),
        ("--cuda-memory-fraction", float, LEAST, 1, EngineConfig.gpu_memory_fraction, "share of GPU memory to use"),
    ],
    "adapters": [
        ("--adapters", int, 0, MAX_ADAPTERS, None, "their number (default: 0)"),
        ("--rank", int, 1, MAX_RANK, None, "the rank of all (default: 16)"),
    ],
    "traffic": [
        ("--requests-per-s", float, LEAST, 1e9, 1.0, "requests a second, over all replicas"),
        ("--prompt-tokens", int, 1, 2**31, 512, "tokens of a prompt, on average"),
        ("--answer-tokens", int, 1, 2**31, 128, "tokens of an answer, on average"),
        ("--zipf", float, 0, 10, 1.0, "popularity: the k-th adapter gets traffic as 1 / k^X; 0: all the same"),
        ("--base-share", float, 0, 1, 0.0, "share of requests without an adapter"),
        ("--load", float, LEAST, 1, 0.8, "share of its greatest load that a replica should have"),
        ("--token-ms", float, LEAST, 1e6, None, "milliseconds between two tokens of an answer, at most"),
    ],
}


def run(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="lorax plan", usage="lorax plan --model PATH --gpu NAME [flags]", epilog=EXAMPLES)
    parser.description = "Compute how much a GPU holds, how fast it answers, and how many replicas some traffic needs."
    _add_flags(parser)
    args = parser.parse_args(argv)
    figures = make_planner(args).plan(args.token_ms, args.load)
    if args.json != "-":
        print(format_plan(figures, args.cuda_memory_fraction))
    if args.json:
        write_json(figures, args.json)
    return 0


def make_planner(args: Namespace) -> Planner:
    gpu, sizes = _read_gpu(args), _read_model(args)
    traffic = Traffic(args.requests_per_s, args.prompt_tokens, args.answer_tokens, args.zipf, args.base_share)
    length = traffic.prompt_tokens + traffic.answer_tokens
    if length > sizes.max_length:
        raise ConfigError(f"a request of {length} tokens is longer than the model's {sizes.max_length}")
    settings = (args.host_memory, args.cuda_memory_fraction, args.adapter_bytes, args.max_rows, bool(args.quantize))
    return Planner(sizes, _read_mix(args, sizes), traffic, gpu, *settings)


def _add_flags(parser: Parser) -> None:
    model, machine, adapters, _ = groups = [parser.add_argument_group(title) for title in NUMBERS]
    model.add_argument("--model", type=Path, metavar="PATH", help="its folder, or its config.json")
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    for group, flags in zip(groups, NUMBERS.values(), strict=True):
        for name, kind, least, most, default, text in flags:
            shown = text if default is None or kind is to_size else f"{text} (default: {default})"
            number = _number(kind, least, most)
            group.add_argument(name, type=number, metavar=METAVARS[kind], default=default, help=shown)
    model.add_argument("--quantize", choices=QUANTIZE, help="fp8-kv stores keys and values as float8")
    adapters.add_argument("--ranks", metavar="RANK:N,...", help="or ranks with their numbers, such as 8:700,64:100")
    adapters.add_argument("--modules", metavar="NAME,...", help="modules that they adapt (default: all linears)")
    adapters.add_argument("--dora", action="store_true", help="they use DoRA")
    parser.add_json()


def _number(convert: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    """Return an argparse type for numbers in a range."""

    def parse(text: str) -> float:
        try:
            value = convert(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {least} to {most}")
        return value

    return parse


def _read_model(args: Namespace) -> ModelSizes:
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.model is not None:
        if given:
            raise ConfigError(f"--model says what the sizes are: leave out {_list_flags(given)}")
        return read_sizes(args.model.expanduser())
    missing = [name for name in REQUIRED_SIZES if name not in given]
    if missing:
        hint = f"; of its sizes, {_list_flags(missing)} are missing" if given else ", or a Llama's sizes by flags"
        raise ConfigError(f"give --model, a model's folder or its config.json{hint}")
    return make_llama_sizes({SIZES[name]: value for name, value in given.items()})


def _list_flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _read_gpu(args: Namespace) -> Gpu:
    given = (args.gpu_memory, args.gpu_bandwidth, args.gpu_tflops)
    if args.gpu is None and None in given:
        raise ConfigError("give --gpu, a GPU's name, or all of --gpu-memory, --gpu-bandwidth and --gpu-tflops")
    known = find_gpu(args.gpu) if args.gpu else Gpu("GPU", 0, 0, 0)
    units = (1, 1e9, 1e12)
    figures = [old if new is None else new * unit for old, new, unit in zip(known[1:], given, units, strict=True)]
    return Gpu(known.name, *figures)


def _read_mix(args: Namespace, sizes: ModelSizes) -> AdapterMix:
    if args.ranks is not None and (args.adapters is not None or args.rank is not None):
        raise ConfigError("give --ranks, or --adapters and --rank, not both")
    ranks = [(args.rank or 16, args.adapters or 0)] if args.ranks is None else _read_ranks(args.ranks)
    names = list(dict.fromkeys(matrix.name for matrix in sizes.matrices))
    modules = names if args.modules is None else [name.strip() for name in args.modules.split(",")]
    unknown = [name[:40] for name in modules if name not in names]
    if unknown:
        raise ConfigError(f"--modules: there is no {unknown[0]!r} in this model; there are {', '.join(names)}")
    return AdapterMix.of_ranks(sizes, ranks, modules, args.dora)


def _read_ranks(text: str) -> list[tuple[int, int]]:
    if re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text, re.ASCII) is None:
        raise ConfigError(f"--ranks {text[:100]!r} is not like 8:700,64:100")
    pairs = [pair.split(":") for pair in text.split(",")]
    ranks = [(int(rank), int(count)) for rank, count in pairs]
    if not all(1 <= rank <= MAX_RANK for rank, _ in ranks) or sum(count for _, count in ranks) > MAX_ADAPTERS:
        raise ConfigError(f"--ranks {text[:100]!r} has a rank above {MAX_RANK}, or more than {MAX_ADAPTERS} adapters")
    return ranks


# --- Report -----------------------------------------------------------------------------------------------------------


REPORT = """\
memory        {gpu}, {total}, of which {usable} are used
              weights {weights}, adapters {adapters}, steps and graphs {steps}, keys and values {cache}
              room for {cache_tokens:,} tokens of keys and values
adapters      {adapter_lines}
a replica     {rows} sequences at once, of {distinct_adapters:.0f} adapters on average
              a step takes {step_ms:.2f} ms, {floor_ratio:.2f} times its floor ({step_parts})
              prompts: {prompt_tokens_per_s:,.0f} tokens/s alone, {prompt_share:.0%} of the time
              {tokens_per_s:,.0f} tokens/s, {requests_per_s:.2f} requests/s, {token_ms:.1f} ms between tokens \
(served: {served_share:g} of what steps allow)
              limited by {limit_reason}
replicas      {replicas:,} for {wanted:g} requests/s at {load:.0%} of their greatest load at most ({used:.0%})"""


def format_plan(figures: dict[str, Any], gpu_memory_fraction: float) -> str:
    """Describe what fits, how fast a replica is and what limits it, and how many replicas are needed."""
    memory, replica, wanted = figures["memory"], figures["replica"], figures["traffic"]["requests_per_s"]
    return REPORT.format(
        **replica,
        **{name: format_gb(memory[name]) for name in ("total", "weights", "adapters", "steps", "cache")},
        gpu=figures["gpu"]["name"],
        usable=format_gb(memory["total"] * gpu_memory_fraction),
        cache_tokens=memory["cache_tokens"],
        adapter_lines=f"\n{'':14}".join(_describe_adapters(figures["adapters"], memory)),
        floor_ratio=replica["step_ms"] / replica["floor_ms"],
        step_parts=", ".join(f"{name} {ms:.2f}" for name, ms in replica["step_parts_ms"].items() if ms),
        served_share=SERVED_SHARE,
        limit_reason=LIMITS[replica["limit"]] + PROMPT_NOTE * replica["is_busy_with_prompts"],
        replicas=figures["replicas"],
        load=figures["load"],
        wanted=wanted,
        used=wanted / (figures["replicas"] * replica["requests_per_s"]),
    )


def _describe_adapters(adapters: dict[str, Any], memory: dict[str, Any]) -> list[str]:
    if not adapters["count"]:
        return ["none; --adapter-bytes 0 gives their memory to keys and values"]
    total, mean = adapters["bytes"], adapters["mean_bytes"]
    lines = [
        f"{adapters['count']:,} of {mean / 1e6:.1f} MB on average, {format_gb(total)} in all",
        f"on the GPU {memory['device_adapters']:,}, in host memory {memory['host_adapters']:,}",
        f"{adapters['device_share']:.1%} of requests find theirs on the GPU, {adapters['host_share']:.1%} there or in "
        "host memory",
    ]
    if total < memory["adapters"]:
        lines.append(f"all fit on the GPU: --adapter-bytes {total} leaves more for keys and values")
    return lines
