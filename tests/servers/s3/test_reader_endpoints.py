"""Credentials of readers go to S3 endpoints that the reader named, and to no others.

Nothing is sent here: only the driver has to be there.
"""

from __future__ import annotations

import pickle

import pytest

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.engine.virtual.sources import source_options
from icechunk_async.errors import InvalidInputError, VirtualAccessError
from icechunk_async.format.config import S3Options, S3Store, VirtualChunkContainer
from icechunk_async.storage import open_storage
from tests.helpers import memory_url
from tests.unit.engine.virtual.test_virtual_sources import EVIL, KEYS, NO_ADDRESSES


def _container(options: S3Options) -> VirtualChunkContainer:
    return VirtualChunkContainer("s3://bucket/data/", S3Store(options))


async def test_no_way_of_opening_takes_the_repositorys_word_for_an_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does opening again with access, with another configuration, or as a fork elsewhere."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    url, container = memory_url(), _container(EVIL)
    own = RepositoryConfig(virtual_chunk_containers=(container,))
    other = RepositoryConfig(inline_chunk_threshold_bytes=5)
    access = {container.url_prefix: KEYS}
    async with Repository.create(url, config=own):
        pass
    async with Repository.open(url, config=other) as repository:
        session = await repository.writable_session("main")
        fork = pickle.loads(pickle.dumps(await session.fork()))
        for opening in (
            Repository.open(url, authorize_virtual_chunk_access=access),
            Repository.open_or_create(url, authorize_virtual_chunk_access=access),
            repository.reopen(authorize_virtual_chunk_access=access),
            repository.reopen(other, authorize_virtual_chunk_access=access),
            fork.attached(authorize_virtual_chunk_access=access),
            fork.attached(repository.storage, authorize_virtual_chunk_access=access),
        ):
            with pytest.raises(VirtualAccessError, match="your credentials are not sent there"):
                async with opening:
                    pytest.fail("it would send them")
        async with (
            Repository.open(url, config=own, authorize_virtual_chunk_access=access) as named,
            named.reopen(other) as again,  # what the reader named before stays named
        ):
            assert again.authorized_virtual_prefixes == {container.url_prefix}


@pytest.mark.parametrize("place", NO_ADDRESSES)
async def test_a_region_is_no_address(place: str) -> None:
    """It is a part of the host that gets the reader's credentials; nothing is sent."""
    options = await source_options(_container(S3Options(region=place)), KEYS)
    async with open_storage("s3://bucket", **options) as bucket:
        with pytest.raises(InvalidInputError, match="region"):
            await bucket.get("key")
