import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that it starts")
def test_the_kernels_pass_their_tests_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
