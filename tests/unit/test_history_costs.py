"""The cost of long histories follows what is read and changed, not how many snapshots there are.

Counts of entries that are decoded and encoded, and of calls; seconds are in ``benchmarks``.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from icechunk_async import Repository
from icechunk_async.format import operations_log
from icechunk_async.format.envelope import FileType, pack, unpack
from icechunk_async.format.ids import SnapshotId
from icechunk_async.format.operations_log import NewCommit, Update
from icechunk_async.format.repo_info import (
    SnapshotInfo,
    decode_repo_info,
    encode_repo_info,
    log,
    log_columns,
    log_writing,
    snapshot_columns,
    snapshot_writing,
    snapshots,
)
from tests.helpers import array_document, counted_calls, read, write

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

SMALL, LARGE = 100, 1000
GROWTH = 300
"""Calls that a history ten times as long may cost more: searches take a few steps more."""


class Counted:
    """The number of entries of a history that were decoded and encoded."""

    def __init__(self) -> None:
        """Begin with none."""
        self.decoded = 0
        self.operations_decoded = 0
        self.encoded = 0
        self.operations_encoded = 0


@contextmanager
def counted_entries() -> Generator[Counted]:
    """Count the entries that are decoded and encoded."""
    counted = Counted()
    entries = snapshots.SnapshotTable
    decode, some = entries._decode, snapshot_columns.SnapshotColumns.some
    one, many = operations_log.decode_update, log_columns.decode_updates
    encode, encode_many = snapshot_writing._encode, log_writing.encode_updates

    def decoded(self: snapshots.SnapshotTable, row: int) -> SnapshotInfo:
        counted.decoded += 1
        return decode(self, row)

    def decoded_together(self: snapshot_columns.SnapshotColumns, rows: Sequence[int]) -> object:
        counted.decoded += len(rows)
        return some(self, rows)

    def operation(row: object) -> Update:
        counted.operations_decoded += 1
        return one(row)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    def operations(tables: object) -> tuple[Update, ...]:
        found = many(tables)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        counted.operations_decoded += len(found)
        return found

    def encoded(info: SnapshotInfo, numbering: object) -> object:
        counted.encoded += 1
        return encode(info, numbering)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    def operations_encoded(updates: Sequence[Update]) -> object:
        counted.operations_encoded += len(updates)
        return encode_many(updates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "_decode", decoded)
        patch.setattr(snapshot_columns.SnapshotColumns, "some", decoded_together)
        patch.setattr(log, "decode_update", operation)
        patch.setattr(log_columns, "decode_updates", operations)
        patch.setattr(snapshot_writing, "_encode", encoded)
        patch.setattr(log_writing, "encode_updates", operations_encoded)
        yield counted


async def repository(folder: Path, count: int) -> str:
    """Make a repository with an array, and put ``count`` commits before its last one."""
    url = folder.as_uri()
    async with Repository.create(url) as repo:
        session = await repo.writable_session("main")
        await write(session, "a/zarr.json", array_document((2000,), (1,)))
        await write(session, "a/c/0", b"chunk")
        await session.commit("made")
    path = folder / "repo"
    info = decode_repo_info(unpack(path.read_bytes(), FileType.REPO_INFO))
    tip = info.snapshots[info.branches["main"]]
    infos = {it.id: it for it in info.snapshots.values()}
    parent = tip.parent_id
    log_entries: list[Update] = []
    began = min(it.flushed_at for it in infos.values())
    for number in range(count):
        snapshot_id = SnapshotId((number * 7919).to_bytes(12))
        at = began + number + 1
        infos[snapshot_id] = SnapshotInfo.of(snapshot_id, parent, at, f"{number}", {"n": number})
        log_entries.append(Update(NewCommit("main", snapshot_id), at, f"repo.{number:05}.X"))
        parent = snapshot_id
    infos[tip.id] = replace(tip, parent_id=parent)
    newest, first = (*info.updates,)
    updates = (newest, *reversed(log_entries), first)
    made = replace(info, snapshots=infos, updates=updates)
    path.write_bytes(pack(encode_repo_info(made), FileType.REPO_INFO, 2))
    return url


async def test_reading_a_chunk_decodes_no_history(tmp_path: Path) -> None:
    """The tip of the branch is found by its place."""
    calls: dict[int, int] = {}
    for count in (SMALL, LARGE):
        url = await repository(tmp_path / f"{count}", count)
        with counted_entries() as counted, counted_calls() as made:
            async with Repository.open(url) as repo:
                session = await repo.readonly_session("main")
                assert await read(session, "a/c/0") == b"chunk"
        assert counted.decoded <= 1
        assert counted.operations_decoded <= 1
        calls[count] = len(made)
    assert calls[LARGE] < calls[SMALL] + GROWTH


async def test_a_commit_decodes_and_encodes_what_it_adds(tmp_path: Path) -> None:
    """The first commit of a process looks at the file by columns; the next ones only copy."""
    calls: dict[int, int] = {}
    for count in (SMALL, LARGE):
        url = await repository(tmp_path / f"{count}", count)
        async with Repository.open(url) as repo:
            for turn in range(3):
                with counted_entries() as counted, counted_calls() as made:
                    session = await repo.writable_session("main")
                    await write(session, f"a/c/{turn + 1}", b"more")
                    await session.commit("one")
                assert counted.decoded <= 1
                assert counted.operations_decoded <= 2
                assert counted.encoded <= turn + 2
                assert counted.operations_encoded == 2  # its own, and that of the commit before
            calls[count] = len(made)
            assert len([it async for it in repo.ancestry(branch="main")]) == count + 5
    assert calls[LARGE] < calls[SMALL] + GROWTH


async def test_the_newest_ancestors_are_found_without_the_others(tmp_path: Path) -> None:
    """Pages of ancestors are short at the beginning."""
    url = await repository(tmp_path / "repo", LARGE)
    async with Repository.open(url) as repo:
        with counted_entries() as counted:
            messages: list[str] = []
            async for info in repo.ancestry(branch="main"):
                messages.append(info.message)
                if len(messages) == 5:
                    break
        assert messages == ["made", "999", "998", "997", "996"]
        assert counted.decoded <= 16
