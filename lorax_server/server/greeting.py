"""What a newcomer sees when the demo is ready: where the page is, and three commands to paste."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

GREETING = """
  {model} is ready, with {count} adapters: {names}.

  Playground    {url}/ui
  API           {url}/docs

  In another terminal:

    {commands}

  Ctrl+C stops it. Your own model: {program} serve --model-id MODEL --adapters-dir FOLDER
"""
SHOWN = 2  # by the command of ours; one more by curl


def write_greeting(url: str, model: str, names: Sequence[str], examples: Path) -> str:
    """The first example, as commands. `names`: all adapters that there are."""
    first, *_ = json.loads(examples.read_text())
    adapters = [name for name in first["models"] if name != "base"]
    program = _find_program()
    place = "" if url.endswith(":3000") else f" --url {url}"
    commands = [f"{program} generate{place} --adapter {name} {quote(first['prompt'])}" for name in adapters[:SHOWN]]
    body = json.dumps({"model": adapters[SHOWN], "messages": [{"role": "user", "content": first["prompt"]}]})
    commands.append(f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d {quote(body)}")
    return GREETING.format(
        model=model,
        url=url,
        count=len(names),
        names=", ".join(names),
        program=program,
        commands="\n\n    ".join(commands),
    )


def _find_program() -> str:
    """As it can be typed from here: the environment it is in may not be active."""
    if shutil.which("lorax"):
        return "lorax"
    program = Path(sys.executable).parent / "lorax"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
