"""Each request to a storage as a span and in metrics, where OpenTelemetry was set up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async import _telemetry
from icechunk_async.storage.observe import Observations, Observed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from icechunk_async.storage.observe import RequestEnd
    from icechunk_async.storage.protocol import Storage

__all__ = ["RequestTracer", "traced"]


def traced(storage: Storage) -> Storage:
    """Wrap a storage so that its requests are traced; leave it as it is if nobody listens."""
    if not _telemetry.is_listening():
        return storage
    return Observed(storage, Observations([RequestTracer()]))


class RequestTracer:
    """A hook that makes each request a client span below the caller's, and counts it."""

    def on_start(self, operation: str, key: str, /) -> Span:
        """Begin a span."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - an optional package

        return _telemetry.tracer().start_span(
            f"icechunk.storage.{operation}",
            kind=SpanKind.CLIENT,
            attributes={"icechunk.key": key},
        )

    def on_end(self, started: Span, end: RequestEnd, /) -> None:
        """End the span, and count the request."""
        from opentelemetry.trace import StatusCode  # noqa: PLC0415 - an optional package

        failed = "" if end.error is None else type(end.error).__name__
        if end.error is not None:
            started.set_attribute("error.type", failed)
            started.set_status(StatusCode.ERROR, str(end.error))
        started.set_attribute("icechunk.bytes_in", end.bytes_in)
        started.set_attribute("icechunk.bytes_out", end.bytes_out)
        started.end()
        operation = end.operation
        outcome = {"error.type": failed} if failed else {}
        _telemetry.add("storage.requests", 1, operation=operation, **outcome)
        _telemetry.record("storage.duration", end.seconds, operation=operation, **outcome)
        if end.bytes_in:
            _telemetry.add("storage.bytes", end.bytes_in, operation=operation, direction="in")
        if end.bytes_out:
            _telemetry.add("storage.bytes", end.bytes_out, operation=operation, direction="out")
