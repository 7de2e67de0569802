"""Finding and reading the golden repositories."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from icechunk_async.format.envelope import Envelope, FileType, unpack
from icechunk_async.format.manifest.reading import Manifest, decode_manifest
from icechunk_async.format.manifest.writing import LocationDictionary, encode_manifest
from icechunk_async.format.repo_info import RepoInfo, decode_repo_info, encode_repo_info
from icechunk_async.format.snapshot import Nodes, Snapshot, decode_snapshot
from icechunk_async.format.snapshot.writing import encode_snapshot
from icechunk_async.format.transaction_log import (
    TransactionLog,
    decode_transaction_log,
    encode_transaction_log,
)
from tests.unit.format.wire import root

__all__ = ["REPOSITORIES", "GoldenFile", "GoldenRepository", "golden_files"]

_GOLDEN = Path(__file__).parent / "golden"
_FOLDERS = {
    "snapshots": FileType.SNAPSHOT,
    "manifests": FileType.MANIFEST,
    "transactions": FileType.TRANSACTION_LOG,
    "overwritten": FileType.REPO_INFO,
}


@dataclass(frozen=True)
class GoldenFile:
    """One metadata file."""

    name: str
    """Path below the golden folder."""
    file_type: FileType
    data: bytes

    @property
    def envelope(self) -> Envelope:
        """Its contents."""
        return unpack(self.data, self.file_type)

    def rewritten(self) -> bytes:
        """The same contents as this library lays them out."""
        envelope = self.envelope
        spec, payload = envelope.spec_version, envelope.payload
        match self.file_type:
            case FileType.SNAPSHOT:
                snapshot = decode_snapshot(envelope)
                anew = replace(snapshot, nodes=Nodes(snapshot.nodes.values()))
                return bytes(encode_snapshot(anew, spec))
            case FileType.MANIFEST:
                manifest = decode_manifest(payload)
                settings = LocationDictionary() if 2 in root(payload).slots else None
                return bytes(
                    encode_manifest(manifest.id, manifest.arrays, location_dictionary=settings)
                )
            case FileType.TRANSACTION_LOG:
                return bytes(encode_transaction_log(decode_transaction_log(payload), spec))
            case FileType.REPO_INFO:
                info = decode_repo_info(envelope)
                snapshots, updates = dict(info.snapshots), tuple(info.updates)
                return bytes(encode_repo_info(replace(info, snapshots=snapshots, updates=updates)))


@dataclass(frozen=True)
class GoldenRepository:
    """One repository."""

    root: Path

    @cached_property
    def answers(self) -> dict[str, Any]:
        """The contents as the official engine reports them."""
        found: dict[str, Any] = json.loads((self.root / "answers.json").read_text("utf-8"))
        return found

    def files(self) -> list[GoldenFile]:
        """All files with an envelope."""
        places = [(path, kind) for name, kind in _FOLDERS.items() for path in self._in(name)]
        if (self.root / "repo").exists():
            places.append((self.root / "repo", FileType.REPO_INFO))
        return [
            GoldenFile(path.relative_to(_GOLDEN).as_posix(), kind, path.read_bytes())
            for path, kind in places
        ]

    def snapshots(self) -> dict[str, Snapshot]:
        """By the name of the file."""
        return {
            path.name: decode_snapshot(unpack(path.read_bytes(), FileType.SNAPSHOT))
            for path in self._in("snapshots")
        }

    def manifests(self) -> dict[str, Manifest]:
        """By the name of the file."""
        return {
            path.name: decode_manifest(unpack(path.read_bytes(), FileType.MANIFEST).payload)
            for path in self._in("manifests")
        }

    def logs(self) -> dict[str, TransactionLog]:
        """By the name of the file."""
        return {
            path.name: decode_transaction_log(
                unpack(path.read_bytes(), FileType.TRANSACTION_LOG).payload
            )
            for path in self._in("transactions")
        }

    def repo_info(self, name: str = "repo") -> RepoInfo:
        """The repo info, or a backup of it."""
        path = self.root / (name if name == "repo" else f"overwritten/{name}")
        return decode_repo_info(unpack(path.read_bytes(), FileType.REPO_INFO))

    def refs(self) -> dict[str, bytes]:
        """Branch and tag files of spec 1, without the empty ones of deleted tags."""
        return {path.parent.name: path.read_bytes() for path in self.root.glob("refs/*/ref.json")}

    def _in(self, folder: str) -> list[Path]:
        paths = sorted((self.root / folder).glob("*"))
        return [path for path in paths if not path.name.startswith("config.yaml")]


REPOSITORIES = {
    path.name: GoldenRepository(path) for path in sorted(_GOLDEN.glob("*-by-*")) if path.is_dir()
}


def golden_files() -> list[GoldenFile]:
    """Every file of every repository; those that several share, once."""
    files = [file for repository in REPOSITORIES.values() for file in repository.files()]
    return list({file.data: file for file in files}.values())
