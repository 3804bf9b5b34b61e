"""Metrics, dashboard, alert rules and traces of real servers after generation, embeddings, drafts and errors."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.http_server import Server, serving, write_model
from tests.e2e.test_pooling_routes import start
from tests.server.telemetry.collector import Collector, attributes, collecting

pytestmark = pytest.mark.slow  # starts two servers
promql = pytest.importorskip("tests.server.telemetry.promql", reason="needs promql-parser")

ROOT = Path(__file__).parent.parent.parent
PANELS = [
    panel
    for panel in json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())["panels"]
    if panel["type"] != "row"
]
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus-alerts.yml").read_text())["groups"][0]["rules"]
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$instance": ".*"}
KEYS = """
[keys.alice]
key = "alice-secret"
[keys.bob]
key = "bob-secret"
requests_per_minute = 1
"""
ALICE, BOB = {"authorization": "Bearer alice-secret"}, {"authorization": "Bearer bob-secret"}
REPETITIVE = "one two three one two three one two three"
SCHEMA = {"type": "object", "properties": {"name": {"type": "boolean"}}, "required": ["name"]}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
GUARD_S = 120


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("monitoring")
    write_model(folder)
    (folder / "adapters" / "broken").mkdir()
    (folder / "adapters" / "broken" / "adapter_config.json").write_text("{}")
    (folder / "keys.toml").write_text(KEYS)
    flags = ("--keys-file", str(folder / "keys.toml"), "--otlp-endpoint", collector.url, "--speculative-tokens", "3")
    with serving(folder, *flags, environ={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        yield server


@pytest.fixture(scope="module")
def trace(server: Server, collector: Collector) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send a request with a trace parent. Return its usage and its spans by name."""
    body = {"model": "first", "messages": [{"role": "user", "content": REPETITIVE}], "max_tokens": 8, "stream": False}
    response = server.post("/v1/chat/completions", body | {"ignore_eos": True}, **ALICE, **TRACED)
    assert response.status == 200
    spans: dict[str, Any] = {}
    while "lorax.request" not in spans:
        assert collector.came.wait(GUARD_S)
        collector.came.clear()
        spans = {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE_ID}
    return response.json["usage"], spans


@pytest.fixture(scope="module")
def metrics(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Return all metrics with the values of their labels, after traffic of every kind."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("embedder")
        start(folder, "Model")
        embedder = stack.enter_context(serving(folder))
        assert embedder.post("/v1/embeddings", {"model": "tuned", "input": ["the cat", "a dog"]}).status == 200
        text = embedder.send("GET", "/metrics").body.decode()
    completion = {"inputs": REPETITIVE, "parameters": {"max_new_tokens": 24, "adapter_id": "second"}}
    structured = {"model": "first", "prompt": "x", "max_tokens": 30, "structured_outputs": {"json": SCHEMA}}
    expected = [
        (200, "/generate", completion, ALICE),
        (200, "/generate_stream", completion, ALICE),
        (200, "/v1/completions", structured, ALICE),
        (401, "/generate", completion, {}),
        (404, "/v1/completions", {"model": "missing", "prompt": "x"}, ALICE),
        (422, "/generate", {"inputs": "x", "parameters": {"max_new_tokens": -1}}, ALICE),
        (200, "/generate", completion, BOB),
        (429, "/generate", completion, BOB),
    ]
    for status, path, body, key in expected:
        assert server.post(path, body, **key).status == status, path
    assert server.post("/generate", {"inputs": "x", "parameters": {"adapter_id": "broken"}}, **ALICE).status >= 400
    actual = promql.read_labels(server.send("GET", "/metrics").body.decode(), text)
    documented = re.search(r"`lorax_request_failure` .*?failed requests: (.*) \|", operations())
    assert documented is not None
    kinds = set(re.findall(r"`(\w+)`", documented[1]))
    assert {"overloaded", "validation", "authentication"} <= actual["lorax_request_failure"]["err"] <= kinds
    actual["lorax_request_failure"]["err"] = kinds
    return dict(actual)


def operations() -> str:
    return (ROOT / "docs" / "operations.md").read_text()


def substitute(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


# --- Dashboard and alert rules ----------------------------------------------------------------------------------------


def test_dashboard_expressions_match_metrics(metrics: dict[str, dict[str, set[str]]]) -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            labels = promql.check_expression(substitute(target["expr"]), metrics)
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= labels, f"{panel['title']}: {legend - labels} are not labels of {target['expr']}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_expressions_match_metrics(alert: dict[str, Any], metrics: dict[str, dict[str, set[str]]]) -> None:
    labels = promql.check_expression(alert["expr"], metrics)
    assert alert.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert re.fullmatch(r"\d+m", alert.get("for", "0m"))
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description"}
    assert set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))) <= labels


def test_documented_alerts_exist() -> None:
    _, _, after = operations().partition("prometheus-alerts.yml")
    section, _, _ = after.partition("\n## ")
    assert re.findall(r"^\| `(Lorax\w+)`", section, flags=re.MULTILINE) == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("sum(lorax_requests)", "not a metric"),
        ('lorax_adapters_resident{kind="device"}', "no label kind"),
        ('lorax_adapters_resident{tier="gpu"}', "never {'gpu'}"),
        ("sum by (adapter) (lorax_queue_length)", "not labels"),
        ("histogram_quantile(0.5, sum(rate(lorax_request_duration_bucket[5m])))", "needs the label `le`"),
        ("lorax_adapters_resident / lorax_queue_length", "never match"),
        ("rate(lorax_request_count)", "expected type matrix"),
    ],
)
def test_wrong_expressions_are_found(expression: str, message: str, metrics: dict[str, dict[str, set[str]]]) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        promql.check_expression(expression, metrics)


# --- Traces -----------------------------------------------------------------------------------------------------------


def test_trace_continues_the_callers_trace(trace: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, spans = trace
    assert set(spans) == {"lorax.request", "validation", "queue", "prefill", "decode"}
    request = spans["lorax.request"]
    assert request.parent_span_id.hex() == PARENT_ID
    assert {span.parent_span_id for name, span in spans.items() if name != "lorax.request"} == {request.span_id}


def test_stages_are_consecutive(trace: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, spans = trace
    end = spans["lorax.request"].start_time_unix_nano
    for name in ("validation", "queue", "prefill", "decode"):
        assert spans[name].start_time_unix_nano == pytest.approx(end, abs=1000)  # times are floats in seconds
        end = spans[name].end_time_unix_nano
        assert end > spans[name].start_time_unix_nano
    assert end <= spans["lorax.request"].end_time_unix_nano


def test_attributes_describe_the_request(trace: tuple[dict[str, Any], dict[str, Any]]) -> None:
    usage, spans = trace
    actual = attributes(spans["lorax.request"])
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "first",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "lorax.adapter": "first",
        "lorax.adapter_source": "local",
        "lorax.key": "alice",
    }
    assert expected.items() <= actual.items()
    assert len(actual["lorax.adapter_hash"]) == 64
