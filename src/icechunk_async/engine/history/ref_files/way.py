"""Format version 1 as a way of publishing; `history` is imported when a repository may have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async.engine.files.binary_layout import BinaryLayout
from icechunk_async.engine.history.protocol import MAIN, SAFE_UPDATES
from icechunk_async.engine.history.way import Way
from icechunk_async.format.layout import branch_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.history.way import Creating, Found
    from icechunk_async.storage import Storage

__all__ = ["LAYOUT", "MAIN_KEY", "NAME", "REF_FILES_WAY"]

NAME: Final = "format-1"
MAIN_KEY: Final = branch_key(MAIN)
LAYOUT: Final = BinaryLayout(1)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    from icechunk_async.engine.history.ref_files.history import detect  # noqa: PLC0415 -- see above

    return await detect(storage)


async def _create(new: Creating) -> Found:
    from icechunk_async.engine.history.ref_files.history import create  # noqa: PLC0415 -- see above

    return await create(new)


REF_FILES_WAY: Final = Way(NAME, 1, lambda: LAYOUT, SAFE_UPDATES, MAIN_KEY, _detect, _create)
