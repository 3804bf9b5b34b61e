"""The flags of `lorax serve` and `lorax-launcher`, generated from the settings classes, and their parser."""

import argparse
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from configparser import RawConfigParser
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

from lorax_server import __version__, config
from lorax_server.cli.lorax_flags import FLAG_NAMES, IGNORED_FLAGS, VARIABLE_BY_SETTING, WATERMARK_REASON
from lorax_server.config import ADAPTER_SOURCES
from lorax_server.errors import ConfigError

PROGRAMS = {"serve": "lorax serve", "launcher": "lorax-launcher"}
# Defaults for `lorax-launcher`. Like LoRAX, it accepts requests from every host and web page.
LAUNCHER_DEFAULTS: Mapping[str, Any] = {
    "model_id": "mistralai/Mistral-7B-Instruct-v0.1",
    "hostname": "0.0.0.0",
    "cors_allow_origin": ("*",),
    "allowed_host": ("*",),
}
# Help texts for defaults that are computed at startup.
DEFAULT_DESCRIPTIONS = {
    "model_id": "a small bundled model",
    "default_adapter_source": "--adapter-source",
    "num_shard": "the number of devices in CUDA_VISIBLE_DEVICES",
    "device": "auto",
    "hub": "true",
    "huggingface_hub_cache": "~/.cache/lorax",
}
SHORT_FLAGS = {"--port": ("-p",), "--env": ("-e",)}
LOG_LEVEL_ALIASES = {"warn": "warning", "trace": "debug"}  # log levels by their LoRAX name
SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
EXAMPLES = """\
examples:
  {program} --model-id Qwen/Qwen2.5-0.5B-Instruct                      a model from the hub
  {program} --model-id ./my-model --adapters-dir ./my-adapters         local folders; each subfolder is an adapter
  {program} --model-id ./my-model --num-shard 2 --quantize fp8-kv      tensor parallelism over two GPUs
  LORAX_API_KEY=secret {program} --model-id ./my-model -p 8080         clients need an API key

Each flag can also be set with the environment variable in brackets. The flag takes precedence.
"""


@dataclass(frozen=True)
class Flag:
    """A command-line flag, which can also be set with an environment variable."""

    name: str
    help: str = ""
    kind: str = "text"  # key in `VALUE_KINDS`
    settings: type | None = None
    field: str = ""  # name in `settings`; flags without a field are handled separately
    default: str = ""  # shown in the help text
    is_repeatable: bool = False
    choices: tuple[str, ...] = ()
    is_secret: bool = False
    has_env_prefix: bool = False  # the environment variable starts with LORAX_; LoRAX flags have no prefix
    aliases: tuple[str, ...] = ()  # earlier names, which are still accepted but not shown in the help text
    ignored_reason: str = ""  # why the flag has no effect
    rejection_reason: str = ""  # why the flag is rejected: ignoring it would change completions

    @property
    def key(self) -> str:
        return _make_key(self.name)

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set this flag, in order of precedence."""
        if self.name == "--env":  # ENV is often set for other purposes
            return ()
        prefix = "LORAX_" * self.has_env_prefix
        variable, *aliases = (prefix + _make_key(name).upper() for name in (self.name, *self.aliases))
        return (
            (variable, VARIABLE_BY_SETTING[self.field], *aliases)
            if self.field in VARIABLE_BY_SETTING
            else (variable, *aliases)
        )

    def convert(self, text: str, origin: str) -> Any:
        """Convert and check a flag value. `origin` names the flag or environment variable in error messages."""
        kind = VALUE_KINDS[self.kind]
        try:
            value = kind.convert(text)
        except (ValueError, OverflowError, KeyError):
            shown_value = "the value" if self.is_secret else repr(text[:100])
            raise ConfigError(f"{origin}: {shown_value} is not {kind.expected}") from None
        if not self.choices:
            return value
        value = LOG_LEVEL_ALIASES.get(text.lower(), text.lower())
        if value == "pbase":
            raise ConfigError(f"{origin}: Predibase's registry is not supported; use {', '.join(self.choices)}")
        if value not in self.choices:
            raise ConfigError(f"{origin}: {text[:100]!r} is not one of {', '.join(self.choices)}")
        return value


def _make_key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


# --- Value kinds ------------------------------------------------------------------------------------------------------


class ValueKind(NamedTuple):
    convert: Callable[[str], Any]
    expected: str
    metavar: str


def _parse_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ValueError
    number, unit = match[1], SIZE_UNITS[match[2]]
    return int(float(number) * unit) if "." in number else int(number) * unit


VALUE_KINDS: Mapping[str, ValueKind] = {
    "text": ValueKind(str, "text", "TEXT"),
    "integer": ValueKind(int, "a whole number", "N"),
    "number": ValueKind(_parse_number, "a number", "X"),
    "size": ValueKind(parse_size, "a size such as 4096, 512M or 4G", "SIZE"),
    "switch": ValueKind(lambda text: RawConfigParser.BOOLEAN_STATES[text.lower()], "true or false", "true|false"),
    "path": ValueKind(lambda text: Path(text).expanduser(), "a path", "PATH"),
}
VALUE_KIND_BY_TYPE = {bool: "switch", float: "number", int: "integer", Path: "path"}


# --- Flags ------------------------------------------------------------------------------------------------------------


def make_flags(settings: type) -> Iterator[Flag]:
    """Yield a flag for each field with a `Setting`, except inherited fields."""
    for field in fields(settings):
        setting: config.Setting | None = field.metadata.get("setting")
        if setting is None or field.name not in settings.__annotations__:
            continue
        repeats = isinstance(field.default, tuple)
        stem = field.name.removesuffix("s") if repeats else field.name  # singular, because each flag sets one value
        value_type = (get_args(field.type) or (field.type,))[0]  # int for `int | None` and `tuple[int, ...]`
        kind = VALUE_KIND_BY_TYPE.get(value_type, "text")
        yield Flag(
            FLAG_NAMES.get(field.name) or setting.flag or f"--{stem.replace('_', '-')}",
            setting.help + "; repeatable" * repeats,
            "size" if field.name.endswith("_bytes") else kind,
            settings,
            field.name,
            _format_default(field.name, field.default) or setting.none,
            repeats,
            setting.choices,
            is_secret=not field.repr,
            has_env_prefix=field.name not in FLAG_NAMES,
            aliases=setting.aliases,
        )


def name_flags(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return the error of a settings class with the names of flags or variables instead of field names."""
    message = re.sub(r"(?<![\w-])\w+(?= = | ')", lambda match: names.get(match[0], match[0]), str(error))
    return ConfigError(message)


def _format_default(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if name.endswith("_bytes") and value:
        unit = max((unit for unit in SIZE_UNITS if value % SIZE_UNITS[unit] == 0), key=SIZE_UNITS.__getitem__)
        return f"{value // SIZE_UNITS[unit]}{unit.upper()}"
    if isinstance(value, bool):
        return "true" if value else ""
    return "" if value is None else str(value)


FLAG_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model and adapters": (
        Flag("--model-id", "base model: a hub id, id@revision, or a folder; s3://bucket/path with --source s3"),
        Flag("--source", "source of the model", choices=("hub", "s3"), default="hub"),
        Flag("--weights-cache-override", "use the model in this folder instead of downloading it", "path"),
        *make_flags(config.ServerConfig),
        Flag("--adapter-source", "source of --adapter-id", choices=ADAPTER_SOURCES, default="hub"),
        Flag(
            "--preloaded-adapter-source",
            "source of preloaded adapters",
            choices=ADAPTER_SOURCES,
            default="--adapter-source",
        ),
        Flag(
            "--trust-remote-code",
            "not supported: checkpoint code is never executed",
            "switch",
            rejection_reason="checkpoint code is never executed; omit the flag if the architecture is supported",
        ),
    ),
    "adapter sources": (
        *make_flags(config.SourceConfig),
        Flag(
            "--use-global-hf-token",
            "use the server's hub token for requests without one",
            "switch",
            has_env_prefix=True,
        ),
    ),
    "network and access": (*make_flags(config.AccessConfig), *make_flags(config.CorsConfig)),
    "limits": (
        *make_flags(config.LimitsConfig),
        Flag("--replicas", "servers on this machine behind one address; requires Ray", "integer", has_env_prefix=True),
    ),
    "memory and speed": (
        *make_flags(config.ModelConfig),
        *make_flags(config.EngineConfig),
        Flag("--sharded", "use tensor parallelism over several GPUs", "switch"),
    ),
    "logging and other": (
        *make_flags(config.LogConfig),
        Flag("--env", "print versions and hardware at startup", "switch"),
        Flag("--download-only", "download the model and exit", "switch"),
    ),
    "LoRAX compatibility": (
        Flag("--watermark-gamma", f"fixed: {WATERMARK_REASON}", "number"),
        Flag("--watermark-delta", f"fixed: {WATERMARK_REASON}", "number"),
        *(Flag(name, ignored_reason=reason) for reason, names in IGNORED_FLAGS.items() for name in names),
    ),
}
FLAGS = tuple(flag for group in FLAG_GROUPS.values() for flag in group)


# --- Parser -----------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError` for invalid arguments and suggests the most similar flag."""

    def __init__(self, **settings: Any) -> None:
        # Widen the flag column, and keep line breaks in descriptions.
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36)
        super().__init__(allow_abbrev=False, formatter_class=formatter, **settings)

    def add_version_flag(self) -> None:
        self.add_argument("-V", "--version", action="version", version=f"lorax_server {__version__}")

    def add_json_flag(self) -> None:
        self.add_argument("--json", metavar="FILE", help="also write the figures as JSON to a file; - prints only JSON")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown and not unknown[0].startswith("-"):
            is_server = "--model-id" in self._option_string_actions
            hint = f"use --model-id {unknown[0]}" if is_server else "put quotes around the prompt, or see --help"
            self.error(f"unexpected argument {unknown[0]!r}; {hint}")
        if unknown:
            names = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], names, 1)
            self.error(
                f"{unknown[0]!r} is not a known flag; " + (f"did you mean {close[0]}?" if close else "see --help")
            )
        return arguments


def write_json(figures: Mapping[str, Any], path: str) -> None:
    """Write results as JSON to a file, or to standard output if `path` is `-`."""
    text = json.dumps(figures, indent=2)
    if path == "-":
        print(text)
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path!r} cannot be written: {error.strerror}") from error


def build_parser(command: str) -> Parser:
    """Build the parser for `serve` or `launcher`. Parsed values are strings."""
    program = PROGRAMS[command]
    parser = Parser(
        prog=program,
        usage=f"{program} [--model-id MODEL] [flags]",
        description="Serve a base model with its adapters over HTTP.",
        epilog=f"{_list_ignored_flags()}\n{EXAMPLES.format(program=program)}",
    )
    parser.add_version_flag()
    for title, flags in FLAG_GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag, command)
    return parser


def _add_flag(group: Any, flag: Flag, command: str) -> None:
    launcher_default = LAUNCHER_DEFAULTS.get(flag.key) if command == "launcher" else None
    default = _format_default("", launcher_default) or DEFAULT_DESCRIPTIONS.get(flag.key) or flag.default
    notes = [f" (default: {default})"] * bool(default) + [f" [{name}]" for name in flag.variables[:1]]
    text = argparse.SUPPRESS if flag.ignored_reason else (flag.help + "".join(notes)).replace("%", "%%")
    optional = {"nargs": "?", "const": "true"} if flag.kind == "switch" or flag.ignored_reason else {}
    metavar = "|".join(flag.choices) or VALUE_KINDS[flag.kind].metavar
    names = (*SHORT_FLAGS.get(flag.name, ()), flag.name)
    group.add_argument(*names, dest=flag.key, action="append", metavar=metavar, help=text, **optional)
    if flag.aliases:
        group.add_argument(*flag.aliases, dest=flag.key, action="append", help=argparse.SUPPRESS, **optional)
    if flag.name == "--hub":
        group.add_argument("--no-hub", dest="hub", action="append_const", const="false", help=argparse.SUPPRESS)


def _list_ignored_flags() -> str:
    """Return a help text that lists the ignored flags by reason."""
    lines = (f"  {', '.join(names)}: {reason}\n" for reason, names in IGNORED_FLAGS.items())
    return "LoRAX flags that are accepted and ignored:\n" + "".join(lines)
