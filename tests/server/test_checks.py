"""Checks shared by the LoRAX and OpenAI routes."""

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
from tests.server.service_harness import ServiceHarness

CONFIG = ServerConfig(EngineConfig(ModelConfig(Path("model"))), "model")


def test_too_many_or_long_stop_strings_are_rejected() -> None:
    check_stop_strings(["a" * MAX_STOP_CHARACTERS] * 4, CONFIG)
    with pytest.raises(InputError, match=r"up to 4 stop sequences\. Given: 5"):
        check_stop_strings(["a"] * 5, CONFIG)
    with pytest.raises(InputError, match=r"at most 1024 characters\. Given: 1025"):
        check_stop_strings(["a", "a" * (MAX_STOP_CHARACTERS + 1)], CONFIG)


def test_all_routes_check_stop_strings() -> None:
    service = ServiceHarness().service
    long = ["a" * (MAX_STOP_CHARACTERS + 1)]
    with pytest.raises(InputError, match="1025"):
        lorax.to_options(service, "hello", GenerateParameters(stop=long), False)
    with pytest.raises(InputError, match="1025"):
        openai.check_stop_conditions(service, CompletionRequest(model="", prompt="a", stop=long))
    many = CompletionRequest(model="", prompt="a", stop_token_ids=list(range(1025)))
    with pytest.raises(InputError, match="`stop_token_ids` supports up to 1024 tokens"):
        openai.check_stop_conditions(service, many)


def test_too_many_log_probabilities_are_rejected() -> None:
    check_logprobs(MAX_LOGPROBS_PER_REQUEST)
    with pytest.raises(InputError, match="could return 1000001 log probabilities; the limit is 1000000"):
        check_logprobs(MAX_LOGPROBS_PER_REQUEST + 1)


def test_unsupported_parameter_values_are_rejected() -> None:
    reject_unsupported_value(None, "nothing")
    with pytest.raises(NotSupportedError, match="`tools` is not supported yet"):
        reject_unsupported_value([{}], "`tools`")
