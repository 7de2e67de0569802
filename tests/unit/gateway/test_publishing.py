"""Files for a file server: what a gateway serves, under the same paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    NotFoundError,
    RepositoryExistsError,
    VirtualAccessError,
)
from icechunk_async.gateway import app, publish_static
from icechunk_async.storage import open_storage
from icechunk_async.testing.latency import LatencyStorage
from icechunk_async.testing.wrapping import WrappedStorage
from tests.helpers import group_document, make_array, memory_url, objects, write
from tests.unit.gateway.client import ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from icechunk_async.storage import Storage
    from tests.unit.gateway.conftest import Served


@pytest.fixture
async def destination() -> AsyncIterator[LatencyStorage]:
    """Open an empty storage that counts."""
    async with open_storage(memory_url()) as storage:
        yield LatencyStorage(storage, seconds=0)


async def test_files_are_what_is_served(served: Served, destination: LatencyStorage) -> None:
    """Each file, of a branch, a tag and a snapshot, has the bytes of the gateway's reply."""
    first = str(served.first)
    done = await publish_static(
        served.repository, destination, refs=["main", "tag.v1", first.lower()]
    )
    assert [it.ref for it in done.refs] == ["branch.main", "tag.v1", first]
    gateway = app(served.repository)
    files = await objects(destination)
    assert done.bytes_written == sum(map(len, files.values())) - len(files["icechunk-static.json"])
    for ref in ("branch.main", "tag.v1", first):
        for key in ("zarr.json", "g/zarr.json", "air/c/0", "g/small/c/0", "v/c/0", "v/c/1"):
            answer = await ask(gateway, f"/@{ref}/{key}")
            assert files.pop(f"@{ref}/{key}") == answer.body, key
    assert b"../@tag.v1/" in files["@branch.main/index.html"]
    assert b"./@tag.v1/" in files["index.html"]
    assert set(files) == {
        "icechunk-static.json",
        "index.html",
        "@branch.main/g/small/c/1",
        *(
            f"@{ref}/{key}"
            for ref in ("branch.main", "tag.v1", first)
            for key in ("air/zarr.json", "g/small/zarr.json", "v/zarr.json", "index.html")
        ),
    }


async def test_a_branch_that_moved_costs_what_changed(
    served: Served, destination: LatencyStorage
) -> None:
    """Chunks with the same bytes are not written; what is gone is deleted."""
    await publish_static(served.repository, destination)
    session = await served.repository.writable_session("main")
    await session.store.delete("v/zarr.json")
    await session.store.delete("g/small/c/0")
    await write(session, "g/small/c/1", b"WXYZ")
    await make_array(session, "g/new", (4,), (4,))
    await session.commit("third")
    destination.forget()
    served.storage.forget()
    done = await publish_static(served.repository, destination)
    (ref,) = done.refs
    assert (ref.written, ref.kept, ref.deleted) == (6, 1, 4)  # five documents and a chunk
    assert ("put", "@branch.main/air/c/0") not in destination.log
    reads = [key for _, key in served.storage.log if key.startswith("chunks/")]
    assert len(reads) == 1  # for the picture on the page
    files = await objects(destination)
    assert files["@branch.main/g/small/c/1"] == b"WXYZ"
    assert "@branch.main/g/new/zarr.json" in files
    assert not {"@branch.main/g/small/c/0", "@branch.main/v/c/0"} & set(files)
    again = await publish_static(served.repository, destination)
    assert again.refs[0].kept == 2


async def test_documents_come_after_chunks_and_the_root_last(
    served: Served, destination: LatencyStorage
) -> None:
    """A reader who finds the root's document finds all that it tells of."""
    await publish_static(served.repository, destination, refs=["v1"])
    written = [key for verb, key in destination.log if verb == "put" and key.startswith("@tag.v1/")]
    documents = [key for key in written if key.endswith("zarr.json")]
    assert written[-len(documents) - 1 : -1] == documents
    assert documents[-1] == "@tag.v1/zarr.json"
    assert written[-1] == "@tag.v1/index.html"


class Full(WrappedStorage):
    """Fails after some writes."""

    def __init__(self, storage: Storage, left: int) -> None:
        super().__init__(storage)
        self.left = left

    async def before(self, operation: str, key: str) -> None:
        """Count writes."""
        if operation == "put":
            self.left -= 1
            if self.left < 0:
                raise PermissionError("full")


@pytest.mark.parametrize("left", range(11))
async def test_what_was_interrupted_is_mended(
    served: Served, destination: LatencyStorage, left: int
) -> None:
    """Wherever it ended, publishing again writes all files as if it had never been."""
    await publish_static(served.repository, destination, refs=["v1", "main"])
    session = await served.repository.writable_session("main")
    await write(session, "g/small/c/0", b"ABCD")
    await session.commit("third")
    with pytest.raises(PermissionError):
        await publish_static(served.repository, Full(destination, left), refs=["main"])
    await publish_static(served.repository, destination, refs=["main"])
    async with open_storage(memory_url()) as fresh:
        await publish_static(served.repository, fresh, refs=["v1", "main"])
        expected, found = await objects(fresh), await objects(destination)
    assert found == expected


async def test_files_of_others_are_not_touched(served: Served, destination: LatencyStorage) -> None:
    """Nor is a repository, or a place with a note that is damaged; nothing is written."""
    with pytest.raises(RepositoryExistsError, match="was not published"):
        await publish_static(served.repository, served.storage)
    await destination.put("somebody's", b"file")
    with pytest.raises(RepositoryExistsError, match="somebody's"):
        await publish_static(served.repository, destination)
    for damaged in (b"", b"[]", b'{"refs": 3}', b'{"refs": {"x": null}}', b"[" * 99_999):
        await destination.put("icechunk-static.json", damaged)
        with pytest.raises(FormatError, match="damaged"):
            await publish_static(served.repository, destination)
    assert set(await objects(destination)) == {"somebody's", "icechunk-static.json"}


async def test_wrong_refs_are_refused_before_anything_is_written(
    served: Served, destination: LatencyStorage
) -> None:
    """Each in a sentence."""
    await served.repository.create_branch("a/b", served.first)
    for refs, error, words in [
        (["main", "none"], NotFoundError, "'none' is not a branch"),
        (["main", "tag.none"], NotFoundError, "'tag.none'"),
        (["main", "1CECHNKREP0F1RSTCMX0"], NotFoundError, "1CECHNKREP0F1RSTCMX0"),
        (["main", "a/b"], InvalidInputError, "slash"),
        ([], InvalidInputError, "refs"),
        ("main", InvalidInputError, "refs"),
    ]:
        with pytest.raises(error, match=words):
            await publish_static(served.repository, destination, refs=refs)
    assert await objects(destination) == {}


async def test_a_node_in_the_place_of_the_page_is_refused_before_anything_is_written(
    served: Served, tmp_path: Path
) -> None:
    """On a disk a folder and a file cannot share a name; deeper down it may be called so."""
    session = await served.repository.writable_session("main")
    await write(session, "g/index.html/zarr.json", group_document())
    await session.commit("below")
    await publish_static(served.repository, tmp_path / "site")
    session = await served.repository.writable_session("main")
    await write(session, "index.html/zarr.json", group_document())
    await session.commit("in the way")
    with pytest.raises(InvalidInputError, match=r"'branch\.main'.*'/index\.html'.*Move the node"):
        await publish_static(served.repository, tmp_path / "other", refs=["v1", "main"])
    assert not (tmp_path / "other").exists()


async def test_a_source_that_may_not_be_read_is_told(
    served: Served, destination: LatencyStorage
) -> None:
    """And the ref is not listed as if it were whole."""
    async with served.repository.reopen(authorize_virtual_chunk_access={}) as other:
        with pytest.raises(VirtualAccessError):
            await publish_static(other, destination)
    assert "index.html" not in await objects(destination)
    await publish_static(served.repository, destination)
    assert "index.html" in await objects(destination)
