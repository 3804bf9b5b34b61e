"""Frozen configuration dataclasses.

Defaults and help texts are defined only here: the command-line flags are generated from these fields.
"""
# ruff: noqa: RUF009 - `setting` makes a field

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lorax_server.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
# Values of `quantize` that quantize 16-bit weights while loading. The last three are LoRAX's names.
WEIGHT_BITS = {"int8": 8, "int4": 4, "bitsandbytes": 8, "eetq": 8, "hqq-4bit": 4}
# Values that round 16-bit weights to 4-bit or 8-bit floats.
ROUNDED_FORMATS = {"bitsandbytes-nf4": "nf4", "bitsandbytes-fp4": "fp4", "fp8": "fp8", "fp8-dynamic": "fp8-dynamic"}
CHECKPOINT_FORMATS = ("gptq", "awq", "fp8")  # confirm the format of a quantized checkpoint, as in LoRAX
QUANTIZE_METHODS = ("fp8-kv", *WEIGHT_BITS, *ROUNDED_FORMATS, "gptq", "awq")
TASKS = ("auto", "generate", "embed", "classify", "token-classify", "score")
POOLING_CHOICES = ("cls", "mean", "max", "lasttoken")
ADAPTER_SOURCES = ("hub", "local", "s3")
TOOL_PARSERS = ("hermes", "llama3_json", "pythonic", "mistral", "granite", "qwen3_coder", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
T = TypeVar("T")


class Setting(NamedTuple):
    """A config field's help text and bounds. Each field with a `Setting` has a command-line flag."""

    help: str
    none: str = ""  # help text for the value None or an empty value
    flag: str = ""  # flag name, if different from the field name
    aliases: tuple[str, ...] = ()  # earlier flag names, which are still accepted
    choices: tuple[str, ...] = ()
    at_least: int | None = None  # minimum; None means 1 for integers, otherwise no bound
    above: int | None = None
    at_most: int | None = None


def setting(default: T, help: str, *, is_secret: bool = False, **kwargs: Any) -> T:
    """Declare a dataclass field with a `Setting` as metadata."""
    return field(default=default, repr=not is_secret, metadata={"setting": Setting(help, **kwargs)})


class Settings:
    """Base class of config dataclasses. Validates the bounds of all fields."""

    def __post_init__(self) -> None:
        for declared in fields(self):  # type: ignore[arg-type] # every subclass is a dataclass
            value, bounds = getattr(self, declared.name), declared.metadata.get("setting")
            if value is None or bounds is None:
                continue
            least = 1 if bounds.at_least is None and declared.type in (int, int | None) else bounds.at_least
            if least is not None and not value >= least:
                raise ConfigError(
                    f"{declared.name} = {value} must " + (f"be at least {least}" if least else "not be negative")
                )
            if bounds.above is not None and not value > bounds.above:
                raise ConfigError(f"{declared.name} = {value} must be above {bounds.above}")
            if bounds.at_most is not None and not value <= bounds.at_most:
                raise ConfigError(f"{declared.name} = {value} must be at most {bounds.at_most}")


DTYPE_DEFAULT = "the stored dtype on a GPU; float32 on a CPU, or bfloat16 if stored so and the CPU has AMX"


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The model to load, and its weight format."""

    path: Path  # folder with config.json and the weights
    dtype: str | None = setting(None, "float32, float16 or bfloat16", none=DTYPE_DEFAULT)
    device: str = setting("cpu", "cpu, cuda or cuda:<index>; auto uses a GPU if available")
    quantize: str | None = setting(
        None,
        "int8, int4 or fp8 quantizes the weights while loading; fp8-dynamic also rounds activations; bitsandbytes-nf4 "
        "rounds as in QLoRA training; fp8-kv stores the KV cache as float8; see docs/quantization.md for others",
    )
    task: str = setting(
        "auto",
        "use of the model; auto reads it from the model folder, score asks a decoder to judge documents",
        choices=TASKS,
    )
    pooling: str | None = setting(
        None, "pooling for embeddings", none="as the model folder says", choices=POOLING_CHOICES
    )
    embedding_dim: int | None = setting(
        None, "embedding size: selects the model's 2_Dense_N layer if there is one, otherwise truncates embeddings"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (
            ("dtype", DTYPES),
            ("quantize", QUANTIZE_METHODS),
            ("task", TASKS),
            ("pooling", POOLING_CHOICES),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} {value!r} is not supported; use one of {', '.join(choices)}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device {self.device!r} is not supported; use cpu, cuda or cuda:<index>")

    @property
    def weight_bits(self) -> int | None:
        """Return the number of bits that the weights are quantized to while loading, or None."""
        return WEIGHT_BITS.get(self.quantize or "")

    @property
    def rounded_format(self) -> str | None:
        """Return the floating-point format that 16-bit weights are rounded to while loading, or None."""
        return ROUNDED_FORMATS.get(self.quantize or "")

    @property
    def loaded_format(self) -> str | None:
        """Return the format that 16-bit weights are converted to while loading, or None."""
        return self.rounded_format if self.weight_bits is None else f"int{self.weight_bits}"


@dataclass(frozen=True)
class SourceConfig(Settings):
    """Adapter sources, which are all disabled by default."""

    roots: tuple[Path, ...] = setting((), "root folder for local adapters", flag="--local-adapters")
    uploads: Path | None = setting(
        None, "folder for adapter weights uploaded over HTTP", none="uploads are rejected", flag="--adapter-uploads-dir"
    )
    cache: Path | None = setting(None, "cache folder for downloaded models and adapters; required for the hub and S3")
    hub: bool = setting(False, "download adapters from the Hugging Face hub; --no-hub disables it")
    hub_endpoint: str | None = setting(None, "hub URL", none="huggingface_hub's default")
    hub_token: str | None = field(
        default=None, repr=False
    )  # used for requests without a token; secret, so it has no flag
    hub_offline: bool = setting(False, "use only downloaded files, and send no requests to the hub")
    s3_bucket: str | None = setting(None, "bucket with S3 adapters")
    s3_prefix: str = setting("", "key prefix of all adapters in the bucket")
    s3_endpoint: str | None = setting(None, "S3 endpoint URL", none="Amazon S3")
    max_bytes: int = setting(4 * 2**30, "maximum size of an adapter's files", flag="--max-adapter-file-bytes")
    disk_bytes: int | None = setting(
        None,
        "disk space for downloaded adapters",
        none="half of the space that other files leave free",
        flag="--adapter-disk-bytes",
    )
    num_threads: int = setting(16, "concurrent downloads per source", flag="--adapter-fetch-threads")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache is None and (self.hub or self.s3_bucket):
            raise ConfigError("adapters from the hub or S3 need a cache folder; set `cache` (--huggingface-hub-cache)")


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Engine settings for memory, batching and queueing. None selects a default for this machine."""

    model: ModelConfig
    tensor_parallel: int = setting(1, "number of GPUs for tensor parallelism")
    max_steps_in_flight: int | None = setting(
        None,
        "maximum steps in flight; with 2, the next step is scheduled while one is running",
        none="1 on a CPU, 2 on a GPU",
        aliases=("--depth",),
    )
    cuda_graphs: bool | None = setting(
        None,
        "run steps with up to 2304 tokens as CUDA graphs",
        none="enabled on a single GPU, if its kernels support it",
    )

    max_num_seqs: int | None = setting(
        None,
        "maximum number of running sequences",
        none="64, or 256 on a GPU with at least 40 GB; at most max_step_tokens",
        aliases=("--max-rows",),
    )
    max_step_tokens: int | None = setting(
        None, "maximum tokens per step", none="512 on a CPU, 4096 on a GPU, but at least max_num_seqs"
    )
    max_mixed_tokens: int | None = setting(
        None,
        "maximum prompt tokens in a step that also decodes",
        none="2048 on a GPU; only limited by max_step_tokens on a CPU",
    )
    max_prefill_chunk_tokens: int | None = setting(
        None, "maximum tokens of one prompt per step", none="no limit", aliases=("--max-chunk",)
    )
    speculative_tokens: int = setting(
        0,
        "maximum draft tokens per sequence and step, guessed from the prompt and from earlier completions of the same "
        "adapter and tenant, for example 8; 0 disables speculation without draft heads",
        at_least=0,
        at_most=64,
    )
    speculation_max_batch_size: int | None = setting(
        None, "no draft tokens while more sequences are running", none="follows from measured step times"
    )
    draft_heads: Path | None = setting(
        None,
        "folder with Medusa heads of the base model (config.json and medusa_lm_head.safetensors); enables speculation, "
        "by default with one draft token per head",
    )
    max_length: int | None = setting(
        None,
        "maximum tokens per request, prompt and completion together",
        none="the model's limit, if it fits into the cache",
    )
    block_size: int = setting(16, "tokens per KV block; prompts share whole blocks")
    cache_bytes: int | None = setting(
        None,
        "KV cache memory per GPU, for example 512M or 4G",
        none="a quarter of the free host memory on a CPU, the remaining memory on a GPU",
    )
    cache_tokens: int | None = setting(None, "KV cache size in tokens, instead of --cache-bytes")
    gpu_memory_fraction: float = setting(0.9, "fraction of GPU memory to use in total", above=0, at_most=1)

    adapter_bytes: int | None = setting(
        None,
        "adapter memory per GPU",
        none="1G on a CPU, a quarter of the memory that the weights leave free on a GPU",
        at_least=0,
    )
    adapter_memory_fraction: float | None = setting(
        None, "fraction of GPU memory for adapters, instead of --adapter-bytes", at_least=0
    )
    adapter_host_bytes: int | None = setting(
        None, "host memory for prepared adapters, per GPU", none="a quarter of the host memory"
    )
    adapter_timeout_s: float = setting(120.0, "adapter load timeout of a request, in seconds", at_least=0)
    adapter_eviction_delay_s: float = setting(
        1.0,
        "seconds that a request waits before its adapter may replace adapters that other waiting requests need; "
        "adapters with running requests are never evicted",
        at_least=0,
        aliases=("--adapter-patience-s",),
    )
    sources: SourceConfig = field(default_factory=SourceConfig)
    preload: tuple[tuple[str, str], ...] = setting((), "adapter to load at startup and after restarts")
    pin_preloaded: bool = setting(True, "keep preloaded adapters in memory")

    max_waiting: int | None = setting(10_000, "maximum number of waiting requests; more are rejected")
    max_wait_s: float | None = setting(
        None, "reject requests with a longer estimated wait, in seconds", none="no limit", at_least=0
    )
    tenant_weights: Mapping[str, float] = field(
        default_factory=dict
    )  # 1 if missing; set by `weight` in the keys file, so it has no flag

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_memory_fraction is not None and self.adapter_memory_fraction >= 1:
            raise ConfigError(f"adapter_memory_fraction = {self.adapter_memory_fraction} must be below 1")
        for one, other in (("cache_bytes", "cache_tokens"), ("adapter_bytes", "adapter_memory_fraction")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                values = f"{one} = {getattr(self, one)} and {other} = {getattr(self, other)}"
                raise ConfigError(f"{values} cannot both be set")
        if self.cache_tokens is not None and self.cache_tokens < (self.max_length or 0):
            raise ConfigError(f"cache_tokens = {self.cache_tokens} must be at least max_length = {self.max_length}")
        if not all(weight > 0 for weight in self.tenant_weights.values()):
            raise ConfigError("tenant_weights must be above 0")
        if self.max_step_tokens is not None and self.max_step_tokens < (self.max_num_seqs or 0):
            raise ConfigError(
                f"max_step_tokens = {self.max_step_tokens} must be at least max_num_seqs = {self.max_num_seqs}: every "
                "running sequence needs one token per step"
            )


@dataclass(frozen=True)
class CorsConfig(Settings):
    """CORS settings for web pages from other origins."""

    allow_origins: tuple[str, ...] = setting((), "allowed CORS origin; * allows all", none="same origin only")
    allow_methods: tuple[str, ...] = setting(("GET", "POST"), "allowed CORS method")
    allow_headers: tuple[str, ...] = setting(("*",), "allowed CORS request header")  # SDKs send many custom headers
    expose_headers: tuple[str, ...] = setting(("retry-after", "x-request-id"), "CORS response header exposed to pages")
    allow_credentials: bool = setting(False, "allow credentials in CORS requests")


@dataclass(frozen=True, kw_only=True)
class AccessConfig(Settings):
    """Server address and access control."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(3000, "port to listen on; 0 selects a free port", at_least=0, at_most=65535)
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "allowed Host header, in addition to localhost and the listen address; * allows all",
        none="no others on a loopback address, otherwise all",
    )
    api_keys: tuple[str, ...] = setting(
        (), "API key for clients; prefer LORAX_API_KEY", none="no key required", is_secret=True
    )
    keys_file: Path | None = setting(None, "file with API keys, their adapters and limits")
    admin_key: str | None = setting(None, "key for loading adapters; prefer LORAX_ADMIN_KEY", is_secret=True)
    replica_secret: str | None = field(default=None, repr=False)  # required on requests to a Ray replica; has no flag
    cors: CorsConfig = field(default_factory=CorsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.allowed_hosts:
            if re.fullmatch(r"\*|[\w.-]+|\[[0-9a-fA-F:.]+\]", name) is None:
                raise ConfigError(f"allowed_hosts {name!r} must be a name such as api.example.com, without a port")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Settings):
    """Server limits for connections and requests."""

    max_connections: int = setting(8192, "maximum open connections; more are rejected with status 503")
    max_concurrent_requests: int = setting(1024, "maximum concurrent completions; more are rejected")
    new_adapters_per_minute: int | None = setting(
        None, "new adapters that a key may request per minute", none="60; no limit without keys"
    )
    max_body_bytes: int = setting(2 * 2**20, "maximum request body size")
    max_best_of: int = setting(2, "maximum best_of")
    max_choices: int = setting(128, "maximum completions per request, over all prompts")
    max_stop_sequences: int = setting(4, "maximum stop sequences per request")
    default_structured_tokens: int = setting(
        1024, "token limit for structured output if the request sets no limit, because lists may never end"
    )
    max_logprobs: int = setting(20, "maximum logprobs alternatives per token", at_least=0)
    max_input_length: int | None = setting(None, "maximum prompt tokens", none="one less than --max-total-tokens")
    request_timeout_s: float | None = setting(
        None, "request timeout in seconds; x-request-timeout can lower it", none="never", above=0
    )
    body_timeout_s: float = setting(
        30.0, "timeout for receiving headers, and for receiving the body, in seconds", above=0
    )
    keep_alive_s: float = setting(15.0, "seconds without output before a stream sends a keep-alive comment", above=0)
    api_workers: int = setting(1, "API processes; only 1 is supported, scale out with --replicas")
    drain_s: float = setting(90.0, "seconds for running requests to finish at shutdown", at_least=0)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Settings):
    """Settings for logs and traces."""

    log_level: str = setting("info", "minimum log level", choices=LOG_LEVELS)
    log_prompts: bool = setting(False, "log prompts and completions")
    json_logs: bool = setting(False, "log as JSON")
    otlp_endpoint: str | None = setting(None, "OTLP/HTTP endpoint for traces")


@dataclass(frozen=True)
class ServerConfig(AccessConfig, LimitsConfig, LogConfig):
    """The complete server configuration."""

    engine: EngineConfig
    model_id: str  # base model name in API responses
    model_revision: str | None = setting(None, "branch, tag or commit of the model on the hub")
    served_names: tuple[str, ...] = setting(
        (), "another name for the model; responses use the first one", flag="--served-model-name"
    )
    tokenizer_config_path: Path | None = setting(None, "tokenizer_config.json to use for the chat template")

    tool_parsers: tuple[str, ...] = setting(
        (),
        f"tool call format, or adapter=format: {', '.join(TOOL_PARSERS)}",
        none="detected from the chat template",
    )
    describe_tools: bool = setting(
        True, "with --tool-parser, write tools into the system message if the chat template does not render them"
    )
    separate_reasoning: bool = setting(
        False, "return <think> text as reasoning_content, unless the request overrides it"
    )
    adapters_dir: Path | None = setting(None, "folder whose subfolders are adapters; new subfolders are detected")
    static_adapter: tuple[str, str] | None = setting(None, "adapter for requests without an adapter")
    default_source: str = setting("hub", "adapter source for requests without a source", choices=ADAPTER_SOURCES)
    examples: Path | None = setting(
        None, "playground examples: a JSON list with title, prompt and models", flag="--playground-examples"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_workers != 1:
            raise ConfigError(
                f"api_workers = {self.api_workers} is not supported: one API process handles 40,000 tokens/s; "
                "scale out with replicas (lorax serve --replicas)"
            )
        for parser in self.tool_parsers:
            name = parser.rpartition("=")[2]
            if name not in TOOL_PARSERS:
                raise ConfigError(f"tool_parsers {name[:100]!r} is not one of {', '.join(TOOL_PARSERS)}")
        total = self.engine.max_length
        if self.max_input_length is not None and total is not None and self.max_input_length >= total:
            raise ConfigError(
                f"max_input_length = {self.max_input_length} must be less than the {total} tokens allowed per "
                "request, to leave at least one token for the completion"
            )
