"""Open repositories: put storage, budget, caches, history and virtual sources together.

`Engine` is what an open repository consists of. `Repository.engine` hands it to the facade, Spark
and upkeep; sessions get the parts that they need.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import field
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, cast, runtime_checkable

from icechunk_async._runtime import clock, telemetry
from icechunk_async._runtime.backoff import Backoff
from icechunk_async._runtime.concurrency import Background, gather
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.processes import Places
from icechunk_async.credentials._refresh import Credential
from icechunk_async.engine.commit.turns import Writers
from icechunk_async.engine.files.assets import Assets
from icechunk_async.engine.files.packing import Packing
from icechunk_async.engine.files.recent import RecentFiles
from icechunk_async.engine.history import MAIN, SAFE_UPDATES, opening, state_for
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.settings import OwnSettings
from icechunk_async.engine.history.way import HistorySettings, Known
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.tree.modes import SessionMode
from icechunk_async.engine.virtual.chunks import open_virtual
from icechunk_async.errors import (
    BranchNotFoundError,
    IcechunkError,
    InvalidInputError,
    SnapshotNotFoundError,
    TagNotFoundError,
    UnsafeStorageError,
    WrongTypeError,
)
from icechunk_async.format.config import RepositoryConfig, merge
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.storage import BlockingStorage, open_storage
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies, with_retries

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator
    from datetime import datetime, timedelta

    from icechunk_async.engine.commit.flush import ManifestOptions
    from icechunk_async.engine.commit.hooks import CommitEvent
    from icechunk_async.engine.files.layout import Layout
    from icechunk_async.engine.files.packs import Packs
    from icechunk_async.engine.history import History, RepositoryState
    from icechunk_async.engine.history.protocol import Feature
    from icechunk_async.engine.history.way import Found, Way
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.engine.virtual.chunks import VirtualAccess, VirtualChunks
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.storage import Storage
    from icechunk_async.storage.policies.cache import Cached, CacheOptions
    from icechunk_async.storage.policies.hedge import HedgePolicy

    type Location = str | os.PathLike[str] | Storage

__all__ = [
    "Creation",
    "Engine",
    "Origin",
    "Request",
    "as_snapshot_id",
    "check_safe",
    "early",
    "find_at",
    "given_options",
    "open_engine",
    "open_location",
]

_log = logging.getLogger(__name__)
_ID_LETTERS: Final = 20
"""Of a snapshot id."""
_NUMBERED: Final = (
    "A repository that replaces no object can be created there: layout='format-2-numbered'."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a repository is and what it was opened with; it pickles with its secrets."""

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    config: RepositoryConfig | None = None
    authorized: Mapping[str, Credential | Mapping[str, object] | None] = field(
        default_factory=dict[str, "Credential | Mapping[str, object] | None"], repr=False
    )
    """Virtual chunk containers that may be read, without those that the caller opened."""
    settings: OwnSettings = field(default_factory=OwnSettings)
    verify_reads: bool = False

    @classmethod
    def of(cls, request: Request, storage: Storage) -> Self:
        """Return how to open elsewhere what was opened from ``request``."""
        description = storage.description
        # Without storages that the caller opened: they hold connections, which cannot travel.
        plain = {
            prefix: access
            for prefix, access in request.authorized.items()
            if access is None or isinstance(access, Mapping | Credential)
        }
        return cls(
            description.url,
            dict(description.options),
            request.config,
            plain,
            request.settings,
            request.verify_reads,
        )

    def request(
        self, storage: Storage | None, authorized: Mapping[str, VirtualAccess] | None
    ) -> Request:
        """Return the request that opens it, from an open storage if one is given."""
        access = self.authorized if authorized is None else authorized
        return Request(
            self.url if storage is None else storage,
            self.storage_options if storage is None else {},
            self.config,
            access,
            settings=self.settings,
            verify_reads=self.verify_reads,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of opening. Plain data unless the location is an open storage."""

    location: Location
    storage_options: Mapping[str, object] = field(repr=False)
    config: RepositoryConfig | None
    authorized: Mapping[str, VirtualAccess] = field(repr=False)
    cache: CacheOptions | None = None
    settings: OwnSettings = field(default_factory=OwnSettings)
    """Those that are None are as the repository says."""
    hedge: HedgePolicy | None = None
    verify_reads: bool = False
    after_commit: Sequence[Callable[[CommitEvent], Any]] = ()
    """Are told of what this repository publishes; they do not travel."""

    def check_types(self) -> None:
        """Raise `InvalidInputError` for what does not fit together, or is of another type.

        Raises:
            InvalidInputError: there are options beside an open storage, which has its own.
            WrongTypeError: a setting is something else, such as a path or True.
        """
        if self.storage_options and not isinstance(self.location, str | PathLike):
            raise InvalidInputError(
                f"storage_options go with a path or a URL; this {type(self.location).__name__} is "
                "open and has its own. Give them where it is opened, such as "
                "open_storage(url, **options)."
            )
        if self.cache is not None:
            from icechunk_async.storage.policies.cache import CacheOptions  # noqa: PLC0415 -- on use

            _check_type("cache", self.cache, CacheOptions, "icechunk_async.storage")
        if self.hedge is not None:
            from icechunk_async.storage.policies.hedge import HedgePolicy  # noqa: PLC0415 -- on use

            _check_type("hedge", self.hedge, HedgePolicy, "icechunk_async.storage")
        _check_type("packing", self.settings.packing, Packing, "icechunk_async")


def _check_type(name: str, value: object, kind: type, home: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise WrongTypeError(
            f"{name}= is a {kind.__name__} of {home} or None, not a {type(value).__name__}. Pass "
            f"{name}={kind.__name__}(...)."
        )


class Neighbours:
    """Shared by the repositories that this process opened at the same URL with the same options.

    A repository on an open storage, which its caller may have wrapped, shares with no other.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.writers = Writers()
        self.known = Known()
        self.recent = RecentFiles()


_neighbours: Final = Places(Neighbours)


def _neighbours_of(request: Request, storage: Storage) -> Neighbours:
    # It may be wrapped, to fail or to delay: what is known of the plain storage need not hold for
    # it.
    if isinstance(request.location, _HasDescription):
        return Neighbours()
    return _neighbours.at(storage.description.url, request.storage_options)


@dataclass(frozen=True)
class Engine:
    """An open repository."""

    request: Request
    """How it was opened."""
    storage: Storage
    """With the repository's budget of requests, its cache if there is one, and its policies."""
    config: RepositoryConfig
    assets: Assets
    history: History
    virtual: VirtualChunks
    background: Background
    """Work that sessions start without waiting for it; it ends before the storage closes."""
    neighbours: Neighbours
    cache: Cached | None = None
    packing: Packing = field(default_factory=Packing.off)

    @property
    def origin(self) -> Origin:
        """How to open the repository elsewhere."""
        return Origin.of(self.request, self.storage)

    def new_packs(self) -> Packs | None:
        """Return where a new session puts small chunks; None if each gets an object."""
        if not self.packing.is_on:
            return None
        from icechunk_async.engine.files.packs import Packs  # noqa: PLC0415 -- loaded when it is used

        return Packs(self.packing, self.assets.layout)

    @cached_property
    def manifest_options(self) -> ManifestOptions:
        """How manifests are written; all sessions share one dictionary of locations."""
        return manifest_options(self.config, self.assets.layout.spec_version)

    def state_to_change(self, feature: Feature) -> RepositoryState:
        """Return the repository's state in order to change it.

        Raises:
            UnsupportedBySpecError: the repository lacks the feature.
            UnsafeStorageError: changes could be lost on this storage.
        """
        state = state_for(self.history, feature)
        self.check_safe()
        return state

    def check_safe(self) -> None:
        """Refuse changes where they could be lost; see `check_safe`."""
        check_safe(self.storage, self.history.storage_needs)

    async def resolve(
        self,
        branch: str | None,
        tag: str | None,
        snapshot_id: SnapshotId | str | None,
        *,
        default: str | None = MAIN,
    ) -> SnapshotId:
        """Return the snapshot that one of a branch, a tag and an id names, as of now.

        Args:
            branch: resolve its tip.
            tag: resolve its snapshot.
            snapshot_id: return it; it may not exist.
            default: the branch if none of them is given; None: then refuse.

        Raises:
            InvalidInputError: several are given, or none.
            BranchNotFoundError, TagNotFoundError: there is no such branch or tag; the message
                tells if something of another kind has the name.
        """
        given = [it for it in (branch, tag, snapshot_id) if it is not None]
        if len(given) > 1 or (not given and default is None):
            raise InvalidInputError(
                "Name one of a branch, a tag and a snapshot id"
                + (", not several." if given else ".")
            )
        if tag is not None:
            try:
                return await self.history.tag_target(tag)
            except TagNotFoundError as error:
                raise await self._of_other_kind(error, tag) from None
        if snapshot_id is not None:
            try:
                return _as_id(snapshot_id)
            except InvalidInputError as error:
                raise await self._of_other_kind(error, str(snapshot_id)) from None
        name = branch if branch is not None else default or ""
        try:
            return await self.history.branch_tip(name)
        except BranchNotFoundError as error:
            raise await self._of_other_kind(error, name) from None

    async def _of_other_kind[E: IcechunkError](self, error: E, name: str) -> E:
        """Return the error about a name, with what else is called so; costs up to two requests."""
        # Only after a failure, so that a name which is right costs nothing more.
        for kind, known, look_up in (
            ("tag", TagNotFoundError, self.history.tag_target),
            ("branch", BranchNotFoundError, self.history.branch_tip),
        ):
            if not isinstance(error, known):
                try:
                    await look_up(name)
                except IcechunkError:
                    continue
                return type(error)(
                    f"{error.message} There is a {kind} {name!r}: give it as {kind}={name!r} or "
                    f"ref={name!r}.",
                    **error.context,
                )
        if len(name) == _ID_LETTERS:
            try:
                shown = SnapshotId.parse(name)
            except InvalidInputError:
                return error
            return type(error)(
                f"{error.message} It looks like a snapshot id: give it as snapshot_id='{shown}' or "
                f"ref='{shown}'.",
                **error.context,
            )
        return error

    async def load(
        self,
        branch: str | None,
        tag: str | None = None,
        snapshot_id: SnapshotId | str | None = None,
        as_of: datetime | timedelta | str | None = None,
    ) -> Snapshot:
        """Load the snapshot that a session begins at; see `Repository.readonly_session`."""
        if as_of is not None:
            if tag is not None or snapshot_id is not None:
                raise InvalidInputError(
                    "as_of goes with a branch; a tag or a snapshot id names one moment already."
                )
            moment_us = clock.to_us(clock.given_time(as_of, "as_of"))
            try:
                past = await self.history.tip_at(branch or "", moment_us)
            except BranchNotFoundError as error:
                raise await self._of_other_kind(error, branch or "") from None
            return await self.assets.snapshot(past)
        if snapshot_id is not None:
            target = await self.resolve(branch, tag, snapshot_id)
            try:
                await self.history.snapshot_info(target)
            except SnapshotNotFoundError:
                # Outside of the history: of a failed commit, or expired, and not collected yet.
                return await self.assets.read_snapshot(target)
            return await self.assets.snapshot(target)
        return await self._load_tip(branch, tag)

    async def _load_tip(self, branch: str | None, tag: str | None) -> Snapshot:
        """Load the snapshot of a ref as of now.

        The one last seen there is fetched while the ref is read, where reads wait: usually it is
        still the one.
        """
        guess = self.history.last_seen(branch or (None if tag else MAIN), tag)
        guessed = None if guess is None else self.assets.known_snapshot(guess)
        is_quick = isinstance(self.assets.backend, BlockingStorage)
        if guess is None or guessed is not None or is_quick:
            target = await self.resolve(branch, tag, None)
        else:
            target, guessed = await gather(
                self.resolve(branch, tag, None), self.assets.snapshot_if_there(guess)
            )
        if guessed is not None and guessed.id == target:
            return guessed
        return await self.assets.snapshot(target)

    def known_tip(self, branch: str) -> Snapshot | None:
        """Return the snapshot at the tip of a branch as of now if that needs no waiting.

        It can be called on any thread. None says nothing about the branch.
        """
        state = self.history.state
        info = None if state is None else state.known_now()
        tip = None if info is None else info.branches.get(branch)
        return None if tip is None else self.assets.known_snapshot(tip)

    @property
    def preloads(self) -> bool:
        """Whether new sessions start to preload manifests, which only the loop can."""
        # Where reads hardly wait, choosing takes about as long as it could save: only on request.
        is_quick = isinstance(self.assets.backend, BlockingStorage)
        return not is_quick or self.config.effective_manifest.preload is not None

    def workspace(
        self, base: Snapshot, mode: SessionMode, *, deduplicate: bool = False
    ) -> Workspace:
        """Return the hierarchy of a new session, and start preloading its manifests."""
        from icechunk_async.engine.tree.workspace import Workspace  # noqa: PLC0415 -- for sessions

        if self.preloads and not self.assets.holds_all_of(base):
            from icechunk_async.engine.files.preload import preload  # noqa: PLC0415 -- on use

            wanted = self.config.effective_manifest.effective_preload
            max_refs = self.config.effective_caching.effective_num_chunk_refs
            work = partial(preload, base, self.assets, wanted, max_refs)
            self.background.start(work)
        return Workspace(
            base,
            self.assets,
            self.virtual,
            inline_threshold_bytes=self.config.effective_inline_chunk_threshold_bytes,
            read_only=mode is SessionMode.READONLY,
            rearranging=mode is SessionMode.REARRANGE,
            packs=self.new_packs() if mode is SessionMode.WRITABLE else None,
            deduplicate=deduplicate,
        )


def as_snapshot_id(given: SnapshotId | str) -> SnapshotId:
    """Return a snapshot id, parsed if it is text.

    Raises:
        InvalidInputError: it is no id; a `WrongTypeError` if it is neither text nor an id.
    """
    try:
        return _as_id(given)
    except InvalidInputError as error:
        advice = "Repository.lookup_branch and lookup_tag return the id that a name leads to."
        raise type(error)(f"{error.message} {advice}", **error.context) from None


def _as_id(given: SnapshotId | str) -> SnapshotId:
    if isinstance(given, SnapshotId):
        return given
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may
        raise WrongTypeError(
            f"A snapshot id is a SnapshotId or a text such as '{INITIAL_SNAPSHOT_ID}', not a "
            f"{type(given).__name__}."
        )
    return SnapshotId.parse(given)


@dataclass(frozen=True, slots=True)
class Creation:
    """How to create a repository where none exists."""

    spec_version: int
    check_clean_root: bool
    probe: bool | None
    """Try the storage's promises first. None: unless the backend verifies them itself, or they
    were tried a short time ago, see `engine.trusted`."""
    layout: str | None = None
    """The name of a layout; None: that of the format version."""

    @property
    def way(self) -> Way:
        """The way of publishing of the new repository.

        Raises:
            InvalidInputError: there is no such format version or layout.
        """
        return opening.way_of(self.spec_version, self.layout)


@runtime_checkable
class _HasDescription(Protocol):
    @property
    def description(self) -> object: ...


def given_options(storage_options: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of a backend, as its caller gave them.

    Raises:
        WrongTypeError: it is no mapping by names; the message shows no value, which may be secret.
    """
    if storage_options is None:
        return {}
    if not _maps_names(storage_options):
        raise WrongTypeError(
            "storage_options maps names of the backend's options to their values, such as "
            f"{{'region': 'eu-west-1'}}; this {type(storage_options).__name__} does not."
        )
    return dict(storage_options)


def _maps_names(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) for name in cast("Mapping[object, object]", given)
    )


@asynccontextmanager
async def open_location(request: Request) -> AsyncGenerator[Storage]:
    """Open the storage of a location; an open storage is used and left open."""
    location = request.location
    if isinstance(location, _HasDescription):
        yield location
        return
    async with open_storage(location, **request.storage_options) as storage:
        yield storage


def early(request: Request, storage: Storage) -> Storage:
    """Return the storage for the first reads, before the stored settings are known."""
    if isinstance(storage, BlockingStorage):
        return storage
    # The stored configuration is what is about to be read.
    settings = (request.config or RepositoryConfig()).effective_storage
    return with_retries(storage, policies_of(settings).retry)


def check_safe(
    storage: Storage, needs: Sequence[str] = SAFE_UPDATES, *, creating: bool = False
) -> None:
    """Refuse to write where commits could be lost.

    Args:
        storage: where to write.
        needs: the promises that a repository needs there, see `History.storage_needs`.
        creating: a repository is about to be created, so another layout can be chosen.

    Raises:
        UnsafeStorageError: it says which promise is missing and what to do.
    """
    capabilities = storage.capabilities
    missing = [name for name in needs if not getattr(capabilities, name)]
    if missing:
        given = [capabilities.reasons.get(name, "no reason given") for name in missing]
        reasons = "; ".join(dict.fromkeys(given))  # each once
        names = ", ".join(name.replace("_", " ") for name in missing)
        # Advice only where it helps: the numbered layout needs creation and lists, and no
        # replacement.
        numbered = creating and missing == ["conditional_update"] and capabilities.listing
        advice = f" {_NUMBERED}" if numbered else ""
        raise UnsafeStorageError(
            f"The storage {storage.description.url!r} cannot be written to safely: it lacks "
            f"{names} ({reasons}). Reading works.{advice}",
            missing=missing,
        )


@asynccontextmanager
async def open_engine(
    request: Request, creation: Creation | None = None, *, or_open: bool = False
) -> AsyncGenerator[Engine]:
    """Open a repository; create it first if ``creation`` says how.

    Args:
        request: what to open.
        creation: create the repository.
        or_open: if there is one already, open it instead of refusing.

    Raises:
        RepositoryNotFoundError: it does not exist and is not to be created.
        RepositoryExistsError: the location is taken, and ``or_open`` is False.
    """
    async with open_location(request) as storage:
        found = await _find_or_check(request, storage, creation, or_open=or_open)
        if found is None and creation is None:
            raise await opening.missing(storage)
        async with (
            _with_files(request, storage, found) as place,
            _assemble(request, place, found, creation) as engine,
        ):
            done = "created" if found is None else "opened"
            way = engine.history.capabilities.way
            _log.debug("%s repository %r of %s", done, storage.description.url, way)
            yield engine


@asynccontextmanager
async def _with_files(
    request: Request, storage: Storage, found: Found | None
) -> AsyncGenerator[Storage]:
    """Open the other place of a repository's files, if there is one."""
    if found is None or found.elsewhere is None:
        yield storage
        return
    from icechunk_async.engine.virtual.elsewhere import open_apart  # noqa: PLC0415 -- rarely used

    async with open_apart(storage, found.elsewhere, request.authorized) as both:
        yield both


def _grants(request: Request, found: Found) -> Mapping[str, VirtualAccess]:
    """Return the grants for virtual chunks."""
    if found.elsewhere is None:
        return request.authorized
    from icechunk_async.engine.virtual.elsewhere import other_grants  # noqa: PLC0415 -- rarely used

    return other_grants(request.authorized, found.elsewhere)


async def _find_or_check(
    request: Request, storage: Storage, creation: Creation | None, *, or_open: bool
) -> Found | None:
    """Find the repository, or make sure that one can be created."""
    reads = early(request, storage)
    if creation is None:
        return await opening.find_expected(reads)
    if creation.check_clean_root and not or_open:
        found = await opening.find_or_check_empty(reads)
    elif creation.check_clean_root:
        found = await opening.find_or_see_empty(reads)
    else:  # nothing else would tell that a migration was under way at the first look
        found = await opening.find_expected(reads)
    if found is not None:
        if not or_open:
            raise repository_exists(storage, "a repository")
        return found
    check_safe(storage, creation.way.storage_needs, creating=True)
    return None


async def _try_promises(
    storage: Storage, creation: Creation, *, is_known: bool
) -> Callable[[], Awaitable[object]]:
    """Try the promises of a storage, unless the same service kept them a short time ago.

    Args:
        storage: where the repository is to be.
        creation: how to create it.
        is_known: whether the storage is what its description opens.

    Returns:
        The removal of what the trial wrote, to be called.
    """
    if creation.probe is False or (creation.probe is None and storage.capabilities.verified):
        return _nothing_to_remove
    from icechunk_async.engine.trusted import is_trusted, service_of, trust  # noqa: PLC0415 -- on use
    from icechunk_async.storage import probe  # noqa: PLC0415 -- slow to import

    numbered = "conditional_update" not in creation.way.storage_needs
    service = service_of(storage) if is_known else None
    if creation.probe is None and is_trusted(service, numbered=numbered):
        return _nothing_to_remove
    remove: Callable[[], Awaitable[object]] = _nothing_to_remove
    if creation.probe:
        (await probe.probe_storage(storage)).check(numbered=numbered)
    else:
        remove = await probe.try_what_commits_need(storage, numbered=numbered)
    trust(service, numbered=numbered)
    return remove


async def _nothing_to_remove() -> None:
    """Return at once."""


async def find_at(request: Request, *, required: bool = False) -> Found | None:
    """Return the repository at a location without opening it; None if it holds none.

    Raises:
        RepositoryNotFoundError: it does not exist and is required.
    """
    async with open_location(request) as storage:
        found = await opening.find_expected(early(request, storage))
        if found is None and required:
            raise await opening.missing(storage)
        return found


@asynccontextmanager
async def _assemble(
    request: Request, storage: Storage, found: Found | None, creation: Creation | None
) -> AsyncGenerator[Engine]:
    """Put the parts together; if nothing was found, create the repository first."""
    layout, view = (found.layout, found.view) if found is not None else _new(creation)
    config = (found.config if found is not None else None) or RepositoryConfig()
    if request.config is not None:
        config = merge(config, request.config)
    budget = Budget(config.effective_max_concurrent_requests)
    policies = policies_of(config.effective_storage, request.hedge)
    limited = with_policies(storage, budget, policies, immutable=layout.names.is_written_once)
    # Above retries and budget: what a view adds, such as a listing, are requests like all others.
    limited = view(limited)
    cache = None
    if request.cache is not None:  # outside the budget: a hit needs no request
        from icechunk_async.storage.policies.cache import Cached  # noqa: PLC0415 -- on use

        limited = cache = Cached(limited, request.cache, immutable=layout.names.is_immutable)
    caching = config.effective_caching
    level = config.effective_compression.effective_level
    neighbours = _neighbours_of(request, storage)
    assets = Assets(
        limited,
        layout,
        compression_level=level,
        snapshot_nodes=caching.effective_num_snapshot_nodes,
        chunk_refs=caching.effective_num_chunk_refs,
        backend=storage,
        bypass=cache is None and not telemetry.is_listening(),
        verify_reads=request.verify_reads,
        recent=neighbours.recent,
    )
    given = request.settings
    if found is None:
        assert creation is not None  # else a layout was found
        # Of an open storage its caller knows what it is; it may wrap the one that it describes.
        is_known = storage is not request.location
        remove = await _try_promises(storage, creation, is_known=is_known)
        created = opening.create(limited, assets, creation.way, request.config, given)
        # The trial's objects are removed while the repository is created: `check_empty` of other
        # processes knows them.
        found = (await gather(created, remove()))[0]
    history = found.open(limited, assets, history_settings(config, neighbours.known))
    assets.keeps_statistics = bool(found.settings.statistics)
    assets.keeps_sums = bool(found.settings.sums if given.sums is None else given.sums)
    if assets.keeps_sums:
        history.capabilities.require("sums")
    # Closed in reverse order: work in the background first, since it may read virtual sources.
    async with AsyncExitStack() as stack:
        if cache is not None:
            stack.callback(cache.close)
        containers = config.effective_virtual_chunk_containers
        virtual = await stack.enter_async_context(
            open_virtual(
                containers,
                _grants(request, found),
                lambda source: with_policies(source, budget, policies, immutable=lambda _: False),
                request.config.effective_virtual_chunk_containers if request.config else (),
            )
        )
        background = await stack.enter_async_context(Background())
        packing = given.packing or found.settings.packing or Packing.off()
        yield Engine(
            request,
            limited,
            config,
            assets,
            history,
            virtual,
            background,
            neighbours,
            cache,
            packing,
        )


def _new(creation: Creation | None) -> tuple[Layout, Callable[[Storage], Storage]]:
    """Return layout and view of a repository that is about to be created."""
    assert creation is not None  # otherwise opening was refused
    return creation.way.new_layout(), creation.way.view


def history_settings(config: RepositoryConfig, known: Known) -> HistorySettings:
    """Return how snapshots are published under a configuration."""
    retries = config.effective_repo_update_retries.effective_default
    backoff = Backoff(
        retries.effective_max_tries,
        retries.effective_initial_backoff_ms,
        retries.effective_max_backoff_ms,
    )
    return HistorySettings(
        backoff,
        config.effective_num_updates_per_repo_info_file,
        config.effective_compression.effective_level,
        known,
    )


def manifest_options(config: RepositoryConfig, spec_version: int) -> ManifestOptions:
    """Return how manifests are written under a configuration."""
    from icechunk_async.engine.commit.flush import ManifestOptions  # noqa: PLC0415 -- for sessions
    from icechunk_async.format.manifest.writing import LocationDictionary  # noqa: PLC0415 -- for sessions

    manifest = config.effective_manifest
    compression = manifest.virtual_chunk_location_compression
    dictionary = None
    # Plain, shared locations are about as small and decode faster, so compression is only used if
    # the configuration asks for it. Format 1 has no compressed locations.
    if compression is not None and spec_version > 1:
        dictionary = LocationDictionary(
            compression.effective_min_num_chunks,
            compression.effective_dictionary_max_training_samples,
            compression.effective_dictionary_max_size_bytes,
            compression.effective_compression_level,
        )
    return ManifestOptions(manifest.splitting, dictionary)
