"""Solvers of the user's own: with both sides at hand, for each chunk, and with merged values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async.conflicts import ConflictKind, Resolution
from icechunk_async.errors import (
    InvalidInputError,
    InvalidMetadataError,
    RebaseFailedError,
    UnsupportedBySpecError,
)
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk
from tests.helpers import array_document, group_document, read, write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async import Repository, Session
    from icechunk_async.conflicts import Answer, Clash

BIG = 2000


async def race(
    repository: Repository, ours: Mapping[str, bytes | None], theirs: Mapping[str, bytes | None]
) -> Session:
    """Return a session whose writes clash with those of a commit that was first."""
    mine, newer = [await repository.writable_session("main") for _ in range(2)]
    for session, writes in ((mine, ours), (newer, theirs)):
        for key, value in writes.items():
            if value is None:
                await session.store.delete(key)
            else:
                await write(session, key, value)
    await newer.commit("theirs")
    return mine


class Summing:
    """Adds what both sides added to each chunk."""

    async def solve(self, clash: Clash) -> list[Answer]:
        """Decide."""
        answers: list[Answer] = []
        for conflict in clash.conflicts:
            assert conflict.kind is ConflictKind.CHUNK_DOUBLE_UPDATE
            chunks: dict[tuple[int, ...], Resolution | bytes | None] = {}
            for coords in conflict.coords:
                values = [
                    int.from_bytes((await side.read_chunk(conflict.path, coords)) or b"")
                    for side in (clash.base, clash.ours, clash.theirs)
                ]
                total = values[1] + values[2] - values[0]
                chunks[coords] = total.to_bytes(1) * (BIG if coords == (1,) else 1)
            answers.append(chunks)
        return answers


@pytest.mark.parametrize("amount", [1, 3])
async def test_chunks_are_merged_from_both_sides(filled: Repository, amount: int) -> None:
    """A counter that several writers raise at once ends with the sum; large chunks as objects."""
    for _ in range(amount):
        session = await race(
            filled, {"a/c/0": b"\x05", "a/c/1": b"\x03"}, {"a/c/0": b"\x02", "a/c/1": b"\x04"}
        )
        await session.commit("ours", rebase_with=Summing())
        session = await filled.writable_session("main")
        assert await read(session, "a/c/0") == b"\x07"
        assert await read(session, "a/c/1") == b"\x06" * BIG
        handle = await session.workspace.find_chunk("/a", (1,))
        assert handle is not None
        assert isinstance(handle.ref, NativeChunk)
        await write(session, "a/c/0", b"\x00")
        await write(session, "a/c/1", b"\x01")
        await session.commit("begin again")


class Choosing:
    """Not async: decides each chunk by its place."""

    def __init__(self, chunks: Mapping[int, Resolution | bytes | None]) -> None:
        self.chunks: dict[tuple[int, ...], Resolution | bytes | None] = {
            (place,): answer for place, answer in chunks.items()
        }

    def solve(self, clash: Clash) -> list[Answer]:
        """Decide."""
        assert len(clash.conflicts) == 1
        return [self.chunks]


async def test_each_chunk_can_be_decided(filled: Repository) -> None:
    """Ours, theirs, other bytes or none; chunks without a conflict are ours as ever."""
    ours: dict[str, bytes | None] = {f"a/c/{index}": b"o" for index in range(6)}
    theirs: dict[str, bytes | None] = {f"a/c/{index}": b"t" for index in range(1, 5)}
    choice: dict[int, Resolution | bytes | None] = {
        1: Resolution.OURS,
        2: Resolution.THEIRS,
        3: b"merged",
        4: None,
    }
    session = await race(filled, ours, theirs)
    await session.commit("ours", rebase_with=Choosing(choice))
    reader = await filled.readonly_session("main")
    found = [await read(reader, f"a/c/{index}") for index in range(7)]
    assert found == [b"o", b"o", b"t", b"merged", None, b"o", None]
    log = await session.workspace.assets.transaction_log(session.snapshot_id)
    assert {tuple(row) for rows in log.updated_chunks.values() for row in rows.tolist()} == {
        (0,),
        (1,),
        (3,),
        (4,),
        (5,),
    }


@pytest.mark.parametrize(
    "answer", [{}, {1: Resolution.OURS}, {1: b"x", 2: Resolution.FAIL}], ids=str
)
async def test_a_chunk_that_is_not_decided_fails_the_rebase(
    filled: Repository, answer: dict[int, Resolution | bytes | None]
) -> None:
    """Nothing is changed, not even for the chunks that were."""
    session = await race(
        filled, {"a/c/1": b"o", "a/c/2": b"o"}, {"a/c/1": b"t", "a/c/2": b"t", "a/c/7": b"t"}
    )
    with pytest.raises(RebaseFailedError, match=r"2 chunk\(s\)"):
        await session.commit("ours", rebase_with=Choosing(answer))
    assert [await read(session, f"a/c/{index}") for index in (1, 2, 7)] == [b"o", b"o", None]


class Answering:
    """A solver that returns the resolutions it was given."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    async def solve(self, clash: Clash) -> list[Answer]:
        """Decide."""
        del clash
        return list(self.answers)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({(9,): Resolution.OURS}, "no conflict"),
        ({(1,): b""}, "no bytes"),
        (b"{}", "must return a Resolution"),
        ("ours", "must return a Resolution"),
        (None, "must return a Resolution"),
    ],
)
async def test_invalid_decisions_are_refused(filled: Repository, answer: Any, message: str) -> None:
    """They are errors of the solver, and change nothing."""
    session = await race(filled, {"a/c/1": b"o"}, {"a/c/1": b"t"})
    with pytest.raises(InvalidInputError, match=message):
        await session.commit("ours", rebase_with=Answering(answer))
    assert await read(session, "a/c/1") == b"o"


class Joining:
    """Joins the attributes of both sides; theirs count where both set one."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any, Any]] = []

    async def solve(self, clash: Clash) -> list[Answer]:
        """Decide."""
        answers: list[Answer] = []
        for conflict in clash.conflicts:
            sides = [it.metadata(conflict.path) for it in (clash.base, clash.ours, clash.theirs)]
            base, ours, theirs = sides
            assert base is not None
            assert ours is not None
            assert theirs is not None
            self.seen.append((base.get("attributes", {}), ours["attributes"], theirs["attributes"]))
            theirs["attributes"] = ours["attributes"] | theirs["attributes"]
            answers.append(json.dumps(theirs).encode())
        return answers


def marked(length: int = 10, **attributes: int) -> bytes:
    """Return a document of the array."""
    return array_document((length,), (1,), attributes=attributes)


async def test_metadata_is_merged_from_both_sides(filled: Repository) -> None:
    """Attributes of arrays and groups; the merged document is what is stored."""
    session = await race(
        filled,
        {"a/zarr.json": marked(a=1, both=1), "zarr.json": group_document(a=1)},
        {"a/zarr.json": marked(b=2, both=2), "zarr.json": group_document(b=2), "a/c/5": b"t"},
    )
    solver = Joining()
    await session.commit("ours", rebase_with=solver)
    assert ({}, {"a": 1, "both": 1}, {"b": 2, "both": 2}) in solver.seen
    reader = await filled.readonly_session("main")
    assert json.loads(await read(reader, "a/zarr.json") or b"")["attributes"] == {
        "a": 1,
        "b": 2,
        "both": 2,
    }
    assert json.loads(await read(reader, "zarr.json") or b"")["attributes"] == {"a": 1, "b": 2}
    assert await read(reader, "a/c/5") == b"t"
    assert await read(reader, "a/c/1") == b"\x01"


async def test_a_merged_array_may_be_smaller(filled: Repository) -> None:
    """Chunks outside the new grid are dropped, those of either writer."""
    session = await race(
        filled, {"a/zarr.json": marked(4), "a/c/3": b"o"}, {"a/zarr.json": marked(8), "a/c/5": b"t"}
    )
    await session.commit("ours", rebase_with=Answering(marked(5), Resolution.OURS))
    reader = await filled.readonly_session("main")
    assert [await read(reader, f"a/c/{index}") for index in (1, 3, 5)] == [b"\x01", b"o", None]
    assert json.loads(await read(reader, "a/zarr.json") or b"")["shape"] == [5]


async def test_chunks_cut_off_by_a_merge_do_not_come_back(filled: Repository) -> None:
    """A chunk of theirs outside of the merged grid is gone, also if that is the grid of ours."""
    session = await race(
        filled, {"a/zarr.json": marked(12)}, {"a/zarr.json": marked(20), "a/c/15": b"t"}
    )
    await session.rebase(Answering(marked(12)))
    await write(session, "a/zarr.json", marked(20))
    assert await read(session, "a/c/15") is None
    await session.commit("grown")
    assert await read(session, "a/c/15") is None


async def test_a_merged_document_is_checked(filled: Repository) -> None:
    """An invalid document is refused, and the session is unchanged."""
    session = await race(filled, {"a/zarr.json": marked(a=1)}, {"a/zarr.json": marked(b=2)})
    for document in (b"", b"{}", b"[]"):
        with pytest.raises(InvalidMetadataError):
            await session.commit("ours", rebase_with=Answering(document))
    assert await read(session, "a/zarr.json") == marked(a=1)


async def test_a_merged_grid_must_be_one_of_the_format(filled: Repository, spec: int) -> None:
    """A rectilinear one is refused where it cannot be stored, with a word about migration."""
    session = await race(filled, {"a/zarr.json": marked(a=1)}, {"a/zarr.json": marked(b=2)})
    document = json.loads(marked(c=3))
    configuration = {"kind": "inline", "chunk_shapes": [[[1, 10]]]}
    document["chunk_grid"] = {"name": "rectilinear", "configuration": configuration}
    solver = Answering(json.dumps(document).encode())
    if spec == 1:
        with pytest.raises(UnsupportedBySpecError, match="Migrate"):
            await session.commit("ours", rebase_with=solver)
        return
    await session.commit("ours", rebase_with=solver)
    assert b"rectilinear" in (await read(session, "a/zarr.json") or b"")


async def test_solver_can_read_base_and_both_sides(filled: Repository) -> None:
    """References, nodes, documents and bytes of base, ours and theirs."""
    session = await race(
        filled,
        {"a/c/0": None, "a/c/1": b"o" * BIG, "n/zarr.json": group_document(x=1)},
        {"a/c/0": b"t", "a/c/1": b"t" * BIG, "m/zarr.json": group_document()},
    )
    start = session.snapshot_id

    class Looking:
        async def solve(self, clash: Clash) -> list[Answer]:
            (conflict,) = clash.conflicts
            base, ours, theirs = clash.base, clash.ours, clash.theirs
            assert (base.id, ours.id, theirs.message) == (start, start, "theirs")
            assert set(conflict.coords) == {(0,), (1,)}
            assert isinstance(await base.chunk_ref("a", (1,)), InlineChunk)
            refs = [await side.chunk_ref("/a", (1,)) for side in (ours, theirs)]
            assert all(isinstance(ref, NativeChunk) for ref in refs)
            assert await ours.chunk_ref("a", (0,)) is None
            assert await theirs.read_chunk("a", (0,)) == b"t"
            assert await ours.read_chunk("a", (1,)) == b"o" * BIG
            assert await base.read_chunk("a", (7,)) is None
            assert [side.node("n") is None for side in (base, ours, theirs)] == [True, False, True]
            assert [side.metadata("m") for side in (base, ours)] == [None, None]
            assert theirs.metadata("/m") is not None
            assert theirs.snapshot.id == clash.theirs_log.id
            return [Resolution.THEIRS]

    await session.commit("ours", rebase_with=Looking())
    assert await read(await filled.readonly_session("main"), "a/c/0") == b"t"


@pytest.mark.parametrize(("length", "settled"), [(10, True), (6, True), (5, False)])
async def test_our_chunks_may_stay_in_an_array_that_they_updated(
    filled: Repository, length: int, *, settled: bool
) -> None:
    """If a solver says so, and they lie in the grid that it has now."""
    session = await race(filled, {"a/c/5": b"o"}, {"a/zarr.json": marked(length, x=1)})
    if not settled:
        with pytest.raises(RebaseFailedError):
            await session.commit("ours", rebase_with=Answering(Resolution.OURS))
        return
    await session.commit("ours", rebase_with=Answering(Resolution.OURS))
    reader = await filled.readonly_session("main")
    assert await read(reader, "a/c/5") == b"o"
    assert await read(reader, "a/zarr.json") == marked(length, x=1)


async def test_error_of_a_solver_is_not_wrapped(filled: Repository) -> None:
    """Its own errors are not hidden; the session can be committed with another one."""
    session = await race(filled, {"a/c/1": b"o"}, {"a/c/1": b"t"})

    class Failing:
        def solve(self, clash: Clash) -> list[Answer]:
            raise ZeroDivisionError(clash.conflicts[0].path)

    with pytest.raises(ZeroDivisionError, match="/a"):
        await session.commit("ours", rebase_with=Failing())
    await session.commit("ours", rebase_with=Summing())
