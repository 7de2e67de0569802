"""Spans and metrics through OpenTelemetry's API, where that package is installed; else nothing.

The application that sets up OpenTelemetry decides what is recorded and where it goes. A
span joins the span that is current for the caller. Names begin with ``icechunk.``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from opentelemetry.metrics import Counter, Histogram, Meter
    from opentelemetry.trace import Tracer

    type Attribute = str | int | float | bool

__all__ = ["add", "is_installed", "is_listening", "record", "span", "tracer"]

_SCOPE: Final = "icechunk_async"
_APIS: Final = ("opentelemetry.metrics", "opentelemetry.trace")
_PROVIDERS: Final = ("OTEL_PYTHON_METER_PROVIDER", "OTEL_PYTHON_TRACER_PROVIDER")
"""Variables of the environment by which OpenTelemetry's API sets itself up."""
_DESCRIPTIONS: Final = {
    "icechunk.storage.requests": ("{request}", "Requests to the storage, by operation and error."),
    "icechunk.storage.bytes": ("By", "Bytes read from and written to the storage."),
    "icechunk.storage.retries": ("{retry}", "Requests that were tried again."),
    "icechunk.cache.reads": ("{read}", "Reads through the cache, by result."),
    "icechunk.commit.rebases": ("{round}", "Commits tried again on top of another writer's."),
    "icechunk.storage.duration": ("s", "Time from a request to its answer."),
}


@cache
def is_installed() -> bool:
    """Return whether OpenTelemetry's API can be used."""
    return importlib.util.find_spec("opentelemetry") is not None


def is_listening() -> bool:
    """Return whether OpenTelemetry was set up in this process, so that spans are worth making."""
    # Looked up by name: there are thousands of modules, and each opening of a storage asks.
    is_imported = any(it in sys.modules for it in _APIS)
    if not is_imported and not any(it in os.environ for it in _PROVIDERS):
        return False  # nobody can have set it up; to import it to see that takes a while
    if not is_installed():
        return False
    from opentelemetry import metrics, trace  # noqa: PLC0415 - may not be there

    # Both answer a stand-in until a provider is set; that of metrics has no public name.
    providers = (trace.get_tracer_provider(), metrics.get_meter_provider())
    return any(not type(it).__name__.lstrip("_").startswith("Proxy") for it in providers)


@cache
def tracer() -> Tracer:
    """Return the tracer; call it only if `is_installed`."""
    from opentelemetry import trace  # noqa: PLC0415 - may not be there

    return trace.get_tracer(_SCOPE)


@cache
def _meter() -> Meter:
    from opentelemetry import metrics  # noqa: PLC0415 - may not be there

    return metrics.get_meter(_SCOPE)


@cache
def _counter(name: str) -> Counter:
    unit, description = _DESCRIPTIONS[name]
    return _meter().create_counter(name, unit, description)


@cache
def _histogram(name: str) -> Histogram:
    unit, description = _DESCRIPTIONS[name]
    return _meter().create_histogram(name, unit, description)


def span(name: str, **attributes: Attribute) -> AbstractContextManager[object]:
    """Return a context manager that makes its block a span; an error in it marks the span."""
    if not is_listening():
        return nullcontext()
    named = {f"icechunk.{key}": value for key, value in attributes.items()}
    return tracer().start_as_current_span(f"icechunk.{name}", attributes=named)


def add(name: str, amount: int, **attributes: Attribute) -> None:
    """Add to a counter."""
    if is_installed():
        _counter(f"icechunk.{name}").add(amount, attributes)


def record(name: str, value: float, **attributes: Attribute) -> None:
    """Record a value of a histogram."""
    if is_installed():
        _histogram(f"icechunk.{name}").record(value, attributes)
