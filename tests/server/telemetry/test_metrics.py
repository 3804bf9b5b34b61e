import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lorax_server.server.telemetry.metrics import (
    LORAX_COUNTERS,
    MAX_LABEL_CHARACTERS,
    Metrics,
    classify_failure,
    sanitize_label,
)
from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.types import EngineStatus

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana-dashboard.json"
UPSTREAM = {
    "lorax_request_count": "counter",
    "lorax_request_success": "counter",
    "lorax_request_failure": "counter",
    "lorax_request_duration": "histogram",
    "lorax_request_validation_duration": "histogram",
    "lorax_request_queue_duration": "histogram",
    "lorax_request_inference_duration": "histogram",
    "lorax_request_mean_time_per_token_duration": "histogram",
    "lorax_request_input_length": "histogram",
    "lorax_request_generated_tokens": "histogram",
    "lorax_request_max_new_tokens": "histogram",
    "lorax_queue_length": "gauge",
    "lorax_batch_current_size": "gauge",
    "lorax_batch_inference_count": "counter",
}


def make(max_labels: int = 500) -> Metrics:
    return Metrics(max_input_length=1000, max_total_tokens=2000, max_labels=max_labels)


def record(**changes: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "adapter_id": "poet",
        "identity": "ab" * 32,
        "key": "alice",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "max_new_tokens": 20,
        "total_s": 1.6,
        "validation_s": 0.1,
        "adapter_s": 0.2,
        "queue_s": 0.5,
        "first_token_s": 0.2,
        "inference_s": 1.0,
    }
    return RequestRecord("id", "/generate", **(known | changes))


def status(**changes: int) -> EngineStatus:
    return EngineStatus(**({field.name: 0 for field in fields(EngineStatus)} | changes))


def families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render_prometheus().decode())}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return values by original name and labels. The parser appends `_total` to counters."""
    return {
        (
            family.name if family.name in LORAX_COUNTERS else sample.name,
            frozenset(sample.labels.items()),
        ): sample.value
        for family in families(metrics).values()
        for sample in family.samples
    }


def value(metrics: Metrics | dict[Any, float], name: str, **labels: str) -> float:
    known = samples(metrics) if isinstance(metrics, Metrics) else metrics
    return known.get((name, frozenset(labels.items())), 0.0)


def labels_of(metrics: Metrics, name: str, label: str) -> set[str]:
    return {dict(labels)[label] for each, labels in samples(metrics) if each == name}


# --- Names and forms --------------------------------------------------------------------------------------------------


def test_lorax_metrics_keep_names_and_types() -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", make().render_prometheus().decode(), re.MULTILINE))
    assert {name: types.get(name) for name in UPSTREAM} == UPSTREAM
    assert all(name.startswith("lorax_") for name in types)
    for name, kind in types.items():
        assert kind != "counter" or name in UPSTREAM or name.endswith("_total")
        assert not name.endswith("_created")


def test_each_metric_family_appears_once_with_help() -> None:
    metrics = make()
    metrics.record_finished(record(error_type="validation", status=422))
    text = metrics.render_prometheus().decode()
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert re.findall(r"^# HELP (\S+) .", text, re.MULTILINE) == names
    for line in text.strip().split("\n"):
        if not line.startswith("#"):
            assert any(line.startswith(name) for name in names)


def test_registries_are_independent() -> None:
    one, other = make(), make()
    one.count_request()
    assert value(other, "lorax_request_count") == 0
    assert not any(family.name.startswith("lorax_") for family in REGISTRY.collect())


def test_buckets_match_lorax() -> None:
    seconds = buckets("lorax_request_duration")
    assert seconds == pytest.approx([0.0001 * 1.5**k for k in range(1, 36)], rel=1e-5)
    assert (seconds[0], round(seconds[-1], 1)) == (0.00015, 145.6)
    assert buckets("lorax_request_input_length") == [10.0 * k for k in range(1, 101)]
    assert buckets("lorax_request_generated_tokens") == [20.0 * k for k in range(1, 101)]
    assert buckets("lorax_request_max_new_tokens") == [20.0 * k for k in range(1, 101)]


def buckets(name: str) -> list[float]:
    bounds = [float(each.labels["le"]) for each in families(make())[name].samples if each.name.endswith("_bucket")]
    assert bounds[-1] == math.inf
    return bounds[:-1]


def test_content_type_is_prometheus_text() -> None:
    assert make().content_type == "text/plain; version=0.0.4; charset=utf-8"


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_has_lorax_keys() -> None:
    metrics = make()
    metrics.count_request()
    metrics.record_finished(record())
    shown = metrics.render_json()
    assert shown["lorax_queue_length"] == {"type": "gauge", "data": [{"key": "", "value": 0.0}]}
    assert shown["lorax_request_count"] == {"type": "counter", "data": [{"key": "count", "value": 1.0}]}
    assert shown["lorax_request_success"] == {"type": "counter", "data": [{"key": "", "value": 1.0}]}
    duration = {each["key"]: each["value"] for each in shown["lorax_request_duration"]["data"]}
    assert (duration["sum"], duration["count"]) == (1.6, 1.0)
    assert duration['lorax_request_duration_bucket{le="0.00015"}'] == 0.0
    assert duration['lorax_request_duration_bucket{le="+Inf"}'] == 1.0
    assert shown["lorax_adapter_requests_total"]["data"] == [
        {"key": 'lorax_adapter_requests_total{adapter="poet"}', "value": 1.0}
    ]


def test_json_matches_prometheus_text() -> None:
    metrics = make()
    for each in mixture():
        metrics.count_request()
        metrics.record_finished(each)
    metrics.engine.update(status(steps=3, adapters_on_host=2), True, 1)
    text = metrics.render_prometheus().decode()
    shown = json.loads(json.dumps(metrics.render_json(), allow_nan=False))
    assert list(shown) == re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    actual = [each["value"] for family in shown.values() for each in family["data"]]
    expected = [sample.value for family in text_string_to_metric_families(text) for sample in family.samples]
    assert actual == expected


def mixture() -> Iterator[RequestRecord]:
    yield record()
    yield record(adapter_id="", identity="", key="", num_choices=2, generated_tokens=10)
    yield record(status=404, error_type="generation", adapter_id="nope", identity="")
    yield record(is_dropped=True)
    yield record(adapter_id='a"b\\c\nd{}# TYPE x y\u2028', total_s=math.nan, queue_s=math.inf)


# --- Requests ---------------------------------------------------------------------------------------------------------


def test_successful_request_is_measured() -> None:
    metrics = make()
    metrics.count_request()
    metrics.record_finished(record())
    sums = {
        "duration": 1.6,
        "validation_duration": 0.1,
        "queue_duration": 0.5,
        "adapter_duration": 0.2,
        "inference_duration": 1.0,
        "mean_time_per_token_duration": 0.2,
        "time_to_first_token_duration": 0.8,
        "time_per_output_token_duration": 0.2,
        "input_length": 7,
        "generated_tokens": 5,
        "max_new_tokens": 20,
    }
    shown = samples(metrics)
    for name, expected in sums.items():
        assert value(shown, f"lorax_request_{name}_sum") == pytest.approx(expected), name
        assert value(shown, f"lorax_request_{name}_count") == 1, name
    assert value(shown, "lorax_request_count") == value(shown, "lorax_request_success") == 1
    assert labels_of(metrics, "lorax_request_failure", "err") == set()


def test_time_per_token_is_averaged_over_choices() -> None:
    metrics = make()
    metrics.record_finished(record(num_choices=2, generated_tokens=10))
    assert value(metrics, "lorax_request_time_per_output_token_duration_sum") == pytest.approx(0.2)
    assert value(metrics, "lorax_request_mean_time_per_token_duration_sum") == pytest.approx(0.2)


def test_missing_stages_are_not_measured() -> None:
    metrics = make()
    metrics.record_finished(record(generated_tokens=0, first_token_s=None, adapter_id="", identity=""))
    metrics.record_finished(record(generated_tokens=1, adapter_id="", identity=""))
    counts = {"mean_time_per_token": 1, "time_to_first_token": 1, "time_per_output_token": 0, "adapter": 0}
    for name, expected in counts.items():
        assert value(metrics, f"lorax_request_{name}_duration_count") == expected, name


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, None),
        ({"is_dropped": True}, "dropped"),
        ({"is_dropped": True, "error_type": "timeout"}, "dropped"),
        ({"status": 422, "error_type": "validation"}, "validation"),
        ({"status": 422, "error_type": "template_error"}, "template"),
        ({"status": 422, "error_type": "missing_template_variable"}, "template"),
        ({"status": 429, "error_type": "overloaded"}, "overloaded"),
        ({"status": 200, "error_type": "overloaded"}, "overloaded"),
        ({"status": 500, "error_type": "incomplete_generation"}, "incomplete"),
        ({"status": 500, "error_type": "generation"}, "generation"),
        ({"status": 424, "error_type": "generation"}, "load_adapter"),
        ({"status": 424, "error_type": "generation", "identity": ""}, "download_adapter"),
        ({"status": 404, "error_type": "generation", "identity": ""}, "download_adapter"),
        ({"status": 424, "error_type": "generation", "adapter_id": ""}, "generation"),
        ({"status": 401, "error_type": "authentication"}, "authentication"),
        ({"status": 403, "error_type": "permission"}, "forbidden"),
        ({"status": 504, "error_type": "timeout"}, "timeout"),
        ({"status": 503, "error_type": "healthcheck"}, "unavailable"),
        ({"status": 400, "error_type": "whatever"}, "bad_request"),
        ({"status": 400, "error_type": ""}, "bad_request"),
        ({"status": 200, "error_type": "x" * 10**6}, "generation"),
        ({"status": 500, "error_type": "internal"}, "generation"),
    ],
)
def test_failures_are_counted_by_error_type(changes: dict[str, Any], kind: str | None) -> None:
    metrics = make()
    each = record(**changes)
    metrics.record_finished(each)
    assert classify_failure(each) == kind
    assert value(metrics, "lorax_request_success") == (kind is None)
    assert labels_of(metrics, "lorax_request_failure", "err") == (set() if kind is None else {kind})
    assert value(metrics, "lorax_request_duration_count") == (kind is None)


def test_nan_does_not_corrupt_sums() -> None:
    metrics = make()
    bad = {"total_s": math.nan, "queue_s": -1.0, "inference_s": math.inf, "adapter_s": -math.inf, "prompt_tokens": -5}
    metrics.record_finished(record(**bad, first_token_s=math.nan))
    metrics.record_finished(record())
    assert all(math.isfinite(each) and each >= 0 for each in samples(metrics).values())
    assert value(metrics, "lorax_request_duration_sum") == 1.6


# --- Adapters and keys ------------------------------------------------------------------------------------------------


def test_failed_requests_count_toward_adapter_and_key_metrics() -> None:
    metrics = make()
    metrics.record_finished(record())
    metrics.record_finished(record(is_dropped=True, key="bob"))
    metrics.record_finished(record(adapter_id="", identity="", key=""))
    shown = samples(metrics)
    assert value(shown, "lorax_adapter_requests_total", adapter="poet") == 2
    assert value(shown, "lorax_adapter_failures_total", adapter="poet") == 1
    assert value(shown, "lorax_adapter_requests_total", adapter="base") == 1
    for kind, tokens in (("prompt", 7), ("cached", 4), ("generated", 5)):
        assert value(shown, "lorax_adapter_tokens_total", adapter="poet", kind=kind) == 2 * tokens
        for key, adapter in (("alice", "poet"), ("bob", "poet"), ("anonymous", "base")):
            assert value(shown, "lorax_key_tokens_total", key=key, adapter=adapter, kind=kind) == tokens
            assert value(shown, "lorax_key_requests_total", key=key, adapter=adapter) == 1
    assert value(shown, "lorax_adapter_queue_seconds_total", adapter="poet") == pytest.approx(1.0)
    assert value(shown, "lorax_adapter_load_seconds_total", adapter="poet") == pytest.approx(0.4)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": 404, "error_type": "generation"},
        {"status": 424, "error_type": "generation", "identity": ""},
        {"status": 200, "error_type": "generation", "identity": ""},
        {"is_dropped": True, "identity": ""},
    ],
)
def test_unknown_adapter_gets_no_label(changes: dict[str, Any]) -> None:
    metrics = make()
    for number in range(50):
        metrics.record_finished(record(adapter_id=f"made-up-{number}", **changes))
    for name in ("lorax_adapter_requests_total", "lorax_key_tokens_total"):
        assert labels_of(metrics, name, "adapter") == {"unknown"}
    metrics.record_finished(record())
    assert value(metrics, "lorax_adapter_requests_total", adapter="poet") == 1


def test_reserved_adapter_names_get_digest() -> None:
    metrics = make()
    metrics.record_finished(record(adapter_id="base"))
    metrics.record_finished(record(adapter_id="", identity=""))
    assert value(metrics, "lorax_adapter_requests_total", adapter="base") == 1
    assert len(labels_of(metrics, "lorax_adapter_requests_total", "adapter")) == 2


def hostile_names(number: int) -> list[str]:
    chooser = random.Random(0)
    alphabet = 'ab"\\\n\r\t\0{}=, \x85\u2028\u202e\ud800\udfff\U0001f600é#'
    return ["".join(chooser.choices(alphabet, k=chooser.randrange(1, 200))) + str(each) for each in range(number)]


def test_hostile_names_are_sanitized_and_limited() -> None:
    metrics = make(max_labels=20)
    names = hostile_names(10_000)
    for number, name in enumerate(names):
        metrics.record_finished(record(adapter_id=name, key=names[-number % 1000]))
    metrics.record_finished(record(adapter_id="x" * 10_000_000))
    text = metrics.render_prometheus()
    assert len(text) < 200_000
    assert len(metrics._adapters._names) == len(metrics._adapters._keys) == 20
    adapters = labels_of(metrics, "lorax_adapter_requests_total", "adapter")
    assert len(adapters) == 21
    assert "other" in adapters
    keys = labels_of(metrics, "lorax_key_tokens_total", "key")
    assert len(keys) <= 21
    assert sum(name == "lorax_key_requests_total" for name, _ in samples(metrics)) <= 20 + 21
    for label in adapters | keys:
        assert len(label) <= MAX_LABEL_CHARACTERS
        assert label.isprintable()
    total = sum(value for (name, _), value in samples(metrics).items() if name == "lorax_key_requests_total")
    assert total == len(names) + 1
    json.dumps(metrics.render_json(), allow_nan=False)


def test_key_adapter_pairs_are_limited() -> None:
    metrics = make(max_labels=20)
    for number in range(400):
        metrics.record_finished(record(adapter_id=f"adapter-{number % 20}", key=f"key-{number // 20}"))
    shown = {
        labels: result for (name, labels), result in samples(metrics).items() if name == "lorax_key_requests_total"
    }
    assert len(shown) <= 20 + 20
    for number in range(20):
        assert sum(result for labels, result in shown.items() if ("key", f"key-{number}") in labels) == 20


def test_sanitized_names_stay_distinct() -> None:
    names = ["x" * 100, "x" * 101, "a\nb", "a\tb", "a?b", "\ud800", "\udfff"]
    assert len({sanitize_label(name) for name in names}) == len(names)
    assert sanitize_label("a?b") == "a?b"


# --- The engine -------------------------------------------------------------------------------------------------------


def test_every_status_field_is_exported() -> None:
    metrics = make()
    metrics.engine.update(
        status(**{each.name: 1001 + number for number, each in enumerate(fields(EngineStatus))}), False, 0
    )
    shown = set(samples(metrics).values())
    for number, each in enumerate(fields(EngineStatus)):
        assert 1001 + number in shown, each.name


def test_adapters_are_counted_by_tier() -> None:
    metrics = make()
    now = status(adapters_on_device=1, adapters_on_host=2, adapters_preparing=3, adapters_fetching=4, running=5)
    metrics.engine.update(now, True, 0)
    for tier, number in (("device", 1), ("host", 2), ("preparing", 3), ("fetching", 4)):
        assert value(metrics, "lorax_adapters_resident", tier=tier) == number
    assert value(metrics, "lorax_engine_healthy") == 1
    metrics.engine.update(None, False, 0)
    assert value(metrics, "lorax_adapters_resident", tier="host") == 0
    assert value(metrics, "lorax_batch_current_size") == 0
    assert value(metrics, "lorax_engine_healthy") == 0


def test_counters_are_kept_while_engine_does_not_respond() -> None:
    metrics = make()
    seen = []
    for steps, restarts in ((10, 0), (None, 0), (15, 0), (None, 1), (4, 1), (9, 1)):
        metrics.engine.update(None if steps is None else status(steps=steps), True, restarts)
        seen.append(value(metrics, "lorax_engine_steps_total"))
        assert value(metrics, "lorax_batch_inference_count", method="step") == seen[-1]
    assert seen == [10, 10, 15, 15, 4, 9], "an engine restart resets the counters"
    assert value(metrics, "lorax_engine_restarts_total") == 1


# --- The dashboard ----------------------------------------------------------------------------------------------------


def panels(parent: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in parent.get("panels", ()):
        yield panel
        yield from panels(panel)


def test_dashboard_queries_existing_metrics() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    metrics = make()
    for each in mixture():
        metrics.record_finished(each)
    shown = samples(metrics)
    names = {name for name, _ in shown}
    labels = {name: {label for each, pairs in shown if each == name for label, _ in pairs} for name in names}
    expressions = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", ())]
    asked = set()
    for expression in expressions:
        for name, selector in re.findall(r"\b(lorax_\w+)(?:\{([^}]*)\})?", expression):
            assert name in names, expression
            assert set(re.findall(r"(\w+)\s*[=!]~?", selector)) <= labels[name] | {"instance"}, expression
            asked.add(name)
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            used = re.findall(r"lorax_\w+", expression)
            assert {each.strip() for each in grouped.split(",")} <= set.union(*(labels[name] for name in used))
    assert len(asked) >= 25


def test_dashboard_layout_is_valid() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    everything = list(panels(dashboard))
    ids = [panel["id"] for panel in everything]
    assert len(ids) == len(set(ids))
    assert dashboard["schemaVersion"] >= 39
    assert [each["name"] for each in dashboard["templating"]["list"] if each["type"] == "datasource"] == ["datasource"]
    rows = [panel["title"] for panel in everything if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Engine", "Adapters", "Keys"]
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
