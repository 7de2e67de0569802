"""A service is tried once an hour, not for each repository; only a success counts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from icechunk_async import Repository
from icechunk_async._runtime import clock
from icechunk_async.engine import open as engine_open
from icechunk_async.engine import trusted
from icechunk_async.errors import UnsafeStorageError
from icechunk_async.storage import Capabilities, StorageDescription, open_storage
from icechunk_async.testing.latency import LatencyStorage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from icechunk_async.storage import Data, Expected, Storage, Version

MOST_REQUESTS = 20
TRIAL_REQUESTS = 100


class Service(LatencyStorage):
    """A bucket of a service that nobody has tried."""

    def __init__(self, storage: Storage, url: str, options: dict[str, object]) -> None:
        """Stand for another URL."""
        super().__init__(storage, seconds=0)
        self._url = StorageDescription(url, options)
        self.ignores_conditions = False
        self.is_documented = False

    @property
    def description(self) -> StorageDescription:
        """The URL that it stands for."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """Promise everything, by hearsay."""
        return Capabilities(documented=self.is_documented)

    async def put(self, key: str, data: Data, *, if_version: Expected = None) -> Version:
        """Write, perhaps whatever is there."""
        return await super().put(
            key, data, if_version=None if self.ignores_conditions else if_version
        )


class Services:
    """Opens URLs, and counts the requests."""

    def __init__(self) -> None:
        """Begin."""
        self.opened: list[Service] = []
        self.ignores_conditions = False
        self.is_documented = False

    @asynccontextmanager
    async def open(self, url: str, **options: object) -> AsyncGenerator[Service]:
        """Open a URL as a folder in memory."""
        async with open_storage(f"memory://{uuid4().hex}") as plain:
            storage = Service(plain, url, options)
            storage.ignores_conditions = self.ignores_conditions
            storage.is_documented = self.is_documented
            self.opened.append(storage)
            yield storage

    async def create(
        self, url: str, options: dict[str, object] | None = None, *, probe: bool | None = None
    ) -> int:
        """Create a repository; return the number of requests."""
        async with Repository.create(url, storage_options=options or {}, probe=probe):
            return self.opened[-1].requests.total()


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    """Return services that no test has tried."""
    found = Services()
    monkeypatch.setattr(engine_open, "open_storage", found.open)
    monkeypatch.setattr(trusted, "_tried", {})
    return found


async def test_the_second_repository_takes_few_requests(services: Services) -> None:
    """Another folder of a bucket that was tried is created without a trial."""
    assert await services.create("s3://bucket/one", {"region": "x"}) > TRIAL_REQUESTS
    assert await services.create("s3://bucket/two", {"region": "x"}) <= MOST_REQUESTS
    assert await services.create("s3://bucket", {"region": "x"}) <= MOST_REQUESTS


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://other/one", {"region": "x"}),
        ("s3://bucket/one", {"region": "x", "endpoint": "http://other"}),
        ("gs://bucket/one", {"region": "x"}),
        ("s3://bucket/one", {"region": "x", "credentials": object()}),
    ],
)
async def test_conditions_of_another_service_are_tried(
    services: Services, url: str, options: dict[str, object]
) -> None:
    """Another bucket, other options, another scheme, and options that do not tell what they do."""
    await services.create("s3://bucket/one", {"region": "x"})
    assert await services.create(url, options) > TRIAL_REQUESTS
    if "credentials" in options:
        assert await services.create(url, options) > TRIAL_REQUESTS


async def test_a_url_that_may_hide_the_service_is_always_tried(services: Services) -> None:
    """In URLs of unknown schemes the bucket may be anywhere."""
    for name in ("one", "two"):
        assert await services.create(f"obstore+http://host/bucket/{name}") > TRIAL_REQUESTS


async def test_a_documented_service_takes_few_requests_at_once(services: Services) -> None:
    """It is tried as well, and what is asked for is the whole table."""
    services.is_documented = True
    first = await services.create("s3://bucket/one")
    assert 7 < first <= MOST_REQUESTS
    assert await services.create("s3://bucket/two") == 7
    assert await services.create("s3://bucket/three", probe=True) > TRIAL_REQUESTS


async def test_conditions_are_tried_again_when_the_environment_changes(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable may name another server."""
    await services.create("s3://bucket/one")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://elsewhere")
    assert await services.create("s3://bucket/two") > TRIAL_REQUESTS


async def test_trust_ends_after_an_hour(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may change."""
    now = 0
    monkeypatch.setattr(clock, "elapsed_us", lambda: now)
    await services.create("s3://bucket/one")
    now = trusted.TRUSTED_SECONDS * 1_000_000 - 1
    assert await services.create("s3://bucket/two") <= MOST_REQUESTS
    now += 1
    assert await services.create("s3://bucket/three") > TRIAL_REQUESTS


async def test_a_trial_that_is_asked_for_is_made(services: Services) -> None:
    """With ``probe=True`` nothing is taken on trust."""
    await services.create("s3://bucket/one")
    assert await services.create("s3://bucket/two", probe=True) > TRIAL_REQUESTS


async def test_a_service_that_failed_its_trial_is_refused_each_time(services: Services) -> None:
    """A service that ignores conditions is refused each time."""
    services.ignores_conditions = True
    for name in ("one", "two"):
        with pytest.raises(UnsafeStorageError):
            await services.create(f"s3://bucket/{name}")


async def test_an_open_storage_is_always_tried(services: Services) -> None:
    """Its caller may have wrapped it, so its description says little."""
    async with services.open("s3://bucket/one") as first, services.open("s3://bucket/two") as other:
        for storage in (first, other):
            async with Repository.create(storage):
                assert storage.requests.total() > TRIAL_REQUESTS


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand services at most; those that numbered references need count apart."""
    monkeypatch.setattr(trusted, "_tried", {})
    monkeypatch.setattr(trusted, "_MOST", 3)
    for number in range(10):
        trusted.trust(bytes([number]), numbered=False)
        assert len(trusted._tried) <= 3
    assert trusted.is_trusted(bytes([9]), numbered=False)
    assert not trusted.is_trusted(bytes([9]), numbered=True)
