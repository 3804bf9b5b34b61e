"""Draft tokens in requests, responses and metrics."""

import pytest

from lorax_server.types import FinishReason, Output, SampledToken, StartInfo
from tests.server.fake_server import Routes, complete, generate
from tests.server.service_harness import ids, settle

NUM_DRAFTED = 5


class DraftingRoutes(Routes):
    """Routes with an engine that accepts two of five draft tokens in the second step, before a forced token."""

    async def _emit_in_two_steps(self, request_id: int, *_: int) -> None:
        tokens = [SampledToken(token_id, -0.5) for token_id in ids("quick brown")]
        started = StartInfo(0.0, 0.0, 0)
        self.engine._deliver(Output(request_id, tuple(tokens[:1]), start_info=started))
        await settle()
        last = Output(request_id, tuple(tokens[1:5]), FinishReason.LENGTH, num_drafted=NUM_DRAFTED, num_accepted=2)
        self.engine._deliver(last)


def test_skipped_tokens_are_marked_and_counted() -> None:
    routes = DraftingRoutes()
    reply = routes.post("/generate", generate(details=True))
    details = reply.json["details"]
    assert [token["skipped"] for token in details["tokens"]] == [False, False, True, True, False]
    assert details["skipped_tokens"] == 2
    assert reply.headers["x-skipped-tokens"] == "2"
    assert reply.headers["x-generated-tokens"] == "5"


def test_stream_marks_skipped_tokens() -> None:
    events = DraftingRoutes().post("/generate_stream", generate()).events
    assert [event["token"]["skipped"] for event in events] == [False, False, True, True, False]


def test_usage_counts_draft_tokens() -> None:
    usage = DraftingRoutes().post("/v1/completions", complete()).json["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}
    assert "completion_tokens_details" not in Routes().post("/v1/completions", complete()).json["usage"]


def test_metrics_count_draft_tokens_by_adapter() -> None:
    routes = DraftingRoutes(["poet"])
    routes.post("/generate", generate(adapter_id="poet"))
    shown = routes.get("/metrics").body.decode()
    assert f'lorax_adapter_draft_tokens_total{{adapter="poet",kind="drafted"}} {NUM_DRAFTED}.0' in shown
    assert 'lorax_adapter_draft_tokens_total{adapter="poet",kind="accepted"} 2.0' in shown
    assert "lorax_request_skipped_tokens_sum 2.0" in shown


@pytest.mark.parametrize(("value", "expected"), [("off", False), ("auto", True), (None, True)])
def test_request_can_turn_speculation_off(value: str | None, expected: bool) -> None:
    routes = Routes()
    bodies = {"/generate": generate(speculation=value), "/v1/completions": complete(speculation=value)}
    for path, body in bodies.items():
        assert routes.post(path, body).status == 200, path
        assert routes.engine.added[-1].speculation == expected, path


def test_unknown_speculation_value_is_rejected() -> None:
    reply = Routes().post("/generate", generate(speculation="on"))
    assert reply.status == 422
    assert "speculation" in reply.body.decode()
