"""Format 1 as a way of publishing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.history.outcomes import create_object, read_if_there
from icechunk_async.engine.history.protocol import MAIN
from icechunk_async.engine.history.ref_files.history import RefFilesHistory, SeenRef
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.way import Found, Way
from icechunk_async.format.config import decode_config, encode_config
from icechunk_async.format.layout import CONFIG, branch_key
from icechunk_async.format.refs import decode_ref, encode_ref

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.way import Creating, HistorySettings
    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = ["REF_FILES_WAY"]

_MAIN_KEY: Final = branch_key(MAIN)


async def _detect(storage: Storage) -> Callable[[], Found] | None:
    main, config = await gather(read_if_there(storage, _MAIN_KEY), read_if_there(storage, CONFIG))
    return None if main is None else partial(_read, main, config)


def _read(main: Retrieved, config: Retrieved | None) -> Found:
    stored = None if config is None else decode_config(config.data, 1)
    return _found(stored, SeenRef(decode_ref(main.data), main.version))


def _found(config: RepositoryConfig | None, main: SeenRef) -> Found:
    return Found(1, config, partial(_open, main))


def _open(
    main: SeenRef, storage: Storage, assets: Assets, settings: HistorySettings
) -> RefFilesHistory:
    return RefFilesHistory(storage, assets, main, settings)


async def _create(new: Creating) -> Found:
    await new.assets.put_snapshot(new.snapshot)
    if new.config is not None:
        await _put(new.storage, CONFIG, encode_config(new.config, 1))
    version = await _put(new.storage, _MAIN_KEY, encode_ref(new.snapshot.id))
    return _found(new.config, SeenRef(new.snapshot.id, version))


async def _put(storage: Storage, key: str, data: bytes) -> Version:
    version = await create_object(storage, key, data)
    if version is None:
        raise repository_exists(storage, repr(key))
    return version


REF_FILES_WAY: Final = Way(1, _MAIN_KEY, _detect, _create)
