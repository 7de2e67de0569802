"""Scripts that run with the official package and with the facade, and must show the same.

A script finds the package as ``icechunk``, an empty directory as ``place``, and calls ``show`` on
what it wants compared and ``attempt`` on what may fail. Snapshot ids are compared by the order in
which they first appear; times only by being times of aware UTC; errors by class (their codes are
compared elsewhere).
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import pickle
import re
import textwrap
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, cpu, default_buffer_prototype

from tests.interop.theirs import icechunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["same"]

_ID = re.compile(r"\b[0-9A-HJKMNP-TV-Z]{20}\b")
_CHOICES = {"ChunkType", "ConflictType", "RepoAvailability", "SessionMode", "SpecVersion"}
_DIFF = (
    "new_groups",
    "new_arrays",
    "deleted_groups",
    "deleted_arrays",
    "updated_groups",
    "updated_arrays",
)


class _Showing:
    """Turns values of either package into plain ones."""

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours
        self.shown: list[Any] = []
        self._ids: dict[str, str] = {}

    def show(self, *values: object) -> None:
        self.shown.append([self.plain(value) for value in values])

    def attempt(self, call: Callable[[], object], ours: str | None = None) -> None:
        """Show the result or the class of the error; ``ours`` where that of the facade differs."""
        try:
            self.show(call())
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is compared
            name = type(error).__name__
            if ours is not None:
                assert (name == ours) == self._ours, f"{name} where {ours} was declared"
                name = "as declared"
            self.show("raised", name)

    def plain(self, value: Any) -> Any:
        if type(value).__name__ in _CHOICES:
            return [type(value).__name__, int(value)]
        match value:
            case None | bool() | float() | int():
                return value
            case str():
                return _ID.sub(self._known, value)
            case bytes() | np.generic() | np.ndarray():
                return value if isinstance(value, bytes) else value.tolist()
            case Buffer():
                return value.to_bytes()
            case dt.datetime():
                assert value.utcoffset() == dt.timedelta(0)
                return "a time"
            case dict():
                items = sorted((str(k), v) for k, v in value.items())
                return {self.plain(key): self.plain(item) for key, item in items}
            case set() | frozenset():
                return sorted(self.plain(sorted(value)), key=repr)
            case list() | tuple():
                return [self.plain(item) for item in value]
        return self._own(value)

    def _own(self, value: Any) -> Any:
        name = type(value).__name__
        if name == "Diff":
            parts = {part: self.plain(getattr(value, part)) for part in _DIFF}
            chunks = {
                path: sorted(map(tuple, it)) for path, it in value.updated_chunks.items() if it
            }
            moved = [tuple(it) for it in value.moved_nodes]
            return {**parts, "chunks": self.plain(chunks), "moved": self.plain(moved)}
        if name == "SnapshotInfo":
            fields = ("id", "parent_id", "written_at", "message", "metadata")
            return {field: self.plain(getattr(value, field)) for field in fields}
        if name == "Update":
            return [type(value.kind).__name__, self.plain(value.updated_at)]
        return self.plain(str(value).replace("icechunk_async.sync", "icechunk"))

    def _known(self, match: re.Match[str]) -> str:
        return self._ids.setdefault(match[0], f"<id {len(self._ids)}>")


def _run(module: Any, script: str, place: Path, names: dict[str, Any]) -> list[Any]:
    showing = _Showing(ours=module is not icechunk)
    place.mkdir(parents=True)
    scope = {
        "OffsetByteRequest": OffsetByteRequest,
        "RangeByteRequest": RangeByteRequest,
        "SuffixByteRequest": SuffixByteRequest,
        "asyncio": asyncio,
        "attempt": showing.attempt,
        "buffer": cpu.Buffer.from_bytes,
        "datetime": dt,
        "icechunk": module,
        "math": math,
        "np": np,
        "pickle": pickle,
        "place": str(place),
        "prototype": default_buffer_prototype(),
        "show": showing.show,
        "zarr": zarr,
        **names,
    }
    exec(compile(textwrap.dedent(script), "<script>", "exec"), scope)  # noqa: S102 -- of this test
    return showing.shown


def same(script: str, tmp_path: Path, **names: object) -> None:
    """Run a script with both packages and compare what it shows, step by step."""
    theirs = _run(icechunk, script, tmp_path / "theirs", names)
    ours = _run(import_module("icechunk_async.sync"), script, tmp_path / "ours", names)
    steps = enumerate(zip(theirs, ours, strict=False), 1)
    differing = [
        f"step {step}: theirs {wanted}, ours {found}"
        for step, (wanted, found) in steps
        if found != wanted
    ]
    assert not differing, "\n".join(differing)
    assert len(ours) == len(theirs)
    assert ours
