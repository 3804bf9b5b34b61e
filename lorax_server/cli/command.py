"""The `lorax` and `lorax-launcher` commands. Slow modules are imported only by the commands that use them."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lorax_server import __version__
from lorax_server.cli.environment import check_packages
from lorax_server.cli.flags import Parser, name_flags
from lorax_server.cli.packaged_models import find_local_model
from lorax_server.cli.settings import ParsedSettings, parse
from lorax_server.config import ModelConfig, ServerConfig
from lorax_server.errors import ConfigError, LoraxError
from lorax_server.files.draft_heads import read_draft_head_sizes
from lorax_server.files.model_files import check_model_files
from lorax_server.model_types import check_model_config
from lorax_server.pooling import GENERATE, find_task
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.schemas.examples import read_examples

logger = logging.getLogger(__name__)

REPORTED_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton", "huggingface_hub")
DEVICE_PROBE_CODE = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
COMMANDS = {
    "serve": "start a server",
    "chat": "chat with a model or an adapter",
    "generate": "respond to one prompt, or complete a text",
    "adapters": "list, load, unload and pin adapters",
    "bench": "measure a server under load",
    "plan": "estimate the GPUs that some traffic needs",
    "download": "download a model and its adapters",
    "convert-adapter": "convert a GGUF adapter for use with this server",
}
COMMAND_ALIASES = {
    "download-weights": "download",  # the name in LoRAX
    "pull": "download",
    "list": "adapters",
    "ls": "adapters",
    "ps": "adapters",
    "start": "serve",
    "help": "--help",
    "version": "--version",
}
COMMAND_HINTS = {
    "run": "`lorax serve --model-id MODEL` starts a server, and `lorax chat` chats with it",
    "stop": "press Ctrl+C in the terminal of `lorax serve`, or send SIGTERM to its process",
    "models": "`lorax adapters` lists the adapters of a server, and GET /v1/models also lists the base model",
    **dict.fromkeys(("load", "unload", "pin", "unpin"), "use `lorax adapters load|unload|pin|unpin NAME`"),
    "train": "train adapters with PEFT, and save them to a subfolder of --adapters-dir",
    **dict.fromkeys(("ui", "web", "playground"), "start `lorax serve`, and open the address that it prints"),
}
HELP_TEXT = """\
commands:
{commands}

examples:
  lorax serve                                    a small bundled model with six adapters
  lorax serve --model-id Qwen/Qwen2.5-0.5B-Instruct --adapters-dir ./adapters
  lorax chat --adapter poet
  lorax generate "Write a haiku." --adapter poet

lorax COMMAND --help describes a command. lorax-launcher is lorax serve with the defaults of LoRAX.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lorax`."""
    return run_program("lorax", lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def launcher(argv: Sequence[str] | None = None) -> int:
    """Run `lorax-launcher`."""
    return run_program("lorax-launcher", lambda: _serve(list(sys.argv[1:] if argv is None else argv), "launcher"))


def run_program(program: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 for a configuration error, 1 for other errors.

    Error messages are printed on one line.
    """
    try:
        return run()
    except SystemExit as error:  # raised by --help and --version
        return int(error.code or 0)
    except LoraxError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the process that reads the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(argv: list[str]) -> int:
    command = COMMAND_ALIASES.get(argv[0], argv[0]) if argv else "--help"
    if command == "--help" and argv[1:] and COMMAND_ALIASES.get(argv[1], argv[1]) in COMMANDS:  # lorax help COMMAND
        return _dispatch([argv[1], "--help"])
    if command not in COMMANDS:
        _make_parser().parse_args([command])
        raise ConfigError(f"unknown command {command!r}; {_suggest_command(command)}")
    if command == "serve":
        return _serve(argv[1:], "serve")
    if command == "download":
        return _download_weights(argv[1:])
    if command == "convert-adapter":
        return _convert_adapter(argv[1:])
    if command == "plan":
        from lorax_server.cli.planning.command import run as plan  # noqa: PLC0415 - slow

        return plan(argv[1:])
    from lorax_server.cli.client import run  # noqa: PLC0415 - slow

    return run(command, argv[1:], os.environ)


def _suggest_command(command: str) -> str:
    similar = get_close_matches(command, [*COMMANDS, *COMMAND_ALIASES], 1)
    if command in COMMAND_HINTS or not similar:
        return COMMAND_HINTS.get(command, f"use one of {', '.join(COMMANDS)}")
    return f"did you mean `lorax {COMMAND_ALIASES.get(similar[0], similar[0])}`?"


def _make_parser() -> Parser:
    commands = "\n".join(f"  {name:18}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="lorax",
        usage="lorax COMMAND ...",
        description="Serve one language model with thousands of adapters.",
        epilog=HELP_TEXT.format(commands=commands),
    )
    parser.add_version_flag()
    parser.add_argument("command", nargs="?", help="one of the commands below")
    return parser


def _serve(argv: list[str], command: str) -> int:
    parsed = _parse(argv, os.environ, command)
    if parsed.values.get("download_only"):
        return _download(parsed)
    if parsed.values.get("replicas", 1) != 1:
        return _serve_replicas(argv, parsed.values["replicas"])
    config = _resolve_config(parsed)
    from lorax_server.launch import serve_forever  # noqa: PLC0415 - slow

    return serve_forever(config)


def read_config(argv: list[str], environ: Mapping[str, str]) -> ServerConfig:
    """Parse `lorax serve` flags, download the model if necessary, and return the server configuration."""
    return _resolve_config(_parse(argv, environ, "serve"))


def _resolve_config(parsed: ParsedSettings) -> ServerConfig:
    _check_files(parsed.make_config(None))
    folder = _find_model(parsed)
    return parsed.make_config(folder, "cpu" if parsed.values.get("device") == "cpu" else detect_device())


def _check_files(config: ServerConfig) -> None:
    """Raise if a file in the settings is invalid. This is called before the model is downloaded."""
    KeyRing(config.api_keys, config.admin_key, config.keys_file)
    read_examples(config.examples)
    if config.engine.draft_heads is not None:
        read_draft_head_sizes(config.engine.draft_heads)


def _serve_replicas(argv: list[str], count: int) -> int:
    """Replace this process with `lorax_server.scale.command`, which imports Ray."""
    if count < 1:
        raise ConfigError(f"--replicas = {count} must be at least 1")
    if find_spec("ray") is None:
        raise ConfigError("--replicas needs Ray: pip install 'lorax_server[ray]'")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "lorax_server.scale.command", *argv])


def _download_weights(argv: list[str]) -> int:
    parser = Parser(
        prog="lorax download",
        usage="lorax download MODEL_ID [flags]",
        description="Download a model and its adapters into the cache, and print the model folder.",
        epilog="Accepts the `lorax serve` flags for models, adapters and sources, such as --revision, --source,\n"
        "--adapter-id, --adapter-source and --huggingface-hub-cache.",
    )
    parser.add_argument("model_id", metavar="MODEL_ID", help="a hub id, id@revision, or s3://bucket/path")
    parser.add_argument("--api-token", metavar="TEXT", help="hub token; prefer the environment variable HF_TOKEN")
    parser.add_argument("--extension", default=".safetensors", help="must be .safetensors")
    for name in ("--auto-convert", "--logger-level"):
        parser.add_argument(name, nargs="?", help="accepted from LoRAX, without effect")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.extension != ".safetensors":
        raise ConfigError(
            f"--extension {arguments.extension!r} is not supported: only .safetensors files are downloaded"
        )
    environ = dict(os.environ) | ({"HUGGING_FACE_HUB_TOKEN": arguments.api_token} if arguments.api_token else {})
    return _download(_parse(["--model-id", arguments.model_id, *flags], environ, "serve"))


def _convert_adapter(argv: list[str]) -> int:
    parser = Parser(
        prog="lorax convert-adapter",
        usage="lorax convert-adapter ADAPTER.gguf FOLDER --model-id BASE [flags]",
        description="Convert a GGUF LoRA adapter to a folder in PEFT's format, which the server can load.",
        epilog="Accepts the `lorax serve` flags for models, such as --revision and --source.",
    )
    parser.add_argument("adapter", type=Path, metavar="ADAPTER.gguf", help="adapter from llama.cpp's converter")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new adapter folder, usually below --adapters-dir")
    arguments, flags = parser.parse_known_args(argv)
    parsed = _parse(flags, os.environ, "serve")
    from lorax_server.models.registry import load_config  # noqa: PLC0415 - both imports are slow
    from lorax_server.weights.gguf_adapter import convert_adapter  # noqa: PLC0415

    base = load_config(ModelConfig(_find_model(parsed)))
    convert_adapter(arguments.adapter, base, arguments.folder)
    print(arguments.folder)
    return 0


def _parse(argv: list[str], environ: Mapping[str, str], command: str) -> ParsedSettings:
    """Parse flags and environment variables, check them before any download, and return the settings."""
    parsed = parse(argv, environ, command)
    check_packages()
    for warning in parsed.warnings:
        logger.warning(warning)
    if parsed.values.get("env"):
        print(describe_installation(), flush=True)
    parsed.make_config(None)
    return parsed


def _download(parsed: ParsedSettings) -> int:
    """Download the model and the adapters that the server loads at startup. Return the exit code."""
    folder = _find_model(parsed)
    config = parsed.make_config(folder)
    if config.engine.preload:
        from lorax_server.adapters.sources.source import AdapterSources  # noqa: PLC0415 - both imports are slow
        from lorax_server.build import build_sources  # noqa: PLC0415

        sources = AdapterSources(build_sources(config.engine.sources), max_bytes=config.engine.sources.max_bytes)
        for source, adapter_id in config.engine.preload:
            sources.fetch(source, adapter_id, parsed.token if source == "hub" else None, lambda *_: None)
    print(folder)
    return 0


def _find_model(parsed: ParsedSettings) -> Path:
    """Return the model folder. Check the model's config before its weights are downloaded or loaded."""
    values, is_s3 = parsed.values, parsed.model_source == "s3"
    location = str(values.get("weights_cache_override", parsed.model_location))
    settings = parsed.make_config(None).engine.model

    def check(folder: Path) -> None:
        def generates(config: Mapping[str, Any]) -> bool:
            return find_task(folder, config, parsed.values.get("task", "auto")) == GENERATE

        try:
            check_model_config(
                folder, parsed.model_id, settings=settings, needs_adapters=parsed.has_adapters, generates=generates
            )
        except ConfigError as error:
            raise name_flags(error, {"quantize": parsed.origins.get("quantize", "--quantize")}) from error

    if (path := find_local_model(location)) is not None:
        folder = path
        if path.is_file() or any(path.glob("*.gguf")):
            from lorax_server.gguf.model_folder import find_model_folder  # noqa: PLC0415 - slow

            folder = find_model_folder(path)
        check(folder)
        check_model_files(folder)
        return folder
    from lorax_server.cli.download import find_model  # noqa: PLC0415 - slow

    return find_model(
        location,
        parsed.revision,
        parsed.model_source,
        parsed.cache,
        parsed.token,
        values.get("s3_endpoint" if is_s3 else "hub_endpoint"),
        values.get("hub_offline", False),
        check=check,
    )


def detect_device() -> str:
    """Return `cuda` if torch can use a GPU, else `cpu`. Runs in a subprocess, because the API process does not import
    torch."""
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", DEVICE_PROBE_CODE], capture_output=True, text=True, timeout=120, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"cannot detect a GPU: set --device cpu or --device cuda ({error})") from error
    return probe.stdout.strip()


def describe_installation() -> str:
    """Return software versions and hardware as text, for bug reports."""
    lines = [f"lorax_server {__version__}", f"Python {platform.python_version()}", platform.platform()]
    for package in REPORTED_PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join([*lines, _describe_gpus()])


def _describe_gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
