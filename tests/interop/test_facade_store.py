"""The facade's store does what the official one does, script by script."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from tests.interop.scripts import same

if TYPE_CHECKING:
    from pathlib import Path

_BEGIN = """
config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=8)
url = "file://" + SOURCE + "/"
config.set_virtual_chunk_container(
    icechunk.VirtualChunkContainer(url, icechunk.local_filesystem_store(SOURCE))
)
repository = icechunk.Repository.create(
    icechunk.local_filesystem_storage(place),
    config,
    {url: icechunk.credentials.LocalFileSystemAccess},
    spec_version=SPEC,
)
session = repository.writable_session("main")
store = session.store
root = zarr.group(store)
plain = {"dtype": "u1", "compressors": None, "filters": None}
root.create_array("a", shape=(4, 6), chunks=(2, 3), **plain)[:2] = 7
root.create_array("long", shape=(40,), chunks=(20,), **plain)[:] = 5

def wait(work):
    async def run():
        return await work
    return asyncio.run(run())

def keys(items):
    async def run():
        return sorted([item async for item in items])
    return asyncio.run(run())
"""


@pytest.fixture(params=[1, 2])
def spec(request: pytest.FixtureRequest) -> int:
    """A version of the format."""
    return int(request.param)


def _same(script: str, tmp_path: Path, spec: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "data").write_bytes(bytes(range(100)))
    begin = _BEGIN.replace("SPEC", str(spec)).replace("SOURCE", repr(str(source)))
    same(begin + inspect.cleandoc(script), tmp_path)


def test_a_store_tells_zarr_the_same_abilities(tmp_path: Path, spec: int) -> None:
    """As it tells Zarr."""
    script = """
    for each in (store, repository.readonly_session("main").store, store.with_read_only(True)):
        show(each.supports_writes, each.supports_deletes, each.supports_listing)
        show(each.supports_partial_writes, each.supports_consolidated_metadata, each.read_only)
    show(store.with_read_only(True) == store, store.with_read_only(False).read_only)
    """
    _same(script, tmp_path, spec)


def test_the_same_documents_and_chunks_are_read(tmp_path: Path, spec: int) -> None:
    """Documents, inline and native chunks, and parts of them."""
    script = """
    show(wait(store.get("a/c/0/0", prototype)), wait(store.get("long/c/1", prototype)))
    show(wait(store.get("a/c/1/1", prototype)), wait(store.get("nothing/zarr.json", prototype)))
    show(wait(store.get("nothing/c/0", prototype)), wait(store.get("a/c/9/9", prototype)))
    for part in (RangeByteRequest(2, 5), OffsetByteRequest(15), SuffixByteRequest(3)):
        show(wait(store.get("long/c/0", prototype, part)))
        show(wait(store.get_partial_values(prototype, [("a/c/0/1", None), ("long/c/1", part)])))
    attempt(lambda: wait(store.get("nonsense", prototype)))
    attempt(lambda: wait(store.get("a/c/x", prototype)))
    show([wait(store.exists(key)) for key in ("zarr.json", "a/c/0/0", "a/c/1/1", "no/zarr.json")])
    show([wait(store.getsize(key)) for key in ("a/c/0/0", "long/c/0")])
    show(wait(store.getsize_prefix("a")) - wait(store.getsize("a/zarr.json")))
    show(wait(store.getsize_prefix("long")) - wait(store.getsize("long/zarr.json")))
    show(wait(store.is_empty("")), wait(store.is_empty("a")), wait(store.is_empty("nothing")))
    """
    _same(script, tmp_path, spec)


def test_the_same_keys_are_listed(tmp_path: Path, spec: int) -> None:
    """Asynchronously, and in a plain loop."""
    script = """
    show(keys(store.list()), sorted(store.list()))
    for prefix in ("", "/", "a", "a/", "long"):
        show(keys(store.list_prefix(prefix)), sorted(store.list_prefix(prefix)))
    for prefix in ("", "a", "a/", "a/c", "a/c/0", "nothing"):
        show(keys(store.list_dir(prefix)), sorted(store.list_dir(prefix)))

    async def closing():
        items = store.list()
        await anext(items)
        await items.aclose()
        return [item async for item in items]

    show(wait(closing()))
    """
    _same(script, tmp_path, spec)


def test_the_same_values_are_stored_and_the_same_writes_refused(tmp_path: Path, spec: int) -> None:
    """Both store the same values and refuse the same writes."""
    script = """
    wait(store.set("a/c/1/1", buffer(b"x" * 6)))
    show(wait(store.get("a/c/1/1", prototype)))
    wait(store.set_if_not_exists("a/c/1/1", buffer(b"y" * 6)))
    wait(store.set_if_not_exists("a/c/1/0", buffer(b"z" * 6)))
    show(wait(store.get("a/c/1/1", prototype)), wait(store.get("a/c/1/0", prototype)))
    attempt(lambda: wait(store.set("nonsense", buffer(b"x"))))
    attempt(lambda: wait(store.set("a/c/9/9", buffer(b"x"))))
    attempt(lambda: wait(store.set("a/c/0/0", buffer(b""))))
    attempt(lambda: wait(store.set("nothing/c/0", buffer(b"x"))))
    attempt(lambda: wait(store.set("zarr.json", buffer(b"{}"))))
    attempt(lambda: wait(store.set("a/c/0/0", b"bytes")))
    attempt(lambda: wait(store.set_partial_values([("a/c/0/0", 0, b"x")])))
    readonly = repository.readonly_session("main").store
    attempt(lambda: wait(readonly.set("zarr.json", buffer(b"x"))))
    wait(store.delete("a/c/1/1"))
    show(wait(store.exists("a/c/1/1")))
    wait(store.delete("a/c/1/1"))
    wait(store.delete_dir("long"))
    show(sorted(store.list()))
    wait(store.clear())
    show(sorted(store.list()))
    zarr.group(store)
    store.sync_clear()
    show(sorted(store.list()))
    """
    _same(script, tmp_path, spec)


def test_virtual_references_are_set_and_refused_alike(tmp_path: Path, spec: int) -> None:
    """One, many, and whole arrays; with what no container covers."""
    script = """
    data = url + "data"
    store.set_virtual_ref("a/c/0/0", data, offset=10, length=6)
    wait(store.set_virtual_ref_async("a/c/0/1", data, offset=20, length=6))
    show(root["a"][:2], session.chunk_type("/a", (0, 0)))
    attempt(lambda: store.set_virtual_ref("a/c/0/0", "s3://b/c", offset=0, length=6))
    attempt(lambda: store.set_virtual_ref("a/c/0/0", "nonsense", offset=0, length=6))
    attempt(lambda: store.set_virtual_ref("a/c/9/9", data, offset=0, length=6))
    attempt(lambda: store.set_virtual_ref("nothing/c/0", data, offset=0, length=6))
    attempt(lambda: store.set_virtual_ref("a/c/0/0", data, offset=0, length=0))
    store.set_virtual_ref("a/c/0/0", "s3://b/c", offset=0, length=6, validate_container=False)
    attempt(lambda: root["a"][0, 0])
    Spec = icechunk.VirtualChunkSpec
    chunks = [Spec([0, 0], data, 30, 6), Spec([1, 0], "s3://b/c", 0, 6), Spec([1, 1], data, 40, 6)]
    show(store.set_virtual_refs("a", chunks), root["a"][:])
    show(store.set_virtual_refs("a", chunks[:1]), store.set_virtual_refs("a", []))
    show(wait(store.set_virtual_refs_async("/a", chunks[1:])))
    attempt(lambda: store.set_virtual_refs("nothing", chunks))
    attempt(lambda: store.set_virtual_refs("a", [Spec([9, 0], data, 0, 6)]))
    INVALID = "InvalidInputError"  # which is a ValueError
    offsets, lengths = np.arange(0, 40, 10, dtype="u8"), np.full(4, 6, "u8")
    places = [data, "", "s3://b/c", data]
    show(store.set_virtual_refs_arr("a", (2, 2), places, offsets, lengths), root["a"][:2, 3:])
    one = np.array([50], "u8"), np.array([6], "u8")
    show(store.set_virtual_refs_arr("a", (1, 1), [data], *one, arr_offset=(1, 0)), root["a"][2:])
    show(wait(store.set_virtual_refs_arr_async("a", (1, 1), ["s3://b/c"], *one, arr_offset=(1, 1))))
    attempt(lambda: store.set_virtual_refs_arr("a", (2, 2), [data], offsets, lengths), INVALID)
    attempt(lambda: store.set_virtual_refs_arr("a", (1, 1), [data], *one, arr_offset=(9, 0)))
    show(sorted(session.all_virtual_chunk_locations()))
    session.commit("virtual")
    show(zarr.open_array(repository.readonly_session("main").store, path="a", mode="r")[:])
    """
    _same(script, tmp_path, spec)


def test_access_without_credentials_is_deprecated(tmp_path: Path, spec: int) -> None:
    """The warning points to the caller, who may name them."""
    script = """
    import warnings
    storage = icechunk.local_filesystem_storage(place)
    access = {url: None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        icechunk.Repository.open(storage, authorize_virtual_chunk_access=access)
        repository.reopen(authorize_virtual_chunk_access=access)
        wait(icechunk.Repository.open_or_create_async(storage, None, access))
        found = [it for it in caught if it.category is DeprecationWarning]
    show(len(found), [(it.filename, "LocalFileSystemAccess" in str(it.message)) for it in found])
    """
    _same(script, tmp_path, spec)


def test_access_without_the_slash_at_the_end(tmp_path: Path, spec: int) -> None:
    """It opens the container, reads alike, and is shown unchanged."""
    script = """
    store.set_virtual_ref("a/c/1/1", url + "data", offset=10, length=6)
    session.commit("chunks")
    access = {url.rstrip("/"): icechunk.credentials.LocalFileSystemAccess}
    other = icechunk.Repository.open(
        icechunk.local_filesystem_storage(place), authorize_virtual_chunk_access=access
    )
    show([it + "/" == url for it in other.authorized_virtual_container_prefixes])
    show(zarr.open_array(other.readonly_session("main").store, path="a", mode="r")[2:, 3:])
    """
    _same(script, tmp_path, spec)


def test_chunks_have_the_same_columns(tmp_path: Path, spec: int) -> None:
    """Coordinates, kinds, places, first bytes, lengths, inline bytes."""
    script = """
    store.set_virtual_ref("a/c/1/1", url + "data", offset=10, length=6)
    session.commit("chunks")
    store = repository.writable_session("main").store

    async def columns(path):
        rows = []
        async for batch in store.array_chunk_iterator(path):
            coords, kinds, places, offsets, lengths, inlined = batch
            show(str(coords.dtype), str(kinds.dtype), str(offsets.dtype), str(lengths.dtype))
            for row in range(len(coords)):
                place = places[row] if kinds[row] == 2 else ""
                rows.append((coords[row].tolist(), int(kinds[row]), place, int(offsets[row]),
                             int(lengths[row]), inlined.get(row)))
        return sorted(rows)

    show(wait(columns("/a")))
    show(wait(columns("/long")))
    """
    _same(script, tmp_path, spec)
