"""The README is true: its Python runs, its commands exist, its links lead somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import VOCAB, make_tokenizer, save

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def write_model(folder: Path, adapter: str) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    save(folder / "my-model", model, make_tokenizer())
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder / adapter)


def test_python_runs(tmp_path: Path) -> None:
    write_model(tmp_path, "my-adapter")
    found = blocks("python")
    assert found
    for block in found:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" tokens: ") == 2


def test_the_server_starts_and_answers(tmp_path: Path) -> None:
    write_model(tmp_path, "my-adapters/poet")
    (block,) = blocks("bash")
    serve, *questions = block.splitlines()
    assert len(questions) == 3
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with started(serve, tmp_path, path) as url:
        for question in questions:
            done = subprocess.run(
                question.replace("localhost:3000", url),
                shell=True,
                cwd=tmp_path,
                env={**os.environ, "PATH": path, "LORAX_URL": url},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout
            assert "error" not in done.stdout


@contextmanager
def started(command: str, folder: Path, path: str) -> Iterator[str]:
    """Its command as it is, but for the port; its address when it is ready."""
    environment = {**os.environ, "PATH": path, "PORT": "0"}
    with subprocess.Popen(command.split(), cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = next(filter(None, (re.search(r"ready: (http://\S+)", line) for line in process.stderr)))
            yield ready[1]
            process.terminate()
            process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.parametrize("command", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_exist(command: str) -> None:
    """Each is a target of the Makefile; running `make test` in a test of its own would not end."""
    program, target = command.split("#", maxsplit=1)[0].split()
    assert program == "make"
    done = subprocess.run([program, "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https)(.*?)\)", README)
    assert links
    assert all((ROOT / link).is_file() for link in links)
