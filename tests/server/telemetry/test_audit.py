import logging
from typing import Any

import pytest

from lorax_server.server.telemetry.audit import AdminAction, AuditLog, LogRateLimiter
from lorax_server.server.telemetry.logs import EXTRA_KEY
from lorax_server.server.telemetry.metrics import Metrics
from lorax_server.server.telemetry.request_record import RequestRecord

CLIENT = "192.0.2.1"


def make(clock: Any) -> AuditLog:
    return AuditLog(Metrics(max_input_length=1, max_total_tokens=2), clock)


def test_log_rate_limiter_counts_suppressed_lines() -> None:
    now = 0.0
    budget = LogRateLimiter(2, lambda: now)
    assert [budget.acquire() for _ in range(5)] == [{}, {}, None, None, None]
    now = 59.9
    assert budget.acquire() is None
    now = 60.0
    assert [budget.acquire() for _ in range(3)] == [{"num_suppressed": 4}, {}, None]


def test_only_lines_without_key_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    audit_log = make(lambda: now)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            audit_log.log_rejection(RequestRecord("it", "/generate", address=CLIENT), 403, "validation", "Forbidden")
            audit_log.log_rejection(RequestRecord("it", "/generate", "alice", address=CLIENT), 422, "validation", "no")
            audit_log.log_rejected_connection(CLIENT, 503, "full")
            audit_log.log_finished(RequestRecord("it", "/generate", address=CLIENT, status=401), None)
            audit_log.log_finished(
                RequestRecord("it", "/v1/adapters/load", address=CLIENT, status=401), AdminAction("load", "poet")
            )
            audit_log.log_finished(
                RequestRecord("it", "/v1/adapters/load", address=CLIENT, status=200),
                AdminAction("load", "poet", "boss"),
            )
            audit_log.log_finished(RequestRecord("it", "/generate", address=CLIENT, status=200), None)
        fields = [getattr(each, EXTRA_KEY) for each in caplog.records]
        assert sum(each["status"] == 403 for each in fields) == 60
        assert sum(each["status"] == 422 for each in fields) == 100
        assert sum(each["status"] == 503 for each in fields) == 60
        assert sum(each["status"] == 401 for each in fields) == 60
        assert sum(each["status"] == 200 for each in fields) == 100
        now = 60.0
        audit_log.log_finished(RequestRecord("it", "/generate", address=CLIENT, status=401), None)
    assert getattr(caplog.records[-1], EXTRA_KEY)["num_suppressed"] == 140


@pytest.mark.parametrize(("status", "level"), [(200, "INFO"), (403, "WARNING"), (500, "WARNING"), (0, "WARNING")])
def test_failed_admin_action_is_warning(status: int, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make(lambda: 0.0).log_finished(
            RequestRecord("it", "/x", address=CLIENT, status=status), AdminAction("unload", "a" * 10_000, "boss")
        )
    (record,) = caplog.records
    assert record.levelname == level
    fields = getattr(record, EXTRA_KEY)
    assert (fields["action"], fields["status"], fields["key"], fields["address"]) == (
        "unload",
        status or None,
        "boss",
        CLIENT,
    )
    assert len(fields["adapter"]) < 2000
