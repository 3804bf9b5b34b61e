"""Pooling of hidden states, and settings read from model folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lorax_server.models.pooled_model import pool
from lorax_server.pooling import _has_token_types


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len_tokens", "weightedmean"])
def test_sums_of_long_sequences_are_exact_in_half_precision(mode: str) -> None:
    """The sum of 1,000 position weights is larger than the largest float16 number."""
    states = torch.ones(1000, 4, dtype=torch.float16)
    expected = 1000**0.5 if mode == "mean_sqrt_len_tokens" else 1.0
    pooled = pool(states, mode)
    assert pooled.dtype == torch.float16
    torch.testing.assert_close(pooled.float(), torch.full((4,), expected), rtol=1e-3, atol=0)


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
