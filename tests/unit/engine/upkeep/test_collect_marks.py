"""The age of objects, marking, and the portions in which manifests are read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from icechunk_async.engine.upkeep.survey import Limits, portions
from icechunk_async.engine.upkeep.sweep import chunk_ids, id_set, is_older
from icechunk_async.format.ids import ChunkId, ManifestId, NodeId
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs

CUTOFF = datetime(2026, 1, 2, 3, 4, 5, 600_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("before_us", "older"),
    [
        (1, True),
        (0, False),
        (-1, False),
        (600_000, False),  # 03:04:05 may be anything up to 03:04:06
        (1_600_000, True),  # 03:04:04 ended before
        (599_999, True),
    ],
)
def test_whole_second_times_count_as_late_as_possible(before_us: int, older: bool) -> None:  # noqa: FBT001
    """A store that lists whole seconds has cut off the rest."""
    assert is_older(CUTOFF - timedelta(microseconds=before_us), CUTOFF) == older


def test_a_second_that_ends_at_the_cutoff_is_older() -> None:
    """Both are whole seconds."""
    cutoff = CUTOFF.replace(microsecond=0)
    assert is_older(cutoff - timedelta(seconds=1), cutoff)
    assert not is_older(cutoff, cutoff)


def test_every_native_reference_marks_its_object() -> None:
    """Of any array, also those of a wrong rank; nothing else does."""
    ids = [ChunkId.random() for _ in range(4)]
    nodes = [NodeId.random() for _ in range(2)]
    manifest = Manifest(
        ManifestId.random(),
        {
            nodes[0]: ChunkRefs.from_mapping(
                1, {(0,): NativeChunk(ids[0], 0, 1), (1,): InlineChunk(b"x"), (2,): None}
            ),
            nodes[1]: ChunkRefs.from_mapping(
                1, {(0,): NativeChunk(ids[1], 5, 1), (1,): VirtualChunk("s3://b/k", 0, 1)}
            ),
        },
        {(nodes[1], 2): ChunkRefs.from_mapping(2, {(0, 0): NativeChunk(ids[2], 0, 1)})},
    )
    marked = id_set(())
    marked.add(chunk_ids(manifest))
    raw = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 12)
    assert marked.contains(raw).tolist() == [True, True, True, False]
    assert len(chunk_ids(Manifest(ManifestId.random(), {}))) == 0


def test_portions_fit_the_limits() -> None:
    """In number and in size, unless a single one is larger."""
    sizes = [30, 30, 30, 30, 500, 10, 0, 10]
    manifests = [(ManifestId.random(), size) for size in sizes]
    found = list(portions(manifests, Limits(manifests=3, manifest_bytes=100)))
    assert [[size for _, size in it] for it in found] == [
        [30, 30, 30],
        [30],
        [500],
        [10],
        [0],
        [10],
    ]
    assert [it for portion in found for it in portion] == manifests
    assert list(portions([], Limits())) == []
