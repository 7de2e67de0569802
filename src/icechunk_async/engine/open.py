"""Open a repository: storage, budget, caches, history and virtual sources put together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from icechunk_async._runtime import telemetry
from icechunk_async._runtime.backoff import Backoff
from icechunk_async._runtime.concurrency import Background
from icechunk_async.credentials._refresh import Credential
from icechunk_async.engine.commit.flush import ManifestOptions
from icechunk_async.engine.files.assets import Assets
from icechunk_async.engine.files.packs import Packing, Packs
from icechunk_async.engine.history import opening
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.way import HistorySettings
from icechunk_async.engine.policies import policies_of
from icechunk_async.engine.virtual.chunks import open_virtual
from icechunk_async.errors import UnsafeStorageError
from icechunk_async.format.config import RepositoryConfig, merge
from icechunk_async.format.layout import is_immutable, is_written_once
from icechunk_async.format.manifest.writing import LocationDictionary
from icechunk_async.storage import open_storage
from icechunk_async.storage.cache.cached import Cached
from icechunk_async.storage.policies.limit import Budget
from icechunk_async.storage.policies.stack import with_policies, with_retries

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator

    from icechunk_async.engine.history import History
    from icechunk_async.engine.history.way import Found
    from icechunk_async.engine.virtual.chunks import VirtualAccess, VirtualChunks
    from icechunk_async.storage import Storage
    from icechunk_async.storage.cache.cached import CacheOptions
    from icechunk_async.storage.policies.hedge import HedgePolicy

    type Location = str | os.PathLike[str] | Storage

__all__ = [
    "Creation",
    "Opened",
    "Origin",
    "Request",
    "check_safe",
    "early",
    "open_location",
    "open_parts",
]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a repository is and what it was opened with; it pickles with its secrets."""

    url: str
    storage_options: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)
    config: RepositoryConfig | None = None
    authorized: Mapping[str, Credential | Mapping[str, object] | None] = field(
        default_factory=dict[str, "Credential | Mapping[str, object] | None"], repr=False
    )
    """Containers of virtual chunks that may be read; those opened by the caller are left out."""
    packing: Packing | None = None

    @classmethod
    def of(cls, request: Request, storage: Storage) -> Self:
        """Return how to open again what was opened from ``request``."""
        description = storage.description
        plain = {
            prefix: access
            for prefix, access in request.authorized.items()
            if access is None or isinstance(access, Mapping | Credential)
        }
        return cls(
            description.url, dict(description.options), request.config, plain, request.packing
        )

    def request(
        self, storage: Storage | None, authorized: Mapping[str, VirtualAccess] | None
    ) -> Request:
        """Return the request that opens it: from an open storage, if one is given."""
        access = self.authorized if authorized is None else authorized
        if storage is not None:
            return Request(storage, {}, self.config, access, packing=self.packing)
        return Request(self.url, self.storage_options, self.config, access, packing=self.packing)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for; plain data, but for a storage given as an object."""

    location: Location
    storage_options: Mapping[str, object]
    config: RepositoryConfig | None
    authorized: Mapping[str, VirtualAccess]
    cache: CacheOptions | None = None
    packing: Packing | None = None
    """None: as the repository says."""
    hedge: HedgePolicy | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open repository."""

    storage: Storage
    """Limited by the repository's budget of requests, cached if asked, with its other policies."""
    config: RepositoryConfig
    assets: Assets
    history: History
    virtual: VirtualChunks
    manifest_options: ManifestOptions
    background: Background
    """What sessions start and nobody waits for; it ends before the storage closes."""
    cache: Cached | None = None
    packing: Packing = field(default_factory=Packing.off)

    def new_packs(self) -> Packs | None:
        """Return where small chunks of a new session go; None if they are not packed."""
        return Packs(self.packing) if self.packing.is_on else None


@dataclass(frozen=True, slots=True)
class Creation:
    """How a repository is created, where there is none."""

    spec_version: int
    check_clean_root: bool
    probe: bool | None
    """Try the storage's promises first; None: unless the backend has made sure of them itself."""


@runtime_checkable
class _HasDescription(Protocol):
    @property
    def description(self) -> object: ...


@asynccontextmanager
async def open_location(request: Request) -> AsyncGenerator[Storage]:
    """Open the storage of a location; one that is open already is used and left open."""
    location = request.location
    if isinstance(location, _HasDescription):
        yield location
        return
    async with open_storage(location, **request.storage_options) as storage:
        yield storage


def early(request: Request, storage: Storage) -> Storage:
    """Return the storage for the first reads, which tell whose settings count from then on."""
    settings = (request.config or RepositoryConfig()).effective_storage
    return with_retries(storage, policies_of(settings).retry)


def check_safe(storage: Storage) -> None:
    """Refuse to write where commits could be lost.

    Raises:
        UnsafeStorageError: it says which promise is missing and what to do.
    """
    capabilities = storage.capabilities
    needed = {
        "writable": capabilities.writable,
        "conditional_create": capabilities.conditional_create,
        "conditional_update": capabilities.conditional_update,
    }
    missing = [name for name, present in needed.items() if not present]
    if missing:
        given = [capabilities.reasons.get(name, "no reason given") for name in missing]
        reasons = "; ".join(dict.fromkeys(given))  # each once
        names = ", ".join(name.replace("_", " ") for name in missing)
        raise UnsafeStorageError(
            f"The storage {storage.description.url!r} cannot be written to safely: it lacks "
            f"{names} ({reasons}). Reading works.",
            missing=missing,
        )


async def _make_sure(storage: Storage, *, probe: bool | None) -> None:
    """Refuse to create a repository where commits could be lost."""
    check_safe(storage)
    if probe or (probe is None and not storage.capabilities.verified):
        from icechunk_async.storage.probe import probe_storage  # noqa: PLC0415 -- not without need

        (await probe_storage(storage)).check()


@asynccontextmanager
async def open_parts(
    request: Request, creation: Creation | None, *, or_open: bool
) -> AsyncGenerator[Opened]:
    """Find the repository, or create one as ``creation`` says, and put its parts together."""
    async with open_location(request) as storage:
        reads = early(request, storage)
        if creation is None:
            found = await opening.find_expected(reads)
        elif creation.check_clean_root and not or_open:
            found = await opening.find_or_check_empty(reads)
        else:
            found = await opening.find(reads)
        if found is not None:
            if creation is not None and not or_open:
                raise repository_exists(storage, "a repository")
            version = found.spec_version
        elif creation is None:
            raise opening.missing(storage)
        else:
            if creation.check_clean_root and or_open:
                await opening.check_empty(reads)
            await _make_sure(storage, probe=creation.probe)
            version = creation.spec_version
        async with _assemble(request, storage, found, version) as opened:
            yield opened


@asynccontextmanager
async def _assemble(
    request: Request, storage: Storage, found: Found | None, spec_version: int
) -> AsyncGenerator[Opened]:
    """Put the parts together; where nothing was found, a repository is created first."""
    stored = found.config if found is not None else None
    config = merge(stored or RepositoryConfig(), request.config or RepositoryConfig())
    budget = Budget(config.effective_max_concurrent_requests)
    policies = policies_of(config.effective_storage, request.hedge)
    limited = with_policies(storage, budget, policies, immutable=is_written_once)
    cache = None
    if request.cache is not None:  # around the budget: what is here already needs no place
        immutable = partial(is_immutable, spec_version=spec_version)
        limited = cache = Cached(limited, request.cache, immutable=immutable)
    caching = config.effective_caching
    level = config.effective_compression.effective_level
    assets = Assets(
        limited,
        spec_version=spec_version,
        compression_level=level,
        snapshot_nodes=caching.effective_num_snapshot_nodes,
        chunk_refs=caching.effective_num_chunk_refs,
        blocking=storage,
        bypass=cache is None and not telemetry.is_listening(),
    )
    if found is None:
        found = await opening.create(limited, assets, spec_version, request.config, request.packing)
    retries = config.effective_repo_update_retries.effective_default
    backoff = Backoff(
        retries.effective_max_tries,
        retries.effective_initial_backoff_ms,
        retries.effective_max_backoff_ms,
    )
    settings = HistorySettings(backoff, config.effective_num_updates_per_repo_info_file, level)
    history = found.open(limited, assets, settings)
    async with AsyncExitStack() as stack:
        if cache is not None:
            stack.callback(cache.close)
        containers = config.effective_virtual_chunk_containers
        virtual = await stack.enter_async_context(
            open_virtual(
                containers,
                request.authorized,
                lambda source: with_policies(source, budget, policies, immutable=lambda _: False),
            )
        )
        options = manifest_options(config, spec_version)
        background = await stack.enter_async_context(Background())
        packing = request.packing or found.packing or Packing.off()
        yield Opened(limited, config, assets, history, virtual, options, background, cache, packing)


def manifest_options(config: RepositoryConfig, spec_version: int) -> ManifestOptions:
    """Return how manifests are written under a configuration."""
    manifest = config.effective_manifest
    compression = manifest.virtual_chunk_location_compression
    dictionary = None
    # Plain, shared locations are about as small and decode faster, so compression is only used
    # where somebody asked for it. Spec 1 has no compressed locations.
    if compression is not None and spec_version > 1:
        dictionary = LocationDictionary(
            compression.effective_min_num_chunks,
            compression.effective_dictionary_max_training_samples,
            compression.effective_dictionary_max_size_bytes,
            compression.effective_compression_level,
        )
    return ManifestOptions(manifest.splitting, dictionary)
