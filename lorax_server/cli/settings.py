"""Builds the server configuration from flags and environment variables.

Flags take precedence over environment variables, and empty values are ignored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from typing import Any

from lorax_server.cli import demo
from lorax_server.cli.flags import FLAGS, LAUNCHER_DEFAULTS, Flag, build_parser, name_flags
from lorax_server.cli.lorax_flags import IGNORED_VARIABLES, REJECTED_VARIABLES, TOKEN_VARIABLES, WATERMARK_REASON
from lorax_server.config import CorsConfig, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError

GPU_NAME = re.compile(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*", re.ASCII)
WATERMARK_VALUES = {"watermark_gamma": 0.5, "watermark_delta": 2.0}


@dataclass(frozen=True)
class ParsedSettings:
    """The parsed flags and environment variables. They contain the values that the operator set, and values derived
    from them.
    """

    values: Mapping[str, Any] = field(repr=False)  # by `Flag.key`; includes secrets
    origins: Mapping[str, str]  # the flag or environment variable that set each value, by `Flag.key`
    warnings: tuple[str, ...]
    model_id: str
    revision: str | None
    cache: Path
    token: str | None = field(repr=False)  # hub token for the base model
    num_shard: int | None
    num_visible: int  # GPUs listed in the environment

    @property
    def adapter_token(self) -> str | None:
        """The hub token for adapters if a request contains no token, or None."""
        return self.token if self.values.get("use_global_hf_token") else None

    @property
    def has_adapters(self) -> bool:
        """Return True if the operator configured adapters, so the model must support them."""
        return any(self.values.get(key) for key in ("adapters_dir", "adapter_id", "preloaded_adapter_ids"))

    @property
    def model_source(self) -> str:
        return str(self.values.get("source", "hub"))

    @property
    def model_location(self) -> str:
        """The model name in its source. For S3 models, the bucket and prefix are added if they are missing."""
        bucket, prefix = self.values.get("s3_bucket"), self.values.get("s3_prefix", "").strip("/")
        if self.model_source != "s3" or self.model_id.startswith("s3://"):
            return self.model_id
        return "/".join(filter(None, ("s3:/", bucket, bucket and prefix, self.model_id)))

    def make_config(self, model_folder: Path | None, device: str = "cpu") -> ServerConfig:
        """Return the server configuration. Without a model folder, it is only used to check settings before a download.

        `device` is used for `--device auto`. Errors name the flag or environment variable.
        """
        origins = {flag.field or flag.key: self.origins.get(flag.key, flag.name) for flag in FLAGS}
        try:
            return self._make_config(model_folder, device)
        except ConfigError as error:
            raise name_flags(error, origins) from error

    def _make_config(self, folder: Path | None, best_device: str) -> ServerConfig:
        device = self.values.get("device", "auto")
        chosen = {"path": folder or Path(), "device": best_device if device == "auto" else device}
        model = ModelConfig(**self._collect_fields(ModelConfig) | chosen)
        ranks = self.num_shard or (max(1, self.num_visible) if model.device == "cuda" else 1)
        source = self.values.get("adapter_source", "hub")
        static = [_resolve_local_adapter(source, name) for name in (self.values.get("adapter_id"),) if name]
        preload_source = self.values.get("preloaded_adapter_source", source)
        preloaded = [
            _resolve_local_adapter(preload_source, name) for name in self.values.get("preloaded_adapter_ids", ())
        ]
        adapters = tuple(dict.fromkeys((*static, *preloaded)))
        sources = self._make_source_config([name for source, name in adapters if source == "local"])
        for source, _ in adapters:
            _check_source(source, sources)
        computed_engine = {"tensor_parallel": ranks, "sources": sources, "preload": adapters}
        engine = EngineConfig(model, **self._collect_fields(EngineConfig) | computed_engine)
        computed = {
            "model_revision": self.revision,
            "static_adapter": static[0] if static else None,
            "default_source": self._choose_default_source(sources),
            "cors": self._make_cors_config(),
        }
        return ServerConfig(engine, self.model_id, **self._collect_fields(*ServerConfig.__mro__) | computed)

    def _collect_fields(self, *settings: type) -> dict[str, Any]:
        """Return the values that the operator set, for the fields of these settings classes."""
        flags = [flag for flag in FLAGS if flag.settings in settings and flag.key in self.values]
        return {flag.field: self.values[flag.key] for flag in flags}

    def _make_source_config(self, local: Sequence[str]) -> SourceConfig:
        """Return the adapter source configuration. All local folders in the operator's settings become roots.

        `--adapters-dir` is the first root, because its adapters are listed by name.
        """
        roots = [self.values.get("adapters_dir"), *self.values.get("local_adapters", ()), *filter(_is_folder, local)]
        computed = {
            "roots": tuple(dict.fromkeys(Path(root).absolute() for root in roots if root is not None)),
            "cache": self.cache,
            "hub_token": self.adapter_token,
        }
        return SourceConfig(**{"hub": True} | self._collect_fields(SourceConfig) | computed)

    def _choose_default_source(self, sources: SourceConfig) -> str:
        default: str | None = self.values.get("default_adapter_source", self.values.get("adapter_source"))
        if default is not None:
            _check_source(default, sources)
            return default
        return next((source for source, reason in _explain_missing_sources(sources).items() if not reason), "hub")

    def _make_cors_config(self) -> CorsConfig:
        cors = CorsConfig(**self._collect_fields(CorsConfig))
        if cors.allow_credentials and (not cors.allow_origins or "*" in cors.allow_origins):
            raise ConfigError("--cors-allow-credentials requires --cors-allow-origin with specific origins")
        return cors


def _resolve_local_adapter(source: str, name: str) -> tuple[str, str]:
    """Return the source and adapter ID. Local folders become absolute paths."""
    is_folder = source == "local" and _is_folder(name)
    return source, str(Path(name).expanduser().absolute()) if is_folder else name


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _check_source(source: str, sources: SourceConfig) -> None:
    if reason := _explain_missing_sources(sources)[source]:
        raise ConfigError(f"adapter source {source} is not available: {reason}")


def _explain_missing_sources(sources: SourceConfig) -> dict[str, str]:
    """Return the reason why each source is unavailable, or an empty string for available sources."""
    return {
        "hub": "" if sources.hub else "--no-hub is set",
        "local": "" if sources.roots else "set --local-adapters or --adapters-dir",
        "s3": "" if sources.s3_bucket else "set --s3-bucket",
    }


# --- Parsing ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], environ: Mapping[str, str], command: str) -> ParsedSettings:
    """Parse flags and environment variables. `command` is `serve` or `launcher`."""
    values, origins = _read_values(argv, environ, command)
    warnings = tuple(_check_values(values, origins, environ))
    if command == "serve" and "model_id" not in values:
        values = demo.add_demo_settings(values)
    if command == "launcher":
        values = {**LAUNCHER_DEFAULTS, **values}
    if endpoint := _read_s3_endpoint(environ):
        values.setdefault("s3_endpoint", endpoint)
    model_id, revision = _split_revision(values["model_id"], values.get("revision"))
    return ParsedSettings(
        values=values,
        origins=origins,
        warnings=warnings,
        model_id=model_id,
        revision=revision,
        cache=values.get("huggingface_hub_cache") or Path(environ.get("HOME") or Path.home(), ".cache/lorax"),
        token=next((environ[name].strip() for name in TOKEN_VARIABLES if environ.get(name, "").strip()), None),
        num_shard=_choose_num_shard(values, _count_gpus(environ)),
        num_visible=_count_gpus(environ),
    )


def _read_values(
    argv: Sequence[str], environ: Mapping[str, str], command: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values and their origins by `Flag.key`."""
    arguments = vars(build_parser(command).parse_args(list(argv)))
    values, origins = {}, {}
    for flag in FLAGS:
        texts, origin = arguments[flag.key], flag.name
        if texts is None:
            texts, origin = _read_variable(flag, environ)
        converted = [flag.convert(text, origin) for text in texts if text != ""]
        if converted:
            values[flag.key] = tuple(converted) if flag.is_repeatable else converted[-1]
            origins[flag.key] = origin
    return values, origins


def _read_variable(flag: Flag, environ: Mapping[str, str]) -> tuple[list[str], str]:
    name = next((name for name in flag.variables if environ.get(name, "").strip()), None)
    text = environ[name].strip() if name else ""
    # Containers set HOSTNAME to the container name, which is not an address to listen on.
    if name is None or (name == "HOSTNAME" and not _is_address(text)):
        return [], ""
    texts = text.split(",") if flag.is_repeatable and not flag.is_secret else [text]
    return [text.strip() for text in texts], f"the environment variable {name}"


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check_values(values: Mapping[str, Any], origins: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """Reject unsupported settings that would change completions. Yield warnings for ignored settings."""
    for flag in FLAGS:
        if flag.key not in values:
            continue
        value, origin = values[flag.key], origins[flag.key]
        if flag.rejection_reason and value:
            raise ConfigError(f"{origin}: {flag.rejection_reason}")
        if value != WATERMARK_VALUES.get(flag.key, value):
            raise ConfigError(f"{origin} = {value} cannot be changed: {WATERMARK_REASON}")
        if flag.ignored_reason:
            yield f"{origin} has no effect: {flag.ignored_reason}"
    if values.get("sharded") is False and values.get("num_shard", 1) > 1:
        yield f"{origins['num_shard']} has no effect: {origins['sharded']} is false"
    for name in filter(environ.get, REJECTED_VARIABLES):
        raise ConfigError(f"the environment variable {name}: {REJECTED_VARIABLES[name]}")
    for name in filter(environ.get, IGNORED_VARIABLES):
        yield f"the environment variable {name} has no effect: {IGNORED_VARIABLES[name]}"


def _split_revision(model_id: str, revision: str | None) -> tuple[str, str | None]:
    """Return the model ID and revision. Hub IDs of the form `id@revision` are split, paths are not."""
    if "@" not in model_id or model_id.startswith(("/", ".", "~", "s3:")):
        return model_id, revision
    name, _, own_revision = model_id.partition("@")
    if not name or not own_revision:
        raise ConfigError(f"--model-id {model_id!r} must have the form ID@REVISION")
    if revision is not None:
        raise ConfigError(f"--model-id {model_id!r} already includes a revision; omit --revision")
    return name, own_revision


def _choose_num_shard(values: Mapping[str, Any], num_visible: int) -> int | None:
    """Return the number of ranks according to `--num-shard` and `--sharded`, or None if neither flag is set."""
    is_sharded, count = values.get("sharded"), values.get("num_shard")
    if count is not None and count < 1:
        raise ConfigError(f"--num-shard = {count} must be at least 1")
    if is_sharded is False:
        return 1
    if is_sharded and (count or num_visible) <= 1:
        counted = "--num-shard is 1" if count else "CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES list fewer"
        raise ConfigError(f"--sharded requires more than one GPU, but {counted}; set --num-shard")
    return count or (num_visible if is_sharded else None)


def _count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs listed in the environment, or 0 for values such as `all`."""
    text = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES") or ""
    # Like CUDA, ignore all entries after the first invalid name.
    return len(list(takewhile(GPU_NAME.fullmatch, text.split(","))))


def _read_s3_endpoint(environ: Mapping[str, str]) -> str:
    account = environ.get("R2_ACCOUNT_ID", "").strip()
    return f"https://{account}.r2.cloudflarestorage.com" if account else environ.get("S3_ENDPOINT_URL", "").strip()
