"""The same edits make the same manifests, logs and fields in both engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from icechunk_async import Repository
from icechunk_async.format.envelope import HEADER_BYTES
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, NodeId
from tests.interop.answers import CONFIGS, Settings
from tests.interop.comparing import ENGINES
from tests.interop.edits import apply, array, write
from tests.interop.files import Files
from tests.interop.hierarchies import Hierarchy, seeded
from tests.interop.ours import our_config
from tests.interop.steps import HISTORY, both
from tests.interop.theirs import icechunk, their_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.interop.answers import Engine
    from tests.interop.edits import Edit


SPECS = pytest.mark.parametrize("spec", [1, 2])


def manifests(files: Files, snapshot_id: str) -> dict[str, list[Any]]:
    """Return for each array the boxes of its manifests and the kinds of chunks in them."""
    snapshot = files.snapshot(snapshot_id)
    found: dict[str, list[Any]] = {}
    used = set()
    for path, node in snapshot.nodes.items():
        if node.array is None:
            continue
        rows = []
        for ref in node.array.manifests:
            used.add(ref.manifest_id)
            manifest, info = files.manifest(ref.manifest_id), snapshot.manifests[ref.manifest_id]
            refs = manifest.arrays[node.id]  # small arrays share manifests with us
            size = (files.root / "manifests" / str(ref.manifest_id)).stat().st_size
            assert info.size_bytes == size
            assert info.num_chunk_refs == len(manifest)
            assert ref.extents == refs.extents()
            chunks = zip(
                refs.coords.tolist(), refs.kinds.tolist(), refs.lengths.tolist(), strict=True
            )
            rows.append((ref.extents, list(chunks)))
        found[path] = sorted(rows)
    assert used == set(snapshot.manifests)
    return found


@pytest.mark.sampled
@SPECS
@pytest.mark.parametrize("config", range(len(CONFIGS)))
async def test_manifests_cover_the_same_cells(spec: int, config: int, tmp_path: Path) -> None:
    """Each array's manifests have the same boxes and chunks after every commit."""
    model = Hierarchy(seeded(config))
    steps = [*HISTORY, model.edits(40), model.edits(40)]
    ours, our_ids, theirs, their_ids = await both(tmp_path, spec, steps, CONFIGS[config])
    for our_id, their_id in zip(our_ids, their_ids, strict=True):
        assert manifests(ours, our_id) == manifests(theirs, their_id)


@SPECS
async def test_both_engines_split_the_published_examples_alike(spec: int, tmp_path: Path) -> None:
    """Chunks 0, 1, 5, 9 of 10: tight boxes, and a changed rule cuts only what is touched."""
    steps = [
        [
            array("a", [10], [1], "u1", plain=True),
            *(write("a", [at], [at + 1], 1, "u1") for at in (0, 1, 5, 9)),
        ],
        [write("a", [5], [6], 2, "u1")],
        [write("a", [0], [1], 3, "u1")],
    ]
    for engine in ENGINES.values():
        root, kept = tmp_path / engine.name, []
        for number, (size, edits) in enumerate(zip((4, 3, 100), steps, strict=True)):
            settings = Settings(splits=((("AnyArray", ""), ((None, size),)),))
            if number == 0:
                await engine.create(root, spec, settings)
            snapshot = await _commit_with(engine, root, settings, edits)
            node = Files(root).snapshot(snapshot).nodes["/a"].array
            assert node is not None
            kept.append({ref.extents: ref.manifest_id for ref in node.manifests})
        assert [sorted(it) for it in kept] == [
            [((0, 2),), ((5, 6),), ((9, 10),)],
            [((0, 2),), ((5, 6),), ((9, 10),)],
            [((0, 10),)],
        ]
        same = [box for box in kept[0] if kept[0][box] == kept[1].get(box)]
        assert same == [((0, 2),), ((9, 10),)]


async def _commit_with(
    engine: Engine, root: Path, settings: Settings, edits: Sequence[Edit]
) -> str:
    """Commit under a configuration that is not stored."""
    if engine.name == "ours":
        async with Repository.open(root, config=our_config(settings)) as repository:
            session = await repository.writable_session("main")
            await apply(session.store, edits)
            return str(await session.commit("split"))
    storage = icechunk.local_filesystem_storage(str(root))
    official = icechunk.Repository.open(storage, config=their_config(settings))
    work = official.writable_session("main")
    await apply(work.store, edits)
    return str(work.commit("split"))


def log_by_path(files: Files, snapshot_id: str, parent_id: str) -> dict[str, Any]:
    """Return a transaction log with paths in place of ids."""
    log = files.log(snapshot_id)
    nodes, old = files.snapshot(snapshot_id).nodes, files.snapshot(parent_id).nodes

    def path(node_id: NodeId) -> str:
        now = nodes.path_of(node_id)
        return now if now is not None else f"was {old.path_of(node_id)}"

    lists = {
        f"{what}_{kind}": sorted(path(it) for it in getattr(log, f"{what}_{kind}"))
        for what in ("new", "deleted", "updated")
        for kind in ("groups", "arrays")
    }
    chunks = {path(it): coords.tolist() for it, coords in log.updated_chunks.items()}
    return {**lists, "chunks": chunks, "moves": log.moves}


@SPECS
async def test_transaction_logs_say_the_same(spec: int, tmp_path: Path) -> None:
    """The same edits make logs that list the same nodes and chunks, deletions included."""
    model = Hierarchy(seeded(99))
    steps = [*HISTORY, *(model.edits(25) for _ in range(4))]
    ours, our_ids, theirs, their_ids = await both(tmp_path, spec, steps)
    first = str(INITIAL_SNAPSHOT_ID)
    for index in range(len(steps)):
        logs = [
            log_by_path(files, ids[index], ids[index - 1] if index else first)
            for files, ids in ((ours, our_ids), (theirs, their_ids))
        ]
        assert logs[0] == logs[1], index


ROOT_SLOTS = {"snapshots": 9, "manifests": 5, "transactions": 10, "repo": 13}
VECTORS = {
    # Slot of the vector in the root, slots of its tables, and which of these is an index.
    "snapshots": ((2, 6, None), (7, 4, None)),
    "repo": ((1, 2, 1), (2, 2, 1), (4, 6, 1), (7, 4, None)),
}


def census(files: Files) -> dict[str, set[tuple[bool, ...]]]:
    """Return which fields are present in the root tables and in nodes, by kind of file."""
    found: dict[str, set[tuple[bool, ...]]] = {}
    for kind, slots in ROOT_SLOTS.items():
        place = files.root / kind
        paths = list(place.iterdir()) if place.is_dir() else [place] if place.exists() else []
        for path in paths:
            data = zstandard.ZstdDecompressor().decompress(path.read_bytes()[HEADER_BYTES:])
            root = Tables.root(Buffer(data))
            found.setdefault(kind, set()).add(_present(root, slots))
            for vector, fields, index in VECTORS.get(kind, ()):
                tables = root.vector(vector, 4, 4).tables()
                rows = {_present(tables.row(row), fields, index) for row in range(len(tables))}
                found.setdefault(f"{kind} {vector}", set()).update(rows)
            if kind == "manifests":
                refs = root.vector(1, 4, 4).tables().vector(1, 4, 4).tables()
                rows = {_present(refs.row(row), 10) for row in range(len(refs))}
                found.setdefault("references", set()).update(rows)
    return found


def _present(table: Any, slots: int, index: int | None = None) -> tuple[bool, ...]:
    """Return which slots are filled; an index, which random ids decide, must be so unless 0."""
    present = [bool(table.has(slot)[0]) for slot in range(slots)]
    if index is not None:
        assert present[index] == (int(table.scalar(index, 4)[0]) != 0)
        present[index] = True
    return tuple(present)


@SPECS
async def test_the_same_fields_are_left_out(spec: int, tmp_path: Path) -> None:
    """Defaults, empty optional lists and fields of the other version are absent alike."""
    ours, _, theirs, _ = await both(tmp_path, spec, HISTORY)
    assert census(ours) == census(theirs)
