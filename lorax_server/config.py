"""Settings, frozen once they are made. A default is written here and nowhere else."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lorax_server.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
QUANTIZE = ("fp8-kv",)


@dataclass(frozen=True)
class ModelConfig:
    """Which model to load, and how."""

    path: Path
    """Folder with `config.json` and the weights."""
    dtype: str | None = None
    """One of `DTYPES`. None: float32 on a CPU, what the checkpoint says on a GPU."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`."""
    quantize: str | None = None
    """`fp8-kv` stores keys and values as float8."""
    pack_weights: bool | None = None
    """Keep a second, packed copy of each matrix for batches on a CPU: faster, twice the memory.
    None: where both copies fit in half of this machine's memory."""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; use one of {', '.join(DTYPES)}")
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None:
            raise ConfigError(f"device {self.device!r} is not supported; use cpu, cuda or cuda:<index>")
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize {self.quantize!r} is not supported; use one of {', '.join(QUANTIZE)}")


@dataclass(frozen=True)
class SourceConfig:
    """Where adapters may come from. Without any of it there are none."""

    roots: tuple[Path, ...] = ()
    """Folders that local adapters may lie in."""
    cache: Path | None = None
    """Where what was fetched is kept; the hub and S3 need it."""
    hub: bool = False
    hub_endpoint: str | None = None
    """None: that of huggingface_hub."""
    hub_token: str | None = field(default=None, repr=False)
    """For requests that bring none."""
    hub_offline: bool = False
    s3_bucket: str | None = None
    s3_prefix: str = ""
    s3_endpoint: str | None = None
    max_bytes: int = 4 * 2**30
    """The most that an adapter's files may have."""
    disk_bytes: int | None = None
    """The most that fetched adapters take of the disk. None: half of what it would have free without them."""
    num_threads: int = 16
    """Adapters that are fetched at once, from each source."""

    def __post_init__(self) -> None:
        if self.cache is None and (self.hub or self.s3_bucket):
            raise ConfigError("adapters of a hub or of S3 need a folder to be kept in: set cache")
        for name in ("max_bytes", "disk_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")


@dataclass(frozen=True)
class EngineConfig:
    """How a model and its adapters are served. What is None is chosen for the machine."""

    model: ModelConfig
    tensor_parallel: int = 1
    """Processes, and GPUs, over which every matrix is divided."""
    depth: int | None = None
    """Steps under way at once: 1 on a CPU, 2 on a GPU, where the next one is prepared while one runs."""

    max_rows: int = 64
    """Sequences that run at once."""
    max_step_tokens: int | None = None
    """Tokens that are computed in a step: 512 on a CPU, 2048 on a GPU, more where more sequences run."""
    max_chunk: int | None = None
    """Tokens of one prompt in a step. None: as many as there are."""
    max_length: int | None = None
    """Tokens of a request, prompt and answer. None: what the model was made for, if the cache holds it."""
    block_size: int = 16
    """Tokens of a block of the cache; prompts share whole blocks."""
    cache_bytes: int | None = None
    """For keys and values, on every rank. None: a quarter of the free memory on a CPU, what is left on a GPU."""
    gpu_memory_fraction: float = 0.9
    """Of a GPU's memory: what we use of it in all."""

    adapter_bytes: int | None = None
    """For adapters on the device, on every rank. None: 1 GiB on a CPU, a tenth of a GPU's memory."""
    adapter_host_bytes: int | None = None
    """For adapters that are ready in host memory, on every rank. None: an eighth of the machine's memory."""
    adapter_timeout_s: float = 120.0
    """How long a request waits for its adapter to be loaded."""
    adapter_patience_s: float = 1.0
    """How long a request waits until another adapter has to make room for its own though it is in use."""
    sources: SourceConfig = field(default_factory=SourceConfig)
    preload: tuple[tuple[str, str], ...] = ()
    """Adapters, by source and name, that are on the device before the first request, also after a restart."""
    pin_preloaded: bool = True
    """Whether those stay there."""

    max_waiting: int | None = 10_000
    """Requests that may wait; more are refused."""
    max_wait_s: float | None = None
    """Requests that would probably wait for longer are refused."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """What a tenant gets compared to others, who get 1."""

    def __post_init__(self) -> None:
        counts = ("tensor_parallel", "depth", "max_rows", "max_step_tokens", "max_chunk", "max_length", "block_size")
        sizes = ("cache_bytes", "adapter_host_bytes", "max_waiting")
        for name in (*counts, *sizes):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        for name in ("adapter_bytes", "adapter_timeout_s", "adapter_patience_s", "max_wait_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} = {value} must not be negative")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction = {self.gpu_memory_fraction} must be above 0 and at most 1")
        if not all(weight > 0 for weight in self.tenant_weights.values()):
            raise ConfigError("tenant_weights must be above 0")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_rows:
            raise ConfigError(
                f"max_step_tokens = {self.max_step_tokens} must be at least max_rows = {self.max_rows}: every running "
                "sequence needs a token of each step"
            )


@dataclass(frozen=True)
class CorsConfig:
    """What pages of other origins may do."""

    allow_origins: tuple[str, ...] = ()
    """`*`: all. None: only the server's own pages."""
    allow_methods: tuple[str, ...] = ("GET", "POST")
    allow_headers: tuple[str, ...] = ("*",)
    """`*`: whatever they ask for. SDKs send many of their own."""
    expose_headers: tuple[str, ...] = ("retry-after", "x-request-id")
    """Headers that SDKs look at besides the answer."""
    allow_credentials: bool = False


@dataclass(frozen=True)
class ServerConfig:
    """What is served, where, and to whom."""

    engine: EngineConfig
    model_id: str
    """What the base model is called."""
    model_revision: str | None = None
    served_names: tuple[str, ...] = ()
    """What else it is called; the first of these is the name that answers bear."""
    tokenizer_config_path: Path | None = None
    """Instead of the model's own `tokenizer_config.json`; chooses the chat template."""

    host: str = "127.0.0.1"
    port: int = 3000
    default_source: str = "hub"
    """Where an adapter comes from if the request does not say."""
    static_adapter: tuple[str, str] | None = None
    """Source and name of an adapter for requests that name none."""
    adapters_dir: Path | None = None
    """A folder each of whose subfolders is an adapter that can be named, also those that come later."""
    examples: Path | None = None
    """Prompts that the playground offers: a JSON list of `title`, `prompt` and `models`."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Callers need one of these. None: everybody may ask."""
    keys_file: Path | None = None
    """Keys with names, adapters they may use, and limits."""
    admin_key: str | None = field(default=None, repr=False)
    """For changing what is loaded. None: nobody may."""
    cors: CorsConfig = field(default_factory=CorsConfig)
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's `Host` may have besides `localhost` and the address that the server listens on; `*`: any.
    None: no others where only this machine can connect, and any elsewhere."""

    max_connections: int = 8192
    """Open connections. Idle ones give way to new ones; if there are none, new ones are refused."""
    max_connections_per_address: int = 2048
    """Those of one client's address. 0: as many as there are, since behind a proxy everybody has one address."""
    max_concurrent_requests: int = 1024
    """Answers under way; more are refused."""
    new_adapters_per_minute: int | None = None
    """Adapters that a key may name and that are new here. None: 60; where there are no keys, no limit."""
    max_body_bytes: int = 2 * 2**20
    max_best_of: int = 2
    max_choices: int = 128
    """Answers to one request, over all of its prompts."""
    max_stop_sequences: int = 4
    max_logprobs: int = 20
    """Alternatives that are reported for a token."""
    max_input_length: int | None = None
    """Tokens of a prompt. None: one less than a request may have in all."""
    request_timeout_s: float | None = None
    """After so long a request is given up. It can ask for less by `x-request-timeout`."""
    body_timeout_s: float = 30.0
    """For headers and body to arrive."""
    keep_alive_s: float = 15.0
    """A stream says after so long a silence that it is still there."""
    drain_s: float = 90.0
    """What is under way may take so long to end when the server is asked to stop."""

    json_logs: bool = False
    log_level: str = "info"
    log_prompts: bool = False
    """Write prompts and answers to the log."""
    otlp_endpoint: str | None = None
    """Where traces are sent to."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must be at least 0 and at most 65535")
        for name in self.allowed_hosts:
            if re.fullmatch(r"\*|[\w.-]+|\[[0-9a-fA-F:.]+\]", name) is None:
                raise ConfigError(f"allowed_hosts {name!r} must be a name such as api.example.com, without a port")
        counts = ("max_concurrent_requests", "max_body_bytes", "max_best_of", "max_choices", "max_stop_sequences")
        for name in (*counts, "max_connections", "max_input_length", "new_adapters_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value} must be at least 1")
        for name in ("request_timeout_s", "body_timeout_s", "keep_alive_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value} must be above 0")
        for name in ("drain_s", "max_connections_per_address"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must not be negative")
        total = self.engine.max_length
        if self.max_input_length is not None and total is not None and self.max_input_length >= total:
            raise ConfigError(
                f"max_input_length = {self.max_input_length} must be less than the {total} tokens that a request may "
                "have in all: one has to be left for the answer"
            )
