"""Migration of damaged repositories is refused."""

from __future__ import annotations

import pytest

from icechunk_async.errors import FormatError
from icechunk_async.storage import open_storage
from icechunk_async.upkeep import upgrade
from tests.helpers import objects
from tests.unit.engine.upkeep.upkeep_tools import littered


async def test_file_of_another_snapshot_is_named_and_nothing_is_changed() -> None:
    """The tip of main holds the snapshot before it."""
    url, line = await littered(1)
    async with open_storage(url) as storage:
        other = await storage.get(f"snapshots/{line[-2]}")
        await storage.put(f"snapshots/{line[-1]}", bytes(other.data))
        before = await objects(storage)
        with pytest.raises(FormatError, match=f"snapshots/{line[-1]}' holds another file"):
            await upgrade(url)
        assert await objects(storage) == before
