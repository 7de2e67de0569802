"""Storages that break, count or interfere, and looking at copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async import Packing, Repository, RepositoryConfig
from icechunk_async.config import LocalFileSystemStore, VirtualChunkContainer
from icechunk_async.credentials import LocalFileSystemAccess
from icechunk_async.errors import RepositoryNotFoundError, StorageUnavailableError
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import group_document, make_array, objects, read, write
from tests.unit.engine.upkeep.upkeep_tools import read_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from icechunk_async.storage import Storage

    type Shown = dict[str, dict[str, bytes | None]]

__all__ = [
    "MARK",
    "Breaking",
    "Busy",
    "Counting",
    "contents_of",
    "make_origin",
    "open_with_access",
    "prefixes",
    "shown_by",
    "stored",
]

MARK = "copies/state.json"


class Breaking(WrappedStorage):
    """A storage that is lost after a number of writes: every later request fails."""

    writes_left = 10**9

    async def before(self, operation: str, key: str) -> None:
        """Fail, or count."""
        del key
        if operation in ("put", "delete", "copy"):
            self.writes_left -= 1
        if self.writes_left < 0:
            raise StorageUnavailableError("the process was killed")


class Counting(WrappedStorage):
    """Counts requests by operation."""

    def __init__(self, storage: Storage) -> None:
        """Begin with none."""
        super().__init__(storage)
        self.requests: list[tuple[str, str]] = []

    async def before(self, operation: str, key: str) -> None:
        """Count."""
        self.requests.append((operation, key))


class Busy(WrappedStorage):
    """A storage that runs other work when an operation reaches a key."""

    def __init__(
        self, storage: Storage, at: tuple[str, str], work: Callable[[], Awaitable[object]]
    ) -> None:
        """Run ``work`` once, before the first operation ``at[0]`` on keys that begin so."""
        super().__init__(storage)
        self._at = at
        self._work: Callable[[], Awaitable[object]] | None = work

    async def before(self, operation: str, key: str) -> None:
        """Run the other work."""
        wanted, prefix = self._at
        if self._work is not None and operation == wanted and key.startswith(prefix):
            work, self._work = self._work, None
            await work()


async def stored(storage: Storage) -> dict[str, bytes]:
    """Return all objects but the note of the copies."""
    found = {key: bytes(data) for key, data in (await objects(storage)).items()}
    found.pop(MARK, None)
    return found


def prefixes(origin: Path) -> tuple[str, str]:
    """Return the containers of an origin and of its sources, which readers authorize."""
    return f"{origin.as_uri()}/", f"{(origin.parent / 'sources').as_uri()}/"


async def make_origin(place: Path, spec: int, *, sums: bool | None = None) -> Path:
    """Make a repository on disk with chunks of every kind, and nodes that come, go and move.

    Returns:
        Its directory. Virtual chunks are in a directory beside it.
    """
    sources, root = place / "sources", place / "origin"
    sources.mkdir(parents=True)
    (sources / "file").write_bytes(bytes(range(200)))
    prefix = f"{sources.as_uri()}/"
    container = VirtualChunkContainer(prefix, LocalFileSystemStore(str(sources)), "sources")
    config = RepositoryConfig(
        virtual_chunk_containers=(container,), inline_chunk_threshold_bytes=100
    )
    create = Repository.create(
        root,
        storage_options={"durability": "none"},
        spec_version=spec,
        config=config,
        packing=Packing(4000, 900),
        sums=sums,
        authorize_virtual_chunk_access={prefix: LocalFileSystemAccess()},
    )
    async with create as repository:
        session = await repository.writable_session("main")
        for group in ("", "g/", "g/deep/", "other/"):
            await write(session, f"{group}zarr.json", group_document(name=group))
        for name in ("g/a", "g/deep/b", "other/c"):
            await make_array(session, name, (8,), (1,))
            await write(session, f"{name}/c/0", name[-1].encode() * 2000)  # an object for it alone
            await write(session, f"{name}/c/1", name[-1].encode() * 700)  # shares one
            await write(session, f"{name}/c/2", name[-1].encode() * 50)  # in the manifest
            session.store.set_virtual_ref(f"{name}/c/3", "vcc://sources/file", offset=10, length=20)
        await session.commit("first", metadata={"by": "me"})
        await repository.create_branch("side", await repository.lookup_branch("main"))
        session = await repository.writable_session("main")
        await write(session, "g/a/c/4", b"4" * 1500)
        await write(session, "other/c/c/4", b"4" * 1500)
        await session.store.delete("g/a/c/1")
        await repository.create_tag("v1", await session.commit("second"))
        if spec > 1:
            moving = await repository.rearrange_session("main")
            await moving.move("/g/deep", "/other/deep")
            await moving.move("/other/c", "/g/c")
            await moving.commit("moved")
        session = await repository.writable_session("main")
        await session.store.delete("g/a/zarr.json")
        await write(session, "g/zarr.json", group_document(name="again"))
        await write(session, "other/zarr.json", group_document(name="other again"))
        await session.commit("third")
        session = await repository.writable_session("side")
        await write(session, "g/a/c/5", b"5" * 800)
        await session.commit("on the side")
    return root


def open_with_access(
    location: Path | str | Storage, *prefixes: str
) -> AbstractAsyncContextManager[Repository]:
    """Open a repository whose virtual chunks are in directories."""
    access = {it: LocalFileSystemAccess() for it in prefixes}
    return Repository.open(location, authorize_virtual_chunk_access=access)


async def contents_of(repository: Repository) -> Shown:
    """Return every key of every snapshot that refs lead to, and see that diffs can be made."""
    found: Shown = {}
    for tip in {**await repository.branches(), **await repository.tags()}.values():
        line = [it.id async for it in repository.ancestry(snapshot_id=tip)]
        if len(line) > 1:
            await repository.diff(from_snapshot_id=line[-1], to_snapshot_id=tip)
        for snapshot_id in line:
            session = await repository.readonly_session(snapshot_id=snapshot_id)
            found[str(snapshot_id)] = {
                key: await read(session, key) async for key in session.store.list()
            }
    return found


async def shown_by(url: str, *prefixes: str) -> dict[str, dict[str, bytes | None]]:
    """Return all that a copy shows; nothing if there is no repository yet."""
    try:
        if not prefixes:
            return await read_all(url)
        async with open_with_access(url, *prefixes) as repository:
            return await contents_of(repository)
    except RepositoryNotFoundError:
        return {}
