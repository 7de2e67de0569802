"""Finding out which history a storage holds, and beginning a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import gather
from icechunk_async.engine.files.packs import raw_packing
from icechunk_async.engine.history.doubt import Doubt
from icechunk_async.engine.history.ref_files.history import SeenRef
from icechunk_async.engine.history.repo_info.edits import MAIN
from icechunk_async.engine.history.repo_info.history import RepoState, read_state
from icechunk_async.errors import (
    InvalidInputError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
    RepositoryExistsError,
    RepositoryNotFoundError,
)
from icechunk_async.format.config import RepositoryConfig, decode_config, encode_config
from icechunk_async.format.envelope import FileType
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID
from icechunk_async.format.layout import CONFIG, REPO_INFO, branch_key
from icechunk_async.format.operations_log import Availability, RepoInitialized, RepoStatus, Update
from icechunk_async.format.refs import decode_ref, encode_ref
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo, encode_repo_info
from icechunk_async.format.snapshot import Snapshot
from icechunk_async.format.transaction_log import TransactionLog
from icechunk_async.storage import ABSENT, ObjectInfo

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.files.packs import Packing
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = [
    "Found",
    "check_empty",
    "create",
    "find",
    "find_expected",
    "find_or_check_empty",
    "missing",
]


@dataclass(frozen=True, slots=True)
class Found:
    """What a storage holds: a repository's configuration, and the state of its refs."""

    config: RepositoryConfig | None
    state: RepoState | SeenRef
    """The repo info of spec 2, or the main branch of spec 1."""

    @property
    def spec_version(self) -> int:
        """The version of the format."""
        return 1 if isinstance(self.state, SeenRef) else 2


async def find(storage: Storage) -> Found | None:
    """Return what repository a storage holds; None if none (spec, "Detecting the version").

    A repo info decides for spec 2, whatever else is there: refs beside it are left over from a
    migration.

    None is no proof, see :func:`find_expected`. Cost: three requests at once.
    """
    info, main, config = await gather(
        _try(storage, REPO_INFO), _try(storage, branch_key(MAIN)), _try(storage, CONFIG)
    )
    if info is not None:
        state = read_state(info)
        raw = state.info.raw_config
        return Found(None if raw is None else decode_config(raw, 2), state)
    if main is not None:
        stored = None if config is None else decode_config(config.data, 1)
        return Found(stored, SeenRef(decode_ref(main.data), main.version))
    return None


async def find_expected(storage: Storage) -> Found | None:
    """Return what repository a storage holds that should hold one; None if none.

    A migration writes what version 2 begins with and then removes what version 1 did, maybe
    between the looks for the two: so where nothing was found, it looks again.
    """
    return await find(storage) or await find(storage)


async def _try(storage: Storage, key: str) -> Retrieved | None:
    try:
        return await storage.get(key)
    except ObjectNotFoundError:
        return None


def missing(storage: Storage) -> RepositoryNotFoundError:
    """Return the error for a storage without a repository."""
    url = storage.description.url
    return RepositoryNotFoundError(
        f"There is no Icechunk repository at {url!r}: it has neither {REPO_INFO!r} nor "
        f"{branch_key(MAIN)!r}. Check the location, or create one with Repository.create.",
        url=url,
    )


def exists(storage: Storage, what: str) -> RepositoryExistsError:
    """Return the error for a location that is taken."""
    url = storage.description.url
    return RepositoryExistsError(
        f"A repository cannot be created at {url!r}: {what} is there already. Open it, or choose "
        "an empty location.",
        url=url,
    )


async def check_empty(storage: Storage) -> None:
    """Refuse a location that holds anything but what is left of a trial.

    Raises:
        RepositoryExistsError: it does.
    """
    from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- not without need

    async for entry in storage.list_prefix():
        if isinstance(entry, ObjectInfo) and entry.key.startswith(PROBE_PREFIX):
            continue  # somebody else may be about to create a repository as well
        raise exists(storage, repr(getattr(entry, "key", entry)))


async def find_or_check_empty(storage: Storage) -> Found | None:
    """Do what :func:`find` does and, where it finds none, :func:`check_empty`: both at once."""
    found, other = await gather(find(storage), _other(storage))
    if found is None and other is not None:
        raise other
    return found


async def _other(storage: Storage) -> RepositoryExistsError | None:
    try:
        await check_empty(storage)
    except RepositoryExistsError as error:
        return error
    return None


async def create(
    storage: Storage,
    assets: Assets,
    spec_version: int,
    config: RepositoryConfig | None,
    packing: Packing | None = None,
) -> Found:
    """Write the first snapshot, and then what makes it a repository.

    ``packing`` is kept where the format has a place for it, which spec 1 has not.

    Raises:
        RepositoryExistsError: somebody else created one here meanwhile.

    Cancellation: a repository may have been created.
    """
    if config == RepositoryConfig():
        config = None  # it says nothing, so there is nothing to store
    now_us = clock.now_us()
    snapshot = Snapshot(
        INITIAL_SNAPSHOT_ID,
        None,
        now_us,
        "Repository initialized",
        {"__icechunk": {"is_root": True}},
    )
    match spec_version:
        case 1:
            await assets.put_snapshot(snapshot)
            if config is not None:
                await _create(storage, CONFIG, encode_config(config, 1))
            version = await _create(storage, branch_key(MAIN), encode_ref(snapshot.id))
            return Found(config, SeenRef(snapshot.id, version))
        case 2:
            log = TransactionLog(snapshot.id)
            await gather(assets.put_snapshot(snapshot), assets.put_transaction_log(log))
            return await _create_spec2(storage, assets, snapshot, config, packing)
        case _:
            raise InvalidInputError(
                f"There is no format version {spec_version!r}; repositories can be created with "
                "version 1 or 2."
            )


async def _create_spec2(
    storage: Storage,
    assets: Assets,
    snapshot: Snapshot,
    config: RepositoryConfig | None,
    packing: Packing | None,
) -> Found:
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
        raw_config=None if config is None else encode_config(config, 2),
        raw_metadata=() if packing is None else raw_packing(packing),
    )
    data = assets.pack(encode_repo_info(info), FileType.REPO_INFO)
    return Found(config, RepoState(info, await _create(storage, REPO_INFO, data)))


async def _create(storage: Storage, key: str, data: bytes) -> Version:
    """Create an object, settling a lost answer by reading back."""
    try:
        return await storage.put(key, data, if_version=ABSENT)
    except PreconditionFailedError as error:
        raise exists(storage, repr(key)) from error
    except OutcomeUnknownError as error:
        with Doubt(error):
            found = await _try(storage, key)
            if found is None or bytes(found.data) != data:
                raise
            return found.version
