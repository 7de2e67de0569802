"""Where the format leaves no choice, both engines write the same bytes."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import zstandard

from icechunk_async._runtime.clock import to_us
from icechunk_async.format.envelope import HEADER_BYTES, FileType, unpack
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, NodeId, SnapshotId
from icechunk_async.format.repo_info import decode_repo_info
from tests.interop.answers import Settings
from tests.interop.comparing import ENGINES
from tests.interop.files import Files
from tests.interop.hierarchies import JSON_KINDS
from tests.interop.steps import HISTORY, both, history
from tests.interop.theirs import open_official

if TYPE_CHECKING:
    from pathlib import Path

    from icechunk_async.format.repo_info import RepoInfo


SPECS = pytest.mark.parametrize("spec", [1, 2])
FOLDERS = {"snapshots": 1, "manifests": 2, "transactions": 4}
"""Numbers of the types of files, which their headers name."""
ID = "[0-9A-HJKMNP-TV-Z]{20}"
YEAR_3000_MS = 32_503_680_000_000


def placed(name: str) -> str:
    """Return a file's place with every random part replaced."""
    name = re.sub(r"\d{14}\." + ID, "<when>.<id>", name)
    return re.sub(f"/{ID}$", "/<id>", name)


@SPECS
async def test_the_same_history_makes_the_same_files(spec: int, tmp_path: Path) -> None:
    """Kinds, places and numbers of files agree, down to backups and tombstones.

    Small arrays share manifests with us, so of those there are fewer.
    """
    ours, _, theirs, _ = await both(tmp_path, spec, HISTORY, Settings(inline=16))
    mine, others = Counter(map(placed, ours.names())), Counter(map(placed, theirs.names()))
    assert 0 < mine.pop("manifests/<id>") <= others.pop("manifests/<id>")
    assert mine == others


@SPECS
async def test_a_new_repository_holds_the_same_objects(spec: int, tmp_path: Path) -> None:
    """Creation writes the same files, with and without a configuration."""
    for index, settings in enumerate((None, Settings(inline=3))):
        names = []
        for name, engine in ENGINES.items():
            root = tmp_path / f"{name}{index}"
            await engine.create(root, spec, settings)
            names.append(Files(root).names())
        assert names[0] == names[1]
        assert f"snapshots/{INITIAL_SNAPSHOT_ID}" in names[0]
        assert ("config.yaml" in names[0]) == (spec == 1 and settings is not None)


@SPECS
async def test_headers_agree_but_for_the_stamp(spec: int, tmp_path: Path) -> None:
    """Magic, version, file type and compression are equal; one zstd frame declares its size."""
    ours, _, theirs, _ = await both(tmp_path, spec, HISTORY)
    for files in (ours, theirs):
        found = [
            (kind, path)
            for folder, kind in FOLDERS.items()
            for path in (files.root / folder).iterdir()
        ]
        if spec == 2:
            backups = (files.root / "overwritten").iterdir()
            found += [(6, path) for path in (files.root / "repo", *backups)]
        for kind, path in found:
            data = path.read_bytes()
            assert data[:12] == b"ICE\xf0\x9f\xa7\x8aCHUNK"
            stamp = data[12:36].decode("ascii")
            assert re.fullmatch(r"(ic|ica)-[0-9.a-z]+ *", stamp)
            assert data[36:HEADER_BYTES] == bytes([spec, kind, 1])
            frame = zstandard.get_frame_parameters(data[HEADER_BYTES:])
            payload = zstandard.ZstdDecompressor().decompress(data[HEADER_BYTES:])
            assert frame.content_size == len(payload)
            assert not frame.has_checksum
            assert payload[4:8] == b"Ichk"


async def test_ref_files_are_equal_bytes(tmp_path: Path) -> None:
    """A ref file is 35 bytes of compact JSON, a tombstone none, in both engines."""
    ours, our_ids, theirs, their_ids = await both(tmp_path, 1, HISTORY)
    for files, ids in ((ours, our_ids), (theirs, their_ids)):
        refs = files.root / "refs"
        expected = {
            "branch.main/ref.json": ids[-1],
            "branch.b/ref.json": ids[-1],
            "tag.t/ref.json": ids[0],
            "tag.gone/ref.json": ids[0],
        }
        for name, snapshot in expected.items():
            assert (refs / name).read_bytes() == b'{"snapshot":"%s"}' % snapshot.encode()
        assert (refs / "tag.gone/ref.json.deleted").read_bytes() == b""


@SPECS
async def test_metadata_values_are_equal_bytes(spec: int, tmp_path: Path) -> None:
    """Names in order and the encoding of every JSON kind agree in snapshots and repo info."""
    ours, our_ids, theirs, their_ids = await both(tmp_path, spec, HISTORY[:1])
    stored = []
    for files, ids in ((ours, our_ids), (theirs, their_ids)):
        data = (files.root / "snapshots" / ids[0]).read_bytes()[HEADER_BYTES:]
        items = Tables.root(Buffer(zstandard.ZstdDecompressor().decompress(data)))
        tables = items.vector(5, 4, 4).tables()
        names = tables.strings(0, required="name")
        values = tables.vector(1, 1, 1, required="value").bytes()
        stored.append(list(zip(names, values, strict=True)))
        if files.info is not None:
            entry = files.info.snapshots[SnapshotId.parse(ids[0])]
            assert list(entry.raw_metadata) == stored[-1]
    assert [name for name, _ in stored[1]] == sorted(JSON_KINDS)
    assert stored[0] == stored[1]


@SPECS
async def test_ids_are_written_alike(spec: int, tmp_path: Path) -> None:
    """Our text of every id of theirs is the name that they gave its file."""
    _, _, theirs, ids = await both(tmp_path, spec, HISTORY)
    for snapshot_id in ids:
        snapshot = theirs.snapshot(snapshot_id)
        assert str(snapshot.id) == snapshot_id
        assert {str(it) for it in snapshot.manifests} <= theirs.ids("manifests")
        session = open_official(theirs.root).readonly_session(snapshot_id=snapshot_id)
        for path, node in snapshot.nodes.items():
            assert str(node.id) == session.get_node_id(path)
            assert NodeId.parse(str(node.id)) == node.id
    assert theirs.reachable()["chunks"] <= theirs.ids("chunks")


@SPECS
async def test_backups_are_named_and_hold_what_the_log_says(spec: int, tmp_path: Path) -> None:
    """A backup's name tells when it was made; the log names the one after each operation."""
    ours, _, theirs, _ = await both(tmp_path, spec, HISTORY)
    for files in (ours, theirs):
        names = sorted(files.ids("overwritten"))
        if spec == 1:
            assert names == []
            continue
        assert files.info is not None
        logged = [it.backup_path for it in files.info.updates]
        assert logged[0] is None
        assert sorted(str(it) for it in logged[1:]) == names
        for newer, update in zip(files.info.updates, files.info.updates[1:], strict=False):
            assert update.backup_path is not None
            base, remaining, _ = update.backup_path.split(".")
            assert (base, len(remaining)) == ("repo", 14)
            made_ms = YEAR_3000_MS - int(remaining)
            assert abs(made_ms - newer.updated_at // 1000) < 60_000
            backup = files.root / "overwritten" / update.backup_path
            assert _newest(backup) == (update.updated_at, type(update.detail))


def _decode(path: Path) -> RepoInfo:
    return decode_repo_info(unpack(path.read_bytes(), FileType.REPO_INFO))


def _newest(path: Path) -> tuple[int, type]:
    update = _decode(path).updates[0]
    return update.updated_at, type(update.detail)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_the_operations_log_is_cut_alike(size: int, tmp_path: Path) -> None:
    """The same operations leave equally long logs in the repo info and in each backup."""
    chains = []
    for name, engine in ENGINES.items():
        ids = await history(engine, tmp_path / name, 2, HISTORY, Settings(max_updates=size))
        assert len(ids) == len(HISTORY)
        info, lengths = Files(tmp_path / name).info, []
        while info is not None:
            lengths.append(len(info.updates))
            before = info.before_updates
            info = None if before is None else _decode(tmp_path / name / "overwritten" / before)
        chains.append(lengths)
    assert chains[0] == chains[1]
    assert max(chains[0]) <= size
    assert sum(chains[0]) == 1 + len(HISTORY) + 5


async def test_times_in_snapshot_and_repo_info_are_one(tmp_path: Path) -> None:
    """A snapshot's time is the same number in its file, in the repo info and in the answer."""
    ours, ids, _, _ = await both(tmp_path, 2, HISTORY)
    assert ours.info is not None
    official = open_official(ours.root)
    for snapshot_id in ids:
        entry = ours.info.snapshots[SnapshotId.parse(snapshot_id)]
        assert ours.snapshot(snapshot_id).flushed_at == entry.flushed_at
        assert to_us(official.lookup_snapshot(snapshot_id).written_at) == entry.flushed_at
