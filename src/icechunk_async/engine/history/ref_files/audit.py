"""Read all ref files and the configuration, and report what is damaged (format 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.protocol import MAIN, Audit, Fault
from icechunk_async.errors import FormatError, IcechunkError
from icechunk_async.format.config import decode_config
from icechunk_async.format.layout import CONFIG, REFS, branch_key
from icechunk_async.format.refs import decode_ref
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Storage

__all__ = ["audit"]

_AT_ONCE: Final = 32
_FILE: Final = "/ref.json"
_TOMBSTONE: Final = f"{_FILE}.deleted"


async def audit(storage: Storage) -> Audit:
    """Read every ref; see `History.audit`."""
    keys = [entry.key async for entry in storage.list_prefix(REFS) if isinstance(entry, ObjectInfo)]
    deleted = {key.removesuffix(".deleted") for key in keys if key.endswith(_TOMBSTONE)}
    refs: dict[str, SnapshotId] = {}
    faults: list[Fault] = []

    async def read(key: str) -> None:
        retrieved = await read_if_there(storage, key)
        if retrieved is None:  # it was deleted since it was listed
            return
        try:
            refs[key.removeprefix(REFS).removesuffix(_FILE)] = decode_ref(retrieved.data)
        except FormatError as error:
            faults.append(Fault("ref", key, "unreadable", f"{key!r}: {error}"))

    wanted = [key for key in keys if key.endswith(_FILE) and key not in deleted]
    await bounded_map(read, wanted, limit=_AT_ONCE)
    if branch_key(MAIN) not in keys:
        detail = f"{branch_key(MAIN)!r} is missing, and every repository has it."
        faults.append(Fault("ref", branch_key(MAIN), "missing", detail))
    config = await read_if_there(storage, CONFIG)
    try:
        if config is not None:
            decode_config(config.data, 1)
    except IcechunkError as error:
        faults.append(Fault("config", CONFIG, "unreadable", f"{CONFIG!r}: {error}"))
    return Audit(refs, None, tuple(sorted(faults, key=lambda it: it.key)))
