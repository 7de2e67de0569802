"""Documents of the alpha: nothing is lost in them, and any damage of them is a FormatError."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import tracemalloc
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async import Repository
from icechunk_async.engine.history.alpha.layout import ALPHA_LAYOUT
from icechunk_async.errors import (
    FormatError,
    InvalidInputError,
    InvalidMetadataError,
    UnsupportedBySpecError,
)
from icechunk_async.format.alpha import snapshots
from icechunk_async.format.alpha.manifests import decode_manifest, encode_manifest
from icechunk_async.format.alpha.references import BranchState, RefData, decode_ref, encode_ref
from icechunk_async.format.alpha.snapshots import (
    OpenedSnapshot,
    encode_snapshot,
    read_array,
    write_array,
)
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId, SnapshotId
from icechunk_async.format.json.reading import Part, parse_json
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.snapshot import Node, Nodes, Snapshot
from icechunk_async.format.zarr_array import (
    Extension,
    FillError,
    ZarrArray,
    array_document,
    element_bytes,
    fill_from_bytes,
    fill_to_bytes,
)
from icechunk_async.storage import ObjectInfo, open_storage
from tests.helpers import array_document as some_document
from tests.helpers import examples, group_document, memory_url, write
from tests.unit.format.damage import within_bounds
from tests.unit.older.golden import golden
from tests.unit.older.older_tools import damage, holding, read_all
from tests.unit.older.schemas import check_document

if TYPE_CHECKING:
    from collections.abc import Callable


TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "r8", "r24", "r128",
)  # fmt: skip
MANIFEST = ManifestId(bytes(16))
_LISTED = "short_term_history"


def _fill(data_type: str, raw: bytes) -> bytes:
    return bytes([raw[0] & 1]) if data_type == "bool" else raw


@st.composite
def arrays(draw: st.DrawFn) -> ZarrArray:
    """Return any array that the alpha can express; fill values are any bits."""
    rank = draw(st.integers(0, 4))
    data_type = draw(st.sampled_from(TYPES))
    size = element_bytes(data_type)
    assert size is not None
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
    extensions = st.builds(Extension, st.text(max_size=9), st.none() | objects)
    names = st.lists(st.none() | st.text(max_size=5), min_size=rank, max_size=rank)
    return ZarrArray(
        tuple(draw(st.lists(st.integers(0, 2**32), min_size=rank, max_size=rank))),
        tuple(draw(st.lists(st.integers(1, 2**40), min_size=rank, max_size=rank))),
        data_type,
        _fill(data_type, draw(st.binary(min_size=size, max_size=size))),
        tuple(draw(st.lists(extensions, max_size=3))),
        draw(st.none() | names.map(tuple)),
        tuple(draw(st.lists(extensions, max_size=1))),
        draw(objects),
    )


@examples(100)
@given(arrays())
def test_metadata_of_arrays_survives_to_the_last_bit(array: ZarrArray) -> None:
    """Attributes and fill values, NaN with any payload and negative zeros among them."""
    document = json.dumps(write_array(array), allow_nan=False)
    part = Part(json.loads(document), "An array")
    assert read_array(part, json.loads(json.dumps(array.attributes))) == array
    stored = array_document(array)
    assert ALPHA_LAYOUT.document("/x", stored) == stored


@given(st.sampled_from(TYPES), st.binary(min_size=16, max_size=16))
def test_fill_values_of_zarr_stand_for_every_element(data_type: str, raw: bytes) -> None:
    """Any bits become a value of `zarr.json` that means those bits."""
    size = element_bytes(data_type)
    assert size is not None
    fill = _fill(data_type, raw[:size])
    said = json.loads(json.dumps(fill_from_bytes(data_type, fill), allow_nan=False))
    assert fill_to_bytes(data_type, said) == fill


@pytest.mark.parametrize(
    ("data_type", "fill"),
    [
        ("bool", 1), ("bool", None), ("int8", 128), ("int8", True), ("uint8", -1), ("int16", "0"),
        ("int16", 0.5), ("float32", "nan"), ("float32", "0x7fc0"), ("float32", 1e39),
        ("float64", True), ("float64", "0xzz"), ("complex64", [1]), ("complex64", 1),
        ("complex64", [1, "x"]), ("r16", "AQ=="), ("r16", [1, 256]), ("r16", "*"), ("int32", []),
    ],
)  # fmt: skip
def test_fill_values_that_do_not_fit_their_type_are_refused(data_type: str, fill: Any) -> None:
    """Nothing is rounded, cut or guessed."""
    with pytest.raises(FillError, match="fill value"):
        fill_to_bytes(data_type, fill)


def test_numbers_are_rounded_as_the_type_stores_them() -> None:
    """As Zarr does when it makes the fill value."""
    assert fill_from_bytes("float32", fill_to_bytes("float32", 0.1)) == np.float32(0.1).item()
    assert fill_to_bytes("int16", 3.0) == b"\x03\x00"
    assert fill_to_bytes("float32", "0x7fc00001") == struct.pack("<I", 0x7FC00001)
    assert fill_from_bytes("float32", struct.pack("<I", 0x7FC00001)) == "0x7fc00001"


_REFS = st.one_of(
    st.binary(min_size=1, max_size=20).map(InlineChunk),
    st.builds(
        NativeChunk,
        st.binary(min_size=16, max_size=16).map(ChunkId),
        st.integers(0, 2**60),
        st.integers(1, 2**60),
    ),
    st.builds(VirtualChunk, st.text(max_size=30), st.integers(0, 2**60), st.integers(1, 2**60)),
)


@examples(100)
@given(
    st.dictionaries(
        st.integers(0, 2**32 - 1),
        st.integers(0, 3).flatmap(
            lambda rank: st.tuples(
                st.just(rank),
                st.dictionaries(
                    st.tuples(*[st.integers(0, 2**32 - 1)] * rank), _REFS, min_size=1, max_size=5
                ),
            )
        ),
        max_size=4,
    )
)
def test_manifests_survive(given_refs: dict[int, tuple[int, Any]]) -> None:
    """References of every kind, of arrays of any number of axes."""
    given_arrays = {
        NodeId(number.to_bytes(8)): ChunkRefs.from_mapping(rank, refs).sort()
        for number, (rank, refs) in given_refs.items()
    }
    data = encode_manifest(given_arrays)
    check_document("manifest", data)
    found = decode_manifest(MANIFEST, data)
    assert found.arrays.keys() == given_arrays.keys()
    for number, (_, refs) in given_refs.items():
        for coords, ref in refs.items():
            assert found.lookup(NodeId(number.to_bytes(8)), coords) == ref


def test_references_survive() -> None:
    """With the states that the schema leaves room for."""
    for state in BranchState:
        ref = RefData(SnapshotId(bytes(range(16))), 1_700_000_000_123_456, state)
        data = encode_ref(ref)
        check_document("reference", data)
        assert decode_ref(data) == ref
    plain = {"properties": {"x": 1}, "snapshot": [0] * 16, "timestamp": "2024-10-01T10:00:00+02:00"}
    assert decode_ref(json.dumps(plain).encode()).timestamp_us == 1_727_769_600_000_000


def test_the_page_shows_the_entry_of_a_deleted_branch() -> None:
    """As it is written and read."""
    page = (Path(__file__).parents[3] / "docs/reference/alpha-layout.md").read_text("utf-8")
    shown = page.partition("```json\n")[2].partition("\n```")[0].encode()
    entry = decode_ref(shown)
    assert entry.state is BranchState.DELETED
    assert json.loads(encode_ref(entry)) == {
        **json.loads(shown),
        "timestamp": "2024-10-15T12:00:00.000000Z",
    }


def test_a_snapshot_lists_its_nearest_ancestors() -> None:
    """Sixty-four of them; and counts them all."""
    snapshot: Snapshot | None = None
    for number in range(70):
        made = Snapshot(SnapshotId(number.to_bytes(16)), None, number, f"{number}")
        encoded = encode_snapshot(made, snapshot)
        snapshot = encoded.snapshot
        listed = [Part(it, "it").text("message") for it in json.loads(encoded.data)[_LISTED]]
        assert listed == [f"{it}" for it in range(number - 1, max(-1, number - 65), -1)]
        assert OpenedSnapshot(encoded.data).decode({}).num_ancestors == number


@pytest.mark.parametrize(("size", "is_apart"), [((1 << 14) - 1, False), (1 << 14, True)])
def test_attributes_from_a_size_on_are_stored_apart(size: int, is_apart: bool) -> None:  # noqa: FBT001
    """From 16 KiB on; the snapshot says where."""
    attributes = {"a": "x" * (size - len('{"a":""}'))}
    root = Node(NodeId(bytes(8)), "/", group_document(**attributes))
    made = Snapshot(SnapshotId(bytes(16)), None, 0, "", nodes=Nodes([root]))
    encoded = encode_snapshot(made, None)
    assert bool(encoded.files) == is_apart
    opened = OpenedSnapshot(encoded.data)
    assert list(opened.needs) == list(encoded.files)
    document = opened.decode(encoded.files).nodes["/"].user_data
    assert json.loads(document)["attributes"] == attributes


def _look_at(key: str, data: bytes, attributes: dict[str, bytes]) -> None:
    match key[0]:
        case "r":
            decode_ref(data)
        case "m":
            manifest = decode_manifest(MANIFEST, data)
            for node_id, refs in manifest.arrays.items():
                for row in range(len(refs)):
                    refs.ref(row)
                    manifest.lookup(node_id, tuple(refs.coords[row].tolist()))
        case "a":
            parse_json(data, "file").parts("attributes")
        case _:
            opened = OpenedSnapshot(data)
            snapshot = opened.decode({key: attributes.get(key, b"{}") for key in opened.needs})
            for path, node in snapshot.nodes.items():
                assert ALPHA_LAYOUT.document(path, node.user_data)


def _tolerate(work: Callable[[], object]) -> None:
    """Run ``work``; documents that cannot be written again may still be read."""
    with suppress(FormatError, UnsupportedBySpecError):
        work()


@pytest.mark.parametrize("seed", range(4))
def test_damaged_documents_are_format_errors(seed: int) -> None:
    """Values of another kind, missing, repeated, too large, and bytes that are no document."""
    rng = random.Random(seed)
    objects = golden().objects
    attributes = {key: data for key, data in objects.items() if key.startswith("a/")}
    for key in [*rng.sample(sorted(objects), 8), *attributes, *sorted(objects)[-2:]]:
        if key.startswith("c/"):
            continue
        data = objects[key]
        for _ in range(40):
            document = damage(rng, json.loads(data))
            damaged = json.dumps(document).encode()
            _tolerate(partial(_look_at, key, damaged, attributes))
        for _ in range(10):
            raw = bytearray(data)
            at = rng.randrange(len(raw))
            raw[at] = rng.randrange(256)
            cut = bytes(raw[: rng.randrange(len(raw))]) if rng.random() < 0.3 else bytes(raw)
            _tolerate(partial(_look_at, key, cut, attributes))


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"chunks": {"0": {"Inline": ' + b"[" * 100_000,
        b'{"chunks": ' + b"9" * 5000 + b"}",
        b'{"nodes": {"/": ' + b'{"x":' * 300 + b"1" + b"}" * 302,
        b'{"chunks": {"0/' + b"/".join([b"0"] * 500) + b'": {"Inline": [1]}}}',
    ],
)
def test_hostile_documents_are_refused_within_bounds(bomb: bytes) -> None:
    """However deep or long."""
    tracemalloc.start()
    try:
        readers: list[Callable[[bytes], object]] = [
            decode_ref, OpenedSnapshot, partial(decode_manifest, MANIFEST)
        ]  # fmt: skip
        for read_it in readers:
            with pytest.raises(FormatError):
                within_bounds(partial(read_it, bomb), len(bomb))
    finally:
        tracemalloc.stop()


def _sharing(num_groups: int) -> tuple[bytes, dict[str, bytes]]:
    """Return a snapshot of groups that all have the same attributes, and the file of these."""
    root = Node(NodeId(bytes(8)), "/", group_document(a="x" * 30_000))
    made = Snapshot(SnapshotId(bytes(16)), None, 0, "", nodes=Nodes([root]))
    encoded = encode_snapshot(made, None)
    document = json.loads(encoded.data)
    group = document["nodes"].pop("/")
    for number in range(num_groups):
        document["nodes"][f"/{number}"] = {**group, "id": number, "path": f"/{number}"}
    return json.dumps(document).encode(), dict(encoded.files)


def test_nodes_may_share_a_row_of_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of them, in any repository; many, as long as that does no harm."""
    data, files = _sharing(500)
    nodes = OpenedSnapshot(data).decode(files).nodes
    assert min(len(node.user_data) for node in nodes.values()) > 30_000
    monkeypatch.setattr(snapshots, "_FLOOR_BYTES", 0)
    data, files = _sharing(10)
    assert len(OpenedSnapshot(data).decode(files).nodes) == 10


def test_a_row_of_attributes_is_not_shared_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has a document that repeats it: a thousand of a megabyte would fill the memory."""
    monkeypatch.setattr(snapshots, "_FLOOR_BYTES", 1 << 20)
    data, files = _sharing(500)
    with pytest.raises(FormatError, match="not believed"):
        OpenedSnapshot(data).decode(files)


@pytest.mark.parametrize("lone", [b"\\ud800", b"\\uDFFF x", b"\xed\xa0\x80"])
def test_half_characters_are_refused(lone: bytes) -> None:
    """No text with one can be encoded again: not the path, the message or the properties."""
    with pytest.raises(FormatError, match="not JSON"):
        parse_json(b'{"message": "' + lone + b'"}', "snapshot")
    whole = "\U0001f600"
    escaped = json.dumps({"message": whole}).encode()
    assert parse_json(escaped, "snapshot").text("message") == whole


@pytest.mark.parametrize("value", [10**30, float("nan")])
def test_properties_that_no_commit_can_have_are_refused(value: object) -> None:
    """Where the snapshot is read, not where its properties are looked at."""
    objects = golden().objects
    key = next(it for it in sorted(objects) if it.startswith("s/"))
    document = json.loads(objects[key])
    document["properties"] = {"it": [value]}
    opened = OpenedSnapshot(json.dumps(document).encode())
    with pytest.raises(FormatError, match="properties"):
        opened.decode({it: objects[it] for it in opened.needs})


@pytest.mark.parametrize(
    "members",
    [
        {"attributes": {"a": ["\ud800"]}},
        {"codecs": [{"name": "\ud800"}]},
        {"codecs": [{"name": "bytes", "configuration": {"\ud800": 1}}]},
    ],
)
def test_documents_with_half_characters_are_not_written(members: dict[str, Any]) -> None:
    """Nobody could read them."""
    document = {**json.loads(some_document((4, 4), (2, 2))), **members}
    with pytest.raises(UnsupportedBySpecError, match="surrogates"):
        ALPHA_LAYOUT.document("/x", json.dumps(document).encode())


async def test_a_message_with_half_characters_is_refused() -> None:
    """Nothing is committed."""
    async with Repository.create(memory_url(), layout="alpha") as repository:
        session = await repository.writable_session("main")
        await write(session, "zarr.json", group_document())
        with pytest.raises(InvalidInputError, match="surrogates"):
            await session.commit("\ud800")
        assert len([it async for it in repository.ancestry(branch="main")]) == 1
        await session.commit("whole")


@pytest.mark.parametrize("prefix", ["r/main/", "s/", "m/", "a/", "c/"])
async def test_a_repository_with_damaged_or_missing_files_is_not_read_half(prefix: str) -> None:
    """Files of each kind."""
    objects = golden().objects
    async with holding(objects) as storage:
        damaged = [key for key in objects if key.startswith(prefix)]
        await asyncio.gather(*(storage.put(key, b"{}"[: prefix != "c/"]) for key in damaged))
        with pytest.raises(FormatError):
            await read_all(storage)
        if prefix not in {"r/main/", "s/"}:  # then there is no such repository, or snapshot
            assert not await storage.delete(damaged)
            with pytest.raises(FormatError, match="missing"):
                await read_all(storage)


def test_documents_that_are_no_arrays_are_told() -> None:
    """As in other layouts, before anything else is looked at."""
    for document in (b"{", b"[]", b'{"node_type": "tree"}', some_document((4,), (2, 2))):
        with pytest.raises(InvalidMetadataError):
            ALPHA_LAYOUT.document("/x", document)


async def test_commits_on_a_snapshot_with_a_damaged_array_are_a_format_error() -> None:
    """It is not the caller's document that cannot be stored."""
    async with open_storage(memory_url()) as storage:
        async with Repository.create(storage, layout="alpha") as repository:
            session = await repository.writable_session("main")
            await write(session, "a/zarr.json", some_document((4,), (1,)))
            await session.commit("array")
        keys = [it.key async for it in storage.list_prefix("s/") if isinstance(it, ObjectInfo)]
        for key in keys:
            data = (await storage.get(key)).data
            await storage.put(key, bytes(data).replace(b'"shape":[4]', b'"shape":[1099511627776]'))
        async with Repository.open(storage) as repository:
            session = await repository.writable_session("main")
            assert session.workspace.array("/a").array
            await write(session, "b/zarr.json", group_document())
            with pytest.raises(FormatError, match=r"damaged node at '/a'.* 1099511627776 chunks"):
                await session.commit("group")
