"""`NextTokenChooser` with parameters from protobuf messages."""

import math
from typing import Any

import pytest
import torch

from lorax_server.errors import InputError
from lorax_server.models.contract.next_token_chooser import NextTokenChooser, params_from_pb
from lorax_server.pb.generate_pb2 import LogitBias, NextTokenChooserParameters
from lorax_server.types import MAX_SEED, SamplingParams, StopParams
from tests.optional import present


def params(**fields: Any) -> SamplingParams:
    return params_from_pb(NextTokenChooserParameters(**fields))


def test_empty_message_gives_default_parameters() -> None:
    assert params() == SamplingParams(temperature=0.0)
    assert params().is_greedy


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "seed": 3}, False),
        ({"temperature": 1.0, "repetition_penalty": 1.2}, False),
        ({"temperature": 1.0, "watermark": True, "frequency_penalty": 1.0, "return_k_alternatives": 3}, False),
        ({"temperature": 1.0, "do_sample": True}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 1.5}, True),
        ({"temperature": 1e-30}, True),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"temperature": 1.0, "typical_p": 0.9}, True),
        ({"temperature": 1.0, "min_p": 0.1}, True),
        ({"temperature": 0.0, "do_sample": True}, False),
        ({"temperature": 0.0, "top_p": 0.9}, False),
        ({"temperature": 0.0, "top_k": 10}, False),
        ({"temperature": 0.0, "typical_p": 0.3, "min_p": 0.2, "do_sample": True}, False),
    ],
    ids=str,
)
def test_do_sample_rule_matches_lorax(fields: dict[str, Any], samples: bool) -> None:
    assert params(**fields).is_greedy is not samples


def test_all_fields_are_converted() -> None:
    result = params(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        do_sample=True,
        seed=MAX_SEED,
        repetition_penalty=1.5,
        frequency_penalty=-1.25,
        presence_penalty=2.0,
        watermark=True,
        return_k_alternatives=4,
        min_p=0.125,
        logit_bias=[LogitBias(token_id=3, bias=-1.5), LogitBias(token_id=0, bias=2.0)],
        raw_logprobs=True,
    )
    assert result == SamplingParams(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-1.25,
        presence_penalty=2.0,
        logit_bias={3: -1.5, 0: 2.0},
        watermark=True,
        seed=MAX_SEED,
        num_alternatives=4,
        raw_logprobs=True,
    )


def test_parameters_survive_protobuf_round_trip() -> None:
    sent = NextTokenChooserParameters(temperature=0.7, seed=2**63, logit_bias=[LogitBias(token_id=2**32 - 1, bias=1.0)])
    received = NextTokenChooserParameters.FromString(sent.SerializeToString())
    assert params_from_pb(received) == params_from_pb(sent)
    assert params_from_pb(received).seed == 2**63


@pytest.mark.parametrize("schema", ["{}", '{"type": "object"}'])
def test_schema_is_rejected(schema: str) -> None:
    with pytest.raises(InputError, match="`schema`: structured output is not supported yet"):
        params(schema=schema)


def test_empty_schema_is_accepted() -> None:
    assert params(schema="") == params()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.5, math.nan, math.inf, -math.inf)],
        *[("top_p", value) for value in (-0.1, 1.5, math.nan, math.inf)],
        *[("typical_p", value) for value in (-0.1, 1.5, math.nan)],
        *[("min_p", value) for value in (-0.1, 1.5, math.nan)],
        *[("repetition_penalty", value) for value in (-1.0, math.nan, math.inf)],
        *[(f"{kind}_penalty", value) for kind in ("frequency", "presence") for value in (-2.5, 2.5, math.nan)],
        *[("logit_bias", [LogitBias(token_id=1, bias=value)]) for value in (math.nan, math.inf, -math.inf)],
    ],
    ids=str,
)
def test_unsupported_values_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"`{field}`"):
        params(**{field: value})


def test_float32_rounding_stays_within_bounds() -> None:
    result = params(temperature=0.1, top_p=0.9999999999, typical_p=0.9999999999, min_p=1.0, frequency_penalty=2.0)
    assert (result.top_p, result.typical_p, result.min_p, result.frequency_penalty) == (1.0, 1.0, 1.0, 2.0)


def test_from_pb_equals_constructor(device: torch.device) -> None:
    message = NextTokenChooserParameters(temperature=1.3, seed=11, repetition_penalty=1.2, return_k_alternatives=2)
    stop = StopParams(min_new_tokens=2, eos_token_ids=frozenset({4}))
    ids, scores = torch.tensor([[1, 2, 3]], device=device), torch.randn(1, 9, device=device)
    actual = NextTokenChooser.from_pb(message, stop, prompt_length=2)(ids, scores)
    expected = NextTokenChooser(params_from_pb(message), stop, prompt_length=2)(ids, scores)
    assert torch.equal(actual.token_ids, expected.token_ids)
    assert torch.equal(actual.logprobs, expected.logprobs)
    assert present(actual.alternatives).by_row() == present(expected.alternatives).by_row()


def test_bias_outside_vocabulary_is_rejected(device: torch.device) -> None:
    chooser = NextTokenChooser.from_pb(NextTokenChooserParameters(logit_bias=[LogitBias(token_id=9, bias=1.0)]))
    with pytest.raises(InputError, match="token ID 9 is outside the vocabulary of 9"):
        chooser(torch.tensor([[1]], device=device), torch.zeros(1, 9, device=device))


def test_chooser_is_reusable_for_different_vocabulary_sizes(device: torch.device) -> None:
    chooser = NextTokenChooser(SamplingParams(do_sample=True, seed=5), prompt_length=1)
    ids, scores = torch.tensor([[1, 2]], device=device), torch.randn(1, 50, device=device)
    first, again = chooser(ids, scores), chooser(ids, scores)
    assert torch.equal(first.token_ids, again.token_ids)
    assert torch.equal(first.logprobs, again.logprobs)
    assert chooser(ids, scores[:, :3]).token_ids.item() < 3


def test_each_position_is_sampled_independently(device: torch.device) -> None:
    chooser = NextTokenChooser(SamplingParams(do_sample=True, seed=5), prompt_length=3)
    scores = torch.zeros(1, 1000, device=device)
    drawn = [
        chooser(torch.zeros(1, 3 + n, dtype=torch.int64, device=device), scores).token_ids.item() for n in range(9)
    ]
    assert len(set(drawn)) == 9


def test_sampling_position_ignores_prompt_length(device: torch.device) -> None:
    scores = torch.randn(1, 1000, device=device)
    drawn = set()
    for prompt_length in (1, 5, 30):
        chooser = NextTokenChooser(SamplingParams(do_sample=True, seed=5), prompt_length=prompt_length)
        ids = torch.zeros(1, prompt_length + 2, dtype=torch.int64, device=device)
        drawn.add(chooser(ids, scores).token_ids.item())
    assert len(drawn) == 1


def test_only_repetition_penalty_counts_prompt_tokens(device: torch.device) -> None:
    ids, scores = torch.tensor([[0, 0, 0, 1]], device=device), torch.tensor([[4.0, 3.5, 3.0]], device=device)

    def chosen(**parameters: Any) -> int:
        return int(NextTokenChooser(SamplingParams(**parameters), prompt_length=3)(ids, scores).token_ids)

    assert chosen() == 0
    assert chosen(repetition_penalty=1.5) == 2  # prompt and generated token
    assert chosen(frequency_penalty=1.0) == 0  # only token 1 was generated
    assert chosen(presence_penalty=1.0) == 0
