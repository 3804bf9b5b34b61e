"""The audit log of rejected requests, rejected keys and admin actions.

Metrics count all of these events. Log lines caused by callers without a valid key are rate-limited; the field
`num_suppressed` in the next line contains the number of suppressed lines.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from lorax_server.server.telemetry.logs import EXTRA_KEY, log_request, truncate
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord

logger = logging.getLogger(__name__)

MAX_LINES_PER_MINUTE = 60
MINUTE_S = 60.0


@dataclass
class AdminAction:
    """An adapter change requested by a client, which requires an admin key."""

    action: str
    adapter_id: str
    key: str = ""  # name of the admin key, or "" if the caller is not an admin


class LogRateLimiter:
    """Limits log lines per minute and counts suppressed lines."""

    def __init__(self, max_lines: int, clock: Callable[[], float]) -> None:
        self._max_lines = max_lines
        self._clock = clock
        self._window_start = clock()
        self._count = 0
        self._num_suppressed = 0

    def acquire(self) -> dict[str, int] | None:
        """Return extra fields for the next log line, or None if the line must be suppressed.

        If lines before it were suppressed, the field `num_suppressed` contains their number.
        """
        now = self._clock()
        if now - self._window_start >= MINUTE_S:
            self._window_start, self._count = now, 0
        self._count += 1
        if self._count > self._max_lines:
            self._num_suppressed += 1
            return None
        num_suppressed, self._num_suppressed = self._num_suppressed, 0
        return {"num_suppressed": num_suppressed} if num_suppressed else {}


class AuditLog:
    """Writes the audit log for one server."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._requests = LogRateLimiter(MAX_LINES_PER_MINUTE, clock)
        self._connections = LogRateLimiter(MAX_LINES_PER_MINUTE, clock)
        self._keys = LogRateLimiter(MAX_LINES_PER_MINUTE, clock)

    def log_rejection(self, record: RequestRecord, status: int, error_type: str, message: str) -> None:
        """Count and log a request that is rejected outside of `RequestContext.run`."""
        record.status, record.error_type, record.error = status, error_type, message
        self._metrics.record_rejection(record)
        suppressed = {} if record.key else self._requests.acquire()
        if suppressed is not None:
            log_request(record, {"address": record.address} | suppressed)

    def log_rejected_connection(self, address: str, status: int, message: str) -> None:
        suppressed = self._connections.acquire()
        if suppressed is not None:
            fields = {"address": address, "status": status, "error": message}
            logger.warning("connection rejected", extra={EXTRA_KEY: fields | suppressed})

    def log_finished(self, record: RequestRecord, action: AdminAction | None) -> None:
        """Log a finished request if it was an admin action or its key was rejected."""
        if action is None and record.status != HTTPStatus.UNAUTHORIZED:
            return
        suppressed = {} if action is not None and action.key else self._keys.acquire()
        if suppressed is None:
            return
        fields: dict[str, Any] = {
            "action": "authenticate" if action is None else action.action,
            "status": record.status or None,
            "key": record.key if action is None else action.key,
            "address": record.address,
            "request_id": truncate(record.request_id),
            "route": truncate(record.route),
        }
        if action is not None:
            fields["adapter"] = truncate(action.adapter_id)
        level = logging.INFO if 0 < record.status < HTTPStatus.BAD_REQUEST else logging.WARNING
        logger.log(level, "audit", extra={EXTRA_KEY: fields | suppressed})
