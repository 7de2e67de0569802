"""Nodes by path: order, descendants, and paths that other writers did not normalise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope
from icechunk_async.format.flatbuffers.single import Reader, Row
from icechunk_async.format.snapshot import (
    ArrayData,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
    decode_snapshot,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from tests.unit.format.samples import (
    MANIFEST_IDS,
    NODE_IDS,
    PATHS,
    SNAPSHOT_IDS,
    TEXTS,
    TIMES,
    manifest_id,
    node_id,
    snapshot_id,
)
from tests.unit.format.table_builder import Field, Scalar, Struct, TableBuilder
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.json.metadata import JSON

TREE = ["/", "/a", "/a-b", "/a-b/c", "/a.b", "/a/b", "/a/b/c", "/a/b-c", "/a0", "/a0/b", "/é"]


def nodes_of(paths: list[str]) -> Nodes:
    """Read groups from a file that lists these paths in this order."""
    out = TableBuilder()
    tables = [
        out.table(
            {
                0: Struct(node_id(row)), 1: out.string(path), 2: out.blob(path.encode()),
                3: Scalar(2, 1), 4: out.table({}),
            }
        )
        for row, path in enumerate(paths)
    ]  # fmt: skip
    fields: dict[int, Field] = {
        0: Struct(snapshot_id(1)), 2: out.offsets(tables), 4: out.string(""),
        5: out.offsets([]), 6: out.structs(b"", 32, 8),
    }  # fmt: skip
    return decode_snapshot(Envelope(2, out.finish(out.table(fields)))).nodes


def in_memory(paths: list[str]) -> Nodes:
    """Make the same nodes without a file."""
    return Nodes(Node(node_id(row), path, path.encode()) for row, path in enumerate(paths))


type Make = Callable[[list[str]], Nodes]

BOTH = pytest.mark.parametrize("make", [nodes_of, in_memory])


@BOTH
def test_nodes_are_found_by_path(make: Make) -> None:
    """Each lookup returns the same object."""
    nodes = make(TREE)
    assert nodes["/a/b"] == Node(node_id(TREE.index("/a/b")), "/a/b", b"/a/b")
    assert nodes["/a/b"] is nodes["/a/b"]
    assert "/a/b" in nodes
    assert nodes.get("/nothing") is None
    assert "/nothing" not in nodes
    with pytest.raises(KeyError):
        nodes["/nothing"]


@BOTH
def test_paths_are_in_order_of_their_bytes(make: Make) -> None:
    """They may be given in any order."""
    expected = sorted(TREE, key=str.encode)
    for paths in (TREE, TREE[::-1]):
        nodes = make(paths)
        assert list(nodes) == nodes.paths == expected
        assert len(nodes) == len(TREE)
        assert [node.path for node in nodes.values()] == expected


@BOTH
def test_nodes_are_found_by_id(make: Make) -> None:
    """Which stays when a node moves."""
    nodes = make(TREE)
    assert nodes.path_of(node_id(2)) == "/a-b"
    assert nodes.path_of(node_id(99)) is None


@BOTH
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a", ["/a/b", "/a/b-c", "/a/b/c"]),
        ("/a/b", ["/a/b/c"]),
        ("/a-b", ["/a-b/c"]),
        ("/a.b", []),
        ("/a/b/c", []),
        ("/", [path for path in sorted(TREE) if path != "/"]),
        ("/missing", []),
        ("/a/b/", ["/a/b/c"]),
    ],
)
def test_below_are_descendants_only(make: Make, path: str, expected: list[str]) -> None:
    """Siblings such as ``/a-b`` and ``/a.b`` sort between ``/a`` and ``/a/b``."""
    assert list(make(TREE).below(path)) == expected


@BOTH
def test_the_root_group_may_be_missing(make: Make) -> None:
    """Any other group above a node may be missing too."""
    nodes = make(["/a/b/c", "/x"])
    assert "/" not in nodes
    assert list(nodes.below("/")) == ["/a/b/c", "/x"]
    assert list(nodes.below("/a")) == ["/a/b/c"]


def test_a_snapshot_without_nodes_is_empty() -> None:
    """The first snapshot has none, not even a root."""
    for nodes in (Nodes(), nodes_of([])):
        assert list(nodes) == []
        assert list(nodes.below("/")) == []
        assert nodes.path_of(node_id(0)) is None


@pytest.mark.parametrize(
    ("stored", "normal"),
    [
        ("/b/", "/b"), ("/d/./e", "/d/e"), ("//x", "/x"), ("/x//y", "/x/y"), ("/x/../y", "/y"),
        ("/.", "/"), ("/x/.", "/x"), ("/x/..", "/"), ("/../x", "/x"),
        ("//", "/"), ("/./x/", "/x"),
    ],
)  # fmt: skip
def test_unusual_paths_are_reached_by_their_normal_form(stored: str, normal: str) -> None:
    """The official engine does not normalize the paths that it stores."""
    nodes = nodes_of([stored, "/other"])
    assert nodes[normal].path == normal
    assert nodes[normal].user_data == stored.encode()
    assert nodes.path_of(node_id(0)) == normal
    assert sorted([normal, "/other"]) == nodes.paths
    assert normal == stored or stored not in nodes


@pytest.mark.parametrize("path", ["/.hidden", "/..x", "/a.", "/a..b/c", "/...", "/ ", "/a\\b"])
def test_names_with_dots_are_normal(path: str) -> None:
    """Only the names ``.`` and ``..`` mean something else."""
    assert nodes_of([path]).paths == [path]


def test_a_taken_path_stays_with_its_node() -> None:
    """The other keeps the path that it has in the file, so that it is not lost."""
    nodes = nodes_of(["/b/", "/b", "/d//e", "/d/./e", "/d/e/"])
    assert nodes["/b"].id == node_id(1)
    assert nodes["/b/"].id == node_id(0)
    assert nodes["/d/e"].id == node_id(2)
    assert nodes["/d/./e"].id == node_id(3)
    assert nodes["/d/e/"].id == node_id(4)


def test_descendants_of_unnormalised_paths_are_found() -> None:
    """Order follows the new paths."""
    nodes = nodes_of(["/a-b", "/a/", "/a/./c"])
    assert list(nodes) == ["/a", "/a-b", "/a/c"]
    assert list(nodes.below("/a")) == ["/a/c"]


def test_paths_are_written_in_normal_form() -> None:
    """A commit mends the file."""
    snapshot = Snapshot(snapshot_id(1), None, 5, "", nodes=nodes_of(["/b/", "/d/./e"]))
    tables = root(encode_snapshot(snapshot, 2)).tables(2)
    assert [table.string(1) for table in tables] == ["/b", "/d/e"]


@pytest.mark.parametrize("path", ["", "x", "x/y", "./x", "../x", "\\x", "\0/x"])
def test_a_relative_path_is_refused(path: str) -> None:
    """No writer makes one, and nothing would list it."""
    nodes = nodes_of(["/a", path])
    with pytest.raises(FormatError, match="begin with a slash"):
        list(nodes)


def test_a_path_listed_twice_is_refused() -> None:
    """Two nodes cannot be told apart."""
    for paths in (["/a", "/a"], ["/", "/a", "/a", "/b"], ["/b", "/a", "/b", "/a"]):
        with pytest.raises(FormatError, match="twice"):
            list(nodes_of(paths))
        with pytest.raises(FormatError, match="twice"):
            nodes_of(paths).get("/a")
        with pytest.raises(FormatError, match="twice"):
            nodes_of(paths).edited([], ["/a"])
    assert nodes_of(["/a", "/a", "/b"])["/b"].id == node_id(2)


def test_nodes_out_of_order_are_found() -> None:
    """Unlike in the official engine, which searches by halving."""
    nodes = nodes_of(["/z", "/a", "/m"])
    assert [nodes[path].id for path in ("/a", "/m", "/z")] == [node_id(1), node_id(2), node_id(0)]


@given(st.sets(PATHS, max_size=15), PATHS)
def test_below_matches_the_prefix(paths: set[str], path: str) -> None:
    """This holds for any tree, closed or not."""
    prefix = "/" if path == "/" else path + "/"
    expected = sorted(it for it in paths if it.startswith(prefix) and it != path)
    for make in (nodes_of, in_memory):
        assert list(make(list(paths)).below(path)) == expected


WORDS = st.integers(0, 2**32 - 1)


@st.composite
def arrays(draw: st.DrawFn) -> ArrayData:
    """Draw what a snapshot knows of an array; any grid that spec 1 can express."""
    rank = draw(st.integers(0, 3))
    dimensions = tuple(
        Dimension(length, -(-length // chunk))
        for length, chunk in draw(
            st.lists(
                st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 2**40)),
                min_size=rank,
                max_size=rank,
            )
        )
    )
    names = st.lists(st.none() | TEXTS.filter(bool), min_size=rank, max_size=rank).map(tuple)
    boxes = st.lists(st.tuples(WORDS, WORDS), min_size=rank, max_size=rank).map(tuple)
    refs = st.lists(st.builds(ManifestRef, MANIFEST_IDS, boxes), max_size=3).map(tuple)
    return ArrayData(dimensions, draw(st.none() | names), draw(refs))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw a snapshot that both versions can express."""
    paths = draw(st.sets(PATHS, max_size=6))
    ids: list[NodeId] = draw(st.lists(NODE_IDS, min_size=len(paths), max_size=len(paths)))
    nodes = [
        Node(identifier, path, draw(st.binary(max_size=9)), draw(st.none() | arrays()))
        for identifier, path in zip(ids, sorted(paths), strict=True)
    ]
    infos = draw(
        st.lists(st.builds(ManifestFileInfo, MANIFEST_IDS, st.integers(0, 2**63 - 1), WORDS))
    )
    values: st.SearchStrategy[JSON] = st.none() | st.integers(-(2**63), 2**64 - 1) | TEXTS
    metadata: st.SearchStrategy[dict[str, JSON]] = st.dictionaries(TEXTS, values)
    return Snapshot(
        draw(SNAPSHOT_IDS), draw(st.none() | SNAPSHOT_IDS), draw(TIMES), draw(TEXTS),
        draw(metadata), Nodes(nodes), {info.id: info for info in infos},
    )  # fmt: skip


@settings(deadline=None)
@given(snapshots(), st.sampled_from([1, 2]))
def test_snapshots_read_back(snapshot: Snapshot, spec: int) -> None:
    """In both versions; spec 2 has no parent."""
    found = decode_snapshot(Envelope(spec, bytes(encode_snapshot(snapshot, spec))))
    assert found.nodes == snapshot.nodes
    assert found.manifests == snapshot.manifests
    assert found.metadata == snapshot.metadata
    assert (found.id, found.flushed_at, found.message) == (
        snapshot.id, snapshot.flushed_at, snapshot.message,
    )  # fmt: skip
    assert found.parent_id == (snapshot.parent_id if spec == 1 else None)


@settings(deadline=None)
@given(snapshots(), st.sampled_from([1, 2]))
def test_files_are_in_order(snapshot: Snapshot, spec: int) -> None:
    """Nodes by path, metadata by name, manifests by id, all by bytes; every word aligned."""
    table = root(encode_snapshot(snapshot, spec))
    nodes = [(node.string(1) or "").encode() for node in table.tables(2)]
    assert nodes == sorted(set(nodes))
    names = [(item.string(0) or "").encode() for item in table.tables(5)]
    assert names == sorted(set(names))
    if spec == 1:
        files = [raw[:12] for raw in table.structs(6, 32, 8) or []]
    else:
        files = [info.raw(0, 12) or b"" for info in table.tables(7)]
        assert all(info.number(1, 8) != 0 for info in table.tables(7))
    assert files == sorted(snapshot.manifests)


def test_nodes_are_found_by_id_any_number_of_times() -> None:
    """Repeated reads of one path are not taken for a file that unfolds without end."""
    nodes = nodes_of(["/a" * 50, "/b"])
    for _ in range(100):
        assert nodes.path_of(node_id(0)) == "/a" * 50


def test_many_lookups_decode_the_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones halve the sorted list, and look at ten entries each."""
    looked_at = 0
    item = Reader.item

    def counted(reader: Reader, first: int, index: int) -> Row:
        nonlocal looked_at
        looked_at += 1
        return item(reader, first, index)

    monkeypatch.setattr(Reader, "item", counted)
    paths = [f"/{number:04}" for number in range(1000)]
    files = {it.id: it for it in (ManifestFileInfo(manifest_id(n), n, 1) for n in range(1000))}
    nodes = in_memory(paths)
    encoded = encode_snapshot(
        Snapshot(snapshot_id(1), None, 5, "", manifests=files, nodes=nodes), 2
    )
    for few in (True, False):
        snapshot = decode_snapshot(Envelope(2, encoded))
        looked_at = 0
        count = 20 if few else 1000
        for path in paths[::-1][:count]:
            assert snapshot.nodes[path].path == path
        for manifest in list(files)[::-1][:count]:
            assert snapshot.manifests[manifest] == files[manifest]
        found = looked_at
        if few:
            assert "index" not in vars(snapshot.nodes.table), "decoded for a few lookups"
        else:
            assert found < 3500


def test_damage_elsewhere_is_no_error_however_many_lookups_came_before() -> None:
    """Lookups that do not read the damaged entry answer; only what decodes all fails."""
    count, most = 200, (1 << 63) - 1
    paths = [f"/{number:04}" for number in range(count)]
    sizes = [*range(count - 1), most]
    infos = [ManifestFileInfo(manifest_id(it), size, 1) for it, size in enumerate(sizes)]
    files = {it.id: it for it in infos}
    written = Snapshot(snapshot_id(1), None, 5, "", manifests=files, nodes=in_memory(paths))
    encoded = bytes(encode_snapshot(written, 2))
    encoded = encoded.replace(paths[-1].encode(), b"\xff" + paths[-1].encode()[1:])
    encoded = encoded.replace(most.to_bytes(8, "little"), b"\xff" * 8)
    snapshot = decode_snapshot(Envelope(2, encoded))
    for path in paths[:-1]:
        assert snapshot.nodes[path].path == path
    for manifest in list(files)[:-1]:
        assert snapshot.manifests[manifest] == files[manifest]
    with pytest.raises(FormatError, match="not UTF-8"):
        list(snapshot.nodes)
    with pytest.raises(FormatError, match="beyond any object's size"):
        list(snapshot.manifests)
