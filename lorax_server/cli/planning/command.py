"""`lorax plan`: its flags, their checks, and the report."""

import argparse
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorax_server.cli.flags import KINDS, Parser, write_json
from lorax_server.cli.planning.capacity import Machinery, Planner
from lorax_server.cli.planning.demand import AdapterMix, Traffic
from lorax_server.cli.planning.families import read_sizes, sizes_of
from lorax_server.cli.planning.gpus import GPUS, Gpu, find_gpu
from lorax_server.cli.planning.model_sizes import ModelSizes
from lorax_server.cli.planning.report import format_plan, list_figures
from lorax_server.config import QUANTIZE, EngineConfig
from lorax_server.errors import ConfigError

MAX_RANK = 512  # that the kernels of a GPU serve
MAX_ADAPTERS = 10**9
MAX_ROWS = 2**16
MAX_WORKERS = 64
MAX_TOKENS = 2**31
MAX_REQUESTS = 1e9
EXAMPLES = """\
examples:
  lorax plan --model ./my-model --gpu H200 --adapters 1000 --rank 16 --requests-per-s 50
  lorax plan --model ./my-model/config.json --gpu L40S --ranks 8:700,16:200,64:100 --requests-per-s 5 --token-ms 50
  lorax plan --layers 32 --hidden-size 4096 --intermediate-size 14336 --heads 32 --kv-heads 8 --vocab-size 128256 \\
      --gpu-memory 80G --gpu-bandwidth 3350 --gpu-tflops 989 --adapters 100 --requests-per-s 10

The figures follow from sizes in bytes and from times that were measured on one kind of GPU; docs/capacity.md says how
far to trust them. Nothing is run, and no GPU is needed.
"""
# Flags of a Llama's sizes, by the fields of a config.
SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
OPTIONAL_SIZES = ("kv_heads", "head_dim")


def run(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="lorax plan", usage="lorax plan --model PATH --gpu NAME [flags]", epilog=EXAMPLES)
    parser.description = "Compute how much a GPU holds, how fast it answers, and how many replicas some traffic needs."
    _add_flags(parser)
    args = parser.parse_args(argv)
    planner = make_planner(args)
    replica = planner.plan_replica(args.token_ms)
    figures = list_figures(planner, replica, args.load)
    if args.json != "-":
        print(format_plan(planner, replica, args.load))
    if args.json:
        write_json(figures, args.json)
    return 0


def make_planner(args: Namespace) -> Planner:
    """Put together what the flags describe. Whatever cannot be is refused."""
    sizes = _read_model(args)
    traffic = Traffic(args.requests_per_s, args.prompt_tokens, args.answer_tokens, args.zipf, args.base_share)
    length = traffic.prompt_tokens + traffic.answer_tokens
    if length > sizes.max_length:
        raise ConfigError(f"a request of {length} tokens is longer than the model's {sizes.max_length}")
    machinery = Machinery(
        _read_gpu(args),
        args.host_memory,
        args.cuda_memory_fraction,
        args.adapter_bytes,
        args.max_rows,
        args.quantize is not None,
        args.api_workers,
    )
    return Planner(sizes, _read_mix(args, sizes), traffic, machinery)


# --- Flags ------------------------------------------------------------------------------------------------------------


def _add_flags(parser: Parser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="PATH", help="its folder, or its config.json")
    for name, field in SIZES.items():
        text = f"or its sizes, as a Llama's: {field}" if name == "layers" else field
        model.add_argument(_flag(name), type=_whole(1, 2**32), metavar="N", help=text)
    model.add_argument("--quantize", choices=QUANTIZE, help="fp8-kv stores keys and values as float8")
    gpu = parser.add_argument_group("machine of a replica")
    gpu.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}")
    gpu.add_argument("--gpu-memory", type=_size, metavar="SIZE", help="its memory, such as 80G")
    gpu.add_argument("--gpu-bandwidth", type=_number(0, 1e6), metavar="GB/S", help="of its memory, as published")
    gpu.add_argument("--gpu-tflops", type=_number(0, 1e6), metavar="X", help="dense, in bfloat16, as published")
    gpu.add_argument("--host-memory", type=_size, default=64 * 2**30, metavar="SIZE", help="(default: 64G)")
    for name, kind, metavar, text in (
        ("--max-rows", _whole(1, MAX_ROWS), "N", "sequences at once (default: the server's)"),
        ("--adapter-bytes", _size, "SIZE", "memory for adapters on the GPU (default: the server's)"),
    ):
        gpu.add_argument(name, type=kind, metavar=metavar, help=text)
    workers = "processes that answer requests (default: 1)"
    gpu.add_argument("--api-workers", type=_whole(1, MAX_WORKERS), default=1, metavar="N", help=workers)
    fraction = EngineConfig.gpu_memory_fraction
    gpu.add_argument("--cuda-memory-fraction", type=_number(0, 1), default=fraction, metavar="X", help="(default: 0.9)")
    _add_demand(parser)
    parser.add_json()


def _add_demand(parser: Parser) -> None:
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument("--adapters", type=_whole(0, MAX_ADAPTERS), metavar="N", help="their number (default: 0)")
    adapters.add_argument("--rank", type=_whole(1, MAX_RANK), metavar="N", help="the rank of all (default: 16)")
    adapters.add_argument("--ranks", metavar="RANK:N,...", help="or ranks with their numbers, such as 8:700,64:100")
    adapters.add_argument("--modules", metavar="NAME,...", help="modules that they adapt (default: all linears)")
    adapters.add_argument("--dora", action="store_true", help="they use DoRA")
    traffic = parser.add_argument_group("traffic")
    for name, kind, default, text in (
        ("--requests-per-s", _number(0, MAX_REQUESTS), 1.0, "requests a second, over all replicas"),
        ("--prompt-tokens", _whole(1, MAX_TOKENS), 512, "tokens of a prompt, on average"),
        ("--answer-tokens", _whole(1, MAX_TOKENS), 128, "tokens of an answer, on average"),
        ("--zipf", _number(-1, 10, "0"), 1.0, "popularity: the k-th adapter gets traffic as 1 / k^X; 0: all the same"),
        ("--base-share", _number(-1, 1, "0"), 0.0, "share of requests without an adapter"),
        ("--load", _number(0, 1), 0.8, "share of its greatest load that a replica should have"),
    ):
        shown = f"{text} (default: {default})"
        traffic.add_argument(
            name, type=kind, default=default, metavar="N" if isinstance(default, int) else "X", help=shown
        )
    goal = "milliseconds between two tokens of an answer, at most (default: no goal)"
    traffic.add_argument("--token-ms", type=_number(0, 1e6), metavar="MS", help=goal)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            number = int(text) if len(text) < 40 else None
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return number

    return convert


def _number(above: float, most: float, least: str = "") -> Callable[[str], float]:
    """Convert numbers above one and up to another. `least` says the smallest in words, where -1 stands below it."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not above < number <= most or (least and number < float(least)):
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a number " + (f"from {least}" if least else f"above {above:g}") + f" to {most:g}"
            )
        return number

    return convert


def _size(text: str) -> int:
    try:
        size: int = KINDS["size"].convert(text[:40])
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {KINDS['size'].expected}") from None
    if not size < 2**60:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than any machine has")
    return size


# --- What the flags describe ------------------------------------------------------------------------------------------


def _read_model(args: Namespace) -> ModelSizes:
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.model is not None:
        if given:
            raise ConfigError(f"--model says what the sizes are: leave out {', '.join(map(_flag, given))}")
        return read_sizes(args.model.expanduser())
    missing = [_flag(name) for name in SIZES if name not in given and name not in OPTIONAL_SIZES]
    if missing:
        wanted = f"; of its sizes, {', '.join(missing)} are missing" if given else ", or a Llama's sizes by flags"
        raise ConfigError(f"give --model, a model's folder or its config.json{wanted}")
    config: dict[str, Any] = {SIZES[name]: value for name, value in given.items()}
    return sizes_of({"model_type": "llama", "max_position_embeddings": MAX_TOKENS, **config})


def _read_gpu(args: Namespace) -> Gpu:
    given = (args.gpu_memory, args.gpu_bandwidth, args.gpu_tflops)
    if args.gpu is None and None in given:
        raise ConfigError("give --gpu, a GPU's name, or all of --gpu-memory, --gpu-bandwidth and --gpu-tflops")
    known = find_gpu(args.gpu) if args.gpu else Gpu("GPU", 0, 0, 0)
    memory, bandwidth, tflops = given
    return Gpu(
        known.name,
        known.memory if memory is None else memory,
        known.bandwidth if bandwidth is None else bandwidth * 1e9,
        known.flop if tflops is None else tflops * 1e12,
    )


def _read_mix(args: Namespace, sizes: ModelSizes) -> AdapterMix:
    if args.ranks is not None and (args.adapters is not None or args.rank is not None):
        raise ConfigError("give --ranks, or --adapters and --rank, not both")
    ranks = ((args.rank or 16, args.adapters or 0),) if args.ranks is None else _read_ranks(args.ranks)
    names = tuple(dict.fromkeys(matrix.name for matrix in sizes.matrices))
    modules = names if args.modules is None else tuple(name.strip() for name in args.modules.split(","))
    unknown = [name[:40] for name in modules if name not in names]
    if unknown:
        raise ConfigError(f"--modules: there is no {unknown[0]!r} in this model; there are {', '.join(names)}")
    return AdapterMix(ranks, modules, args.dora)


def _read_ranks(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [pair.partition(":") for pair in text.split(",")]
    try:
        ranks = tuple((_whole(1, MAX_RANK)(rank), _whole(1, MAX_ADAPTERS)(count)) for rank, _, count in pairs)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--ranks {text[:100]!r} is not like 8:700,64:100: {error}") from None
    if sum(count for _, count in ranks) > MAX_ADAPTERS:
        raise ConfigError(f"--ranks {text[:100]!r} has more than {MAX_ADAPTERS} adapters")
    return ranks
