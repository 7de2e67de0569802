"""The User-Agent header, by which access logs of buckets tell clients apart."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

import icechunk_async.sync as ours
from icechunk_async import __version__
from icechunk_async.errors import IcechunkError
from icechunk_async.storage import open_storage
from tests.unit.backends.loopback import serving

KEYS: dict[str, Any] = {"access_key_id": "id", "secret_access_key": "secret"}
AGENT = "weatherlib/0.9 (workload=nightly)"


class Recorder:
    """A server that has nothing, and keeps the header of each request."""

    def __init__(self) -> None:
        """Begin with none."""
        self.agents: list[tuple[str, str]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        """Reply that there is nothing."""
        self.agents.append((request.method, request.headers.get("User-Agent", "")))
        await request.read()
        return web.Response(status=404)


async def test_every_request_has_the_user_agent_that_was_given() -> None:
    """Those that the driver sends, for listing and deleting, as well."""
    recorder = Recorder()
    async with serving(recorder) as url:
        place = {"endpoint_url": url, "allow_http": True, "region": "us-east-1", **KEYS}
        async with open_storage("s3://bucket/a", user_agent=AGENT, **place) as storage:

            async def listing() -> None:
                async for _ in storage.list_prefix():
                    pass

            for request in (
                storage.get("key"),
                storage.put("key", b"bytes"),
                storage.copy("key", "other"),
                storage.delete(["key"]),
                listing(),
            ):
                with suppress(IcechunkError):
                    await request
    assert {method for method, _ in recorder.agents} >= {"GET", "PUT", "POST"}
    assert {agent for _, agent in recorder.agents} == {AGENT}


async def test_the_user_agent_is_the_librarys_name_if_none_is_given() -> None:
    """Without a version, which is nobody's business."""
    recorder = Recorder()
    async with serving(recorder) as url:
        place = {"endpoint_url": url, "allow_http": True, "region": "us-east-1", **KEYS}
        async with open_storage("s3://bucket/a", **place) as storage:
            with suppress(IcechunkError):
                await storage.get("key")
    assert recorder.agents == [("GET", "icechunk-async")]


async def test_labels_are_those_that_the_official_engine_sends() -> None:
    """The client comes before the library, and the rest after it, in parentheses."""
    os.environ.setdefault("ICECHUNK_LOG", "error")
    icechunk = pytest.importorskip("icechunk", reason="the official engine is not installed")
    found: list[set[str]] = []

    def open_at(package: Any, url: str, labels: dict[str, str]) -> None:
        storage = package.s3_storage(
            bucket="bucket",
            prefix="a",
            region="us-east-1",
            endpoint_url=url,
            allow_http=True,
            force_path_style=True,
            **KEYS,
        )
        with suppress(package.IcechunkError):
            package.Repository.open(storage, attribution=package.Attribution(**labels))

    for labels in (
        {"client": "app/1.0", "workload": "nightly run", "principal": "joe, x + a"},
        {"client": "app"},
        {"principal": "joe"},
    ):
        for package, name in ((icechunk, "icechunk/2.3.0"), (ours, None)):
            recorder = Recorder()
            # One server each: requests of the official engine may come after it has raised.
            async with serving(recorder) as url:
                await asyncio.to_thread(open_at, package, url, labels)
            own = name or f"icechunk-async/{__version__}"
            agents = {agent for _, agent in recorder.agents}
            assert all(own in agent for agent in agents), agents
            found.append({_labels(agent, own) for agent in agents})
    assert found[0::2] == found[1::2]
    assert found[0] == {"app/1.0 LIBRARY (workload=nightly run; principal=joe, x + a)"}


def _labels(agent: str, own: str) -> str:
    """Return the labels, without the names of the official engine's driver."""
    before, _, after = agent.partition(own)
    driver, _, client = before.rpartition("lang/rust/")
    client = client.partition(" ")[2] if driver else client
    return f"{client}LIBRARY{after}"
