"""Spans and metrics that OpenTelemetry gets; in separate processes, since its set-up is global."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime import telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator

_SET_UP = """
    import asyncio, json, logging, sys
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    mine = trace.get_tracer("mine")

    def told():
        found = spans.get_finished_spans()
        names = {span.context.span_id: span.name for span in found}
        points = [
            (metric.name, dict(point.attributes), getattr(point, "value", None))
            for resource in reader.get_metrics_data().resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        ]
        return {
            "spans": [
                (span.name, names.get(span.parent.span_id) if span.parent else None,
                 dict(span.attributes), span.status.status_code.name)
                for span in found
            ],
            "points": points,
        }
"""


def _run(code: str) -> Any:
    script = f"{dedent(_SET_UP)}\n{dedent(code)}\nprint(json.dumps(told()))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_requests_are_spans_below_the_callers_and_are_counted() -> None:
    """A service sees what its own request asked of the storage."""
    told = _run("""
        from icechunk_async import Repository

        async def main():
            async with Repository.create("memory://traced") as repository:
                with mine.start_as_current_span("my request"):
                    await repository.list_branches()
                    with_error = repository.lookup_branch("none")
                    try:
                        await with_error
                    except KeyError:
                        pass

        asyncio.run(main())
    """)
    below = [it for it in told["spans"] if it[1] == "my request"]
    assert {name for name, *_ in below} <= {
        "icechunk.storage.get",
        "icechunk.storage.get_if_changed",
    }
    assert below
    keys = [attributes["icechunk.key"] for _, _, attributes, _ in below]
    assert keys == ["repo"] * len(below)
    counted = {
        attributes["operation"]: value
        for name, attributes, value in told["points"]
        if name == "icechunk.storage.requests" and "error.type" not in attributes
    }
    assert counted["put"] >= 2
    written = [it for it in told["spans"] if it[0] == "icechunk.storage.put"]
    assert all(attributes["icechunk.bytes_out"] > 0 for _, _, attributes, _ in written)
    volumes = {
        (attributes["operation"], attributes["direction"]): value
        for name, attributes, value in told["points"]
        if name == "icechunk.storage.bytes"
    }
    total = sum(attributes["icechunk.bytes_out"] for _, _, attributes, _ in written)
    assert volumes["put", "out"] == total


def test_a_failed_request_says_so() -> None:
    """The error's class is on the span and in the counts; its message is on the span only."""
    told = _run("""
        from icechunk_async.storage import open_storage
        from icechunk_async.storage.policies.stack import traced
        from icechunk_async.errors import ObjectNotFoundError

        async def main():
            async with open_storage("memory://traced") as storage:
                try:
                    await traced(storage).get("gone")
                except ObjectNotFoundError:
                    pass

        asyncio.run(main())
    """)
    [(name, _, attributes, status)] = told["spans"]
    assert (name, status) == ("icechunk.storage.get", "ERROR")
    assert attributes["error.type"] == "ObjectNotFoundError"
    errors = [it[1] for it in told["points"] if it[0] == "icechunk.storage.requests"]
    assert errors == [{"operation": "get", "error.type": "ObjectNotFoundError"}]


def test_retries_and_cache_reads_are_counted() -> None:
    """Cached reads and retries have counters."""
    told = _run("""
        from icechunk_async.errors import StorageUnavailableError
        from icechunk_async.storage import open_storage
        from icechunk_async.storage.policies.cache import Cached, CacheOptions
        from icechunk_async.storage.policies.retry import Retrying
        from icechunk_async.storage.policies.values import RetryPolicy
        from icechunk_async.storage.policies.wrapping import PassingStorage

        class Stumbling(PassingStorage):
            failed = False

            async def get(self, key, byte_range=None):
                if not self.failed:
                    self.failed = True
                    raise StorageUnavailableError("not yet")
                return await self.wrapped.get(key, byte_range)

        async def main():
            async with open_storage("memory://traced") as storage:
                await storage.put("a", b"1")
                patient = Retrying(Stumbling(storage), RetryPolicy(initial_seconds=0))
                cached = Cached(patient, CacheOptions(), immutable=lambda key: True)
                await cached.get("a")
                await cached.get("a")
                cached.close()

        asyncio.run(main())
    """)
    points = {(name, json.dumps(attributes)): value for name, attributes, value in told["points"]}
    assert points["icechunk.storage.retries", '{"reason": "storage-unavailable"}'] == 1
    assert points["icechunk.cache.reads", '{"result": "miss"}'] == 1
    assert points["icechunk.cache.reads", '{"result": "memory"}'] == 1


def test_nobody_listening_costs_no_wrapper() -> None:
    """Where nothing was set up, requests pass no tracer, and nothing of it is imported."""
    code = """
        import sys
        from icechunk_async.storage.policies.stack import traced
        import icechunk_async._runtime.telemetry as telemetry
        storage = object()
        assert traced(storage) is storage
        with telemetry.span("anything", branch="main"):
            pass
        assert "opentelemetry" not in sys.modules
        telemetry.is_installed.cache_clear()
        import importlib.util
        importlib.util.find_spec = lambda name: None
        with telemetry.span("anything", branch="main"):
            telemetry.add("cache.reads", 1, result="miss")
        assert traced(storage) is storage
    """
    subprocess.run([sys.executable, "-W", "error", "-c", dedent(code)], check=True, timeout=240)


@pytest.mark.parametrize(
    ("name", "provider", "listening"),
    [
        ("OTEL_PYTHON_TRACER_PROVIDER", "sdk_tracer_provider", True),
        ("OTEL_PYTHON_METER_PROVIDER", "sdk_meter_provider", True),
        ("OTEL_SERVICE_NAME", "mine", False),
    ],
)
def test_the_environment_sets_it_up_too(name: str, provider: str, *, listening: bool) -> None:
    """Where nothing has imported OpenTelemetry yet, and nothing else would."""
    script = """
        import sys
        from icechunk_async._runtime import telemetry
        print(telemetry.is_listening(), "opentelemetry" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        env={**os.environ, name: provider},
    )
    assert done.stdout.split() == [str(listening), str(listening)]


def test_whether_something_listens_is_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opening of a storage asks, in processes of thousands of modules."""

    class _Asked(dict[str, object]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all were looked at")

        keys = items = values = __iter__  # type: ignore[assignment]

    monkeypatch.setattr(telemetry, "sys", SimpleNamespace(modules=_Asked()))
    monkeypatch.setattr(telemetry, "os", SimpleNamespace(environ=_Asked()))
    assert not telemetry.is_listening()
    monkeypatch.setattr(telemetry, "is_installed", lambda: False)
    for name in ("opentelemetry.metrics", "opentelemetry.trace"):
        monkeypatch.setattr(telemetry, "sys", SimpleNamespace(modules=_Asked({name: None})))
        assert not telemetry.is_listening()  # as it is not installed


def test_what_the_engine_does_is_spans_too() -> None:
    """A commit that lost a race shows its rebase; requests are below what needed them."""
    told = _run("""
        from datetime import UTC, datetime
        from icechunk_async import Repository
        from icechunk_async.conflicts import ConflictDetector

        async def main():
            async with Repository.create("memory://traced") as repository:
                slow = await repository.writable_session("main")
                fast = await repository.writable_session("main")
                await fast.commit("first", allow_empty=True)
                await slow.commit("second", allow_empty=True, rebase_with=ConflictDetector())
                await repository.expire_snapshots(datetime(2020, 1, 1, tzinfo=UTC))
                await repository.garbage_collect(datetime(2020, 1, 1, tzinfo=UTC))

        asyncio.run(main())
    """)
    parents = {name: parent for name, parent, _, _ in told["spans"]}
    assert parents["icechunk.commit"] is None
    assert parents["icechunk.rebase"] == "icechunk.commit"
    assert parents["icechunk.expire"] is parents["icechunk.garbage_collect"] is None
    commits = [attributes for name, _, attributes, _ in told["spans"] if name == "icechunk.commit"]
    assert commits == [{"icechunk.branch": "main"}] * 2
    puts = [parent for name, parent, _, _ in told["spans"] if name == "icechunk.storage.put"]
    assert "icechunk.commit" in puts
    rebases = [it[2] for it in told["points"] if it[0] == "icechunk.commit.rebases"]
    assert rebases == [1]


def test_publications_and_upkeep_are_logged() -> None:
    """For operators: what was published, dropped and deleted; nothing is printed unasked."""
    code = """
        import asyncio, logging, sys
        from datetime import UTC, datetime
        from icechunk_async import Repository

        async def main():
            async with Repository.create("memory://logged") as repository:
                session = await repository.writable_session("main")
                if len(sys.argv) > 1:
                    logging.basicConfig(level=logging.INFO)
                await session.commit("hello", allow_empty=True)
                await repository.garbage_collect(datetime(2020, 1, 1, tzinfo=UTC), dry_run=True)

        asyncio.run(main())
    """
    for arguments in ([], ["logged"]):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", dedent(code), *arguments],
            check=True,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=240,
        )
        assert done.stdout == ""
        assert ("hello" in done.stderr) == bool(arguments)
        assert ("dry run" in done.stderr) == bool(arguments)
