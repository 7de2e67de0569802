"""Find which way of publishing a storage uses, or create a repository in one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import closing, gather
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.ref_files import REF_FILES_WAY
from icechunk_async.engine.history.refusals import repository_exists
from icechunk_async.engine.history.repo_info.history import REPO_INFO_WAY
from icechunk_async.engine.history.way import Creating
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    InvalidInputError,
    RepositoryExistsError,
    RepositoryNotFoundError,
)
from icechunk_async.format.config import RepositoryConfig
from icechunk_async.format.layout import REPO_INFO
from icechunk_async.format.refs import CLOSED
from icechunk_async.storage import BlockingStorage, ObjectInfo

if TYPE_CHECKING:
    from icechunk_async.engine.files.assets import Assets
    from icechunk_async.engine.history.settings import OwnSettings
    from icechunk_async.engine.history.way import Found, Way
    from icechunk_async.storage import Storage

__all__ = [
    "WAYS",
    "check_empty",
    "create",
    "damaged_way",
    "find",
    "find_expected",
    "find_or_check_empty",
    "find_or_see_empty",
    "find_other",
    "missing",
    "other_ways",
    "way_of",
]

# The first that recognises a repository wins: refs beside a repo info are left over from a
# migration (spec, "Detecting the version").
WAYS: Final[tuple[Way, ...]] = (REPO_INFO_WAY, REF_FILES_WAY)

_OF_ZARR: Final = frozenset({"zarr.json", ".zgroup", ".zarray"})
_LOOKED_AT: Final = 1000
"""Names in a list of what is there instead of a repository: one page of most storages."""
_SHOWN: Final = 4


def other_ways() -> tuple[Way, ...]:
    """Return the layouts before version 1, and that of version 2 with numbered states.

    They are looked for, and imported, only if none of `WAYS` is there, so that they cost nothing
    elsewhere.
    """
    from icechunk_async.engine.history.alpha.history import ALPHA_WAY  # noqa: PLC0415 -- rarely used
    from icechunk_async.engine.history.draft.history import DRAFT_WAY  # noqa: PLC0415 -- rarely used
    from icechunk_async.engine.history.numbered import NUMBERED_WAY  # noqa: PLC0415

    return (NUMBERED_WAY, ALPHA_WAY, DRAFT_WAY)


async def find(storage: Storage) -> Found | None:
    """Return the repository that a storage holds, or None.

    None is no proof, see `find_expected`.

    Raises:
        FormatError: it holds repositories of two layouts, or what decides is damaged.

    Cost: three requests at once; one of a storage that needs no event loop, if it finds a repo
    info. If they find nothing, some more for other layouts.
    """
    return await _find_versioned(storage) or await find_other(storage)


async def _find_versioned(storage: Storage) -> Found | None:
    """Return the repository of one of `WAYS` that a storage holds, or None; as `find`.

    Where reads need no event loop they hardly wait: then one way is looked for after the other, so
    that a repo info is all that is read.
    """
    if isinstance(storage, BlockingStorage):
        for way in WAYS:
            read = await way.detect(storage)
            if read is not None:
                return read()
        return None
    # In the order of `WAYS`: a later one is decoded only if those before it found nothing.
    for read in await gather(*(way.detect(storage) for way in WAYS)):
        if read is not None:
            found: Found = read()
            return found
    return None


async def find_other(storage: Storage) -> Found | None:
    """Return the repository of one of `other_ways` that a storage holds, or None; as `find`."""
    ways = other_ways()
    reads = await gather(*(way.detect(storage) for way in ways))
    there = [(way, read) for way, read in zip(ways, reads, strict=True) if read is not None]
    if len(there) > 1:
        markers = " and ".join(repr(way.marker) for way, _ in there)
        raise FormatError(
            f"{storage.description.url!r} holds repositories of {len(there)} layouts: it has "
            f"{markers}. Move one of them elsewhere; nothing was read."
        )
    return there[0][1]() if there else None


async def find_expected(storage: Storage) -> Found | None:
    """Return the repository of a storage that should hold one, or None.

    A migration writes the marker of version 2, then closes the branches of version 1, then removes
    its marker. Each may happen between our looking for the one marker and for the other. So where
    nothing is found, or a closed branch, look again.
    """
    try:
        found = await find(storage)
    except FormatError as error:
        if error.context.get("code") != CLOSED:
            raise
        found = None
    return found or await find(storage)


async def damaged_way(storage: Storage) -> Way:
    """Return the way of version 2 whose state is to be audited or restored, without decoding it.

    That of numbered states, if there are any and no repo info; else the ordinary one.
    """
    from icechunk_async.engine.history.numbered import NUMBERED_WAY  # noqa: PLC0415 -- rarely used
    from icechunk_async.engine.history.numbers import Numbered  # noqa: PLC0415 -- rarely used

    if storage.capabilities.listing and await read_if_there(storage, REPO_INFO) is None:
        numbers = Numbered(storage, NUMBERED_WAY.marker, "").numbers()
        async with closing(numbers):
            async for _ in numbers:
                return NUMBERED_WAY
    return REPO_INFO_WAY


async def missing(storage: Storage) -> RepositoryNotFoundError:
    """Return the error for a storage without a repository, which says what is there instead.

    Cost: one request for a list, where the storage has lists.
    """
    url = storage.description.url
    markers = " nor ".join(repr(way.marker) for way in (*WAYS, *other_ways()))
    there = await _what_is_there(storage)
    return RepositoryNotFoundError(
        f"There is no Icechunk repository at {url!r}: it has neither {markers}.{there} Check the "
        "location, or create one with Repository.create.",
        url=url,
    )


async def _what_is_there(storage: Storage) -> str:
    """Return a sentence about what lies in a storage; nothing if that cannot be told."""
    names: list[str] = []
    try:
        if not storage.capabilities.listing:
            return ""
        entries = storage.list_prefix(delimiter="/")
        async with closing(entries):
            async for entry in entries:
                names.append(entry.key if isinstance(entry, ObjectInfo) else entry.prefix)
                if len(names) == _LOOKED_AT:
                    break
    except IcechunkError:  # who may read may not always list
        return ""
    if not names:
        return " Nothing is there."
    if _OF_ZARR.intersection(names):
        return (
            " A plain Zarr hierarchy is there: Zarr opens it without this library, and a session "
            "of a repository elsewhere takes a copy of it."
        )
    more = " and more" if len(names) > _SHOWN else ""
    return f" What is there: {', '.join(map(repr, names[:_SHOWN]))}{more}."


async def check_empty(storage: Storage) -> None:
    """Refuse a location that holds anything but what a trial of the storage left.

    Raises:
        RepositoryExistsError: it does.
    """
    from icechunk_async.storage.probe import PROBE_PREFIX  # noqa: PLC0415 -- slow to import

    async for entry in storage.list_prefix():
        if isinstance(entry, ObjectInfo) and entry.key.startswith(PROBE_PREFIX):
            continue  # another process may be about to create a repository as well
        raise repository_exists(storage, repr(getattr(entry, "key", entry)))


async def find_or_check_empty(storage: Storage) -> Found | None:
    """Find a repository, or check that the location is empty; both run concurrently."""
    found, refusal = await gather(_find_versioned(storage), _refusal_of_contents(storage))
    if found is None and refusal is not None:  # an empty location holds no other layout either
        found = await find_other(storage)
        if found is None:
            raise refusal
    return found


async def find_or_see_empty(storage: Storage) -> Found | None:
    """Find a repository, or check that the location is empty, one after the other.

    Contents without a repository may be those of one whose migration ended at this moment.
    """
    try:
        found = await _find_versioned(storage)
    except FormatError as error:
        if error.context.get("code") != CLOSED:
            raise
        return await find_expected(storage)
    if found is not None:
        return found
    try:
        await check_empty(storage)
    except RepositoryExistsError:
        found = await find(storage)
        if found is None:
            raise
    return found


async def _refusal_of_contents(storage: Storage) -> RepositoryExistsError | None:
    try:
        await check_empty(storage)
    except RepositoryExistsError as error:
        return error
    return None


def way_of(spec_version: int, layout: str | None = None) -> Way:
    """Return the way of publishing of a format version, or of a layout if one is named.

    Raises:
        InvalidInputError: there is no such format version, or no such layout.
    """
    if layout is not None:
        ways = (*WAYS, *other_ways())
        named = next((way for way in ways if way.name == layout), None)
        if named is None:
            names = ", ".join(repr(way.name) for way in ways)
            raise InvalidInputError(f"There is no layout {layout!r}; there are {names}.")
        return named
    way = next((way for way in WAYS if way.spec_version == spec_version), None)
    if way is None:
        versions = " or ".join(str(it) for it in sorted(way.spec_version for way in WAYS))
        raise InvalidInputError(
            f"There is no format version {spec_version!r}; repositories can be created with "
            f"version {versions}."
        )
    return way


async def create(
    storage: Storage,
    assets: Assets,
    way: Way,
    config: RepositoryConfig | None,
    settings: OwnSettings,
) -> Found:
    """Write the first snapshot, and then what makes it a repository.

    Raises:
        RepositoryExistsError: another writer created one here meanwhile.

    Cancellation: a repository may have been created.
    """
    if config == RepositoryConfig():
        config = None  # it says nothing, so there is nothing to store
    from icechunk_async.format.snapshot import Snapshot  # noqa: PLC0415 -- on use

    snapshot = Snapshot(
        assets.layout.first_snapshot_id(),
        None,
        clock.now_us(),
        "Repository initialized",
        {"__icechunk": {"is_root": True}},
    )
    return await way.create(Creating(storage, assets, snapshot, config, settings))
