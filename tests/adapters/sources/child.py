"""Run scripts in child processes."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[3]


def run_children(count: int, script: str, *arguments: object, **environment: str) -> list[str]:
    """Run several processes concurrently and return their outputs."""
    code = "import sys\nfrom pathlib import Path\n" + dedent(script)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    for child, (_, errors) in zip(children, outputs, strict=True):
        assert child.returncode == 0, errors
    return [output for output, _ in outputs]


def run_child(script: str, *arguments: object, **environment: str) -> str:
    return run_children(1, script, *arguments, **environment)[0]
