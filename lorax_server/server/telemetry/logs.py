"""Log lines: one for each record, as text or as JSON, whatever characters are in it."""

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

LEVELS = ("debug", "info", "warning", "error", "critical")
FIELDS = "fields"  # their name in `extra`
PLAIN_VALUE = re.compile(r"[\w./:@,+*~()\[\]-]+")
MAX_VALUE_CHARACTERS = 1024  # of a value that a client chose, except for prompts and texts, which are logged whole
HASH_CHARACTERS = 12
# Errors whose messages may quote the request.
ABOUT_CONTENT = ("validation", "template_error", "missing_template_variable", "tool_error")


def configure(level: str, json_logs: bool, stream: TextIO | None = None) -> None:
    """Send all log lines of this process to `stream`, or to stderr; also uvicorn's, if its `log_config` is None."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level {level!r} is not known; use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if json_logs else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_request(record: RequestRecord, more: Mapping[str, Any] | None = None) -> None:
    """Log a request that ended. Prompt and answer are written only if the record has them."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": shorten(record.request_id),
        "route": shorten(record.route),
        "status": record.status,
        "error_type": record.error_type,
        "key": record.key,
        "source": shorten(record.source),
        "adapter": shorten(record.adapter_id or ""),
        "adapter_hash": record.identity[:HASH_CHARACTERS],
        "is_streamed": record.is_streamed,
        "is_dropped": record.is_dropped,
        "num_choices": record.num_choices,
        "finish_reasons": ",".join(record.finish_reasons),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "max_new_tokens": record.max_new_tokens,
    }
    for name in ("total", "validation", "adapter", "queue", "first_token", "inference"):
        fields[f"{name}_ms"] = _to_ms(getattr(record, f"{name}_s"))
    if record.error and record.error_type not in ABOUT_CONTENT:
        fields["error"] = shorten(record.error)
    fields |= {name: value for name, value in (("prompt", record.prompt), ("text", record.text)) if value is not None}
    logger.info("request", extra={FIELDS: fields | dict(more or {})})


def shorten(text: str) -> str:
    """Shorten a client's text to a length that a log can bear."""
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1000, 3)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, then `name=value` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_time(record), record.levelname, record.name, _escape(record.getMessage())]
        fields = getattr(record, FIELDS, {}) | _exception(self, record)
        return " ".join([*words, *(f"{_escape(name)}={_text_value(value)}" for name, value in fields.items())])


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
        return json.dumps(line | _exception(self, record))  # all but ASCII is escaped, so no value can end the line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    """Return the field of a record's exception and stack; nothing if it has neither."""
    traces = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        traces.append(formatter.formatStack(record.stack_info))
    return {"exception": "\n".join(traces)} if traces else {}


def _json_value(value: object) -> object:
    """Return a value as it is where JSON has it, else as text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _text_value(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if PLAIN_VALUE.fullmatch(text):
        return text
    return '"' + _escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escape(text: str) -> str:
    """Escape characters that end a line, move a cursor or hide text."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
