"""What the process writes about itself: one line for each record, as text or as JSON, whatever is in it."""

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from lorax_server.errors import ConfigError
from lorax_server.server.telemetry.request_record import RequestRecord

logger = logging.getLogger(__name__)

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
LOGGERS_OF_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
FIELDS = "fields"  # what `extra` calls them
PLAIN_VALUE = re.compile(r"[\w./:@,+*~()\[\]-]+")
MAX_CHARACTERS = 1024  # of what a caller chose, except for prompts and texts, which are wanted whole
HASH_CHARACTERS = 12
ABOUT_CONTENT = ("validation", "template_error", "missing_template_variable", "tool_error")  # may quote the request


def configure(level: str, json_logs: bool, stream: TextIO | None = None) -> None:
    """Send all that this process logs to `stream`, or to stderr; also what uvicorn does if its `log_config` is None."""
    number = LEVELS.get(level.lower())
    if number is None:
        raise ConfigError(f"log level {level!r} is not known; use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if json_logs else TextFormatter())
    logging.basicConfig(level=number, handlers=[handler], force=True)
    for name in LOGGERS_OF_UVICORN:
        of_uvicorn = logging.getLogger(name)
        of_uvicorn.handlers.clear()
        of_uvicorn.propagate = True
        of_uvicorn.setLevel(logging.NOTSET)


def log_request(record: RequestRecord, more: Mapping[str, Any] | None = None) -> None:
    """A request that ended. What it said, and what was answered, is written only if the record has it."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": shorten(record.request_id),
        "route": shorten(record.route),
        "status": record.status,
        "error_type": record.error_type,
        "key": record.key,
        "source": shorten(record.source),
        "adapter": shorten(record.adapter or ""),
        "adapter_hash": record.adapter_hash[:HASH_CHARACTERS],
        "is_streamed": record.is_streamed,
        "is_dropped": record.is_dropped,
        "num_choices": record.num_choices,
        "finish_reasons": ",".join(record.finish_reasons),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "max_new_tokens": record.max_new_tokens,
        "total_ms": _ms(record.total_s),
        "validation_ms": _ms(record.validation_s),
        "adapter_ms": _ms(record.adapter_s),
        "queue_ms": _ms(record.queue_s),
        "first_token_ms": _ms(record.first_token_s),
        "inference_ms": _ms(record.inference_s),
    }
    if record.error and record.error_type not in ABOUT_CONTENT:
        fields["error"] = shorten(record.error)
    if record.prompt is not None:
        fields["prompt"] = record.prompt
    if record.text is not None:
        fields["text"] = record.text
    logger.info("request", extra={FIELDS: fields | dict(more or {})})


def shorten(text: str) -> str:
    """Shorten a client's text to a length that a log can bear."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1000, 3)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then `name=value` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname, record.name, _escape(record.getMessage())]
        values = dict(getattr(record, FIELDS, {}))
        exception = _exception(self, record)
        if exception:
            values["exception"] = exception
        return " ".join((*parts, *(f"{_escape(name)}={_text_value(value)}" for name, value in values.items())))


class JsonFormatter(logging.Formatter):
    """An object with timestamp, level, logger, message and, where there are any, fields and exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, {})
        if fields:
            line["fields"] = {str(name): _json_value(value) for name, value in fields.items()}
        exception = _exception(self, record)
        if exception:
            line["exception"] = exception
        return json.dumps(line)  # all but ASCII is escaped, so no character of a value can end the line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _json_value(value: object) -> object:
    """As it is where JSON has it, else as text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _text_value(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if PLAIN_VALUE.fullmatch(text):
        return text
    return '"' + _escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escape(text: str) -> str:
    """Nothing that ends a line, moves a cursor or hides what is written."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
