"""Request parameters: invalid values are rejected with a message that names the parameter."""

import math
import re
from typing import Any

import pytest

from lorax_server.errors import InputError
from lorax_server.types import MAX_SEED, SamplingParams, StopParams

NO_NUMBER: list[Any] = ["1", "", b"1", None, [1], {}, True, False, 1j, object()]
NOT_FINITE: list[Any] = [math.nan, math.inf, -math.inf, 10**400, -(10**400), 1e39, -1e39]
NO_COUNT: list[Any] = [*NO_NUMBER, -1, -(10**400), 0.0, 1.0, 1.5, math.nan, math.inf]
NO_FLAG: list[Any] = ["false", "", 0, 1, None, 0.0, []]

# Each parameter, its name in messages, valid values and invalid values.
NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e-6, 1, 2.5, 1e6], [-1e-9, -1]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2]),
    "min_p": ([0, 0.0, 0.5, 1, 1.0], [-1e-9, 1.0000001]),
    "typical_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0000001, 2]),
    "repetition_penalty": ([1e-3, 0.5, 1, 1000], [0, 0.0, -1, 1e-45, 1e-4, 1001]),
    "frequency_penalty": ([-2, -0.5, 0, 2.0], [-2.0000001, 2.0000001, 3]),
    "presence_penalty": ([-2, -0.5, 0, 2.0], [-2.0000001, 2.0000001, 3]),
}
COUNTS: dict[str, tuple[str, list[Any], list[Any]]] = {
    "top_k": ("top_k", [0, 1, 2**31, 10**30], []),
    "seed": ("seed", [0, 1, MAX_SEED], [MAX_SEED + 1, 10**400]),
    "num_alternatives": ("return_k_alternatives", [0, 1, 50], []),
}
MAPPINGS: list[Any] = ["", "5", 5, None, [(1, 2.0)], {1}]
BIASES: list[Any] = [{key: 1.0} for key in NO_COUNT if key.__hash__]
BIASES += [{1: bias} for bias in (*NO_NUMBER, *NOT_FINITE)]


def check_rejected(kind: type, field: str, value: Any, named: str) -> None:
    with pytest.raises(InputError, match=f"`{named}`"):
        kind(**{field: value})


@pytest.mark.parametrize("field", NUMBERS)
def test_sampling_numbers_out_of_range_are_rejected(field: str) -> None:
    good, bad = NUMBERS[field]
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in (*bad, *NO_NUMBER, *NOT_FINITE):
        check_rejected(SamplingParams, field, value, field)


@pytest.mark.parametrize("value", [1e39, math.inf])
def test_temperature_error_names_limit(value: float) -> None:
    with pytest.raises(InputError, match=rf"^`temperature` must be <= 3\.40282e\+38 \(got {re.escape(str(value))}\)$"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("field", COUNTS)
def test_invalid_integer_sampling_params_are_rejected(field: str) -> None:
    named, good, bad = COUNTS[field]
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in (*bad, *NO_COUNT):
        check_rejected(SamplingParams, field, value, named)


@pytest.mark.parametrize("field", ["do_sample", "watermark", "raw_logprobs"])
def test_non_boolean_sampling_flags_are_rejected(field: str) -> None:
    settings: dict[str, Any] = {field: True}
    assert getattr(SamplingParams(**settings), field) is True
    for value in NO_FLAG:
        check_rejected(SamplingParams, field, value, field)


def test_invalid_logit_bias_is_rejected() -> None:
    assert SamplingParams(logit_bias={0: -100, 5: 1.5}).logit_bias == {0: -100, 5: 1.5}
    for value in (*MAPPINGS, *BIASES):
        check_rejected(SamplingParams, "logit_bias", value, "logit_bias")


def test_logit_bias_error_names_token() -> None:
    wrong: Any = {"5": 1.0}
    with pytest.raises(InputError, match="keyed by token IDs, not '5'"):
        SamplingParams(logit_bias=wrong)
    with pytest.raises(InputError, match="of token 5 must be a number >= -1e"):
        SamplingParams(logit_bias={5: math.inf})


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=0.5), True),
        (SamplingParams(do_sample=True), False),
        (SamplingParams(do_sample=True, temperature=0), True),
        (SamplingParams(do_sample=True, temperature=0.0, top_k=5), True),
    ],
)
def test_sampling_is_greedy_without_do_sample_or_temperature(params: SamplingParams, greedy: bool) -> None:
    assert params.is_greedy is greedy


def test_invalid_token_limits_are_rejected() -> None:
    assert StopParams(max_new_tokens=10**30, min_new_tokens=10**30).min_new_tokens == 10**30
    for value in (0, *NO_COUNT):
        check_rejected(StopParams, "max_new_tokens", value, "max_new_tokens")
    for value in NO_COUNT:
        check_rejected(StopParams, "min_new_tokens", value, "min_new_tokens")


def test_minimum_above_maximum_is_rejected() -> None:
    assert StopParams(max_new_tokens=5, min_new_tokens=5).min_new_tokens == 5
    with pytest.raises(InputError, match=r"`min_new_tokens` \(6\) must be <= `max_new_tokens` \(5\)"):
        StopParams(max_new_tokens=5, min_new_tokens=6)


@pytest.mark.parametrize("field", ["eos_token_ids", "stop_token_ids"])
def test_invalid_stop_token_ids_are_rejected(field: str) -> None:
    settings: dict[str, Any] = {field: frozenset({0, 5})}
    assert getattr(StopParams(**settings), field) == {0, 5}
    for token in NO_COUNT:
        if token.__hash__:
            check_rejected(StopParams, field, frozenset({token}), field)
    for value in (5, None, "5", "", b"5", [5]):
        check_rejected(StopParams, field, value, field)


def test_invalid_stop_strings_are_rejected() -> None:
    assert StopParams(stop_strings=("\n", " ")).stop_strings == ("\n", " ")
    for value in (("a", ""), ("",), (None,), (5,), (b"a",), (True,), (["a"],), None, 5, True):
        check_rejected(StopParams, "stop_strings", value, "stop")


def test_single_string_is_not_a_list() -> None:
    check_rejected(StopParams, "stop_strings", "stop", "stop")


@pytest.mark.parametrize("field", ["ignore_eos", "include_stop"])
def test_non_boolean_stop_flags_are_rejected(field: str) -> None:
    settings: dict[str, Any] = {field: True}
    assert getattr(StopParams(**settings), field) is True
    for value in NO_FLAG:
        check_rejected(StopParams, field, value, field)


def test_ignore_eos_excludes_eos_from_stop_token_ids() -> None:
    both: dict[str, Any] = {"eos_token_ids": frozenset({1, 2}), "stop_token_ids": frozenset({2, 3})}
    assert StopParams(**both).all_stop_token_ids == {1, 2, 3}
    assert StopParams(**both, ignore_eos=True).all_stop_token_ids == {2, 3}
    assert StopParams().all_stop_token_ids == frozenset()


@pytest.mark.parametrize("kind", [SamplingParams, StopParams])
def test_parameters_are_frozen_with_valid_defaults(kind: type) -> None:
    params = kind()
    with pytest.raises(AttributeError):
        params.anything = 1
    assert params == kind()
