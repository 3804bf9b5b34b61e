"""The training script, in small: everything is made, and can be served."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lorax_server.llm import LLM
from lorax_server.types import StopParams

ROOT = Path(__file__).parent.parent.parent


def test_a_rehearsal_makes_a_model_and_adapters_that_can_be_served(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.train", "--rehearsal", "--float32", "--device", "cpu", "--processes", "1"]
    environ = os.environ | {"TORCH_COMPILE_DISABLE": "1"}  # which would take longer than all the rest
    names = ("json", "pirate")  # DoRA and patterns: what is special
    command += ["--out", str(tmp_path), "--only", "base", *names]
    subprocess.run(command, cwd=ROOT, env=environ, check=True)
    adapters = {name: tmp_path / "adapters" / name for name in names}
    for folder in adapters.values():
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "lorax-demo"
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with LLM(tmp_path / "model", adapters={name: str(folder) for name, folder in adapters.items()}) as llm:
        answers = llm.generate(["Hello"] * 3, stop=StopParams(max_new_tokens=2), adapter=[*adapters, None])
    assert all(1 <= len(answer.token_ids) <= 2 for answer in answers)
