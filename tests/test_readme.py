"""The README is true: its Python runs, its commands exist, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import VOCAB, make_tokenizer, save

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_runs(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    save(tmp_path / "my-model", model, make_tokenizer())
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "my-adapter")
    found = blocks("python")
    assert found
    for block in found:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(" tokens: ") == 2


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
