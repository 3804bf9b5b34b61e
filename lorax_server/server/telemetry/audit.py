"""Log lines about requests that are refused before a route, about keys that are refused, and about changes by admins.

All of these are counted. Lines that a caller without a valid key can cause are limited to so many a minute; the next
line then says how many were left out.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from lorax_server.server.telemetry.logs import FIELDS, log_request, shorten
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord

logger = logging.getLogger(__name__)

LINES_PER_MINUTE = 60
MINUTE_S = 60.0


@dataclass
class AdminAction:
    """A change that a request asks for and that only an admin may make."""

    action: str
    adapter_id: str
    key: str = ""  # the name of the admin's key; "" if the caller is no admin


class LineBudget:
    """Log lines that may still be written in this minute."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._began = clock()
        self._count = 0
        self._left_out = 0

    def spend(self) -> dict[str, int] | None:
        """Spend one line. Return a field that tells how many were left out before it, if any were; None if this one is
        to be left out as well."""
        now = self._clock()
        if now - self._began >= MINUTE_S:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > self._most:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return {"left_out": left_out} if left_out else {}


class AuditLog:
    """Writes the lines of one server."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._requests = LineBudget(LINES_PER_MINUTE, clock)
        self._connections = LineBudget(LINES_PER_MINUTE, clock)
        self._keys = LineBudget(LINES_PER_MINUTE, clock)

    def refuse(self, record: RequestRecord, status: int, error_type: str, message: str) -> None:
        """Count and log a request that is rejected outside of `RequestContext.answer`."""
        record.status, record.error_type, record.error = status, error_type, message
        self._metrics.refuse(record)
        left_out = {} if record.key else self._requests.spend()
        if left_out is not None:
            log_request(record, {"address": record.address} | left_out)

    def refuse_connection(self, address: str, status: int, message: str) -> None:
        left_out = self._connections.spend()
        if left_out is not None:
            fields = {"address": address, "status": status, "error": message}
            logger.warning("connection refused", extra={FIELDS: fields | left_out})

    def end(self, record: RequestRecord, action: AdminAction | None) -> None:
        """Log a request that has ended, if it was an admin's or if its key was refused."""
        if action is None and record.status != HTTPStatus.UNAUTHORIZED:
            return
        left_out = {} if action is not None and action.key else self._keys.spend()
        if left_out is None:
            return
        fields: dict[str, Any] = {
            "action": "use a key" if action is None else action.action,
            "status": record.status or None,
            "key": record.key if action is None else action.key,
            "address": record.address,
            "request_id": shorten(record.request_id),
            "route": shorten(record.route),
        }
        if action is not None:
            fields["adapter"] = shorten(action.adapter_id)
        level = logging.INFO if 0 < record.status < HTTPStatus.BAD_REQUEST else logging.WARNING
        logger.log(level, "audit", extra={FIELDS: fields | left_out})
