"""The repository: where sessions, branches, tags and history are had from."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from icechunk_async import _clock
from icechunk_async._concurrency import gather
from icechunk_async.errors import InvalidInputError, SnapshotNotFoundError
from icechunk_async.repository.administration import AdministrationOperations
from icechunk_async.repository.history import opening
from icechunk_async.repository.opened import (
    Creation,
    Request,
    check_safe,
    early,
    open_location,
    open_parts,
)
from icechunk_async.repository.origin import Origin
from icechunk_async.repository.past import HistoryOperations
from icechunk_async.repository.preload import preload
from icechunk_async.repository.session import Session, SessionMode
from icechunk_async.repository.transactions import TransactionOperations
from icechunk_async.repository.upkeep import UpkeepOperations
from icechunk_async.repository.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from icechunk_async.format.config import RepositoryConfig
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.repository.opened import Location, Opened
    from icechunk_async.repository.packing import Packing
    from icechunk_async.repository.virtual import VirtualAccess
    from icechunk_async.storage import Storage
    from icechunk_async.storage.cache import CacheOptions, CacheStatistics

__all__ = ["Repository"]


class Repository(
    TransactionOperations, HistoryOperations, UpkeepOperations, AdministrationOperations
):
    """A versioned Zarr hierarchy in a storage.

    Opened by one of the class methods, which answer asynchronous context managers::

        async with Repository.open("file:///data/climate") as repository:
            session = await repository.readonly_session("main")

    What was opened closes with the block; sessions and stores cannot be used after it.
    """

    def __init__(self, opened: Opened, request: Request) -> None:
        """Use :meth:`create`, :meth:`open` or :meth:`open_or_create`."""
        super().__init__(opened)
        self._request = request
        self.default_commit_metadata: dict[str, JSON] = {}
        """Properties that every commit of this handle gets; a commit's own come on top."""

    @classmethod
    def create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        packing: Packing | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Create a repository and open it.

        Args:
            location: a path, a URL, or an open storage (which is left open).
            spec_version: version of the format, 1 or 2.
            config: configuration; stored with the repository.
            authorize_virtual_chunk_access: see :meth:`open`.
            storage_options: the backend's options, where ``location`` is a path or URL.
            cache: see :meth:`open`.
            packing: which chunks share objects; stored with a repository of format version 2.
            check_clean_root: refuse a location that holds anything.
            probe: begin with a trial of the storage's promises, see
                :func:`~icechunk_async.storage.probe.probe_storage`. None: unless the backend has
                made sure of them itself, as memory and local disks have. False accepts the risk.

        Raises:
            RepositoryExistsError: the location holds a repository, or anything at all.
            UnsafeStorageError: commits could be lost there; nothing was written.
            InvalidInputError: there is no such format version.

        Cancellation: the repository may have been created.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, packing=packing)
        return _open(cls, request, Creation(spec_version, check_clean_root, probe))

    @classmethod
    def open(
        cls,
        location: Location,
        *,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        packing: Packing | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Open a repository; its format version is found out.

        Args:
            location: a path, a URL, or an open storage (which is left open).
            config: laid over the stored configuration, for this handle only.
            authorize_virtual_chunk_access: containers of virtual chunks that may be read, by
                URL prefix: None, options for opening them, or an open storage.
            storage_options: the backend's options, where ``location`` is a path or URL.
            cache: keep what is read and never changes (chunks, manifests, snapshots,
                transaction logs) in memory and, where it names a directory, on disk. Virtual
                chunks are not kept.
            packing: which chunks of this handle's sessions share objects; None: as stored.

        Raises:
            RepositoryNotFoundError: there is no repository.
            VirtualContainerError: a container was authorised that the repository lacks.
            FormatError: its files are damaged, or of a version that is too new.

        Cost: three requests at once.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, packing=packing)
        return _open(cls, request, None)

    @classmethod
    def open_or_create(
        cls,
        location: Location,
        *,
        spec_version: int = 2,
        config: RepositoryConfig | None = None,
        authorize_virtual_chunk_access: Mapping[str, VirtualAccess] | None = None,
        storage_options: Mapping[str, object] | None = None,
        cache: CacheOptions | None = None,
        packing: Packing | None = None,
        check_clean_root: bool = True,
        probe: bool | None = None,
    ) -> AbstractAsyncContextManager[Repository]:
        """Open the repository at a location, or create one if there is none.

        Args and errors as :meth:`open` and :meth:`create`; ``spec_version`` counts only for a
        repository that is created.
        """
        request = _request(location, storage_options, config, authorize_virtual_chunk_access)
        request = replace(request, cache=cache, packing=packing)
        creation = Creation(spec_version, check_clean_root, probe)
        return _open(cls, request, creation, or_open=True)

    @staticmethod
    async def exists(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> bool:
        """Tell whether a location holds a repository."""
        return await Repository.fetch_spec_version(location, storage_options=storage_options) > 0

    @staticmethod
    async def fetch_spec_version(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> int:
        """Answer the format version of the repository at a location; 0 if there is none."""
        request = _request(location, storage_options, None, None)
        async with open_location(request) as storage:
            found = await opening.find_expected(early(request, storage))
            return 0 if found is None else found.spec_version

    @staticmethod
    async def fetch_config(
        location: Location, *, storage_options: Mapping[str, object] | None = None
    ) -> RepositoryConfig | None:
        """Answer the configuration stored with the repository at a location; None without one.

        Raises:
            RepositoryNotFoundError: there is no repository.
        """
        request = _request(location, storage_options, None, None)
        async with open_location(request) as storage:
            found = await opening.find_expected(early(request, storage))
            if found is None:
                raise opening.missing(storage)
            return found.config

    def __repr__(self) -> str:
        """Show where it is."""
        url = self.storage.description.url
        return f"<Icechunk repository (format {self.spec_version}) at {url!r}>"

    @property
    def storage(self) -> Storage:
        """The repository's storage; its requests count against the repository's budget."""
        return self._opened.storage

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        """What the cache has done so far; None where none was asked for."""
        cache = self._opened.cache
        return None if cache is None else cache.statistics

    @property
    def spec_version(self) -> int:
        """The format version that new files are written to."""
        return self._opened.history.spec_version

    @property
    def config(self) -> RepositoryConfig:
        """The configuration in force: defaults, stored, and given at opening, in this order."""
        return self._opened.config

    @property
    def authorized_virtual_prefixes(self) -> frozenset[str]:
        """URL prefixes of the virtual chunk containers that this handle may read."""
        return self._opened.virtual.authorized_prefixes

    async def save_config(self) -> None:
        """Store the configuration in force, for everyone who opens the repository from now on.

        Raises:
            ConflictError: somebody else changed it meanwhile; nothing was stored.
        """
        check_safe(self.storage)
        history = self._opened.history
        await history.save_config(self.config, await history.load_config())

    async def readonly_session(
        self,
        branch: str | None = None,
        *,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        as_of: datetime | None = None,
    ) -> Session:
        """Begin a session that reads one snapshot, whatever others commit meanwhile.

        Args:
            branch: read its tip; ``main`` if nothing is named.
            tag: read its snapshot.
            snapshot_id: read this snapshot.
            as_of: with a branch: read what was its tip at this time, by the writers' clocks.

        Raises:
            BranchNotFoundError, TagNotFoundError, SnapshotNotFoundError: there is none.
            InvalidInputError: more than one was named, or ``as_of`` without a branch.

        Cost: one request for the branch or tag, one for the snapshot unless it is cached.
        """
        if as_of is not None and (tag is not None or snapshot_id is not None):
            raise InvalidInputError(
                "as_of goes with a branch; a tag or a snapshot id names one moment already."
            )
        if as_of is not None:
            target = await self._as_of(await self._resolve(branch, tag, snapshot_id), as_of)
            base = await self._opened.assets.snapshot(target)
        elif snapshot_id is not None:
            target = await self._resolve(branch, tag, snapshot_id)
            await self._opened.history.snapshot_info(target)
            base = await self._opened.assets.snapshot(target)
        else:
            base = await self._load_tip(branch, tag)
        return self._session(base, branch=None, mode=SessionMode.READONLY)

    async def writable_session(self, branch: str) -> Session:
        """Begin a transaction on a branch.

        Raises:
            BranchNotFoundError: there is no such branch.
            RepositoryReadOnlyError: the repository's status forbids changes.
            UnsafeStorageError: commits could be lost on this storage.

        Cost: one request for the branch, one for the snapshot unless it is cached.
        """
        check_safe(self.storage)
        base = await self._load_tip(branch, None)
        await self._opened.history.check_writable()
        return self._session(base, branch=branch, mode=SessionMode.WRITABLE)

    async def rearrange_session(self, branch: str) -> Session:
        """Begin a transaction on a branch that moves nodes, see ``Session.move``, and only that.

        Raises:
            UnsupportedBySpecError: the repository is of format version 1.
            FeatureDisabledError: its feature flag ``move_node`` is off.
            BranchNotFoundError, RepositoryReadOnlyError, UnsafeStorageError: as
                :meth:`writable_session`.

        Cost: one request more than :meth:`writable_session`.
        """
        check_safe(self.storage)
        await self._opened.history.check_moves_allowed()
        base = await self._load_tip(branch, None)
        await self._opened.history.check_writable()
        return self._session(base, branch=branch, mode=SessionMode.REARRANGE)

    async def _load_tip(self, branch: str | None, tag: str | None) -> Snapshot:
        """Answer the snapshot of a ref as of now.

        The one last seen there is fetched while the ref is read: mostly it still is the one.
        """
        assets = self._opened.assets
        guess = self._opened.history.last_seen(branch or (None if tag else "main"), tag)
        if guess is None:
            return await assets.snapshot(await self._resolve(branch, tag, None))
        target, guessed = await gather(
            self._resolve(branch, tag, None), assets.snapshot_if_there(guess)
        )
        if guessed is not None and guessed.id == target:
            return guessed
        return await assets.snapshot(target)

    def _session(self, base: Snapshot, *, branch: str | None, mode: SessionMode) -> Session:
        opened = self._opened
        self._preload(base)
        workspace = Workspace(
            base,
            opened.assets,
            opened.virtual,
            inline_threshold_bytes=self.config.effective_inline_chunk_threshold_bytes,
            read_only=mode is SessionMode.READONLY,
            rearranging=mode is SessionMode.REARRANGE,
            packs=opened.new_packs() if mode is SessionMode.WRITABLE else None,
        )
        return Session(
            workspace,
            opened.history,
            opened.manifest_options,
            branch=branch,
            mode=mode,
            default_metadata=self.default_commit_metadata,
            origin=Origin.of(self._request, self.storage),
        )

    def _preload(self, base: Snapshot) -> None:
        """Begin to fetch the manifests that the configuration wants to be there."""
        config = self.config.effective_manifest.effective_preload
        max_refs = self.config.effective_caching.effective_num_chunk_refs
        assets = self._opened.assets
        self._opened.background.start(lambda: preload(base, assets, config, max_refs))

    async def _as_of(self, tip: SnapshotId, moment: datetime) -> SnapshotId:
        limit = _clock.to_us(moment)
        first: SnapshotInfo | None = None
        async for info in self._opened.history.ancestry(tip):
            if info.flushed_at <= limit:
                return info.id
            first = info
        when = first.written_at.isoformat() if first is not None else "never"
        raise SnapshotNotFoundError(
            f"The branch had no snapshot yet at {moment.isoformat()}; its first is of {when}.",
            as_of=moment.isoformat(),
            code="no-snapshot-at-time",
        )


def _request(
    location: Location,
    storage_options: Mapping[str, object] | None,
    config: RepositoryConfig | None,
    authorized: Mapping[str, VirtualAccess] | None,
) -> Request:
    return Request(location, dict(storage_options or {}), config, dict(authorized or {}))


@asynccontextmanager
async def _open(
    cls: type[Repository], request: Request, creation: Creation | None, *, or_open: bool = False
) -> AsyncGenerator[Repository]:
    async with open_parts(request, creation, or_open=or_open) as opened:
        yield cls(opened, request)
