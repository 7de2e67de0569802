"""Files of the official engine: read, compared with what it says of them, and written back."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from icechunk_async._runtime import clock
from icechunk_async.format.envelope import Envelope, FileType
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.format.manifest.chunk import InlineChunk, Kind, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.operations_log import Availability, RepoMigrated
from icechunk_async.format.refs import decode_ref, encode_ref
from icechunk_async.format.repo_info import decode_repo_info
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.format.transaction_log import decode_transaction_log
from tests.unit.format.golden_files import REPOSITORIES, GoldenFile, golden_files
from tests.unit.format.samples import as_dict, comparable
from tests.unit.format.wire import root

if TYPE_CHECKING:
    from icechunk_async.format.snapshot import Node
    from tests.unit.format.golden_files import GoldenRepository

STRAYS = "spec2-strays-by-2.3.0"
FITTING = [name for name in REPOSITORIES if name != STRAYS]
EVERY = pytest.mark.parametrize("golden", [REPOSITORIES[name] for name in FITTING], ids=FITTING)
SPEC_1 = ["spec1-by-1.1.21", "spec1-by-2.3.0"]
CONTENTS = REPOSITORIES["spec2-contents-by-2.3.0"]
HISTORY = REPOSITORIES["spec2-history-by-2.3.0"]
FILES = pytest.mark.parametrize("file", golden_files(), ids=lambda file: file.name)


def micros(text: str) -> int:
    """Read a time as the official engine writes it."""
    return clock.to_us(datetime.fromisoformat(text))


def node_answer(node: Node) -> dict[str, Any]:
    """Return a node as the official engine describes it."""
    found: dict[str, Any] = {"id": str(node.id), "path": node.path, "node_type": "group"}
    if node.array is not None:
        names = node.array.dimension_names or (None,) * len(node.array.dimensions)
        found["node_type"] = "array"
        found["shape"] = [
            ({"name": name} if name else {})
            | {"array_length": axis.array_length, "num_chunks": axis.num_chunks}
            for axis, name in zip(node.array.dimensions, names, strict=True)
        ]
        found["manifest_refs"] = [
            {"id": str(ref.manifest_id), "extents": [list(axis) for axis in ref.extents]}
            for ref in node.array.manifests
        ]
    return found


@EVERY
def test_snapshots_hold_what_the_official_engine_sees(golden: GoldenRepository) -> None:
    """Ids, times, messages, metadata, nodes with their grids, manifests."""
    snapshots = golden.snapshots()
    assert set(snapshots) == set(golden.answers["snapshots"])
    for name, expected in golden.answers["snapshots"].items():
        found = snapshots[name]
        assert str(found.id) == name == expected["id"]
        assert found.flushed_at == micros(expected["flushed_at"])
        assert found.message == expected["commit_message"]
        assert found.metadata == expected["metadata"]
        assert [node_answer(node) for node in found.nodes.values()] == expected["nodes"]
        assert [
            {"id": str(it.id), "size_bytes": it.size_bytes, "num_chunk_refs": it.num_chunk_refs}
            for it in found.manifests.values()
        ] == expected["manifests"]


@EVERY
def test_manifests_hold_what_the_official_engine_sees(golden: GoldenRepository) -> None:
    """The number of references of each kind agrees for each array."""
    manifests = golden.manifests()
    assert set(manifests) >= set(golden.answers["manifests"])
    for name, expected in golden.answers["manifests"].items():
        found = manifests[name]
        assert str(found.id) == name
        assert len(found) == expected["total_chunk_refs"]
        assert [
            {
                "node_id": str(node),
                "num_chunk_refs": len(refs),
                "num_inline": int((refs.kinds == Kind.INLINE).sum()),
                "num_native": int((refs.kinds == Kind.NATIVE).sum()),
                "num_virtual": int((refs.kinds == Kind.VIRTUAL).sum()),
            }
            for node, refs in found.arrays.items()
        ] == expected["arrays"]


@EVERY
def test_logs_hold_what_the_official_engine_sees(golden: GoldenRepository) -> None:
    """Lists of nodes, touched chunks, moves; what expired belongs to the snapshot behind it."""
    logs = golden.logs()
    assert set(logs) == set(golden.answers["logs"])
    infos = {} if golden.refs() else golden.repo_info().snapshots
    pruned = {str(it.id): it.pruned_ancestor_logs for it in infos.values()}
    for name, expected in golden.answers["logs"].items():
        assert str(logs[name].id) == name
        found = logs[name]
        for older in pruned.get(name, ()):
            found = logs[str(older)].merge(found)
        for kind in ("new", "deleted", "updated"):
            for nodes in ("groups", "arrays"):
                ids = {str(node) for node in getattr(found, f"{kind}_{nodes}")}
                assert ids == set(expected[f"{kind}_{nodes}"])
        assert {str(it): len(rows) for it, rows in found.updated_chunks.items()} == {
            it["node_id"]: it["count"] for it in expected["updated_chunks"]
        }
        assert {str(it): rows[:20].tolist() for it, rows in found.updated_chunks.items()} == {
            it["node_id"]: it["chunks"] for it in expected["updated_chunks"]
        }
        assert [{"from": it.source, "to": it.target} for it in found.moves] == (
            expected["moved_nodes"]
        )


@pytest.mark.parametrize("name", [name for name in FITTING if name not in SPEC_1])
def test_repo_infos_hold_what_the_official_engine_sees(name: str) -> None:
    """Refs, snapshots with parents, metadata, the operations log."""
    golden = REPOSITORIES[name]
    info, expected = golden.repo_info(), golden.answers["repo_info"]
    assert {name: str(it) for name, it in info.branches.items()} == expected["branches"]
    assert {name: str(it) for name, it in info.tags.items()} == expected["tags"]
    assert sorted(info.deleted_tags) == expected["deleted_tags"]
    assert info.metadata == expected["metadata"]
    assert info.before_updates == expected.get("repo_before_updates")
    assert [
        ({"parent_id": str(it.parent_id)} if it.parent_id is not None else {})
        | {"id": str(it.id), "message": it.message, "metadata": it.metadata}
        for it in info.snapshots.values()
    ] == [{k: v for k, v in it.items() if k != "flushed_at"} for it in expected["snapshots"]]
    assert [it.flushed_at for it in info.snapshots.values()] == [
        micros(it["flushed_at"]) for it in expected["snapshots"]
    ]
    assert [(it.updated_at, it.backup_path) for it in info.updates] == [
        (micros(it["updated_at"]), it.get("backup_path")) for it in expected["latest_updates"]
    ]
    tip = info.branches["main"]
    assert [str(it.id) for it in info.ancestry(tip)] == golden.answers["ancestry"]


@pytest.mark.parametrize("name", [name for name in FITTING if name not in SPEC_1])
def test_the_operations_log_continues_in_backups(name: str) -> None:
    """All entries in the official order."""
    golden = REPOSITORIES[name]
    info = golden.repo_info()
    updates = list(info.updates)
    while info.before_updates is not None:
        info = golden.repo_info(info.before_updates)
        updates += info.updates
    official = {"GarbageCollectionRan": "GCRan", "DetachedSnapshotCreated": "NewDetachedSnapshot"}
    kinds = [type(it.detail).__name__ for it in updates]
    assert [official.get(kind, kind) for kind in kinds] == golden.answers["operations"]


@pytest.mark.parametrize("name", SPEC_1)
def test_ancestry_of_spec_1_is_in_the_snapshots(name: str) -> None:
    """From the tip's file to that of the well-known first snapshot."""
    golden = REPOSITORIES[name]
    snapshots = golden.snapshots()
    refs = {ref: decode_ref(data) for ref, data in golden.refs().items()}
    assert {ref: str(it) for ref, it in refs.items() if ref.startswith("branch.")} == {
        f"branch.{branch}": it for branch, it in golden.answers["branches"].items()
    }
    at: SnapshotId | None = refs["branch.main"]
    found = []
    while at is not None:
        found.append(str(at))
        at = snapshots[found[-1]].parent_id
    assert found == golden.answers["ancestry"]
    assert found[-1] == str(INITIAL_SNAPSHOT_ID)


@EVERY
def test_virtual_locations_are_those_of_the_official_engine(golden: GoldenRepository) -> None:
    """Compressed or not."""
    tip = golden.snapshots()[golden.answers["branches"]["main"]]
    manifests = golden.manifests()
    names = {
        refs.locations.get(int(at))
        for manifest in tip.manifests
        for refs in manifests[str(manifest)].arrays.values()
        for at in refs.objects[refs.kinds == Kind.VIRTUAL]
    }
    assert sorted(names)[::100] == golden.answers["locations"]


@EVERY
def test_extents_are_tight_and_counts_and_sizes_are_true(golden: GoldenRepository) -> None:
    """Readers rely on them when they choose and fetch a manifest."""
    manifests = golden.manifests()
    for snapshot in golden.snapshots().values():
        used = set()
        for node in snapshot.nodes.values():
            for ref in node.array.manifests if node.array is not None else ():
                used.add(ref.manifest_id)
                if str(ref.manifest_id) not in manifests:
                    continue  # garbage collected with its snapshot
                assert manifests[str(ref.manifest_id)].arrays[node.id].extents() == ref.extents
        assert used == set(snapshot.manifests)
        for info in snapshot.manifests.values():
            if str(info.id) in manifests:
                size = (golden.root / "manifests" / str(info.id)).stat().st_size
                assert (info.size_bytes, info.num_chunk_refs) == (
                    size,
                    len(manifests[str(info.id)]),
                )


@pytest.mark.parametrize("name", [*SPEC_1, "migrated-by-2.3.0"])
def test_every_kind_of_reference_is_read(name: str) -> None:
    """Inline, native, virtual with each checksum; ranks 0 to 3."""
    golden = REPOSITORIES[name]
    tip = golden.snapshots()[golden.answers["branches"]["main"]]
    manifests = golden.manifests()
    found = {}
    for path, node in tip.nodes.items():
        if node.array is not None and node.array.manifests:
            (ref,) = node.array.manifests
            found[path] = as_dict(manifests[str(ref.manifest_id)].arrays[node.id])
    assert found["/scalar"] == {(): InlineChunk(b"\x07")}
    assert found["/line"] == {
        (at,): InlineChunk(b"\1\1" if at < 3 else b"\2\2") for at in (0, 1, 2, 4)
    }
    assert list(found["/plane"]) == [(0, 0), (0, 1), (0, 2), (1, 2)]
    assert {type(ref) for ref in found["/plane"].values()} == {NativeChunk}
    assert list(found["/group-a/cube"]) == [(0, 0, 0), (0, 0, 1), (1, 1, 1)]
    bucket = "s3://bucket/"
    tagged = "étag" if name == "spec1-by-2.3.0" else "%C3%A9tag"  # release 1 parses URLs
    assert found["/virtual"] == {
        (0,): VirtualChunk(f"{bucket}plain", 0, 1),
        (1,): VirtualChunk(bucket + tagged, 1, 1, etag='"abc"'),
        (3,): VirtualChunk(
            f"{bucket}dated", 2, 1, last_modified=micros("2024-05-06T00:00:00Z") // 10**6
        ),
        (7,): VirtualChunk(f"{bucket}plain", 2**40, 1),
    }
    assert tip.nodes["/plane"].array is not None
    assert tip.nodes["/plane"].array.dimension_names == ("y", None)
    assert "/empty" not in tip.nodes
    assert tip.nodes["/group/empty"].array is not None
    assert json.loads(tip.nodes["/"].user_data)["attributes"]["title"] == "golden é"


def test_migrated_repositories_have_files_of_both_versions() -> None:
    """Each file is read by its own header."""
    golden = REPOSITORIES["migrated-by-2.3.0"]
    specs = {
        (file.file_type, file.envelope.spec_version)
        for file in golden.files()
        if file.file_type is not FileType.REPO_INFO
    }
    assert specs >= {(FileType.SNAPSHOT, 1), (FileType.SNAPSHOT, 2), (FileType.MANIFEST, 1)}
    kinds = [type(update.detail) for update in golden.repo_info().updates]
    assert RepoMigrated in kinds


def test_moves_and_amended_commits_are_read() -> None:
    """Descendants of a moved group are listed one by one; the old tip stays, as an orphan."""
    (moves,) = [log.moves for log in CONTENTS.logs().values() if log.moves]
    assert [(it.source, it.target, it.is_array) for it in moves] == [
        ("/group-a", "/group/moved", False),
        ("/group-a/cube", "/group/moved/cube", True),
    ]
    info = CONTENTS.repo_info()
    listed = {it.message: it for it in info.snapshots.values()}
    amended = listed["Many virtual references, amended"]
    assert amended.parent_id == listed["Many virtual references"].parent_id
    assert amended.metadata == {"amended": True}


def test_dictionaries_of_locations_are_read() -> None:
    """The official engine trains them."""
    compressed = [
        file
        for file in CONTENTS.files()
        if file.file_type is FileType.MANIFEST and 2 in root(file.envelope.payload).slots
    ]
    (file,) = compressed
    (refs,) = decode_manifest(file.envelope.payload).arrays.values()
    assert len(refs) == 1100
    for row in (0, 500, 1099):
        ref = refs.ref(row)
        assert isinstance(ref, VirtualChunk)
        assert ref.location.endswith(f"member-{row % 7:03}/file-{row:06}.nc")


def test_chunks_that_do_not_fit_their_array_do_not_hide_those_that_do() -> None:
    """The official engine stores coordinates of any rank, and boxes of the first one's."""
    golden = REPOSITORIES[STRAYS]
    tip = golden.snapshots()[golden.answers["branches"]["main"]]
    manifests = golden.manifests()
    found = {}
    for path, node in tip.nodes.items():
        if node.array is not None:
            (ref,) = node.array.manifests
            refs = manifests[str(ref.manifest_id)].refs(node.id, len(node.array.grid))
            found[path] = (ref.extents, as_dict(refs))
    assert found == {
        "/scalar": ((), {(): InlineChunk(b"\x07")}),
        "/line": (((0, 2),), {(at,): InlineChunk(b"\1\1") for at in (0, 1)}),
        "/plane": (((0, 1), (0, 2)), {(0, at): InlineChunk(b"\2" * 4) for at in (0, 1)}),
        "/changed": (((0, 1), (0, 1)), {}),
    }


def test_touched_chunks_that_do_not_fit_do_not_hide_those_that_do() -> None:
    """In the log of the commit that wrote them."""
    golden = REPOSITORIES[STRAYS]
    snapshots = {it.message: it for it in golden.snapshots().values()}
    nodes, log = snapshots["Strays"].nodes, golden.logs()[str(snapshots["Strays"].id)]
    touched = {
        path: log.chunks_of(node.id, len(node.array.grid)).tolist()
        for path, node in nodes.items()
        if node.array is not None
    }
    assert touched == {
        "/changed": [[0], [1]], "/line": [[0], [1]], "/plane": [[0, 0], [0, 1]], "/scalar": [[]],
    }  # fmt: skip
    assert log.chunks_of(nodes["/plane"].id, 3).tolist() == [[0, 0, 0]]


def test_status_flags_and_pruned_logs_are_read() -> None:
    """Only a repository with a past has them."""
    info = HISTORY.repo_info()
    assert info.status.availability is Availability.READ_ONLY
    assert info.status.reason == "x"
    assert (info.enabled_flags, info.disabled_flags) == ((4,), (3,))
    pruned = [it.pruned_ancestor_logs for it in info.snapshots.values() if it.pruned_ancestor_logs]
    assert pruned
    logs = HISTORY.logs()
    for ids in pruned:
        assert not any(it in info.snapshots for it in ids)
        assert all(str(it) in logs for it in ids)


@FILES
def test_rewritten_documents_read_the_same(file: GoldenFile) -> None:
    """Decoded, encoded, decoded again."""
    envelope = file.envelope
    again = Envelope(envelope.spec_version, file.rewritten())
    match file.file_type:
        case FileType.SNAPSHOT:
            assert decode_snapshot(again) == decode_snapshot(envelope)
        case FileType.MANIFEST:
            one, other = decode_manifest(envelope.payload), decode_manifest(again.payload)
            assert one.id == other.id
            assert {node: as_dict(it) for node, it in one.arrays.items()} == {
                node: as_dict(it) for node, it in other.arrays.items()
            }  # strays are left behind
        case FileType.TRANSACTION_LOG:
            log = decode_transaction_log(envelope.payload)
            assert comparable(decode_transaction_log(again.payload)) == comparable(log)
        case FileType.REPO_INFO:
            assert decode_repo_info(again) == decode_repo_info(envelope)


@FILES
def test_we_write_the_fields_that_the_official_engine_writes(file: GoldenFile) -> None:
    """The same slots of the root table, so that nothing gets lost on the way."""
    official = root(file.envelope.payload).slots
    if file.file_type is FileType.MANIFEST and 2 not in official:
        official |= {3}  # release 1 writes no algorithm
    if file.file_type is FileType.TRANSACTION_LOG:
        official |= {8}  # nor moves, which release 2 writes in spec 1 too
    assert root(file.rewritten()).slots == official


@pytest.mark.parametrize("name", SPEC_1)
def test_refs_are_written_as_they_were(name: str) -> None:
    """Byte for byte."""
    for data in REPOSITORIES[name].refs().values():
        assert encode_ref(decode_ref(data)) == data
