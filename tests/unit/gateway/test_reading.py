"""Documents and chunks: their bytes, names, parts and costs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Packing, Repository
from icechunk_async.gateway import app
from tests.helpers import group_document, make_array, memory_url, objects, write
from tests.unit.gateway.client import ask
from tests.unit.gateway.conftest import NATIVE, SOURCE

if TYPE_CHECKING:
    from tests.unit.gateway.conftest import Served


@pytest.mark.parametrize("ref", ["branch.main", "tag.v1", "first"])
async def test_every_ref_serves_documents_and_chunks(served: Served, ref: str) -> None:
    """A branch, a tag and the id of a snapshot; inline, native and virtual chunks."""
    gateway = app(served.repository)
    ref = str(served.first) if ref == "first" else ref
    for key, body in {
        "air/c/0": NATIVE,
        "g/small/c/0": b"abcd",
        "v/c/0": SOURCE[2:12],
        "v/c/1": SOURCE[:10],
    }.items():
        answer = await ask(gateway, f"/@{ref}/{key}")
        assert (answer.status, answer.body) == (200, body), key
    answer = await ask(gateway, f"/@{ref}/air/zarr.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["shape"] == [2048]
    expected = served.tip if ref == "branch.main" else served.first
    assert answer.headers["icechunk-snapshot"] == str(expected)
    second = await ask(gateway, f"/@{ref}/g/small/c/1")
    assert second.status == (200 if ref == "branch.main" else 404)


async def test_chunks_that_share_an_object_are_told_apart() -> None:
    """Whole and in part, with separate ETags, and nothing of a neighbour; nobody is redirected."""
    values = [bytes([number]) * 1024 for number in range(3)]
    async with Repository.create(memory_url(), packing=Packing()) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await make_array(session, "a", (3072,), (1024,))
        for number, value in enumerate(values):
            await write(session, f"a/c/{number}", value)
        await session.commit("packed")
        reader = await repository.readonly_session("main")
        found = [await reader.workspace.find_chunk("/a", (it,)) for it in range(3)]
        assert len({it.ref.chunk_id for it in found}) == 1  # type: ignore[union-attr]
        gateway = app(repository)
        replies = [await ask(gateway, f"/@branch.main/a/c/{number}") for number in range(3)]
        assert [(it.status, it.body) for it in replies] == [(200, value) for value in values]
        assert len({it.headers["etag"] for it in replies}) == 3
        part = await ask(gateway, "/@branch.main/a/c/0", range="bytes=1000-2000")
        assert (part.status, part.body) == (206, values[0][1000:])


async def test_a_group_has_the_documents_below_it(served: Served) -> None:
    """Relative to the group, as Zarr writes consolidated metadata; arrays stay unchanged."""
    gateway = app(served.repository)
    root = (await ask(gateway, "/@branch.main/zarr.json")).json
    assert root["attributes"] == {"title": "all"}
    assert set(root["consolidated_metadata"]["metadata"]) == {"air", "g", "g/small", "v"}
    group = (await ask(gateway, "/@branch.main/g/zarr.json")).json
    assert set(group["consolidated_metadata"]["metadata"]) == {"small"}
    array = await ask(gateway, "/@branch.main/g/small/zarr.json")
    assert array.json == group["consolidated_metadata"]["metadata"]["small"]
    plain = app(served.repository, consolidated=False)
    assert (await ask(plain, "/@branch.main/zarr.json")).body == group_document(title="all")


async def test_a_node_without_a_group_is_not_consolidated() -> None:
    """Zarr cannot read consolidated metadata in which a parent is missing."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        await make_array(session, "lost/a", (1,), (1,))
        await session.commit("an array in no group")
        answer = await ask(app(repository), "/@branch.main/zarr.json")
        assert answer.body == group_document()


async def test_ranges_are_parts(served: Served) -> None:
    """First bytes, from a byte on, last bytes; beyond the end there is less, or nothing."""
    gateway = app(served.repository)
    for text, part, place in [
        ("bytes=0-9", NATIVE[:10], "0-9"),
        ("bytes=1000-", NATIVE[1000:], "1000-1023"),
        ("bytes=-24", NATIVE[-24:], "1000-1023"),
        ("BYTES=5-99999999999999999999", NATIVE[5:], "5-1023"),
        ("bytes=-99999", NATIVE, "0-1023"),
    ]:
        answer = await ask(gateway, "/@branch.main/air/c/0", range=text)
        assert (answer.status, answer.body) == (206, part), text
        assert answer.headers["content-range"] == f"bytes {place}/1024"
    for text in ("bytes=1024-", "bytes=-0"):
        answer = await ask(gateway, "/@branch.main/air/c/0", range=text)
        assert answer.status == 416
        assert answer.headers["content-range"] == "bytes */1024"
        assert answer.sentence
    for text in ("rows=0-9", "bytes=0-1,5-6"):  # HTTP allows to send all then
        assert (await ask(gateway, "/@branch.main/air/c/0", range=text)).body == NATIVE
    for key, body in [("g/small/c/0", b"bc"), ("v/c/0", SOURCE[3:5])]:
        assert (await ask(gateway, f"/@branch.main/{key}", range="bytes=1-2")).body == body


async def test_a_part_is_read_as_a_part(served: Served) -> None:
    """One request to the storage, for these bytes; none for HEAD or what the client has."""
    gateway = app(served.repository, refresh_seconds=60)
    await ask(gateway, "/@branch.main/air/c/0", "HEAD")
    served.storage.forget()
    answer = await ask(gateway, "/@branch.main/air/c/0", range="bytes=0-9")
    assert served.storage.requests == {"get": 1}
    served.storage.forget()
    head = await ask(gateway, "/@branch.main/air/c/0", "HEAD")
    assert (head.status, head.headers["content-length"], head.body) == (200, "1024", b"")
    same = await ask(gateway, "/@branch.main/air/c/0", if_none_match=answer.headers["etag"])
    assert (same.status, same.body) == (304, b"")
    assert served.storage.requests == {}


async def test_conditional_requests_compare_the_bytes(served: Served) -> None:
    """ETags name bytes: lists and weak ones match, and a part of other bytes is not sent."""
    gateway = app(served.repository)
    for key in ("zarr.json", "air/zarr.json", "air/c/0", "g/small/c/0", "v/c/0"):
        target = f"/@branch.main/{key}"
        etag = (await ask(gateway, target)).headers["etag"]
        for given, status in [
            (etag, 304),
            (f'W/{etag}, "other"', 304),
            ("*", 304),
            ('"other"', 200),
        ]:
            assert (await ask(gateway, target, if_none_match=given)).status == status, key
        assert (await ask(gateway, target, if_range=etag, range="bytes=0-1")).status == 206
        assert (await ask(gateway, target, if_range='"other"', range="bytes=0-1")).status == 200
        assert (
            await ask(gateway, target, if_range="Sun, 06 Nov 1994 08:49:37 GMT", range="bytes=0-1")
        ).status == 200


async def test_etags_of_a_branch_outlive_commits_elsewhere(served: Served) -> None:
    """A client keeps what did not change, and is told of what did."""
    gateway = app(served.repository, refresh_seconds=0)
    keys = ("air/c/0", "air/zarr.json", "g/small/c/0", "zarr.json")
    before = [(await ask(gateway, f"/@branch.main/{key}")).headers["etag"] for key in keys]
    session = await served.repository.writable_session("main")
    await write(session, "g/small/c/0", b"ABCD")
    await session.commit("third")
    after = [(await ask(gateway, f"/@branch.main/{key}")).headers["etag"] for key in keys]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True]


async def test_what_never_changes_may_be_kept_for_ever(served: Served) -> None:
    """Snapshots and tags, also where they have nothing; a branch is asked about again."""
    gateway = app(served.repository)
    for ref in ("tag.v1", str(served.tip)):
        for key in ("zarr.json", "air/c/0", "air/c/1", "v/c/0"):
            answer = await ask(gateway, f"/@{ref}/{key}")
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    answer = await ask(gateway, "/@branch.main/air/c/0")
    assert answer.headers["cache-control"] == "public, no-cache"
    unguarded = await ask(gateway, "/@tag.v1/v/c/1")
    assert "etag" not in unguarded.headers
    assert unguarded.headers["cache-control"] == "no-store"
    for ref in ("tag.other", "branch.other", "1CECHNKREP0F1RSTCMX0"):
        answer = await ask(gateway, f"/@{ref}/zarr.json")
        assert (answer.status, answer.headers["cache-control"]) == (404, "no-store")


async def test_a_branch_is_looked_up_once_in_a_while(served: Served) -> None:
    """Sixty-four readers at once cause one look, and none follows within the time."""
    gateway = app(served.repository, refresh_seconds=60)
    await asyncio.gather(*(ask(gateway, "/@branch.main/g/small/c/0") for _ in range(64)))
    looks = sum(key == "repo" for _, key in served.storage.log)
    assert looks <= 2  # for the branch, and for the snapshot
    session = await served.repository.writable_session("main")
    await write(session, "g/small/c/0", b"ABCD")
    await session.commit("third")
    assert (await ask(gateway, "/@branch.main/g/small/c/0")).body == b"abcd"
    other = app(served.repository, refresh_seconds=0)
    assert (await ask(other, "/@branch.main/g/small/c/0")).body == b"ABCD"


async def test_serving_writes_nothing(served: Served) -> None:
    """The objects of the repository are the same afterwards."""
    before = await objects(served.storage)
    gateway = app(served.repository)
    for method in ("GET", "HEAD", "PUT", "DELETE", "POST", "PATCH"):
        await ask(gateway, "/@branch.main/air/c/0", method)
    assert await objects(served.storage) == before


async def test_a_mounted_gateway_serves_below_its_prefix(served: Served) -> None:
    """Frameworks tell the prefix as root_path."""
    gateway = app(served.repository)
    answer = await ask(gateway, "/@branch.main/air/c/0", root_path="/data/arrays")
    assert answer.body == NATIVE


async def test_names_are_quoted() -> None:
    """Branches with slashes, arrays with blanks and letters of other scripts."""
    async with Repository.create(memory_url()) as repository:
        session = await repository.writable_session("main")
        await make_array(session, "größe in m", (1,), (1,))
        await repository.create_branch("team/new", await session.commit("names"))
        gateway = app(repository)
        for name in ("gr%C3%B6%C3%9Fe%20in%20m", "gr%c3%b6%c3%9fe in m"):
            target = f"/@branch.team%2Fnew/{name}/zarr.json"
            assert (await ask(gateway, target)).status == 200


async def test_a_changed_source_is_told(served: Served) -> None:
    """A reference that guards its source gives no other bytes; one without a guard does."""
    gateway = app(served.repository)
    await served.elsewhere.put("file", SOURCE[::-1])
    answer = await ask(gateway, "/@branch.main/v/c/0")
    assert answer.status == 502
    assert "changed" in answer.sentence
    assert "elsewhere" not in answer.sentence
    assert (await ask(gateway, "/@branch.main/v/c/1")).body == SOURCE[::-1][:10]


async def test_a_source_that_may_not_be_read_is_told_without_its_place(served: Served) -> None:
    """The log has the location; the client has a sentence."""
    async with served.repository.reopen(authorize_virtual_chunk_access={}) as other:
        answer = await ask(app(other), "/@branch.main/v/c/0")
    assert answer.status == 502
    assert "elsewhere" not in answer.sentence


async def test_a_ref_without_its_kind_is_told_how_to_write_it(served: Served) -> None:
    """With the name that was given, unless that has a dot, which may be a misspelt kind."""
    gateway = app(served.repository)
    for given, shown in [
        ("@main", "Write '@branch.main', '@tag.main', or"),
        ("@brnch.main", "Write '@branch.NAME', '@tag.NAME', or"),
        ("@", "Write '@branch.NAME', '@tag.NAME', or"),
        ("@%3Cscript%3E", "Write '@branch.<script>', '@tag.<script>', or"),
    ]:
        answer = await ask(gateway, f"/{given}/zarr.json")
        assert answer.status == 404
        assert shown in answer.sentence
        assert answer.headers["content-type"].startswith("text/plain")
