"""The kernels for quantized weights and for mixtures of experts can be compiled for GPUs. This needs no GPU, and finds
errors that Triton's interpreter does not find.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "capability", "count"),
    [
        ("compile_quantized", 80, 42),
        ("compile_quantized", 90, 42),
        ("compile_experts", 80, 42),
        ("compile_experts", 90, 48),
    ],
)
def test_kernels_compile(module: str, capability: int, count: int, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.triton.{module}", str(capability)]
    environ |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["compiled", str(count)]
