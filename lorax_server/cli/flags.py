"""From a command line and the environment to settings. What flags there are says `flag_table`.

Flags win over environment variables, and an empty value is none. Nothing is read here but what is handed in.
"""

import argparse
import difflib
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lorax_server import __version__
from lorax_server.cli import demo
from lorax_server.cli.flag_table import FLAGS, REFUSED_VARIABLES, TABLE, UNUSED_VARIABLES, WATERMARK, Flag
from lorax_server.cli.settings import HOSTS, ORIGINS, Parsed
from lorax_server.config import CorsConfig, EngineConfig, ModelConfig, ServerConfig, SourceConfig
from lorax_server.errors import ConfigError

LAUNCHER_MODEL = "mistralai/Mistral-7B-Instruct-v0.1"
PROGRAMS = {"serve": "lorax serve", "launcher": "lorax-launcher"}
SOURCES = ("hub", "local", "s3")
TOKENS = ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "HF_API_TOKEN")
SETTINGS: Mapping[str, type] = {
    "model": ModelConfig, "sources": SourceConfig, "engine": EngineConfig, "server": ServerConfig, "cors": CorsConfig
}  # fmt: skip
WATERMARK_VALUES = {"watermark_gamma": 0.5, "watermark_delta": 2.0}
LEVELS = {"warn": "warning", "trace": "debug"}
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
METAVARS = {"integer": "N", "number": "X", "size": "SIZE", "switch": "true|false", "path": "PATH"}
EXAMPLES = """\
examples:
  {program} --model-id Qwen/Qwen2.5-0.5B-Instruct                      a model of the hub
  {program} --model-id ./my-model --adapters-dir ./my-adapters         folders; each subfolder is an adapter
  {program} --model-id ./my-model --num-shard 2 --quantize fp8-kv      over two GPUs
  LORAX_API_KEY=secret {program} --model-id ./my-model -p 8080         callers need a key

Every flag can be given as the environment variable in its brackets; the flag wins.
"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Wider than argparse's, and what is written in lines stays so."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, by an error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
            self.error(f"{unknown[0]!r} is not known; " + (f"is it {close[0]}?" if close else "see --help"))
        return found


class Given(NamedTuple):
    """A value, and who gave it, for messages."""

    value: Any
    origin: str


def parse(argv: Sequence[str], environ: Mapping[str, str], command: str) -> Parsed:
    """Read all that is given. `command` is `serve` or `launcher`."""
    given = _read(argv, environ, command)
    warnings = (*_check(given, environ), *_check_pairs(given))
    values = {key: found.value for key, found in given.items()}
    is_demo = demo.is_asked_for(command, values)
    if is_demo:
        values = demo.add_settings(values)
    model_id, revision = _split_revision(values.get("model_id", LAUNCHER_MODEL), values.get("revision"))
    token = next((environ[name].strip() for name in TOKENS if environ.get(name, "").strip()), None)
    is_shared = _variable(environ, "LORAX_USE_GLOBAL_HF_TOKEN")
    return Parsed(
        command=command,
        values=values,
        warnings=warnings,
        model_id=model_id,
        revision=revision,
        cache=values.get("huggingface_hub_cache") or Path(environ.get("HOME") or Path.home(), ".cache/lorax"),
        token=token,
        adapter_token=token if is_shared else None,
        is_offline=_variable(environ, "HF_HUB_OFFLINE"),
        s3_endpoint=values.get("s3_endpoint") or _s3_endpoint(environ),
        num_shard=_num_shard(values, _count_gpus(environ)),
        num_visible=_count_gpus(environ),
        is_demo=is_demo,
    )


def build_parser(command: str) -> Parser:
    """For `--help` and for telling flags apart; what their values mean is not its business."""
    program = PROGRAMS[command]
    parser = Parser(
        prog=program,
        usage=f"{program} [--model-id MODEL] [flags]",
        description="Serve a base model and its adapters over HTTP.",
        epilog=f"{_list_unused()}\n{EXAMPLES.format(program=program)}",
    )
    parser.add_argument("-V", "--version", action="version", version=f"lorax_server {__version__}")
    for title, flags in TABLE.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, command)
    return parser


# --- Reading ----------------------------------------------------------------------------------------------------------


def _add(group: Any, flag: Flag, command: str) -> None:
    default = _default(flag, command)
    notes = [f" (default: {default})"] * bool(default) + [f" [{name}]" for name in flag.variables[:1]]
    text = argparse.SUPPRESS if flag.instead else (flag.help + "".join(notes)).replace("%", "%%")
    names = [name for name in (flag.short, flag.name) if name]
    optional = {"nargs": "?", "const": "true"} if flag.kind == "switch" else {}
    metavar = "|".join(flag.choices) or METAVARS.get(flag.kind, "TEXT")
    group.add_argument(*names, dest=flag.key, action="append", metavar=metavar, help=text, **optional)
    if flag.name == "--hub":
        group.add_argument("--no-hub", dest="hub", action="append_const", const="false", help=argparse.SUPPRESS)


def _list_unused() -> str:
    """What has no effect, by why: help for those who come from LoRAX, short for all others."""
    by_reason: dict[str, list[str]] = {}
    for flag in FLAGS:
        if flag.instead:
            by_reason.setdefault(flag.instead, []).append(flag.name)
    lines = [
        line
        for reason, names in by_reason.items()
        for line in textwrap.wrap(
            f"{', '.join(names)}: {reason}", 100, break_on_hyphens=False, subsequent_indent="    "
        )
    ]
    return "\n  ".join(["accepted from LoRAX, without effect:", *lines]) + "\n"


def _default(flag: Flag, command: str) -> str:
    """What the settings say, unless it is nothing that a user could give."""
    if flag.name == "--hostname":
        return HOSTS[command]
    if flag.name == "--cors-allow-origin":
        return ", ".join(ORIGINS[command]) or "only the server's own pages"
    if flag.name == "--model-id":
        return LAUNCHER_MODEL if command == "launcher" else "a small one that is part of the package"
    settings, _, name = flag.to.partition(".")
    value = next((found.default for found in fields(SETTINGS[settings]) if found.name == name), None) if name else None
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value is None or isinstance(value, bool) else str(value)


def _read(argv: Sequence[str], environ: Mapping[str, str], command: str) -> dict[str, Given]:
    found = vars(build_parser(command).parse_args(list(argv)))
    given = {}
    for flag in FLAGS:
        texts, origin = found[flag.key], flag.name
        if texts is None:
            texts, origin = _from_environment(flag, environ)
        texts = [text for text in texts if text != ""]
        if texts:
            values = [_convert(flag, text, origin) for text in texts]
            given[flag.key] = Given(tuple(values) if flag.repeats else values[-1], origin)
    return given


def _from_environment(flag: Flag, environ: Mapping[str, str]) -> tuple[list[str], str]:
    name = next((name for name in flag.variables if environ.get(name, "").strip()), None)
    text = environ[name].strip() if name else ""
    # Containers set it to their name, which is nothing to listen on.
    if name is None or (name == "HOSTNAME" and not _is_address(text)):
        return [], ""
    texts = text.split(",") if flag.repeats and not flag.is_secret else [text]
    return [text.strip() for text in texts], f"the environment variable {name}"


def _convert(flag: Flag, text: str, origin: str) -> Any:
    try:
        value = CONVERT[flag.kind](text)
    except (ValueError, OverflowError):
        shown = "what it is given" if flag.is_secret else repr(text[:100])
        raise ConfigError(f"{origin}: {shown} is not {EXPECTED[flag.kind]}") from None
    if flag.key.endswith("_source"):
        return _check_kind(text.lower(), origin)
    if flag.choices:
        value = LEVELS.get(text.lower(), text.lower())
        if value not in flag.choices:
            raise ConfigError(f"{origin}: {text[:100]!r} is not one of {', '.join(flag.choices)}")
    return value


def _check_kind(source: str, origin: str) -> str:
    if source == "pbase":
        raise ConfigError(f"{origin}: Predibase's registry is not supported; use hub, local or s3")
    if source not in SOURCES:
        raise ConfigError(f"{origin}: {source[:100]!r} is not one of {', '.join(SOURCES)}")
    return source


def _to_switch(text: str) -> bool:
    for value, words in ((True, ("true", "1", "yes", "on")), (False, ("false", "0", "no", "off"))):
        if text.strip().lower() in words:
            return value
    raise ValueError


def _to_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _to_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if found is None:
        raise ValueError
    return int(found[1]) * UNITS[found[2]] if "." not in found[1] else int(float(found[1]) * UNITS[found[2]])


CONVERT: Mapping[str, Any] = {
    "text": str,
    "integer": int,
    "number": _to_number,
    "size": _to_size,
    "switch": _to_switch,
    "path": lambda text: Path(text).expanduser(),
}
EXPECTED = {
    "integer": "a whole number",
    "number": "a number",
    "size": "a size such as 4096, 512M or 4G",
    "switch": "true or false",
}


# --- What does not go together ----------------------------------------------------------------------------------------


def _check(given: Mapping[str, Given], environ: Mapping[str, str]) -> Iterator[str]:
    """Refuse what would change answers and cannot be honoured; warn of what has no effect."""
    for flag in FLAGS:
        value, origin = given.get(flag.key, (None, ""))
        if flag.refusal and value:
            raise ConfigError(f"{origin}: {flag.refusal}")
        if value is not None and value != WATERMARK_VALUES.get(flag.key, value):
            raise ConfigError(f"{origin} = {value} cannot be changed: {WATERMARK}")
        if flag.instead and value is not None:
            yield f"{origin} has no effect: {flag.instead}"
    for name in filter(environ.get, REFUSED_VARIABLES):
        raise ConfigError(f"the environment variable {name}: {REFUSED_VARIABLES[name]}")
    for name in filter(environ.get, UNUSED_VARIABLES):
        yield f"the environment variable {name} has no effect: {UNUSED_VARIABLES[name]}"


def _check_pairs(given: Mapping[str, Given]) -> Iterator[str]:
    for one, other in (("cache_bytes", "max_batch_total_tokens"), ("adapter_bytes", "adapter_memory_fraction")):
        if one in given and other in given:
            raise ConfigError(f"give {given[one].origin} or {given[other].origin}, not both")
    if "num_shard" in given and "sharded" in given and not given["sharded"].value and given["num_shard"].value > 1:
        yield f"{given['num_shard'].origin} has no effect: {given['sharded'].origin} is false"


def _split_revision(model_id: str, revision: str | None) -> tuple[str, str | None]:
    """`id@revision` of a hub; a path is left alone."""
    if "@" not in model_id or model_id.startswith(("/", ".", "~", "s3:")):
        return model_id, revision
    name, _, found = model_id.partition("@")
    if not name or not found:
        raise ConfigError(f"--model-id {model_id!r} must have a name before the @ and a revision after it")
    if revision is not None:
        raise ConfigError(f"--model-id {model_id!r} says which revision already: leave --revision out")
    return name, found


def _num_shard(values: Mapping[str, Any], visible: int) -> int | None:
    """How many ranks were asked for; None: nobody did."""
    is_sharded, count = values.get("sharded"), values.get("num_shard")
    if count is not None and count < 1:
        raise ConfigError(f"--num-shard = {count} must be at least 1")
    if is_sharded is False:
        return 1
    if is_sharded and (count or visible) <= 1:
        counted = (
            "--num-shard is 1" if count else "neither CUDA_VISIBLE_DEVICES nor NVIDIA_VISIBLE_DEVICES lists several"
        )
        raise ConfigError(f"--sharded needs more than one GPU, and {counted}: give --num-shard")
    return count or (visible if is_sharded else None)


def _count_gpus(environ: Mapping[str, str]) -> int:
    """Those that are listed; a word such as `all` does not say how many."""
    text = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES") or ""
    count = 0
    for name in text.split(","):
        if not re.fullmatch(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*", name, re.ASCII):
            break  # CUDA sees nothing from here on either
        count += 1
    return count


def _s3_endpoint(environ: Mapping[str, str]) -> str | None:
    account = environ.get("R2_ACCOUNT_ID", "").strip()
    return (
        f"https://{account}.r2.cloudflarestorage.com" if account else environ.get("S3_ENDPOINT_URL", "").strip() or None
    )


def _variable(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip()
    try:
        return _to_switch(text) if text else False
    except ValueError:
        raise ConfigError(f"the environment variable {name}: {text[:100]!r} is not true or false") from None


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
