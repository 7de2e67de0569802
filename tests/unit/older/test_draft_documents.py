"""The files of the first draft: what is written is read back, and damage is a FormatError."""

from __future__ import annotations

import asyncio
import io
import json
import random
import threading
import tracemalloc
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError, IcechunkError, InvalidMetadataError
from icechunk_async.format.draft import manifests
from icechunk_async.format.draft.coordinates import decode_columns, encode_columns, encode_coords
from icechunk_async.format.draft.manifests import (
    UNSIZED_TAIL,
    decode_manifest,
    encode_manifest,
    open_pieces,
)
from icechunk_async.format.draft.metadata import read_array, write_array
from icechunk_async.format.draft.names import chunk_ids, chunk_names, manifest_id, name_of
from icechunk_async.format.draft.pages import measure
from icechunk_async.format.draft.parquet import numbers, python_values
from icechunk_async.format.draft.state import decode_state, encode_state
from icechunk_async.format.draft.structure import encode_structure, read_structure
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId, SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.held import EXPAND, Undecided
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import (
    ArrayData,
    AttributesPlace,
    Dimension,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
)
from icechunk_async.format.zarr_array import Extension, ZarrArray, array_document, group_document
from tests.unit.older.draft_golden import golden_draft
from tests.unit.older.draft_writer import MANIFEST, coord, parquet, row
from tests.unit.older.older_tools import damage, holding, read_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates
    from icechunk_async.format.manifest.reading import Manifest


ID = ManifestId(bytes(range(12)))
NUMBERS = st.one_of(
    st.integers(0, 300),
    st.integers(0, 1 << 17),
    st.integers(0, (1 << 32) - 1),
    st.sampled_from([240, 241, 2287, 2288, 67823, 67824, (1 << 24) - 1, 1 << 24, (1 << 32) - 1]),
)
CHUNKS = st.integers(0, 5).flatmap(
    lambda rank: st.lists(st.tuples(*[NUMBERS] * rank), min_size=1, max_size=20)
)


@given(st.integers(1, 5).flatmap(lambda rank: st.tuples(*[st.tuples(*[NUMBERS] * rank)] * 2)))
def test_the_order_of_bytes_is_that_of_coordinates(pair: Any) -> None:
    """Of chunks of one array, however long their bytes are."""
    one, other = pair
    assert (encode_coords(one) < encode_coords(other)) == (one < other)
    assert (encode_coords(one) == encode_coords(other)) == (one == other)


@given(CHUNKS)
def test_coordinates_survive(chunks: list[tuple[int, ...]]) -> None:
    """Many at once as one by one, and as an independent writer has them."""
    rank = len(chunks[0])
    data, bounds = encode_columns(np.array(chunks, np.uint32).reshape(len(chunks), rank))
    raw = data.tobytes()
    encoded = [raw[a:b] for a, b in pairwise(bounds)]
    assert encoded == [encode_coords(it) for it in chunks]
    small = [it for it in chunks if max(it, default=0) <= 67823]
    assert [encode_coords(it) for it in small] == [coord(*it) for it in small]
    ((rows, coords),) = decode_columns(data, bounds)
    assert rows.tolist() == list(range(len(chunks)))
    assert [tuple(it) for it in coords.tolist()] == chunks


def test_chunks_of_several_ranks_are_told_apart() -> None:
    """Each row's bytes say how many axes it has."""
    raws = [coord(1, 2), coord(3), b"", coord(300, 1), coord(67823)]
    bounds = np.cumsum([0, *map(len, raws)])
    found = decode_columns(np.frombuffer(b"".join(raws), np.uint8), bounds)
    assert [(rows.tolist(), coords.tolist()) for rows, coords in found] == [
        ([2], [[]]),
        ([1, 4], [[3], [67823]]),
        ([0, 3], [[1, 2], [300, 1]]),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"\xf1",
        b"\xf1\x00",  # 240 in two bytes
        b"\xf9\x00",
        b"\xfa\x00\x00\x01",  # 1 in four bytes
        b"\xfb\x00\x00\x00\x01",
        b"\xfc\x01\x02\x03\x04\x05",  # beyond 32 bits
        b"\xff" * 9,
        b"\x01\xf1",
        b"\x00" * 65,
    ],
)
def test_bytes_that_are_no_coordinates_are_refused(raw: bytes) -> None:
    """Cut off, in more bytes than needed, too large, of too many axes."""
    with pytest.raises(FormatError):
        decode_columns(np.frombuffer(raw, np.uint8), np.array([0, len(raw)]))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=300, unique=True), st.data())
def test_coordinates_can_be_a_predicate(chunks: list[tuple[int, int]], data: Any) -> None:
    """A comparison of bytes in Arrow chooses the chunks between two others."""
    low, high = sorted(data.draw(st.tuples(*[st.sampled_from(chunks)] * 2)))
    table = pa.table({"coord": pa.array([encode_coords(it) for it in chunks], pa.binary())})
    chosen = (pc.field("coord") >= encode_coords(low)) & (pc.field("coord") <= encode_coords(high))
    found = ds.dataset(table).to_table(filter=chosen).to_pydict()["coord"]
    assert sorted(found) == [encode_coords(it) for it in sorted(chunks) if low <= it <= high]


REFS = st.one_of(
    st.binary(max_size=5).map(InlineChunk),
    st.builds(
        NativeChunk,
        st.binary(min_size=12, max_size=12).map(ChunkId),
        st.integers(0, 1 << 40),
        st.integers(0, (1 << 32) - 1),
    ),
    st.builds(
        VirtualChunk,
        st.sampled_from(["s3://b/k", "https://host/ä b", "vcc://name/x"]),
        st.integers(0, 1 << 61),
        st.integers(0, (1 << 32) - 1),
    ),
)


@given(
    st.dictionaries(
        st.integers(0, (1 << 32) - 1),
        st.integers(0, 3).flatmap(
            lambda rank: st.tuples(
                st.just(rank),
                st.dictionaries(st.tuples(*[NUMBERS] * rank), REFS, min_size=1, max_size=8),
            )
        ),
        min_size=1,
        max_size=3,
    )
)
def test_manifests_survive(given_refs: dict[int, tuple[int, Any]]) -> None:
    """Read whole, and by pieces."""
    arrays = {
        NodeId(number.to_bytes(8)): ChunkRefs.from_mapping(rank, refs).sort()
        for number, (rank, refs) in given_refs.items()
    }
    data = encode_manifest(arrays, 3)
    found = decode_manifest(ID, data)
    pieces = open_pieces(ID, len(data), data[-UNSIZED_TAIL:])
    assert pieces is not None
    assert set(found.arrays) == set(arrays)
    for node_id, refs in arrays.items():
        for at, coords in enumerate(map(tuple, refs.coords.tolist())):
            assert found.lookup(node_id, coords) == refs.ref(at)
            held = pieces.lookup(node_id, coords)
            if isinstance(held, Undecided):
                for extent in held.extents:
                    held.fill(extent, data[slice(*extent)])
                held = pieces.lookup(node_id, coords)
            assert held == refs.ref(at)
    assert pq.read_table(io.BytesIO(data)).schema.equals(MANIFEST)


class _Watched:
    """A lock that tells when somebody wants it."""

    def __init__(self, wanted: threading.Event) -> None:
        self._lock = threading.Lock()
        self._wanted = wanted

    def __enter__(self) -> None:
        if self._lock.locked():
            self._wanted.set()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_threads_that_fetch_one_group_do_not_clear_it_under_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one comes while the first one decodes; it waits, or it has finished meanwhile."""
    node_id = NodeId((1).to_bytes(8))
    refs: dict[Coordinates, ChunkRef | None] = {
        (at,): NativeChunk(ChunkId.random(), at, 10) for at in range(50)
    }
    data = encode_manifest({node_id: ChunkRefs.from_mapping(1, refs)}, 3)
    pieces = open_pieces(ID, len(data), data)
    assert pieces is not None
    went_on = threading.Event()
    monkeypatch.setattr(pieces, "_lock", _Watched(went_on), raising=False)
    undecided = pieces.lookup(node_id, (7,))
    assert isinstance(undecided, Undecided)
    (extent,) = undecided.extents
    decode = manifests.decode_groups
    others: list[threading.Thread] = []

    def fill() -> None:
        undecided.fill(extent, data[slice(*extent)])
        went_on.set()

    def decode_later(*args: Any) -> Manifest:
        if not others:
            others.append(threading.Thread(target=fill))
            others[0].start()
            assert went_on.wait(60)
        return decode(*args)

    monkeypatch.setattr(manifests, "decode_groups", decode_later)
    fill()
    others[0].join()
    assert pieces.lookup(node_id, (7,)) == refs[7,]


def test_groups_without_statistics_may_hold_anything() -> None:
    """Other writers need not store any; where too many groups may hold a chunk, all are read."""
    rows = [{"id": at, **row(1, (at,), inline_data=b"%d" % at)} for at in range(20)]
    table = pa.Table.from_pylist(rows, schema=MANIFEST)
    node_id = NodeId((1).to_bytes(8))
    for options, groups in (({}, 1), ({"write_statistics": False}, None)):
        data = parquet(table, row_group_size=4, **options)
        pieces = open_pieces(ID, len(data), data)
        assert pieces is not None
        found = pieces.lookup(node_id, (9,))
        assert isinstance(found, Undecided)
        assert (found is EXPAND) == (groups is None)
        assert decode_manifest(ID, data).lookup(node_id, (9,)) == InlineChunk(b"9")


def test_names_of_others_stand_for_ids_and_back() -> None:
    """Ours are the text of an id; others are remembered."""
    ours = ManifestId.random()
    assert manifest_id(f"{ours}.parquet") == ours
    assert name_of(ours) == f"{ours}.parquet"
    for name in ("x.parquet", f"{ours}", f"{str(ours).lower()}.parquet", "deep/er/name"):
        found = manifest_id(name)
        assert found != ours
        assert name_of(found) == name
    names = [str(ChunkId.random()), "some chunks.nc", "0" * 19 + "1"]
    assert chunk_names(chunk_ids(names)) == names
    for name in ("", "/x", "a//b", "../x", "a/./b", "a\\b", "a\nb", "x" * 2000):
        with pytest.raises(FormatError, match="name of a file"):
            manifest_id(name)


FLOATS = st.binary(min_size=8, max_size=8)
ARRAYS = st.builds(
    lambda shape, fill, names, codecs, attributes: ZarrArray(
        tuple(it[0] for it in shape),
        tuple(it[1] for it in shape),
        "float64",
        fill,
        tuple(codecs),
        None if names is None else tuple(names[: len(shape)]),
        (),
        attributes,
    ),
    st.lists(st.tuples(st.integers(0, 65535), st.integers(1, 65535)), max_size=4),
    FLOATS,
    st.none() | st.lists(st.none() | st.text(max_size=3), min_size=4, max_size=4),
    st.lists(st.sampled_from([Extension("bytes", {"endian": "little"}), Extension("x")])),
    st.dictionaries(
        st.text(max_size=3), st.none() | st.floats(allow_nan=False, allow_infinity=False)
    ),
)


@given(ARRAYS)
def test_metadata_of_arrays_survives_to_the_last_bit(array: ZarrArray) -> None:
    """Shapes to 65535, fill values that are any bytes, names, codecs and attributes."""
    axes = tuple(
        Dimension(size, -(-size // chunk))
        for size, chunk in zip(array.shape, array.chunk_shape, strict=True)
    )
    names = array.dimension_names
    data = ArrayData(
        axes,
        None if names is None else tuple(it or None for it in names),
        (ManifestRef(ID, tuple((0, it.num_chunks) for it in axes)),),
    )
    nodes = [
        Node(NodeId(bytes(8)), "/", group_document({})),
        Node(NodeId((65535).to_bytes(8)), "/ä/b", array_document(array), data),
    ]
    encoded = encode_structure(
        Snapshot(SnapshotId(bytes(12)), None, 0, "", nodes=Nodes(nodes)), None, 3
    )
    found, places = read_structure(encoded.data).decode({})
    assert list(found.values()) == nodes
    assert places == {}


@pytest.mark.parametrize(("size", "is_apart"), [((1 << 14) - 1, False), (1 << 14, True)])
def test_attributes_from_a_size_on_are_stored_apart(size: int, is_apart: bool) -> None:  # noqa: FBT001
    """From 16 KiB on; the structure file says where."""
    attributes = {"a": "x" * (size - len('{"a":""}'))}
    root = Node(NodeId(bytes(8)), "/", group_document(attributes))
    made = Snapshot(SnapshotId(bytes(12)), None, 0, "", nodes=Nodes([root]))
    encoded = encode_structure(made, None, 3)
    assert bool(encoded.files) == is_apart
    structure = read_structure(encoded.data)
    assert list(structure.needs) == list(encoded.files)
    nodes, places = structure.decode(encoded.files)
    assert nodes["/"].user_data == root.user_data
    expected = {root.id: AttributesPlace(structure.needs[0], 0)} if is_apart else {}
    assert places == expected == encoded.places


# Damage


def _look_at(key: str, data: bytes, attributes: dict[str, bytes]) -> None:
    if key == "state.json":
        encode_state(decode_state(data))
    elif key.startswith("i/"):
        manifest = decode_manifest(ID, data)
        pieces = open_pieces(ID, len(data), data)
        for node_id, refs in manifest.arrays.items():
            for at in range(len(refs)):
                refs.ref(at)
            if pieces is not None and len(refs):
                pieces.lookup(node_id, tuple(refs.coords[0].tolist()))
    elif key.startswith("s/"):
        structure = read_structure(data)
        structure.decode({it: attributes.get(it, b"") for it in structure.needs})


def _tolerate(work: Callable[[], object]) -> None:
    with suppress(FormatError):
        work()


SEEDS = [0, *(pytest.param(it, marks=pytest.mark.thorough) for it in range(1, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_parquet_is_a_format_error(seed: int) -> None:
    """Bytes changed, removed and cut off, in the pages, their headers, and the metadata."""
    rng = random.Random(seed)
    found = golden_draft().objects
    attributes = {key: data for key, data in found.items() if key.startswith("a/")}
    for key, data in found.items():
        if key[0] not in "ias":
            continue
        for _ in range(60):
            raw = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 8])):
                at = rng.randrange(len(raw))
                raw[at] = rng.choice([rng.randrange(256), raw[at] ^ 1 << rng.randrange(8), 255])
            if rng.random() < 0.2:
                del raw[rng.randrange(len(raw)) :]
            elif rng.random() < 0.1:
                del raw[rng.randrange(len(raw))]
            damaged = bytes(raw)
            if key[0] == "a":
                user = next(it for it in found if it.startswith("s/") and key[2:] in str(found[it]))
                _tolerate(partial(_look_at, user, found[user], {key: damaged}))
            else:
                _tolerate(partial(_look_at, key, damaged, attributes))


@pytest.mark.parametrize("index", [-1, 1, 1 << 30])
def test_an_index_that_the_dictionary_does_not_have_is_a_format_error(index: int) -> None:
    """Parquet readers do not look at the indices of a column that nobody asked to be decoded."""
    indices = pa.array([index], pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array([b"one"]), safe=False)  # type: ignore[call-arg]  # not in its types
    with pytest.raises(FormatError, match="does not have"):
        python_values(pa.table({"it": column})["it"], "file")


def test_our_own_mistakes_are_no_damage() -> None:
    """An error that the package for Parquet does not raise stays what it is."""
    column = pa.table({"it": [1]})["it"]
    with pytest.raises(ValueError, match="alias"):
        numbers(column, "no type", "file")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        python_values(None, "file")


@pytest.mark.parametrize("seed", range(2))
def test_damaged_state_files_are_format_errors(seed: int) -> None:
    """Values of another kind, missing, repeated, too large, and bytes that are no document."""
    rng = random.Random(seed)
    data = golden_draft().objects["state.json"]
    for _ in range(300):
        damaged = json.dumps(damage(rng, json.loads(data))).encode()
        _tolerate(partial(_look_at, "state.json", damaged, {}))
    for bomb in (b"[" * 100_000, b'{"snapshots":' * 50_000, b'{"id": "' + b"\\ud800" + b'"}', b""):
        with pytest.raises(FormatError):
            decode_state(bomb)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"refs": {"main": {"name": "main", "snapshot-id": "x", "type": "branch"}}}, "not listed"),
        ({"refs": {"main": {"name": "other", "snapshot-id": "x", "type": "branch"}}}, "calls"),
        ({"refs": {"v": {"name": "v", "snapshot-id": "x", "type": "head"}}}, "unknown type"),
        ({"snapshots": None}, "snapshots"),
        ({"generation": -1}, "integer"),
        ({"generation": "1"}, "integer"),
    ],
)
def test_faults_of_state_files_are_named(change: dict[str, Any], what: str) -> None:
    """In the words of the document."""
    document = json.loads(golden_draft().objects["state.json"])
    with pytest.raises(FormatError, match=what):
        decode_state(json.dumps({**document, **change}).encode())


def _manifest_of(**columns: Any) -> pa.Table:
    count = len(next(iter(columns.values())))
    plain = {
        "id": np.arange(count, dtype=np.uint32),
        "array_id": np.ones(count, np.uint32),
        "coord": [coord(at) for at in range(count)] if "coord" not in columns else None,
        "inline_data": pa.nulls(count, pa.binary()),
        "chunk_file": ["x"] * count if "chunk_file" not in columns else None,
        "offset": np.zeros(count, np.uint64),
        "length": np.ones(count, np.uint32),
    }
    return pa.table({**plain, **columns})


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (_manifest_of(coord=[b"\1", b"\1"]), "two references"),
        (_manifest_of(coord=[None, b"\1"]), "without coordinates"),
        (_manifest_of(inline_data=[b"x"]), "not in one place"),
        (_manifest_of(chunk_file=pa.nulls(1, pa.string())), "not in one place"),
        (_manifest_of(chunk_file=pa.nulls(1, pa.string()), inline_data=[b"xy"]), "another length"),
        (_manifest_of(offset=np.array([1 << 63], np.uint64)), "beyond"),
        (_manifest_of(length=pa.nulls(1, pa.uint32())), "lacks"),
        (_manifest_of(length=np.array([-1])), "damaged"),
        (_manifest_of(length=["x"]), "needs uint32"),
        (_manifest_of(coord=[1]), "needs binary"),
        (_manifest_of(coord=["x"]).drop_columns("length"), "one column 'length'"),
        (pa.table({"x": [1]}), "one column 'array_id'"),
        (_manifest_of(chunk_file=["../../x"]), "name of a file"),
    ],
)
def test_faults_of_manifests_are_named(table: pa.Table, what: str) -> None:
    """In the words of the document."""
    with pytest.raises(FormatError, match=what):
        decode_manifest(ID, parquet(table))


@pytest.mark.parametrize(
    "place", [("chunk_grid",), ("chunk_key_encoding",), ("chunk_grid", "configuration")]
)
def test_parts_of_metadata_that_are_null_are_named(place: tuple[str, ...]) -> None:
    """A column of structures may hold nulls anywhere."""
    array = ZarrArray((4,), (2,), "uint8", b"\0", (), None, (), {})
    value: Any = write_array(array)
    part = value
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = None
    with pytest.raises(FormatError, match=f"has the {place[-1]} null"):
        read_array(value, "/a", {})


def _bounded(work: Callable[[], object], most_bytes: int) -> None:
    """Expect a FormatError before more than some memory was taken."""
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    try:
        with pytest.raises(FormatError, match=r"believed|at most"):
            work()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
        assert pa.total_allocated_bytes() - before < most_bytes
    finally:
        tracemalloc.stop()


def test_bombs_are_refused_before_they_are_read() -> None:
    """Rows that take no bytes, pages that decompress to gigabytes, more nodes than there can be."""
    many = 3_000_000
    rows = _manifest_of(
        array_id=pa.array(np.ones(many, np.uint32)), coord=pa.nulls(many, pa.binary())
    )
    rows = rows.set_column(4, "chunk_file", pa.nulls(many, pa.string()))
    rows = rows.set_column(0, "id", pa.array(np.zeros(many, np.uint32)))
    _bounded(partial(decode_manifest, ID, parquet(rows, compression="zstd")), 100 << 20)
    zeros = _manifest_of(
        chunk_file=pa.nulls(1, pa.string()), inline_data=[bytes(100 << 20)],
        length=np.array([100 << 20], np.uint32),
    )  # fmt: skip
    _bounded(partial(decode_manifest, ID, parquet(zeros, compression="zstd")), 10 << 20)
    nodes = pq.read_table(io.BytesIO(encode_structure(_empty(), None, 3).data))
    group = {"id": 1, "type": "group", "path": "/x"}
    nodes = pa.Table.from_pylist([group] * 65_537, schema=nodes.schema)
    _bounded(partial(read_structure, parquet(nodes)), 100 << 20)


def _empty() -> Snapshot:
    return Snapshot(SnapshotId(bytes(12)), None, 0, "")


def test_one_large_value_does_not_grow_with_the_rows_that_share_it() -> None:
    """Attributes that a dictionary has once, and 400 nodes refer to: refused while read."""
    schema = pq.read_table(io.BytesIO(encode_structure(_empty(), None, 3).data)).schema
    large = b'{"x": "' + b"y" * 500_000 + b'"}'
    rows = [
        {"id": at, "type": "group", "path": f"/{at}", "inline_attrs": large} for at in range(400)
    ]
    data = parquet(pa.Table.from_pylist(rows, schema=schema), compression="zstd")
    assert len(data) < 100_000
    structure = read_structure(data)
    _bounded(partial(structure.decode, {}), 300 << 20)


@pytest.mark.parametrize(
    "raw", [b"\x15\x00", b"\x19" * 40, b"\x1c" * 40, b"\xff" * 40, b"\x18\xff"]
)
def test_headers_of_pages_that_are_none_are_refused(raw: bytes) -> None:
    """Cut off, nested without end, of unknown kinds."""
    with pytest.raises(FormatError, match="header"):
        measure(memoryview(raw))


@pytest.mark.parametrize("prefix", ["state.json", "s/", "i/", "a/", "c/"])
async def test_a_repository_with_damaged_or_missing_files_is_not_read_half(prefix: str) -> None:
    """Files of each kind."""
    found = golden_draft().objects
    async with holding(found) as storage:
        damaged = [key for key in found if key.startswith(prefix)]
        await asyncio.gather(*(storage.put(key, b"{}"[: prefix != "c/"]) for key in damaged))
        with pytest.raises(FormatError):
            await read_all(storage)
        assert not await storage.delete(damaged)
        with pytest.raises(IcechunkError, match=r"missing|state\.json"):
            await read_all(storage)


def test_documents_that_are_no_arrays_are_told() -> None:
    """As in other layouts, before anything else is looked at."""
    from icechunk_async.engine.history.draft.layout import DraftLayout

    for document in (b"{", b"[]", b'{"node_type": "tree"}'):
        with pytest.raises(InvalidMetadataError):
            DraftLayout().document("/x", document)
