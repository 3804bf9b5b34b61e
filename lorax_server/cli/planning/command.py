"""Flags and report for `lorax plan`."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lorax_server.cli.flags import VALUE_KINDS, Parser, make_flags, name_flags, write_json
from lorax_server.cli.planning.capacity import AdapterMix, Planner, ReplicaSettings, Traffic, format_gb
from lorax_server.cli.planning.model_sizes import ModelSizes, make_llama_sizes, read_sizes
from lorax_server.cli.planning.step_time import HTTP_THROUGHPUT_SHARE, Gpu, find_gpu
from lorax_server.config import Settings, setting
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
LIMIT_REASONS = {
    "batch_size": "the batch size limit; larger batches raise throughput and latency (--max-num-seqs)",
    "latency": "memory bandwidth and the highest allowed time between tokens (--inter-token-latency-ms)",
    "cache": "KV cache memory",
    "adapters": "memory for the adapters in a batch (--adapter-bytes)",
    "api": "CPU time of the API process",
    "copies": "adapter copies from host memory, because too few adapters fit on the device (--adapter-bytes)",
}
T = TypeVar("T", bound=Settings)
PREFILL_BOUND_NOTE = "; prefill takes most of the time"
MAX_ADAPTERS = 10**6
DEFAULT_RANK = 16


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The model: a path, or the config fields of a Llama model."""

    model: str | None = setting(None, "model folder, or config.json")
    num_hidden_layers: int | None = setting(None, "layers of a Llama model, instead of --model", flag="--layers")
    hidden_size: int | None = setting(None, "hidden size of the Llama model")
    intermediate_size: int | None = setting(None, "intermediate size of the Llama model")
    num_attention_heads: int | None = setting(None, "attention heads per layer", flag="--heads")
    vocab_size: int | None = setting(None, "vocabulary size of the Llama model")
    num_key_value_heads: int | None = setting(None, "key-value heads per layer", none="--heads", flag="--kv-heads")
    head_dim: int | None = setting(None, "dimension of each head", none="hidden size divided by heads")


REQUIRED_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class AdapterSettings(Settings):
    """The number and the ranks of the adapters."""

    adapters: int | None = setting(None, "number of adapters", none="0", at_least=0, at_most=MAX_ADAPTERS)
    rank: int | None = setting(None, "rank of all adapters", none=str(DEFAULT_RANK), at_most=MAX_RANK)
    ranks: str | None = setting(None, "ranks with adapter counts, such as 8:700,64:100")
    modules: str | None = setting(None, "target modules, separated by commas", none="all linear layers")
    dora: bool = setting(False, "all adapters use DoRA")


FLAG_GROUPS: Mapping[str, type[Settings]] = {
    "model": ModelSettings,
    "replica": ReplicaSettings,
    "adapters": AdapterSettings,
    "traffic": Traffic,
}


def run(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="lorax plan", usage="lorax plan --model PATH --gpu NAME [flags]", epilog=EXAMPLES)
    parser.description = "Estimate memory use, latency and the number of replicas for some traffic."
    for title, settings in FLAG_GROUPS.items():
        _add_flags(parser.add_argument_group(title), settings)
    parser.add_json_flag()
    args = vars(parser.parse_args(argv))
    planner = make_planner(args)
    figures = planner.plan()
    if args["json"] != "-":
        print(format_plan(figures, planner.settings.gpu_memory_fraction))
    if args["json"]:
        write_json(figures, args["json"])
    return 0


def make_planner(args: Mapping[str, Any]) -> Planner:
    replica, traffic = _read_settings(ReplicaSettings, args), _read_settings(Traffic, args)
    gpu, sizes = _read_gpu(replica), _read_model(_read_settings(ModelSettings, args), replica.quantize)
    length = traffic.prompt_tokens + traffic.completion_tokens
    if length > sizes.max_length:
        raise ConfigError(f"a request has {length} tokens, but the model supports at most {sizes.max_length}")
    return Planner(sizes, _read_mix(_read_settings(AdapterSettings, args), sizes), traffic, gpu, replica)


def _add_flags(group: Any, settings: type[Settings]) -> None:
    for flag in make_flags(settings):
        group.add_argument(
            *(flag.name, *flag.aliases),
            dest=flag.field,
            type=partial(flag.convert, origin=flag.name),
            default=argparse.SUPPRESS,
            metavar="|".join(flag.choices) or VALUE_KINDS[flag.kind].metavar,
            help=flag.help + f" (default: {flag.default})" * bool(flag.default),
            **({"nargs": "?", "const": "true"} if flag.kind == "switch" else {}),
        )


def _read_settings(settings: type[T], args: Mapping[str, Any]) -> T:
    flags = {flag.field: flag.name for flag in make_flags(settings)}
    try:
        return settings(**{name: args[name] for name in flags if name in args})
    except ConfigError as error:
        raise name_flags(error, flags) from error


def _read_model(settings: ModelSettings, quantize: str | None) -> ModelSizes:
    flags = {flag.field: flag.name for flag in make_flags(ModelSettings)}
    sizes = {name: value for name, value in vars(settings).items() if value is not None and name != "model"}
    if settings.model is not None:
        if sizes:
            names = ", ".join(flags[name] for name in sizes)
            raise ConfigError(f"--model already defines the model sizes; omit {names}")
        return read_sizes(Path(settings.model).expanduser(), quantize)
    if missing := [flags[name] for name in REQUIRED_SIZES if name not in sizes]:
        raise ConfigError(f"set --model to a model folder or config.json, or add {', '.join(missing)}")
    return make_llama_sizes(sizes, quantize)


def _read_gpu(settings: ReplicaSettings) -> Gpu:
    known = find_gpu(settings.gpu) if settings.gpu else Gpu("GPU", 0, 0, 0)
    gpu = Gpu(
        known.name,
        settings.gpu_memory_bytes or known.memory_bytes,
        1e9 * (settings.gpu_bandwidth or 0) or known.bytes_per_s,
        1e12 * (settings.gpu_tflops or 0) or known.flops_per_s,
    )
    if 0 in gpu:
        raise ConfigError("set --gpu to a GPU name, or set all of --gpu-memory, --gpu-bandwidth and --gpu-tflops")
    return gpu


def _read_mix(settings: AdapterSettings, sizes: ModelSizes) -> AdapterMix:
    names = list(dict.fromkeys(matrix.name for matrix in sizes.matrices))
    modules = [name.strip() for name in settings.modules.split(",")] if settings.modules else names
    unknown = [name[:40] for name in modules if name not in names]
    if unknown:
        raise ConfigError(f"--modules: the model has no module {unknown[0]!r}; its modules are {', '.join(names)}")
    return AdapterMix.from_ranks(sizes, _read_ranks(settings), modules, settings.dora)


def _read_ranks(settings: AdapterSettings) -> list[tuple[int, int]]:
    text = settings.ranks
    if text is None:
        return [(settings.rank or DEFAULT_RANK, settings.adapters or 0)]
    if settings.adapters is not None or settings.rank is not None:
        raise ConfigError("set --ranks, or --adapters and --rank, but not both")
    if re.fullmatch(r"\d{1,9}:\d{1,9}(,\d{1,9}:\d{1,9})*", text, re.ASCII) is None:
        raise ConfigError(f"--ranks {text[:100]!r} must have the form 8:700,64:100")
    pairs = [pair.split(":") for pair in text.split(",")]
    ranks = [(int(rank), int(count)) for rank, count in pairs]
    if not all(1 <= rank <= MAX_RANK for rank, _ in ranks) or sum(count for _, count in ranks) > MAX_ADAPTERS:
        raise ConfigError(f"--ranks {text[:100]!r} has a rank above {MAX_RANK}, or more than {MAX_ADAPTERS} adapters")
    return ranks


# --- Report -----------------------------------------------------------------------------------------------------------


QUANTIZATION_NOTE = (
    "note          step times assume that kernels for quantized weights are limited by memory bandwidth\n"
)
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
{quantization_note}replicas      {replicas:,} for {wanted:g} requests/s, at {used:.0%} utilization \
(at most {max_utilization:.0%})"""


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
        quantization_note=QUANTIZATION_NOTE * figures["has_quantized_weights"],
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
