"""OpenTelemetry traces of finished requests, exported with OTLP over HTTP (usually port 4318).

LoRAX uses OTLP over gRPC (port 4317); most collectors accept both. Use `OTEL_*` variables for headers, certificates and
sampling. Export runs on a thread with a bounded queue, so a slow or unreachable collector never delays requests; spans
are dropped instead.
"""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lorax_server.errors import ConfigError
from lorax_server.server.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"
GRPC_PORT = 4317
SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
MAX_ATTRIBUTE_CHARACTERS = 256  # limit for client-supplied values
NS_PER_S = 1_000_000_000
SERVICE_NAME = "lorax.server"


class Tracer:
    """Exports a trace for each finished request if an endpoint is configured. `model` is the base model name."""

    def __init__(self, endpoint: str | None, model: str = "") -> None:
        self._model = model
        self._exporter = None if endpoint is None else _make_exporter(_traces_url(endpoint))
        self._provider = None if self._exporter is None else _make_provider(self._exporter)

    def export_trace(self, record: RequestRecord) -> None:
        """Export the trace of a finished request. Errors are logged and never reach the client."""
        if self._provider is None:
            return
        try:
            self._trace(self._provider, record)
        except Exception:
            logger.warning("could not trace a request", exc_info=True)

    def close(self) -> None:
        """Export the queued spans for up to `CLOSE_TIMEOUT_S`, and drop the remaining spans."""
        if self._provider is None:
            return
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # drop the remaining spans instead of retrying for half a minute
        self._provider = None

    def _trace(self, provider: "TracerProvider", record: RequestRecord) -> None:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        tracer = provider.get_tracer("lorax_server")
        carrier = {"traceparent": record.trace_parent} if record.trace_parent else {}
        root = tracer.start_span(
            "lorax.request",
            context=TraceContextTextMapPropagator().extract(carrier, Context()),
            kind=trace.SpanKind.SERVER,
            attributes=make_span_attributes(record, self._model),
            start_time=_to_timestamp_ns(record, 0.0),
        )
        context = trace.set_span_in_context(root, Context())
        for name, start_s, end_s in list_stages(record):
            child = tracer.start_span(name, context=context, start_time=_to_timestamp_ns(record, start_s))
            child.end(_to_timestamp_ns(record, end_s))
        error_kind = classify_error(record)
        if error_kind:
            root.set_status(trace.Status(trace.StatusCode.ERROR, error_kind))
        root.end(_to_timestamp_ns(record, record.total_s))


def list_stages(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Return the stages that the request reached: name, start and end, in seconds since its arrival."""
    queued_s = record.validation_s + record.queue_s
    stages = [("validation", 0.0, record.validation_s)]
    if record.queue_s > 0 or record.inference_s > 0:
        stages.append(("queue", record.validation_s, queued_s))
    if record.inference_s > 0:
        first_s = record.inference_s if record.first_token_s is None else min(record.first_token_s, record.inference_s)
        stages.append(("prefill", queued_s, queued_s + first_s))
        if record.generated_tokens > 1:
            stages.append(("decode", queued_s + first_s, queued_s + record.inference_s))
    return stages


def name_operation(route: str) -> str:
    """Return the operation name that OpenTelemetry's GenAI conventions define for a route."""
    if "embed" in route:
        return "embeddings"
    if any(name in route for name in ("classify", "rerank", "score")):
        return route.rsplit("/", 1)[-1]  # the conventions define no name
    return "chat" if "chat" in route or "responses" in route else "text_completion"


def classify_error(record: RequestRecord) -> str:
    """Return the kind of error, or "" on success. Error messages are not exported, because they may quote the
    request.
    """
    if record.is_dropped:
        return "dropped"
    return record.error_type or (str(record.status) if record.status >= 400 else "")


def make_span_attributes(record: RequestRecord, model: str) -> "Mapping[str, AttributeValue]":
    """Return span attributes, using the OpenTelemetry GenAI and HTTP conventions where they define a name."""
    values: dict[str, AttributeValue] = {
        "gen_ai.operation.name": name_operation(record.route),
        "gen_ai.provider.name": "lorax",
        "gen_ai.request.model": _truncate(record.adapter_id or model),
        "gen_ai.request.choice.count": record.num_choices,
        "gen_ai.request.max_tokens": record.max_new_tokens,
        "gen_ai.request.stream": record.is_streamed,
        "gen_ai.response.id": _truncate(record.request_id),
        "gen_ai.response.model": _truncate(model),
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.output_tokens": record.generated_tokens,
        "http.route": _truncate(record.route),
        "http.response.status_code": record.status,
        "error.type": classify_error(record),
        "lorax.adapter": _truncate(record.adapter_id or ""),
        "lorax.adapter_hash": record.identity,
        "lorax.adapter_source": _truncate(record.source),
        "lorax.adapter_wait_s": record.adapter_s,
        "lorax.key": _truncate(record.key),
    }
    if record.first_token_s is not None:
        values["gen_ai.response.time_to_first_chunk"] = record.validation_s + record.queue_s + record.first_token_s
    return {name: value for name, value in values.items() if value not in ("", ())}


def _truncate(text: str) -> str:
    """Truncate the text and replace lone surrogates, because one invalid string would fail the whole batch."""
    return text[:MAX_ATTRIBUTE_CHARACTERS].encode(errors="replace").decode()


def _to_timestamp_ns(record: RequestRecord, offset_s: float) -> int:
    return int((record.started_at + offset_s) * NS_PER_S)


def _traces_url(endpoint: str) -> str:
    """Return the export URL. The OTLP traces path is added if the endpoint has no path."""
    try:
        parsed = urlsplit(endpoint)
        port = parsed.port
    except ValueError as error:
        raise ConfigError(f"otlp endpoint {endpoint!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        raise ConfigError(f"otlp endpoint {endpoint!r} must look like http://host:4318 (OTLP over HTTP)")
    if port == GRPC_PORT:
        logger.warning("%s uses the OTLP/gRPC port, but traces are sent with OTLP/HTTP (usually port 4318)", endpoint)
    return endpoint if parsed.path.strip("/") else parsed._replace(path=TRACES_PATH).geturl()


def _make_exporter(url: str) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("tracing requires extra packages: pip install lorax_server[otel]") from error
    return OTLPSpanExporter(endpoint=url, timeout=SEND_TIMEOUT_S)


def _make_provider(exporter: "SpanExporter") -> "TracerProvider":
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
