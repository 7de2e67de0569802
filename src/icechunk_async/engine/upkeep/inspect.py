"""The files of a repository as plain dictionaries, in the words of the official engine."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime import clock
from icechunk_async.errors import ObjectNotFoundError, SnapshotNotFoundError
from icechunk_async.format.envelope import FileType, unpack, written_by
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import ManifestId, NodeId, SnapshotId
from icechunk_async.format.layout import REPO_INFO, manifest_key, snapshot_key, transaction_key
from icechunk_async.format.operations_log import (
    Availability,
    DetachedSnapshotCreated,
    FeatureFlagChanged,
    GarbageCollectionRan,
    RepoMigrated,
    RepoStatusChanged,
)
from icechunk_async.format.repo_info import decode_repo_info
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.format.transaction_log import TransactionLog, decode_transaction_log

if TYPE_CHECKING:
    from icechunk_async.engine.open import Engine
    from icechunk_async.format.envelope import Envelope
    from icechunk_async.format.json.metadata import JSON
    from icechunk_async.format.operations_log import RepoStatus, Update, UpdateDetail
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Node

__all__ = [
    "inspect_manifest",
    "inspect_repo_info",
    "inspect_snapshot",
    "inspect_transaction_log",
]

_NOTE: Final = (
    "Synthetic composite: this snapshot's ancestry was collapsed by expiration; the log below "
    "merges its pruned-ancestor logs with its own log. `header` describes this snapshot's own log "
    "only."
)
_AVAILABILITIES: Final = {
    Availability.ONLINE: "Online",
    Availability.READ_ONLY: "ReadOnly",
    Availability.OFFLINE: "Offline",
}
_DETAIL_NAMES: Final[dict[type[object], str]] = {
    DetachedSnapshotCreated: "NewDetachedSnapshotUpdate",
    FeatureFlagChanged: "FeatureFlagChanged",
    GarbageCollectionRan: "GCRanUpdate",
}
_FIELD_NAMES: Final = {
    "new_snapshot_id": "new_snap_id",
    "previous_snapshot_id": "previous_snap_id",
}


async def _load(engine: Engine, key: str, kind: FileType) -> tuple[dict[str, JSON], Envelope]:
    """Return the header of a file as a dictionary, and its contents."""
    engine.history.capabilities.require("upkeep")
    retrieved = await engine.assets.storage.get(key)
    envelope = await engine.assets.compute(
        lambda: unpack(retrieved.data, kind), size_bytes=retrieved.size_bytes
    )
    stamp = written_by(retrieved.data)
    name, dash, version = stamp.partition("-")
    header: dict[str, JSON] = {"written_by": stamp, "app_name": name}
    if dash:
        header["app_version"] = version
    return {
        **header,
        "spec_version": f"{envelope.spec_version}.0",
        "file_type": kind.name.lower().replace("_", "-"),
        "compression": "zstd",
    }, envelope


async def inspect_snapshot(engine: Engine, snapshot_id: SnapshotId) -> dict[str, JSON]:
    """Return the contents of a snapshot file."""
    try:
        header, envelope = await _load(engine, snapshot_key(snapshot_id), FileType.SNAPSHOT)
    except ObjectNotFoundError as error:
        raise SnapshotNotFoundError(
            f"There is no snapshot {snapshot_id} in this repository. It may have expired; "
            "'ancestry' lists the snapshots of a branch.",
            snapshot_id=str(snapshot_id),
        ) from error
    snapshot = decode_snapshot(envelope)
    return {
        "id": str(snapshot.id),
        "header": header,
        "flushed_at": _time(snapshot.flushed_at),
        "commit_message": snapshot.message,
        "metadata": snapshot.metadata,
        "manifests": [
            {
                "id": str(info.id),
                "size_bytes": info.size_bytes,
                "num_chunk_refs": info.num_chunk_refs,
            }
            for info in snapshot.manifests.values()
        ],
        "nodes": [_node(node) for node in snapshot.nodes.values()],
    }


def _node(node: Node) -> dict[str, JSON]:
    shown: dict[str, JSON] = {"id": str(node.id), "path": node.path}
    array = node.array
    if array is None:
        return {**shown, "node_type": "group"}
    names = array.dimension_names or (None,) * len(array.dimensions)
    return {
        **shown,
        "node_type": "array",
        "shape": [
            {
                **({} if name is None else {"name": name}),
                "array_length": axis.array_length,
                "num_chunks": axis.num_chunks,
            }
            # The official engine does not compare the number of names with that of axes.
            for name, axis in zip(names, array.dimensions, strict=False)
        ],
        "manifest_refs": [
            {"id": str(ref.manifest_id), "extents": [list(span) for span in ref.extents]}
            for ref in array.manifests
        ],
    }


async def inspect_repo_info(engine: Engine) -> dict[str, JSON]:
    """Return the contents of the repo info file, without the part of a long log in backups."""
    engine.history.capabilities.require("repo_info_file")
    header, envelope = await _load(engine, REPO_INFO, FileType.REPO_INFO)
    info = decode_repo_info(envelope)
    older = {} if info.before_updates is None else {"repo_before_updates": info.before_updates}
    return {
        "header": header,
        "spec_version": f"{envelope.spec_version}.0",
        "branches": {name: str(tip) for name, tip in info.branches.items()},
        "tags": {name: str(target) for name, target in info.tags.items()},
        "deleted_tags": sorted(info.deleted_tags),
        "snapshots": [_snapshot_info(it) for it in info.snapshots.values()],
        "metadata": info.metadata,
        "latest_updates": [_update(it) for it in info.updates],
        **older,
    }


def _snapshot_info(info: SnapshotInfo) -> dict[str, JSON]:
    parent = {} if info.parent_id is None else {"parent_id": str(info.parent_id)}
    return {
        "id": str(info.id),
        **parent,
        "flushed_at": _time(info.flushed_at),
        "message": info.message,
        "metadata": info.metadata,
    }


def _update(update: Update) -> dict[str, JSON]:
    backup = {} if update.backup_path is None else {"backup_path": update.backup_path}
    return {
        "update_type": _detail(update.detail),
        "updated_at": _time(update.updated_at),
        **backup,
    }


def _detail(detail: UpdateDetail) -> dict[str, JSON]:
    cls = type(detail)
    shown: dict[str, JSON] = {"type": _DETAIL_NAMES.get(cls, f"{cls.__name__}Update")}
    match detail:
        case FeatureFlagChanged(flag, new_value, is_set):
            return {**shown, "id": flag, "new_value": new_value if is_set else None}
        case RepoStatusChanged(status):
            return {**shown, "status": _status(status)}
        case RepoMigrated(old, new):
            return {**shown, "from_version": f"{old}.0", "to_version": f"{new}.0"}
        case _:
            pass
    for it in fields(detail):
        value = getattr(detail, it.name)
        name = _FIELD_NAMES.get(it.name, it.name)
        shown[name] = str(value) if isinstance(value, SnapshotId) else value
    return shown


def _status(status: RepoStatus) -> dict[str, JSON]:
    return {
        "availability": _AVAILABILITIES[status.availability],
        "limited_availability_reason": status.reason,
        "set_at": _time(status.set_at),
    }


async def inspect_manifest(engine: Engine, manifest_id: ManifestId) -> dict[str, JSON]:
    """Return the number of references of each kind in a manifest."""
    header, envelope = await _load(engine, manifest_key(manifest_id), FileType.MANIFEST)
    payload = envelope.payload
    counted = await engine.assets.compute(lambda: _count(payload), size_bytes=len(payload))
    return {"id": str(manifest_id), "header": header, "size_bytes": len(payload), **counted}


def _count(payload: bytes | memoryview) -> dict[str, JSON]:
    """Count a manifest's references; their kind follows from the fields that they have."""
    root = Tables.root(Buffer(payload))
    tables = root.vector(1, 4, 4, required="arrays").tables()
    nodes = tables.struct(0, NodeId.size_bytes, field="node_id")
    vectors = tables.vector(1, 4, 4, required="refs")
    arrays: list[dict[str, Any]] = []
    # Slots are counted, and no reference is decoded: a manifest of millions takes a moment.
    num_compressed = 0
    for row in range(len(tables)):
        refs = vectors.row(row).tables()
        native, compressed, virtual = _kinds(refs)
        num_native, num_virtual = int(native.sum()), int(virtual.sum())
        num_compressed += int(compressed.sum())
        arrays.append(
            {
                "node_id": str(NodeId(nodes[row].tobytes())),
                "num_chunk_refs": len(refs),
                "num_inline": len(refs) - num_native - num_virtual,
                "num_native": num_native,
                "num_virtual": num_virtual,
            }
        )
    totals = {
        f"total_{name.removeprefix('num_')}": sum(it[name] for it in arrays)
        for name in ("num_chunk_refs", "num_inline", "num_native", "num_virtual")
    }
    compression: dict[str, JSON] = {"uses_location_compression": False}
    if root.has(2)[0]:
        size_bytes = len(root.vector(2, 1, 1).raw(0))
        compression = {"uses_location_compression": True, "dictionary_size_bytes": size_bytes}
    return {
        "num_arrays": len(arrays),
        **totals,
        "arrays": arrays,
        "compression": {**compression, "num_compressed_refs": num_compressed},
    }


def _kinds(refs: Tables) -> tuple[Any, Any, Any]:
    """Return which references are native, virtual with a compressed location, and virtual."""
    # In the order in which readers decide (spec, "Manifest files"): slot 4 is the id of a chunk
    # object, 8 a compressed location, 5 a plain one. What has none of them is inline.
    native = np.asarray(refs.has(4))
    compressed = np.asarray(refs.has(8)) & ~native
    return native, compressed, (compressed | np.asarray(refs.has(5))) & ~native


async def inspect_transaction_log(engine: Engine, snapshot_id: SnapshotId) -> dict[str, JSON]:
    """Return the nodes and chunks touched by a commit and by expired commits below it."""
    key = transaction_key(snapshot_id)
    try:
        header, envelope = await _load(engine, key, FileType.TRANSACTION_LOG)
    except ObjectNotFoundError as error:
        raise ObjectNotFoundError(await _why_no_log(engine, snapshot_id), key=key) from error
    own = decode_transaction_log(envelope.payload)
    pruned: tuple[SnapshotId, ...] = ()
    if engine.history.state is not None:
        known = (await engine.history.state.info()).snapshots.get(snapshot_id)
        pruned = () if known is None else known.pruned_ancestor_logs
    log = TransactionLog(snapshot_id)
    merged: list[str] = []
    missing: list[str] = []
    for expired in pruned:
        try:
            log = log.merge(await engine.assets.transaction_log(expired))
        except ObjectNotFoundError:
            missing.append(str(expired))
        else:
            merged.append(str(expired))
    # Those of expired commits come before it, so that its own changes lie above theirs.
    if merged:
        own = log.merge(own)
    shown: dict[str, JSON] = {
        "header": header,
        **{name: _ids(getattr(own, name)) for name in _LISTS},
        "updated_chunks": [
            {"node_id": str(node), "chunks": _coordinates(own, node)}
            for node in sorted(own.updated_chunks)
        ],
        "moved_nodes": [{"from": move.source, "to": move.target} for move in own.moves],
    }
    if pruned:
        shown["synthetic_composite"] = {
            "note": _NOTE,
            "merged_pruned_ancestor_tx_logs": merged,
            "missing_tx_logs": missing,
        }
    return shown


async def _why_no_log(engine: Engine, snapshot_id: SnapshotId) -> str:
    """Return why a snapshot has no transaction log, from its file."""
    try:
        _, envelope = await _load(engine, snapshot_key(snapshot_id), FileType.SNAPSHOT)
        snapshot = decode_snapshot(envelope)
    except ObjectNotFoundError:
        return (
            f"There is no transaction log of {snapshot_id}, and no snapshot with this id in this "
            "repository; 'ancestry' lists the snapshots of a branch."
        )
    # By its file, not by the repository: a migration writes no log for it either.
    if envelope.spec_version == 1 and snapshot.parent_id is None:
        return (
            f"Snapshot {snapshot_id} is the first of its repository and was written in format "
            "version 1, which has no transaction log for the first snapshot: it holds nothing, and "
            "changed nothing."
        )
    return (
        f"The transaction log of snapshot {snapshot_id} is missing: the repository is damaged. "
        "'verify' lists what else is, and 'repair' makes the log anew."
    )


_LISTS: Final = (
    "new_groups",
    "new_arrays",
    "deleted_groups",
    "deleted_arrays",
    "updated_groups",
    "updated_arrays",
)


def _ids(ids: frozenset[NodeId]) -> list[str]:
    return [str(node_id) for node_id in sorted(ids)]


def _coordinates(log: TransactionLog, node_id: NodeId) -> list[list[int]]:
    """Return all coordinates of an array, also those of another rank than most."""
    rows: list[list[int]] = log.updated_chunks[node_id].tolist()
    for (node, _), coords in log.stray_chunks.items():
        if node == node_id:
            rows += coords.tolist()
    return sorted(rows)


def _time(microseconds: int) -> str:
    """Write a time as RFC 3339 does, with the fewest digits."""
    moment = clock.from_us(microseconds)
    digits = "auto"
    if moment.microsecond:
        digits = "microseconds" if moment.microsecond % 1000 else "milliseconds"
    return moment.isoformat(timespec=digits).replace("+00:00", "Z")
