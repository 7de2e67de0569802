"""Small files with a little of everything, to go beside the golden ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard

from icechunk_async.format.envelope import FileType, pack
from icechunk_async.format.json.metadata import encode_items
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.operations_log import Availability, RepoStatus, Update
from icechunk_async.format.repo_info import RepoInfo, SnapshotInfo, encode_repo_info
from icechunk_async.format.snapshot import (
    ArrayData,
    Dimension,
    ManifestFileInfo,
    ManifestRef,
    Node,
    Nodes,
    Snapshot,
)
from icechunk_async.format.snapshot.writing import encode_snapshot
from icechunk_async.format.transaction_log import Move, TransactionLog, encode_transaction_log
from tests.unit.format.golden_files import GoldenFile
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import chunk_id, manifest_id, node_id, refs_of, snapshot_id
from tests.unit.format.update_samples import EVERY_KIND

if TYPE_CHECKING:
    from icechunk_async.format.json.metadata import JSON

__all__ = ["own_files"]


def own_files() -> list[GoldenFile]:
    """Return one file of each type, and manifests of several kinds."""
    payloads = {
        "snapshot-1": (FileType.SNAPSHOT, 1, encode_snapshot(_snapshot(), 1)),
        "snapshot-2": (FileType.SNAPSHOT, 2, encode_snapshot(_snapshot(), 2)),
        "manifest-mixed": (FileType.MANIFEST, 2, bytes(_mixed_manifest())),
        "manifest-compressed": (FileType.MANIFEST, 2, _compressed_manifest()),
        "log": (FileType.TRANSACTION_LOG, 2, bytes(encode_transaction_log(_log(), 2))),
        "repo": (FileType.REPO_INFO, 2, encode_repo_info(_repo_info())),
    }
    return [
        GoldenFile(f"own/{name}", file_type, pack(payload, file_type, spec))
        for name, (file_type, spec, payload) in payloads.items()
    ]


def _snapshot() -> Snapshot:
    grid = ArrayData(
        (Dimension(10, 4), Dimension(7, 7)),
        ("x", None),
        (
            ManifestRef(manifest_id(3), ((0, 2), (0, 7))),
            ManifestRef(manifest_id(5), ((2, 4), (3, 4))),
        ),
    )
    scalar = ArrayData((), None, (ManifestRef(manifest_id(3), ()),))
    nodes = [
        Node(node_id(1), "/", b"{}"),
        Node(node_id(2), "/a", b"{}", grid),
        Node(node_id(3), "/a-b", b"", scalar),
        Node(node_id(4), "/g/é", b"{1}", ArrayData((Dimension(0, 0),), ("t",))),
    ]
    files = [ManifestFileInfo(manifest_id(number), 100, number) for number in (3, 5)]
    metadata: dict[str, JSON] = {"a": [1, 2, 300], "b": {"c": "d"}}
    return Snapshot(
        snapshot_id(2), snapshot_id(1), 7, "message", metadata, Nodes(nodes),
        {info.id: info for info in files},
    )  # fmt: skip


def _mixed_manifest() -> memoryview:
    arrays = {
        node_id(rank): refs_of(
            rank,
            {
                (0,) * rank: InlineChunk(b"inline"),
                (1,) * rank: NativeChunk(chunk_id(1), 5, 6),
                (2,) * rank: VirtualChunk("s3://b/x", 7, 8, etag='"e"'),
                (3,) * rank: VirtualChunk("s3://b/x", 9, 10, last_modified=11),
                (4,) * rank: NativeChunk(chunk_id(2), 0, 6),
            },
        )
        for rank in range(4)
    }
    return encode_manifest(manifest_id(1), arrays)


def _compressed_manifest() -> bytes:
    names: list[bytes | bytearray | memoryview] = [
        b"s3://bucket/run-%d/file-%06d.nc" % (row % 7, row) for row in range(500)
    ]
    dictionary = zstandard.train_dictionary(300, names)
    compressor = zstandard.ZstdCompressor(dict_data=dictionary)
    other = OtherManifest()
    frames = [other.out.blob(compressor.compress(name)) for name in names[:6]]
    refs = [other.ref((row,), {8: frame}) for row, frame in enumerate(frames)]
    refs.append(other.ref((6,), {5: other.out.string("s3://b/plain")}))
    refs.append(other.native((7,), chunk_id(3)))
    refs.append(other.ref((8, 8), {8: frames[0]}))
    other.array(node_id(1), refs)
    return other.finish(manifest_id(1), dictionary=dictionary.as_bytes())


def _log() -> TransactionLog:
    ids = [frozenset([node_id(at), node_id(at + 10)]) for at in range(6)]
    touched = {
        node_id(rank): np.arange(3 * rank, dtype=np.uint32).reshape(3, rank) for rank in range(1, 4)
    }
    moves = (
        Move("/a", "/b", node_id(1), is_array=True),
        Move("/é", "/b/c", node_id(2), is_array=False),
    )
    return TransactionLog(
        snapshot_id(2), ids[0], ids[1], ids[2], ids[3], ids[4], ids[5], touched, moves
    )


def _repo_info() -> RepoInfo:
    infos = [
        SnapshotInfo.of(
            snapshot_id(number), snapshot_id(number - 1) if number else None, number, "m", {"n": 1}
        )
        for number in range(4)
    ]
    pruned = (snapshot_id(7), snapshot_id(8))
    infos.append(SnapshotInfo(snapshot_id(4), snapshot_id(3), 9, "é", (), pruned))
    return RepoInfo(
        branches={"main": snapshot_id(4), "side": snapshot_id(0)},
        tags={"v1": snapshot_id(1)},
        deleted_tags=frozenset({"gone", "past"}),
        snapshots={info.id: info for info in infos},
        status=RepoStatus(Availability.READ_ONLY, 5, "why"),
        updates=tuple(
            Update(detail, 100 - number, f"backup-{number}" if number > 1 else None)
            for number, detail in EVERY_KIND.items()
        ),
        before_updates="repo.1.X",
        raw_metadata=tuple(encode_items({"owner": "é"}, 2)),
        raw_config=b"config",
        enabled_flags=(3, 9),
        disabled_flags=(4,),
    )
