"""`LLM` with models for embeddings, classification and scores."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import torch

from lorax_server.errors import ContextLengthError, InputError, NotSupportedError
from lorax_server.generation.pooled_results import (
    SCORE_INSTRUCTION,
    SCORE_SUFFIX,
    SLICE_CHARACTERS,
    Entity,
    encode_inputs,
    prepare_pair,
    slice_inputs,
    to_entities,
)
from lorax_server.llm import LLM
from lorax_server.pooling import CLASSIFY, SCORE, TOKEN_CLASSIFY, PoolingConfig
from lorax_server.text.tokenizer import load_tokenizer
from lorax_server.types import Pooled
from tests.parity.test_pooled_models import save_adapter
from tests.pooled import make_model, save_tokenizer, save_transformer_folder

TEXTS = ["john smith lives in paris", "the cat"]
pytestmark = pytest.mark.usefixtures("forked_engines")


def test_embed_applies_adapters_and_dimensions(tmp_path: Path) -> None:
    model = make_model("bert", "Model", tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    save_transformer_folder(tmp_path / "model", "cls", prompts={"query": "query "})
    tuned = save_adapter(make_model("bert", "Model"), tmp_path / "tuned", target_modules=["query"])
    with LLM(tmp_path / "model", {"tuned": tmp_path / "tuned"}, device="cpu") as llm:
        shown = io.StringIO()
        with redirect_stderr(shown):
            actual = llm.embed(TEXTS, adapter=["tuned", None], progress=True)
        assert "2/2" in shown.getvalue()
        with torch.no_grad():
            for each, text, row in zip((tuned, model), TEXTS, actual, strict=True):
                expected = each(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0].numpy()
                assert np.abs(row - expected).max() < 1e-5
        ids = tokenizer(TEXTS[1])["input_ids"]
        assert (llm.embed(ids) == llm.embed(TEXTS[1])).all()
        assert llm.embed(TEXTS[1], dimensions=4).shape == (1, 4)
        assert llm.embed("cat " * 100, truncate=True).shape == (1, 32)
        with pytest.raises(ContextLengthError, match="at most 64 tokens"):
            llm.embed("cat " * 100)
        with pytest.raises(InputError, match="`prompt_name` has no effect on token IDs"):
            llm.embed(ids, prompt_name="query")
        with pytest.raises(InputError, match="1 prompts, but 2 adapters"):
            llm.embed("a", adapter=["tuned", None])
        for call in (lambda: llm.generate("a"), lambda: llm.classify("a"), lambda: next(llm.stream("a"))):
            with pytest.raises(NotSupportedError, match="loaded with task = embed"):
                call()


def test_score_matches_transformers(tmp_path: Path) -> None:
    model = make_model("bert", "ForSequenceClassification", tmp_path, num_labels=1)
    tokenizer = save_tokenizer(tmp_path)
    with torch.no_grad(), LLM(tmp_path, device="cpu") as llm:
        pairs = tokenizer(["cat"] * 2, TEXTS, return_tensors="pt", padding=True)
        expected = model(**pairs).logits[:, 0].sigmoid().numpy()
        assert np.abs(np.array(llm.score("cat", TEXTS)) - expected).max() < 1e-5
        assert [[label[0] for label in labels] for labels in llm.classify("the cat")] == [["LABEL_0"]]


def test_classify_returns_entities(tmp_path: Path) -> None:
    make_model("bert", "ForTokenClassification", tmp_path, num_labels=3)
    save_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu") as llm:
        (entities,) = llm.classify([TEXTS[0]])
        assert entities
        assert all(isinstance(each, Entity) and each.word == TEXTS[0][each.start : each.end] for each in entities)


def test_score_prompt_contains_texts_unchanged() -> None:
    """Braces in a text must not be formatted."""
    text = prepare_pair("{document}", "{query} {}", PoolingConfig(SCORE))
    assert f"<Instruct>: {SCORE_INSTRUCTION}\n<Query>: {{document}}\n<Document>: {{query}} {{}}<|im_end|>" in text


def test_instruction_without_effect_is_rejected() -> None:
    with pytest.raises(InputError, match="`instruction` has no effect"):
        prepare_pair("a", "b", PoolingConfig(CLASSIFY), "rank by length")


def test_truncated_score_prompt_keeps_its_suffix(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer, config = load_tokenizer(tmp_path), PoolingConfig(SCORE)
    suffix = tokenizer.encode(SCORE_SUFFIX, add_special_tokens=False)
    text, limit = prepare_pair("cat", "the dog " * 200, config), 300
    (whole,) = encode_inputs(tokenizer, [text], config, 10_000, truncate=True)
    (result,) = encode_inputs(tokenizer, [text], config, limit, truncate=True)
    assert whole.ids == tokenizer.encode(text)
    num_kept = limit - len(suffix) - 1
    assert result.ids == [*whole.ids[:num_kept], *suffix, tokenizer.token_to_id("[SEP]")]
    with pytest.raises(ContextLengthError):
        encode_inputs(tokenizer, [text], config, len(suffix), truncate=True)


def test_truncated_text_has_no_entity_at_last_special_token(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    config, text = PoolingConfig(TOKEN_CLASSIFY, labels=("O", "B-LOC")), "the cat lives in paris"
    (encoded,) = encode_inputs(load_tokenizer(tmp_path), [text], config, 4, truncate=True)
    assert encoded.spans[1:3] == [(0, 3), (4, 7)]
    assert encoded.is_special == [True, False, False, True]
    logits = np.array([[0, 9], [9, 0], [0, 9], [0, 9]], np.float32)
    (entity,) = to_entities(Pooled(logits.tobytes(), logits.shape), config, text, encoded)
    assert entity[2:] == ("cat", 4, 7)


def test_slices_limit_characters_and_inputs_per_batch() -> None:
    half = SLICE_CHARACTERS // 2
    assert slice_inputs([half, half, 1, 10 * half, 1]) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert slice_inputs([1] * 130) == [slice(0, 64), slice(64, 128), slice(128, 130)]
