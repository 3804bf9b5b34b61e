"""Traces exported to a real HTTP server that parses OTLP messages."""

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from lorax_server.errors import ConfigError
from lorax_server.server.telemetry import tracing
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.server.telemetry.tracing import Tracer, name_operation
from tests.optional import present
from tests.server.telemetry.collector import GUARD_S, Collector, attributes, collecting

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def request(**changes: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "key": "alice",
        "adapter_id": "poet",
        "source": "hub",
        "identity": "ab" * 32,
        "finish_reasons": ["length", "eos_token"],
        "num_choices": 2,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "max_new_tokens": 20,
        "total_s": 1.75,
        "validation_s": 0.25,
        "adapter_s": 0.125,
        "queue_s": 0.5,
        "first_token_s": 0.25,
        "inference_s": 1.0,
        "started_at": 1_700_000_000.0,
        "prompt": "my secret",
        "text": "my answer",
        "error": "my mistake",
    }
    return RequestRecord("id-1", "/v1/chat/completions", **(known | changes))


def sent(collector: Collector, *records: RequestRecord) -> list[Any]:
    tracer = Tracer(collector.url, model="org/base")
    for record in records:
        tracer.export_trace(record)
    tracer.close()
    return collector.spans


def span(spans: list[Any], name: str) -> Any:
    (result,) = [each for each in spans if each.name == name]
    return result


# --- Spans ------------------------------------------------------------------------------------------------------------


def test_request_has_span_with_stages(collector: Collector) -> None:
    spans = sent(collector, request())
    assert {each.name for each in spans} == {"lorax.request", "validation", "queue", "prefill", "decode"}
    whole = span(spans, "lorax.request")
    start = 1_700_000_000 * 10**9
    for name, begin_s, end_s in (
        ("lorax.request", 0.0, 1.75),
        ("validation", 0.0, 0.25),
        ("queue", 0.25, 0.75),
        ("prefill", 0.75, 1.0),
        ("decode", 1.0, 1.75),
    ):
        each = span(spans, name)
        assert (each.start_time_unix_nano, each.end_time_unix_nano) == (start + begin_s * 1e9, start + end_s * 1e9)
        assert each.trace_id == whole.trace_id
        assert each.parent_span_id == (b"" if name == "lorax.request" else whole.span_id)
    assert whole.status.code == 0
    ((path, message),) = collector.requests
    assert path == "/v1/traces"
    resource = {each.key: each.value.string_value for each in message.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "lorax.server"


def test_attributes_follow_conventions_without_content(collector: Collector) -> None:
    spans = sent(collector, request())
    assert attributes(span(spans, "lorax.request")) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lorax",
        "gen_ai.request.model": "poet",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": "id-1",
        "gen_ai.response.model": "org/base",
        "gen_ai.response.finish_reasons": ["length", "eos_token"],
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "lorax.adapter": "poet",
        "lorax.adapter_hash": "ab" * 32,
        "lorax.adapter_source": "hub",
        "lorax.adapter_wait_s": 0.125,
        "lorax.key": "alice",
    }
    assert b"my " not in b"".join(message.SerializeToString() for _, message in collector.requests)


def test_base_model_name_is_exported(collector: Collector) -> None:
    result = attributes(span(sent(collector, request(adapter_id="", identity="", source="")), "lorax.request"))
    assert result["gen_ai.request.model"] == "org/base"
    assert "lorax.adapter" not in result


def test_caller_trace_is_continued(collector: Collector) -> None:
    whole = span(sent(collector, request(trace_parent=f"00-{TRACE_ID}-{PARENT_ID}-01")), "lorax.request")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


def test_unsampled_trace_is_not_exported(collector: Collector) -> None:
    assert sent(collector, request(trace_parent=f"00-{TRACE_ID}-{PARENT_ID}-00")) == []


@pytest.mark.parametrize("parent", ["", "x", "00-0-0-0", "\ud800\n", "0" * 10**6, f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_invalid_traceparent_is_ignored(collector: Collector, parent: str) -> None:
    assert span(sent(collector, request(trace_parent=parent)), "lorax.request").parent_span_id == b""


def test_ambient_span_is_ignored(collector: Collector) -> None:
    around = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(1)))
    with trace.use_span(around):
        assert span(sent(collector, request()), "lorax.request").parent_span_id == b""


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"status": 422, "error_type": "validation"}, "validation"),
        ({"status": 200, "error_type": "generation"}, "generation"),
        ({"is_dropped": True}, "dropped"),
        ({"status": 500}, "500"),
    ],
)
def test_error_kind_is_exported(collector: Collector, changes: dict[str, Any], kind: str) -> None:
    whole = span(sent(collector, request(**changes)), "lorax.request")
    assert (whole.status.code, whole.status.message) == (2, kind)
    assert attributes(whole)["error.type"] == kind


def test_missing_stages_have_no_span(collector: Collector) -> None:
    spans = sent(collector, request(queue_s=0.0, inference_s=0.0, first_token_s=None))
    assert {each.name for each in spans} == {"lorax.request", "validation"}


def test_single_token_has_no_decode_span(collector: Collector) -> None:
    spans = sent(collector, request(generated_tokens=1))
    assert {each.name for each in spans} == {"lorax.request", "validation", "queue", "prefill"}


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/generate", "text_completion"),
        ("/v1/completions", "text_completion"),
        ("/v1/chat/completions", "chat"),
        ("/v1/responses", "chat"),
        ("/v1/embeddings", "embeddings"),
        ("/embed", "embeddings"),
        ("/v1/rerank", "rerank"),
    ],
)
def test_operation_is_named_by_route(route: str, name: str) -> None:
    assert name_operation(route) == name


def test_invalid_unicode_does_not_lose_other_spans(collector: Collector) -> None:
    strange = request(adapter_id="\ud800" * 10**6, key="\udfff\n", source="\ud800")
    broken = request(started_at=float("nan"))
    spans = sent(collector, request(), strange, broken, request())
    assert sum(each.name == "lorax.request" for each in spans) == 3
    assert max(len(attributes(each).get("lorax.adapter", "")) for each in spans) == tracing.MAX_ATTRIBUTE_CHARACTERS


# --- Endpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/own/path"])
def test_traces_path_is_added_to_bare_endpoint(collector: Collector, path: str) -> None:
    tracer = Tracer(collector.url + path)
    tracer.export_trace(request())
    tracer.close()
    assert [where for where, _ in collector.requests] == [path if len(path) > 1 else "/v1/traces"]


@pytest.mark.parametrize("endpoint", ["", "host:4318", "grpc://host:4317", "http://", "http://host:x", "http://[::1"])
def test_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp endpoint"):
        Tracer(endpoint)


def test_grpc_port_causes_warning(caplog: pytest.LogCaptureFixture) -> None:
    Tracer("http://127.0.0.1:4317").close()
    assert "gRPC" in caplog.text


def test_missing_packages_raise_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install lorax_server\[otel\]"):
        Tracer("http://127.0.0.1:4318")


def test_opentelemetry_is_not_imported_without_endpoint() -> None:
    script = (
        "import sys\n"
        "from lorax_server.server.telemetry.request_record import RequestRecord\n"
        "from lorax_server.server.telemetry.tracing import Tracer\n"
        "tracer = Tracer(None)\n"
        "tracer.export_trace(RequestRecord('id', '/generate'))\n"
        "tracer.close()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'torch')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=GUARD_S)


def test_unresponsive_collector_does_not_block(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.is_slow = True
    tracer = Tracer(collector.url)
    for _ in range(100):  # more than the queue holds
        tracer.export_trace(request())
    assert collector.came.wait(GUARD_S)
    tracer.export_trace(request())
    tracer.close()
    assert not collector.may_answer.is_set()
    tracer.export_trace(request())
    tracer.close()


def test_close_has_timeout(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer(collector.url)
    may_end, ended = threading.Event(), threading.Event()
    shut_down = present(tracer._provider).shutdown

    def shut_down_later() -> None:
        may_end.wait(GUARD_S)
        shut_down()
        ended.set()

    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(tracer._provider, "shutdown", shut_down_later)
    tracer.close()
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(GUARD_S)


def test_unreachable_collector_is_harmless(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_S", 0.05)
    caplog.set_level(logging.CRITICAL, logger="opentelemetry")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not run_socket_server
        tracer = Tracer(f"http://127.0.0.1:{unused.getsockname()[1]}")
        tracer.export_trace(request(started_at=time.time()))
        tracer.close()
