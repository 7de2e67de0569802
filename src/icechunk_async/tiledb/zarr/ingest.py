"""Bring a dense TileDB array into a branch: one snapshot, or one for each moment of its history.

The group that is written records what it was written from, so that a second run finds out whether
there is anything new.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import zarr.api.asynchronous as zarr_async
from zarr.errors import GroupNotFoundError

from icechunk_async._runtime import clock
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.paths import check_path
from icechunk_async.tiledb.arrays.array import TileDBArray, open_array
from icechunk_async.tiledb.format.history import Window, parse_name
from icechunk_async.tiledb.zarr.virtual import write_virtual_array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async import Repository, Session
    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.tiledb.arrays.array import Location

__all__ = ["IngestedArray", "ingest_array"]

_RECORD: Final = "tiledb_source"
"""The attribute of the group that says what it was written from."""
_MOST_MS: Final = 253_402_300_799_000
"""The last second of the year 9999, the last that a datetime can say."""


@dataclass(frozen=True, slots=True)
class IngestedArray:
    """A snapshot that `ingest_array` committed."""

    snapshot_id: SnapshotId
    end: int
    """The time up to which fragments are seen, in milliseconds since 1970."""
    referenced: int
    """Chunks that refer to a tile."""
    copied: int
    """Chunks whose cells were copied."""


@dataclass(frozen=True, slots=True)
class _Record:
    """The source of a group."""

    url: str
    end: int
    digest: str
    """Of the names of its fragments, which change when TileDB consolidates them, and attributes."""

    def to_json(self) -> dict[str, Any]:
        return {"url": self.url, "end": self.end, "fragments": self.digest}


async def ingest_array(
    repository: Repository,
    location: Location,
    path: str,
    *,
    branch: str = "main",
    history: bool = False,
    attributes: Sequence[str] | None = None,
    copy: bool = False,
    validity: bool = False,
    validate_containers: bool = True,
    storage_options: Mapping[str, object] | None = None,
) -> tuple[IngestedArray, ...]:
    """Write a dense TileDB array into a group of a branch, and commit it; again, only what is new.

    See `write_virtual_array` for what is written. A group that was written so is replaced as a
    whole when the array has other fragments or attributes than it had then; anything else at the
    path is refused.

    Args:
        repository: a repository whose containers cover the array.
        location: URL or path of the array, or an open storage at that place; as for `open_array`.
        path: of the group.
        branch: the branch to commit to.
        history: commit a snapshot for each moment at which fragments were written, the oldest
            first, and again only for those since the last run; otherwise one snapshot. Moments
            before the earliest fragment that was not vacuumed are gone.
        attributes: names; all if None. Snapshots of earlier moments have those of them that the
            array had then; moments at which it had none are left out.
        copy: copy tiles that cannot be referred to, all text, and cells of variable length.
        validity: as for `write_virtual_array`.
        validate_containers: refuse an array that no container covers.
        storage_options: options of the storage of the array.

    Returns:
        The snapshots, none if there is nothing new.

    Raises:
        InvalidInputError: the array is empty, or as `write_virtual_array`.
        NodeExistsError: something that was not written from this array is at the path.
        ConflictError: somebody committed to the branch meanwhile; what was committed before stays.
            Run it again.
        IcechunkError: as `write_virtual_array`. Snapshots that were committed before stay.

    Cancellation: snapshots may have been committed; run it again to continue.

    Cost: opening the array once, and what `write_virtual_array` costs for each snapshot: each
    writes all references anew.
    """
    place = check_path(path)
    async with open_array(location, storage_options=storage_options) as array:
        array.grid()  # refuses sparse arrays
        url = array.folder.shown
        times = _times(array)
        if not times:
            raise InvalidInputError(
                f"The TileDB array at {url!r} has no fragments: there is nothing to ingest."
            )
        session = await repository.writable_session(branch)
        known = await _record_at(session, place)
        # A group of another array is not replaced: writing will find it there, and refuse.
        if known is not None and known.url != url:
            known = None
        newest = _Record(url, times[-1], _digest(array, attributes))
        if known == newest:
            return ()
        first = 0 if known is None else known.end + 1
        # Fragments that were consolidated may change what is there without a later moment.
        wanted = [it for it in times if history and it >= first] or times[-1:]
        found: list[IngestedArray] = []
        for end in wanted:
            seen = array
            if end != times[-1]:  # the newest is what was opened, with its schema
                # With the listing of the newest state: fragments that are vacuumed meanwhile are an
                # error, not a snapshot without them.
                seen = await TileDBArray.load(array.folder, Window(0, end), array.directory)
            names = _names_at(seen, attributes)
            if names is not None and not names:
                continue
            # A session ends with its commit.
            if found:
                session = await repository.writable_session(branch)
            tiles = await write_virtual_array(
                session,
                seen,
                place,
                attributes=names,
                copy=copy,
                validity=validity,
                overwrite=known is not None or bool(found),
                validate_containers=validate_containers,
            )
            record = _Record(url, end, _digest(seen, names))
            # In the same commit as the chunks, so that the record is never of others.
            await _set_record(session, place, record)
            snapshot = await session.commit(_message(url, end), {"tiledb": record.to_json()})
            found.append(IngestedArray(snapshot, end, tiles.referenced, tiles.copied))
        return tuple(found)


def _times(array: TileDBArray) -> list[int]:
    """Return the moments at which fragments were written, in order."""
    names = map(parse_name, array.directory.commits.committed)
    return sorted({it.end for it in names if it is not None})


def _names_at(seen: TileDBArray, attributes: Sequence[str] | None) -> list[str] | None:
    """Return those of the wanted attributes that the array has at a time; None for all."""
    known = {it.name for it in seen.schema.attributes}
    return None if attributes is None else [it for it in attributes if it in known]


def _digest(array: TileDBArray, attributes: Sequence[str] | None) -> str:
    names = [it.name.text for it in array.fragments]
    names += [it.name for it in array.attributes(attributes)]
    return hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()


def _message(url: str, end: int) -> str:
    if end > _MOST_MS:
        return f"TileDB array {url} at {end} ms"
    return f"TileDB array {url} at {clock.from_us(end * 1000).isoformat()}"


async def _record_at(session: Session, place: str) -> _Record | None:
    """Return the source of the group at a path; None if it is not known."""
    try:
        group = await zarr_async.open_group(  # pyright: ignore[reportUnknownMemberType]
            session.store, path=place.strip("/"), mode="r"
        )
    except (GroupNotFoundError, FileNotFoundError):
        return None
    match group.attrs.get(_RECORD):
        case {"url": str(url), "end": int(end), "fragments": str(digest)}:
            return _Record(url, end, digest)
        case _:
            return None


async def _set_record(session: Session, place: str, record: _Record) -> None:
    group = await zarr_async.open_group(  # pyright: ignore[reportUnknownMemberType]
        session.store, path=place.strip("/"), mode="r+"
    )
    await group.update_attributes({_RECORD: record.to_json()})
