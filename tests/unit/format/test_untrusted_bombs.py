"""Small files made by hand that would unfold without end: refused, or read within bounds."""

from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope, FileType, pack, unpack
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.snapshot import Node, decode_snapshot
from tests.unit.format.damage import look_at, look_at_file, within_bounds
from tests.unit.format.forge import Forge
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import manifest_id, node_id, snapshot_id
from tests.unit.format.table_builder import Field, Offset, Scalar, Struct, TableBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MANY = 1500
LONG = "x" * 30_000


@pytest.fixture(autouse=True)
def _memory_is_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def opens(payload: bytes, file_type: FileType) -> bool:
    """Read a payload within bounds. Return whether it could be opened."""
    opened: list[bool] = []
    within_bounds(lambda: opened.append(look_at(Envelope(2, payload), file_type)), len(payload))
    return opened[0]


def finished(out: TableBuilder, fields: Mapping[int, Field]) -> bytes:
    """Return the buffer with a root of these fields."""
    return out.finish(out.table(fields))


def snapshot(out: TableBuilder, nodes: list[Offset], metadata: Offset | None = None) -> bytes:
    """Return a snapshot of these nodes."""
    none = out.offsets([])
    fields: dict[int, Field] = {
        0: Struct(snapshot_id(1)), 2: out.offsets(nodes), 4: out.string(""),
        5: metadata or none, 6: out.structs(b"", 32, 8),
    }  # fmt: skip
    return finished(out, fields)


def arrays_sharing(out: TableBuilder, fields: Mapping[int, Field]) -> bytes:
    """Return a snapshot of many arrays that all refer to the same things."""
    blob, empty = out.blob(b""), out.offsets([])
    data: dict[int, Field] = {0: out.structs(b"", 16, 8), 2: empty, **fields}
    nodes = [
        out.table(
            {0: Struct(node_id(row)), 1: out.string(f"/{row}"), 2: blob, 3: Scalar(1, 1),
             4: out.table(data)}
        )
        for row in range(MANY)
    ]  # fmt: skip
    return snapshot(out, nodes)


def repo_info(
    out: TableBuilder,
    snapshots: list[Offset],
    updates: list[Offset],
    metadata: Offset | None = None,
) -> bytes:
    """Return a repo info of these snapshots and updates."""
    none = out.offsets([])
    fields: dict[int, Field] = {
        0: Scalar(2, 1), 1: none, 2: none, 3: none, 4: out.offsets(snapshots),
        5: out.table({}), 6: metadata or none, 7: out.offsets(updates),
    }  # fmt: skip
    return finished(out, fields)


def infos_sharing(fields: Callable[[TableBuilder], Mapping[int, Field]]) -> bytes:
    """Return a repo info of many snapshots that all refer to the same things."""
    out = TableBuilder()
    update = out.table({0: Scalar(1, 1), 1: out.table({})})
    plain: dict[int, Field] = {1: Scalar(-1, 4, signed=True), 3: out.string("m")}
    shared = {**plain, **fields(out)}
    infos = [out.table({0: Struct(snapshot_id(row)), **shared}) for row in range(MANY)]
    return repo_info(out, infos, [update])


def test_arrays_that_share_their_references_are_refused() -> None:
    """Thousands of arrays times thousands of references."""
    other = OtherManifest()
    refs = other.out.offsets([other.native((row,)) for row in range(MANY)])
    arrays = [other.out.table({0: Struct(node_id(row)), 1: refs}) for row in range(MANY)]
    fields: dict[int, Field] = {0: Struct(manifest_id(1)), 1: other.out.offsets(arrays)}
    assert not opens(finished(other.out, fields), FileType.MANIFEST)


def test_references_that_share_wide_coordinates_are_refused() -> None:
    """Each would have 64 axes."""
    other = OtherManifest()
    index = other.out.structs(bytes(4 * 64), 4, 4)
    refs = [other.out.table({0: index, 4: Struct(bytes(12))}) for _ in range(MANY)]
    other.array(node_id(1), refs)
    assert not opens(other.finish(manifest_id(1)), FileType.MANIFEST)


def test_references_that_are_all_the_same_are_refused() -> None:
    """An offset each is all that they cost the file."""
    other = OtherManifest()
    other.array(node_id(1), [other.native((0,))] * 100_000)
    assert not opens(other.finish(manifest_id(1)), FileType.MANIFEST)


def test_references_that_share_inline_bytes_are_refused() -> None:
    """Rewriting the manifest would copy them for each."""
    other = OtherManifest()
    data = other.out.blob(LONG.encode())
    other.array(node_id(1), [other.ref((row,), {1: data}) for row in range(MANY)])
    assert not opens(other.finish(manifest_id(1)), FileType.MANIFEST)


def test_references_that_share_a_location_are_read() -> None:
    """Our own files are written this way. The location is decoded once."""
    other = OtherManifest()
    name = other.out.string(LONG)
    other.array(node_id(1), [other.ref((row,), {5: name, 6: name}) for row in range(MANY)])
    assert opens(other.finish(manifest_id(1)), FileType.MANIFEST)


@pytest.mark.parametrize("slot", [5, 6])
def test_overlapping_strings_are_not_unfolded_together(slot: int) -> None:
    """Strings of 100,000 bytes that begin at every fourth byte of one another."""
    forge = Forge()
    root_vtable = forge.vtable({0: 4, 1: 16}, 20)
    array_vtable = forge.vtable({0: 4, 1: 12}, 16)
    ref_vtable = forge.vtable({0: 4, 5: 8, slot: 8 if slot == 5 else 12}, 16)
    root = forge.table(root_vtable, bytes(16))  # offsets lead forward only, so parents come first
    forge.link(root + 16, vector := forge.offsets([0]))
    forge.link(vector + 4, array := forge.table(array_vtable, bytes(12)))
    forge.link(array + 12, vector := forge.offsets([0] * MANY))
    tables = []
    for row in range(MANY):
        tables.append(forge.table(ref_vtable, bytes(12)))
        forge.link(vector + 4 + 4 * row, tables[-1])
        forge.link(tables[-1] + 4, forge.vector([row.to_bytes(4, "little")]))
    name = forge.string(b"s3://b/x")
    region = forge.align(4)
    forge.raw(struct.pack("<I", 100_000) * (25_000 + MANY))
    for row, table in enumerate(tables):
        forge.link(table + 8, name if slot == 6 else region + 4 * row)
        forge.link(table + 12, region + 4 * row)
    payload = forge.finish(root)
    assert opens(payload, FileType.MANIFEST)
    (refs,) = decode_manifest(payload).arrays.values()
    with pytest.raises(FormatError, match="not genuine"):
        (refs.locations if slot == 5 else refs.etag_pool).distinct()


def test_arrays_that_share_their_manifests_are_refused() -> None:
    """Thousands of arrays times thousands of manifests."""
    out = TableBuilder()
    box = out.structs(b"", 8, 4)
    refs = out.offsets([out.table({0: Struct(manifest_id(1)), 1: box}) for _ in range(MANY)])
    assert not opens(arrays_sharing(out, {2: refs}), FileType.SNAPSHOT)


def test_arrays_that_share_long_shapes_are_refused() -> None:
    """Of the one version and of the other."""
    out = TableBuilder()
    assert not opens(
        arrays_sharing(out, {0: out.structs(bytes(16 * MANY), 16, 8)}), FileType.SNAPSHOT
    )
    out = TableBuilder()
    axes = out.offsets([out.table({}) for _ in range(MANY)])
    assert not opens(arrays_sharing(out, {3: axes}), FileType.SNAPSHOT)


def test_arrays_that_share_long_names_are_refused() -> None:
    """A name of 30,000 letters for each axis of each array."""
    out = TableBuilder()
    name = out.offsets([out.table({0: out.string(LONG)})])
    assert not opens(arrays_sharing(out, {1: name}), FileType.SNAPSHOT)


def test_manifests_that_share_long_extents_are_refused() -> None:
    """Boxes of thousands of axes."""
    out = TableBuilder()
    box = out.structs(bytes(8 * MANY), 8, 4)
    refs = out.offsets([out.table({0: Struct(manifest_id(1)), 1: box}) for _ in range(MANY)])
    blob, shape = out.blob(b""), out.structs(b"", 16, 8)
    data = out.table({0: shape, 2: refs})
    fields: dict[int, Field] = {
        0: Struct(node_id(1)), 1: out.string("/x"), 2: blob, 3: Scalar(1, 1), 4: data,
    }  # fmt: skip
    assert not opens(snapshot(out, [out.table(fields)]), FileType.SNAPSHOT)


def test_nodes_that_are_all_the_same_are_refused() -> None:
    """One table, listed a hundred thousand times."""
    out = TableBuilder()
    fields: dict[int, Field] = {
        0: Struct(node_id(1)), 1: out.string("/x"), 2: out.blob(b""), 3: Scalar(2, 1),
        4: out.table({}),
    }  # fmt: skip
    assert not opens(snapshot(out, [out.table(fields)] * 100_000), FileType.SNAPSHOT)


def groups_sharing(num_groups: int) -> Envelope:
    """Return a snapshot of groups that all have the same document."""
    out = TableBuilder()
    blob, group = out.blob(LONG.encode()), out.table({})
    nodes = [
        out.table(
            {0: Struct(node_id(row)), 1: out.string(f"/{row:04}"), 2: blob, 3: Scalar(2, 1),
             4: group}
        )
        for row in range(num_groups)
    ]  # fmt: skip
    return Envelope(2, snapshot(out, nodes))


def test_a_few_nodes_may_share_a_document() -> None:
    """Each of them has it, however they are read."""
    envelope = groups_sharing(10)
    assert opens(bytes(envelope.payload), FileType.SNAPSHOT)
    nodes = decode_snapshot(envelope).nodes
    assert {len(node.user_data) for node in nodes.values()} == {len(LONG)}
    assert len(nodes["/0007"].user_data) == len(LONG)


@pytest.mark.parametrize("together", [True, False])
def test_nodes_that_all_share_a_document_are_refused(together: bool) -> None:  # noqa: FBT001
    """Callers keep nodes: a document of megabytes, a thousand times, would fill the memory."""
    envelope = groups_sharing(MANY)
    nodes = decode_snapshot(envelope).nodes
    found: list[Node] = []
    with pytest.raises(FormatError, match="unfolds"):
        found.extend(nodes.values() if together else map(nodes.__getitem__, nodes.paths))
    assert sum(len(node.user_data) for node in found) <= 16 * len(envelope.payload)


def test_metadata_that_shares_its_values_is_refused() -> None:
    """A long name and a long value, thousands of times."""
    for name, value in (("n", LONG), (LONG, "v")):
        out = TableBuilder()
        fields: dict[int, Field] = {0: out.string(name), 1: out.blob(value.encode())}
        items = out.offsets([out.table(fields) for _ in range(MANY)])
        assert not opens(snapshot(out, [], items), FileType.SNAPSHOT)


@pytest.mark.parametrize("owner", ["repository", "snapshot"])
def test_items_of_a_repo_info_that_share_a_value_are_refused(owner: str) -> None:
    """A long value, thousands of times; before it is copied as often."""
    out = TableBuilder()
    fields: dict[int, Field] = {0: out.string("n"), 1: out.blob(LONG.encode())}
    items = out.offsets([out.table(fields) for _ in range(MANY)])
    info: dict[int, Field] = {
        0: Struct(snapshot_id(1)), 1: Scalar(-1, 4, signed=True), 3: out.string("m"),
    }  # fmt: skip
    if owner == "snapshot":
        info[4] = items
    update = out.table({0: Scalar(1, 1), 1: out.table({})})
    metadata = items if owner == "repository" else None
    payload = repo_info(out, [out.table(info)], [update], metadata)
    assert not opens(payload, FileType.REPO_INFO)


def test_snapshots_that_share_their_metadata_are_refused() -> None:
    """Thousands of snapshots times thousands of items."""

    def metadata(out: TableBuilder) -> Mapping[int, Field]:
        item = out.table({0: out.string("n"), 1: out.blob(b"v")})
        return {4: out.offsets([item] * MANY)}

    assert not opens(infos_sharing(metadata), FileType.REPO_INFO)


def test_snapshots_that_share_a_long_message_are_refused() -> None:
    """Messages are read at once."""
    assert not opens(infos_sharing(lambda out: {3: out.string(LONG)}), FileType.REPO_INFO)


def test_snapshots_that_share_pruned_logs_are_refused() -> None:
    """Thousands of snapshots times thousands of ids."""
    payload = infos_sharing(lambda out: {5: out.structs(bytes(12 * MANY), 12, 1)})
    assert not opens(payload, FileType.REPO_INFO)


def test_updates_that_are_all_the_same_are_within_bounds() -> None:
    """An offset each is all that they cost the file."""
    out = TableBuilder()
    info = out.table({0: Struct(snapshot_id(1)), 1: Scalar(-1, 4, signed=True), 3: out.string("m")})
    update = out.table({0: Scalar(1, 1), 1: out.table({})})
    assert opens(repo_info(out, [info], [update] * 5_000), FileType.REPO_INFO)


def test_updates_that_share_long_names_are_refused() -> None:
    """In their detail and as the name of a backup."""
    for detail, entry in ((True, False), (False, True)):
        out = TableBuilder()
        name, short = out.string(LONG), out.string("n")
        tag = out.table({0: name if detail else short})
        fields: dict[int, Field] = {0: Scalar(5, 1), 1: tag, 3: name if entry else short}
        update = out.table(fields)
        assert not opens(repo_info(out, [], [update] * MANY), FileType.REPO_INFO)


def test_a_history_that_is_a_long_chain_is_walked_within_bounds() -> None:
    """One step a snapshot; a circle is found out."""
    for last in (-1, 0):
        out = TableBuilder()
        update = out.table({0: Scalar(1, 1), 1: out.table({})})
        infos = [
            out.table(
                {
                    0: Struct(snapshot_id(row)),
                    1: Scalar(row + 1 if row < 199 else last, 4, signed=True),
                    3: out.string("m"),
                }
            )
            for row in range(200)
        ]
        assert opens(repo_info(out, infos, [update]), FileType.REPO_INFO)


def log_of(out: TableBuilder, fields: Mapping[int, Field]) -> bytes:
    """Return a transaction log of these fields."""
    empty: dict[int, Field] = {slot: out.structs(b"", 8, 1) for slot in range(1, 7)}
    return finished(out, {0: Struct(snapshot_id(1)), **empty, 7: out.offsets([]), **fields})


def test_arrays_that_share_their_chunks_are_refused() -> None:
    """Thousands of arrays times thousands of coordinates."""
    out = TableBuilder()
    chunk = out.table({0: out.structs(bytes(4), 4, 4)})
    chunks = out.offsets([chunk] * MANY)
    arrays = [out.table({0: Struct(node_id(row)), 1: chunks}) for row in range(MANY)]
    assert not opens(log_of(out, {7: out.offsets(arrays)}), FileType.TRANSACTION_LOG)


def test_moves_that_share_long_paths_are_refused() -> None:
    """From and to."""
    for slot in (0, 1):
        out = TableBuilder()
        fields: dict[int, Field] = {0: out.string("/a"), 1: out.string("/b"), 2: Struct(node_id(1))}
        fields[slot] = out.string(LONG)
        moves = out.offsets([out.table(fields)] * MANY)
        assert not opens(log_of(out, {8: moves}), FileType.TRANSACTION_LOG)


@pytest.mark.parametrize("offset", [0, 4, 12, 100, 2**31, 2**32 - 1])
@pytest.mark.parametrize("file_type", list(FileType))
def test_a_file_of_one_repeated_word_is_refused(offset: int, file_type: FileType) -> None:
    """Everything is an offset, a count and a vtable at once."""
    assert not opens(struct.pack("<I", offset) * 5000, file_type)


def test_a_compressed_file_of_nothing_but_zeros_is_within_bounds() -> None:
    """Thirty megabytes in a kilobyte; the first word already leads nowhere."""
    data = pack(bytes(30 << 20), FileType.MANIFEST, 2)
    assert len(data) < 2000
    with pytest.raises(FormatError):
        decode_manifest(unpack(data, FileType.MANIFEST).payload)
    within_bounds(lambda: look_at_file(data, FileType.MANIFEST), 0, base_bytes=35 << 20)
