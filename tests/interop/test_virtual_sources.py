"""Guards and containers across engines: what one records both enforce, on disks and the web."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from icechunk_async import Repository, RepositoryConfig
from icechunk_async.credentials import HttpAccess, LocalFileSystemAccess
from icechunk_async.errors import VirtualChunkError, VirtualSourceChangedError
from icechunk_async.format.config import HttpStore, LocalFileSystemStore, VirtualChunkContainer
from tests.helpers import make_array, write
from tests.interop.theirs import icechunk
from tests.interop.web_files import WebFile, WebFiles, web_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async.credentials import Credential


pytestmark = pytest.mark.sampled

FIRST = pytest.mark.parametrize("first", ["ours", "theirs"])
BODY = bytes(range(200))
LENGTH = 10
MODIFIED = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)

type Guard = str | datetime | None


class Both:
    """One repository with a container, written and read by either engine."""

    def __init__(self, root: Path, prefix: str, kind: str) -> None:
        self.root, self.prefix, self.kind = root, prefix, kind

    async def write(self, engine: str, refs: list[tuple[str, int, Guard]]) -> None:
        """Commit an array whose chunks are these locations, offsets and guards."""
        if engine == "theirs":
            await self._write_theirs(refs)
            return
        store = HttpStore() if self.kind == "http" else LocalFileSystemStore("/")
        container = VirtualChunkContainer(self.prefix, store, name="named")
        config = RepositoryConfig(virtual_chunk_containers=(container,))
        async with Repository.create(self.root, config=config) as repository:
            session = await repository.writable_session("main")
            await make_array(session, "a", (len(refs) * LENGTH,), (LENGTH,))
            for at, (location, offset, guard) in enumerate(refs):
                session.store.set_virtual_ref(
                    f"a/c/{at}", location, offset=offset, length=LENGTH, checksum=guard
                )
            await session.commit("virtual")

    async def _write_theirs(self, refs: list[tuple[str, int, Guard]]) -> None:
        store = (
            icechunk.http_store() if self.kind == "http" else icechunk.local_filesystem_store("/")
        )
        config = icechunk.RepositoryConfig.default()
        config.set_virtual_chunk_container(
            icechunk.VirtualChunkContainer(self.prefix, store, name="named")
        )
        repository = await icechunk.Repository.create_async(
            icechunk.local_filesystem_storage(str(self.root)), config=config
        )
        session = await repository.writable_session_async("main")
        await make_array(session, "a", (len(refs) * LENGTH,), (LENGTH,))
        for at, (location, offset, guard) in enumerate(refs):
            await session.store.set_virtual_ref_async(
                f"a/c/{at}", location, offset=offset, length=LENGTH, checksum=guard
            )
        await session.commit_async("virtual")

    async def change(self, at: int, data: bytes) -> None:
        """Replace a chunk by bytes with our engine, which writes the manifest anew."""
        async with Repository.open(self.root) as repository:
            session = await repository.writable_session("main")
            await write(session, f"a/c/{at}", data)
            await session.commit("changed")

    async def read(self, engine: str, count: int) -> list[bytes | str]:
        """Return each chunk, or ``refused``."""
        if engine == "ours":
            access: Credential = HttpAccess() if self.kind == "http" else LocalFileSystemAccess()
            authorized = {self.prefix: access}
            async with Repository.open(
                self.root, authorize_virtual_chunk_access=authorized
            ) as repository:
                session: Any = await repository.readonly_session("main")
                return [await _chunk(session, at, VirtualChunkError) for at in range(count)]
        name = "HttpAccess" if self.kind == "http" else "LocalFileSystemAccess"
        repository = await icechunk.Repository.open_async(
            icechunk.local_filesystem_storage(str(self.root)),
            authorize_virtual_chunk_access=icechunk.containers_credentials(
                {self.prefix: getattr(icechunk.credentials, name)}
            ),
        )
        session = await repository.readonly_session_async("main")
        return [await _chunk(session, at, icechunk.IcechunkError) for at in range(count)]

    async def locations(self, engine: str) -> list[str]:
        """Return the locations that an engine lists."""
        if engine == "ours":
            async with Repository.open(self.root) as repository:
                session = await repository.readonly_session("main")
                return await session.all_virtual_chunk_locations()
        repository = await icechunk.Repository.open_async(
            icechunk.local_filesystem_storage(str(self.root))
        )
        theirs = await repository.readonly_session_async("main")
        found: list[str] = await theirs.all_virtual_chunk_locations_async()
        return found


async def _chunk(session: Any, at: int, refusal: type[Exception]) -> bytes | str:
    try:
        value = await session.store.get(f"a/c/{at}", default_buffer_prototype())
    except refusal:
        return "refused"
    data: bytes = value.to_bytes()
    return data


@pytest.fixture
def served() -> Iterator[WebFiles]:
    """Serve one file with a name that must be escaped."""
    with web_files() as files:
        files.files["/d/f g%.bin"] = WebFile(BODY)
        yield files


@FIRST
async def test_web_servers_are_read_by_both(first: str, tmp_path: Path, served: WebFiles) -> None:
    """With and without guards, by URL and by name; what changed or is gone is refused by both."""
    both = Both(tmp_path / "repo", f"{served.url}/d/", "http")
    url = f"{both.prefix}f%20g%25.bin"
    guards: list[Guard] = [None, '"first"', "first", MODIFIED, MODIFIED - timedelta(seconds=1)]
    refs = [(url, at, guard) for at, guard in enumerate(guards)]
    refs += [("vcc://named/f%20g%25.bin", 7, None), (f"{both.prefix}gone", 0, None)]
    refs += [(url, 195, None), (url, 300, None)]
    await both.write(first, refs)
    expected: list[bytes | str] = [BODY[at : at + LENGTH] for at in range(4)]
    expected += ["refused", BODY[7 : 7 + LENGTH], "refused", "refused", "refused"]
    for engine in ("ours", "theirs"):
        assert await both.read(engine, len(refs)) == expected, engine
    absolute = [it.replace("vcc://named/", both.prefix) for it, _, _ in refs]
    for engine in ("ours", "theirs"):
        assert await both.locations(engine) == absolute, engine
    later = MODIFIED + timedelta(seconds=1)
    served.files["/d/f g%.bin"] = WebFile(BODY[::-1], '"second"', later)
    expected[1:4] = ["refused"] * 3
    expected[0], expected[5] = BODY[::-1][:LENGTH], BODY[::-1][7 : 7 + LENGTH]
    for engine in ("ours", "theirs"):
        assert await both.read(engine, len(refs)) == expected, engine


@FIRST
@pytest.mark.parametrize("fraction_ns", [0, 1_000, 500_000_000, 999_999_000])
async def test_times_of_local_files_with_fractions_guard_for_both(
    first: str, fraction_ns: int, tmp_path: Path
) -> None:
    """We record whole seconds rounded up, which both accept, and nothing newer than that.

    The official engine rounds down and then refuses what has a fraction. We accept that second,
    also in a manifest that we write anew, and nothing later.
    """
    file = tmp_path / "source" / "f.bin"
    file.parent.mkdir()
    file.write_bytes(BODY)
    _touch(file, fraction_ns)
    both = Both(tmp_path / "repo", f"file://{file.parent}/", "file")
    moment = MODIFIED + timedelta(microseconds=fraction_ns // 1000)
    url = f"{both.prefix}f.bin"
    await both.write(first, [(url, 0, moment), (url, 50, None)])
    good: list[bytes | str] = [BODY[:LENGTH]]
    assert await both.read("ours", 1) == good
    theirs = good if first == "ours" or not fraction_ns else ["refused"]
    assert await both.read("theirs", 1) == theirs
    await both.change(1, bytes(LENGTH))
    assert await both.read("ours", 2) == [*good, bytes(LENGTH)]
    _touch(file, 1_000_000_000 + max(fraction_ns, 1_000))
    for engine in ("ours", "theirs"):
        assert await both.read(engine, 1) == ["refused"], engine


def _touch(file: Path, beyond_ns: int) -> None:
    at = int(MODIFIED.timestamp()) * 10**9 + beyond_ns
    os.utime(file, ns=(at, at))


@FIRST
async def test_etags_of_local_files_guard(first: str, tmp_path: Path) -> None:
    """A file's ETag is what obstore tells; another file, or the same changed, has another.

    The official engine drops the quotes, which are part of it for a local file, and refuses all.
    """
    import obstore
    from obstore.store import LocalStore

    file = tmp_path / "source" / "f.bin"
    file.parent.mkdir()
    file.write_bytes(BODY)
    etag = obstore.head(LocalStore(str(file.parent)), "f.bin")["e_tag"]
    assert etag
    both = Both(tmp_path / "repo", f"file://{file.parent}/", "file")
    refs: list[tuple[str, int, Guard]] = [
        (f"{both.prefix}f.bin", 5, guard) for guard in (etag, etag.strip('"'), f"{etag}0")
    ]
    await both.write(first, refs)
    assert await both.read("ours", 3) == [*[BODY[5:15]] * 2, "refused"]
    assert await both.read("theirs", 3) == ["refused"] * 3
    file.write_bytes(BODY + b"!")
    assert await both.read("ours", 3) == ["refused"] * 3


async def test_a_server_without_ranges_is_read_by_us(tmp_path: Path, served: WebFiles) -> None:
    """It sends all, and we cut it."""
    served.ranges = False
    both = Both(tmp_path / "repo", f"{served.url}/d/", "http")
    url = f"{both.prefix}f%20g%25.bin"
    await both.write("theirs", [(url, 17, '"first"'), (url, 195, None)])
    assert await both.read("ours", 2) == [BODY[17:27], "refused"]


async def test_a_changed_source_is_named(tmp_path: Path, served: WebFiles) -> None:
    """The location is in the message and in the context, however the source was lost."""
    both = Both(tmp_path / "repo", f"{served.url}/d/", "http")
    url = f"{both.prefix}f%20g%25.bin"
    await both.write("theirs", [(url, 0, '"first"')])
    with _changing(served) as kinds:
        for kind in kinds:
            async with Repository.open(
                both.root, authorize_virtual_chunk_access={both.prefix: None}
            ) as repository:
                session = await repository.readonly_session("main")
                with pytest.raises(VirtualSourceChangedError, match=kind) as caught:
                    await session.store.get("a/c/0", default_buffer_prototype())
            assert caught.value.context["location"] == url
            assert url in str(caught.value)


@contextmanager
def _changing(served: WebFiles) -> Iterator[Iterator[str]]:
    def changes() -> Iterator[str]:
        served.files["/d/f g%.bin"] = WebFile(BODY, '"second"')
        yield "has ETag"
        served.files["/d/f g%.bin"] = WebFile(BODY[:5])
        yield "has only 5 bytes"
        del served.files["/d/f g%.bin"]
        yield "is gone"

    yield changes()


@FIRST
async def test_links_of_an_archive_are_followed_by_both(first: str, tmp_path: Path) -> None:
    """Files and folders may be links, out of the container as well."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f.bin").write_bytes(BODY)
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "latest").symlink_to("../real/f.bin")
    (archive / "folder").symlink_to(tmp_path / "real")
    both = Both(tmp_path / "repo", f"file://{archive}/", "file")
    names = ("latest", "folder/f.bin")
    await both.write(first, [(f"{both.prefix}{name}", 3, None) for name in names])
    for engine in ("ours", "theirs"):
        assert await both.read(engine, 2) == [BODY[3:13]] * 2, engine
