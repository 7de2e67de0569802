"""The files of a repository in a directory, decoded one by one, without any engine."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from icechunk_async.format.envelope import FileType, unpack
from icechunk_async.format.ids import ChunkId, ManifestId, SnapshotId
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.refs import decode_ref
from icechunk_async.format.repo_info import decode_repo_info
from icechunk_async.format.snapshot import decode_snapshot
from icechunk_async.format.transaction_log import decode_transaction_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from icechunk_async.format.manifest.reading import Manifest
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.format.snapshot import Snapshot
    from icechunk_async.format.transaction_log import TransactionLog

__all__ = ["FOLDERS", "Files"]

FOLDERS = ("snapshots", "transactions", "manifests", "chunks")
"""Folders that garbage collection looks into."""


class Files:
    """A repository as files; read when asked for, and then kept."""

    def __init__(self, root: Path) -> None:
        """Look at the repository in ``root``."""
        self.root = root

    def names(self) -> list[str]:
        """Return the paths of all files, sorted."""
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.root).as_posix() for path in paths)

    def census(self) -> Counter[str]:
        """Count the files of each kind."""
        return Counter(name.partition("/")[0] for name in self.names())

    def ids(self, folder: str) -> set[str]:
        """Return the names in one of the folders."""
        directory = self.root / folder
        return {path.name for path in directory.iterdir()} if directory.is_dir() else set()

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """Decode a snapshot."""
        data = (self.root / "snapshots" / snapshot_id).read_bytes()
        return decode_snapshot(unpack(data, FileType.SNAPSHOT))

    def log(self, snapshot_id: str) -> TransactionLog:
        """Decode a transaction log."""
        data = (self.root / "transactions" / snapshot_id).read_bytes()
        return decode_transaction_log(unpack(data, FileType.TRANSACTION_LOG).payload)

    def manifest(self, manifest_id: ManifestId) -> Manifest:
        """Decode a manifest."""
        data = (self.root / "manifests" / str(manifest_id)).read_bytes()
        return decode_manifest(unpack(data, FileType.MANIFEST).payload)

    @cached_property
    def info(self) -> RepoInfo | None:
        """The repo info of a repository of spec 2."""
        path = self.root / "repo"
        if not path.exists():
            return None
        return decode_repo_info(unpack(path.read_bytes(), FileType.REPO_INFO))

    def tips(self) -> set[SnapshotId]:
        """Return the snapshots of all branches and tags."""
        if self.info is not None:
            return {*self.info.branches.values(), *self.info.tags.values()}
        return {
            decode_ref(path.read_bytes())
            for path in (self.root / "refs").glob("*/ref.json")
            if not path.with_name("ref.json.deleted").exists()
        }

    def ancestry(self, tip: SnapshotId) -> Iterator[SnapshotId]:
        """Return a snapshot and its ancestors."""
        current: SnapshotId | None = tip
        while current is not None:
            yield current
            if self.info is not None:
                current = self.info.snapshots[current].parent_id
            else:
                current = self.snapshot(str(current)).parent_id

    def reachable(self) -> dict[str, set[str]]:
        """Return, by folder, the names of the files that some branch or tag needs."""
        kept = {it for tip in self.tips() for it in self.ancestry(tip)}
        logs = set(kept)
        if self.info is not None:
            logs |= {log for it in kept for log in self.info.snapshots[it].pruned_ancestor_logs}
        manifests = {it for one in kept for it in self.snapshot(str(one)).manifests}
        chunks: set[str] = set()
        for manifest_id in manifests:
            for refs in self.manifest(manifest_id).arrays.values():
                chunks |= {str(ChunkId(row.tobytes())) for row in refs.chunk_ids}
        return {
            "snapshots": set(map(str, kept)),
            "transactions": set(map(str, logs)),
            "manifests": set(map(str, manifests)),
            "chunks": chunks,
        }

    def garbage(self) -> dict[str, set[str]]:
        """Return, by folder, the names of the files that nothing needs."""
        needed = self.reachable()
        return {folder: self.ids(folder) - needed[folder] for folder in FOLDERS}

    def missing(self) -> dict[str, set[str]]:
        """Return, by folder, the names of files that are needed and not there."""
        needed = self.reachable()
        if self.info is None:  # spec 1 has no log of the first snapshot
            needed["transactions"] -= {str(list(self.ancestry(tip))[-1]) for tip in self.tips()}
        return {folder: needed[folder] - self.ids(folder) for folder in FOLDERS}
