"""Transaction logs: layout, order, merging, and what other writers make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format import transaction_log
from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.flatbuffers.reading import Vectors
from icechunk_async.format.transaction_log import (
    Move,
    TransactionLog,
    decode_transaction_log,
    encode_transaction_log,
    fitting_level,
    unique_coordinates,
)
from tests.helpers import counted_calls, examples
from tests.unit.format.samples import (
    NODE_IDS,
    PATHS,
    SNAPSHOT_IDS,
    any_coords,
    comparable,
    coordinates,
    node_id,
    snapshot_id,
)
from tests.unit.format.table_builder import Field, Offset, Scalar, Struct, TableBuilder
from tests.unit.format.wire import Table, root

if TYPE_CHECKING:
    from icechunk_async.format.ids import NodeId, SnapshotId
    from icechunk_async.format.manifest.chunk import Coordinates

type Touched = dict[NodeId, np.ndarray[tuple[int, int], np.dtype[np.uint32]]]

LISTS = {
    1: "new_groups", 2: "new_arrays", 3: "deleted_groups", 4: "deleted_arrays",
    5: "updated_arrays", 6: "updated_groups",
}  # fmt: skip
EMPTY = TransactionLog(snapshot_id(1))


def chunks(**touched: list[Coordinates]) -> Touched:
    """Return coordinates of nodes called ``n1``, ``n2`` and so on."""
    return {
        node_id(int(name[1:])): np.array(rows, np.uint32).reshape(len(rows), -1)
        for name, rows in touched.items()
    }


def written(log: TransactionLog) -> Table:
    """Return the root table."""
    return root(encode_transaction_log(log, 2))


def test_each_list_has_its_slot() -> None:
    """Arrays come before groups among the updated ones only."""
    ids: dict[str, Any] = {
        name: frozenset([node_id(10 * slot), node_id(slot)]) for slot, name in LISTS.items()
    }
    table = written(replace(EMPTY, **ids))
    for slot, name in LISTS.items():
        assert table.structs(slot, 8, 1) == sorted(ids[name])


def test_every_list_is_there_even_if_empty() -> None:
    """They are required; moves are written by both versions of the official engine too."""
    for spec in (1, 2):
        table = root(encode_transaction_log(EMPTY, spec))
        assert table.slots == set(range(9))
        assert table.raw(0, 12) == EMPTY.id


def test_touched_chunks_are_sorted_by_node_and_coordinates() -> None:
    """Each coordinate is a table with one vector."""
    log = replace(EMPTY, updated_chunks=chunks(n9=[(0, 1), (2, 0)], n3=[()], n5=[(7,)]))
    tables = written(log).tables(7)
    assert [table.raw(0, 8) for table in tables] == [node_id(3), node_id(5), node_id(9)]
    assert [[it.words(0) for it in table.tables(1)] for table in tables] == [
        [[]], [[7]], [[0, 1], [2, 0]],
    ]  # fmt: skip


def test_moves_are_sorted_by_the_segments_of_their_target() -> None:
    """Unlike nodes of snapshots: ``/a/b`` comes before ``/a-b``."""
    targets = ["/a-b", "/a", "/a/b", "/a.b/c"]
    moves = tuple(Move("/old", target, node_id(1), is_array=True) for target in targets)
    tables = written(replace(EMPTY, moves=moves)).tables(8)
    assert [table.string(1) for table in tables] == ["/a", "/a/b", "/a-b", "/a.b/c"]


def test_moves_number_types_in_their_own_way() -> None:
    """Group is 0, array is 1; in snapshots it is 2 and 1."""
    moves = (
        Move("/é", "/a", node_id(1), is_array=False),
        Move("/x", "/b", node_id(2), is_array=True),
    )
    group, array = written(replace(EMPTY, moves=moves)).tables(8)
    assert (group.number(3, 1), array.number(3, 1)) == (0, 1)
    assert (group.string(0), group.raw(2, 8)) == ("/é", node_id(1))
    assert (
        decode_transaction_log(encode_transaction_log(replace(EMPTY, moves=moves), 2)).moves
        == moves
    )


def test_only_a_log_that_touches_nothing_is_empty() -> None:
    """Lists, chunks and moves all count."""
    assert EMPTY.is_empty()
    for name in LISTS.values():
        one: dict[str, Any] = {name: frozenset([node_id(1)])}
        assert not replace(EMPTY, **one).is_empty()
    assert not replace(EMPTY, updated_chunks=chunks(n1=[(0,)])).is_empty()
    assert not replace(EMPTY, moves=(Move("/a", "/b", node_id(1), is_array=True),)).is_empty()


def test_merging_joins_lists_without_cancelling() -> None:
    """Amending needs this: a node may be both new and deleted."""
    one = replace(EMPTY, new_groups=frozenset([node_id(1)]), deleted_arrays=frozenset([node_id(2)]))
    two = TransactionLog(
        snapshot_id(2), frozenset([node_id(3)]), deleted_groups=frozenset([node_id(1)])
    )
    merged = one.merge(two)
    assert merged.id == snapshot_id(2)
    assert merged.new_groups == {node_id(1), node_id(3)}
    assert merged.deleted_groups == {node_id(1)}
    assert merged.deleted_arrays == {node_id(2)}


def test_merging_joins_chunks() -> None:
    """Each once, in order; where the rank changed the later ones count."""
    one = replace(EMPTY, updated_chunks=chunks(n1=[(0, 1), (2, 0)], n2=[(1,)], n3=[(5,)]))
    two = replace(EMPTY, updated_chunks=chunks(n1=[(0, 1), (1, 1)], n3=[(0, 0)], n4=[(9,)]))
    merged = one.merge(two).updated_chunks
    assert {node: rows.tolist() for node, rows in merged.items()} == {
        node_id(1): [[0, 1], [1, 1], [2, 0]],
        node_id(2): [[1]],
        node_id(3): [[0, 0]],
        node_id(4): [[9]],
    }
    assert one.updated_chunks[node_id(1)].tolist() == [[0, 1], [2, 0]]


def test_merging_composes_moves() -> None:
    """From where a node first was to where it last is; there and back is no move."""
    one = replace(
        EMPTY,
        moves=(
            Move("/a", "/b", node_id(1), is_array=True),
            Move("/x", "/y", node_id(2), is_array=False),
        ),
    )
    two = replace(
        EMPTY,
        moves=(
            Move("/b", "/c", node_id(1), is_array=True),
            Move("/y", "/x", node_id(2), is_array=False),
        ),
    )
    assert one.merge(two).moves == (Move("/a", "/c", node_id(1), is_array=True),)


@given(
    st.integers(0, 3).flatmap(
        lambda rank: st.tuples(st.just(rank), st.lists(coordinates(rank) | any_coords(rank)))
    )
)
def test_unique_coordinates_are_a_sorted_set(drawn: tuple[int, list[Coordinates]]) -> None:
    """This holds for any rank."""
    rank, rows = drawn
    matrix = np.array(rows, np.uint32).reshape(len(rows), rank)
    assert [tuple(row) for row in unique_coordinates(matrix).tolist()] == sorted(set(rows))


ID_SETS = st.frozensets(NODE_IDS, max_size=4)
TOUCHED = st.dictionaries(
    NODE_IDS,
    st.integers(0, 3).flatmap(
        lambda rank: st.sets(coordinates(rank) | any_coords(rank), min_size=1, max_size=6).map(
            lambda rows: np.array(sorted(rows), np.uint32).reshape(len(rows), -1)
        )
    ),
    max_size=3,
)
MOVES = st.lists(st.builds(Move, PATHS, PATHS, NODE_IDS, st.booleans()), max_size=4).map(
    lambda moves: tuple(sorted(moves, key=lambda move: move.target.split("/")))
)
LOGS = st.builds(
    TransactionLog, SNAPSHOT_IDS, ID_SETS, ID_SETS, ID_SETS, ID_SETS, ID_SETS, ID_SETS, TOUCHED,
    MOVES,
)  # fmt: skip


@settings(deadline=None)
@given(LOGS, st.sampled_from([1, 2]))
def test_logs_read_back(log: TransactionLog, spec: int) -> None:
    """In both versions."""
    found = decode_transaction_log(encode_transaction_log(log, spec))
    assert comparable(found) == comparable(log)


@settings(deadline=None)
@given(LOGS)
def test_files_are_in_order(log: TransactionLog) -> None:
    """Ids, nodes, coordinates and moves; every word aligned."""
    table = written(log)
    for slot in LISTS:
        ids = table.structs(slot, 8, 1)
        assert ids is not None
        assert ids == sorted(set(ids))
    nodes = [it.raw(0, 8) for it in table.tables(7)]
    assert nodes == sorted(log.updated_chunks)
    for node in table.tables(7):
        rows = [it.words(0) for it in node.tables(1)]
        assert rows == sorted(rows)
    targets = [(it.string(1) or "").split("/") for it in table.tables(8)]
    assert targets == sorted(targets)


class OtherLog:
    """A log with the tables asked for."""

    def __init__(self) -> None:
        """Begin without anything."""
        self.out = TableBuilder()
        self.arrays: list[Offset] = []

    def touch(self, node: NodeId, rows: list[Coordinates]) -> None:
        """Add touched chunks."""
        out = self.out
        tables = [out.table({0: out.structs(np.array(row, "<u4").tobytes(), 4, 4)}) for row in rows]
        self.arrays.append(out.table({0: Struct(node), 1: out.offsets(tables)}))

    def decode(self, **fields: Field) -> TransactionLog:
        """Read it; ``fields`` are named ``s`` and their slot."""
        out = self.out
        every: dict[int, Field] = {slot: out.structs(b"", 8, 1) for slot in LISTS}
        every |= {0: Struct(snapshot_id(1)), 7: out.offsets(self.arrays)}
        every |= {int(name[1:]): field for name, field in fields.items()}
        return decode_transaction_log(out.finish(out.table(every)))


def test_logs_of_release_1_have_no_moves() -> None:
    """The field is absent."""
    assert OtherLog().decode() == EMPTY


def test_chunks_in_any_order_are_sorted() -> None:
    """Repeated chunks count once."""
    other = OtherLog()
    other.touch(node_id(1), [(2,), (0,), (2,)])
    assert other.decode().updated_chunks[node_id(1)].tolist() == [[0], [2]]


def test_chunks_in_order_are_not_sorted_again() -> None:
    """Writers put them in order, and there may be millions."""
    coords = np.array([[0, 5], [1, 0], [1, 7]], np.uint32)
    assert unique_coordinates(coords) is coords
    twice = np.repeat(coords, 2, axis=0)
    assert unique_coordinates(twice).tolist() == coords.tolist()
    assert unique_coordinates(coords[::-1]).tolist() == coords.tolist()


def test_chunks_of_another_rank_are_no_chunks() -> None:
    """The official engine notes coordinates of any rank; who knows the array asks by rank."""
    other = OtherLog()
    other.touch(node_id(1), [(0,), (2, 2), (0,), (1, 3), (2, 3), ()])
    log = other.decode()
    assert log.updated_chunks[node_id(1)].tolist() == [[1, 3], [2, 2], [2, 3]]
    assert log.chunks_of(node_id(1), 2) is log.updated_chunks[node_id(1)]
    assert log.chunks_of(node_id(1), 1).tolist() == [[0]]
    assert log.chunks_of(node_id(1), 0).shape == (1, 0)
    assert log.chunks_of(node_id(1), 3).shape == (0, 3)
    assert log.chunks_of(node_id(9), 2).shape == (0, 2)


def test_merging_picks_chunks_of_the_rank_that_counts() -> None:
    """However many strays there were."""
    other = OtherLog()
    other.touch(node_id(1), [(0,), (1,), (5, 5)])
    later = replace(EMPTY, updated_chunks=chunks(n1=[(2, 2)]))
    merged = other.decode().merge(later)
    assert merged.updated_chunks[node_id(1)].tolist() == [[2, 2], [5, 5]]


def test_an_array_without_touched_chunks_reads() -> None:
    """No one is known to write it."""
    other = OtherLog()
    other.touch(node_id(1), [])
    assert len(other.decode().updated_chunks[node_id(1)]) == 0


def test_an_array_listed_twice_is_refused() -> None:
    """Half of its chunks would be missed, and conflicts with them."""
    other = OtherLog()
    other.touch(node_id(1), [(0,)])
    other.touch(node_id(1), [(1,)])
    with pytest.raises(FormatError, match="twice"):
        other.decode()


def test_an_id_may_be_in_several_lists() -> None:
    """After an amend it can be new, updated and deleted."""
    other = OtherLog()
    ids = other.out.structs(node_id(5), 8, 1)
    log = other.decode(s1=ids, s3=ids, s6=ids)
    assert log.new_groups == log.deleted_groups == log.updated_groups == {node_id(5)}


@pytest.mark.parametrize("slot", range(8))
def test_required_fields_are_required(slot: int) -> None:
    """All but the moves."""
    with pytest.raises(FormatError, match="required field"):
        OtherLog().decode(**{f"s{slot}": None})


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_moves_need_both_paths_and_the_node(missing: int) -> None:
    """Though the schema does not say so."""
    other = OtherLog()
    path = other.out.string("/a")
    fields: dict[int, Field] = {0: path, 1: path, 2: Struct(node_id(1))}
    move = other.out.table({**fields, missing: None})
    with pytest.raises(FormatError, match="required field"):
        other.decode(s8=other.out.offsets([move]))


def test_a_move_of_unknown_type_is_refused() -> None:
    """It is neither of a group nor of an array."""
    other = OtherLog()
    path = other.out.string("/a")
    move = other.out.table({0: path, 1: path, 2: Struct(node_id(1)), 3: Scalar(2, 1)})
    with pytest.raises(FormatError, match="unknown type"):
        other.decode(s8=other.out.offsets([move]))


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(("shape", "level"), [((50_000,), 1), ((200, 250), 3)])
def test_a_quick_level_makes_no_larger_files(
    shape: tuple[int, ...], level: int, share: float
) -> None:
    """Where what is further back helps, or another level is configured, that level stays."""
    places = np.arange(np.prod(shape))
    places = places[np.random.default_rng(1).random(len(places)) < share]
    coords = np.stack(np.unravel_index(places, shape), axis=1).astype(np.uint32)
    log = replace(EMPTY, updated_chunks={node_id(1): coords})
    twice = replace(EMPTY, updated_chunks={node_id(1): coords, node_id(2): coords})
    assert [fitting_level(log, it) for it in (3, 1, 10)] == [level, 1, 10]
    assert fitting_level(twice, 3) == fitting_level(EMPTY, 3) == 3
    payload = encode_transaction_log(log, 2)
    sizes = [len(pack(payload, FileType.TRANSACTION_LOG, 2, level=it)) for it in (level, 3)]
    assert sizes[0] <= 1.01 * sizes[1]


def test_empty_lists_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that others overtook reads the logs of all of them, and most lists are empty."""
    read: list[int] = []
    vectors = Vectors.items

    def items(self: Vectors) -> object:
        read.append(int(self.counts.sum()))
        return vectors(self)

    monkeypatch.setattr(Vectors, "items", items)
    node = node_id(1)
    log = TransactionLog(
        snapshot_id(1),
        updated_arrays=frozenset({node}),
        updated_chunks={node: np.array([[3]], np.uint32)},
    )
    decode_transaction_log(encode_transaction_log(log, 2))
    assert read
    assert min(read) == 1


def columns_of(touched: dict[NodeId, list[Coordinates]]) -> Touched:
    """Return touched chunks as a log holds them."""
    return {
        node: np.array(sorted(rows), np.uint32).reshape(len(rows), len(rows[0]) if rows else 2)
        for node, rows in touched.items()
    }


@settings(deadline=None)
@given(
    st.dictionaries(
        NODE_IDS,
        st.integers(0, 3).flatmap(lambda rank: st.lists(coordinates(rank), unique=True)),
        max_size=8,
    ),
    st.sampled_from([0, 2, 512]),
    st.sampled_from([1, 7, 1 << 13]),
)
def test_small_arrays_are_written_as_large_ones_are(
    touched: dict[NodeId, list[Coordinates]], small: int, block: int
) -> None:
    """Byte for byte, whatever their ranks, and however many are written at a time."""
    log = replace(EMPTY, updated_chunks=columns_of(touched))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_log, "_FEW", -1)
        patch.setattr(transaction_log, "_SMALL", -1)
        expected = bytes(encode_transaction_log(log, 2))
        patch.setattr(transaction_log, "_SMALL", small)
        patch.setattr(transaction_log, "BLOCK", block)
        assert bytes(encode_transaction_log(log, 2)) == expected


@examples(200)
@given(
    st.dictionaries(
        NODE_IDS,
        st.integers(0, 3).flatmap(
            lambda rank: st.lists(coordinates(rank), unique=True, max_size=9)
        ),
        max_size=4,
    ),
    SNAPSHOT_IDS,
    st.sampled_from(["", "new_groups", "updated_groups", "moves"]),
)
def test_few_chunks_are_written_as_many_are(
    touched: dict[NodeId, list[Coordinates]], log_id: SnapshotId, more: str
) -> None:
    """Byte for byte; what a log has besides is not left out."""
    log = replace(EMPTY, id=log_id, updated_chunks=columns_of(touched))
    if more:
        move = Move("/a", "/b", node_id(3), is_array=True)
        value: Any = (move,) if more == "moves" else frozenset({node_id(1)})
        log = replace(log, **{more: value})
    written = bytes(encode_transaction_log(log, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_log, "_FEW", -1)
        assert bytes(encode_transaction_log(log, 2)) == written


def test_few_chunks_are_written_with_few_calls() -> None:
    """A small commit writes one log, and takes little more."""
    log = replace(EMPTY, updated_chunks={node_id(1): np.zeros((1, 2), np.uint32)})
    encode_transaction_log(log, 2)  # what all have in common is made
    with counted_calls() as made:
        encode_transaction_log(log, 2)
    assert len(made) <= 12, made


def test_an_array_more_costs_no_call() -> None:
    """A commit may touch a thousand small arrays."""

    def calls(arrays: int) -> int:
        coords = np.arange(20, dtype=np.uint32).reshape(-1, 1)
        touched = {node_id(it): coords for it in range(arrays)}
        with counted_calls() as made:
            encode_transaction_log(replace(EMPTY, updated_chunks=touched), 2)
        return len(made)

    assert calls(100) - calls(10) <= 90  # to see its rank
