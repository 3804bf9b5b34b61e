import io
import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
import uvicorn

from lorax_server.errors import ConfigError
from lorax_server.server.telemetry.logs import EXTRA_KEY, configure_logging, log_request
from lorax_server.server.telemetry.request_record import RequestRecord

NASTY = 'a\nb\r\x0b\x0c\x1c\x85\u2028\u2029\x1b[2J\x00\ud800\u202e"quoted"\\n = end'
UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
LINE_ENDS = re.compile("[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Reset the root and uvicorn loggers as in a new process, and restore them afterwards."""
    loggers = [logging.getLogger(name) for name in ("", *UVICORN)]
    before = [(each, each.handlers, each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.handlers, each.propagate = [], True  # pytest's handlers must not be closed
        each.setLevel(logging.NOTSET)
    yield
    for each, handlers, level, propagate in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def start(json_logs: bool, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, json_logs, stream)
    return stream


def lines(stream: io.StringIO) -> list[str]:
    written = stream.getvalue()
    assert written.endswith("\n")
    return written[:-1].split("\n")


def only_line(stream: io.StringIO) -> str:
    (line,) = lines(stream)
    assert not LINE_ENDS.search(line)
    line.encode()
    return line


def request(**changes: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "key": "alice",
        "adapter_id": "poet",
        "identity": "0123456789abcdef" * 4,
        "status": 200,
        "finish_reasons": ["length", "eos_token"],
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "total_s": 1.6,
        "validation_s": 0.1,
        "adapter_s": 0.2,
        "queue_s": 0.5,
        "first_token_s": 0.25,
        "inference_s": 1.0,
    }
    return RequestRecord("id-1", "/generate", **(known | changes))


def fields_of(stream: io.StringIO) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(only_line(stream))["fields"]
    return fields


# --- Form -------------------------------------------------------------------------------------------------------------


def test_text_format_is_one_line_with_fields() -> None:
    stream = start(json_logs=False)
    logging.getLogger("some.where").warning(
        "%d bottles", 99, extra={EXTRA_KEY: {"a": 1, "b": "x y", "c": "", "d": None}}
    )
    time, rest = only_line(stream).split(" ", 1)
    assert datetime.fromisoformat(time).utcoffset() == timedelta(0)
    assert rest == 'WARNING some.where 99 bottles a=1 b="x y" c="" d=null'


def test_json_format_contains_message_and_fields() -> None:
    stream = start(json_logs=True)
    fields = {"a": 1, "b": "x y", "c": None, "d": True, "e": float("nan"), "f": {1}}
    logging.getLogger("some.where").error("%d bottles", 99, extra={EXTRA_KEY: fields})
    line = json.loads(only_line(stream), parse_constant=pytest.fail)
    assert datetime.fromisoformat(line.pop("timestamp")).utcoffset() == timedelta(0)
    assert line == {
        "level": "ERROR",
        "logger": "some.where",
        "message": "99 bottles",
        "fields": {"a": 1, "b": "x y", "c": None, "d": True, "e": "nan", "f": "{1}"},
    }


@pytest.mark.parametrize("json_logs", [False, True])
def test_control_characters_are_escaped(json_logs: bool) -> None:
    stream = start(json_logs)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logging.getLogger().exception(
            "message %s", NASTY, extra={EXTRA_KEY: {"value": NASTY, NASTY: 1}}, stack_info=True
        )
    line = only_line(stream)
    assert line.isprintable()
    assert "ValueError" in line
    if json_logs:
        written = json.loads(line)
        assert written["message"] == f"message {NASTY}"
        assert written["fields"] == {"value": NASTY, NASTY: 1}
        assert written["exception"].startswith("Traceback (most recent call last):\n")
        assert "Stack (most recent call last):\n" in written["exception"]


def test_quotes_in_values_are_escaped() -> None:
    stream = start(json_logs=False)
    logging.getLogger().info(
        "m", extra={EXTRA_KEY: {"adapter": 'x" status="500', "path": "a\\", "plain": "owner/name@v1"}}
    )
    assert only_line(stream).endswith(r'm adapter="x\" status=\"500" path="a\\" plain=owner/name@v1')


def test_log_level_filters_lines() -> None:
    stream = start(json_logs=False, level="WARNING")
    logging.getLogger("a").info("no")
    log_request(request())
    logging.getLogger("a").warning("yes")
    assert only_line(stream).endswith("yes")
    with pytest.raises(ConfigError, match="unknown log level 'loud'; use one of debug, info"):
        configure_logging("loud", False)


def test_uvicorn_logs_are_formatted_once() -> None:
    start(json_logs=False)
    stream = start(json_logs=True)  # the second time instead of the first
    uvicorn.Config("none:none", log_config=None)
    for name in UVICORN:
        logging.getLogger(name).info("hello")
    assert [json.loads(line)["logger"] for line in lines(stream)] == list(UVICORN)


# --- Requests ---------------------------------------------------------------------------------------------------------


def test_request_is_logged_as_json() -> None:
    stream = start(json_logs=True)
    log_request(request())
    assert json.loads(only_line(stream))["message"] == "request"
    assert fields_of(stream) == {
        "request_id": "id-1",
        "route": "/generate",
        "status": 200,
        "error_type": "",
        "key": "alice",
        "source": "",
        "adapter": "poet",
        "adapter_hash": "0123456789ab",
        "is_streamed": False,
        "is_dropped": False,
        "num_choices": 1,
        "finish_reasons": "length,eos_token",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "drafted_tokens": 0,
        "skipped_tokens": 0,
        "max_new_tokens": 0,
        "total_ms": 1600.0,
        "validation_ms": 100.0,
        "adapter_ms": 200.0,
        "queue_ms": 500.0,
        "first_token_ms": 250.0,
        "inference_ms": 1000.0,
    }


def test_request_is_logged_as_text() -> None:
    stream = start(json_logs=False)
    log_request(request(adapter_id="my poet", first_token_s=None, total_s=float("inf")))
    line = only_line(stream)
    assert (
        'INFO lorax_server.server.telemetry.logs request request_id=id-1 route=/generate status=200 error_type="" '
        in line
    )
    assert ' adapter="my poet" adapter_hash=0123456789ab is_streamed=false ' in line
    assert " total_ms=null " in line
    assert " first_token_ms=null " in line


@pytest.mark.parametrize("json_logs", [False, True])
def test_prompts_are_logged_only_if_recorded(json_logs: bool) -> None:
    stream = start(json_logs)
    log_request(request())
    assert "prompt=" not in only_line(stream)
    assert '"prompt"' not in only_line(stream)
    stream = start(json_logs)
    log_request(request(prompt="my\nsecret", text="x" * 5000))
    line = only_line(stream)
    assert "my\\nsecret" in line
    assert "x" * 5000 in line


def test_errors_quoting_request_are_not_logged() -> None:
    for error_type, is_written in (("validation", False), ("template_error", False), ("generation", True)):
        stream = start(json_logs=True)
        log_request(request(status=200, error_type=error_type, error="because"))
        assert ("error" in fields_of(stream)) == is_written


def test_hostile_request_is_one_short_line() -> None:
    for json_logs in (False, True):
        stream = start(json_logs)
        big = NASTY * 100_000
        log_request(request(adapter_id=big, error_type="generation", error=big, key=NASTY, source=NASTY))
        assert len(only_line(stream)) < 50_000
