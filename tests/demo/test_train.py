"""Run the training script at a small scale and serve the result."""

import json
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from demo import train
from lorax_server.llm import LLM
from lorax_server.types import StopParams


def run_training(arguments: list[str]) -> None:
    sys.argv = ["demo.train", *arguments]
    train.main()


@pytest.mark.slow
def test_short_training_produces_servable_model_and_adapters(tmp_path: Path, forks: ForkServerContext) -> None:
    names = ("json", "pirate")  # special cases: DoRA and patterns
    arguments = ["--rehearsal", "--float32", "--device", "cpu", "--processes", "1", "--out", str(tmp_path)]
    process = forks.Process(target=run_training, args=([*arguments, "--only", "base", *names],))
    process.start()
    process.join()
    assert process.exitcode == 0
    adapters = {name: tmp_path / "adapters" / name for name in names}
    for folder in adapters.values():
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "lorax-demo"
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with LLM(tmp_path / "model", adapters={name: str(folder) for name, folder in adapters.items()}) as llm:
        answers = llm.generate(["Hello"] * 3, stop=StopParams(max_new_tokens=2), adapter=[*adapters, None])
    assert all(1 <= len(answer.token_ids) <= 2 for answer in answers)
