"""Traces by OpenTelemetry: a span for each request, and below it one for each flush and each operation on a store.

Nothing of OpenTelemetry is imported unless LLOG_OTEL_ENDPOINT names a collector.
"""

from __future__ import annotations

import time
from contextvars import Token
from typing import TYPE_CHECKING, Any, Final

from llog.config import Settings
from llog.errors import MissingExtra
from llog.log.log import Log
from llog.metrics.stores import BLOBS, META, counts_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_CLOSE_MS: Final = 5000


class RequestSpan:
    """The span of a request that is being answered."""

    def __init__(self, span: Span, token: Token[Context]) -> None:
        self._span = span
        self._token = token
        about = span.get_span_context()
        self.trace_id = f"{about.trace_id:032x}"
        self.span_id = f"{about.span_id:016x}"
        self.flags = f"{about.trace_flags:02x}"

    def end(self, path: str, status: int) -> None:
        from opentelemetry import context
        from opentelemetry.trace import StatusCode

        context.detach(self._token)
        self._span.set_attributes({"url.path": path, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Tracer:
    """Sends spans to a collector in the background. A collector that is away costs spans and nothing else."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("llog.broker")

    def begin_request(self, method: str, traceparent: str | None, tracestate: str | None) -> RequestSpan:
        """Begin the span of a request, below the caller's span if the request names one."""
        from opentelemetry import context
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: value for name, value in (("traceparent", traceparent), ("tracestate", tracestate)) if value}
        parent = TraceContextTextMapPropagator().extract(carrier, context.Context())
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, {"http.request.method": method})
        return RequestSpan(span, context.attach(set_span_in_context(span)))

    def record(self, name: str, seconds: float, **attributes: str | float) -> None:
        """Record what has just ended, below the span of the request that it was done for, if there is one."""
        from opentelemetry.trace import get_current_span

        if not get_current_span().get_span_context().is_valid:
            return
        now_ns = time.time_ns()
        started_ns = now_ns - int(seconds * 1e9)
        self._tracer.start_span(name, start_time=started_ns, attributes=attributes).end(now_ns)

    def watch_stores(self, log: Log) -> None:
        """Record every operation on the stores of this log from now on."""
        for store, counts in ((META, counts_of(log.meta)), (BLOBS, counts_of(log.blobs))):
            if counts is not None:
                counts.on_operation = self._recorder(store)

    def close(self) -> None:
        """Send what is left."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()

    def _recorder(self, store: str) -> Any:
        def record(operation: str, size: int, seconds: float, failures: int) -> None:
            self.record(f"{store} {operation}", seconds, bytes=size, failures=failures)

        return record


def open_tracer(settings: Settings) -> Tracer | None:
    """Return the tracer that the settings name; None if traces are off. `MissingExtra` without OpenTelemetry."""
    if settings.otel_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtra(
            f'LLOG_OTEL_ENDPOINT is set, and {error.name} is missing: pip install "leaderless-log[otel]"'
        ) from error
    resource = Resource.create({"service.name": "llog-broker", "service.instance.id": settings.client_name})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otel_endpoint)))
    return Tracer(provider)
