"""Repositories with the official engine's names."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast, override

from anyio import to_thread

from icechunk_async._runtime.blocking.iterators import AsyncCloseableIterator, in_memory
from icechunk_async._runtime.blocking.pairs import (
    asked,
    awaited,
    blocking,
    iterated,
    owned,
    twin_of,
)
from icechunk_async._runtime.blocking.portal import has_deadline, run
from icechunk_async._runtime.blocking.tracebacks import OUR_FILES, managed
from icechunk_async.engine.open import Creation, as_snapshot_id
from icechunk_async.engine.tree.modes import SessionMode as NativeMode
from icechunk_async.errors import (
    SessionStateError,
    UnsupportedBySpecError,
    VirtualContainerError,
)
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.operations_log import Availability
from icechunk_async.handles import SessionHandle
from icechunk_async.repository import Repository as Native
from icechunk_async.repository import RepoStatus as NativeStatus
from icechunk_async.repository import find_named, known_session
from icechunk_async.session import Session as NativeSession
from icechunk_async.sync.errors import ErrorKind, refusal, translated
from icechunk_async.sync.official.configuration import RepositoryConfig
from icechunk_async.sync.official.display import Displayed
from icechunk_async.sync.official.mirrors import to_native
from icechunk_async.sync.official.states import (
    Attribution,
    ChunkStorageStats,
    FeatureFlag,
    RepoAvailability,
    RepoStatus,
    SpecVersion,
)
from icechunk_async.sync.opening import (
    RepositoryHandle,
    Source,
    check_aware,
    check_one,
    given_access,
    given_storage,
    given_version,
    warn_of_none,
)
from icechunk_async.sync.session import Session
from icechunk_async.sync.snapshots import Diff, ManifestFileInfo, SnapshotInfo

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Coroutine,
        Generator,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from types import TracebackType

    import xarray

    from icechunk_async._display.cards import Card
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.commit.hooks import CommitEvent, HookFailure
    from icechunk_async.engine.commit.once import Transaction
    from icechunk_async.engine.files.checks import VerifiedReads
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.engine.history.protocol import FeatureFlag as NativeFlag
    from icechunk_async.engine.history.summary import OperationsLog
    from icechunk_async.engine.open import Location
    from icechunk_async.engine.upkeep.copying.copy import CopyReport
    from icechunk_async.engine.upkeep.integrity.repair import RepairPlan
    from icechunk_async.engine.upkeep.integrity.report import VerifyReport
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.operations_log import Update as NativeUpdate
    from icechunk_async.format.repo_info.snapshot_columns import Page
    from icechunk_async.format.snapshot import ManifestFileInfo as NativeManifest
    from icechunk_async.proposals import Proposal as NativeProposal
    from icechunk_async.session import AnySession as AsyncSession
    from icechunk_async.storage.policies.cache import CacheOptions, CacheStatistics
    from icechunk_async.storage.policies.hedge import HedgePolicy
    from icechunk_async.sync.conflicts import ConflictSolver
    from icechunk_async.sync.credentials import AnyCredential
    from icechunk_async.sync.official.display import Rows
    from icechunk_async.sync.ops import GCSummary, Update
    from icechunk_async.sync.storage import Storage, StorageSettings
    from icechunk_async.sync.store import IcechunkStore
    from icechunk_async.sync.versions import BlockingCheck, Check, PendingMerge, Proposal
    from icechunk_async.versions import PendingMerge as NativeMerge

    type Access = dict[str, AnyCredential | None] | None

__all__ = ["Repository", "upgrade_icechunk_repository"]

_MIB: Final = 1024 * 1024
_NEWEST: Final = 2
"""The version of the format whose metadata takes the most."""
_CELLS: Final = 100_000
"""For the size of what one chunk may bring."""


# What native methods return, in the facade's classes.


def _session(handle: RepositoryHandle, session: AsyncSession) -> Session:
    return Session(SessionHandle(handle, session))


def _pending_merge(handle: RepositoryHandle, pending: NativeMerge) -> PendingMerge:
    from icechunk_async.sync.versions import PendingMerge  # noqa: PLC0415 -- loaded when it is used

    return PendingMerge(handle, pending)


def _proposal(handle: RepositoryHandle, proposal: NativeProposal) -> Proposal:
    from icechunk_async.sync.versions import Proposal  # noqa: PLC0415 -- loaded when it is used

    return Proposal(handle, proposal)


def _proposals(handle: RepositoryHandle, proposals: list[NativeProposal]) -> list[Proposal]:
    return [_proposal(handle, it) for it in proposals]


def _update(update: NativeUpdate) -> Update:
    from icechunk_async.sync.ops import Update  # noqa: PLC0415 -- rarely needed

    return Update.from_native(update)


def _operations(log: OperationsLog[NativeUpdate]) -> OperationsLog[Update]:
    from icechunk_async.engine.history.summary import OperationsLog  # noqa: PLC0415 -- rarely needed

    return OperationsLog(tuple(map(_update, log)), log.drawn, log.complete)


def _parts(*_: object, batch_size: int = 100_000, **__: object) -> int:
    return batch_size // 8  # nodes come one by one


def _manifests(found: list[NativeManifest]) -> list[ManifestFileInfo]:
    return list(map(ManifestFileInfo.from_native, found))


def _flags(flags: list[NativeFlag]) -> list[FeatureFlag]:
    return list(map(FeatureFlag.from_native, flags))


def _status(status: NativeStatus) -> RepoStatus:
    assert status.set_at is not None  # stored ones have it
    is_online = status.availability is Availability.ONLINE
    return RepoStatus(
        RepoAvailability.online if is_online else RepoAvailability.read_only,
        status.set_at,
        status.limited_availability_reason,
    )


def _texts(ids: set[SnapshotId]) -> set[str]:
    return set(map(str, ids))


# What native methods take, and the official ones refuse.


def _check_readable(
    branch: str | None = None, *, as_of: datetime | timedelta | str | None = None, **named: Any
) -> None:
    if as_of is not None:
        check_aware(as_of, "as_of")
    check_one(branch, *named.values())


def _check_compared(**named: SnapshotId | str | None) -> None:
    for side in ("from_", "to_"):
        check_one(*(it for name, it in named.items() if name.startswith(side)))


def _check_expired(older_than: datetime | timedelta | str, **_: object) -> None:
    check_aware(older_than, "older_than")


class Repository(Displayed):
    """A versioned Zarr hierarchy in a storage.

    Open one with the class methods `open`, `create` and `open_or_create`. A `storage` argument
    can also be a path, a URL or an open `icechunk_async.storage.Storage`. Methods block; the
    method of the same name with `_async` can be awaited on any event loop.

    A repository closes with `close`, at the end of a `with` block, when nothing refers to it or to
    its sessions and stores any more, or with the process. It pickles as plain data, credentials
    included, and opens again where it is used.

    Attributes:
        handle: the native repository behind this one, for packages that build on the facade.
    """

    def __init__(self, repository: RepositoryHandle) -> None:
        """Use `create`, `open` or `open_or_create`."""
        self.handle = repository

    def _title(self) -> str:
        opened = self.handle.ready  # showing a repository that was unpickled does not open it
        version = "" if opened is None else f" (v{opened.spec_version})"
        return f"icechunk_async.sync.{type(self).__name__}{version}"

    def _rows(self) -> Rows:
        return [("storage", self.storage), ("config", "<RepositoryConfig ...>")]

    @override
    def as_card(self) -> Card:
        """Return a card, made without asking the storage; see `icechunk_async.Repository`."""
        opened, card = self.handle.ready, super().as_card()
        if opened is None:
            return card
        from icechunk_async.engine.history.summary import card_from_memory  # noqa: PLC0415 -- rarely needed

        known = card_from_memory(opened.engine.history, opened.storage.description.url)
        return replace(known, title=card.title, rows=[*known.rows, *card.rows])

    # Opening and closing

    @classmethod
    @awaited
    def create_async(  # noqa: PLR0917 -- the official engine's order
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        spec_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
        *,
        layout: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        probe: bool | None = None,
        after_commit: Sequence[Callable[[CommitEvent], object]] = (),
    ) -> Coroutine[Any, Any, Repository]:
        """Create a repository and open it.

        Args:
            storage: where to create it.
            config: the configuration, which is stored with the repository.
            authorize_virtual_chunk_access: see `open`.
            spec_version: the version of the format, 1 or 2; the newest if None.
            check_clean_root: refuse a place that holds any object.
            attribution: see `open`.
            layout: one that no format version has, see `icechunk_async.Repository.create`;
                `spec_version` does not count then.
            storage_options: see `open`.
            cache: see `open`.
            hedge: see `open`.
            packing: which chunks share objects; stored with a repository of format version 2.
            sums: keep a checksum of each chunk; stored with a repository of format version 2.
            verify_reads: see `open`.
            probe: try the storage's promises first, see `icechunk_async.storage.probe`. None:
                those that commits need, without races where the service documents that they are
                kept; none if the backend verifies them itself, as memory and local disks do, or
                this process tried the same bucket within the last hour. False accepts the risk.
            after_commit: see `open`.

        Raises:
            AlreadyExistsError: the place holds a repository or other objects.
            StorageError: commits could be lost there; nothing was written.
        """
        # By their names, so that no way of opening forgets a setting that the others take.
        source = Source.given(locals())
        made = Creation(given_version(spec_version), check_clean_root, probe, layout)
        return _entered(cls, source, source.creating(made))

    @classmethod
    @awaited
    def open_async(
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        attribution: Attribution | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        after_commit: Sequence[Callable[[CommitEvent], object]] = (),
    ) -> Coroutine[Any, Any, Repository]:
        """Open a repository of any format version.

        Args:
            storage: where the repository is.
            config: laid over the stored configuration, for this object only.
            authorize_virtual_chunk_access: the virtual chunk containers that may be read: their
                URL prefixes, with the credentials for each.
            attribution: labels in the User-Agent of the requests for the repository.
            storage_options: the backend's options, if ``storage`` is a path or URL.
            cache: keep immutable objects (chunks, manifests, snapshots, transaction logs) that
                were read in memory and, if it names a directory, on disk; see
                `icechunk_async.storage.CacheOptions` and `cache_statistics`.
            hedge: send a slow read of an immutable object a second time and take the first
                reply. None: never. Memory and local disks ignore it.
            packing: which chunks of new sessions share objects, see `icechunk_async.Packing`;
                None: as stored.
            sums: keep a checksum of each chunk that is written; None: as stored.
            verify_reads: compare each native chunk that is read whole with its checksum, and
                raise an error in place of returning damaged bytes.
            after_commit: functions that are told of each branch that this object moved, after it
                was published, with a `CommitEvent` of `icechunk_async.results`. Each runs in a
                thread, and is waited for, for at most 30 s; its errors undo nothing, see
                `hook_failures`. They do not travel with pickles; the other settings do.

        Raises:
            RepositoryNotFoundError: there is no repository.
            InvalidInputError: a setting is of another class (a `TypeError`, too), or
                ``storage_options`` are given for a storage, which has its own.
        """
        source = Source.given(locals())
        return _entered(cls, source, source.opening())

    @property
    def hook_failures(self) -> list[HookFailure]:
        """The last hundred failures of hooks after commit (`after_commit`), oldest first."""
        return self.handle.now().hook_failures

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """Hits, misses and sizes of the cache; None without a cache."""
        return self.handle.now().cache_statistics

    @property
    def packing(self) -> Packing:
        """Which chunks share objects: as given at opening, otherwise as stored."""
        return self.handle.now().packing

    @property
    def sums(self) -> bool:
        """Whether checksums of chunks are kept: as given at opening, otherwise as stored."""
        return self.handle.now().sums

    @property
    def verified_reads(self) -> VerifiedReads | None:
        """Counts of chunks that were read; None unless opened with ``verify_reads``."""
        return self.handle.now().verified_reads

    @property
    def keeps_statistics(self) -> bool:
        """Whether sessions make statistics of the chunks that they write; see `keep_statistics`."""
        return self.handle.now().keeps_statistics

    @property
    def layout(self) -> str:
        """The layout of the repository, such as ``"format-2"``; see `icechunk_async.Repository`."""
        return self.handle.now().layout

    @classmethod
    @awaited
    def open_or_create_async(  # noqa: PLR0917 -- the official engine's order
        cls,
        storage: Storage | Location,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Access = None,
        create_version: SpecVersion | int | None = None,
        check_clean_root: bool = True,  # noqa: FBT001, FBT002
        attribution: Attribution | None = None,
        *,
        layout: str | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        probe: bool | None = None,
        after_commit: Sequence[Callable[[CommitEvent], object]] = (),
    ) -> Coroutine[Any, Any, Repository]:
        """Open the repository, or create one if the place is empty.

        Args and errors as for `open` and `create`; `create_version` is the format version of a
        repository that is created.
        """
        source = Source.given(locals())
        made = Creation(given_version(create_version), check_clean_root, probe, layout)
        return _entered(cls, source, source.creating(made, or_open=True))

    @staticmethod
    @awaited
    async def exists_async(
        storage: Storage | Location,
        storage_settings: StorageSettings | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
    ) -> bool:
        """Return whether a place holds a repository.

        Args:
            storage: the place.
            storage_settings: accepted; the default settings are used.
            storage_options: see `open`.
        """
        return await _look(Native.exists, storage, storage_options)

    @staticmethod
    @awaited
    async def fetch_spec_version_async(
        storage: Storage | Location,
        storage_settings: StorageSettings | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
    ) -> SpecVersion | None:
        """Return the format version of a repository; None if the place holds none.

        None as well for layouts before version 1, which `fetch_layout` tells.

        Args:
            storage: the place.
            storage_settings: accepted; the default settings are used.
            storage_options: see `open`.
        """
        version = await _look(Native.fetch_spec_version, storage, storage_options)
        # The official enumeration has no version before 1.
        return SpecVersion(version) if version else None

    @staticmethod
    @twin_of(Native.fetch_layout)
    async def fetch_layout_async(
        storage: Storage | Location, *, storage_options: Mapping[str, object] | None = None
    ) -> str | None:
        return await _look(Native.fetch_layout, storage, storage_options)

    @staticmethod
    @twin_of(Native.fetch_config)
    async def fetch_config_async(
        storage: Storage | Location, *, storage_options: Mapping[str, object] | None = None
    ) -> RepositoryConfig | None:
        config = await _look(Native.fetch_config, storage, storage_options)
        return None if config is None else RepositoryConfig.from_native(config)

    save_config, save_config_async = asked(Native.save_config)

    @awaited
    def reopen_async(
        self, config: RepositoryConfig | None = None, authorize_virtual_chunk_access: Access = None
    ) -> Coroutine[Any, Any, Self]:
        """Open the same repository once more.

        Args:
            config: laid over the configuration in force here.
            authorize_virtual_chunk_access: replaces the access authorised here; None keeps it.
        """
        warn_of_none(authorize_virtual_chunk_access)
        return self._reopen(config, authorize_virtual_chunk_access)

    async def _reopen(self, config: RepositoryConfig | None, access: Access) -> Self:
        native, source = await self.handle.repository(), self.handle.source
        source = source.changed(config, access)
        # Each round goes without the containers that the repository lacks; there are fewer each
        # time.
        while True:
            handle = RepositoryHandle(source)
            try:
                await handle.enter(native.reopen(to_native(config), given_access(access)))
            except VirtualContainerError as error:
                source = source.without(error)
                access = dict(source.authorized or {})
            else:
                return type(self)(handle)

    def __getstate__(self) -> object:
        """Return the arguments of the opening as plain data, credentials included."""
        return {"source": self.handle.source}

    def __setstate__(self, state: object) -> None:
        """Become the same repository, which opens at its first use."""
        if not isinstance(state, dict):
            raise ValueError("Invalid repository state")  # noqa: TRY004 -- the official engine's
        self.handle = RepositoryHandle(cast("dict[str, Source]", state)["source"])

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force: the defaults, the stored one and the given one merged."""
        return RepositoryConfig.from_native(self.handle.now().config)

    @property
    def attribution(self) -> Attribution:
        """The labels given when the repository was opened."""
        return self.handle.source.attribution or Attribution()

    @property
    def storage(self) -> Storage:
        """The place of the repository."""
        return self.handle.source.storage

    @property
    def authorized_virtual_container_prefixes(self) -> set[str]:
        """The URL prefixes given at opening that open containers."""
        readable = self.handle.now().authorized_virtual_prefixes
        given = self.handle.source.authorized or {}
        return {it for it in given if any(found.startswith(it) for found in readable)}

    @property
    def spec_version(self) -> SpecVersion:
        """The format version of new files; an error for layouts before version 1."""
        native = self.handle.now()
        with translated():
            if not native.spec_version:
                raise UnsupportedBySpecError(
                    f"The repository has the layout {native.layout!r}, which is older than format "
                    "version 1. Migrate it with icechunk_async.upkeep.upgrade."
                )
            return SpecVersion(native.spec_version)

    def close(self) -> None:
        """Close the repository; its sessions and stores cannot be used afterwards."""
        self.handle.close()

    def __enter__(self) -> Self:
        """Return the repository; it closes with the block."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    create = classmethod(blocking(create_async))
    open = classmethod(blocking(open_async))
    open_or_create = classmethod(blocking(open_or_create_async))
    exists = staticmethod(blocking(exists_async))
    fetch_spec_version = staticmethod(blocking(fetch_spec_version_async))
    fetch_layout = staticmethod(blocking(fetch_layout_async))
    fetch_config = staticmethod(blocking(fetch_config_async))
    reopen = blocking(reopen_async)

    # Sessions

    def _known_session(
        self, branch: str | None, mode: NativeMode, *, deduplicate: bool = False
    ) -> Session | None:
        """Return a session at the tip of a branch if no other thread has to be waited for."""
        ready = self.handle.ready
        if ready is None or not isinstance(branch, str) or has_deadline():
            return None
        with translated():
            found = known_session(ready, branch, mode, deduplicate=deduplicate)
        return None if found is None else _session(self.handle, found)

    def _known_readable(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
        as_of: datetime | timedelta | str | None = None,
    ) -> Session | None:
        if any(it is not None for it in (tag, snapshot_id, ref, as_of)):
            return None
        return self._known_session(branch, NativeMode.READONLY)

    def _known_writable(
        self,
        branch: str,
        *,
        lease: timedelta | bool = False,
        owner: str | None = None,
        deduplicate: bool = False,
    ) -> Session | None:
        del owner  # of a lease
        if lease is not False:
            return None
        return self._known_session(branch, NativeMode.WRITABLE, deduplicate=deduplicate)

    readonly_session, readonly_session_async = owned(
        Native.readonly_session, _session, known=_known_readable, check=_check_readable
    )
    writable_session, writable_session_async = owned(
        Native.writable_session, _session, known=_known_writable
    )
    resume_session, resume_session_async = owned(Native.resume_session, _session)
    rearrange_session, rearrange_session_async = owned(Native.rearrange_session, _session)

    @managed
    def transaction(
        self,
        branch: str,
        *,
        message: str,
        metadata: dict[str, Any] | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        once: Transaction | None = None,
        unchanged: Collection[str] = (),
        deduplicate: bool = False,
    ) -> Generator[IcechunkStore[Session]]:
        """Write to a store in a `with` block, and commit at its end unless the block failed.

        Args and errors as for `Session.commit`; `deduplicate` as for `writable_session`, and a
        block that changed nothing then ends without a commit, or with an empty one if `once`
        names it.
        """
        session = self.writable_session(branch, deduplicate=deduplicate)
        yield session.store
        quietly = deduplicate and once is None and not session.unmerged_forks
        native = session.handle.ready if quietly else None
        if isinstance(native, NativeSession) and native.publisher.end_unchanged():
            return
        session.commit(
            message=message,
            metadata=metadata,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            timeout_seconds=timeout_seconds,
            allow_empty=deduplicate and once is not None,
            once=once,
            unchanged=unchanged,
            allow_missing_forks=not deduplicate,  # one may hold what changed
        )

    sessions, sessions_async = asked(Native.sessions)
    end_session, end_session_async = asked(Native.end_session)
    recorded_transactions, recorded_transactions_async = asked(Native.recorded_transactions)

    forget_transactions, forget_transactions_async = asked(Native.forget_transactions, str)

    # Branches and tags

    create_branch, create_branch_async = asked(Native.create_branch)
    list_branches, list_branches_async = asked(Native.list_branches)
    lookup_branch, lookup_branch_async = asked(Native.lookup_branch, str)
    reset_branch, reset_branch_async = asked(Native.reset_branch)
    delete_branch, delete_branch_async = asked(Native.delete_branch)
    create_tag, create_tag_async = asked(Native.create_tag)
    list_tags, list_tags_async = asked(Native.list_tags)
    lookup_tag, lookup_tag_async = asked(Native.lookup_tag, str)
    delete_tag, delete_tag_async = asked(Native.delete_tag)

    # History

    def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
        ref: str | None = None,
    ) -> Iterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first.

        Exactly one of the arguments is given; `ref` takes any, see `readonly_session`.

        Raises:
            RefNotFoundError, SnapshotNotFoundError: there is no such branch, tag or snapshot.
        """
        known = self._known_ancestry(branch, tag, snapshot_id, ref)
        if known is not None:
            return known
        return self.async_ancestry(branch=branch, tag=tag, snapshot_id=snapshot_id, ref=ref).begun()

    def _known_ancestry(self, *named: str | None) -> Iterator[SnapshotInfo] | None:
        """Return the ancestry if it is in memory, and known to be that of now without waiting."""
        check_one(*named)
        ready = self.handle.ready
        state = None if ready is None else ready.engine.history.state
        info = None if state is None else state.known_now()
        from icechunk_async.engine.versions.naming import known_ref  # noqa: PLC0415 -- on use

        start = None if info is None else known_ref(info, *named)
        if info is None or start is None:
            return None

        def pages() -> Iterator[list[SnapshotInfo]]:
            with translated():
                for page in info.ancestry_pages(start):
                    yield SnapshotInfo.of_page(page)

        return in_memory(pages())

    def async_ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: str | None = None,
        ref: str | None = None,
    ) -> AsyncCloseableIterator[SnapshotInfo]:
        """Iterate as `ancestry` does, in `async for` as well."""
        check_one(branch, tag, snapshot_id, ref)

        async def pages(it: Native) -> AsyncIterator[Page]:
            start = await find_named(it.engine, branch, tag, snapshot_id, ref)
            async for page in it.engine.history.ancestry_pages(start):
                yield page

        return AsyncCloseableIterator[SnapshotInfo].of_pages(
            self.handle.each(pages, SnapshotInfo.of_page)
        )

    ancestry_graph, ancestry_graph_async = asked(Native.ancestry_graph)
    summary, summary_async = asked(Native.summary)
    ops_log, ops_log_async = iterated(Native.ops_log, _update)
    operations, operations_async = asked(Native.operations, _operations)

    def _known_snapshot(self, snapshot_id: SnapshotId | str) -> SnapshotInfo | None:
        ready = self.handle.ready
        if ready is not None:
            with translated():
                found = ready.engine.history.known_snapshot(as_snapshot_id(snapshot_id))
            if found is not None:
                return SnapshotInfo.from_native(found)
        return None

    lookup_snapshot, lookup_snapshot_async = asked(
        Native.lookup_snapshot, SnapshotInfo.from_native, known=_known_snapshot
    )
    list_manifest_files, list_manifest_files_async = asked(Native.list_manifest_files, _manifests)

    inspect_snapshot, inspect_snapshot_async = asked(Native.inspect_snapshot)
    inspect_repo_info, inspect_repo_info_async = asked(Native.inspect_repo_info)
    inspect_manifest, inspect_manifest_async = asked(Native.inspect_manifest)
    inspect_transaction_log, inspect_transaction_log_async = asked(Native.inspect_transaction_log)

    def _known_diff(
        self,
        *,
        from_branch: str | None = None,
        from_tag: str | None = None,
        from_snapshot_id: SnapshotId | str | None = None,
        from_ref: SnapshotId | str | None = None,
        to_branch: str | None = None,
        to_tag: str | None = None,
        to_snapshot_id: SnapshotId | str | None = None,
        to_ref: SnapshotId | str | None = None,
    ) -> Diff | None:
        ready = self.handle.ready
        if ready is None or from_snapshot_id is None or to_snapshot_id is None:
            return None
        others = (from_branch, from_tag, from_ref, to_branch, to_tag, to_ref)
        if any(it is not None for it in others):
            return None
        from icechunk_async.engine.history.diff import diff_in_memory  # noqa: PLC0415 -- slow to import

        with translated():
            found = diff_in_memory(
                ready.engine.history,
                ready.engine.assets,
                as_snapshot_id(from_snapshot_id),
                as_snapshot_id(to_snapshot_id),
            )
        return None if found is None else Diff.from_native(found)

    diff, diff_async = asked(
        Native.diff, Diff.from_native, known=_known_diff, check=_check_compared
    )

    # Metadata, status and feature flags; all but the commit metadata need format version 2

    def set_default_commit_metadata(self, metadata: dict[str, Any]) -> None:
        """Give these properties to later commits; the properties of a commit take precedence.

        Raises:
            InvalidInputError: one cannot be stored; a `TypeError`, too, if its type is to blame.
        """
        with translated():
            encode_items(metadata, _NEWEST)
        self.handle.settle(self.handle.source.with_metadata(dict(metadata)))

    def default_commit_metadata(self) -> dict[str, Any]:
        """Return the properties that all commits get."""
        return dict(self.handle.source.default_metadata)

    get_metadata, get_metadata_async = asked(Native.get_metadata)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the repository itself, as stored now."""
        return self.get_metadata()

    set_metadata, set_metadata_async = asked(Native.set_metadata)
    update_metadata, update_metadata_async = asked(Native.update_metadata)
    get_status, get_status_async = asked(Native.get_status, _status)

    @property
    def status(self) -> RepoStatus:
        """Whether the repository may be changed, as stored now."""
        return self.get_status()

    @twin_of(Native.set_status)
    async def set_status_async(self, status: RepoStatus) -> None:
        given = NativeStatus(
            Availability[status.availability.name.upper()],
            status.set_at,
            status.limited_availability_reason,
        )
        await self.handle.ask(lambda it: it.set_status(given))

    feature_flags, feature_flags_async = asked(Native.feature_flags, _flags)
    enabled_feature_flags, enabled_feature_flags_async = asked(Native.enabled_feature_flags, _flags)

    disabled_feature_flags, disabled_feature_flags_async = asked(
        Native.disabled_feature_flags, _flags
    )

    set_feature_flag, set_feature_flag_async = asked(Native.set_feature_flag)

    set_status = blocking(set_status_async)

    # Changes, undo and merge: additions to the official names

    changes, changes_async = iterated(Native.changes, parts=_parts)
    changed_cells, changed_cells_async = iterated(Native.changed_cells, parts=_CELLS)
    watch, watch_async = iterated(  # none is fetched ahead: it may come much later
        Native.watch, SnapshotInfo.from_native, parts=_CELLS, ahead=False
    )

    @twin_of(Native.cube)
    async def cube_async(
        self,
        path: str,
        *,
        along: Literal["commits", "days"] = "commits",
        ref: str = "main",
        since: str | datetime | None = None,
        until: datetime | None = None,
        every: int = 1,
        limit: int | None = None,
        missing: object = None,
        chunks: Mapping[Hashable, int] | None = None,
    ) -> xarray.Dataset:
        with translated():
            # Importing xarray takes a second, which would hold up all who use the loop.
            await to_thread.run_sync(import_module, "icechunk_async.datasets.cube")
            from icechunk_async.datasets.cube import open_cube  # noqa: PLC0415 -- needs xarray
            from icechunk_async.engine.versions.timeline import Choice  # noqa: PLC0415 -- on use
            from icechunk_async.handles import Elsewhere  # noqa: PLC0415 -- only for this
        choice = Choice(along, since, until, every, limit)
        home = Elsewhere(self.handle)
        return await self.handle.ask(
            lambda it: open_cube(home, it.engine, path, ref, choice, missing=missing, chunks=chunks)
        )

    cube = blocking(cube_async)

    blame, blame_async = asked(Native.blame)
    diff_values, diff_values_async = asked(Native.diff_values)
    revert, revert_async = asked(Native.revert)
    restore, restore_async = asked(Native.restore)
    merge, merge_async = asked(Native.merge)
    cherry_pick, cherry_pick_async = asked(Native.cherry_pick)
    undo, undo_async = asked(Native.undo, str)
    fast_forward, fast_forward_async = asked(Native.fast_forward, str)
    squash, squash_async = asked(Native.squash, str)

    begin_merge, begin_merge_async = owned(Native.begin_merge, _pending_merge)
    resume_merge, resume_merge_async = owned(Native.resume_merge, _pending_merge)

    # Proposals and protection

    @twin_of(Native.propose)
    async def propose_async(
        self,
        source: str,
        *,
        into: str = "main",
        checks: Iterable[Check | BlockingCheck] = (),
        title: str | None = None,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        base: str | None = None,
        solver: ConflictSolver | None = None,
        compare_chunks: int = 10_000,
    ) -> Proposal:
        from icechunk_async.sync.versions import native_checks  # noqa: PLC0415 -- loaded when it is used

        native = native_checks(self.handle, checks)
        made = await self.handle.ask(
            lambda it: it.propose(
                source,
                into=into,
                checks=native,
                title=title,
                message=message,
                metadata=metadata,
                base=base,
                solver=to_native(solver),
                compare_chunks=compare_chunks,
            )
        )
        return _proposal(self.handle, made)

    proposal, proposal_async = owned(Native.proposal, _proposal)
    proposals, proposals_async = owned(Native.proposals, _proposals)
    protect_branch, protect_branch_async = asked(Native.protect_branch)
    unprotect_branch, unprotect_branch_async = asked(Native.unprotect_branch)
    protected_branches, protected_branches_async = asked(Native.protected_branches)
    propose = blocking(propose_async)

    # Upkeep; arguments that are only accepted limit something that this library limits itself

    expire_snapshots, expire_snapshots_async = asked(
        Native.expire_snapshots, _texts, check=_check_expired
    )
    split_appends, split_appends_async = asked(Native.split_appends)
    rewrite_manifests, rewrite_manifests_async = asked(Native.rewrite_manifests, str)
    compact, compact_async = asked(Native.compact)

    @awaited
    async def copy_to_async(
        self,
        destination: Storage | Location,
        *,
        storage_options: Mapping[str, object] | None = None,
        refs: Iterable[str] | None = None,
        since: datetime | str | None = None,
        paths: Iterable[str] | None = None,
        shallow: bool = False,
        discard_changes: bool = False,
        as_zarr: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CopyReport:
        """Copy the repository to another storage, or bring an earlier copy up to date.

        An addition to the official names. Arguments, errors and costs are those of
        `icechunk_async.Repository.copy_to`; ``progress`` is called in the thread of the library's
        event loop, and must not call the facade.
        """
        if since is not None and not isinstance(since, str):
            check_aware(since, "since")
        with translated():
            async with given_storage(destination, storage_options).opened() as storage:
                return await self.handle.ask(
                    lambda it: it.copy_to(
                        storage,
                        refs=refs,
                        since=since,
                        paths=paths,
                        shallow=shallow,
                        discard_changes=discard_changes,
                        as_zarr=as_zarr,
                        progress=progress,
                    )
                )

    @twin_of(Native.garbage_collect)
    async def garbage_collect_async(
        self,
        delete_object_older_than: datetime | timedelta | str,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * _MIB,
        max_decoded_manifest_mem_bytes: int = 4096 * _MIB,
        max_concurrent_manifest_fetches: int = 500,
        max_concurrent_deletes: int = 10,
        max_consecutive_delete_failures: int = 50,
        max_concurrent_listings: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> GCSummary:
        from icechunk_async.sync.ops import GCSummary  # noqa: PLC0415 -- rarely needed

        check_aware(delete_object_older_than, "delete_object_older_than")
        report = await self.handle.ask(
            lambda it: it.garbage_collect(
                delete_object_older_than,
                dry_run=dry_run,
                max_snapshots_in_memory=max_snapshots_in_memory,
                max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                progress=progress,
            )
        )
        return GCSummary.from_native(report)

    @twin_of(Native.chunk_storage_stats)
    async def chunk_storage_stats_async(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * _MIB,
        max_decoded_manifest_mem_bytes: int = 4096 * _MIB,
        max_concurrent_manifest_fetches: int = 500,
        progress: ProgressCallback | None = None,
    ) -> ChunkStorageStats:
        stats = await self.handle.ask(
            lambda it: it.chunk_storage_stats(
                max_snapshots_in_memory=max_snapshots_in_memory,
                max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
                max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
                progress=progress,
            )
        )
        return ChunkStorageStats.from_native(stats)

    @awaited
    def total_chunks_storage_async(
        self,
        *,
        max_snapshots_in_memory: int = 50,
        max_compressed_manifest_mem_bytes: int = 512 * _MIB,
        max_decoded_manifest_mem_bytes: int = 4096 * _MIB,
        max_concurrent_manifest_fetches: int = 500,
    ) -> Coroutine[Any, Any, int]:
        """Return the bytes of native chunks. Deprecated: use `chunk_storage_stats`."""
        warnings.warn(
            "total_chunks_storage counts native chunks only and will be removed. Use "
            "chunk_storage_stats(...).native_bytes, which also knows the bytes of inline and "
            "virtual chunks.",
            DeprecationWarning,
            skip_file_prefixes=OUR_FILES,
        )
        stats = self.chunk_storage_stats_async(
            max_snapshots_in_memory=max_snapshots_in_memory,
            max_compressed_manifest_mem_bytes=max_compressed_manifest_mem_bytes,
            max_concurrent_manifest_fetches=max_concurrent_manifest_fetches,
        )
        return _native_bytes(stats)

    verify, verify_async = asked(Native.verify)
    check_references, check_references_async = asked(Native.check_references)
    add_sums, add_sums_async = asked(Native.add_sums)
    analyze, analyze_async = asked(Native.analyze)
    check_content, check_content_async = asked(Native.check_content)
    save_packing, save_packing_async = asked(Native.save_packing)
    save_sums, save_sums_async = asked(Native.save_sums)
    keep_statistics, keep_statistics_async = asked(Native.keep_statistics)

    @awaited
    async def repair_async(
        self,
        report: VerifyReport,
        *,
        branches: Sequence[str] | None = None,
        moved: Mapping[str, str] | None = None,
        dry_run: bool = True,
    ) -> RepairPlan:
        """Repair the damage that the report of `verify` names, as far as possible.

        An addition to the official names. The steps are explained at
        `icechunk_async.Repository.plan_repair`, and so are the other arguments.

        Args:
            report: the result of `verify`.
            branches: those that may get a commit; None: all that need one.
            moved: prefixes of old locations of virtual sources, and of new ones.
            dry_run: change nothing.

        Returns: the plan, which was carried out unless `dry_run`.
        """

        async def work(it: Native) -> RepairPlan:
            plan = await it.plan_repair(report, branches=branches, moved=moved)
            if not dry_run:
                await plan.apply()
            return plan

        return await self.handle.ask(work)

    repair = blocking(repair_async)
    copy_to = blocking(copy_to_async)
    garbage_collect = blocking(garbage_collect_async)
    chunk_storage_stats = blocking(chunk_storage_stats_async)
    total_chunks_storage = blocking(total_chunks_storage_async)


async def _entered[R: Repository](
    cls: type[R], source: Source, manager: AbstractAsyncContextManager[Native]
) -> R:
    handle = RepositoryHandle(source)
    await handle.enter(manager)
    return cls(handle)


async def _look[T](
    question: Callable[..., Awaitable[T]],
    storage: Storage | Location,
    storage_options: Mapping[str, object] | None,
) -> T:
    """Ask about a place without opening a repository."""
    location, options = await given_storage(storage, storage_options).place()
    with translated():
        return await question(location, storage_options=options)


async def _native_bytes(stats: Coroutine[Any, Any, ChunkStorageStats]) -> int:
    return (await stats).native_bytes


def upgrade_icechunk_repository(
    repo: Repository,
    *,
    dry_run: bool,
    delete_unused_v1_files: bool = True,
    prefetch_concurrency: int | None = None,
) -> Repository:
    """Migrate a repository of format version 1 to version 2, in place.

    Nobody should write to it in the meantime: a write is noticed, and the migration is undone. An
    interrupted migration is finished, or undone, by calling this again.

    Args:
        repo: the repository. Unless `dry_run`, it cannot be used afterwards.
        dry_run: change nothing, after reading all that the migration needs.
        delete_unused_v1_files: delete the files that only version 1 reads.
        prefetch_concurrency: accepted; this library limits its requests itself.

    Returns: the repository, opened again.

    Raises:
        SessionStateError: it has version 2 already.
        ConflictError: another writer wrote in the meantime; the migration was undone.
    """
    handle = repo.handle
    # Through the place and not the handle: the open repository is of version 1 and stays so.
    run(_upgrade(handle, dry_run=dry_run, delete_unused=delete_unused_v1_files))
    if not dry_run:
        handle.close(
            "This repository has been invalidated by upgrade_icechunk_repository(). "
            "Use the new Repository object returned by that function instead."
        )
    source = handle.source.changed(None, None)
    return run(_entered(Repository, source, source.opening()))


async def _upgrade(handle: RepositoryHandle, *, dry_run: bool, delete_unused: bool) -> None:
    from icechunk_async.upkeep import upgrade  # noqa: PLC0415 -- rarely needed

    with translated():
        location, options = await handle.source.storage.place()
        # A dry run first in any case: a repository of version 2 is an error for the official
        # function, and a clean-up for ours.
        report = await upgrade(location, dry_run=True, storage_options=options)
        if report.already_migrated:
            raise refusal(
                SessionStateError(
                    "The repository is of format version 2 already: there is nothing to migrate."
                ),
                ErrorKind.INVALID_REPOSITORY_MIGRATION,
            )
        if not dry_run:
            await upgrade(location, delete_unused_v1_files=delete_unused, storage_options=options)
