"""Checks that both surfaces share."""

from pathlib import Path

import pytest

from lorax_server.config import EngineConfig, ModelConfig, ServerConfig
from lorax_server.errors import InputError, NotSupportedError
from lorax_server.server.checks import (
    MAX_LOGPROBS_PER_REQUEST,
    MAX_STOP_CHARACTERS,
    check_logprobs,
    check_stop_strings,
    reject_unsupported_value,
)
from lorax_server.server.routes import lorax, openai
from lorax_server.server.schemas.lorax import GenerateParameters
from lorax_server.server.schemas.openai import CompletionRequest
from tests.server.bench import Bench

CONFIG = ServerConfig(EngineConfig(ModelConfig(Path("model"))), "model")


def test_stops_are_few_and_short() -> None:
    check_stop_strings(["a" * MAX_STOP_CHARACTERS] * 4, CONFIG)
    with pytest.raises(InputError, match=r"up to 4 stop sequences\. Given: 5"):
        check_stop_strings(["a"] * 5, CONFIG)
    with pytest.raises(InputError, match=r"at most 1024 characters\. Given: 1025"):
        check_stop_strings(["a", "a" * (MAX_STOP_CHARACTERS + 1)], CONFIG)


def test_both_surfaces_look_at_stops() -> None:
    service = Bench().service
    long = ["a" * (MAX_STOP_CHARACTERS + 1)]
    with pytest.raises(InputError, match="1025"):
        lorax.to_options(service, "hello", GenerateParameters(stop=long), False)
    with pytest.raises(InputError, match="1025"):
        openai.check_stop_conditions(service, CompletionRequest(model="", prompt="a", stop=long))
    many = CompletionRequest(model="", prompt="a", stop_token_ids=list(range(1025)))
    with pytest.raises(InputError, match="`stop_token_ids` supports up to 1024 tokens"):
        openai.check_stop_conditions(service, many)


def test_log_probabilities_fit_into_memory() -> None:
    check_logprobs(MAX_LOGPROBS_PER_REQUEST)
    with pytest.raises(InputError, match="could return 1000001 log probabilities; the limit is 1000000"):
        check_logprobs(MAX_LOGPROBS_PER_REQUEST + 1)


def test_what_is_not_there_yet() -> None:
    reject_unsupported_value(None, "nothing")
    with pytest.raises(NotSupportedError, match="`tools` is not supported yet"):
        reject_unsupported_value([{}], "`tools`")
