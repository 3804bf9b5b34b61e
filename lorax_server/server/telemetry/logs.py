"""Log formatters (text and JSON) that always write one line per record, and the request log line."""

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
EXTRA_KEY = "fields"  # key in `extra` for additional fields
PLAIN_VALUE = re.compile(r"[\w./:@,+*~()\[\]-]+")
MAX_VALUE_CHARACTERS = 1024  # limit for client-supplied values; prompts and completions are not truncated
HASH_CHARACTERS = 12
# The messages of these errors may quote the request.
ERROR_TYPES_QUOTING_REQUEST = ("validation", "template_error", "missing_template_variable", "tool_error")


def configure_logging(level: str, json_logs: bool, stream: TextIO | None = None) -> None:
    """Log to `stream`, or to stderr if `stream` is None. This includes uvicorn's logs if its `log_config` is None."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"unknown log level {level!r}; use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if json_logs else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_request(record: RequestRecord, extra_fields: Mapping[str, Any] | None = None) -> None:
    """Log a finished request, including prompt and completion if the record has them."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "request_id": truncate(record.request_id),
        "route": truncate(record.route),
        "status": record.status,
        "error_type": record.error_type,
        "key": record.key,
        "source": truncate(record.source),
        "adapter": truncate(record.adapter_id or ""),
        "adapter_hash": record.identity[:HASH_CHARACTERS],
        "is_streamed": record.is_streamed,
        "is_dropped": record.is_dropped,
        "num_choices": record.num_choices,
        "finish_reasons": ",".join(record.finish_reasons),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "generated_tokens": record.generated_tokens,
        "drafted_tokens": record.drafted_tokens,
        "skipped_tokens": record.skipped_tokens,
        "max_new_tokens": record.max_new_tokens,
    }
    for name in ("total", "validation", "adapter", "queue", "first_token", "inference"):
        fields[f"{name}_ms"] = _to_ms(getattr(record, f"{name}_s"))
    if record.error and record.error_type not in ERROR_TYPES_QUOTING_REQUEST:
        fields["error"] = truncate(record.error)
    fields |= {name: value for name, value in (("prompt", record.prompt), ("text", record.text)) if value is not None}
    logger.info("request", extra={EXTRA_KEY: fields | dict(extra_fields or {})})


def truncate(text: str) -> str:
    """Return a client-supplied value, truncated for the log."""
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1000, 3)


class TextFormatter(logging.Formatter):
    """Formats records as time, level, logger and message, then `name=value` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_format_time(record), record.levelname, record.name, _escape(record.getMessage())]
        fields = getattr(record, EXTRA_KEY, {}) | _format_exception(self, record)
        return " ".join([*words, *(f"{_escape(name)}={_format_text_value(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """Formats records as JSON with timestamp, level, logger, message and, if present, fields and exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": _format_time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, EXTRA_KEY, {})
        if fields:
            line["fields"] = {str(name): _to_json_value(value) for name, value in fields.items()}
        # Non-ASCII is escaped, so values cannot contain line breaks.
        return json.dumps(line | _format_exception(self, record))


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _format_exception(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    """Return a field with the exception and stack, or an empty dict."""
    traces = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        traces.append(formatter.formatStack(record.stack_info))
    return {"exception": "\n".join(traces)} if traces else {}


def _to_json_value(value: object) -> object:
    """Return the value if JSON supports it, otherwise its string form."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _format_text_value(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if PLAIN_VALUE.fullmatch(text):
        return text
    return '"' + _escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escape(text: str) -> str:
    """Return the text with unprintable characters escaped, such as line breaks and terminal control codes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
