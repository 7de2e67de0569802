"""Format 2 as a way of publishing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.files.packs import raw_packing, stored_packing
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.repo_info.file import Seen, read_info
from icechunk_async.engine.history.repo_info.history import RepoInfoHistory
from icechunk_async.engine.history.way import Found, Way
from icechunk_async.format.config import decode_config, encode_config
from icechunk_async.format.envelope import FileType
from icechunk_async.format.layout import REPO_INFO
from icechunk_async.format.operations_log import Availability, RepoInitialized, RepoStatus, Update
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo, encode_repo_info
from icechunk_async.format.transaction_log import TransactionLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.way import Creating, HistorySettings
    from icechunk_async.storage import Retrieved, Storage

__all__ = ["REPO_INFO_WAY"]


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    retrieved = await read_if_there(storage, REPO_INFO)
    return None if retrieved is None else partial(_read, retrieved)


def _read(retrieved: Retrieved) -> Found:
    seen = read_info(retrieved)
    raw = seen.info.raw_config
    config = None if raw is None else decode_config(raw, 2)
    return Found(2, config, partial(_open, seen), stored_packing(seen.info))


def _open(
    seen: Seen, storage: Storage, assets: Assets, settings: HistorySettings
) -> RepoInfoHistory:
    del assets  # ancestry is in the repo info
    return RepoInfoHistory(storage, seen, settings)


async def _create(new: Creating) -> Found:
    snapshot, log = new.snapshot, TransactionLog(new.snapshot.id)
    await gather(new.assets.put_snapshot(snapshot), new.assets.put_transaction_log(log))
    entry = SnapshotInfo.of(
        snapshot.id, None, snapshot.flushed_at, snapshot.message, snapshot.metadata
    )
    info = RepoInfo(
        branches={MAIN: snapshot.id},
        tags={},
        deleted_tags=frozenset(),
        snapshots={snapshot.id: entry},
        status=RepoStatus(Availability.ONLINE, snapshot.flushed_at),
        updates=(Update(RepoInitialized(), snapshot.flushed_at),),
        raw_config=None if new.config is None else encode_config(new.config, 2),
        raw_metadata=() if new.packing is None else raw_packing(new.packing),
    )
    data = new.assets.pack(encode_repo_info(info), FileType.REPO_INFO)
    version = await create_object(new.storage, REPO_INFO, data)
    if version is None:
        raise repository_exists(new.storage, repr(REPO_INFO))
    return Found(2, new.config, partial(_open, Seen(info, version)), new.packing)


REPO_INFO_WAY: Final = Way(2, REPO_INFO, _detect, _create)
