"""The way of publishing of format 2 on storage that creates objects safely and replaces none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async.engine.history.numbered.storage import NumberedStorage
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import SAFE_CREATIONS
from icechunk_async.engine.history.repo_info.history import (
    LAYOUT,
    PLAIN,
    create_repo_info,
    read_repo_info,
)
from icechunk_async.engine.history.way import Way
from icechunk_async.format.layout import REPO_INFO, STATES

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from icechunk_async.engine.history.way import Creating, Found
    from icechunk_async.storage import Storage

__all__ = ["NUMBERED_WAY"]


async def _tidy(storage: Storage, older_than: datetime) -> None:
    await NumberedStorage(storage).collect(older_than)


_KIND: Final = replace(
    PLAIN,
    layout="format-2-numbered",
    capabilities=replace(
        PLAIN.capabilities,
        way="the layout 'format-2-numbered'",
        instead="Format version 2 itself has: copy the repository, with Repository.copy_to, to "
        "storage that can compare and set.",
        leases=False,
    ),
    storage_needs=(*SAFE_CREATIONS, "listing"),
    tidy=_tidy,
    view=NumberedStorage,
)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    if not storage.capabilities.listing:
        return None  # the newest state is found in a listing
    retrieved = await read_if_there(NumberedStorage(storage), REPO_INFO)
    return None if retrieved is None else partial(read_repo_info, retrieved, _KIND)


async def _create(new: Creating) -> Found:
    return await create_repo_info(new, _KIND)


NUMBERED_WAY: Final = Way(
    _KIND.layout,
    2,
    lambda: LAYOUT,
    _KIND.storage_needs,
    STATES,
    _detect,
    _create,
    view=NumberedStorage,
)
