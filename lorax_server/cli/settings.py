"""The settings of a server, from a command line and the environment.

Flags win over environment variables, and an empty value is none. Nothing is read but the arguments of `parse`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from typing import Any

from lorax_server.cli import demo
from lorax_server.cli.flags import FLAGS, LAUNCHER_DEFAULTS, Flag, build_parser
from lorax_server.cli.lorax_flags import REFUSED_VARIABLES, TOKENS, UNUSED_VARIABLES, WATERMARK
from lorax_server.config import CorsConfig, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError
from lorax_server.files.names import MODEL_CONFIG_FILE

GPU_NAME = re.compile(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*", re.ASCII)
WATERMARK_VALUES = {"watermark_gamma": 0.5, "watermark_delta": 2.0}


@dataclass(frozen=True)
class Parsed:
    """The settings that the operator gave, and what follows from them."""

    values: Mapping[str, Any] = field(repr=False)  # by `Flag.key`; there are secrets among them
    origins: Mapping[str, str]  # the flag or variable that each value comes from
    warnings: tuple[str, ...]
    model_id: str
    revision: str | None
    cache: Path
    token: str | None = field(repr=False)  # for the base model
    num_shard: int | None
    num_visible: int  # GPUs that the environment lists

    @property
    def adapter_token(self) -> str | None:
        """The token for adapters of requests without a token."""
        return self.token if self.values.get("use_global_hf_token") else None

    @property
    def model_source(self) -> str:
        return str(self.values.get("source", "hub"))

    @property
    def model_location(self) -> str:
        """The model's name for its source: a model of S3 may be named without the bucket and the prefix."""
        bucket, prefix = self.values.get("s3_bucket"), self.values.get("s3_prefix", "").strip("/")
        if self.model_source != "s3" or self.model_id.startswith("s3://"):
            return self.model_id
        return "/".join(filter(None, ("s3:/", bucket, bucket and prefix, self.model_id)))

    def make_config(self, model_folder: Path | None, device: str = "cpu") -> ServerConfig:
        """Make the server's settings. Without a model folder, only check them, before the model is downloaded.

        `device` is the best one of this machine. Errors name the flags or variables that are wrong.
        """
        origins = {flag.field or flag.key: self.origins.get(flag.key, flag.name) for flag in FLAGS}
        try:
            return self._make_config(model_folder, device)
        except ConfigError as error:
            message = re.sub(r"(?<![\w-])\w+(?= = | ')", lambda match: origins.get(match[0], match[0]), str(error))
            raise ConfigError(message) from error

    def _make_config(self, folder: Path | None, best_device: str) -> ServerConfig:
        device = self.values.get("device", "auto")
        chosen = {"path": folder or Path(), "device": best_device if device == "auto" else device}
        model = ModelConfig(**self._fields_of(ModelConfig) | chosen)
        ranks = self.num_shard or (max(1, self.num_visible) if model.device == "cuda" else 1)
        source = self.values.get("adapter_source", "hub")
        static = [_locate(source, name) for name in (self.values.get("adapter_id"),) if name]
        preload_source = self.values.get("preloaded_adapter_source", source)
        preloaded = [_locate(preload_source, name) for name in self.values.get("preloaded_adapter_ids", ())]
        adapters = tuple(dict.fromkeys((*static, *preloaded)))
        sources = self._sources([name for source, name in adapters if source == "local"])
        for source, _ in adapters:
            _check_source(source, sources)
        parts = {"tensor_parallel": ranks, "sources": sources, "preload": adapters}
        engine = EngineConfig(model, **self._fields_of(EngineConfig) | parts)
        computed = {
            "model_revision": self.revision,
            "static_adapter": static[0] if static else None,
            "default_source": self._default_source(sources),
            "cors": self._cors(),
        }
        return ServerConfig(engine, self.model_id, **self._fields_of(*ServerConfig.__mro__) | computed)

    def _fields_of(self, *settings: type) -> dict[str, Any]:
        """Return the given values of these settings' fields."""
        flags = [flag for flag in FLAGS if flag.settings in settings and flag.key in self.values]
        return {flag.field: self.values[flag.key] for flag in flags}

    def _sources(self, local: Sequence[str]) -> SourceConfig:
        """Allow the folders of adapters that the operator names, wherever they are. The folder whose names are listed
        comes first, so that a name means what the list says."""
        roots = [self.values.get("adapters_dir"), *self.values.get("local_adapters", ()), *filter(_is_folder, local)]
        computed = {
            "roots": tuple(dict.fromkeys(Path(root).absolute() for root in roots if root is not None)),
            "cache": self.cache,
            "hub_token": self.adapter_token,
        }
        return SourceConfig(**{"hub": True} | self._fields_of(SourceConfig) | computed)

    def _default_source(self, sources: SourceConfig) -> str:
        default: str | None = self.values.get("default_adapter_source", self.values.get("adapter_source"))
        if default is not None:
            _check_source(default, sources)
            return default
        return next((source for source, reason in _missing_sources(sources).items() if not reason), "hub")

    def _cors(self) -> CorsConfig:
        cors = CorsConfig(**self._fields_of(CorsConfig))
        if cors.allow_credentials and (not cors.allow_origins or "*" in cors.allow_origins):
            raise ConfigError("--cors-allow-credentials needs --cors-allow-origin: not every page may send credentials")
        return cors


def _locate(source: str, name: str) -> tuple[str, str]:
    """Name a local folder by its whole path, since names are looked for below the roots."""
    is_folder = source == "local" and _is_folder(name)
    return source, str(Path(name).expanduser().absolute()) if is_folder else name


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def _check_source(source: str, sources: SourceConfig) -> None:
    if reason := _missing_sources(sources)[source]:
        raise ConfigError(f"adapters cannot come from the source {source}: {reason}")


def _missing_sources(sources: SourceConfig) -> dict[str, str]:
    """Return for each source the reason why there is none, or an empty text."""
    return {
        "hub": "" if sources.hub else "the hub is switched off by --no-hub",
        "local": "" if sources.roots else "there is no folder to read from: give --local-adapters or --adapters-dir",
        "s3": "" if sources.s3_bucket else "there is no bucket: give --s3-bucket",
    }


def check_folder(folder: Path) -> Path:
    """Return a model folder. Raise ConfigError if it has no config.json."""
    if not (folder / MODEL_CONFIG_FILE).is_file():
        raise ConfigError(f"model {str(folder)!r}: there is no config.json in it, so it is not a model's folder")
    return folder


# --- Reading ----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], environ: Mapping[str, str], command: str) -> Parsed:
    """Read flags and environment variables. `command` is `serve` or `launcher`."""
    values, origins = _read(argv, environ, command)
    warnings = tuple(_check(values, origins, environ))
    if command == "serve" and "model_id" not in values:
        values = demo.add_settings(values)
    if command == "launcher":
        values = {**LAUNCHER_DEFAULTS, **values}
    if endpoint := _s3_endpoint(environ):
        values.setdefault("s3_endpoint", endpoint)
    model_id, revision = _split_revision(values["model_id"], values.get("revision"))
    return Parsed(
        values=values,
        origins=origins,
        warnings=warnings,
        model_id=model_id,
        revision=revision,
        cache=values.get("huggingface_hub_cache") or Path(environ.get("HOME") or Path.home(), ".cache/lorax"),
        token=next((environ[name].strip() for name in TOKENS if environ.get(name, "").strip()), None),
        num_shard=_num_shard(values, _count_gpus(environ)),
        num_visible=_count_gpus(environ),
    )


def _read(argv: Sequence[str], environ: Mapping[str, str], command: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values and origins by `Flag.key`."""
    arguments = vars(build_parser(command).parse_args(list(argv)))
    values, origins = {}, {}
    for flag in FLAGS:
        texts, origin = arguments[flag.key], flag.name
        if texts is None:
            texts, origin = _read_variable(flag, environ)
        converted = [flag.convert(text, origin) for text in texts if text != ""]
        if converted:
            values[flag.key] = tuple(converted) if flag.repeats else converted[-1]
            origins[flag.key] = origin
    return values, origins


def _read_variable(flag: Flag, environ: Mapping[str, str]) -> tuple[list[str], str]:
    name = next((name for name in flag.variables if environ.get(name, "").strip()), None)
    text = environ[name].strip() if name else ""
    # A container sets HOSTNAME to its own name, which is no address to listen on.
    if name is None or (name == "HOSTNAME" and not _is_address(text)):
        return [], ""
    texts = text.split(",") if flag.repeats and not flag.is_secret else [text]
    return [text.strip() for text in texts], f"the environment variable {name}"


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check(values: Mapping[str, Any], origins: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    """Refuse settings that would change answers and cannot be honoured; yield a warning for those without effect."""
    for flag in FLAGS:
        if flag.key not in values:
            continue
        value, origin = values[flag.key], origins[flag.key]
        if flag.refusal and value:
            raise ConfigError(f"{origin}: {flag.refusal}")
        if value != WATERMARK_VALUES.get(flag.key, value):
            raise ConfigError(f"{origin} = {value} cannot be changed: {WATERMARK}")
        if flag.unused:
            yield f"{origin} has no effect: {flag.unused}"
    if values.get("sharded") is False and values.get("num_shard", 1) > 1:
        yield f"{origins['num_shard']} has no effect: {origins['sharded']} is false"
    for name in filter(environ.get, REFUSED_VARIABLES):
        raise ConfigError(f"the environment variable {name}: {REFUSED_VARIABLES[name]}")
    for name in filter(environ.get, UNUSED_VARIABLES):
        yield f"the environment variable {name} has no effect: {UNUSED_VARIABLES[name]}"


def _split_revision(model_id: str, revision: str | None) -> tuple[str, str | None]:
    """Split `id@revision` of a hub; leave a path alone."""
    if "@" not in model_id or model_id.startswith(("/", ".", "~", "s3:")):
        return model_id, revision
    name, _, own_revision = model_id.partition("@")
    if not name or not own_revision:
        raise ConfigError(f"--model-id {model_id!r} must have a name before the @ and a revision after it")
    if revision is not None:
        raise ConfigError(f"--model-id {model_id!r} says which revision already: leave --revision out")
    return name, own_revision


def _num_shard(values: Mapping[str, Any], num_visible: int) -> int | None:
    """Return the number of ranks that the operator asks for, if any."""
    is_sharded, count = values.get("sharded"), values.get("num_shard")
    if count is not None and count < 1:
        raise ConfigError(f"--num-shard = {count} must be at least 1")
    if is_sharded is False:
        return 1
    if is_sharded and (count or num_visible) <= 1:
        counted = (
            "--num-shard is 1" if count else "neither CUDA_VISIBLE_DEVICES nor NVIDIA_VISIBLE_DEVICES lists several"
        )
        raise ConfigError(f"--sharded needs more than one GPU, and {counted}: give --num-shard")
    return count or (num_visible if is_sharded else None)


def _count_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that are listed; a word such as `all` gives no number."""
    text = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES") or ""
    # CUDA sees none of those after a name that is no GPU's, either.
    return len(list(takewhile(GPU_NAME.fullmatch, text.split(","))))


def _s3_endpoint(environ: Mapping[str, str]) -> str:
    account = environ.get("R2_ACCOUNT_ID", "").strip()
    return f"https://{account}.r2.cloudflarestorage.com" if account else environ.get("S3_ENDPOINT_URL", "").strip()
