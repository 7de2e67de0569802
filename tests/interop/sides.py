"""One engine of a pair that is driven step by step, and its answers in plain values.

Everything goes through the blocking names that both packages have, so that the same call runs
for both. Snapshot ids are compared by the order in which they appear, times by being times.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from tests.interop.files import FOLDERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Outcome", "Side", "attempt", "buffer", "document", "keys_and_values"]

_ID = re.compile(r"\b[0-9A-HJKMNP-TV-Z]{20}\b")
_DAYS_AGO = 10 * 86400
_STEP = 60
_DIFF = (
    "new_groups",
    "new_arrays",
    "deleted_groups",
    "deleted_arrays",
    "updated_groups",
    "updated_arrays",
)

type Outcome = tuple[str, Any]
"""("did", a plain value), or ("refused", the class of the error and its code)."""


def buffer(data: bytes) -> Any:
    """Return bytes as Zarr hands them to stores."""
    return cpu.Buffer.from_bytes(data)


def document(value: object) -> Any:
    """Return a JSON document as Zarr hands it to stores."""
    return buffer(json.dumps(value).encode())


def keys_and_values(store: Any) -> dict[str, Any]:
    """Return all that a store holds; the class of the error where a value cannot be read.

    Until the commit the official engine also lists chunks that are outside of an array since it
    was made smaller; where nothing is, nothing counts.
    """

    async def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        prototype = default_buffer_prototype()
        for key in sorted([key async for key in store.list()]):
            try:
                value = await store.get(key, prototype)
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is compared
                found[key] = type(error).__name__
            else:
                if value is not None:
                    found[key] = value.to_bytes()
        return found

    return sync(read())


@dataclass
class Side:
    """An engine with its repository, its open sessions and the snapshots that it made."""

    package: Any
    place: Path
    source: Path
    names: dict[str, str] = field(default_factory=dict[str, str])
    """By snapshot id: what it is called on both sides."""
    began: float = field(default_factory=time.time)
    sessions: dict[int, Any] = field(default_factory=dict[int, Any])
    repo: Any = None
    contents: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of snapshots that were looked into."""

    @property
    def url(self) -> str:
        """Where virtual chunks are."""
        return f"{self.source.as_uri()}/"

    @property
    def known(self) -> list[str]:
        """The snapshots, in the order in which they were made."""
        return list(self.names)

    def storage(self) -> Any:
        """Return the place as the package wants it."""
        return self.package.local_filesystem_storage(str(self.place))

    def config(self, inline: int, split: int | None, updates: int | None) -> Any:
        """Return a configuration in the package's classes."""
        package = self.package
        config = package.RepositoryConfig(
            inline_chunk_threshold_bytes=inline, num_updates_per_repo_info_file=updates
        )
        if split is not None:
            anywhere = package.ManifestSplitDimCondition.Any()
            rules = {package.ManifestSplitCondition.AnyArray(): {anywhere: split}}
            splitting = package.ManifestSplittingConfig.from_dict(rules)
            config.manifest = package.ManifestConfig(splitting=splitting)
        container = package.VirtualChunkContainer(
            self.url, package.local_filesystem_store(str(self.source))
        )
        config.set_virtual_chunk_container(container)
        return config

    def access(self) -> dict[str, Any]:
        """Authorise virtual chunks."""
        return {self.url: self.package.credentials.LocalFileSystemAccess}

    def create(self, spec: int, config: tuple[int, int | None, int | None]) -> None:
        """Create the repository."""
        self.repo = self.package.Repository.create(
            self.storage(), self.config(*config), self.access(), spec_version=spec
        )

    def open(self) -> None:
        """Open the repository anew."""
        self.repo = self.package.Repository.open(
            self.storage(), authorize_virtual_chunk_access=self.access()
        )

    def moment(self, step: int) -> dt.datetime:
        """Return the time just before a step's files were written, by the clock of ``age``."""
        seconds = self.began - _DAYS_AGO + step * _STEP - _STEP / 2
        return dt.datetime.fromtimestamp(seconds, dt.UTC)

    def age(self, step: int) -> None:
        """Set the times of files that were just written to that of a step, long ago."""
        for folder in FOLDERS:
            directory = self.place / folder
            if not directory.is_dir():
                continue
            for entry in os.scandir(directory):
                if entry.stat().st_mtime > self.began - _DAYS_AGO / 2:
                    moment = self.began - _DAYS_AGO + step * _STEP
                    os.utime(entry.path, (moment, moment))

    def chunk_files(self) -> set[str]:
        """Return the names of the chunks' objects."""
        directory = self.place / "chunks"
        return {entry.name for entry in os.scandir(directory)} if directory.is_dir() else set()

    def plain(self, value: Any) -> Any:
        """Return a value of the package as one that can be compared with the other's."""
        match value:
            case None | bool() | float() | bytes():
                return value
            case int():
                return int(value)
            case str():
                return _ID.sub(self._known, value)
            case dt.datetime():
                assert value.utcoffset() == dt.timedelta(0)
                return "a time"
            case _:
                return self._many(value)

    def _many(self, value: Any) -> Any:
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value)
            return {self.plain(str(key)): self.plain(items[key]) for key in sorted(items)}
        if isinstance(value, (list, tuple)):
            return [self.plain(it) for it in cast("list[Any]", value)]
        if isinstance(value, (set, frozenset)):
            return sorted(self.plain(it) for it in cast("list[Any]", value))
        return self._own(value)

    def _known(self, match: re.Match[str]) -> str:
        return self.names.setdefault(match[0], f"#{len(self.names)}")

    def _own(self, value: Any) -> Any:
        match type(value).__name__:
            case "Diff":
                return self._diff(value)
            case "SnapshotInfo":
                names = ("id", "parent_id", "written_at", "message", "metadata")
                return {name: self.plain(getattr(value, name)) for name in names}
            case "Update":
                kind = value.kind
                named = {it: getattr(kind, it) for it in dir(kind) if it[0].islower()}
                named = {it: value for it, value in named.items() if not callable(value)}
                if "status" in named:
                    named["status"] = self._status(named["status"])
                return [type(kind).__name__, self.plain(named)]
            case "RepoStatus":
                return self._status(value)
            case "FeatureFlag":
                return [value.name, value.default_enabled, value.setting, value.enabled]
            case "ChunkStorageStats":
                return [value.native_bytes, value.virtual_bytes, value.inlined_bytes]
            case "GCSummary":
                return self._collected(value)
            case "ChunkType" | "SessionMode" | "SpecVersion":
                return int(value)
            case name:
                return name

    def _status(self, status: Any) -> list[object]:
        return [int(status.availability), status.limited_availability_reason]

    def _diff(self, value: Any) -> dict[str, Any]:
        parts: dict[str, Any] = {part: sorted(getattr(value, part)) for part in _DIFF}
        replaced = {*parts["deleted_arrays"]} & {*parts["new_arrays"]}
        updated: dict[str, list[list[int]]] = value.updated_chunks
        parts["chunks"] = {
            path: sorted([int(it) for it in at] for at in coords)
            for path, coords in sorted(updated.items())
            if coords and path not in replaced
        }
        moved: list[tuple[str, str]] = value.moved_nodes
        parts["moved"] = sorted([start, end] for start, end in moved)
        return parts

    def _collected(self, value: Any) -> dict[str, int]:
        names = ("chunks", "manifests", "snapshots", "attributes", "transaction_logs", "bytes")
        return {name: getattr(value, f"{name}_deleted") for name in names}


def attempt(side: Side, do: Callable[[Side], object]) -> Outcome:
    """Let a side do something; answer the plain result, or class and code of the error."""
    try:
        return "did", side.plain(do(side))
    except (side.package.IcechunkError, ValueError) as error:
        kind = getattr(error, "kind", None)
        return "refused", (type(error).__name__, None if kind is None else str(kind))
