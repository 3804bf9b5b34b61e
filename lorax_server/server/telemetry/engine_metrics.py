"""Metrics of the engine, from the status that it reports."""

from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from lorax_server.types import EngineStatus

MetricT = TypeVar("MetricT", Counter, Gauge)


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
    StatusMetric("lorax_rows_taken_back_total", "Rows that others had a right to", "rows_taken_back"),
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
