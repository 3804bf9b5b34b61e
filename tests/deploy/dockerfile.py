"""A parser for our Dockerfile."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Stage:
    """Instructions between two FROM lines, and the base stage or image."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def read_stages(path: Path = ROOT / "Dockerfile") -> dict[str, Stage]:
    """Return the stages by name, in order."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for word, rest in _read_instructions(path.read_text()):
        if word == "FROM":
            base, kind, name = rest.split()
            assert kind == "AS"
            stages[name] = stage = Stage(name, base)
        elif stage is not None:
            stage.instructions.append((word, rest))
    return stages


def all_instructions(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """Return the instructions of all base stages and the stage itself."""
    stage = stages[name]
    before = all_instructions(stages, stage.base) if stage.base in stages else []
    return [*before, *stage.instructions]


def values(instructions: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for result, rest in instructions if result == word]


def variables(instructions: list[tuple[str, str]]) -> dict[str, str]:
    pairs = (pair.partition("=") for rest in values(instructions, "ENV") for pair in shlex.split(rest))
    return {name: value for name, _, value in pairs}


def words(text: str) -> list[str]:
    """Return the arguments in JSON form."""
    parsed = json.loads(text)
    assert isinstance(parsed, list)
    return parsed


def _read_instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in joined.splitlines())
    return [(word, rest.strip()) for word, rest in pairs]
