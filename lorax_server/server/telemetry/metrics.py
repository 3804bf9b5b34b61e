"""Metrics of requests, adapters, keys and the engine, for Prometheus and as JSON.

Metrics that LoRAX has keep LoRAX's names, also where Prometheus would end a counter in `_total`; the others end so.
A name that a client chose becomes a label only if its adapter was found, in a short and printable form, and for a
limited number of names. All other names share one label.
"""

import re
from collections.abc import Hashable, Iterable
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.types import EngineStatus

MetricT = TypeVar("MetricT", Counter, Gauge)
SECONDS = tuple(float(f"{0.0001 * 1.5**power:.6g}") for power in range(1, 36))
NUM_STEPS = 100  # of histograms of tokens
MAX_LABEL_CHARACTERS = 64
DIGEST_CHARACTERS = 12
BASE, OTHER, UNKNOWN, ANONYMOUS = "base", "other", "unknown", "anonymous"
RESERVED = frozenset((BASE, OTHER, UNKNOWN, ANONYMOUS))

UPSTREAM_COUNTERS = frozenset(
    ("lorax_request_count", "lorax_request_success", "lorax_request_failure", "lorax_batch_inference_count")
)
HEADER = re.compile(rf"^(# (?:HELP|TYPE) (?:{'|'.join(sorted(UPSTREAM_COUNTERS))}))_total ", re.MULTILINE)
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

FAILURE_OF_TYPE = {
    "authentication": "authentication",
    "generation": "generation",
    "healthcheck": "unavailable",
    "incomplete_generation": "incomplete",
    "internal": "generation",
    "missing_template_variable": "template",
    "no_chat_template": "template",
    "overloaded": "overloaded",
    "permission": "forbidden",
    "template_error": "template",
    "timeout": "timeout",
    "tool_error": "validation",
    "validation": "validation",
}
ADAPTER_STATUSES = (403, 404, 424)  # of an adapter that is at fault, where `error_type` is "generation"


class Registry(CollectorRegistry):
    """A registry that shows each metric under the name it was made with, and without the time when it was made."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if sample.name != f"{family.name}_created"]
            if family.name in UPSTREAM_COUNTERS:
                family.samples = [sample._replace(name=family.name) for sample in family.samples]
            yield family


class Metrics:
    """All that `/metrics` shows. It belongs to one event loop.

    Requests that were answered are measured. Those that failed are counted by the kind of failure.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, *, max_input_length: int, max_total_tokens: int, max_labels: int = 500) -> None:
        self.registry = registry = Registry()
        counter = partial(Counter, registry=registry)
        self._count = counter("lorax_request_count", "Requests that came")
        self._success = counter("lorax_request_success", "Requests that were answered")
        self._failure = counter("lorax_request_failure", "Requests that failed, by the kind of failure", ("err",))
        duration = partial(Histogram, registry=registry, buckets=SECONDS)
        self._adapter = duration("lorax_request_adapter_duration", "Seconds in the queue, waiting for its adapter")
        self._mean = duration("lorax_request_mean_time_per_token_duration", "Seconds of inference for each token")
        self._first = duration("lorax_request_time_to_first_token_duration", "Seconds until its first token")
        self._later = duration("lorax_request_time_per_output_token_duration", "Seconds for each token after the first")
        tokens = partial(Histogram, registry=registry)
        inputs, outputs = _steps(max_input_length), _steps(max_total_tokens)
        self._measured = {  # by the field of a record that each shows
            "total_s": duration("lorax_request_duration", "Seconds from a request to the end of its answer"),
            "validation_s": duration("lorax_request_validation_duration", "Seconds until it was handed to the engine"),
            "queue_s": duration("lorax_request_queue_duration", "Seconds from there until its first step"),
            "inference_s": duration("lorax_request_inference_duration", "Seconds from its first step to the end"),
            "prompt_tokens": tokens("lorax_request_input_length", "Tokens of a prompt", buckets=inputs),
            "generated_tokens": tokens("lorax_request_generated_tokens", "Tokens of an answer", buckets=outputs),
            "max_new_tokens": tokens("lorax_request_max_new_tokens", "Tokens it might have had", buckets=outputs),
        }
        self._connections = Gauge("lorax_connections", "Connections that are open", registry=registry)
        self._refused = counter("lorax_connections_refused_total", "Connections not kept, by reason", ("reason",))
        self._adapters = _AdapterMetrics(registry, max_labels)
        self.engine = EngineMetrics(registry)

    def begin(self) -> None:
        """Count a request that came."""
        self._count.inc()

    def end(self, record: RequestRecord) -> None:
        """Count a request that ended, one way or another."""
        failure = failure_kind(record)
        self._end(record, failure)
        self._adapters.end(record, failure)

    def refuse(self, record: RequestRecord) -> None:
        """Count a request that was refused before its adapter was known."""
        self.begin()
        self._end(record, failure_kind(record))

    def set_connections(self, count: int) -> None:
        self._connections.set(count)

    def refuse_connection(self, reason: str) -> None:
        """Count a connection that was not kept."""
        self._refused.labels(reason).inc()

    def prometheus(self) -> bytes:
        return HEADER.sub(r"\1 ", generate_latest(self.registry).decode()).encode()

    def json(self) -> dict[str, Any]:
        """Return the same by family, as LoRAX writes it."""
        families: dict[str, Any] = {}
        for family in self.registry.collect():
            is_suffixed = family.type == "counter" and family.name not in UPSTREAM_COUNTERS
            data = [{"key": _json_key(sample), "value": float(sample.value)} for sample in family.samples]
            families[f"{family.name}_total" if is_suffixed else family.name] = {"type": family.type, "data": data}
        return families

    def _end(self, record: RequestRecord, failure: str | None) -> None:
        if failure is not None:
            self._failure.labels(failure).inc()
            return
        self._success.inc()
        for field, histogram in self._measured.items():
            histogram.observe(_amount(getattr(record, field)))
        if record.adapter_id:
            self._adapter.observe(_amount(record.adapter_s))
        self._observe_throughput(record)

    def _observe_throughput(self, record: RequestRecord) -> None:
        """Measure the time per token. Where a request has several choices, it is the mean of theirs."""
        per_choice = _amount(record.generated_tokens) / max(1, record.num_choices)
        if per_choice > 0:
            self._mean.observe(_amount(record.inference_s) / per_choice)
        if record.first_token_s is None:
            return
        first_s = _amount(record.first_token_s)
        self._first.observe(_amount(record.validation_s) + _amount(record.queue_s) + first_s)
        if per_choice > 1:
            self._later.observe(_amount(record.inference_s - first_s) / (per_choice - 1))


class _AdapterMetrics:
    """Use of adapters, by adapter and by key. Failed requests count as far as they came."""

    def __init__(self, registry: CollectorRegistry, max_labels: int) -> None:
        self._max_labels = max_labels
        self._names: set[str] = set()
        self._keys: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        counter = partial(Counter, registry=registry)
        self._requests = counter("lorax_adapter_requests_total", "Requests that ended", ("adapter",))
        self._failures = counter("lorax_adapter_failures_total", "Requests that failed", ("adapter",))
        self._tokens = counter("lorax_adapter_tokens_total", "Tokens of prompts and answers", ("adapter", "kind"))
        self._queue = counter("lorax_adapter_queue_seconds_total", "Waiting for the first step", ("adapter",))
        self._load = counter("lorax_adapter_load_seconds_total", "Waiting for the adapter", ("adapter",))
        self._key_tokens = counter("lorax_key_tokens_total", "Tokens by key", ("key", "adapter", "kind"))
        self._key_requests = counter("lorax_key_requests_total", "Requests by key", ("key", "adapter"))

    def end(self, record: RequestRecord, failure: str | None) -> None:
        adapter = self._adapter_label(record, failure)
        key = self._label(record.key, self._keys) if record.key else ANONYMOUS
        adapter_of_key = adapter if self._has_room((key, adapter), self._pairs) else OTHER
        self._requests.labels(adapter).inc()
        self._key_requests.labels(key, adapter_of_key).inc()
        if failure is not None:
            self._failures.labels(adapter).inc()
        self._queue.labels(adapter).inc(_amount(record.queue_s))
        self._load.labels(adapter).inc(_amount(record.adapter_s))
        kinds = {"prompt": record.prompt_tokens, "cached": record.cached_tokens, "generated": record.generated_tokens}
        for kind, tokens in kinds.items():
            self._tokens.labels(adapter, kind).inc(_amount(tokens))
            self._key_tokens.labels(key, adapter_of_key, kind).inc(_amount(tokens))

    def _adapter_label(self, record: RequestRecord, failure: str | None) -> str:
        """Return a label. Names that mean no adapter must not use up the labels: any client can make them up."""
        if record.adapter_id == "":
            return BASE
        is_found = record.status != 404 and (failure is None or record.identity)
        if record.adapter_id is None or not (is_found or record.is_known):
            return UNKNOWN
        return self._label(record.adapter_id, self._names)

    def _label(self, name: str, labels: set[str]) -> str:
        label = clean(name)
        return label if self._has_room(label, labels) else OTHER

    def _has_room(self, label: Hashable, labels: set[Any]) -> bool:
        """Tell whether a label may be used: it is one of the first so many."""
        if label not in labels and len(labels) >= self._max_labels:
            return False
        labels.add(label)
        return True


def failure_kind(record: RequestRecord) -> str | None:
    """Return the label `err` of a request; None if all went well."""
    if record.is_dropped:
        return "dropped"
    if not record.error_type and record.status < 400:
        return None
    if record.adapter_id and record.error_type == "generation" and record.status in ADAPTER_STATUSES:
        return "load_adapter" if record.identity else "download_adapter"
    return FAILURE_OF_TYPE.get(record.error_type, "bad_request" if 400 <= record.status < 500 else "generation")


def clean(name: str) -> str:
    """Make a name short and printable. A changed name ends in a digest of the original, so that two stay two."""
    if len(name) <= MAX_LABEL_CHARACTERS and name.isprintable() and name not in RESERVED:
        return name
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    start = name[: MAX_LABEL_CHARACTERS - DIGEST_CHARACTERS - 1]
    return "".join(character if character.isprintable() else "?" for character in start) + "~" + digest


def _json_key(sample: Sample) -> str:
    """Write a sample's name and labels as Prometheus does. Without labels LoRAX has only the end of a name."""
    if not sample.labels:
        return next((end for end in ("sum", "count") if sample.name.endswith(end)), "")
    labels = ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}"


def _steps(limit: int) -> tuple[float, ...]:
    return tuple(limit * step / NUM_STEPS for step in range(1, NUM_STEPS + 1))


def _amount(value: float) -> float:
    """Return 0 for NaN, an infinite or a negative number: one of them would spoil a sum for good."""
    return value if isfinite(value) and value > 0 else 0.0


# --- The engine -------------------------------------------------------------------------------------------------------


class StatusMetric(NamedTuple):
    """One metric that shows fields of the engine's status. Several fields are told apart by a label."""

    name: str
    text: str
    fields: str | dict[str, str]  # one, or several by the label's value
    label: str = ""


ENGINE_COUNTERS = (
    StatusMetric(
        "lorax_batch_inference_count", "Steps; each has prompts and single tokens", {"step": "steps"}, "method"
    ),
    StatusMetric("lorax_engine_steps_total", "Steps of the engine", "steps"),
    StatusMetric(
        "lorax_engine_tokens_total",
        "Tokens that went through the model, and those it generated",
        {"computed": "computed_tokens", "generated": "generated_tokens"},
        "kind",
    ),
    StatusMetric("lorax_prefix_cache_tokens_total", "Tokens found in the cache instead of computed", "prefix_tokens"),
    StatusMetric("lorax_engine_idle_seconds_total", "Seconds without anything to do", "idle_s"),
    StatusMetric("lorax_prompt_chunks_total", "Parts of prompts that did not fit into one step", "chunks"),
    StatusMetric("lorax_preemptions_total", "Requests that gave way for a while for lack of blocks", "preemptions"),
    StatusMetric(
        "lorax_rows_taken_back_total", "Preemptions for tenants below their share of slots", "fairness_preemptions"
    ),
    StatusMetric("lorax_cache_evictions_total", "Blocks of the cache that were given to others", "cache_evictions"),
    StatusMetric("lorax_engine_refused_total", "Requests the engine refused because of overload", "refused"),
    StatusMetric("lorax_adapters_prepared_total", "Adapters made ready in host memory", "adapters_prepared"),
    StatusMetric("lorax_adapters_loaded_total", "Adapters brought to the device", "adapters_loaded"),
    StatusMetric("lorax_adapters_failed_total", "Adapters that could not be made ready", "adapters_failed"),
    StatusMetric(
        "lorax_adapter_evictions_total",
        "Adapters that had to leave, by where they were",
        {"device": "adapters_evicted_from_device", "host": "adapters_evicted_from_host"},
        "tier",
    ),
    StatusMetric("lorax_adapter_moves_total", "Adapters moved within the device's memory", "adapter_moves"),
)


ENGINE_GAUGES = (
    StatusMetric("lorax_queue_length", "Requests that wait", "waiting"),
    StatusMetric("lorax_batch_current_size", "Requests that run", "running"),
    StatusMetric("lorax_waiting_for_adapters", "Requests that wait for their adapter", "waiting_for_adapters"),
    StatusMetric("lorax_kv_blocks", "Blocks of the cache", "num_blocks"),
    StatusMetric("lorax_kv_blocks_free", "Blocks of the cache that no request uses", "free_blocks"),
    StatusMetric(
        "lorax_adapters_resident",
        "Adapters by where they are",
        {
            "device": "adapters_on_device",
            "host": "adapters_on_host",
            "preparing": "adapters_preparing",
            "fetching": "adapters_fetching",
        },
        "tier",
    ),
)


class EngineMetrics:
    """Metrics of the engine's status.

    An engine that was restarted counts from 0 again. The counters here go on from their last value.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._healthy = Gauge("lorax_engine_healthy", "Whether the engine answers", registry=registry)
        self._restarts = Counter("lorax_engine_restarts_total", "Restarts of the engine", registry=registry)
        self._gauges = _make_metrics(Gauge, ENGINE_GAUGES, registry)
        self._counters = _make_metrics(Counter, ENGINE_COUNTERS, registry)
        self._last = {field: 0.0 for field, _ in self._counters}  # of the engine's present life
        self._last_restarts = 0  # when that status was reported
        self._num_restarts = 0

    def update(self, status: EngineStatus | None, is_healthy: bool, num_restarts: int) -> None:
        """Show a status; None if the engine does not answer."""
        self._healthy.set(is_healthy)
        self._restarts.inc(max(0, num_restarts - self._num_restarts))
        self._num_restarts = max(num_restarts, self._num_restarts)
        for field, gauge in self._gauges:
            gauge.set(0 if status is None else getattr(status, field))
        if status is not None:
            self._count(status, num_restarts)

    def _count(self, status: EngineStatus, num_restarts: int) -> None:
        now = {field: getattr(status, field) for field in self._last}
        if num_restarts != self._last_restarts or any(now[field] < self._last[field] for field in now):
            self._last = dict.fromkeys(now, 0.0)
            self._last_restarts = num_restarts
        for field, counter in self._counters:
            counter.inc(now[field] - self._last[field])
        self._last = now


def _make_metrics(
    kind: type[MetricT], rows: tuple[StatusMetric, ...], registry: CollectorRegistry
) -> list[tuple[str, MetricT]]:
    """Make metrics of one kind. Return each series with the field of the status that it shows."""
    series = []
    for row in rows:
        metric = kind(row.name, row.text, (row.label,) if row.label else (), registry=registry)
        if isinstance(row.fields, str):
            series.append((row.fields, metric))
        else:
            series += [(field, metric.labels(value)) for value, field in row.fields.items()]
    return series
