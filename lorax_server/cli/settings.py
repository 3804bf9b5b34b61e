"""What a command line asked for, as settings of the server."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorax_server.cli.demo import EXAMPLES
from lorax_server.cli.flag_table import FLAGS
from lorax_server.config import CorsConfig, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE

logger = logging.getLogger(__name__)

HOSTS = {"serve": "127.0.0.1", "launcher": "0.0.0.0"}
ORIGINS: dict[str, tuple[str, ...]] = {"serve": (), "launcher": ("*",)}  # LoRAX's pages may be anywhere
ALLOWED_HOSTS: dict[str, tuple[str, ...]] = {"serve": (), "launcher": ("*",)}
BLOCK = EngineConfig.block_size


@dataclass(frozen=True)
class Machine:
    """What settings are chosen for where they are not given."""

    device: str = "cpu"
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class Parsed:
    """What was asked for."""

    command: str
    values: Mapping[str, Any] = field(repr=False)  # by name, of the flags that were given; there are keys among them
    warnings: tuple[str, ...]
    model_id: str
    revision: str | None
    cache: Path
    token: str | None = field(repr=False)  # for the base model
    adapter_token: str | None = field(repr=False)  # for adapters of requests that bring none
    is_offline: bool
    s3_endpoint: str | None
    num_shard: int | None
    num_visible: int  # GPUs that the environment lists
    is_demo: bool = False  # no model was named: it is the one that ships in the package

    @property
    def download_only(self) -> bool:
        return bool(self.values.get("download_only"))

    @property
    def print_env(self) -> bool:
        return bool(self.values.get("env"))

    @property
    def model_source(self) -> str:
        return str(self.values.get("source", "hub"))

    @property
    def model_place(self) -> str:
        """What the model is to be looked for as."""
        bucket, prefix = self.values.get("s3_bucket"), self.values.get("s3_prefix", "").strip("/")
        if self.model_source != "s3" or self.model_id.startswith("s3://"):
            return self.model_id
        return "/".join(filter(None, ("s3:/", bucket, bucket and prefix, self.model_id)))

    def check(self) -> None:
        """Find what is wrong before a model is fetched, as far as that can be known."""
        with _named_as_flags():
            self._make_config(None, Machine())

    def make_config(self, model_folder: Path, machine: Machine | None = None) -> ServerConfig:
        """All settings. Errors name the flags that the settings came from."""
        with _named_as_flags():
            return self._make_config(model_folder, machine or Machine())

    def _make_config(self, folder: Path | None, machine: Machine) -> ServerConfig:
        values = self.values
        device = str(values.get("device", "auto"))
        model = ModelConfig(
            folder or Path(), device=machine.device if device == "auto" else device, **self._of("model")
        )
        ranks = self.num_shard or (max(1, self.num_visible) if model.device == "cuda" else 1)
        fixed, preloaded = self._adapters()
        sources = self._sources([name for source, name in (*fixed, *preloaded) if source == "local"])
        for source, _ in (*fixed, *preloaded):
            _check_source(source, sources)
        sized = self._sizes(model, ranks, machine) if folder else {}
        engine = EngineConfig(
            model,
            tensor_parallel=ranks,
            sources=sources,
            preload=tuple(dict.fromkeys((*fixed, *preloaded))),
            **self._of("engine") | sized,
        )
        return ServerConfig(
            engine,
            self.model_id,
            self.revision,
            host=values.get("hostname", HOSTS[self.command]),
            static_adapter=fixed[0] if fixed else None,
            default_source=self._default_source(sources),
            examples=EXAMPLES if self.is_demo else None,
            cors=self._cors(),
            **{"allowed_hosts": ALLOWED_HOSTS[self.command], **self._of("server")},
        )

    def _of(self, settings: str) -> dict[str, Any]:
        """The values that are fields of these settings as they are."""
        ours = [flag for flag in FLAGS if flag.to.startswith(f"{settings}.") and flag.key in self.values]
        return {flag.to.partition(".")[2]: self.values[flag.key] for flag in ours}

    def _adapters(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """The one for requests that name none, and those that are loaded first."""
        source = self.values.get("adapter_source", "hub")
        fixed = [self.values["adapter_id"]] if "adapter_id" in self.values else []
        first = self.values.get("preloaded_adapter_ids", ())
        first_source = self.values.get("preloaded_adapter_source", source)
        return [_locate(source, name) for name in fixed], [_locate(first_source, name) for name in first]

    def _sources(self, local: Sequence[str]) -> SourceConfig:
        """Adapters that the operator names by their folders may be read, wherever those are. The folder whose names are
        listed comes first, so that a name means what the list says."""
        roots = [self.values.get("adapters_dir"), *self.values.get("local_adapters", ()), *filter(_is_folder, local)]
        return SourceConfig(
            roots=tuple(dict.fromkeys(Path(root).absolute() for root in roots if root is not None)),
            cache=self.cache,
            hub=self.values.get("hub", True),
            hub_token=self.adapter_token,
            hub_offline=self.is_offline,
            **{**self._of("sources"), "s3_endpoint": self.s3_endpoint},
        )

    def _default_source(self, sources: SourceConfig) -> str:
        asked = self.values.get("default_adapter_source", self.values.get("adapter_source"))
        if asked is not None:
            _check_source(asked, sources)
            return str(asked)
        usable = {"hub": sources.hub, "local": bool(sources.roots), "s3": bool(sources.s3_bucket)}
        return next((source for source, is_usable in usable.items() if is_usable), "hub")

    def _cors(self) -> CorsConfig:
        found = CorsConfig(**{"allow_origins": ORIGINS[self.command], **self._of("cors")})
        if found.allow_credentials and (not found.allow_origins or "*" in found.allow_origins):
            raise ConfigError("--cors-allow-credentials needs --cors-allow-origin: not every page may send credentials")
        return found

    def _sizes(self, model: ModelConfig, ranks: int, machine: Machine) -> dict[str, int]:
        """What is given in tokens, or as a share of a GPU, in bytes."""
        sizes = {}
        tokens, share = self.values.get("max_batch_total_tokens"), self.values.get("adapter_memory_fraction")
        if tokens is not None:
            total = self.values.get("max_total_tokens", 1)
            if not tokens >= total:
                raise ConfigError(f"--max-batch-total-tokens = {tokens} must be at least {total}, one request's tokens")
            sizes["cache_bytes"] = -(-tokens // BLOCK) * BLOCK * token_bytes(model, ranks)
        if share is not None:
            if not 0 <= share < 1:
                raise ConfigError(f"--adapter-memory-fraction = {share} must be at least 0 and below 1")
            if machine.gpu_bytes is None or model.device == "cpu":
                logger.warning("--adapter-memory-fraction has no effect on a CPU: use --adapter-bytes")
            else:
                sizes["adapter_bytes"] = int(share * machine.gpu_bytes)
        return sizes


def token_bytes(model: ModelConfig, ranks: int) -> int:
    """What the keys and values of a token take on each rank."""
    try:
        config = json.loads((model.path / MODEL_CONFIG_FILE).read_text())
        layers, heads, hidden = (
            config.get(new) or config[old]
            for new, old in (
                ("num_hidden_layers", "n_layer"),
                ("num_attention_heads", "n_head"),
                ("hidden_size", "n_embd"),
            )
        )
        size = config.get("head_dim") or hidden // heads
        stored = config.get("dtype") or config.get("torch_dtype") or "float16"
        dtype = model.dtype or ("float32" if model.device == "cpu" else stored)
        width = 1 if model.quantize == "fp8-kv" else 4 if dtype == "float32" else 2
        return int(2 * layers * -(-(config.get("num_key_value_heads") or heads) // ranks) * size * width)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(
            f"--max-batch-total-tokens: {model.path}/config.json does not say how large a token's keys and values are; "
            "use --cache-bytes"
        ) from error


def _locate(source: str, name: str) -> tuple[str, str]:
    """A folder that is named as seen from here is named by all of its path."""
    is_folder = source == "local" and _is_folder(name)
    return source, str(Path(name).expanduser().absolute()) if is_folder else name


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _check_source(source: str, sources: SourceConfig) -> None:
    missing = {
        "hub": not sources.hub and "the hub is switched off by --no-hub",
        "local": not sources.roots and "there is no folder to read from: give --local-adapters or --adapters-dir",
        "s3": not sources.s3_bucket and "there is no bucket: give --s3-bucket",
    }[source]
    if missing:
        raise ConfigError(f"adapters cannot come from the source {source}: {missing}")


@contextmanager
def _named_as_flags() -> Iterator[None]:
    """Errors about fields of the settings become errors about the flags that they come from."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        for flag in FLAGS:
            field_name = flag.to.partition(".")[2] or flag.key
            message = re.sub(rf"(?<![\w-]){field_name}(?= = | \')", flag.name, message)
        raise ConfigError(message) from error
