"""Settings, frozen once they are made.

A default and its help are written here and nowhere else: the command line makes its flags of these fields.
"""
# ruff: noqa: RUF009 - `setting` makes a field

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lorax_server.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZE = ("fp8-kv",)
SOURCES = ("hub", "local", "s3")
TOOL_PARSERS = ("hermes", "llama3_json", "pythonic", "mistral", "granite", "qwen3_coder", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
T = TypeVar("T")


class Setting(NamedTuple):
    """Help and bounds of a field. A field that has one has a flag as well."""

    help: str
    none: str = ""  # the meaning of None, or of an empty value
    flag: str = ""  # the name of its flag, where `--field-name` says too little
    choices: tuple[str, ...] = ()
    at_least: int | None = None  # None: 1 for whole numbers, no bound for others
    above: int | None = None


def setting(default: T, help: str, *, is_secret: bool = False, **more: Any) -> T:
    """Declare a field with a `Setting`."""
    return field(default=default, repr=not is_secret, metadata={"setting": Setting(help, **more)})


class Settings:
    """Base of all settings: checks the bounds of the fields."""

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


DTYPE_DEFAULT = "as stored on a GPU; on a CPU float32, but bfloat16 if so stored and the CPU has AMX"


@dataclass(frozen=True)
class ModelConfig(Settings):
    """The model to load, and the form of its weights."""

    path: Path  # the folder with config.json and the weights
    dtype: str | None = setting(None, "float32, float16 or bfloat16", none=DTYPE_DEFAULT)
    device: str = setting("cpu", "cpu, cuda or cuda:<index>; auto takes a GPU if there is one")
    quantize: str | None = setting(None, "fp8-kv stores keys and values as float8")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("dtype", DTYPES), ("quantize", QUANTIZE)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} {value!r} is not supported; use one of {', '.join(choices)}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device {self.device!r} is not supported; use cpu, cuda or cuda:<index>")


@dataclass(frozen=True)
class SourceConfig(Settings):
    """The sources of adapters. By default there is none."""

    roots: tuple[Path, ...] = setting((), "folder below which the source local may read", flag="--local-adapters")
    cache: Path | None = setting(None, "folder for fetched models and adapters; the hub and S3 need it")
    hub: bool = setting(False, "fetch adapters from a hub; --no-hub does not")
    hub_endpoint: str | None = setting(None, "address of the hub", none="that of huggingface_hub")
    hub_token: str | None = field(default=None, repr=False)  # for requests without a token; no flag: it is a secret
    hub_offline: bool = setting(False, "send no request to the hub: use fetched files only")
    s3_bucket: str | None = setting(None, "bucket that the source s3 reads")
    s3_prefix: str = setting("", "prefix of all adapters' keys in the bucket")
    s3_endpoint: str | None = setting(None, "address of the S3 service", none="Amazon's")
    max_bytes: int = setting(4 * 2**30, "size of an adapter's files", flag="--max-adapter-file-bytes")
    disk_bytes: int | None = setting(
        None, "disk space for fetched adapters", none="half of what is free without them", flag="--adapter-disk-bytes"
    )
    num_threads: int = setting(16, "fetches at once from each source", flag="--adapter-fetch-threads")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache is None and (self.hub or self.s3_bucket):
            raise ConfigError("adapters of a hub or of S3 need a folder to be kept in: set cache")


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Memory, batches and waiting. A value of None is chosen for the machine."""

    model: ModelConfig
    tensor_parallel: int = setting(1, "number of GPUs to divide the model over")
    depth: int | None = setting(
        None, "steps in progress at once; with 2 the next is prepared meanwhile", none="1 on a CPU, 2 on a GPU"
    )
    cuda_graphs: bool | None = setting(
        None, "run the layers of steps of up to 2304 tokens as CUDA graphs", none="on one GPU, if its kernels allow it"
    )

    max_rows: int | None = setting(
        None, "sequences that run at once", none="64, or 256 on a GPU of 40 GB and more; not more than tokens of a step"
    )
    max_step_tokens: int | None = setting(
        None, "tokens to compute in a step", none="512 on a CPU, 4096 on a GPU, more if more sequences run"
    )
    max_mixed_tokens: int | None = setting(
        None,
        "tokens of prompts in a step while other sequences wait for their next token",
        none="2048 on a GPU; on a CPU no limit but that of a step",
    )
    max_chunk: int | None = setting(None, "tokens of one prompt in a step", none="no limit")
    max_length: int | None = setting(
        None, "tokens of a request, prompt and answer together", none="the model's own limit, if the cache holds it"
    )
    block_size: int = setting(16, "tokens of a cache block; prompts share whole blocks")
    cache_bytes: int | None = setting(
        None,
        "memory for keys and values on every GPU, such as 512M or 4G",
        none="a quarter of a CPU's free memory, the rest of a GPU's",
    )
    cache_tokens: int | None = setting(None, "the cache's size in tokens, instead of --cache-bytes")
    gpu_memory_fraction: float = setting(0.9, "share of a GPU's memory to use in all")

    adapter_bytes: int | None = setting(
        None,
        "memory for adapters on every GPU",
        none="1G on a CPU, a quarter of what the weights leave of a GPU",
        at_least=0,
    )
    adapter_memory_fraction: float | None = setting(None, "share of a GPU, instead of --adapter-bytes", at_least=0)
    adapter_host_bytes: int | None = setting(
        None, "host memory for prepared adapters, for every GPU", none="a quarter of the memory"
    )
    adapter_timeout_s: float = setting(120.0, "seconds that a request waits for its adapter to be loaded", at_least=0)
    adapter_patience_s: float = setting(
        1.0, "seconds that a request waits before another adapter in use must make room for its own", at_least=0
    )
    sources: SourceConfig = field(default_factory=SourceConfig)
    preload: tuple[tuple[str, str], ...] = setting((), "adapter to load before the first request, after restarts too")
    pin_preloaded: bool = setting(True, "keep preloaded adapters in memory")

    max_waiting: int | None = setting(10_000, "requests that may wait; more are refused")
    max_wait_s: float | None = setting(
        None, "refuse requests that would probably wait for more seconds", none="no limit", at_least=0
    )
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # others have 1; no flag: `weight` of a keys file

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction = {self.gpu_memory_fraction} must be above 0 and at most 1")
        if self.adapter_memory_fraction is not None and self.adapter_memory_fraction >= 1:
            raise ConfigError(f"adapter_memory_fraction = {self.adapter_memory_fraction} must be below 1")
        for one, other in (("cache_bytes", "cache_tokens"), ("adapter_bytes", "adapter_memory_fraction")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                values = f"{one} = {getattr(self, one)} or {other} = {getattr(self, other)}"
                raise ConfigError(f"give {values}, not both")
        if self.cache_tokens is not None and self.cache_tokens < (self.max_length or 0):
            raise ConfigError(f"cache_tokens = {self.cache_tokens} must be at least max_length = {self.max_length}")
        if not all(weight > 0 for weight in self.tenant_weights.values()):
            raise ConfigError("tenant_weights must be above 0")
        if self.max_step_tokens is not None and self.max_step_tokens < (self.max_rows or 0):
            raise ConfigError(
                f"max_step_tokens = {self.max_step_tokens} must be at least max_rows = {self.max_rows}: every running "
                "sequence needs a token of each step"
            )


@dataclass(frozen=True)
class CorsConfig(Settings):
    """Rights of web pages from other origins."""

    allow_origins: tuple[str, ...] = setting(
        (), "origin whose pages may send requests; * is any", none="only the server's own pages"
    )
    allow_methods: tuple[str, ...] = setting(("GET", "POST"), "method that pages may use")
    allow_headers: tuple[str, ...] = setting(("*",), "header that pages may send")  # SDKs send many of their own
    expose_headers: tuple[str, ...] = setting(("retry-after", "x-request-id"), "header that pages may read")
    allow_credentials: bool = setting(False, "let pages send credentials")


@dataclass(frozen=True, kw_only=True)
class AccessConfig(Settings):
    """The server's address, and the clients that may use it."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(3000, "port to listen on; 0 takes a free one", at_least=0)
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "host name by which clients may call the server, besides localhost and the address it listens on; * is any",
        none="no other if only this machine can connect, else any",
    )
    api_keys: tuple[str, ...] = setting(
        (), "key that clients need, better set by LORAX_API_KEY", none="no key is needed", is_secret=True
    )
    keys_file: Path | None = setting(None, "file of keys with names, adapters and limits")
    admin_key: str | None = setting(None, "key to load adapters, better set by LORAX_ADMIN_KEY", is_secret=True)
    replica_secret: str | None = field(default=None, repr=False)  # required on requests to a Ray replica; no flag
    cors: CorsConfig = field(default_factory=CorsConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must be at least 0 and at most 65535")
        super().__post_init__()
        for name in self.allowed_hosts:
            if re.fullmatch(r"\*|[\w.-]+|\[[0-9a-fA-F:.]+\]", name) is None:
                raise ConfigError(f"allowed_hosts {name!r} must be a name such as api.example.com, without a port")


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Settings):
    """Bounds on connections and requests."""

    max_connections: int = setting(8192, "open connections; more are closed with status 503")
    max_concurrent_requests: int = setting(1024, "answers in progress; more are refused")
    new_adapters_per_minute: int | None = setting(
        None, "adapters that a key may name and that are new to the server", none="60; without keys no limit"
    )
    max_body_bytes: int = setting(2 * 2**20, "size of a request")
    max_best_of: int = setting(2, "samples to choose the best of")
    max_choices: int = setting(128, "answers to one request, over all of its prompts")
    max_stop_sequences: int = setting(4, "stop sequences of a request")
    max_logprobs: int = setting(20, "alternatives that are reported for a token", at_least=0)
    max_input_length: int | None = setting(None, "tokens of a prompt", none="one less than --max-total-tokens")
    request_timeout_s: float | None = setting(
        None, "seconds until a request is given up; x-request-timeout can ask for less", none="never", above=0
    )
    body_timeout_s: float = setting(30.0, "seconds for headers, and for a body, to arrive", above=0)
    keep_alive_s: float = setting(15.0, "seconds of silence until a stream sends a comment", above=0)
    api_workers: int = setting(1, "API processes; only 1 is supported, scale out with --replicas")
    drain_s: float = setting(90.0, "seconds that requests have to end when the server stops", at_least=0)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Settings):
    """Logs and traces."""

    log_level: str = setting("info", "least severe messages to log", choices=LOG_LEVELS)
    log_prompts: bool = setting(False, "write prompts and answers to the log")
    json_logs: bool = setting(False, "write the log as JSON")
    otlp_endpoint: str | None = setting(None, "address to send traces to, by OTLP over HTTP")


@dataclass(frozen=True)
class ServerConfig(AccessConfig, LimitsConfig, LogConfig):
    """A model, its adapters, and the server in front of them."""

    engine: EngineConfig
    model_id: str  # the base model's name
    model_revision: str | None = setting(None, "branch, tag or commit of the model on the hub")
    served_names: tuple[str, ...] = setting(
        (), "another name of the model; answers bear the first one", flag="--served-model-name"
    )
    tokenizer_config_path: Path | None = setting(None, "another tokenizer_config.json, for its chat template")

    tool_parsers: tuple[str, ...] = setting(
        (),
        f"form in which the model calls functions, or adapter=form: {', '.join(TOOL_PARSERS)}",
        none="chosen by the chat template",
    )
    separate_reasoning: bool = setting(False, "give reasoning in <think> as reasoning_content, unless a request says")
    adapters_dir: Path | None = setting(None, "folder whose subfolders are adapters, later ones too")
    static_adapter: tuple[str, str] | None = setting(None, "adapter of requests that name none")
    default_source: str = setting("hub", "source of adapters whose request names none", choices=SOURCES)
    examples: Path | None = setting(
        None, "prompts for the playground: a JSON list of title, prompt and models", flag="--playground-examples"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_workers != 1:
            raise ConfigError(
                f"api_workers = {self.api_workers} is not supported: one API process carries 40,000 tokens/s; "
                "scale out with replicas (lorax serve --replicas)"
            )
        for parser in self.tool_parsers:
            name = parser.rpartition("=")[2]
            if name not in TOOL_PARSERS:
                raise ConfigError(f"tool_parsers {name[:100]!r} is not one of {', '.join(TOOL_PARSERS)}")
        total = self.engine.max_length
        if self.max_input_length is not None and total is not None and self.max_input_length >= total:
            raise ConfigError(
                f"max_input_length = {self.max_input_length} must be less than the {total} tokens that a request may "
                "have in all: one has to be left for the answer"
            )
