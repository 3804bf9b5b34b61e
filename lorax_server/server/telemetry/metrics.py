"""The request, adapter, key and engine metrics, in the Prometheus and JSON formats.

LoRAX metrics keep their LoRAX names, even counters without `_total`. Client-supplied adapter names become labels only
if the adapter was found, in sanitized form and up to a maximum number; all other names share one label.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.types import EngineStatus

DURATION_BUCKETS_S = tuple(float(f"{0.0001 * 1.5**power:.6g}") for power in range(1, 36))
NUM_TOKEN_BUCKETS = 100
MAX_LABEL_CHARACTERS = 64
DIGEST_CHARACTERS = 12
BASE_LABEL, OTHER_LABEL, UNKNOWN_LABEL, ANONYMOUS_LABEL = "base", "other", "unknown", "anonymous"
RESERVED_LABELS = frozenset((BASE_LABEL, OTHER_LABEL, UNKNOWN_LABEL, ANONYMOUS_LABEL))

LORAX_COUNTERS = frozenset(
    ("lorax_request_count", "lorax_request_success", "lorax_request_failure", "lorax_batch_inference_count")
)
LORAX_COUNTER_HEADER = re.compile(rf"^(# (?:HELP|TYPE) (?:{'|'.join(sorted(LORAX_COUNTERS))}))_total ", re.MULTILINE)
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

FAILURE_BY_ERROR_TYPE = {
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
ADAPTER_ERROR_STATUSES = (400, 403, 404, 424)  # the adapter caused the failure if `error_type` is "generation"


class Registry(CollectorRegistry):
    """A registry that keeps metric names unchanged and omits `_created` samples."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if sample.name != f"{family.name}_created"]
            if family.name in LORAX_COUNTERS:
                family.samples = [sample._replace(name=family.name) for sample in family.samples]
            yield family


class Versions(Protocol):
    """The number of requests and the configured fraction of requests for each version of an adapter."""

    @property
    def num_requests(self) -> Mapping[int, int]: ...

    @property
    def weights(self) -> Mapping[int, float]: ...


class Metrics:
    """All metrics in `/metrics`. This class is not thread-safe: use it from one event loop.

    Durations and token counts are recorded for successful requests only. Failures are counted by error type.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, *, max_input_length: int, max_total_tokens: int, max_labels: int = 500) -> None:
        self.registry = registry = Registry()
        counter = partial(Counter, registry=registry)
        self._count = counter("lorax_request_count", "Requests received")
        self._success = counter("lorax_request_success", "Successful requests")
        self._failure = counter("lorax_request_failure", "Failed requests by failure kind", ("err",))
        duration = partial(Histogram, registry=registry, buckets=DURATION_BUCKETS_S)
        self._adapter_wait = duration("lorax_request_adapter_duration", "Seconds in the queue waiting for the adapter")
        self._time_per_token = duration("lorax_request_mean_time_per_token_duration", "Seconds of inference per token")
        self._time_to_first_token = duration(
            "lorax_request_time_to_first_token_duration", "Seconds until the first token"
        )
        self._time_per_output_token = duration(
            "lorax_request_time_per_output_token_duration", "Seconds per token after the first"
        )
        tokens = partial(Histogram, registry=registry)
        inputs, outputs = _token_buckets(max_input_length), _token_buckets(max_total_tokens)
        self._histograms = {  # histograms by request record field
            "total_s": duration("lorax_request_duration", "Seconds from arrival to the end of the response"),
            "validation_s": duration("lorax_request_validation_duration", "Seconds until submission to the engine"),
            "queue_s": duration("lorax_request_queue_duration", "Seconds from submission to the first step"),
            "inference_s": duration("lorax_request_inference_duration", "Seconds from the first step to the end"),
            "prompt_tokens": tokens("lorax_request_input_length", "Prompt tokens per request", buckets=inputs),
            "generated_tokens": tokens(
                "lorax_request_generated_tokens", "Generated tokens per request", buckets=outputs
            ),
            "skipped_tokens": tokens(
                "lorax_request_skipped_tokens", "Tokens accepted from drafts per request", buckets=outputs
            ),
            "max_new_tokens": tokens("lorax_request_max_new_tokens", "max_new_tokens per request", buckets=outputs),
        }
        self.connections = Gauge("lorax_connections", "Open connections", registry=registry)
        self.rejected_connections = counter(
            "lorax_connections_rejected_total", "Rejected connections by reason", ("reason",)
        )
        self.adapter_updates = counter(
            "lorax_adapter_updates_total", "Uploads of adapter weights by result", ("result",)
        )
        self.adapter_update_duration = duration(
            "lorax_adapter_update_duration", "Seconds from the end of an upload until new requests use its weights"
        )
        self._adapters = _AdapterMetrics(registry, max_labels)
        self.versions = VersionMetrics(registry)
        self.engine = EngineMetrics(registry)

    def count_request(self) -> None:
        """Count a received request."""
        self._count.inc()

    def record_finished(self, record: RequestRecord) -> None:
        """Record a finished request, whether it succeeded or failed."""
        failure = classify_failure(record)
        self._record_outcome(record, failure)
        self._adapters.record_finished(record, failure)

    def record_rejection(self, record: RequestRecord) -> None:
        """Record a request that was rejected before its adapter was known."""
        self.count_request()
        self._record_outcome(record, classify_failure(record))

    def render_prometheus(self) -> bytes:
        return LORAX_COUNTER_HEADER.sub(r"\1 ", generate_latest(self.registry).decode()).encode()

    def render_json(self) -> dict[str, Any]:
        """Return the metrics by family, in LoRAX's JSON format."""
        families: dict[str, Any] = {}
        for family in self.registry.collect():
            is_suffixed = family.type == "counter" and family.name not in LORAX_COUNTERS
            data = [{"key": _json_key(sample), "value": float(sample.value)} for sample in family.samples]
            families[f"{family.name}_total" if is_suffixed else family.name] = {"type": family.type, "data": data}
        return families

    def _record_outcome(self, record: RequestRecord, failure: str | None) -> None:
        if failure is not None:
            self._failure.labels(failure).inc()
            return
        self._success.inc()
        for field, histogram in self._histograms.items():
            histogram.observe(_clamp_to_finite(getattr(record, field)))
        if record.adapter_id:
            self._adapter_wait.observe(_clamp_to_finite(record.adapter_s))
        self._observe_throughput(record)

    def _observe_throughput(self, record: RequestRecord) -> None:
        """Record the time to first token and the time per token, averaged over the request's choices."""
        per_choice = _clamp_to_finite(record.generated_tokens) / max(1, record.num_choices)
        if per_choice > 0:
            self._time_per_token.observe(_clamp_to_finite(record.inference_s) / per_choice)
        if record.first_token_s is None:
            return
        first_s = _clamp_to_finite(record.first_token_s)
        self._time_to_first_token.observe(
            _clamp_to_finite(record.validation_s) + _clamp_to_finite(record.queue_s) + first_s
        )
        if per_choice > 1:
            self._time_per_output_token.observe(_clamp_to_finite(record.inference_s - first_s) / (per_choice - 1))


class _AdapterMetrics:
    """Usage metrics by adapter and by key. Failed requests are included, with tokens and times until the failure."""

    def __init__(self, registry: CollectorRegistry, max_labels: int) -> None:
        self._max_labels = max_labels
        self._names: set[str] = set()
        self._keys: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        counter = partial(Counter, registry=registry)
        self._requests = counter("lorax_adapter_requests_total", "Finished requests", ("adapter",))
        self._failures = counter("lorax_adapter_failures_total", "Failed requests", ("adapter",))
        self._tokens = counter("lorax_adapter_tokens_total", "Prompt, cached and generated tokens", ("adapter", "kind"))
        self._drafts = counter("lorax_adapter_draft_tokens_total", "Draft tokens", ("adapter", "kind"))
        self._queue = counter("lorax_adapter_queue_seconds_total", "Seconds waiting for the first step", ("adapter",))
        self._load = counter("lorax_adapter_load_seconds_total", "Seconds waiting for the adapter", ("adapter",))
        self._key_tokens = counter("lorax_key_tokens_total", "Tokens by key", ("key", "adapter", "kind"))
        self._key_requests = counter("lorax_key_requests_total", "Requests by key", ("key", "adapter"))

    def record_finished(self, record: RequestRecord, failure: str | None) -> None:
        adapter = self._adapter_label(record, failure)
        key = self._label(record.key, self._keys) if record.key else ANONYMOUS_LABEL
        key_adapter = adapter if self._add_label((key, adapter), self._pairs) else OTHER_LABEL
        self._requests.labels(adapter).inc()
        self._key_requests.labels(key, key_adapter).inc()
        if failure is not None:
            self._failures.labels(adapter).inc()
        self._queue.labels(adapter).inc(_clamp_to_finite(record.queue_s))
        self._load.labels(adapter).inc(_clamp_to_finite(record.adapter_s))
        for kind, tokens in {"drafted": record.drafted_tokens, "accepted": record.skipped_tokens}.items():
            self._drafts.labels(adapter, kind).inc(_clamp_to_finite(tokens))
        kinds = {"prompt": record.prompt_tokens, "cached": record.cached_tokens, "generated": record.generated_tokens}
        for kind, tokens in kinds.items():
            self._tokens.labels(adapter, kind).inc(_clamp_to_finite(tokens))
            self._key_tokens.labels(key, key_adapter, kind).inc(_clamp_to_finite(tokens))

    def _adapter_label(self, record: RequestRecord, failure: str | None) -> str:
        """Return the adapter label. Unknown names share one label because clients can invent any number of them."""
        if record.adapter_id == "":
            return BASE_LABEL
        is_found = record.status != 404 and (failure is None or record.identity)
        if record.adapter_id is None or not (is_found or record.is_known_adapter):
            return UNKNOWN_LABEL
        if record.has_several_adapters:  # clients can invent any number of combinations
            return OTHER_LABEL
        return self._label(record.adapter_id, self._names)

    def _label(self, name: str, labels: set[str]) -> str:
        label = sanitize_label(name)
        return label if self._add_label(label, labels) else OTHER_LABEL

    def _add_label(self, label: Hashable, labels: set[Any]) -> bool:
        """Add a label. Return False if the label is new and the label limit is reached."""
        if label not in labels and len(labels) >= self._max_labels:
            return False
        labels.add(label)
        return True


def classify_failure(record: RequestRecord) -> str | None:
    """Return the `err` label for a request, or None if it succeeded."""
    if record.is_dropped:
        return "dropped"
    if not record.error_type and record.status < 400:
        return None
    if record.adapter_id and record.error_type == "generation" and record.status in ADAPTER_ERROR_STATUSES:
        return "load_adapter" if record.identity else "download_adapter"
    return FAILURE_BY_ERROR_TYPE.get(record.error_type, "bad_request" if 400 <= record.status < 500 else "generation")


def sanitize_label(name: str) -> str:
    """Return a short, printable form of a name. Changed names get a digest suffix to keep them distinct."""
    if len(name) <= MAX_LABEL_CHARACTERS and name.isprintable() and name not in RESERVED_LABELS:
        return name
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    start = name[: MAX_LABEL_CHARACTERS - DIGEST_CHARACTERS - 1]
    return "".join(character if character.isprintable() else "?" for character in start) + "~" + digest


def _json_key(sample: Sample) -> str:
    """Return the sample's name and labels in Prometheus format, or only LoRAX's name suffix if there are no labels."""
    if not sample.labels:
        return next((end for end in ("sum", "count") if sample.name.endswith(end)), "")
    labels = ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}"


def _token_buckets(limit: int) -> tuple[float, ...]:
    return tuple(limit * step / NUM_TOKEN_BUCKETS for step in range(1, NUM_TOKEN_BUCKETS + 1))


def _clamp_to_finite(value: float) -> float:
    """Return the value, or 0 for NaN, infinite and negative values, which would corrupt sums permanently."""
    return value if isfinite(value) and value > 0 else 0.0


# --- Engine metrics ---------------------------------------------------------------------------------------------------


class StatusMetric(NamedTuple):
    """A metric that exports one or more engine status fields. Multiple fields are distinguished by a label."""

    name: str
    help: str
    fields: str | dict[str, str]  # one status field, or status fields by label value
    label: str = ""


ENGINE_COUNTERS = (
    StatusMetric(
        "lorax_batch_inference_count",
        "Steps; a step may contain prefill and decode tokens",
        {"step": "steps"},
        "method",
    ),
    StatusMetric("lorax_engine_steps_total", "Engine steps", "steps"),
    StatusMetric(
        "lorax_engine_tokens_total",
        "Tokens computed by the model, and tokens generated",
        {"computed": "computed_tokens", "generated": "generated_tokens"},
        "kind",
    ),
    StatusMetric(
        "lorax_engine_draft_tokens_total",
        "Draft tokens verified, and draft tokens accepted",
        {"drafted": "drafted_tokens", "accepted": "accepted_tokens"},
        "kind",
    ),
    StatusMetric(
        "lorax_prefix_cache_tokens_total",
        "Prompt tokens found in the prefix cache, by the weights that computed them",
        {"base": "base_prefix_tokens", "adapter": "adapter_prefix_tokens"},
        "shared",
    ),
    StatusMetric("lorax_engine_idle_seconds_total", "Seconds without work", "idle_s"),
    StatusMetric("lorax_prompt_chunks_total", "Prefill chunks of prompts that did not fit into one step", "chunks"),
    StatusMetric("lorax_preemptions_total", "Sequences preempted because KV blocks ran out", "preemptions"),
    StatusMetric(
        "lorax_fairness_preemptions_total", "Preemptions for tenants below their share of slots", "fairness_preemptions"
    ),
    StatusMetric("lorax_cache_evictions_total", "KV blocks evicted from the prefix cache", "cache_evictions"),
    StatusMetric(
        "lorax_engine_rejected_requests_total", "Requests rejected by the engine because of overload", "rejected"
    ),
    StatusMetric("lorax_adapters_prepared_total", "Adapters prepared in host memory", "adapters_prepared"),
    StatusMetric("lorax_adapters_loaded_total", "Adapters loaded to the device", "adapters_loaded"),
    StatusMetric("lorax_adapters_failed_total", "Adapters that could not be prepared", "adapters_failed"),
    StatusMetric(
        "lorax_adapter_evictions_total",
        "Adapter evictions by tier",
        {"device": "adapters_evicted_from_device", "host": "adapters_evicted_from_host"},
        "tier",
    ),
    StatusMetric("lorax_adapter_moves_total", "Adapters moved within device memory", "adapter_moves"),
)


ENGINE_GAUGES = (
    StatusMetric("lorax_queue_length", "Waiting requests", "waiting"),
    StatusMetric("lorax_batch_current_size", "Running requests", "running"),
    StatusMetric("lorax_waiting_for_adapters", "Requests waiting for their adapter", "waiting_for_adapters"),
    StatusMetric(
        "lorax_expert_imbalance", "Tokens of the most used expert divided by the mean over experts", "expert_imbalance"
    ),
    StatusMetric("lorax_kv_blocks", "KV blocks", "num_blocks"),
    StatusMetric("lorax_kv_blocks_free", "KV blocks not used by any request", "free_blocks"),
    StatusMetric(
        "lorax_adapters_resident",
        "Adapters by tier",
        {
            "device": "adapters_on_device",
            "host": "adapters_on_host",
            "preparing": "adapters_preparing",
            "fetching": "adapters_fetching",
        },
        "tier",
    ),
)


class EngineMetrics(Collector):
    """Exports the engine status. An engine restart resets the counters; Prometheus functions handle such resets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._is_healthy = False
        self._num_restarts = 0
        self._status: EngineStatus | None = None
        self._last_status: EngineStatus | None = None  # counters keep their values if the engine does not respond
        registry.register(self)

    def update(self, status: EngineStatus | None, is_healthy: bool, num_restarts: int) -> None:
        """Update all metrics from the engine status, which is None if the engine does not respond."""
        self._is_healthy, self._num_restarts = is_healthy, num_restarts
        self._status, self._last_status = status, status or self._last_status

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("lorax_engine_healthy", "1 if the engine responds, otherwise 0", self._is_healthy)
        yield CounterMetricFamily("lorax_engine_restarts_total", "Engine restarts", self._num_restarts)
        for kind, metrics, status in (
            (GaugeMetricFamily, ENGINE_GAUGES, self._status),
            (CounterMetricFamily, ENGINE_COUNTERS, self._last_status),
        ):
            for metric in metrics:
                family = kind(metric.name, metric.help, labels=(metric.label,) if metric.label else ())
                fields = {"": metric.fields} if isinstance(metric.fields, str) else metric.fields
                for label, field in fields.items():
                    family.add_metric([label], 0 if status is None else getattr(status, field))
                yield family


# --- Uploaded versions ------------------------------------------------------------------------------------------------


class VersionMetrics(Collector):
    """Exports metrics for uploaded versions. Removed versions are not exported."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.list_adapters: Callable[[], Iterable[tuple[str, Versions]]] = tuple  # set by `Service`
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        labels = ("adapter", "version")
        weights = GaugeMetricFamily("lorax_adapter_version_weight", "Fraction of requests by version", labels=labels)
        requests = CounterMetricFamily("lorax_adapter_version_requests", "Requests by version", labels=labels)
        for name, versions in self.list_adapters():
            for number, weight in versions.weights.items():
                weights.add_metric([sanitize_label(name), f"v{number}"], weight)
            for number, count in versions.num_requests.items():
                requests.add_metric([sanitize_label(name), f"v{number}"], count)
        yield weights
        yield requests
