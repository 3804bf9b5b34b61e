"""Lines about requests that no route answers, about keys that are refused, and about changes by admins.

All of it is counted. What callers without a valid key can cause is written so many times a minute only; the next line
then says how many were left out.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from lorax_server.server.http.problems import Problem
from lorax_server.server.telemetry.logs import FIELDS, log_request, shorten
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord

logger = logging.getLogger(__name__)

LINES_PER_MINUTE = 60
MINUTE_S = 60.0


@dataclass
class Act:
    """Something that an admin asks for."""

    action: str
    adapter: str
    key: str = ""  # the name of the admin's; "" if the caller is none


@dataclass
class Visit:
    """A request at the door."""

    request_id: str
    path: str
    address: str  # of the client, or of the proxy before it
    key: str = ""
    status: int | None = None  # of the answer; None: the client left before there was one


class Ration:
    """So many a minute."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._began = clock()
        self._count = 0
        self._left_out = 0

    def take(self) -> int | None:
        """Take one. Return the number of those left out before it, or None if this one is to be left out as well."""
        now = self._clock()
        if now - self._began >= MINUTE_S:
            self._began, self._count = now, 0
        self._count += 1
        if self._count > self._most:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out


class Trail:
    """It belongs to one event loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._refusals = Ration(LINES_PER_MINUTE, clock)
        self._connections = Ration(LINES_PER_MINUTE, clock)
        self._keys = Ration(LINES_PER_MINUTE, clock)

    def refuse(self, visit: Visit, problem: Problem) -> None:
        """Count and log a request that is refused outside of `Service.answer`."""
        record = RequestRecord(visit.request_id, visit.path, visit.key, started_at=time.time())
        record.status, record.error_type, record.error = problem.status, problem.error_type, problem.message
        self._metrics.refuse(record)
        left_out = 0 if visit.key else self._refusals.take()
        if left_out is not None:
            log_request(record, {"address": visit.address} | _left_out(left_out))

    def refuse_connection(self, address: str, problem: Problem) -> None:
        left_out = self._connections.take()
        if left_out is not None:
            fields = {"address": address, "status": problem.status, "error": problem.message}
            logger.warning("connection refused", extra={FIELDS: fields | _left_out(left_out)})

    def end(self, visit: Visit, act: Act | None) -> None:
        """Leave a line of what an admin did, and of every key that was refused."""
        is_refused = visit.status == HTTPStatus.UNAUTHORIZED
        if act is None and not is_refused:
            return
        left_out = 0 if act is not None and act.key else self._keys.take()
        if left_out is None:
            return
        fields: dict[str, Any] = {
            "action": "use a key" if act is None else act.action,
            "status": visit.status,
            "key": visit.key if act is None else act.key,
            "address": visit.address,
            "request_id": shorten(visit.request_id),
            "route": shorten(visit.path),
        }
        if act is not None:
            fields["adapter"] = shorten(act.adapter)
        is_done = visit.status is not None and visit.status < HTTPStatus.BAD_REQUEST
        logger.log(logging.INFO if is_done else logging.WARNING, "audit", extra={FIELDS: fields | _left_out(left_out)})


def _left_out(count: int) -> dict[str, int]:
    return {"left_out": count} if count else {}
