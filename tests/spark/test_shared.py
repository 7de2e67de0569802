"""The repository behind the facade, as a driver asks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from icechunk_async.spark.shared import SharedRepository

if TYPE_CHECKING:
    from typing import Any

    from icechunk_async.sync.opening import RepositoryHandle


@pytest.mark.parametrize(
    ("blocking", "listing", "whole"),
    [(None, True, False), (object(), True, True), (None, False, True)],
    ids=["a service", "a disk", "no listing"],
)
def test_folders_are_divided_where_that_saves_work(
    blocking: object, *, listing: bool, whole: bool
) -> None:
    """On a disk each part would cost as much as the folder."""
    place = SimpleNamespace(capabilities=SimpleNamespace(listing=listing))
    engine = SimpleNamespace(assets=SimpleNamespace(blocking=blocking), storage=place)

    async def ask(question: object) -> object:
        return await cast("Any", question)(SimpleNamespace(engine=engine))

    handle = cast("RepositoryHandle", SimpleNamespace(ask=ask))
    assert SharedRepository(handle).lists_whole_folders() is whole
