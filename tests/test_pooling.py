"""Pooling of hidden states, and settings read from model folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.config import ModelConfig
from lorax_server.errors import ConfigError
from lorax_server.models.pooled_model import pool
from lorax_server.pooling import _has_token_types, read_pooling


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_sums_of_long_sequences_are_exact_in_half_precision(mode: str) -> None:
    """The sum of 1,000 position weights is larger than the largest float16 number."""
    states = torch.ones(1000, 4, dtype=torch.float16)
    expected = 1000**0.5 if mode == "mean_sqrt_len_tokens" else 1.0
    pooled = pool(states, [1000], mode)
    assert pooled.dtype == torch.float16
    torch.testing.assert_close(pooled.float(), torch.full((1, 4), expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_each_sequence_is_pooled_separately(mode: str) -> None:
    lengths = [1, 7, 300, 2]
    hidden = torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(0))
    expected = []
    for states in hidden.double().split(lengths):
        factors = torch.arange(1, len(states) + 1)[:, None]
        expected.append(
            {
                "cls": states[0],
                "lasttoken": states[-1],
                "max": states.amax(0),
                "mean": states.mean(0),
                "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
                "weightedmean": (factors * states).sum(0) / factors.sum(),
            }[mode]
        )
    pooled = pool(hidden, lengths, mode)
    torch.testing.assert_close(pooled.double(), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert torch.equal(pool(hidden[8:308], [300], mode)[0], pooled[2])


def test_unknown_pooling_mode_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'median' is not supported"):
        pool(torch.zeros(2, 3), [2], "median")


@pytest.mark.parametrize(
    ("tokenizer", "model_type", "expected"),
    [
        ({"do_lower_case": True}, "bert", True),
        (None, "bert", True),
        (None, "roberta", False),
        ({"tokenizer_class": "BertTokenizerFast"}, "mpnet", True),
        ({"model_input_names": ["input_ids", "attention_mask"]}, "bert", False),
    ],
)
def test_token_types_follow_tokenizer_then_model_type(
    tokenizer: dict[str, Any] | None, model_type: str, expected: bool, tmp_path: Path
) -> None:
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert _has_token_types(tmp_path, {"model_type": model_type}) == expected


def write_config(folder: Path, name: str = "config.json", **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def read(folder: Path) -> Any:
    return read_pooling(ModelConfig(folder))


@pytest.mark.parametrize(
    ("stored", "tokenizer", "expected"),
    [
        ({}, {}, None),
        ({"max_seq_length": 256}, {"model_max_length": 512}, 256),
        ({"transformer_task": "feature-extraction"}, {"model_max_length": 128}, 128),  # sentence-transformers 6
        ({"max_seq_length": None}, {"model_max_length": 1000000000000000019884624838656}, None),
    ],
)
@pytest.mark.parametrize("suffix", ["Model", "ForSequenceClassification"])
def test_maximum_tokens_follow_sentence_transformers(
    stored: dict[str, Any], tokenizer: dict[str, Any], expected: int | None, suffix: str, tmp_path: Path
) -> None:
    write_config(tmp_path, model_type="bert", architectures=[f"Bert{suffix}"])
    write_config(tmp_path, "sentence_bert_config.json", **stored)
    write_config(tmp_path, "tokenizer_config.json", **tokenizer)
    assert read(tmp_path).max_tokens == expected


@pytest.mark.parametrize(
    ("fields", "newest", "expected"),
    [
        ({}, {}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, "none"),
        ({}, {"activation_fn": "torch.nn.modules.linear.Identity"}, "none"),  # sentence-transformers 6
        ({}, {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_activation_of_cross_encoders(
    fields: dict[str, Any], newest: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    write_config(tmp_path, model_type="bert", architectures=["BertForSequenceClassification"], **fields)
    write_config(tmp_path, "config_sentence_transformers.json", **newest)
    assert read(tmp_path).score_activation == expected


def test_default_prompts_of_cross_encoders_are_rejected(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="bert", architectures=["BertForSequenceClassification"])
    write_config(tmp_path, "config_sentence_transformers.json", prompts={"a": "b"}, default_prompt_name="a")
    with pytest.raises(ConfigError, match="default_prompt_name is not supported for classification models"):
        read(tmp_path)
