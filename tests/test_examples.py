"""The example scripts run, and the server loads their results."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig

from lorax_server.llm import LLM
from lorax_server.types import StopParams
from tests.gguf import writer
from tests.gguf.test_tokenizer import END, train_byte_level

ROOT = Path(__file__).parent.parent
TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}<|im_end|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
PROMPT = f"user: Who are you?{END}assistant: "


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny chat model in a GGUF file. Its weights are float32, because kernels for blocks round activations."""
    monkeypatch.setenv("LORAX_CACHE", str(tmp_path / "cache"))
    vocabulary = train_byte_level()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(vocabulary.tokens),
        tie_word_embeddings=True,
        initializer_range=0.3,
    )

    def write_tokens(new: gguf.GGUFWriter) -> None:
        new.add_tokenizer_model("gpt2")
        new.add_tokenizer_pre("smollm")
        new.add_token_list(vocabulary.tokens)
        new.add_token_types(vocabulary.types)
        new.add_token_merges(vocabulary.merges)
        new.add_eos_token_id(vocabulary.tokens.index(END))
        new.add_chat_template(TEMPLATE)

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    writer.write_model(tmp_path / "model.gguf", base, lambda _: Type.F32, write_tokens=write_tokens)
    return tmp_path / "model.gguf"


@pytest.mark.slow
def test_trained_adapter_is_served(model: Path, tmp_path: Path) -> None:
    command = ["examples/train_lora.py", "--model", str(model), "--data", "examples/pirate.jsonl", "--steps", "3"]
    command += ["--out", str(tmp_path / "pirate"), "--learning-rate", "0.05"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 3 of 3: loss " in done.stdout
    stop = StopParams(max_new_tokens=12, ignore_eos=True)
    with LLM(model, {"pirate": tmp_path / "pirate"}, device="cpu", cache_bytes=2**20) as llm:
        base, adapted = llm.generate([PROMPT] * 2, stop=stop, adapter=[None, "pirate"])
        ids = llm._tokenizer.encode(PROMPT)
    assert base.token_ids != adapted.token_ids
    assert adapted.token_ids == generate_with_peft(model, tmp_path / "pirate", ids)


def generate_with_peft(model: Path, adapter: Path, ids: list[int]) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
        oracle: Any = PeftModel.from_pretrained(base, adapter).eval()
    tokens = oracle.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    result: list[int] = tokens[0, len(ids) :].tolist()
    return result


def test_documented_commands_exist() -> None:
    page = (ROOT / "docs" / "train-an-adapter.md").read_text()
    scripts = re.findall(r"python (\S+\.py)", page)
    assert scripts
    for name in (*scripts, *re.findall(r"--data (\S+)", page)):
        assert (ROOT / name).is_file()


def test_training_data_is_chat_messages() -> None:
    for line in (ROOT / "examples" / "pirate.jsonl").read_text().splitlines():
        assert [each["role"] for each in json.loads(line)] == ["user", "assistant"]
