"""Contents of a repository for a gateway: documents and chunks, each with a lasting name.

A snapshot never changes, so what was found in one is kept. Branches and tags are looked up anew
after a short time.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final, cast

import anyio.to_thread

from icechunk_async._runtime import clock
from icechunk_async._runtime.concurrency import SingleFlight
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async._runtime.weighted_cache import WeightedCache
from icechunk_async.engine.tree.workspace import read_native
from icechunk_async.errors import InvalidObjectKeyError, InvalidStoreKeyError, NotFoundError
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.paths import ancestors
from icechunk_async.gateway.page import index_page, snapshot_page
from icechunk_async.gateway.requests import Ref
from icechunk_async.zarr.keys import ChunkKey, MetadataKey, parse_key

if TYPE_CHECKING:
    from icechunk_async import Repository, Session
    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

__all__ = ["CHUNK", "DOCUMENT", "PAGE_TYPE", "Contents", "Found", "consolidated_document"]

DOCUMENT: Final = "application/json"
PAGE_TYPE: Final = "text/html; charset=utf-8"
CHUNK: Final = "application/octet-stream"
# Each holds a snapshot: of large hierarchies some megabytes.
_SESSIONS: Final = 64
# Strangers choose the names, and names that do not exist are kept as well.
_REFS: Final = 1024
_DOCUMENTS_BYTES: Final = 32 << 20
_LARGEST_BYTES: Final = 8 << 20
"""Of all documents of a group together; a reader of more asks for them one by one."""
_MOST_NODES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Found:
    """A document or a chunk: its name, and where its bytes are."""

    size_bytes: int
    media_type: str
    etag: str | None
    """Strong: with the same one the bytes are the same. None: nothing guards the bytes."""
    data: bytes | None = None
    """The bytes, if they are in memory."""
    chunk: tuple[Workspace, ChunkRef, str, Coordinates] | None = None
    """Otherwise where they are."""

    async def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)``, at least one.

        Raises:
            FormatError, VirtualChunkError, StorageError: they cannot be read.

        Cost: one request, unless they are in memory.
        """
        if self.data is not None:
            return self.data if stop - start == len(self.data) else self.data[start:stop]
        assert self.chunk is not None
        workspace, ref, path, coords = self.chunk
        if isinstance(ref, NativeChunk):
            first, last = ref.offset + start, ref.offset + stop
            read = read_native(workspace.assets, ref, first, last, path=path, coords=coords)
            return bytes(await read)
        assert isinstance(ref, VirtualChunk)
        return bytes(await workspace.virtual.read(ref, start, stop))


class Contents:
    """Finds documents and chunks by ref and key."""

    def __init__(
        self, repository: Repository, *, refresh_seconds: float, consolidated: bool
    ) -> None:
        """Look into ``repository``; see `app` for the rest."""
        self.repository = repository
        self._refresh_us = int(refresh_seconds * 1e6)
        self._consolidated = consolidated
        self._sessions: WeightedCache[SnapshotId, Session] = WeightedCache(_SESSIONS)
        # Many readers open a new snapshot at once; one of them loads it.
        self._loading: SingleFlight[SnapshotId, Session] = SingleFlight()
        self._targets: WeightedCache[Ref, tuple[int, SnapshotId | None]] = WeightedCache(_REFS)
        self._looking: SingleFlight[Ref, SnapshotId | None] = SingleFlight()
        self._documents: WeightedCache[tuple[SnapshotId, str], Found] = WeightedCache(
            _DOCUMENTS_BYTES
        )
        self._joining: SingleFlight[tuple[SnapshotId, str], Found] = SingleFlight()

    async def session(self, ref: Ref) -> Session | None:
        """Return a session on the snapshot that a ref names; None if there is no such snapshot.

        Cost: none for a snapshot that was seen lately, and a branch or tag that was looked up in
        the last ``refresh_seconds``; else one request each, and one more for an unknown snapshot.
        """
        snapshot_id = await self._target(ref)
        if snapshot_id is None:
            return None
        session = self._sessions.get(snapshot_id)
        if session is None:
            try:
                session = await self._loading.run(snapshot_id, lambda: self._load(snapshot_id))
            except NotFoundError:
                return None
        return session

    async def _load(self, snapshot_id: SnapshotId) -> Session:
        session = await self.repository.readonly_session(snapshot_id=snapshot_id)
        self._sessions.put(snapshot_id, session, 1)
        return session

    async def _target(self, ref: Ref) -> SnapshotId | None:
        if ref.kind == "snapshot":
            return SnapshotId.parse(ref.name)
        known = self._targets.get(ref)
        if known is not None and clock.elapsed_us() < known[0]:
            return known[1]
        return await self._looking.run(ref, lambda: self._look_up(ref))

    async def _look_up(self, ref: Ref) -> SnapshotId | None:
        # From before the request: what it brings was true then, not when it arrived.
        began = clock.elapsed_us()
        look = self.repository.lookup_tag if ref.kind == "tag" else self.repository.lookup_branch
        try:
            found = await look(ref.name)
        except (NotFoundError, InvalidObjectKeyError):  # in format 1 a name is part of a key
            found = None
        # A name that does not exist is kept as well: each request for it would else be one to the
        # storage.
        self._targets.put(ref, (began + self._refresh_us, found), 1)
        return found

    async def page(self, session: Session, ref: Ref) -> Found:
        """Return the page of a snapshot, for people.

        Cost: see `snapshot_page`; none for a page that was made lately.
        """
        key = session.snapshot_id, f"@{ref}"  # no path of a node begins so

        async def make() -> Found:
            text = await snapshot_page(self.repository, session, ref, lambda it: f"../@{it}/")
            return self._keep(key, text.encode(), PAGE_TYPE)

        return self._documents.get(key) or await self._joining.run(key, make)

    async def index(self) -> Found:
        """Return the page above all refs. Cost: one request each for branches and tags."""
        targets = {
            **{Ref("branch", name): it for name, it in (await self.repository.branches()).items()},
            **{Ref("tag", name): it for name, it in (await self.repository.tags()).items()},
        }
        data = index_page("Icechunk repository", targets).encode()
        return Found(len(data), PAGE_TYPE, _etag(data), data)

    def _keep(self, key: tuple[SnapshotId, str], data: bytes, media_type: str) -> Found:
        found = Found(len(data), media_type, _etag(data), data)
        self._documents.put(key, found, len(data))
        return found

    async def find(self, session: Session, key: str) -> Found | None:
        """Return a document or a chunk; None if there is nothing.

        Cost: none for a document. For a chunk one request for its manifest unless that is cached;
        the chunk itself is not read.
        """
        try:
            parsed = parse_key(key)
        except InvalidStoreKeyError:
            return None
        workspace = session.workspace
        if isinstance(parsed, MetadataKey):
            return await self._document(workspace, parsed.path)
        if not isinstance(parsed, ChunkKey):
            return None
        handle = await workspace.find_chunk(parsed.path, parsed.coords)
        if handle is None:
            return None
        ref = handle.ref
        if isinstance(ref, InlineChunk):
            data = bytes(ref.data)
            return Found(len(data), CHUNK, _etag(data), data)
        # Only where the chunk is: a HEAD, or a client that has it, reads no byte.
        chunk = (workspace, ref, parsed.path, parsed.coords)
        return Found(ref.length, CHUNK, _etag_of(ref), chunk=chunk)

    async def _document(self, workspace: Workspace, path: str) -> Found | None:
        node = workspace.node(path)
        if node is None:
            return None
        if node.array is not None or not self._consolidated:
            return Found(len(node.user_data), DOCUMENT, _etag(node.user_data), node.user_data)
        key = workspace.base.id, path
        found = self._documents.get(key)
        if found is not None:
            return found

        async def join() -> Found:
            # Parsing thousands of documents would keep all other readers waiting.
            data = await anyio.to_thread.run_sync(consolidated_document, workspace, path)
            return self._keep(key, data, DOCUMENT)

        return await self._joining.run(key, join)


def consolidated_document(workspace: Workspace, path: str) -> bytes:
    """Return the document of a group with those of all nodes below it.

    It has the form that Zarr gives consolidated metadata, under the key ``consolidated_metadata``.
    The document is returned as stored if they are too many or too large, if one is no JSON object,
    or if a node lies in no group, which readers of consolidated metadata do not understand.

    Raises:
        FormatError: a node of the snapshot is damaged.
    """
    nodes = workspace.base.nodes
    group = nodes.get(path)
    assert group is not None
    start = "/" if path == "/" else f"{path}/"
    paths = nodes.paths
    below: dict[str, bytes] = {}
    total = len(group.user_data)
    # Paths are sorted, so that those below a group follow each other.
    for number in range(bisect_left(paths, start), len(paths)):
        if not paths[number].startswith(start):
            break
        if paths[number] == "/":
            continue
        node = nodes.get(paths[number])
        assert node is not None
        below[node.path] = node.user_data
        total += len(node.user_data)
        # While collecting: a hierarchy of millions must not be in memory before it is refused.
        if total > _LARGEST_BYTES or len(below) > _MOST_NODES:
            return group.user_data
    inside = {path, *below}
    if any(ancestors(it)[0] not in inside for it in below):
        return group.user_data
    metadata = {it[len(start) :]: _object(data) for it, data in below.items()}
    document = _object(group.user_data)
    if document is None or None in metadata.values():
        return group.user_data
    for member in metadata.values():
        assert member is not None
        member.pop("consolidated_metadata", None)  # somebody's, and perhaps old
    document["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": metadata,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _etag(data: bytes) -> str:
    return f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'


def _etag_of(ref: NativeChunk | VirtualChunk) -> str | None:
    """Return a name of the bytes of a chunk, made of where they are.

    Chunk objects never change. The source of a virtual chunk may, unless the reference guards it:
    then reading fails. So a commit elsewhere leaves the ETags of a branch's chunks unchanged.
    """
    if isinstance(ref, NativeChunk):
        # Offset and length too: several chunks may be in one packed object.
        return f'"{ref.chunk_id}-{ref.offset}-{ref.length}"'
    if ref.etag is None and ref.last_modified is None:
        return None
    return _etag(repr((ref.location, ref.offset, ref.length, ref.etag, ref.last_modified)).encode())
