"""Format version 1 as a way of publishing: refs are files.

`history` is imported when a repository may be one of these. `upkeep` is what upkeep asks of such
repositories, and `migration` makes repositories of version 2 of them.
"""

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

__all__ = ["REF_FILES_WAY"]


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    from icechunk_async.engine.history.ref_files.history import detect  # noqa: PLC0415 -- see above

    return await detect(storage)


async def _create(new: Creating) -> Found:
    from icechunk_async.engine.history.ref_files.history import create  # noqa: PLC0415 -- see above

    return await create(new)


REF_FILES_WAY: Final = Way(
    "format-1", 1, lambda: BinaryLayout(1), SAFE_UPDATES, branch_key(MAIN), _detect, _create
)
