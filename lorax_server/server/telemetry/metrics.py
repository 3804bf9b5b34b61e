"""What is counted and measured, for Prometheus and as JSON.

Names that LoRAX has are LoRAX's, also where Prometheus would end a counter in `_total`; ours end so. What a caller can
choose, such as an adapter's name, becomes a label only if it was found, in a form that is short and can be printed, and
for a limited number of names; all others share one.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lorax_server.server.telemetry.request_record import RequestRecord
from lorax_server.types import EngineStatus

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

FAILURE_OF_TYPE = {
    "authentication": "authentication",
    "classification_failure": "classification_failure",
    "embedding_failure": "embedding_failure",
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


class _Shown(NamedTuple):
    """Fields of an engine's status under one name, told apart by a label if they are several."""

    name: str
    text: str
    fields: dict[str, str]
    label: str = ""


ENGINE_COUNTERS = (
    _Shown("lorax_batch_inference_count", "Steps; each has prompts and single tokens", {"step": "steps"}, "method"),
    _Shown("lorax_engine_steps_total", "Steps of the engine", {"": "steps"}),
    _Shown(
        "lorax_engine_tokens_total",
        "Tokens that went through the model, and those it generated",
        {"computed": "computed_tokens", "generated": "generated_tokens"},
        "kind",
    ),
    _Shown("lorax_prefix_cache_tokens_total", "Tokens found in the cache instead of computed", {"": "prefix_tokens"}),
    _Shown("lorax_engine_idle_seconds_total", "Seconds that there was nothing to do", {"": "idle_s"}),
    _Shown("lorax_prompt_chunks_total", "Parts of prompts that did not fit into one step", {"": "chunks"}),
    _Shown("lorax_preemptions_total", "Requests that gave way for a while for lack of blocks", {"": "preemptions"}),
    _Shown("lorax_rows_taken_back_total", "Rows that others had a right to", {"": "rows_taken_back"}),
    _Shown("lorax_cache_evictions_total", "Blocks of the cache that were given to others", {"": "cache_evictions"}),
    _Shown("lorax_engine_refused_total", "Requests the engine refused because of overload", {"": "refused"}),
    _Shown("lorax_adapters_prepared_total", "Adapters made ready in host memory", {"": "adapters_prepared"}),
    _Shown("lorax_adapters_loaded_total", "Adapters brought to the device", {"": "adapters_loaded"}),
    _Shown("lorax_adapters_failed_total", "Adapters that could not be made ready", {"": "adapters_failed"}),
    _Shown(
        "lorax_adapter_evictions_total",
        "Adapters that had to leave, by where they were",
        {"device": "adapters_evicted_from_device", "host": "adapters_evicted_from_host"},
        "tier",
    ),
    _Shown("lorax_adapter_moves_total", "Adapters moved within the device's memory", {"": "adapter_moves"}),
)
ENGINE_GAUGES = (
    _Shown("lorax_queue_length", "Requests that wait", {"": "waiting"}),
    _Shown("lorax_batch_current_size", "Requests that run", {"": "running"}),
    _Shown("lorax_waiting_for_adapters", "Requests that wait for their adapter", {"": "waiting_for_adapters"}),
    _Shown("lorax_kv_blocks", "Blocks of the cache", {"": "num_blocks"}),
    _Shown("lorax_kv_blocks_free", "Blocks of the cache that nobody uses", {"": "free_blocks"}),
    _Shown(
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


class Metrics:
    """What `/metrics` shows. It belongs to one event loop."""

    def __init__(self, *, max_input_length: int, max_total_tokens: int, max_labels: int = 500) -> None:
        self.content_type = CONTENT_TYPE_PLAIN_0_0_4
        families = _Families()
        self._registry = CollectorRegistry()
        self._traffic = _Traffic(families, max_input_length, max_total_tokens)
        self._open = families.gauge("lorax_connections", "Connections that are open")
        self._refused = families.counter(
            "lorax_connections_refused_total", "Those that were not kept, by why", "reason"
        )
        self._adapters = _Adapters(families, max_labels)
        self._engine = _Engine(families)
        self._registry.register(families)

    def begin(self) -> None:
        """A request came."""
        self._traffic.begin()

    def end(self, record: RequestRecord) -> None:
        """It ended, one way or another."""
        failure = failure_kind(record)
        self._traffic.end(record, failure)
        self._adapters.end(record, failure)

    def refuse(self, record: RequestRecord) -> None:
        """A request ended before it was known what it asks for."""
        self._traffic.begin()
        self._traffic.end(record, failure_kind(record))

    def connections(self, count: int) -> None:
        """So many are open."""
        self._open.set(count)

    def refuse_connection(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def engine(self, status: EngineStatus | None, is_healthy: bool, num_restarts: int) -> None:
        """How the engine is; there is no status if it does not answer."""
        self._engine.update(status, is_healthy, num_restarts)

    def prometheus(self) -> bytes:
        return HEADER.sub(r"\1 ", generate_latest(self._registry).decode()).encode()

    def json(self) -> dict[str, Any]:
        """The same by family, as LoRAX writes it."""
        families: dict[str, Any] = {}
        data: list[dict[str, Any]] = []
        for line in self.prometheus().decode().split("\n"):
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                data = []
                families[name] = {"type": kind, "data": data}
            elif line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                data.append({"key": _json_key(sample), "value": float(value)})
        return families


def failure_kind(record: RequestRecord) -> str | None:
    """What `err` says of a request; None if all went well."""
    if record.is_dropped:
        return "dropped"
    if not record.error_type and record.status < 400:
        return None
    if record.adapter and record.error_type == "generation" and record.status in ADAPTER_STATUSES:
        return "load_adapter" if record.adapter_hash else "download_adapter"
    return FAILURE_OF_TYPE.get(record.error_type, "bad_request" if 400 <= record.status < 500 else "generation")


def _json_key(sample: str) -> str:
    if "{" in sample:
        return sample
    return next((end for end in ("sum", "count") if sample.endswith(end)), "")


class _Families(Collector):
    """All metrics, under the names they were given, without the times when each was made."""

    def __init__(self) -> None:
        self._metrics: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(name, text, labels, registry=None)
        self._metrics.append(counter)
        return counter

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        gauge = Gauge(name, text, labels, registry=None)
        self._metrics.append(gauge)
        return gauge

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        histogram = Histogram(name, text, registry=None, buckets=buckets)
        self._metrics.append(histogram)
        return histogram

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                samples = [sample for sample in family.samples if sample.name != f"{family.name}_created"]
                if family.name in UPSTREAM_COUNTERS:
                    samples = [sample._replace(name=family.name) for sample in samples]
                family.samples = samples
                yield family


# --- Requests ---------------------------------------------------------------------------------------------------------


class _Traffic:
    """Requests as a whole. What went well is measured; what failed is counted by kind."""

    def __init__(self, families: _Families, max_input_length: int, max_total_tokens: int) -> None:
        self._count = families.counter("lorax_request_count", "Requests that came")
        self._success = families.counter("lorax_request_success", "Requests that were answered")
        self._failure = families.counter("lorax_request_failure", "Requests that were not, by why", "err")
        duration = families.histogram
        self._total = duration("lorax_request_duration", "Seconds from a request to the end of its answer")
        self._validation = duration("lorax_request_validation_duration", "Seconds until it was handed to the engine")
        self._queue = duration("lorax_request_queue_duration", "Seconds from there until its first step")
        self._adapter = duration("lorax_request_adapter_duration", "Seconds of these that it waited for its adapter")
        self._inference = duration("lorax_request_inference_duration", "Seconds from its first step to the end")
        self._mean = duration("lorax_request_mean_time_per_token_duration", "Seconds of inference for each token")
        self._first = duration(
            "lorax_request_time_to_first_token_duration", "Seconds from a request to its first token"
        )
        self._later = duration("lorax_request_time_per_output_token_duration", "Seconds for each token after the first")
        inputs, outputs = _steps(max_input_length), _steps(max_total_tokens)
        self._input_length = families.histogram("lorax_request_input_length", "Tokens of a prompt", inputs)
        self._generated = families.histogram("lorax_request_generated_tokens", "Tokens of an answer", outputs)
        self._max_new = families.histogram("lorax_request_max_new_tokens", "Tokens it might have had", outputs)

    def begin(self) -> None:
        self._count.inc()

    def end(self, record: RequestRecord, failure: str | None) -> None:
        if failure is not None:
            self._failure.labels(failure).inc()
            return
        self._success.inc()
        self._total.observe(_amount(record.total_s))
        self._validation.observe(_amount(record.validation_s))
        self._queue.observe(_amount(record.queue_s))
        self._inference.observe(_amount(record.inference_s))
        if record.adapter:
            self._adapter.observe(_amount(record.adapter_s))
        self._input_length.observe(_amount(record.prompt_tokens))
        self._generated.observe(_amount(record.generated_tokens))
        self._max_new.observe(_amount(record.max_new_tokens))
        self._observe_pace(record)

    def _observe_pace(self, record: RequestRecord) -> None:
        """Several answers at once each have their own pace; what is measured is their mean."""
        per_choice = _amount(record.generated_tokens) / max(1, record.num_choices)
        if per_choice > 0:
            self._mean.observe(_amount(record.inference_s) / per_choice)
        if record.first_token_s is None:
            return
        first_s = _amount(record.first_token_s)
        self._first.observe(_amount(record.validation_s) + _amount(record.queue_s) + first_s)
        if per_choice > 1:
            self._later.observe(_amount(record.inference_s - first_s) / (per_choice - 1))


def _steps(limit: int) -> tuple[float, ...]:
    return tuple(limit * step / NUM_STEPS for step in range(1, NUM_STEPS + 1))


def _amount(value: float) -> float:
    """One number that is none would spoil a sum for good."""
    return value if isfinite(value) and value > 0 else 0.0


# --- Adapters and keys ------------------------------------------------------------------------------------------------


class _Adapters:
    """Who used which adapter, and how much of it; also of requests that failed, as far as they came."""

    def __init__(self, families: _Families, max_labels: int) -> None:
        self._max_labels = max_labels
        self._names = _Names(max_labels)
        self._keys = _Names(max_labels)
        self._pairs: set[tuple[str, str]] = set()
        counter = families.counter
        self._requests = counter("lorax_adapter_requests_total", "Requests that ended", "adapter")
        self._failures = counter("lorax_adapter_failures_total", "Requests that failed", "adapter")
        self._tokens = counter("lorax_adapter_tokens_total", "Tokens of prompts and answers", "adapter", "kind")
        self._queue = counter("lorax_adapter_queue_seconds_total", "Waiting for the first step", "adapter")
        self._load = counter("lorax_adapter_load_seconds_total", "Waiting for the adapter", "adapter")
        self._used = counter("lorax_key_tokens_total", "Tokens by who used them", "key", "adapter", "kind")
        self._asked = counter("lorax_key_requests_total", "Requests by who sent them", "key", "adapter")

    def end(self, record: RequestRecord, failure: str | None) -> None:
        adapter = self._adapter(record, failure)
        key, of_key = self._pair(self._keys.label(record.key) if record.key else ANONYMOUS, adapter)
        self._requests.labels(adapter).inc()
        self._asked.labels(key, of_key).inc()
        if failure is not None:
            self._failures.labels(adapter).inc()
        self._queue.labels(adapter).inc(_amount(record.queue_s))
        self._load.labels(adapter).inc(_amount(record.adapter_s))
        kinds = {"prompt": record.prompt_tokens, "cached": record.cached_tokens, "generated": record.generated_tokens}
        for kind, tokens in kinds.items():
            self._tokens.labels(adapter, kind).inc(_amount(tokens))
            self._used.labels(key, of_key, kind).inc(_amount(tokens))

    def _adapter(self, record: RequestRecord, failure: str | None) -> str:
        """Names that mean no adapter must not use up the labels: anybody can make them up."""
        if record.adapter == "":
            return BASE
        is_found = record.status != 404 and (failure is None or record.adapter_hash)
        if record.adapter is None or not (is_found or record.is_known):
            return UNKNOWN
        return self._names.label(record.adapter)

    def _pair(self, key: str, adapter: str) -> tuple[str, str]:
        """Once there are too many, a key's other adapters are one; what it used in all stays right."""
        pair = (key, adapter)
        if pair not in self._pairs and len(self._pairs) >= self._max_labels:
            return key, OTHER
        self._pairs.add(pair)
        return pair


class _Names:
    """The labels of the first so many names."""

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        label = clean(name)
        if label not in self._known and len(self._known) >= self._max_labels:
            return OTHER
        self._known.add(label)
        return label


def clean(name: str) -> str:
    """Short and printable; what had to be changed gets a digest of what it was, so that two do not become one."""
    if len(name) <= MAX_LABEL_CHARACTERS and name.isprintable() and name not in RESERVED:
        return name
    digest = sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARACTERS]
    shown = name[: MAX_LABEL_CHARACTERS - DIGEST_CHARACTERS - 1]
    return "".join(each if each.isprintable() else "?" for each in shown) + "~" + digest


# --- The engine -------------------------------------------------------------------------------------------------------


class _Engine:
    """An engine's status. It counts from 0 when it is started again; what is shown goes on from where it was."""

    def __init__(self, families: _Families) -> None:
        self._healthy = families.gauge("lorax_engine_healthy", "Whether the engine answers")
        self._restarts = families.counter("lorax_engine_restarts_total", "How often it was started again")
        self._gauges = {field: gauge for shown in ENGINE_GAUGES for field, gauge in _gauges(families, shown)}
        self._counters = [counter for shown in ENGINE_COUNTERS for counter in _counters(families, shown)]
        self._last = {field: 0.0 for field, _ in self._counters}
        self._life = 0  # how often it had been started again when that was its status
        self._num_restarts = 0

    def update(self, status: EngineStatus | None, is_healthy: bool, num_restarts: int) -> None:
        self._healthy.set(is_healthy)
        self._restarts.inc(max(0, num_restarts - self._num_restarts))
        self._num_restarts = max(num_restarts, self._num_restarts)
        for field, gauge in self._gauges.items():
            gauge.set(0 if status is None else getattr(status, field))
        if status is not None:
            self._count(status, num_restarts)

    def _count(self, status: EngineStatus, life: int) -> None:
        now = {field: getattr(status, field) for field in self._last}
        if life != self._life or any(now[field] < self._last[field] for field in now):
            self._last = dict.fromkeys(now, 0.0)
            self._life = life
        for field, counter in self._counters:
            counter.inc(now[field] - self._last[field])
        self._last = now


def _gauges(families: _Families, shown: _Shown) -> list[tuple[str, Gauge]]:
    labels = (shown.label,) if shown.label else ()
    gauge = families.gauge(shown.name, shown.text, *labels)
    return [(field, gauge.labels(label) if labels else gauge) for label, field in shown.fields.items()]


def _counters(families: _Families, shown: _Shown) -> list[tuple[str, Counter]]:
    labels = (shown.label,) if shown.label else ()
    counter = families.counter(shown.name, shown.text, *labels)
    return [(field, counter.labels(label) if labels else counter) for label, field in shown.fields.items()]
