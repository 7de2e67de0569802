"""Credentials of readers go to hosts of Azure, and to no others. Nothing is sent here."""

from __future__ import annotations

import pytest

from icechunk_async.credentials import AzureBearerToken
from icechunk_async.engine.virtual.sources import source_options
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.config import AzureStore, VirtualChunkContainer
from icechunk_async.storage import open_storage
from tests.unit.engine.virtual.test_virtual_sources import NO_ADDRESSES


@pytest.mark.parametrize("place", NO_ADDRESSES)
async def test_an_account_is_no_address(place: str) -> None:
    """It is a part of the host that gets the reader's credentials; nothing is sent."""
    container = VirtualChunkContainer("az://container/data/", AzureStore({"account": place}))
    options = await source_options(container, AzureBearerToken("secret"))
    with pytest.raises(InvalidInputError, match="account_name"):
        async with open_storage("az://container", **options):
            pytest.fail("it is open")
