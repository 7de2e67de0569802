"""Write what a gateway serves as files, for a file server without a process.

A note at the root says which snapshots are there, and which are being written. It is what tells
published files from those of others, which are never touched.
"""

from __future__ import annotations

import json
from dataclasses import field
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async._runtime.concurrency import bounded_map, closing
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.progress import Progress, no_progress
from icechunk_async.engine.open import Request
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    RepositoryExistsError,
    UnsafeStorageError,
)
from icechunk_async.format.ids import SnapshotId
from icechunk_async.gateway.contents import CHUNK, Contents
from icechunk_async.gateway.page import index_page, snapshot_page
from icechunk_async.gateway.requests import PAGE, Ref, parse_ref
from icechunk_async.storage import ObjectInfo
from icechunk_async.zarr.export import open_limited

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from icechunk_async import Repository, Session
    from icechunk_async._runtime.progress import ProgressCallback
    from icechunk_async.engine.open import Location
    from icechunk_async.storage import Storage

__all__ = ["NOTE", "Published", "PublishedRef", "publish_static"]

NOTE: Final = "icechunk-static.json"
_DOCUMENT: Final = "zarr.json"
_AT_ONCE: Final = 32
_PAGE_KEYS: Final = 1000


@dataclass(frozen=True, slots=True)
class PublishedRef:
    """A branch, a tag or a snapshot that was written as files."""

    ref: str
    """As in URLs, without ``@``."""
    snapshot_id: SnapshotId
    written: int
    """Documents and chunks."""
    kept: int
    """Chunks that were there already, with the same bytes."""
    deleted: int
    """Files of an earlier snapshot."""


@dataclass(frozen=True, slots=True)
class Published:
    """The result of `publish_static`."""

    refs: tuple[PublishedRef, ...]
    bytes_written: int


async def publish_static(
    repository: Repository,
    destination: Location,
    *,
    refs: Collection[str] = ("main",),
    storage_options: Mapping[str, object] | None = None,
    consolidated: bool = True,
    progress: ProgressCallback | None = None,
) -> Published:
    """Write branches, tags and snapshots as plain Zarr with a page each, for a file server.

    The files are what `app` serves, under the same paths: ``@branch.main/air/c/0/0``. Published
    again, a branch that moved costs what changed: chunks that are there with the same bytes are
    not written, and those that the new snapshot lacks are deleted.

    Args:
        repository: an open repository.
        destination: a path, a URL or an open storage: empty, or with files that this function
            wrote. It is not written to conditionally, so publish from one process at a time.
        refs: names of branches and tags, ids of snapshots, or any of them as in URLs
            (``branch.v1`` if there is a tag of this name as well).
        storage_options: the backend's options, if ``destination`` is a path or URL.
        consolidated: see `app`.
        progress: called with the number of chunks looked at.

    Raises:
        NotFoundError: a ref does not exist; nothing was written.
        InvalidInputError: no refs, a name with a slash, which a file server reads as folders, or
            a node where the page is to be; nothing was written.
        RepositoryExistsError: the destination holds files of others; nothing was written.
        UnsafeStorageError: it cannot be written or listed; nothing was written.
        FormatError: its note is damaged; nothing was written.
        VirtualChunkError: a virtual chunk cannot be read.

    Cost: a request to read and one to write for each chunk that is written, and the manifests.
    Memory: 32 chunks, and the keys of one ref.

    Cancellation, and any error amid writing: the refs written so far are whole, one may be a
    mixture of two snapshots; publish again to mend it. Readers of a branch see such a mixture
    while it is updated; tags and snapshots have none.
    """
    # Snapshots are fixed before anything is written: a branch may move meanwhile.
    found = await _find(repository, refs)
    await _check_page_is_free(repository, found)
    request = Request(destination, dict(storage_options or {}), repository.config, {})
    async with open_limited(request) as storage:
        work = _Publication(repository, storage, found, consolidated, progress or no_progress)
        await work.begin()
        done = [await work.publish(ref, snapshot_id) for ref, snapshot_id in found.items()]
        await work.write_index()
        return Published(tuple(done), work.bytes_written)


async def _find(repository: Repository, refs: Collection[str]) -> dict[Ref, SnapshotId]:
    """Return the snapshots that refs name, before anything is written."""
    if isinstance(refs, str) or not refs:
        raise InvalidInputError(
            f"refs is a collection of branches, tags and ids of snapshots, not {refs!r}."
        )
    branches, tags = await repository.branches(), await repository.tags()
    found: dict[Ref, SnapshotId] = {}
    for text in refs:
        kind = "branch" if text in branches else "tag" if text in tags else None
        # Names first: a branch may be called like the id of a snapshot.
        ref = parse_ref(text) if kind is None else Ref(kind, text)
        if ref is not None and ref.kind == "snapshot":
            found[ref] = (await repository.lookup_snapshot(ref.name)).id
            continue
        target = None
        if ref is not None:
            target = (branches if ref.kind == "branch" else tags).get(ref.name)
        if ref is None or target is None:
            raise NotFoundError(
                f"{text!r} is not a branch, a tag or the id of a snapshot, so it cannot be "
                "published. Nothing was written.",
                ref=text,
            )
        if "/" in ref.name:
            raise InvalidInputError(
                f"{ref.name!r} cannot be published: a file server takes its slash for a folder. "
                "Publish its snapshot, or a branch or tag without a slash."
            )
        found[ref] = target
    return found


async def _check_page_is_free(repository: Repository, found: Mapping[Ref, SnapshotId]) -> None:
    """Refuse a snapshot with a node of the page's name: a folder and a file of one name."""
    for ref, snapshot_id in found.items():
        session = await repository.readonly_session(snapshot_id=snapshot_id)
        if session.workspace.node(f"/{PAGE}") is not None:
            raise InvalidInputError(
                f"{str(ref)!r} cannot be published: it has a node '/{PAGE}', and the page of the "
                "snapshot is a file of this name. Move the node (Session.move), or serve the "
                "repository. Nothing was written.",
                path=f"/{PAGE}",
            )


@dataclass(slots=True)
class _Publication:
    repository: Repository
    storage: Storage
    targets: Mapping[Ref, SnapshotId]
    """The snapshots to publish."""
    consolidated: bool
    progress: ProgressCallback
    note: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    """The snapshot of each ref; None while it is written."""
    bytes_written: int = 0
    looked_at: int = 0
    written: int = 0
    kept: int = 0

    async def begin(self) -> None:
        """Read the note; refuse files of others."""
        url = self.storage.description.url
        for name in ("writable", "listing"):
            if not getattr(self.storage.capabilities, name):
                raise UnsafeStorageError(
                    f"Files cannot be published at {url!r}: the storage is not "
                    f"{name if name == 'writable' else 'able to list'}.",
                    missing=[name],
                )
        try:
            noted = bytes((await self.storage.get(NOTE)).data)
        except ObjectNotFoundError:
            first = await self._first_key()
            if first is not None:
                raise RepositoryExistsError(
                    f"Files cannot be published at {url!r}: {first!r} is there, which was not "
                    "published. Give an empty location.",
                    url=url,
                ) from None
            await self._write_note()
        else:
            self.note = _read_note(noted, url)

    async def _first_key(self) -> str | None:
        listed = self.storage.list_prefix()
        async with closing(listed):
            async for entry in listed:
                if isinstance(entry, ObjectInfo):
                    return entry.key
        return None

    async def _write_note(self) -> None:
        await self.storage.put(NOTE, json.dumps({"refs": self.note}, indent=1).encode())

    async def publish(self, ref: Ref, snapshot_id: SnapshotId) -> PublishedRef:
        """Write one ref: chunks, then documents, the root's last, then the page."""
        session = await self.repository.readonly_session(snapshot_id=snapshot_id)
        before = await self._before(ref)
        # Noted before the first file: after an interruption nobody takes a mixture of two snapshots
        # for one.
        self.note[str(ref)] = None
        await self._write_note()
        self.written = self.kept = 0
        contents = Contents(self.repository, refresh_seconds=0, consolidated=self.consolidated)
        folder = f"@{ref}/"
        keys = await self._write_contents(contents, session, before, folder)
        page = await snapshot_page(self.repository, session, ref, self._link)
        await self._put(folder + PAGE, page.encode())
        # After documents: readers of the new ones need none of what is deleted.
        deleted = await self._delete_others(folder, {*keys, PAGE})
        await self.storage.sync()
        self.note[str(ref)] = str(snapshot_id)
        await self._write_note()
        return PublishedRef(str(ref), snapshot_id, self.written, self.kept, deleted)

    def _link(self, snapshot_id: SnapshotId) -> str | None:
        """Return where another snapshot is, if it is published, or is about to be."""
        for ref, target in (self._noted() | dict(self.targets)).items():
            if target == snapshot_id:
                return f"../{ref.segment}/"
        return None

    def _noted(self) -> dict[Ref, SnapshotId]:
        """Return the refs that are whole."""
        return {
            ref: SnapshotId.parse(noted)
            for name, noted in self.note.items()
            if noted is not None and (ref := parse_ref(name)) is not None
        }

    async def _before(self, ref: Ref) -> Session | None:
        """Return a session on the published snapshot; None unless it is whole and still there."""
        noted = self.note.get(str(ref))
        if noted is None:
            return None
        try:
            return await self.repository.readonly_session(snapshot_id=noted)
        except NotFoundError:  # it expired, and was collected
            return None

    async def _write_contents(
        self, contents: Contents, session: Session, before: Session | None, folder: str
    ) -> list[str]:
        """Write chunks and documents that are not there; return the keys of all."""
        keys: list[str] = []
        documents: list[str] = []
        batch: list[str] = []

        async def write(key: str) -> None:
            await self._write(contents, session, before, folder, key)

        async def write_batch() -> None:
            await bounded_map(write, batch, limit=_AT_ONCE)
            self.looked_at += len(batch)
            self.progress(Progress("writing chunks", self.looked_at))
            batch.clear()

        async for key in session.store.list():
            keys.append(key)
            if key.rpartition("/")[2] == _DOCUMENT:
                documents.append(key)
                continue
            batch.append(key)
            if len(batch) == _PAGE_KEYS:
                await write_batch()
        await write_batch()
        await self.storage.sync()
        # From the deepest: a group that names others is written once they are there, and the root
        # last of all.
        for depth in sorted({key.count("/") for key in documents}, reverse=True):
            level = [key for key in documents if key.count("/") == depth]
            await bounded_map(write, level, limit=_AT_ONCE)
        return keys

    async def _write(
        self, contents: Contents, session: Session, before: Session | None, folder: str, key: str
    ) -> None:
        found = await contents.find(session, key)
        if found is None:
            return
        # Two ETags of equal places mean equal bytes, so that the file is right without reading
        # either.
        if before is not None and found.etag is not None and found.media_type == CHUNK:
            old = await contents.find(before, key)
            if old is not None and old.etag == found.etag:
                self.kept += 1
                return
        await self._put(folder + key, await found.read(0, found.size_bytes))
        self.written += 1

    async def _put(self, key: str, data: bytes) -> None:
        await self.storage.put(key, data)
        self.bytes_written += len(data)

    async def _delete_others(self, folder: str, keys: set[str]) -> int:
        """Delete files of a ref that its snapshot does not have."""
        listed = self.storage.list_prefix(folder)
        async with closing(listed):
            found = [it.key async for it in listed if isinstance(it, ObjectInfo)]
        # Listed, not compared with the snapshot before: an interrupted publication left files that
        # no note names.
        doomed = [key for key in found if key[len(folder) :] not in keys]
        for failure in await self.storage.delete(doomed):
            raise failure.error
        return len(doomed)

    async def write_index(self) -> None:
        """Write the page above all refs, of those that are whole."""
        page = index_page("Icechunk repository", self._noted())
        await self._put(PAGE, page.encode())
        await self.storage.sync()


def _read_note(data: bytes, url: str) -> dict[str, str | None]:
    damaged = FormatError(
        f"{NOTE!r} at {url!r} is damaged, so that files of others cannot be told from published "
        "ones. Publish to an empty location."
    )
    try:
        document: Any = json.loads(data)
        refs = cast("dict[str, Any]", document["refs"])
        known = [parse_ref(name) for name in refs]
        ids = {
            name: None if noted is None else str(SnapshotId.parse(noted))
            for name, noted in refs.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged from error
    if None in known:
        raise damaged
    return ids
