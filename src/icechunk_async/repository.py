"""Repositories: open sessions, manage branches and tags, read history, run upkeep."""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import anyio.to_thread

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import Held, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history import (
    Expiration,
    FeatureFlag,
    check_moves_allowed,
    check_online,
    check_unprotected,
    state_for,
)
from icechunk_async.engine.history.settings import (
    METADATA_NAME,
    OwnSettings,
    item_with,
    item_without,
    keeping_protection,
    protections_in,
    stored_item,
)
from icechunk_async.engine.open import (
    Creation,
    Request,
    as_snapshot_id,
    find_at,
    given_options,
    open_engine,
)
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.upkeep.survey import Limits
from icechunk_async.errors import (
    ConflictError,
    IcechunkError,
    InvalidInputError,
    LeaseLostError,
    StorageClosedError,
)
from icechunk_async.format.config import RepositoryConfig, merge
from icechunk_async.format.ids import ManifestId, ProposalId, SessionId, SnapshotId
from icechunk_async.format.operations_log import Availability as RepoAvailability
from icechunk_async.format.operations_log import RepoStatus as StoredStatus
from icechunk_async.format.paths import check_path
from icechunk_async.format.repo_info import SnapshotInfo

if TYPE_CHECKING:
    import os
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Generator,
        Hashable,
        Iterable,
        Mapping,
        Sequence,
    )
    from datetime import datetime, timedelta
    from types import TracebackType

    import xarray

    from icechunk_async._display.cards import Card
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.commit.conflicts import ConflictSolver
    from icechunk_async.engine.commit.hooks import CommitEvent, HookFailure, Hooks
    from icechunk_async.engine.commit.once import RecordedTransaction, Transaction
    from icechunk_async.engine.commit.publisher import Publisher
    from icechunk_async.engine.files.checks import VerifiedReads
    from icechunk_async.engine.files.packing import Packing
    from icechunk_async.engine.history.diff import Diff
    from icechunk_async.engine.history.graph import AncestryGraph
    from icechunk_async.engine.history.summary import OperationsLog, RepositorySummary
    from icechunk_async.engine.leases.keeper import Lease
    from icechunk_async.engine.leases.register import LeasedSession
    from icechunk_async.engine.open import Engine, Location
    from icechunk_async.engine.upkeep.check import ReferenceReport
    from icechunk_async.engine.upkeep.collect import GarbageReport
    from icechunk_async.engine.upkeep.compact import CompactReport
    from icechunk_async.engine.upkeep.copying.copy import CopyReport
    from icechunk_async.engine.upkeep.integrity.repair import RepairPlan
    from icechunk_async.engine.upkeep.integrity.report import VerifyReport
    from icechunk_async.engine.upkeep.statistics import ChunkStorageStats
    from icechunk_async.engine.upkeep.sums import AddedSums, ContentReport
    from icechunk_async.engine.versions.blame import Blame
    from icechunk_async.engine.versions.feed import Change
    from icechunk_async.engine.versions.plans import Plan
    from icechunk_async.engine.versions.report import MergeReport
    from icechunk_async.engine.virtual.chunks import VirtualAccess
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import Update
    from icechunk_async.format.snapshot import ManifestFileInfo, Snapshot
    from icechunk_async.proposals import AnyCheck, Desk, Proposal
    from icechunk_async.session import Session
    from icechunk_async.storage import Storage
    from icechunk_async.storage.policies.cache import CacheOptions, CacheStatistics
    from icechunk_async.storage.policies.hedge import HedgePolicy
    from icechunk_async.versions import PendingMerge
    from icechunk_async.zarr.queries.analyze import Analysis
    from icechunk_async.zarr.store import IcechunkStore
    from icechunk_async.zarr.values import CellChanges, ValueDiff

__all__ = ["FeatureFlag", "Opening", "RepoAvailability", "RepoStatus", "Repository"]

_log = logging.getLogger(__name__)

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class RepoStatus:
    """Whether a repository may be changed; writers honour it, the storage does not enforce it."""

    availability: RepoAvailability
    set_at: datetime | None = None
    """When it was set (aware, UTC). In a status to be set, None stands for now."""
    limited_availability_reason: str | None = None
    """Why the repository may not be changed, for people."""


class Repository:
    """A versioned Zarr hierarchy in a storage.

    Open it with `open`, `create` or `open_or_create`, for the length of a block::

        async with Repository.open("file:///data/climate") as repository:
            session = await repository.readonly_session("main")

    or until it is closed, as a service does that opens it when it starts::

        repository = await Repository.open("file:///data/climate")
        ...
        await repository.aclose()

    When it closes, so does its storage; sessions and stores cannot be used afterwards. See
    `Opening` for what happens to a repository that nobody closes.
    """

    def __init__(self, engine: Engine, lifetime: Lifetime | None = None) -> None:
        """Use `create`, `open` or `open_or_create`."""
        self._engine = engine
        self._lifetime = lifetime
        self.default_commit_metadata: dict[str, JSON] = {}
        """Properties of every commit made through this object; a commit's own override them."""
        self._hooks: Hooks | None = None
        if engine.request.after_commit:
            from icechunk_async.engine.commit.hooks import Hooks  # noqa: PLC0415 -- loaded when it is used

            self._hooks = Hooks(engine.request.after_commit)

    # Opening

    @classmethod
    def create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        layout: str | None = None,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        check_clean_root: bool = True,
        probe: bool | None = None,
        after_commit: Sequence[Callable[[CommitEvent], Awaitable[object]]] = (),
    ) -> Opening[Repository]:
        """Create a repository and open it.

        Args:
            location: a path, a URL, or an open storage, which is left open.
            spec_version: the version of the format, 1 or 2.
            layout: None: that of the format version. ``"format-2-numbered"``: format version 2 on
                storage that can create objects safely and replace none, which no other engine
                opens. ``"alpha"`` or ``"first-draft"``: layouts of Icechunk before its format had
                versions, for programs that read nothing else. With a layout ``spec_version``
                does not count.
            config: the configuration; stored with the repository.
            authorize_virtual_chunk_access: see `open`.
            storage_options: the backend's options, if ``location`` is a path or URL.
            cache: see `open`.
            hedge: see `open`.
            packing: which chunks share objects; format version 2 stores it with the repository.
            sums: keep a checksum of each chunk, see `save_sums`; format version 2 stores this
                setting with the repository.
            verify_reads: see `open`.
            check_clean_root: refuse a location that holds anything.
            probe: try the storage's promises first, see `icechunk_async.storage.probe`. None:
                those that commits need, without races where the service documents that they are
                kept; none if the backend verifies them itself, as memory and local disks do, or
                this process tried the same bucket within the last hour. False accepts the risk.
            after_commit: see `open`.

        Raises:
            RepositoryExistsError: the location holds a repository, or anything at all.
            UnsafeStorageError: commits could be lost there; nothing was written.
            InvalidInputError: there is no such format version or layout.

        Cancellation: the repository may have been created.
        """
        request = _request(
            location,
            storage_options,
            config,
            authorize_virtual_chunk_access,
            cache=cache,
            hedge=hedge,
            settings=OwnSettings(packing, sums),
            verify_reads=verify_reads,
            after_commit=after_commit,
        )
        return Opening(cls, request, Creation(spec_version, check_clean_root, probe, layout))

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        after_commit: Sequence[Callable[[CommitEvent], Awaitable[object]]] = (),
    ) -> Opening[Repository]:
        """Open a repository of any format version or layout.

        Args:
            location: a path, a URL, or an open storage, which is left open.
            config: overrides the stored configuration, for this object only.
            authorize_virtual_chunk_access: the virtual chunk containers that may be read, by URL
                prefix: None, credentials or options for opening them, or an open storage. A
                prefix opens its container and those below it, with or without `/` at its end.
            storage_options: the backend's options, if ``location`` is a path or URL.
            cache: keep immutable objects (chunks, manifests, snapshots, transaction logs) that
                were read in memory and, if it names a directory, on disk. Virtual chunks are not
                kept.
            hedge: send a slow read of an immutable object a second time and take the first
                reply. None: never. Memory and local disks ignore it.
            packing: which chunks of new sessions share objects; None: as stored.
            sums: keep a checksum of each chunk that is written; None: as stored.
            verify_reads: compare each native chunk that is read whole with its checksum before its
                bytes are returned. See `verified_reads`.
            after_commit: async functions that are told of each branch that this object moved,
                after it was published, with a `CommitEvent` of `icechunk_async.results`: commits,
                merges and their like, proposals that are accepted, resets. They run before the
                method that published returns, eight at a time, each for at most 30 s. Their errors
                undo nothing: see `hook_failures`.

        Raises:
            RepositoryNotFoundError: there is no repository.
            VirtualContainerError: prefixes were authorised where the repository has no container.
            FormatError: its files are damaged, or of a version that is too new.

        Cost: three requests at once; if they find neither version 1 nor 2, some more.
        """
        request = _request(
            location,
            storage_options,
            config,
            authorize_virtual_chunk_access,
            cache=cache,
            hedge=hedge,
            settings=OwnSettings(packing, sums),
            verify_reads=verify_reads,
            after_commit=after_commit,
        )
        return Opening(cls, request)

    @classmethod
    def open_or_create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        layout: str | None = None,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        hedge: HedgePolicy | None = None,
        packing: Packing | None = None,
        sums: bool | None = None,
        verify_reads: bool = False,
        check_clean_root: bool = True,
        probe: bool | None = None,
        after_commit: Sequence[Callable[[CommitEvent], Awaitable[object]]] = (),
    ) -> Opening[Repository]:
        """Open the repository at a location, or create one if the location is empty.

        Arguments and errors are those of `open` and `create`; ``spec_version`` and ``layout`` count
        only for a repository that is created.
        """
        request = _request(
            location,
            storage_options,
            config,
            authorize_virtual_chunk_access,
            cache=cache,
            hedge=hedge,
            settings=OwnSettings(packing, sums),
            verify_reads=verify_reads,
            after_commit=after_commit,
        )
        creation = Creation(spec_version, check_clean_root, probe, layout)
        return Opening(cls, request, creation, or_open=True)

    def reopen(
        self,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
    ) -> Opening[Self]:
        """Open the same storage again, with another configuration or other authorisations.

        Args:
            config: overrides the configuration in force here.
            authorize_virtual_chunk_access: replaces what was given at opening, see `open`; None
                keeps it.

        Raises:
            RepositoryNotFoundError: the repository is gone.
            VirtualContainerError: prefixes were authorised where the repository has no container.
        """
        # The stored configuration is laid below it at opening. It must not pass for one that the
        # reader gave: that names the endpoints which may get credentials.
        request = self._engine.request
        given = merge(request.config or RepositoryConfig(), config or RepositoryConfig())
        request = replace(request, config=given)
        if authorize_virtual_chunk_access is not None:
            request = replace(request, authorized=dict(authorize_virtual_chunk_access))
        return Opening(type(self), request, metadata=self.default_commit_metadata)

    @staticmethod
    async def exists(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> bool:
        """Return whether a location holds a repository."""
        return await Repository.fetch_layout(location, storage_options=storage_options) is not None

    @staticmethod
    async def fetch_spec_version(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> int:
        """Return the format version of the repository at a location.

        0 if it holds none, or one of a layout before version 1, which `fetch_layout` tells.
        """
        found = await find_at(_request(location, storage_options))
        return 0 if found is None else found.spec_version

    @staticmethod
    async def fetch_layout(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> str | None:
        """Return the layout of the repository at a location, see `layout`; None if it holds none.

        Raises:
            FormatError: it holds repositories of two layouts, or what decides is damaged.
        """
        found = await find_at(_request(location, storage_options))
        return None if found is None else found.name

    @staticmethod
    async def fetch_config(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> RepositoryConfig | None:
        """Return the configuration stored with a repository; None if it stores none.

        Raises:
            RepositoryNotFoundError: there is no repository.
        """
        found = await find_at(_request(location, storage_options), required=True)
        return None if found is None else found.config

    async def aclose(self) -> None:
        """Close the repository and its storage; a second time it does nothing.

        Sessions and stores raise `StorageClosedError` afterwards; what was not committed is gone.
        Call it in the event loop that opened the repository. Inside an ``async with`` block the
        end of the block closes what is left.

        Cancellation: the repository is closed, or closes without being waited for.
        """
        if self._lifetime is not None:
            await self._lifetime.close()

    async def __aenter__(self) -> Self:
        """Return the repository; it closes with the block."""
        if self._lifetime is not None:
            self._lifetime.check_open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the repository."""
        await self.aclose()

    # The open repository

    def __repr__(self) -> str:
        """Show where it is, and what is known of it without asking the storage.

        That is what was read or written last: branches, tags and the last commits in format 2, the
        place alone in layouts that keep a file for each ref. `summary` asks, and tells more.
        """
        return self._card().text()

    def _repr_html_(self) -> str:
        """Show the same in a notebook."""
        return self._card().html()

    def _card(self) -> Card:
        from icechunk_async.engine.history.summary import card_from_memory  # noqa: PLC0415 -- loaded when it is used

        return card_from_memory(self._engine.history, self.storage.description.url)

    @property
    def engine(self) -> Engine:
        """The parts of this repository, for the facade, Spark and the command.

        They may change between releases.
        """
        return self._engine

    @property
    def storage(self) -> Storage:
        """The repository's storage; its requests count against the repository's budget."""
        return self._engine.storage

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """Hits, misses and sizes of the cache; None without a cache."""
        cache = self._engine.cache
        return None if cache is None else cache.statistics

    @property
    def spec_version(self) -> int:
        """The format version that new files are written in; 0 for layouts before version 1."""
        return self._engine.history.spec_version

    @property
    def layout(self) -> str:
        """The layout of the repository.

        One of ``"format-2"``, ``"format-2-numbered"``, ``"format-1"``, ``"alpha"`` and
        ``"first-draft"``.
        """
        return self._engine.history.layout

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force: defaults, overridden by what is stored, then by `open`'s."""
        return self._engine.config

    @property
    def hook_failures(self) -> list[HookFailure]:
        """The last hundred failures of hooks after commit (``after_commit``), oldest first."""
        return [] if self._hooks is None else list(self._hooks.failures)

    @property
    def authorized_virtual_prefixes(self) -> frozenset[str]:
        """URL prefixes of the virtual chunk containers that may be read."""
        return self._engine.virtual.authorized_prefixes

    @property
    def packing(self) -> Packing:
        """Which chunks share objects: as given at opening, otherwise as stored."""
        return self._engine.packing

    @property
    def keeps_statistics(self) -> bool:
        """Whether sessions make statistics of the chunks that they write; see `keep_statistics`."""
        return self._engine.assets.keeps_statistics

    @property
    def sums(self) -> bool:
        """Whether checksums of chunks are kept: as given at opening, otherwise as stored."""
        return self._engine.assets.keeps_sums

    @property
    def verified_reads(self) -> VerifiedReads | None:
        """Counts of chunks that were read; None unless opened with ``verify_reads``.

        A chunk whose bytes are damaged raises `ChunkDamagedError`, after a second try past all
        caches. Chunks without a sum are returned unverified, and so are parts of chunks, as
        of one inner chunk of a shard; both are counted. Chunks in manifests are not looked
        at, and virtual chunks are guarded by their sources' ETags or times.
        """
        checks = self._engine.assets.checks
        return None if checks is None else checks.counts

    # Sessions

    async def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
        as_of: datetime | timedelta | str | None = None,
    ) -> Session:
        """Begin a session that reads one snapshot, unaffected by later commits.

        Args:
            branch: read its tip; ``main`` if nothing is named.
            tag: read its snapshot.
            snapshot_id: read this snapshot. It may be outside of the history, until it is collected
                as garbage: that of a commit that failed, or one that expired.
            ref: read any of these: a branch, a tag or an id, looked for in this order, the first
                letters of an id, four or more, or steps back such as ``main~2``. With ``as_of`` it
                is a branch.
            as_of: with a branch: read what was its tip at this time, by the writers' clocks: an
                aware `datetime`, an ISO 8601 text (UTC unless it has an offset), or a `timedelta`
                before now. Format 2 tells from the operations log, also after a reset, an amendment
                or an expiration; format 1 searches the history that the branch has now.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist, or what
                was the tip then was dropped from the history. The message says if there is
                something of another kind with the name.
            NotFoundError: ``ref`` names nothing.
            InvalidInputError: more than one was named, or ``as_of`` without a branch.

        Cost: one request for the branch or tag, one for the snapshot unless it is cached. In
        format 2 ``as_of`` costs one more for each ``num_updates_per_repo_info_file`` changes since.
        """
        if ref is not None and as_of is not None:
            refuse_two(branch, tag, snapshot_id)
            branch = str(ref)
        elif ref is not None:
            snapshot_id = await find_named(self._engine, branch, tag, snapshot_id, ref)
        base = await self._engine.load(branch, tag, snapshot_id, as_of)
        return self._session(base, None, SessionMode.READONLY)

    async def writable_session(
        self,
        branch: str,
        *,
        lease: timedelta | bool = False,
        owner: str | None = None,
        deduplicate: bool = False,
    ) -> Session:
        """Begin a transaction on a branch.

        With a lease, `garbage_collect` and `expire_snapshots` of this library spare what the
        session wrote and what it builds on, whatever time they are given. The session renews the
        lease while it is used, for as long as the repository is open here. Once it was idle for
        longer than the lease holds, it refuses to write and to commit. All of that goes by the
        storage's clock and by how much time passed here; wrong clocks of machines do no harm.

        Args:
            branch: where to commit.
            lease: how long the session may be idle, one minute to 7 days; True: 24 hours. False:
                no lease, and only the age of what it wrote protects it.
            owner: says for people whose session it is; by default the host and the process.
            deduplicate: upload no bytes twice. Writing a chunk with the bytes that it has already,
                in the repository or elsewhere, makes no change; nor does deleting a chunk that is
                not there. Other equal chunks of the session share one object. Forks do the same.

        What makes no change is not part of the commit: if another writer changes such a chunk
        meanwhile, that is no conflict, and their bytes stay (``unchanged`` of `Session.commit`
        names arrays that nobody may change). After a session that changed nothing `Session.commit`
        raises ``NothingToCommitError``.

        Raises:
            BranchNotFoundError: there is no such branch.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsafeStorageError: commits could be lost on this storage.
            InvalidInputError: a lease of that length is not allowed.
            UnsupportedBySpecError: the repository's layout has no leases.

        Cost: one request for the branch, one for the snapshot unless it is cached; with a lease
        three more, and one each minute while it is used. With ``deduplicate`` each chunk
        needs its manifest, as for reading, and is read where lengths and known checksums are
        equal; beyond that, it takes a SHA-256 of each stored chunk, and up to 20 MB of memory.

        Cancellation: a lease that nobody holds may be there; it expires.
        """
        # Before any request: a session that could not commit safely must not let anybody write
        # first.
        self._engine.check_safe()
        duration_us = None
        if lease is not False:
            from icechunk_async.engine.leases.record import lease_duration_us  # noqa: PLC0415 -- loaded when it is used

            duration_us = lease_duration_us(lease)
        if duration_us is not None:
            self._engine.history.capabilities.require("leases")
        base = await self._engine.load(branch)
        # By the state that the load has just read. The commit looks again, in the same step in
        # which the branch moves.
        check_online(self._engine.history)
        check_unprotected(self._engine.history, branch)
        if duration_us is None:
            return self._session(base, branch, SessionMode.WRITABLE, deduplicate=deduplicate)
        from icechunk_async.engine.leases.keeper import Lease  # noqa: PLC0415 -- on use
        from icechunk_async.engine.leases.record import LeaseRecord, default_owner  # noqa: PLC0415

        record = LeaseRecord.begin(
            SessionId.random(), owner or default_owner(), branch, base.id, duration_us
        )
        held = await Lease.begin(self.storage, record)
        # A base that left the branch before the lease was there may be garbage by now.
        while await self._engine.history.branch_tip(branch) != base.id:
            base = await self._engine.load(branch)
            await held.move_to(base.id)
        return self._leased(base, branch, held, deduplicate=deduplicate)

    def _leased(self, base: Snapshot, branch: str, lease: Lease, *, deduplicate: bool) -> Session:
        """Return a session that holds a lease, and see to its renewal."""
        from icechunk_async.engine.leases.keeper import keep_alive  # noqa: PLC0415 -- loaded when it is used

        mode = SessionMode.WRITABLE
        session = self._session(base, branch, mode, lease, deduplicate=deduplicate)
        assert session.spiller is not None  # it has a lease
        # The task that renews holds the session weakly: a session that was dropped must stop
        # renewing, so that its lease expires and what it wrote can be collected.
        reference, seconds = weakref.ref(session.spiller), lease.beat_seconds
        self._engine.background.start(lambda: keep_alive(reference, seconds))
        return session

    async def resume_session(
        self,
        session_id: SessionId | str,
        *,
        owner: str | None = None,
        deduplicate: bool = False,
    ) -> Session:
        """Continue a session with a lease in this process, from its last spill.

        With it comes what its forks published, see ``ForkSession.publish``.

        For a session whose process is gone. If it still runs, it loses the session: it can write
        on in memory, and can neither spill nor commit. Of several processes that resume one session
        at once, one succeeds.

        Args:
            session_id: see `sessions`.
            owner: says for people whose session it is now; by default the host and the process.
            deduplicate: from now on; see `writable_session`.

        Raises:
            LeaseNotFoundError: no session with a lease has this id.
            LeaseExpiredError: it was idle for longer than its lease holds.
            LeaseLostError: it was committed (``context["snapshot_id"]`` is the commit) or ended,
                or another process resumed it meanwhile.
            FormatError: its lease, or what it spilled, is damaged. It was not resumed.
            SnapshotNotFoundError: the snapshot that it builds on was collected.
            RepositoryReadOnlyError, UnsafeStorageError: as `writable_session`.

        Cancellation: the session may have been taken from its holder; resume it again.

        Cost: one request for the lease, one for each spilled segment, of which there are 64 at
        most, two for what forks published and one for each publication, one for the branch, and
        those for the storage's time and the base.
        """
        from icechunk_async.engine.leases import keeper, register  # noqa: PLC0415
        from icechunk_async.engine.leases import record as records  # noqa: PLC0415
        from icechunk_async.engine.leases.spiller import spilled_changes  # noqa: PLC0415

        self._engine.check_safe()
        self._engine.history.capabilities.require("leases")
        asked, engine = register.as_session_id(session_id), self._engine
        holder: bytes | None = None
        while True:
            # Read the lease, then all that it lists, and write the lease last, if it still has the
            # version that was read. A holder that spills in between changes the version, so that
            # only a state that was read whole is continued.
            record, version = await register.open_lease(self.storage, engine.assets.backend, asked)
            if holder is not None and record.holder != holder:
                # A new version by the same holder is a renewal, after which all is read again.
                # Another holder is a second process that resumes: to continue would take the
                # session from it, and it from us, without end.
                raise keeper.lost(record)  # another process was first
            holder = record.holder
            base = await engine.assets.snapshot(record.base_id)
            stored = await spilled_changes(self.storage, record, base, self.spec_version)
            check_online(engine.history)
            lease = await keeper.Lease.take_over(
                self.storage, record, version, owner or records.default_owner()
            )
            if lease is None:
                continue  # its holder renewed it meanwhile, and may have spilled more
            # After the takeover, when its holder can publish nothing more: what the branch holds
            # now is final.
            await self._check_not_committed(lease)
            session = self._leased(base, record.branch, lease, deduplicate=deduplicate)
            await session.continue_from(stored)
            return session

    async def _check_not_committed(self, lease: Lease) -> None:
        """Refuse a session that was committed by a process that died before it said so."""
        from icechunk_async.engine.commit.turns import RESERVED  # noqa: PLC0415 -- loaded when it is used

        history, record = self._engine.history, lease.record
        tip = await history.branch_tip(record.branch)
        async for info in history.ancestry(tip):
            # The commit, if there is one, is above the base that the lease names, also if it was
            # rebased: the base in the lease is then older than that of the commit.
            if info.id == record.base_id:
                return
            try:
                lease.check_not_committed(info.id, info.metadata.get(RESERVED))
            except LeaseLostError as error:
                await type(lease).mark_committed(self.storage, record, info.id)
                raise error from None

    async def sessions(self) -> list[LeasedSession]:
        """Return the sessions with leases, also those that expired or ended lately; oldest first.

        Sessions without a lease are known to nobody but their processes.

        Raises:
            FormatError: a lease is damaged.

        Cost: one request if nobody has a lease; otherwise one for each, and three more.

        Cancellation: an empty object that is not part of the repository may stay.
        """
        from icechunk_async.engine.leases.register import leased_sessions  # noqa: PLC0415 -- loaded when it is used

        return await leased_sessions(self.storage, self._engine.assets.backend)

    async def end_session(self, session_id: SessionId | str) -> None:
        """Take the lease from a session and its holder. It can no longer write or commit.

        Garbage collection stops sparing what it wrote. Nothing happens if it has ended already.

        Raises:
            LeaseNotFoundError: no session with a lease has this id.
            FormatError: its lease is damaged.
            StorageUnavailableError: its holder renewed the lease each time; nothing changed.

        Cost: two requests.

        Cancellation: it may have been ended.
        """
        from icechunk_async.engine.leases.register import as_session_id, end_session  # noqa: PLC0415

        self._engine.history.capabilities.require("leases")
        self._engine.check_safe()
        await end_session(self.storage, as_session_id(session_id))

    async def recorded_transactions(
        self, branch: str = "main"
    ) -> Mapping[str, RecordedTransaction]:
        """Return the newest transaction of every application that a branch is known to hold.

        These are what ``commit(once=...)`` recognises. A commit with a transaction leaves out of
        the record applications that have not committed for 30 days, and those that committed
        longest ago if there are more than 100.

        Returns:
            The transactions by ``app_id``.

        Raises:
            BranchNotFoundError: there is no such branch.

        Cost: one request more than `lookup_branch`; in format 1 one for each commit back to the
        nearest record.
        """
        from icechunk_async.engine.commit.once import record_of  # noqa: PLC0415 -- loaded when it is used

        history = self._engine.history
        return (await record_of(history, await history.branch_tip(branch))).newest

    async def forget_transactions(
        self, app_ids: str | Iterable[str], branch: str = "main"
    ) -> SnapshotId:
        """Commit nothing but that a branch no longer records transactions of some applications.

        A later commit of one of them counts as new, whatever its version is.

        Args:
            app_ids: name of an application, or names.
            branch: the branch.

        Returns:
            The new tip.

        Raises:
            InvalidInputError: the branch records no transaction of one. Nothing was published.
            BranchNotFoundError, ReadOnlyError, RepositoryReadOnlyError: nothing was published.
            OutcomeUnknownError: the storage never answered; `recorded_transactions` finds out.

        Cost: that of an empty commit; a lost race is run again.

        Cancellation: it may have been published.
        """
        session = await self.writable_session(branch)
        names = {app_ids} if isinstance(app_ids, str) else set(app_ids)
        made = await session.publisher.forget(names)
        await self._tell(branch, made, session.workspace.base.parent_id, "commit")
        return made

    async def rearrange_session(self, branch: str) -> Session:
        """Begin a transaction on a branch that can move nodes (`Session.move`) and nothing else.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
            FeatureDisabledError: its feature flag ``move_node`` is off.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: as
                `writable_session`.

        Cost: one request more than `writable_session`.
        """
        self._engine.check_safe()
        await check_moves_allowed(self._engine.history)
        base = await self._engine.load(branch)
        check_online(self._engine.history)
        check_unprotected(self._engine.history, branch)
        return self._session(base, branch, SessionMode.REARRANGE)

    @asynccontextmanager
    async def transaction(
        self,
        branch: str,
        *,
        message: str,
        metadata: Mapping[str, JSON] | None = None,
        rebase_with: ConflictSolver | None = None,
        rebase_tries: int = 1000,
        timeout_seconds: float | None = None,
        once: Transaction | None = None,
        unchanged: Collection[str] = (),
        deduplicate: bool = False,
    ) -> AsyncGenerator[IcechunkStore[Session]]:
        """Commit what is written in the block, all at once when it ends.

        If the block fails or is cancelled, nothing is committed; no other writer ever sees a
        part of it. Its store only reads afterwards.

        Args:
            branch: where to commit.
            message: says what was done, for people.
            metadata: properties of the snapshot; see `Session.commit`, also for what follows.
            rebase_with: if another writer was first, replay the block's changes on top.
            rebase_tries: how often at most.
            timeout_seconds: how long the commit may take; the block's time does not count.
            once: names the commit. If the branch holds it already, the changes of the block are
                dropped; ``store.session.already_committed`` says so.
            unchanged: paths that the changes were computed from, and that nobody else may have
                touched since the block began.
            deduplicate: upload no bytes twice; see `writable_session`. A block that changed
                nothing ends without a commit then, or with an empty one if ``once`` names it.

        Raises:
            NothingToCommitError: the block changed nothing, without ``deduplicate``.
            ConflictError, RebaseFailedError, OutcomeUnknownError: as `Session.commit`. The
                session is at ``store.session``, with its changes.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: before the block.

        Cancellation: in the block nothing is committed; during the commit, it may be.
        """
        session = await self.writable_session(branch, deduplicate=deduplicate)
        try:
            yield session.store
        except BaseException:
            session.abandon()  # that nothing of it is committed is what was asked for
            raise
        quietly = deduplicate and once is None and not session.unmerged_forks
        if quietly and session.publisher.end_unchanged():
            return
        await session.commit(
            message,
            metadata,
            rebase_with=rebase_with,
            rebase_tries=rebase_tries,
            timeout_seconds=timeout_seconds,
            allow_empty=deduplicate and once is not None,
            once=once,
            unchanged=unchanged,
        )

    def _session(
        self,
        base: Snapshot,
        branch: str | None,
        mode: SessionMode,
        lease: Lease | None = None,
        *,
        deduplicate: bool = False,
        quiet: bool = False,
    ) -> Session:
        """Return a session; ``quiet``: no hook is told of what it publishes."""
        from icechunk_async.session import Session  # noqa: PLC0415 -- loaded when it is used

        # Not `self`: a repository that nobody holds warns and closes, whatever sessions there are.
        engine, hooks, default_metadata = self._engine, self._hooks, self.default_commit_metadata

        async def told(published: Snapshot, previous: SnapshotId | None, kind: str) -> None:
            from icechunk_async.engine.commit.hooks import CommitEvent  # noqa: PLC0415 -- loaded when it is used

            assert branch is not None  # of a session that published
            assert hooks is not None  # nobody else is told
            info = SnapshotInfo.of(
                published.id,
                published.parent_id,
                published.flushed_at,
                published.message,
                published.metadata,
            )
            event = CommitEvent("amend" if kind == "amend" else "commit", branch, info, previous)
            await hooks.run(event)

        workspace = engine.workspace(base, mode, deduplicate=deduplicate)
        if mode is SessionMode.WRITABLE and engine.assets.keeps_statistics:
            from icechunk_async.zarr.queries.written import recorder_for  # noqa: PLC0415 -- on use

            workspace.recorder = recorder_for(engine.assets)

        def publisher() -> Publisher:
            from icechunk_async.engine.commit.publisher import Publisher  # noqa: PLC0415 -- not to read

            return Publisher(
                workspace,
                engine.history,
                engine.manifest_options,
                branch=branch,
                mode=mode,
                default_metadata=default_metadata,
                writers=engine.neighbours.writers,
            )

        return Session(
            workspace,
            publisher,
            origin=engine.origin,
            lease=lease,
            told=None if quiet or hooks is None else told,
        )

    async def _tell(
        self,
        branch: str,
        tip: SnapshotInfo | SnapshotId,
        previous_id: SnapshotId | None,
        kind: Literal["commit", "amend", "reset"],
    ) -> None:
        """Tell the hooks, if there are any, that a branch was moved."""
        if self._hooks is None:
            return
        from icechunk_async.engine.commit.hooks import CommitEvent  # noqa: PLC0415 -- loaded when it is used

        if not isinstance(tip, SnapshotInfo):
            try:
                # The caller must hear that the branch was moved. If this raised, they would move it
                # again.
                tip = await self._engine.history.snapshot_info(tip)
            except IcechunkError as error:  # it was published, whatever comes now
                _log.warning("hooks are not told of snapshot %s: %s", tip, error)
                return
        await self._hooks.run(CommitEvent(kind, branch, tip, previous_id))

    # Branches and tags

    async def branches(self) -> Mapping[str, SnapshotId]:
        """Return every branch and its tip. Cost: one request; in format 1 one for each branch."""
        return dict(await self._engine.history.branches())

    async def tags(self) -> Mapping[str, SnapshotId]:
        """Return every tag and its snapshot. Cost: one request; in format 1 two for each tag."""
        return dict(await self._engine.history.tags())

    async def list_branches(self) -> set[str]:
        """Return the names of all branches."""
        return set(await self._engine.history.branches())

    async def list_tags(self) -> set[str]:
        """Return the names of all tags that were not deleted."""
        return set(await self._engine.history.tags())

    async def lookup_branch(self, branch: str) -> SnapshotId:
        """Return the tip of a branch.

        Raises:
            BranchNotFoundError: there is no such branch.
        """
        return await self._engine.history.branch_tip(branch)

    async def lookup_tag(self, tag: str) -> SnapshotId:
        """Return the snapshot of a tag.

        Raises:
            TagNotFoundError: there is no such tag, or it was deleted.
        """
        return await self._engine.history.tag_target(tag)

    async def create_branch(self, branch: str, snapshot_id: SnapshotId | str) -> None:
        """Create a branch whose tip is a snapshot.

        Raises:
            BranchExistsError, SnapshotNotFoundError, InvalidRefNameError: nothing changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been created.
        """
        self._engine.check_safe()
        await self._engine.history.create_branch(branch, as_snapshot_id(snapshot_id))

    async def reset_branch(
        self,
        branch: str,
        snapshot_id: SnapshotId | str,
        *,
        from_snapshot_id: SnapshotId | str | None = None,
    ) -> None:
        """Move a branch to any snapshot.

        Args:
            branch: its name.
            snapshot_id: its new tip.
            from_snapshot_id: move it only if this is its tip now.

        Raises:
            BranchNotFoundError, SnapshotNotFoundError: nothing changed.
            ConflictError: its tip is not ``from_snapshot_id``.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been moved.
        """
        self._engine.check_safe()
        # Ids are parsed before anything is asked for: a wrong one is the caller's fault, whatever
        # is there.
        expected = None if from_snapshot_id is None else as_snapshot_id(from_snapshot_id)
        target = as_snapshot_id(snapshot_id)
        await self._engine.history.reset_branch(branch, target, expected=expected)
        await self._tell(branch, target, expected, "reset")

    async def delete_branch(self, branch: str) -> None:
        """Delete a branch; its snapshots stay until they are collected.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidRefNameError: ``main`` cannot be deleted.
        """
        self._engine.check_safe()
        await self._engine.history.delete_branch(branch)

    async def create_tag(self, tag: str, snapshot_id: SnapshotId | str) -> None:
        """Give a snapshot a permanent name.

        Raises:
            TagExistsError, TagDeletedError, SnapshotNotFoundError, InvalidRefNameError: nothing
                changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the tag may have been created.
        """
        self._engine.check_safe()
        await self._engine.history.create_tag(tag, as_snapshot_id(snapshot_id))

    async def delete_tag(self, tag: str) -> None:
        """Delete a tag; its name can never be used again.

        Raises:
            TagNotFoundError: there is no such tag.
        """
        self._engine.check_safe()
        await self._engine.history.delete_tag(tag)

    # History

    async def lookup_snapshot(self, snapshot_id: SnapshotId | str) -> SnapshotInfo:
        """Return when and why a snapshot was made, and its parent.

        Raises:
            SnapshotNotFoundError: the repository has no such snapshot.
        """
        return await self._engine.history.snapshot_info(as_snapshot_id(snapshot_id))

    async def ancestry(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
    ) -> AsyncIterator[SnapshotInfo]:
        """Iterate over snapshots, from the one named back to the first.

        At most one argument is given; ``main`` if none is. ``ref`` takes any, see
        `readonly_session`.
        """
        start = await find_named(self._engine, branch, tag, snapshot_id, ref)
        async for page in self._engine.history.ancestry_pages(start):
            # Pages, since fields are decoded for a page at once, and the loop is not entered for
            # each snapshot.
            for info in page:
                yield info

    async def summary(
        self, ref: SnapshotId | str = "main", *, commits: int = 10, measure: bool = False
    ) -> RepositorySummary:
        """Return a summary of the repository: branches, tags, last commits, arrays, sizes.

        Print it, or show it in a notebook.

        Args:
            ref: whose arrays and commits are told: a branch, a tag or a snapshot, see
                `readonly_session`.
            commits: the number of commits, and of entries of the operations log; 0 or more.
            measure: also measure the bytes of all chunks, see `chunk_storage_stats`.

        Raises:
            InvalidInputError: ``commits`` is negative.
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.

        Cost: in format 2 two requests, one of them the snapshot's file; in layouts with a file
        for each ref, one for each branch, tag and commit. All nodes are decoded. Measuring reads
        every snapshot and manifest in use.
        """
        from icechunk_async.engine.history.summary import summarize  # noqa: PLC0415 -- loaded when it is used

        if commits < 0:
            raise InvalidInputError(f"A summary tells 0 commits or more, not {commits}.")
        found = await summarize(
            self._engine.history,
            self._engine.assets,
            ref,
            lambda: find_named(self._engine, None, None, None, ref),
            self.storage.description.url,
            commits=commits,
        )
        if not measure:
            return found
        measured = await self.chunk_storage_stats()
        return replace(
            found,
            stored_bytes=measured.non_virtual_bytes(),
            virtual_bytes=measured.virtual_bytes,
        )

    async def ancestry_graph(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
        plain: bool | None = None,
        limit: int | None = 50,
    ) -> AncestryGraph:
        """Draw history: text when printed, SVG in a notebook.

        At most one of the first four arguments is given. If none is, all branches are drawn.

        Args:
            branch: draw its ancestry.
            tag: draw its ancestry.
            snapshot_id: draw its ancestry.
            ref: draw the ancestry of any of these, see `readonly_session`.
            plain: draw without colours (True) or with them (False). None: text has colours if it
                goes to a terminal, and ``NO_COLOR`` is not set in the environment.
            limit: the number of snapshots to draw, the newest; None for all.

        Ids are shortened to letters that ``ref`` arguments take, such as that of
        `readonly_session`.

        Raises:
            InvalidInputError: ``limit`` is below 1.
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.

        Cost: that of `ancestry`, for each branch down to a snapshot that another one contains, or
        as far as ``limit``.
        """
        from icechunk_async.engine.history.graph import draw  # noqa: PLC0415 -- slow to import

        if limit is not None and limit < 1:
            raise InvalidInputError(f"A graph draws 1 snapshot or more, not {limit}.")
        start = None
        if not (branch is tag is snapshot_id is ref is None):
            start = await find_named(self._engine, branch, tag, snapshot_id, ref)
        return await draw(self._engine.history, start, plain=plain, limit=limit)

    async def diff(
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
    ) -> Diff:
        """Return the nodes and chunks that the commits after one snapshot up to another touched.

        One argument names the older snapshot, one the newer; ``from_ref`` and ``to_ref`` take any
        ref, see `readonly_session`.

        Raises:
            InvalidInputError: the older is not an ancestor of the newer.
        """
        from icechunk_async.engine.history.diff import diff_snapshots  # noqa: PLC0415 -- slow to import

        engine = self._engine
        start, end = await gather(
            find_named(engine, from_branch, from_tag, from_snapshot_id, from_ref, default=None),
            find_named(engine, to_branch, to_tag, to_snapshot_id, to_ref, default=None),
        )
        return await diff_snapshots(engine.history, engine.assets, start, end)

    async def ops_log(self) -> AsyncIterator[Update]:
        """Iterate over the operations log: what was done to the repository, newest first.

        `operations` returns the newest at once, and shows them as a table.

        Raises:
            UnsupportedBySpecError: format version 1 keeps no such log.
        """
        async for update in state_for(self._engine.history, "operations_log").operations():
            yield update

    async def operations(self, *, limit: int | None = 200) -> OperationsLog[Update]:
        """Return the newest entries of the operations log, newest first, as a sequence.

        Print it, or show it in a notebook.

        Args:
            limit: the number of entries to read, 1 or more; None for all.

        Raises:
            InvalidInputError: ``limit`` is below 1, or no whole number.
            UnsupportedBySpecError: format version 1 keeps no such log.

        Cost: one request for each ``num_updates_per_repo_info_file`` entries, 1,000 unless it was
        set; memory: the entries.
        """
        from icechunk_async.engine.history.summary import read_operations  # noqa: PLC0415 -- loaded when it is used

        given = cast("object", limit)
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise InvalidInputError(
                f"The operations log cannot be read up to limit={limit!r} entries. Give a whole "
                "number of 1 or more, or None for all of it."
            )
        return await read_operations(self.ops_log(), limit)

    # Changes and watching

    async def changes(
        self,
        start: SnapshotId | str,
        end: SnapshotId | str = "main",
        *,
        net: bool = True,
        level: Literal["chunk", "cell"] = "chunk",
        before: bool = False,
        batch_size: int = 100_000,
    ) -> AsyncIterator[Change | CellChanges]:
        """Iterate over everything that turns one snapshot into another, as columns.

        Any two snapshots can be compared, also of different branches. Nodes come first: deletions,
        moves, creations, new metadata. What was below a deleted group is listed as well: deleted,
        or moved out of it. Then come chunks or cells, array by array.

        Chunks that were written again with equal bytes are left out in a repository that keeps
        checksums (a checksum has 32 bits).

        Cells are those whose value differs, also of virtual chunks. What an array did not have
        before counts as its fill value: a new array, cells beyond its former shape, and all
        cells of an array whose rank changed or whose data type became one that cannot be compared.
        Cells that are gone, with their array or since it was made smaller, are not listed: the
        change of the node says so.

        Args:
            start: the first snapshot: a branch, a tag, an id, or a ref such as ``main~2``.
            end: the second one.
            net: compare the two states. False: what each commit between them changed, in order.
            level: what is listed of the contents of arrays.
            before: also give the references of chunks before the change. Cells always come with
                their values before, since these are compared.
            batch_size: chunks, or cells, in a batch, at most.

        Yields:
            `NodeChange`, and `ChunkChanges` or `CellChanges` of `icechunk_async.versions`.

        Raises:
            NotFoundError, SnapshotNotFoundError: nothing has this name, or it was collected.
            InvalidInputError: without ``net``: ``start`` is not an ancestor of ``end``. Or an
                argument cannot be. Or, for cells, an array that changed has no regular chunk grid.
            FormatError: a snapshot, a manifest or a chunk that is read is damaged.

        Cost: where one is an ancestor of the other, the logs between them, and the manifests that
        hold what those list; otherwise a look at each node, and the manifests that only one
        of them uses (in format version 1 always). For cells both versions of each chunk that
        changed are read and decoded: all chunks of an array whose codecs, fill value or data type
        changed, and, of one that grew, also those at its former end that were not full. Memory: the
        references of the manifests of eight arrays, and for cells 256 MiB or two chunks.
        """
        from icechunk_async.engine.versions.combine import load  # noqa: PLC0415 -- slow to import
        from icechunk_async.engine.versions.feed import changes_between, steps_between  # noqa: PLC0415
        from icechunk_async.engine.versions.naming import find_ref  # noqa: PLC0415

        if level not in {"chunk", "cell"}:
            raise InvalidInputError(f"level must be 'chunk' or 'cell'; it is {level!r}.")
        if batch_size < 1:
            raise InvalidInputError(f"batch_size must be at least 1 {level}; it is {batch_size}.")
        engine = self._engine
        one = await load(engine, await find_ref(engine, start), "which is to be compared")
        other = await load(engine, await find_ref(engine, end), "which is to be compared")
        if level == "chunk":
            async for change in changes_between(
                engine, one, other, net=net, with_references=before, batch_size=batch_size
            ):
                yield change
            return
        from icechunk_async.zarr.values import cells_of_feed  # noqa: PLC0415 -- slow to import

        for pair in await steps_between(engine, one, other, net=net):
            older, newer = (self._session(it, None, SessionMode.READONLY) for it in pair)
            feed = changes_between(engine, *pair)
            async for found in cells_of_feed(older.store, newer.store, feed, batch_size):
                yield found

    async def diff_values(
        self,
        start: SnapshotId | str,
        end: SnapshotId | str = "main",
        *,
        paths: Collection[str] | None = None,
    ) -> list[ValueDiff]:
        """Compare the values of arrays in two snapshots: how many cells changed, and by how much.

        Arrays that only one side has are left out, and so are those whose rank changed, or whose
        data type became one that cannot be compared; `changes` and `diff` list them. Of an array
        that was resized, the cells that both sides have are compared.

        Args:
            start: the first snapshot: a branch, a tag, an id, or a ref such as ``main~2``.
            end: the second one.
            paths: only these arrays, and those below these groups; None: all.

        Returns:
            One entry for each array in which something may differ, by path. `changed` is 0 where
            chunks were written again with equal values.

        Raises:
            NotFoundError, SnapshotNotFoundError: nothing has this name, or it was collected.
            InvalidInputError: an array that changed has no regular chunk grid; or a path is not
                valid.
            FormatError: a snapshot, a manifest or a chunk is damaged.

        Cost: that of `changes`, and both versions of each chunk that changed are read and decoded;
        all chunks of an array whose codecs, fill value or data type changed. Memory: 16 chunks of
        each side.
        """
        from icechunk_async.engine.versions.feed import changes_between  # noqa: PLC0415
        from icechunk_async.zarr.values import value_diffs  # noqa: PLC0415 -- slow to import

        before, after = await self._both_sessions(start, end)
        feed = changes_between(self._engine, before.workspace.base, after.workspace.base)
        return await value_diffs(before.store, after.store, feed, paths)

    async def changed_cells(
        self,
        start: SnapshotId | str,
        end: SnapshotId | str = "main",
        *,
        paths: Collection[str] | None = None,
    ) -> AsyncIterator[CellChanges]:
        """Iterate over the cells whose values differ between two snapshots, as columns.

        Arguments, errors, cost and what is compared are those of `diff_values`.

        Yields:
            `CellChanges` of `icechunk_async.versions`: the cells of one chunk that differ.
        """
        from icechunk_async.engine.versions.feed import changes_between  # noqa: PLC0415
        from icechunk_async.zarr.values import cell_changes  # noqa: PLC0415 -- slow to import

        before, after = await self._both_sessions(start, end)
        feed = changes_between(self._engine, before.workspace.base, after.workspace.base)
        async for cells in cell_changes(before.store, after.store, feed, paths):
            yield cells

    async def _both_sessions(
        self, start: SnapshotId | str, end: SnapshotId | str
    ) -> tuple[Session, Session]:
        """Return sessions that read two refs."""
        from icechunk_async.engine.versions.naming import find_ref  # noqa: PLC0415 -- slow to import

        one, other = await gather(find_ref(self._engine, start), find_ref(self._engine, end))
        return await gather(
            # By id: a name that moves between the two look-ups would give two unrelated states.
            self.readonly_session(snapshot_id=one),
            self.readonly_session(snapshot_id=other),
        )

    async def watch(
        self,
        branch: str = "main",
        *,
        since: SnapshotId | str | None = None,
        poll_seconds: float = 1.0,
        max_poll_seconds: float = 30.0,
    ) -> AsyncIterator[SnapshotInfo]:
        """Iterate over the commits of a branch as they come, without end, oldest first.

        To continue after a restart, keep the id of the last commit and pass it as ``since``. No
        commit is left out, and none comes twice.

        Args:
            branch: the branch to follow.
            since: the last commit that is known; None: the present tip.
            poll_seconds: the time between two looks while commits come.
            max_poll_seconds: the time that this grows to while none comes.

        Raises:
            BranchNotFoundError: there is no such branch, or it was deleted.
            StreamPositionLostError: the branch was reset, its tip amended, or its history expired,
                so that the last commit is not part of it any more.
            NotFoundError: nothing has the name ``since``.

        Cancellation: no effect. Code that blocks ends it by an interrupt or a `deadline`.

        Cost: each look is one request, which the storage answers in a few bytes if nothing
        changed (in format version 2). Failures of the storage that its retries do not overcome
        are waited for.
        """
        from icechunk_async.engine.versions.naming import find_ref  # noqa: PLC0415 -- slow to import
        from icechunk_async.engine.versions.watch import watch  # noqa: PLC0415 -- slow to import

        start = None if since is None else await find_ref(self._engine, since)
        async for info in watch(
            self._engine.history,
            branch,
            start,
            poll_seconds=poll_seconds,
            max_poll_seconds=max_poll_seconds,
        ):
            yield info

    async def blame(
        self,
        path: str,
        region: Sequence[slice] | None = None,
        *,
        ref: SnapshotId | str = "main",
    ) -> Blame:
        """Find the commit that wrote each chunk of an array.

        Chunks that were shifted or reindexed are those of the commit that moved them.

        Args:
            path: the array.
            region: only the chunks that this part of the array meets, a slice of elements for each
                axis; for regular grids.
            ref: the state that is asked about: a branch, a tag, an id, or a ref.

        Raises:
            NodeNotFoundError: there is no array at this path.
            NotFoundError, SnapshotNotFoundError: nothing has this name, or it was collected.
            InvalidInputError: the region does not fit the array.

        Cost: the array's manifests, and the logs from the ref back to the oldest commit that wrote
        one of the chunks, one request for each.
        """
        from icechunk_async.engine.versions.blame import blame  # noqa: PLC0415 -- slow to import
        from icechunk_async.engine.versions.combine import load  # noqa: PLC0415 -- slow to import
        from icechunk_async.engine.versions.naming import find_ref  # noqa: PLC0415

        snapshot_id = await find_ref(self._engine, ref)
        snapshot = await load(self._engine, snapshot_id, "whose chunks are asked about")
        return await blame(self._engine, snapshot, check_path(path), region)

    async def cube(
        self,
        path: str,
        *,
        along: Literal["commits", "days"] = "commits",
        ref: SnapshotId | str = "main",
        since: SnapshotId | str | datetime | None = None,
        until: datetime | None = None,
        every: int = 1,
        limit: int | None = None,
        missing: object = None,
        chunks: Mapping[Hashable, int] | None = None,
    ) -> xarray.Dataset:
        """Open an array with its history as a dimension: each forecast by when it was known.

        The dataset is lazy and has a leading dimension ``known_at``, oldest version first. Each
        different chunk is read once, however many versions share it. ``await dataset.load_async()``
        reads on this loop; all else that computes blocks. The repository must stay open; a pickled
        copy of the dataset, as workers get it, opens it again.

        **Versions.** They begin with the first that has the array, and keep the order of the
        ancestry. A commit was not known before its parent: one whose clock was behind, or
        equal, counts as made one microsecond after its parent. The coordinate ``committed_at`` has
        the times as they were written, ``snapshot_id`` the ids. History that expired is left out.

        **The array** is the node with the same id, so that moves are followed, and where a version
        has no such node, the array at the path where it was last, so that one that was replaced is
        continued.

        **Sizes.** Axes are as long as in the largest version. Cells that a version does not have,
        since the array was smaller or did not exist then, are NaN or NaT, masked as ``_FillValue``
        if the array has that attribute, and else its fill value; ``exists`` says which versions
        have the array.

        **Coordinates** are those beside the array. One whose values changed on the way has a value
        for each version, and is called ``<name>_as_known``.

        Args:
            path: the path of the array in the newest version that has it.
            along: ``"commits"``: a version for each commit. ``"days"``: for each UTC day from the
                first to the last, the state at its end; ``known_at`` is its last microsecond.
            ref: the newest version: a branch, a tag, an id, or a ref such as ``main~2``.
            since: the oldest commit that counts, or the time of the oldest (UTC if it is naive).
            until: the time of the newest.
            every: take every n-th version, counted from the newest.
            limit: the largest number of versions; older ones are left out.
            missing: the value of cells that a version does not have, if not as above.
            chunks: sizes of Dask's blocks by dimension, ``{}`` for good ones; None: without Dask.

        Raises:
            NodeNotFoundError: no version has an array at this path.
            NotFoundError, SnapshotNotFoundError: nothing has this name, or it was collected.
            InvalidInputError: the choice leaves nothing, or more than 100,000 versions; or they
                cannot be stacked: another number of axes, data types that have no common one, a
                chunk grid that is not regular.
            FormatError: a snapshot is damaged. Reading raises it for manifests and chunks, and
                `VirtualChunkError` for virtual ones whose source changed.
            MissingDriverError: xarray is not installed.

        Cancellation: no effect.

        Cost: one request for each snapshot; the values of coordinates. Reading: one request for
        each different manifest and chunk. Memory: what is read, and sixteen chunks.
        """
        # Importing xarray takes a second, which would hold up the event loop.
        await anyio.to_thread.run_sync(import_module, "icechunk_async.datasets.cube")
        from icechunk_async.datasets.cube import open_cube  # noqa: PLC0415 -- needs xarray
        from icechunk_async.engine.versions.timeline import Choice  # noqa: PLC0415 -- slow to import
        from icechunk_async.handles import Here  # noqa: PLC0415 -- only for this

        return await open_cube(
            Here(self._engine),
            self._engine,
            path,
            ref,
            Choice(along, since, until, every, limit),
            missing=missing,
            chunks=chunks,
        )

    # Undo and merge

    async def undo(self, branch: str = "main") -> SnapshotId:
        """Take back the last commit of a branch, by moving the branch to the snapshot before it.

        The commit can still be read by its id, and the branch reset to it, until garbage is
        collected. To take back an older commit and keep those after it, see `revert`.

        Args:
            branch: the branch.

        Returns:
            The tip of the branch now.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidInputError: its tip is the first snapshot.
            ConflictError: somebody else moved the branch meanwhile; nothing changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been moved.

        Cost: two requests; with format version 1 one more.
        """
        from icechunk_async.engine.versions.plans import parent_of_tip  # noqa: PLC0415 -- slow to import

        self._engine.check_safe()
        # With `expected` below, a commit that lands in between is refused, and not taken back in
        # place of the one that was meant.
        tip, parent = await parent_of_tip(self._engine, branch)
        await self._engine.history.reset_branch(branch, parent, expected=tip)
        await self._tell(branch, parent, tip, "reset")
        return parent

    async def revert(
        self,
        snapshot: SnapshotId | str,
        *,
        on: str = "main",
        solver: ConflictSolver | None = None,
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
    ) -> MergeReport:
        """Take back one commit by a new one; commits after it stay.

        Nodes, metadata and chunks that the commit changed get the state that they had before it.
        No chunk is copied: the new commit refers to the old bytes. What later commits changed
        again is a conflict.

        Args:
            snapshot: the commit to take back: an id, the first letters of one, or a ref such as
                ``main~2``.
            on: the branch to commit to.
            solver: decides conflicts; *ours* is the state before the commit, *theirs* the branch.
            message: says what was done; by default names the commit that is taken back.
            metadata: properties of the new snapshot, laid over the default ones.
            dry_run: only work out what would be changed, and what would clash.

        Raises:
            MergeConflictError: later commits changed the same; nothing was published.
            NotFoundError: nothing has this name.
            SnapshotNotFoundError: the commit, or the snapshot before it, expired or was collected.
            InvalidInputError: it is the first snapshot; or the solver returned something invalid.
            OutcomeUnknownError: the storage never answered.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: nothing changed.

        Cancellation: the commit may have been published.

        Cost: the commit's transaction log and those of all commits after it, the manifests that
        hold what it touched, and a commit.
        """
        from icechunk_async.engine.versions.plans import Revert  # noqa: PLC0415 -- slow to import

        return await self._combine(Revert(snapshot, on, solver), message, metadata, dry_run)

    async def restore(
        self,
        ref: SnapshotId | str,
        *,
        paths: Sequence[str] | None = None,
        region: Sequence[slice] | None = None,
        on: str = "main",
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
    ) -> MergeReport:
        """Bring nodes back to how they were in another snapshot, by a new commit.

        No chunk is copied. What the branch has at these paths now is replaced; what did not exist
        then is deleted. Everything else on the branch stays.

        Args:
            ref: where to bring it back from: a branch, a tag, an id, or a ref such as ``main~2``.
            paths: the arrays and groups to bring back, each with all below it; None: everything.
            region: with the path of one array: bring back the chunks of this part only, a slice of
                elements for each axis. It begins and ends at borders of chunks. The metadata of
                the array stay.
            on: the branch to commit to.
            message: says what was done.
            metadata: properties of the new snapshot, laid over the default ones.
            dry_run: only work out what would be changed.

        Raises:
            NodeNotFoundError: neither snapshot has a node at a path.
            MergeConflictError: a node would be left without the group that it is in; restore the
                group as well.
            NotFoundError, SnapshotNotFoundError: nothing has this name, or it was collected.
            InvalidInputError: the region does not fit chunks, or the array was created anew since.
            OutcomeUnknownError, BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError:
                as `revert`.

        Cancellation: the commit may have been published.

        Cost: that of comparing two snapshots: transaction logs if one is an ancestor of the other,
        otherwise the manifests that only one of them uses; and a commit.
        """
        from icechunk_async.engine.versions.plans import Restore  # noqa: PLC0415 -- slow to import

        return await self._combine(Restore(ref, on, paths, region), message, metadata, dry_run)

    async def merge(
        self,
        source: SnapshotId | str,
        *,
        into: str = "main",
        base: SnapshotId | str | None = None,
        solver: ConflictSolver | None = None,
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
    ) -> MergeReport:
        """Merge what a branch changed into another branch, by one commit.

        The changes of the source since the nearest common ancestor are made on the branch. Nodes
        are known by their ids, so chunks follow an array that the other side moved. No chunk is
        copied. The commit names the source in its properties, so that merging again brings only
        what is new.

        Args:
            source: what to merge: a branch, a tag, or a snapshot.
            into: the branch to commit to.
            base: the state that both began with; None: the nearest common ancestor.
            solver: decides conflicts; *ours* is the source, *theirs* is the branch. See
                `icechunk_async.conflicts`.
            message: says what was done.
            metadata: properties of the new snapshot, laid over the default ones.
            dry_run: only work out what would be changed, and what would clash.

        Raises:
            MergeConflictError: both changed the same; nothing was published. The report in its
                context has every clash.
            NotFoundError: nothing has this name.
            InvalidInputError: there is no common ancestor, or the solver returned nonsense.
            SnapshotNotFoundError: a snapshot that is needed was collected.
            OutcomeUnknownError, BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError:
                as `revert`.

        Cancellation: the commit may have been published.

        Cost: the ancestries; the logs of the commits on both sides since the common ancestor, the
        manifests that hold what those touched, and a commit.
        """
        from icechunk_async.engine.versions.plans import Merge  # noqa: PLC0415 -- slow to import

        return await self._combine(Merge(source, into, base, solver), message, metadata, dry_run)

    async def begin_merge(
        self,
        source: SnapshotId | str,
        *,
        into: str = "main",
        base: SnapshotId | str | None = None,
        solver: ConflictSolver | None = None,
    ) -> PendingMerge:
        """Begin a merge whose conflicts are settled by hand, in a session, before it is committed.

        Args:
            source: what to merge: a branch, a tag, or a snapshot.
            into: the branch to commit to.
            base: the state that both began with; None: the nearest common ancestor.
            solver: decides conflicts first; those that it leaves are open.

        Raises:
            NotFoundError, BranchNotFoundError, SnapshotNotFoundError: as `merge`.
            InvalidInputError, RepositoryReadOnlyError, UnsafeStorageError: as `merge`.

        Cost: that of `merge` without the commit.
        """
        from icechunk_async.engine.versions.plans import Merge  # noqa: PLC0415 -- slow to import
        from icechunk_async.versions import PendingMerge  # noqa: PLC0415 -- slow to import

        self._engine.check_safe()
        plan = Merge(source, into, base, solver)
        # No turn is taken, unlike in `_combine`: people take hours to settle conflicts, and the
        # commit replays the merge on what came meanwhile.
        combined = await plan.combine(self._engine)
        check_online(self._engine.history)
        check_unprotected(self._engine.history, into)
        report = await combined.report(self._engine, into)
        session = self._session(combined.target, into, SessionMode.WRITABLE)
        session.workspace.rebase_to(combined.target, combined.changes)
        return PendingMerge(
            session,
            self._sides(combined.target, combined.source),
            report,
            plan.message(combined.source, combined.base),
            plan.how.properties(combined.source.id),
            clashes=combined.conflicts,
        )

    def _sides(self, one: Snapshot, other: Snapshot) -> tuple[Session, Session]:
        """Return sessions that read two snapshots."""
        read = SessionMode.READONLY
        return self._session(one, None, read), self._session(other, None, read)

    async def resume_merge(self, data: bytes | memoryview) -> PendingMerge:
        """Continue a merge of another process, from the bytes of `PendingMerge.to_bytes`.

        What was settled stays settled. If others committed to the branch meanwhile, the commit
        replays the merge on top, as that of any pending merge does.

        Args:
            data: the bytes.

        Raises:
            FormatError: they are damaged, or no merge of this repository.
            SnapshotNotFoundError: what the merge stands on, or its source, is not there any more.
            RepositoryReadOnlyError, UnsafeStorageError, BranchProtectedError: as `begin_merge`.

        Cost: two snapshots, and with conflicts the logs of the commits on both sides.
        """
        from icechunk_async.engine.versions.combine import Combining, load  # noqa: PLC0415
        from icechunk_async.engine.versions.pending import decode_pending, fitting  # noqa: PLC0415
        from icechunk_async.engine.versions.report import (  # noqa: PLC0415
            Behind,
            MergeReport,
            reported,
        )
        from icechunk_async.versions import PendingMerge  # noqa: PLC0415 -- slow to import

        engine = self._engine
        engine.check_safe()
        state = decode_pending(data)
        target = await load(engine, state.target_id, "which the merge stands on")
        source = await load(engine, state.source_id, "which is to be merged")
        # The bytes come from anywhere, and nothing guards them against changes by hand: each part
        # is held against the snapshots of this repository before a session has it.
        changes = fitting(state, target.nodes, self.spec_version)
        check_online(engine.history)
        check_unprotected(engine.history, state.branch)
        behind = Behind(engine, state.base_id, source.id, target.id)
        conflicts = await reported(behind, state.conflicts)
        ends = state.base_id, source.id, target.id
        report = MergeReport(state.branch, *ends, None, state.diff, conflicts)
        session = self._session(target, state.branch, SessionMode.WRITABLE)
        session.publisher.guard.distrust()  # its chunks are of any age
        session.workspace.rebase_to(target, changes)
        return PendingMerge(
            session,
            self._sides(target, source),
            report,
            state.message,
            Combining.MERGE.properties(source.id),
            clashes=state.conflicts,
            still_open=state.open,
        )

    async def cherry_pick(
        self,
        snapshot: SnapshotId | str,
        *,
        onto: str = "main",
        solver: ConflictSolver | None = None,
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
    ) -> MergeReport:
        """Make the changes of one commit on another branch, by a new commit.

        Args:
            snapshot: the commit: an id, the first letters of one, or a ref such as ``trial~1``.
            onto: the branch to commit to.
            solver: decides conflicts; *ours* is the commit, *theirs* is the branch.
            message: by default that of the commit.
            metadata: properties of the new snapshot, laid over the default ones.
            dry_run: only work out what would be changed, and what would clash.

        Errors, cancellation and cost are those of `revert`.
        """
        from icechunk_async.engine.versions.plans import CherryPick  # noqa: PLC0415 -- slow to import

        return await self._combine(CherryPick(snapshot, onto, solver), message, metadata, dry_run)

    async def fast_forward(self, branch: str, *, to: SnapshotId | str) -> SnapshotId:
        """Move a branch forward to a snapshot that has the branch's tip before it.

        Args:
            branch: the branch.
            to: a branch, a tag, or a snapshot.

        Returns:
            The tip of the branch now.

        Raises:
            InvalidInputError: the tip is not an ancestor of the snapshot; nothing changed. Merge.
            BranchNotFoundError, NotFoundError: nothing has this name.
            ConflictError: somebody else moved the branch meanwhile; nothing changed.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the branch may have been moved.

        Cost: the ancestry of the snapshot, and the move.
        """
        from icechunk_async.engine.versions.plans import descendant  # noqa: PLC0415 -- slow to import

        self._engine.check_safe()
        tip, target = await descendant(self._engine, branch, to)
        if tip != target:
            await self._engine.history.reset_branch(branch, target, expected=tip)
            await self._tell(branch, target, tip, "reset")
        return target

    async def squash(
        self,
        branch: str,
        *,
        since: SnapshotId | str,
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
    ) -> SnapshotId:
        """Replace the commits of a branch after a snapshot by one that has all their changes.

        The old commits can be read by their ids until garbage is collected; tags keep them.

        Args:
            branch: the branch.
            since: the snapshot that the new commit follows.
            message: by default all messages, the oldest first.
            metadata: properties of the new snapshot, laid over the default ones.

        Returns:
            The new tip of the branch.

        Raises:
            InvalidInputError: ``since`` is not an ancestor of the tip; nothing changed.
            ConflictError: somebody else moved the branch meanwhile; it was left unchanged.
            OutcomeUnknownError: the storage never answered.
            BranchNotFoundError, NotFoundError, RepositoryReadOnlyError, UnsafeStorageError:
                nothing changed.

        Cancellation: the branch may have been moved.

        Cost: the logs of the commits, the manifests that hold what they touched, a commit, and a
        move of the branch.
        """
        from icechunk_async.engine.versions.plans import plan_squash  # noqa: PLC0415 -- slow to import

        self._engine.check_safe()
        plan = await plan_squash(self._engine, branch, since)
        if plan is None:
            return await self.lookup_branch(branch)
        check_unprotected(self._engine.history, branch)
        session = self._session(plan.combined.base, branch, SessionMode.WRITABLE)
        session.workspace.rebase_to(plan.combined.target, plan.combined.changes)
        properties = {**plan.properties, **(metadata or {})}
        # A snapshot that no branch holds, and then one conditional move: nobody sees the branch
        # without either, and a failure between the two leaves garbage only. The move checks the
        # protection again, in its own atomic step.
        try:
            made = await session.flush(message or plan.message, properties)
        except BaseException:
            session.abandon()  # its changes are the commits of the branch, which are there
            raise
        await self._engine.history.reset_branch(branch, made, expected=plan.tip)
        await self._tell(branch, made, plan.tip, "commit")
        return made

    async def _combine(
        self,
        plan: Plan,
        message: str | None,
        metadata: Mapping[str, JSON] | None,
        dry_run: bool,  # noqa: FBT001
    ) -> MergeReport:
        """Commit changes on the tip of a branch; work them out again if the branch moves."""
        from icechunk_async.engine.versions.report import conflict_error  # noqa: PLC0415

        engine = self._engine
        if dry_run:
            return await (await plan.combine(engine)).report(engine, plan.branch)
        engine.check_safe()
        storage, backend = engine.assets.storage, engine.assets.backend
        async with engine.neighbours.writers.turn(plan.branch, storage, backend) as turn:
            while True:
                # What a try is: work out the changes on the tip that the turn found, and commit
                # them on that very tip. After a lost race they are worked out anew and not rebased,
                # since conflicts, and what the solver decides, are those of the new tip.
                turn.begin()
                combined = await plan.combine(engine)
                turn.stands_on(combined.target.id, combined.target.metadata)
                report = await combined.report(engine, plan.branch)
                if combined.conflicts:
                    raise conflict_error(report, combined.conflicts)
                if combined.changes.is_empty():
                    return report
                check_online(engine.history)
                check_unprotected(engine.history, plan.branch)
                # Hooks are told after the turn: one that commits here would wait for its end.
                session = self._session(
                    combined.target, plan.branch, SessionMode.WRITABLE, quiet=True
                )
                session.workspace.rebase_to(combined.target, combined.changes)
                try:
                    snapshot_id = await session.commit(
                        message or plan.message(combined.source, combined.base),
                        {**plan.how.properties(combined.source.id), **(metadata or {})},
                    )
                except ConflictError:  # somebody committed first
                    session.abandon()
                    await turn.start_again()
                    continue
                except BaseException:
                    session.abandon()
                    raise
                break
        await self._tell(plan.branch, snapshot_id, combined.target.id, "commit")
        return replace(report, snapshot_id=snapshot_id)

    # Administration

    async def save_config(self) -> None:
        """Store the configuration in force, for everyone who opens the repository from now on.

        Raises:
            ConflictError: the stored configuration changed meanwhile; nothing was stored.
        """
        self._engine.check_safe()
        history = self._engine.history
        await history.save_config(self.config, await history.load_config())

    async def get_metadata(self) -> dict[str, JSON]:
        """Return the repository's own metadata.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return (await state_for(self._engine.history, "metadata").info()).metadata

    async def set_metadata(self, metadata: Mapping[str, JSON]) -> None:
        """Replace the repository's own metadata, JSON values by name.

        Raises:
            InvalidInputError: a value is not JSON; nothing changed.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the metadata may have been replaced.
        """
        await self._engine.state_to_change("metadata").replace_metadata(metadata)

    async def update_metadata(self, metadata: Mapping[str, JSON]) -> dict[str, JSON]:
        """Lay items over the repository's own metadata, name by name, and return all of it.

        Errors and cancellation are those of `set_metadata`.
        """
        return await self._engine.state_to_change("metadata").merge_metadata(
            lambda info: (
                # Protections are part of this item. Who sets another part of it must not lift them
                # unawares.
                keeping_protection(info, metadata) if METADATA_NAME in metadata else metadata
            )
        )

    async def save_packing(self) -> None:
        """Store the packing in force, for everyone who opens the repository from now on.

        It is an item of the repository's metadata, ``icechunk-async``, and is lost if that is
        replaced. The official engine keeps the item and does not pack.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1, which has no place for
                it. Give ``packing`` at each opening.
            RepositoryReadOnlyError, OutcomeUnknownError: as `set_metadata`.

        Cancellation: it may have been stored.
        """
        await self._engine.state_to_change("metadata").merge_metadata(
            lambda info: {
                METADATA_NAME: OwnSettings(packing=self.packing).laid_over(stored_item(info))
            }
        )

    async def save_sums(self) -> None:
        """Store whether checksums are kept, for everyone who opens the repository from now on.

        Where they are, every commit of this library stores beside each manifest the checksums
        (CRC-32C) of its chunks, and records in the snapshot a digest of all it consists of. Chunks
        that the official engine writes have no sums, nor have those from before; see `add_sums`.

        Errors, cancellation and where it is stored are those of `save_packing`.
        """
        await self._engine.state_to_change("metadata").merge_metadata(
            lambda info: {METADATA_NAME: OwnSettings(sums=self.sums).laid_over(stored_item(info))}
        )

    async def keep_statistics(self, *, enabled: bool = True) -> None:
        """Let sessions make statistics of the chunks that they write, or let them do so no more.

        This is stored for everyone who opens the repository from now on, and counts here for
        sessions that begin from now on. Statistics are then there with each commit, so that
        `Session.aggregate` and `Session.where` need not read these chunks; `analyze` makes those of
        chunks that are there already. Chunks that the official engine writes have none, which is
        no error. By default they are not made.

        Args:
            enabled: make them.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1 or older, which has no
                place for the setting. Use `analyze`.
            RepositoryReadOnlyError, OutcomeUnknownError: as `set_metadata`.

        Cancellation: it may have been stored.

        Cost: for each chunk that is written later, to decode it once and to pass over its values
        some five times; memory for two such chunks with a double for each cell, and 400 bytes for
        each chunk until the commit. A commit stores one object more for each array that it wrote,
        beside its other files, of 92 bytes a chunk.
        """
        self._engine.history.capabilities.require("upkeep")
        await self._engine.state_to_change("metadata").merge_metadata(
            lambda info: {
                METADATA_NAME: OwnSettings(statistics=enabled).laid_over(stored_item(info))
            }
        )
        # Here only after it is stored: if that fails, this process must not differ from all others.
        self._engine.assets.keeps_statistics = enabled

    async def get_status(self) -> RepoStatus:
        """Return whether the repository may be changed.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        stored = (await state_for(self._engine.history, "status").info()).status
        return RepoStatus(stored.availability, clock.from_us(stored.set_at), stored.reason)

    async def set_status(self, status: RepoStatus) -> None:
        """Allow or forbid changes of the repository, for everyone.

        Writers honour it from their next change on: sessions cannot commit, refs do not move.
        Reading is always possible. The storage does not enforce it.

        Raises:
            InvalidInputError: ``OFFLINE``, which only this library would honour.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the status may have been set.
        """
        if status.availability is RepoAvailability.OFFLINE:
            raise InvalidInputError(
                "A repository cannot be set offline: the official engine would take it for "
                "online. Use RepoAvailability.READ_ONLY."
            )
        set_at = clock.now_us() if status.set_at is None else clock.to_us(status.set_at)
        stored = StoredStatus(status.availability, set_at, status.limited_availability_reason)
        await self._engine.state_to_change("status").set_status(stored)

    async def feature_flags(self) -> list[FeatureFlag]:
        """Return every feature flag: ``move_node``, ``create_tag`` and ``delete_tag``.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        return await state_for(self._engine.history, "feature_flags").feature_flags()

    async def enabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the feature flags that are on."""
        return [flag for flag in await self.feature_flags() if flag.enabled]

    async def disabled_feature_flags(self) -> list[FeatureFlag]:
        """Return the feature flags that are off."""
        return [flag for flag in await self.feature_flags() if not flag.enabled]

    async def set_feature_flag(self, name: str, setting: bool | None) -> None:  # noqa: FBT001
        """Switch a feature on (True), off (False), or back to its default (None).

        All writers, the official engine included, refuse a feature that is off with
        ``FeatureDisabledError``.

        Raises:
            InvalidInputError: there is no such flag.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: the repository is of format version 1.
            OutcomeUnknownError: the storage never answered.

        Cancellation: the flag may have been set.
        """
        await self._engine.state_to_change("feature_flags").set_feature_flag(name, setting)

    # Proposals and protection

    async def propose(
        self,
        source: SnapshotId | str,
        *,
        into: str = "main",
        checks: Iterable[AnyCheck] = (),
        title: str | None = None,
        message: str | None = None,
        metadata: Mapping[str, JSON] | None = None,
        base: SnapshotId | str | None = None,
        solver: ConflictSolver | None = None,
        compare_chunks: int = 10_000,
    ) -> Proposal:
        """Propose what a branch changed, to be checked and reviewed before another branch takes it.

        The merge is made as a snapshot that no branch holds, and the checks run on it.
        `Proposal.accept` moves the branch to that very snapshot if all of them passed. Records are
        kept below ``proposals/`` in the repository, with a page that shows the changes,
        ``review.html``; the official engine ignores them. `garbage_collect` keeps what open
        proposals need, and deletes those that ended before its cutoff.

        Args:
            source: what to merge: a branch, a tag, or a snapshot.
            into: the branch that is to take it.
            checks: async functions of a session that reads the merged state, and of the proposal,
                which return None or a sentence that says what is wrong; or
                `icechunk_async.proposals.Check`, also for commands.
            title: what it is about, on one line; by default the first line of the message.
            message: of the merge.
            metadata: properties of the merge, laid over the default ones.
            base: the state that both began with; None: the nearest common ancestor.
            solver: decides conflicts; *ours* is the source, *theirs* is the branch.
            compare_chunks: compare the values of at most this number of chunks, for the review.

        Returns:
            The proposal. That a check did not pass raises nothing here; see `Proposal.results`.

        Raises:
            MergeConflictError: both changed the same. There is no proposal.
            NothingToCommitError: the branch has all of it already.
            NotFoundError, BranchNotFoundError, SnapshotNotFoundError: as `merge`.
            InvalidInputError: an argument makes no sense, or there is no common ancestor.
            UnsupportedBySpecError: the repository's layout is older than format version 1.
            RepositoryReadOnlyError, UnsafeStorageError, OutcomeUnknownError: as `merge`.

        Cancellation: the proposal may be there, with or without results.

        Cost: that of `merge`, of `diff_values`, and of the checks; and five requests.
        """
        from icechunk_async.proposals import Wish, propose  # noqa: PLC0415 -- loaded when it is used

        properties = {**self.default_commit_metadata, **(metadata or {})}
        wish = Wish(source, into, title, message, properties, base)
        return await propose(self._desk(), wish, checks, solver, compare_chunks)

    async def proposal(self, proposal_id: ProposalId | str) -> Proposal:
        """Return a proposal in its present state.

        Raises:
            ProposalNotFoundError: no proposal has this id.
            InvalidInputError: it is not an id.
            FormatError: it is damaged.

        Cost: one listing and one request.
        """
        from icechunk_async.engine.proposals import files  # noqa: PLC0415 -- loaded when it is used
        from icechunk_async.proposals import Proposal  # noqa: PLC0415

        self._engine.history.capabilities.require("proposals")
        record = await files.load(self.storage, files.as_proposal_id(proposal_id))
        return Proposal(self._desk(), record)

    async def proposals(self, *, include_ended: bool = False) -> list[Proposal]:
        """Return the open proposals, oldest first, and with ``include_ended`` all.

        Damaged ones are left out and logged; `proposal` says what is wrong with one.

        Cost: one listing, and a request for each proposal.
        """
        from icechunk_async.engine.proposals import files  # noqa: PLC0415 -- loaded when it is used
        from icechunk_async.proposals import Proposal  # noqa: PLC0415

        self._engine.history.capabilities.require("proposals")
        records, faults = await files.load_all(self.storage)
        for error in faults.values():
            _log.warning("a proposal is left out: %s", error)
        desk = self._desk()
        return [Proposal(desk, it) for it in records if include_ended or not it.state.is_over]

    def _desk(self) -> Desk:
        from icechunk_async.proposals import Desk  # noqa: PLC0415 -- loaded when it is used

        async def read(snapshot_id: SnapshotId) -> Session:
            return await self.readonly_session(snapshot_id=snapshot_id)

        async def published(branch: str, snapshot_id: SnapshotId, previous: SnapshotId) -> None:
            await self._tell(branch, snapshot_id, previous, "commit")

        def write(base: Snapshot, branch: str) -> Session:
            return self._session(base, branch, SessionMode.WRITABLE)

        return Desk(self._engine, read, write, published)

    async def protect_branch(self, branch: str = "main", *, checks: Collection[str] = ()) -> None:
        """Let a branch change only by proposals, see `propose`, from now on and for everyone.

        This library then refuses commits and merges to the branch, and moves, resets and
        deletions of it, with `BranchProtectedError`. That is decided in the same atomic step as the
        change. It is an item of the repository's metadata: **the official engine and versions of
        this library before it do not know of it**, and anyone who can write to the storage can lift
        it.

        Args:
            branch: an existing branch.
            checks: names of checks that must have passed on what is merged; those of an earlier
                call are replaced.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidInputError: a name of a check is empty or longer than 200 characters.
            UnsupportedBySpecError: the repository is of format version 1 or older.
            RepositoryReadOnlyError, OutcomeUnknownError: as `set_metadata`.

        Cancellation: the branch may be protected.
        """
        from icechunk_async.engine.proposals.record import check_names  # noqa: PLC0415 -- loaded when it is used

        self._engine.history.capabilities.require("protection")
        names = check_names(checks)
        # Against misspelt names. Nothing holds the branch until the setting is stored; a setting
        # for a branch that was deleted in between protects the one that is created next under this
        # name.
        await self.lookup_branch(branch)
        await self._engine.state_to_change("protection").merge_metadata(
            lambda info: {METADATA_NAME: item_with(info, branch, names)}
        )

    async def unprotect_branch(self, branch: str = "main") -> None:
        """Let a branch be changed directly again. Nothing happens if it is not protected.

        Raises:
            UnsupportedBySpecError, RepositoryReadOnlyError, OutcomeUnknownError: as
                `protect_branch`.

        Cancellation: the protection may be lifted.
        """
        await self._engine.state_to_change("protection").merge_metadata(
            lambda info: {METADATA_NAME: item_without(info, branch)}
        )

    async def protected_branches(self) -> dict[str, frozenset[str]]:
        """Return the branches that change only by proposals, and the checks that each asks for.

        Raises:
            FormatError: the setting is damaged.

        Cost: one conditional request; none in format version 1, where no branch is protected.
        """
        if not self._engine.history.capabilities.protection:
            return {}
        return protections_in(await state_for(self._engine.history, "protection").info())

    # Inspection

    async def list_manifest_files(self, snapshot_id: SnapshotId | str) -> list[ManifestFileInfo]:
        """Return the manifests that a snapshot uses, by id.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.

        Cost: one request unless the snapshot is cached.
        """
        snapshot = await self._engine.assets.snapshot(as_snapshot_id(snapshot_id))
        return sorted(snapshot.manifests.values(), key=lambda info: info.id)

    async def inspect_snapshot(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Return the contents of a snapshot file, for people and for debugging.

        Keys and values are those of the official engine's method of this name.

        Raises:
            SnapshotNotFoundError: there is no such snapshot.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- slow to import

        return await inspect.inspect_snapshot(self._engine, as_snapshot_id(snapshot_id))

    async def inspect_repo_info(self) -> dict[str, JSON]:
        """Return the contents of the repo info file; see `inspect_snapshot`.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- slow to import

        return await inspect.inspect_repo_info(self._engine)

    async def inspect_manifest(self, manifest_id: ManifestId | str) -> dict[str, JSON]:
        """Return the number of references of each kind in a manifest; see `inspect_snapshot`.

        Raises:
            ObjectNotFoundError: there is no such manifest.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- slow to import

        if not isinstance(manifest_id, ManifestId):
            manifest_id = ManifestId.parse(manifest_id)
        return await inspect.inspect_manifest(self._engine, manifest_id)

    async def inspect_transaction_log(self, snapshot_id: SnapshotId | str) -> dict[str, JSON]:
        """Return the nodes and chunks that a commit touched, by id; see `inspect_snapshot`.

        If snapshots below it expired, what those touched is included.

        Raises:
            ObjectNotFoundError: there is no such log, and why: format 1 has none for the first
                snapshot, there is no such snapshot, or the repository is damaged.
        """
        from icechunk_async.engine.upkeep import inspect  # noqa: PLC0415 -- slow to import

        return await inspect.inspect_transaction_log(self._engine, as_snapshot_id(snapshot_id))

    # Upkeep

    async def split_appends(self, dimension: str, *, branch: str = "main") -> int:
        """Store a rule that splits manifests along a dimension, for archives that grow along it.

        Each append then writes the references of the last chunks only. The rule is part of the
        stored configuration, ``manifest.splitting``, which the official engine follows as well. It
        comes before the rules that are there, and replaces an earlier one for the dimension. It
        counts for everyone who opens the repository from now on; other handles keep theirs.

        Existing manifests are divided when their arrays change. Where they are large, let
        `rewrite_manifests` of a repository that is opened after this do it when it suits you.

        Args:
            dimension: its name, as in the arrays' ``dimension_names``.
            branch: whose arrays decide the length.

        Returns:
            The chunks along the dimension that a manifest spans: 100 for an array with one chunk a
            step, fewer for arrays of more chunks and for many arrays.

        Raises:
            InvalidInputError: no array of the branch has the dimension; nothing was stored.
            BranchNotFoundError: there is no such branch.
            ConflictError: the stored configuration changed meanwhile; nothing was stored.

        Cancellation: the rule may have been stored.
        """
        from icechunk_async.engine.upkeep.rewrite import split_appends  # noqa: PLC0415 -- slow to import

        return await split_appends(self._engine, dimension, branch)

    async def rewrite_manifests(
        self,
        message: str,
        *,
        branch: str,
        metadata: Mapping[str, JSON] | None = None,
        commit_method: Literal["new_commit", "amend"] = "new_commit",
        progress: ProgressCallback | None = None,
    ) -> SnapshotId:
        """Rewrite all manifests of a branch's tip, split as the configuration in force says.

        Arrays and chunks do not change. The new snapshot records the rules of splitting in its
        property ``__icechunk``.

        Args:
            message: the commit's message.
            branch: the branch to rewrite.
            metadata: properties of the commit.
            commit_method: make a commit on top of the tip, or replace the tip.
            progress: called with the number of arrays done.

        Raises:
            BranchNotFoundError: there is no such branch.
            ConflictError: another writer committed meanwhile; nothing was published. Try again.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsupportedBySpecError: to amend in a repository of format version 1.
            SessionStateError: to amend the first snapshot of a repository, or one that moved nodes.
            OutcomeUnknownError: the storage never answered; look at the branch to know.

        Cancellation: the commit may have been published.

        Cost: reads and writes every manifest once, a few at a time; those few are in memory, and
        the references of up to 4,096 small arrays or cells that are to share manifests.
        """
        from icechunk_async.engine.upkeep.rewrite import rewrite_manifests  # noqa: PLC0415 -- slow to import

        made = await rewrite_manifests(
            self._engine,
            message,
            branch=branch,
            metadata={**self.default_commit_metadata, **(metadata or {})},
            commit_method=commit_method,
            progress=progress,
        )
        kind: Literal["commit", "amend"] = "amend" if commit_method == "amend" else "commit"
        await self._tell(branch, made, None, kind)
        return made

    async def expire_snapshots(
        self,
        older_than: datetime | timedelta | str,
        *,
        delete_expired_branches: bool = False,
        delete_expired_tags: bool = False,
        dry_run: bool = False,
    ) -> set[SnapshotId]:
        """Drop old snapshots from the history. Their files stay until garbage collection.

        The first snapshot stays, and so do those that sessions with leases build on, and the tips
        of branches and tags unless those are to be deleted; ``main`` always stays. A snapshot
        that stays and whose parent is dropped becomes a child of the first one, or of one that a
        session builds on. In format 2 it remembers what the dropped commits touched, so
        that diffs and rebases over the gap stay right; in format 1 that is lost.

        Args:
            older_than: drop snapshots made before this time, by their writers' clocks; not in the
                future, by this machine's clock. A time without a zone is UTC.
            delete_expired_branches: delete branches whose tip is dropped. In format 1 a commit
                made to such a branch at the same moment can be lost with it.
            delete_expired_tags: delete tags whose snapshot is dropped; their names can never be
                used again.
            dry_run: change nothing, and return what would be dropped.

        Returns:
            The snapshots that were dropped. In format 1 old tips that stay are among them.

        Raises:
            InvalidInputError: the time is in the future; nothing changed.
            RepositoryReadOnlyError: the repository's status forbids changes; nothing changed.
            OutcomeUnknownError: the storage never answered. Calling again is safe.
            FeatureDisabledError: tags would be deleted, and the repository forbids that.

        Cost: in format 2 one change of the repository, as for creating a branch. In format 1
        every snapshot is read, one after the other in each branch, and one in each is written.

        Cancellation: it may have happened, in format 1 also in part; the history is whole in
        any case, and calling again finishes the work.
        """
        from icechunk_async.engine.upkeep.collect import expire_snapshots  # noqa: PLC0415 -- slow to import

        before = clock.given_time(older_than, "older_than")
        rule = Expiration(clock.to_us(before), delete_expired_branches, delete_expired_tags)
        return await expire_snapshots(self._engine, rule, dry_run=dry_run)

    async def garbage_collect(
        self,
        delete_object_older_than: datetime | timedelta | str,
        *,
        dry_run: bool = False,
        max_snapshots_in_memory: int = _LIMITS.snapshots,
        max_compressed_manifest_mem_bytes: int = _LIMITS.manifest_bytes,
        max_concurrent_manifest_fetches: int = _LIMITS.manifests,
        progress: ProgressCallback | None = None,
    ) -> GarbageReport:
        """Delete the objects that no branch and no tag leads to.

        Choose a time before the beginning of every session without a lease that is still open
        anywhere: what it wrote belongs to no branch yet, and only its age protects it. Sessions
        with leases are seen, and nothing younger than the oldest of them is deleted. In format 1
        nobody may create or reset branches and tags meanwhile; in format 2 they may.

        Args:
            delete_object_older_than: spare what was written at this time or later, by the
                storage's clock; not in the future, by this machine's clock and by that one. A
                time without a zone is UTC.
            dry_run: change nothing, and return what would be deleted.
            max_snapshots_in_memory: the number of snapshots to read at a time.
            max_compressed_manifest_mem_bytes: the size of the manifests to read at a time.
            max_concurrent_manifest_fetches: the number of manifests to read at a time.
            progress: called with each step, see `icechunk_async.results.Progress`.

        Returns:
            What was deleted, and what could not be: after a failure the folders that come later
            are left alone, since what remained may refer to what is in them.

        Raises:
            InvalidInputError: the time is in the future, by either clock; nothing was deleted.
            RepositoryReadOnlyError: the repository's status forbids changes.
            FormatError, SnapshotNotFoundError: a file that the repository needs is damaged or
                missing; nothing was deleted.
            ConflictError: other writers changed the repository at every try to update its history;
                nothing was deleted.
            StorageFullError: there is no room for two small objects, and no garbage that could be
                deleted before the history says that a collection ran.
            StorageError: listing failed; what was deleted until then was garbage.

        Cost: every snapshot and manifest in use is read; every object is listed, and garbage
        deleted, 1000 with each request if the storage can. Memory: 12 bytes for each chunk in
        use, and what is read at a time.

        Cancellation: part of the garbage may be deleted, and nothing else is. In format 2
        snapshots that nothing led to may be unknown already. Calling again finishes the work.
        """
        from icechunk_async.engine.upkeep.collect import collect_garbage  # noqa: PLC0415 -- slow to import

        return await collect_garbage(
            self._engine,
            clock.given_time(delete_object_older_than, "delete_object_older_than"),
            dry_run=dry_run,
            limits=Limits(
                max_snapshots_in_memory,
                max_concurrent_manifest_fetches,
                max_compressed_manifest_mem_bytes,
            ),
            progress=progress,
        )

    async def compact(
        self,
        branch: str,
        *,
        min_live_share: float = 0.5,
        message: str = "Compact chunk objects",
        metadata: Mapping[str, JSON] | None = None,
        dry_run: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CompactReport:
        """Rewrite chunks in objects of which a branch's tip uses little, and commit.

        For objects that several chunks share, see `Packing`: they can only be collected as a
        whole. Arrays and the contents of chunks do not change, so the commit conflicts with no
        other writer; chunks that others change meanwhile are left to them. Rewritten chunks keep
        the statistics that `analyze` or a commit made.

        Other branches, tags and older snapshots still use the old objects. To free the space,
        expire snapshots afterwards and collect garbage.

        Args:
            branch: the branch whose tip is compacted.
            min_live_share: rewrite the chunks of an object if less than this share of its bytes
                is used. Above 0 and at most 1.
            message: the commit's message.
            metadata: properties of the commit.
            dry_run: write nothing, and return what would be done.
            progress: called with the number of bytes done.

        Raises:
            BranchNotFoundError: there is no such branch.
            InvalidInputError: ``min_live_share`` is out of range.
            RepositoryReadOnlyError: the repository's status forbids changes.
            ConflictError: the branch was reset meanwhile; nothing was published.
            RebaseFailedError: nodes were moved meanwhile; nothing was published. Call again.
            OutcomeUnknownError: the storage never answered; calling again is safe.

        Cancellation: the commit may have been published; otherwise there is more garbage.

        Cost: lists all chunk objects and reads all manifests of the tip; reads and writes the
        chunks that move, neighbours together; for each array of these, a listing and the objects
        with its statistics. Memory: 28 bytes for each chunk object, the references and statistics
        of one array, and what is read at a time.
        """
        from icechunk_async.engine.upkeep.compact import compact  # noqa: PLC0415 -- slow to import

        report = await compact(
            self._engine,
            branch,
            min_live_share=min_live_share,
            message=message,
            metadata={**self.default_commit_metadata, **(metadata or {})},
            dry_run=dry_run,
            progress=progress,
        )
        if report.snapshot_id is not None:
            await self._tell(branch, report.snapshot_id, None, "commit")
        return report

    async def chunk_storage_stats(
        self,
        *,
        max_snapshots_in_memory: int = _LIMITS.snapshots,
        max_compressed_manifest_mem_bytes: int = _LIMITS.manifest_bytes,
        max_concurrent_manifest_fetches: int = _LIMITS.manifests,
        progress: ProgressCallback | None = None,
    ) -> ChunkStorageStats:
        """Count the bytes of all chunks that branches and tags lead to, in every snapshot.

        A byte of a chunk object or of a virtual object counts once, however many chunks share it.
        Arguments are those of `garbage_collect`.

        Raises:
            FormatError, SnapshotNotFoundError: a file is damaged or missing.

        Cost: every snapshot and manifest in use is read; 32 bytes of memory for each range. On a
        local disk all folders are listed, for files of killed writers.

        Cancellation: no effect.
        """
        from icechunk_async.engine.upkeep.statistics import measure_chunks  # noqa: PLC0415 -- slow to import

        limits = Limits(
            max_snapshots_in_memory,
            max_concurrent_manifest_fetches,
            max_compressed_manifest_mem_bytes,
        )
        return await measure_chunks(self._engine, limits, progress)

    async def check_references(
        self, *, progress: ProgressCallback | None = None
    ) -> ReferenceReport:
        """Check that every object exists that branches and tags lead to, and is long enough.

        It is `verify` at the level *length*: references, snapshots, transaction logs and
        manifests are read, chunk objects are looked up. The state of each virtual object is
        compared with what its references are guarded with. Chunks are not read: their contents
        are not checked.

        Args:
            progress: called with each step.

        Returns:
            What was looked up, each object that is missing, too short, changed or damaged, and
            what was not looked at. Virtual objects of containers that were not authorised are
            counted.

        Raises:
            StorageError: a listing failed.

        Cost: every snapshot, transaction log and manifest in use is read, and all chunk objects
        are listed; a request for each virtual object. Memory: some 60 bytes for each chunk object
        in use.

        Cancellation: no effect.
        """
        from icechunk_async.engine.upkeep.check import check_references  # noqa: PLC0415 -- slow to import

        return await check_references(self._engine, progress)

    async def add_sums(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
        progress: ProgressCallback | None = None,
    ) -> AddedSums:
        """Read the chunks of a snapshot that have no checksum yet, and store one for each.

        At most one of the first four arguments is given; ``main`` if none is. Snapshots that
        share manifests with this one share the sums. The bytes count as right that are there now.
        A content root is recorded by the next commit, also an empty one (``allow_empty=True``),
        in a repository that keeps sums.

        Args:
            branch: complete its tip.
            tag: complete its snapshot.
            snapshot_id: complete this snapshot.
            ref: any of these, as `readonly_session` takes it.
            progress: called with the number of manifests and chunks done.

        Returns:
            What was added. Chunks that are missing or too short are listed, and stay without a sum.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.
            NotFoundError: ``ref`` names nothing.
            InvalidInputError: more than one was named.
            FormatError: a manifest is missing or damaged. Sums of those before it are stored.
            StorageError: as after FormatError. Calling again continues after the last manifest.

        Cancellation: the sums of manifests that were finished are stored.

        Cost: reads every chunk without a sum once, 32 at a time; memory for 256 MiB of chunks or
        one longer chunk, and one manifest.
        """
        from icechunk_async.engine.upkeep.sums import add_sums  # noqa: PLC0415 -- slow to import

        snapshot = await load_named(self._engine, branch, tag, snapshot_id, ref)
        return await add_sums(self._engine, snapshot, progress)

    async def analyze(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
        paths: Collection[str] | None = None,
        progress: ProgressCallback | None = None,
    ) -> Analysis:
        """Read the chunks of a snapshot that have no statistics yet, and store them for each.

        At most one of the first four arguments is given; ``main`` if none is. Statistics belong
        to the bytes of chunks: all snapshots, branches and places that share these share them.
        `Session.aggregate` uses them.

        Args:
            branch: analyze its tip.
            tag: analyze its snapshot.
            snapshot_id: analyze this snapshot.
            ref: any of these, as `readonly_session` takes it.
            paths: these arrays, and those in these groups; None for all.
            progress: called with the number of chunks done.

        Returns:
            What was added. Arrays whose values have no order are listed, and so are chunks that
            cannot be read.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.
            NotFoundError: ``ref`` names nothing.
            InvalidInputError: more than one was named.
            FormatError: a manifest is missing or damaged.
            UnsafeStorageError, UnsupportedBySpecError: nothing was stored.
            StorageError: statistics that were stored until then stay.

        Cancellation: statistics that were stored until then stay; the next call continues.

        Cost: reads every chunk without statistics once, 16 at a time; memory for 256 MiB of decoded
        chunks or one larger chunk. Stores 92 bytes for each chunk, in one object for each 16,384.
        """
        from icechunk_async.engine.upkeep.own_files import drop  # noqa: PLC0415 -- on use
        from icechunk_async.zarr.queries.analyze import analyze  # noqa: PLC0415 -- on use

        self._engine.history.capabilities.require("upkeep")
        self._engine.check_safe()
        session = await self.readonly_session(branch, tag=tag, snapshot_id=snapshot_id, ref=ref)
        analysis, superseded = await analyze(session.store, paths, progress)
        # Last: until then queries find them, and a query that had listed them takes those that are
        # gone for unknown and reads their chunks.
        await drop(self._engine, superseded)
        return analysis

    async def check_content(
        self,
        *,
        branch: str | None = None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        ref: SnapshotId | str | None = None,
    ) -> ContentReport:
        """Return the content root of a snapshot, and whether manifests and sums agree with it.

        The root vouches for all nodes, manifests and sums, and through the sums for chunks. Chunks
        themselves are not read: `verify` compares them with their sums.

        At most one argument is given; ``main`` if none is.

        Args:
            branch: check its tip.
            tag: check its snapshot.
            snapshot_id: check this snapshot.
            ref: any of these, as `readonly_session` takes it.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: it does not exist.
            NotFoundError: ``ref`` names nothing.
            InvalidInputError: more than one was named.
            StorageError: something could not be read.

        Cancellation: no effect. Cost: reads every manifest of the snapshot, and its sidecar.
        """
        from icechunk_async.engine.upkeep.sums import check_content  # noqa: PLC0415 -- slow to import

        return await check_content(
            self._engine, await load_named(self._engine, branch, tag, snapshot_id, ref)
        )

    async def verify(
        self,
        level: Literal["structure", "existence", "length", "sums", "decode"] = "decode",
        *,
        refs: Sequence[str] | None = None,
        ancestry: bool = True,
        sample: float | None = None,
        seed: int = 0,
        state: str | os.PathLike[str] | None = None,
        progress: ProgressCallback | None = None,
    ) -> VerifyReport:
        """Look whether the repository is what it should be, as closely as ``level`` says.

        Each level includes those before it. *structure*: references, operations log, snapshots,
        transaction logs and manifests can be read and agree, and unless ``refs`` are named the
        newest records of proposals can be read. *existence*: the objects with chunks are there,
        and virtual sources are in the state that references are guarded with.
        *length*: they are as long as needed. *sums*: chunks have the checksums that were stored
        when they were written. *decode*: the codecs of their arrays accept them.

        Every file is read from the storage, whatever a cache holds. Each object is looked at once,
        however many snapshots need it. Writers need not stop; what they commit meanwhile is not
        looked at.

        Args:
            level: how closely to look.
            refs: names of branches and tags, or ids of snapshots; None: all branches and tags.
            ancestry: also look at the snapshots before those that the refs name.
            sample: the share of the chunks to look at (a float above 0, at most 1), or their
                number (an int; chunks inside manifests are drawn from each manifest); None: all.
                Structure is always looked at as a whole.
            seed: draws another sample of the same size.
            state: a file that keeps how far the run is. If it exists, the run that left it is
                continued: the snapshots that it began with, and of their chunks those that were
                not read. It is removed at the end.
            progress: called with each step.

        Returns:
            What was looked at, what is damaged, and what was not looked at. Damage raises nothing.

        Raises:
            InvalidInputError: an argument makes no sense, or the file cannot be written, or holds
                something else or the state of a run with other arguments.
            NotFoundError: a ref does not exist.
            StorageError: the storage failed; the state is kept.

        Cost: every snapshot, transaction log and manifest in use is read; all chunk objects are
        listed, or for a small sample asked for one by one; proposals are listed, and their newest
        records read; a request for each virtual object. At
        *sums* and *decode* chunks are read, those that lie together in one object with one
        request. Memory: some 60 bytes for each different chunk at these levels, for each chunk
        object below; and 64 MiB of chunks.

        Cancellation: no effect but on the file of the state.
        """
        from icechunk_async.engine.upkeep.integrity.report import (  # noqa: PLC0415
            StateFile,
            as_level,
        )
        from icechunk_async.engine.upkeep.integrity.verify import VerifyOptions, verify  # noqa: PLC0415
        from icechunk_async.zarr.decoding import ZarrDecoder  # noqa: PLC0415

        named = None if refs is None else tuple(refs)
        options = VerifyOptions(as_level(level), named, ancestry, sample, seed)
        file = None if state is None else StateFile(state)
        # The engine knows no codecs of Zarr, so what decodes chunks is handed to it.
        return await verify(self._engine, options, ZarrDecoder(), file=file, progress=progress)

    async def plan_repair(
        self,
        report: VerifyReport,
        *,
        branches: Sequence[str] | None = None,
        moved: Mapping[str, str] | None = None,
    ) -> RepairPlan:
        """Plan the repair of the damage that a report names; nothing is changed.

        The plan lists its steps: transaction logs that are made anew from manifests; a commit on
        each branch that drops the references to chunks that are lost, or points them at sources
        that moved; damaged objects that are moved to ``quarantine/``. `RepairPlan.apply` carries
        them out. If it is interrupted, plan again from the same report.

        The history is left alone: older snapshots and tags still refer to what is lost. So verify
        the repaired branches with ``ancestry=False``.

        Args:
            report: the result of `verify`.
            branches: those that may get a commit; None: all that need one.
            moved: for virtual sources that moved: prefixes of old locations, and of new ones. The
                containers of the new ones must be authorised. Sources are not compared with what
                they were; their present state becomes the guard.

        Raises:
            BranchNotFoundError: there is no such branch.
            FormatError, SnapshotNotFoundError: the tip of a branch cannot be read. Reset the
                branch to an earlier snapshot first.
            VirtualChunkError, InvalidInputError: a moved source cannot be read, or is too short.

        Cost: every damaged object is looked at again; the manifests of each tip are read; one
        request for each source that moved.

        Cancellation: no effect.
        """
        from icechunk_async.engine.upkeep.integrity.repair import plan_repair  # noqa: PLC0415 -- slow to import

        return await plan_repair(self._engine, report, branches, moved or {})

    async def copy_to(
        self,
        destination: Location,
        *,
        storage_options: Mapping[str, object] | None = None,
        refs: Iterable[str] | None = None,
        since: datetime | SnapshotId | str | None = None,
        paths: Iterable[str] | None = None,
        shallow: bool = False,
        discard_changes: bool = False,
        as_zarr: bool = False,
        progress: ProgressCallback | None = None,
    ) -> CopyReport:
        """Copy the repository to another storage, or bring an earlier copy up to date.

        Every object is copied byte for byte, with its name: ids, times and messages stay, and
        virtual chunks still refer to where they did. The references come last, so the destination
        shows the state at the beginning of the copy, and never a part of a snapshot. A copy
        that was interrupted is continued by calling this again. Writers need not stop.

        With ``paths`` or ``shallow``, snapshots and manifests are written anew from those of this
        repository; see there for what stays.

        Called again, it makes the destination show what this repository shows: branches that were
        reset or deleted here are reset or deleted there. Objects that only they used stay at the
        destination until its garbage is collected. Snapshots that expired or were collected in the
        copy come back.

        Args:
            destination: URL, path or open storage: empty, or with an earlier copy.
            storage_options: keyword arguments for the storage of a URL, see ``open_storage``.
            refs: names of branches and tags to copy with their history; None: all. ``main``, which
                every repository has, stands at the first snapshot if it is not named.
            since: leave out older history, as `expire_snapshots` does: snapshots that were written
                before this time, or before this snapshot, and that no branch or tag points to.
                The first snapshot stays and becomes the parent of the oldest one that is kept.
            paths: copy only these arrays and groups, with all below them and the groups above
                them, as each snapshot has them under these paths; None: all. Each snapshot has a
                counterpart with the same time, message and properties, and
                ``icechunk-async-copied-from`` among them: the id here. Its own id is made of that
                one and of the paths, except that the first snapshot keeps its id. Nodes that are
                moved to or from these paths come and go as new and deleted ones.
            shallow: copy no chunk objects. Manifests refer to them as virtual chunks, by a new
                container for the place of this repository, which readers authorize by its URL
                prefix; the report names it. Ids of snapshots, transaction logs and virtual and
                inline chunks stay. A chunk that is written here more than ten minutes after the
                copy is refused by its time, where the storage tells times. What is collected here
                is lost there. For origins on S3, Google Cloud Storage, Azure, web servers and local
                disks.
            discard_changes: undo what somebody changed in the copy, for example commits, and
                drop branches and tags that an earlier copy brought and ``refs`` does not name, and
                the history of other ``paths``. The report says what was undone.
            as_zarr: write one snapshot as a plain Zarr hierarchy instead, which any Zarr library
                reads: that of the one branch or tag in ``refs``, or of ``main``; or the ``paths``
                in it. Stored bytes of chunks do not change; virtual chunks are read from their
                sources, which must be authorized. Only to an empty location, or to continue such a
                copy. The root's document is written last. The destination needs no conditional
                writes.
            progress: called with the number of objects looked at.

        Returns:
            The number of objects and bytes that were copied, of objects that existed, and the
            branches and tags that changed at the destination.

        Raises:
            RepositoryExistsError: the destination holds something that no copy put there, a copy of
                another repository, of more branches and tags or other paths, or one that is
                shallow while this one is not, or the copy was changed; the changes are named in the
                message and in ``context["changes"]``. Nothing was written.
            NotFoundError: one of ``refs`` is neither a branch nor a tag, or one of ``paths`` is at
                the tip of none of them; ``context["near"]`` has paths that are like it. Nothing was
                written.
            InvalidInputError: the destination is this repository itself or within it; ``as_zarr``
                was given with ``since``, ``shallow``, ``discard_changes`` or several ``refs``; or
                no container can name this place; nothing was written.
            VirtualChunkError: with ``as_zarr``: a virtual chunk cannot be read.
            ConflictError: another writer changed the copy meanwhile, or garbage collection outruns
                the copy; the destination shows what it did before.
            UnsafeStorageError: this storage cannot list, or the destination cannot be written
                safely; nothing was written.
            OutcomeUnknownError: no answer came when the references were written; copy again.

        Cost: at most five requests, besides those for the references of format version 1, if
        nothing changed. Later copies read the new snapshots and the manifests that they added and
        replaced, and read and write each new object once. The first copy of a whole repository, one
        that continues another, and those of format version 1 list both sides instead. ``paths`` and
        ``shallow`` read each new snapshot twice, and each manifest that it needs and earlier ones
        did not once, and write those that differ; ``shallow`` touches no chunk. Statistics of
        chunks come with copies of all branches and paths that list, and with later ones if commits
        keep statistics, for two listings. Memory: 256 MiB, or
        one object if that is larger, and 12 bytes a chunk that is copied.

        Cancellation: the destination shows what it did before, or the new state (in format
        version 1, for each branch and tag by itself).
        """
        # Here and not below `upkeep`: reading chunks through codecs and keys belongs to a higher
        # layer.
        if as_zarr:
            if since is not None or discard_changes or shallow:
                raise InvalidInputError(
                    "A plain Zarr hierarchy has neither history nor a second copy, and holds its "
                    "chunks: as_zarr goes with neither since nor discard_changes nor shallow."
                )
            request = _request(destination, storage_options, self._engine.config)
            return await self._copy_as_zarr(request, refs, paths, progress)
        from icechunk_async.engine.upkeep.copying.copy import copy_to  # noqa: PLC0415 -- slow to import

        return await copy_to(
            self._engine,
            destination,
            storage_options or {},
            refs=refs,
            since=since,
            paths=paths,
            shallow=shallow,
            discard_changes=discard_changes,
            progress=progress,
        )

    async def _copy_as_zarr(
        self,
        request: Request,
        refs: Iterable[str] | None,
        paths: Iterable[str] | None,
        progress: ProgressCallback | None,
    ) -> CopyReport:
        from icechunk_async.engine.upkeep.copying.copy import check_outside  # noqa: PLC0415
        from icechunk_async.engine.upkeep.copying.derivation import as_paths, check_paths  # noqa: PLC0415
        from icechunk_async.engine.upkeep.copying.selection import Selection  # noqa: PLC0415
        from icechunk_async.zarr.export import export_zarr, open_limited  # noqa: PLC0415

        selection = Selection.of(("main",) if refs is None else refs, None)
        branches, tags = await self.branches(), await self.tags()
        name, *more = selection.find(branches, tags)
        if more:
            raise InvalidInputError(
                "A plain Zarr hierarchy holds one snapshot. Name one branch or tag to write, not "
                f"{1 + len(more)}."
            )
        tip = branches[name] if name in branches else tags[name]
        chosen = as_paths(paths)
        if chosen is not None:
            check_paths(chosen, [await self._engine.assets.snapshot(tip)], name)
        # By id: the branch may move on, and a copy that is continued must be of one snapshot.
        session = await self.readonly_session(snapshot_id=tip)
        async with open_limited(request) as target:
            check_outside(self._engine.storage, target)
            return await export_zarr(session.store, str(tip), target, progress, paths=chosen)


def _request(
    location: Location,
    storage_options: Mapping[str, object] | None,
    config: RepositoryConfig | None = None,
    authorized: Mapping[str, VirtualAccess] | None = None,
    **more: Any,
) -> Request:
    if isinstance(location, str) and "|" in location:
        from icechunk_async.urls import plain_location  # noqa: PLC0415 -- loaded when it is used

        location = plain_location(location)
    request = Request(
        location, given_options(storage_options), config, dict(authorized or {}), **more
    )
    # Before anything is opened: a wrong argument would else appear as an error of a driver, or as a
    # repository that was created with a setting nobody meant.
    request.check_types()
    if request.after_commit:
        from icechunk_async.engine.commit.hooks import Hooks  # noqa: PLC0415 -- loaded when it is used

        # Refuses what is no hook, before a repository is created; and takes an iterator only once.
        request = replace(request, after_commit=Hooks(request.after_commit).functions)
    return request


def refuse_two(*names: object) -> None:
    """Raise `InvalidInputError` for names that are given beside a ref."""
    if any(it is not None for it in names):
        raise InvalidInputError(
            "A ref takes the place of a branch, a tag and a snapshot id. Give one of them."
        )


def known_session(
    repository: Repository, branch: str, mode: SessionMode, *, deduplicate: bool = False
) -> Session | None:
    """Begin a session at the tip of a branch if that needs no waiting; else return None.

    It can be called on any thread. Errors as `Repository.writable_session`.
    """
    engine = repository.engine
    # Also where the storage tells at once that nothing moved, and its reads wait.
    if engine.preloads:
        return None
    base = engine.known_tip(branch)
    if base is None:
        return None
    begin = repository._session  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] -- of this module
    if mode is SessionMode.READONLY:
        return begin(base, None, mode)
    engine.check_safe()
    check_online(engine.history)
    check_unprotected(engine.history, branch)
    return begin(base, branch, mode, deduplicate=deduplicate)


async def find_named(
    engine: Engine,
    branch: str | None,
    tag: str | None,
    snapshot_id: SnapshotId | str | None,
    ref: SnapshotId | str | None,
    *,
    default: str | None = "main",
) -> SnapshotId:
    """Return the snapshot that a branch, a tag, an id, or a ref, which may be any, names now.

    ``default`` is the branch if none of them is given; None: then refuse.
    """
    if ref is None:
        return await engine.resolve(branch, tag, snapshot_id, default=default)
    from icechunk_async.engine.versions.naming import find_ref  # noqa: PLC0415 -- loaded when it is used

    refuse_two(branch, tag, snapshot_id)
    return await find_ref(engine, ref)


async def load_named(
    engine: Engine,
    branch: str | None,
    tag: str | None,
    snapshot_id: SnapshotId | str | None,
    ref: SnapshotId | str | None,
) -> Snapshot:
    """Load the snapshot that is named as for `find_named`; it may be outside of the history."""
    if ref is not None:
        snapshot_id = await find_named(engine, branch, tag, snapshot_id, ref)
    return await engine.load(branch, tag, snapshot_id)


class Lifetime:
    """Whether a repository was closed, and how it is."""

    def __init__(self, location: Location) -> None:
        """Begin with nothing open."""
        self._location = location
        self.leave: Callable[[], Awaitable[None]] | None = None
        """Closes the repository, if it is open; a second time it does nothing."""
        self.is_closed = False

    @property
    def shown(self) -> str:
        """The place for people: without a user, a password or a query, which may be secret."""
        from icechunk_async.urls import veiled  # noqa: PLC0415 -- loaded on use

        description = getattr(self._location, "description", None)
        return veiled(str(self._location if description is None else description.url))

    def check_open(self) -> None:
        """Refuse a repository that was closed."""
        if self.is_closed:
            raise StorageClosedError("The repository was closed. Open it again.")

    async def close(self) -> None:
        """Close the repository; a second time, do nothing."""
        self.is_closed = True
        if self.leave is not None:
            await self.leave()

    def warn(self) -> None:
        """Warn once of a repository that nobody closed: it was collected, or its loop ends."""
        if not self.is_closed:
            self.is_closed = True
            warnings.warn(
                f"The repository at {self.shown!r} was opened with 'await' and never closed. Call "
                "'await repository.aclose()' when it is done with, or open it with 'async with'.",
                ResourceWarning,
                stacklevel=2,
            )


class Opening[R: Repository]:
    """A repository that is about to be opened: await it, or enter it with ``async with``.

    ``async with`` opens the repository and closes it with the block. ``await`` opens it and returns
    it; it stays open until ``aclose``, also if nobody keeps the `Opening` or the task that opened
    it ends. Until then nothing is opened, and nothing has to be closed.

    The same repository is returned however often an `Opening` is awaited. It can be entered once,
    also after it was awaited, and then closes with the block. Once it is closed, it can be neither
    awaited nor entered: call ``Repository.open`` again. An opening that fails or is cancelled
    leaves nothing open, and may be tried again.

    A repository that was awaited and never closed gives a ``ResourceWarning``, which Python shows
    with ``-X dev``: when nothing refers to it any more, or when the event loop ends. No commit is
    lost by that: sessions and stores taken from it still work, and its connections close in order
    when ``asyncio.run`` ends the loop.
    """

    def __init__(
        self,
        cls: type[R],
        request: Request,
        creation: Creation | None = None,
        *,
        or_open: bool = False,
        metadata: Mapping[str, JSON] | None = None,
    ) -> None:
        """Open nothing yet; ``Repository.open`` and its like return one."""
        self._cls = cls
        self._how = request, creation
        self._or_open = or_open
        self._metadata = metadata
        self._repository: R | None = None
        self._stack: AsyncExitStack | None = None
        self._lifetime = Lifetime(request.location)
        self._lock = asyncio.Lock()

    def __await__(self) -> Generator[Any, Any, R]:
        """Open the repository until it is closed, and return it."""
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        async with self._lock:  # of several that await it, one opens the repository
            if self._repository is None:
                # A separate task enters and leaves: the one that awaits may end long before the
                # repository closes, and what is open must be left in the reverse order, also when
                # the event loop just ends.
                held = Held(open_engine(*self._how, or_open=self._or_open), self._lifetime.warn)
                engine = await held.open()
                try:
                    self._repository = self._opened(engine, held.close)
                except BaseException:
                    await held.close()
                    raise
                # What `warn` is bound to refers to no repository, or none would ever be collected.
                # Not at exit: `asyncio.run` ends its loop before, which warned, and nothing can be
                # closed after it.
                weakref.finalize(self._repository, self._lifetime.warn).atexit = False
            self._lifetime.check_open()
            return self._repository

    async def __aenter__(self) -> R:
        """Open the repository, unless it was awaited before, and return it."""
        async with self._lock:
            if self._stack is not None:
                raise InvalidInputError(
                    "This opening was entered already. Each 'async with' needs a new one: call "
                    "Repository.open again."
                )
            self._lifetime.check_open()
            stack = AsyncExitStack()
            if self._repository is None:
                opening = open_engine(*self._how, or_open=self._or_open)
                engine = await stack.enter_async_context(opening)
                try:
                    # `aclose` within the block empties this stack, so that the end of the block
                    # finds nothing to close.
                    self._repository = self._opened(engine, stack.aclose)
                except BaseException:
                    await stack.aclose()
                    raise
            else:
                # Awaited before: its own task holds it open, and is told to leave at the end of the
                # block.
                stack.push_async_callback(self._lifetime.close)
            self._stack = stack
            return self._repository

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the repository."""
        assert self._stack is not None  # else it was not entered
        self._lifetime.is_closed = True
        await self._stack.__aexit__(exc_type, exc_value, traceback)

    def _opened(self, engine: Engine, leave: Callable[[], Awaitable[None]]) -> R:
        self._lifetime.leave = leave
        repository = self._cls(engine, self._lifetime)
        repository.default_commit_metadata = dict(self._metadata or {})
        return repository

    def __repr__(self) -> str:
        """Show what it opens, without secrets."""
        return f"<Opening of {self._lifetime.shown!r}: await it, or use async with>"

    if not TYPE_CHECKING:  # else every name would have a type

        def __getattr__(self, name: str) -> object:
            """Raise an error that tells what was forgotten."""
            advice = (
                " The repository is not open yet: write 'await Repository.open(...)', or 'async "
                "with Repository.open(...) as repository:'."
            )
            known = not name.startswith("_") and hasattr(Repository, name)
            raise AttributeError(
                f"'Opening' object has no attribute {name!r}.{advice if known else ''}",
                name=name,
                obj=self,
            )
