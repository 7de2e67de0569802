"""Chunks that get other places in their array's grid."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.engine.tree.reshape import MoveChunk, reindexed, shifted
from icechunk_async.errors import (
    FormatError,
    IcechunkError,
    InvalidCoordinatesError,
    InvalidInputError,
    NodeNotFoundError,
    ReadOnlyError,
    SessionStateError,
    UnsupportedBySpecError,
)
from icechunk_async.format.manifest.chunk import InlineChunk, Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from tests.helpers import array_document, group_document, make_array, read, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async import Repository, Session

LARGE = bytes(range(256)) * 4
"""Too long to be stored inline."""


@pytest.fixture
async def session(repository: Repository) -> Session:
    """Return a session on an array ``a`` of 5 chunks: 1 and 2 committed, 3 not yet."""
    begun = await repository.writable_session("main")
    await write(begun, "zarr.json", group_document())
    await make_array(begun, "a", (5,), (1,))
    await write(begun, "a/c/1", b"\x01")
    await write(begun, "a/c/2", LARGE)
    await begun.commit("filled")
    begun = await repository.writable_session("main")
    await write(begun, "a/c/3", b"\x03")
    return begun


async def _chunks(session: Session, path: str = "a", size: int = 5) -> dict[int, bytes]:
    found = {at: await read(session, f"{path}/c/{at}") for at in range(size)}
    return {at: data for at, data in found.items() if data is not None}


def _touched(session: Session) -> list[int]:
    return [row[0] for row in session.status().updated_chunks["/a"].tolist()]


@pytest.mark.parametrize(
    ("offset", "left", "touched"),
    [
        (1, {2: b"\x01", 3: LARGE, 4: b"\x03"}, [1, 2, 3, 4]),
        (2, {3: b"\x01", 4: LARGE}, [1, 2, 3, 4]),
        (-2, {0: LARGE, 1: b"\x03"}, [0, 1, 2, 3]),
        (0, {1: b"\x01", 2: LARGE, 3: b"\x03"}, [1, 2, 3]),
        (1 << 40, {}, [1, 2, 3]),
        (-(1 << 70), {}, [1, 2, 3]),
    ],
)
async def test_a_shift_moves_what_fits_and_clears_the_rest(
    session: Session, offset: int, left: dict[int, bytes], touched: list[int]
) -> None:
    """Committed chunks and those of the session alike; every place touched is in the log."""
    await session.shift_array("/a", (offset,))
    assert await _chunks(session) == left
    assert _touched(session) == touched
    await session.commit("shifted")
    assert await _chunks(session) == left


async def test_shifts_add_up(session: Session) -> None:
    """Chunks that left the grid do not come back."""
    await session.shift_array("a", [2])
    await session.shift_array("a", [-1])
    assert await _chunks(session) == {2: b"\x01", 3: LARGE}


async def test_a_shift_after_shrinking_moves_only_what_was_left(session: Session) -> None:
    """Chunks that a smaller shape cut off stay gone, also where the array grows again."""
    await write(session, "a/zarr.json", array_document((2,), (1,)))
    await write(session, "a/zarr.json", array_document((8,), (1,)))
    await session.shift_array("a", (4,))
    assert await _chunks(session, size=8) == {5: b"\x01"}


async def test_axes_are_shifted_apart(repository: Repository) -> None:
    """Each by its own number of chunks; an array without axes has nowhere to go."""
    session = await repository.writable_session("main")
    await make_array(session, "b", (3, 3), (1, 1))
    for row, column in ((0, 0), (0, 2), (2, 1)):
        await write(session, f"b/c/{row}/{column}", bytes([row, column, 9]))
    await session.shift_array("/b", (1, -1))
    keys = [key async for key in session.store.list_prefix("b/c/")]
    assert keys == ["b/c/1/1"]
    assert await read(session, "b/c/1/1") == bytes([0, 2, 9])
    await make_array(session, "s", (), ())
    await write(session, "s/c", b"\x05")
    await session.shift_array("/s", ())
    assert await read(session, "s/c") == b"\x05"


@pytest.mark.parametrize(
    ("path", "offset", "error"),
    [
        ("/a", (1, 1), InvalidInputError),
        ("/a", (), InvalidInputError),
        ("/a", (0.5,), InvalidInputError),
        ("/", (), NodeNotFoundError),
        ("/b", (1,), NodeNotFoundError),
    ],
)
async def test_invalid_shift_moves_nothing(
    session: Session, path: str, offset: Any, error: type[IcechunkError]
) -> None:
    """It is refused by name."""
    before = await _chunks(session)
    with pytest.raises(error):
        await session.shift_array(path, offset)
    assert await _chunks(session) == before
    assert _touched(session) == [3]


async def test_chunks_of_different_sizes_are_not_moved(repository: Repository) -> None:
    """A rectilinear grid gives each place its own size; spec 1 does not have such grids."""
    session = await repository.writable_session("main")
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[1, 4]]}}
    if repository.spec_version == 1:
        with pytest.raises(UnsupportedBySpecError, match="version 2"):
            await make_array(session, "r", (5,), (1,), chunk_grid=grid)
        return
    await make_array(session, "r", (5,), (1,), chunk_grid=grid)
    with pytest.raises(InvalidInputError, match="'rectilinear'"):
        await session.shift_array("/r", (1,))
    with pytest.raises(InvalidInputError, match="'rectilinear'"):
        await session.reindex_array("/r", lambda at: at)


async def test_only_writable_sessions_reshape(repository: Repository, session: Session) -> None:
    """Read-only sessions and sessions that move nodes refuse to reshape."""
    reading = await repository.readonly_session("main")
    with pytest.raises(ReadOnlyError):
        await reading.shift_array("/a", (1,))
    asked: list[list[int]] = []
    with pytest.raises(ReadOnlyError):
        await reading.reindex_array("/a", asked.append)
    assert not asked
    if repository.spec_version == 2:
        moving = await repository.rearrange_session("main")
        with pytest.raises(SessionStateError):
            await moving.shift_array("/a", (1,))


def _right(at: list[int]) -> list[int] | None:
    return [at[0] + 1] if at[0] < 4 else None


def _left(at: list[int]) -> list[int] | None:
    return [at[0] - 1] if at[0] > 0 else None


def _reverse(at: list[int]) -> tuple[int, ...]:
    return tuple(4 - it for it in at)


SENT: list[tuple[MoveChunk, MoveChunk | None, dict[int, bytes]]] = [
    (lambda at: None, None, {1: b"\x01", 2: LARGE, 3: b"\x03"}),
    (_right, None, {1: b"\x01", 2: b"\x01", 3: LARGE, 4: b"\x03"}),
    (_right, _left, {2: b"\x01", 3: LARGE, 4: b"\x03"}),
    (_reverse, None, {1: b"\x03", 2: LARGE, 3: b"\x01"}),
    (_reverse, _reverse, {1: b"\x03", 2: LARGE, 3: b"\x01"}),
    (lambda at: [0], None, {0: b"\x03", 1: b"\x01", 2: LARGE, 3: b"\x03"}),
    (lambda at: [0], lambda at: None, {0: b"\x03"}),
    (lambda at: [0], lambda at: [77], {0: b"\x03"}),
    (lambda at: [0], lambda at: [2], {0: b"\x03", 1: b"\x01", 2: LARGE, 3: b"\x03"}),
    (lambda at: np.array([at[0]]), None, {1: b"\x01", 2: LARGE, 3: b"\x03"}),
]


@pytest.mark.parametrize(("forward", "backward", "left"), SENT)
async def test_reindexing_moves_each_chunk_to_where_it_is_sent(
    session: Session,
    forward: MoveChunk,
    backward: MoveChunk | None,
    left: dict[int, bytes],
) -> None:
    """Without the inverse the old places keep their chunks, unless another came."""
    await session.reindex_array("/a", forward, backward)
    assert await _chunks(session) == left
    await session.commit("reindexed")
    assert await _chunks(session) == left


async def test_the_functions_are_asked_about_existing_chunks_only(session: Session) -> None:
    """Forward about each, in order; backward about those that none came to."""
    asked: list[list[int]] = []
    cleared: list[list[int]] = []

    def forward(at: list[int]) -> list[int] | None:
        asked.append(at)
        return [3] if at == [1] else None

    await session.reindex_array("/a", forward, cleared.append)
    assert (asked, cleared) == ([[1], [2], [3]], [[1], [2]])
    assert await _chunks(session) == {3: b"\x01"}


NONSENSE: list[tuple[Callable[[list[int]], Any], type[Exception]]] = [
    (lambda at: [5], InvalidCoordinatesError),
    (lambda at: [1 << 80], InvalidCoordinatesError),
    (lambda at: [-1], InvalidInputError),
    (lambda at: [0, 0], InvalidInputError),
    (lambda at: 0, InvalidInputError),
    (lambda at: [0.5], InvalidInputError),
    (lambda at: 1 // 0, ZeroDivisionError),
]


@pytest.mark.parametrize(("forward", "error"), NONSENSE)
async def test_invalid_result_of_a_function_moves_nothing(
    session: Session, forward: Any, error: type[Exception]
) -> None:
    """Its own errors leave as themselves; the inverse is checked as well."""
    before = await _chunks(session)
    with pytest.raises(error):
        await session.reindex_array("/a", forward)
    if error is not InvalidCoordinatesError:  # outside of the grid is where no chunk was
        with pytest.raises(error):
            await session.reindex_array("/a", lambda at: None, forward)
    assert await _chunks(session) == before
    assert _touched(session) == [3]


async def test_a_vectorized_function_sees_all_chunks_at_once(session: Session) -> None:
    """It does the same as one that is asked about each; negative rows stay."""
    calls: list[Any] = []

    def forward(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        calls.append(rows.tolist())
        return np.where(rows == 2, -1, rows + 1)

    await session.reindex_array("/a", forward, lambda rows: rows - 2, vectorized=True)
    assert calls == [[[1], [2], [3]]]
    assert await _chunks(session) == {2: b"\x01", 4: b"\x03", 3: b"\x03"}


NO_ROWS: list[Callable[[npt.NDArray[np.int64]], Any]] = [
    lambda rows: rows[:1],
    lambda rows: rows.astype(float),
    lambda rows: None,
]


@pytest.mark.parametrize("answer", NO_ROWS)
async def test_vectorized_function_must_return_rows(session: Session, answer: Any) -> None:
    """Integers, in the shape of its argument."""
    with pytest.raises(InvalidInputError, match="must return integers with shape"):
        await session.reindex_array("/a", answer, vectorized=True)
    with pytest.raises(InvalidCoordinatesError):
        await session.reindex_array(
            "/a", lambda rows: np.full(rows.shape, 1 << 63, np.uint64), vectorized=True
        )
    assert _touched(session) == [3]


async def test_concurrently_changed_array_is_not_reshaped(session: Session) -> None:
    """A write from within the function, or from another task, is not undone."""

    def forward(at: list[int]) -> list[int]:
        session.workspace.delete_chunk("/a", (2,))
        return at

    with pytest.raises(SessionStateError, match="was changed"):
        await session.reindex_array("/a", forward)
    assert await _chunks(session) == {1: b"\x01", 3: b"\x03"}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True),
    st.tuples(st.integers(-7, 7), st.integers(-7, 7)),
)
def test_shift_matches_a_model(coords: list[tuple[int, int]], offset: tuple[int, int]) -> None:
    """Reindexing by the same arithmetic, with its inverse, gives the same result."""
    grid = (6, 6)
    refs = ChunkRefs.from_mapping(2, {it: InlineChunk(bytes(it)) for it in coords}).sort()
    moved = {(row + offset[0], column + offset[1]): bytes([row, column]) for row, column in coords}
    wanted = {at: data for at, data in moved.items() if min(at) >= 0 and max(at) < 6}

    def inside(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        beyond = ((rows < 0) | (rows > 5)).any(axis=1)
        return np.where(beyond[:, None], -1, rows)

    steps = np.array(offset)
    reindex = reindexed(
        refs, lambda rows: inside(rows + steps), lambda rows: inside(rows - steps), grid, "/a"
    )
    for changes in (shifted(refs, offset, grid), reindex):
        after = {it: bytes(it) for it in coords}
        rows: list[list[int]] = changes.coords.tolist()
        for row, coordinates in enumerate(rows):
            at, ref = (coordinates[0], coordinates[1]), changes.ref(row)
            assert (ref is None) == (changes.kinds[row] == Kind.DELETED)
            if ref is None:
                after.pop(at, None)
            else:
                assert isinstance(ref, InlineChunk)
                after[at] = bytes(ref.data)
        assert after == wanted


async def test_a_large_shift_makes_no_object_per_chunk(repository: Repository) -> None:
    """A million chunks are shifted in columns: memory is far below an object for each."""
    session = await repository.writable_session("main")
    count = 1_000_000
    await make_array(session, "a", (count + 1,), (1,))
    coords = np.arange(count, dtype=np.uint32)[:, None]
    refs = ChunkRefs.build(
        coords,
        Kind.NATIVE,
        chunk_ids=np.zeros((1, 12), np.uint8),
        lengths=np.ones(count, np.uint64),
    )
    session.workspace.set_refs("/a", refs)
    tracemalloc.start()
    try:
        await session.shift_array("/a", (1,))
        blocks = sum(1 for _ in tracemalloc.take_snapshot().traces)
    finally:
        tracemalloc.stop()
    assert blocks < 10_000
    assert await session.workspace.find_chunk("/a", (0,)) is None
    assert await session.workspace.find_chunk("/a", (count,)) is not None


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (b"{", FormatError),
        (b"[]", FormatError),
        (b"[" * 100_000, FormatError),
        (b"{}", InvalidInputError),
        (b'{"chunk_grid": 5}', InvalidInputError),
    ],
    ids=["no JSON", "no object", "deep", "no grid", "no kind of grid"],
)
async def test_an_array_whose_document_is_damaged_is_not_moved(
    session: Session, document: bytes, error: type[IcechunkError]
) -> None:
    """A snapshot may bring any bytes: the error says whose they are."""
    node = session.workspace.array("/a")
    session.workspace.tree.set_node("/a", document, node.array)
    with pytest.raises(error, match="'/a'"):
        await session.shift_array("/a", (1,))
