"""Times that guard virtual chunks: rounded up by us, rounded down by other writers."""

from __future__ import annotations

import pytest

from icechunk_async.format.envelope import FileType, pack, with_cut_seconds
from icechunk_async.format.ids import ManifestId, NodeId
from icechunk_async.format.manifest.chunk import ChunkRef, VirtualChunk
from icechunk_async.format.manifest.held import Undecided
from icechunk_async.format.manifest.packed import open_manifest
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest

NODE = NodeId.random()


def file_of(count: int) -> bytes:
    """Return the file of a manifest of guarded virtual chunks."""
    refs: dict[tuple[int, ...], ChunkRef | None] = {
        (at,): VirtualChunk(f"file:///d/{at:06}", at, 1, None, 1000 + at) for at in range(count)
    }
    columns = ChunkRefs.from_mapping(1, refs)
    return pack(
        encode_manifest(ManifestId.random(), {NODE: columns}), FileType.MANIFEST, 2, level=1
    )


@pytest.mark.parametrize("count", [3, 10_000])  # the larger one is looked at before it is decoded
def test_the_writer_of_a_manifest_says_how_its_times_are_rounded(count: int) -> None:
    """Ours are rounded up, unless the file is marked; those of every other writer are cut."""
    ours = file_of(count)
    theirs = ours[:12] + b"ic-2.3.0".ljust(24) + ours[36:]
    for data, expected in ((ours, False), (theirs, True), (with_cut_seconds(ours), True)):
        held = open_manifest(data)
        found = held.lookup(NODE, (1,))
        assert isinstance(found, VirtualChunk)
        assert found.seconds_cut is expected
        whole = held.expand()
        again = whole.lookup(NODE, (2,))
        assert not isinstance(again, Undecided)
        assert isinstance(again, VirtualChunk)
        assert again.seconds_cut is expected


def test_joined_references_keep_that_some_times_are_cut() -> None:
    """Which the file that they are written to has to say."""
    ref = VirtualChunk("file:///d/1", 0, 1, None, 1000)
    ours = ChunkRefs.from_mapping(1, {(1,): ref})
    theirs = open_manifest(with_cut_seconds(file_of(1))).expand()
    assert isinstance(theirs, Manifest)
    cut = theirs.refs(NODE, 1)
    assert not ours.has_cut_seconds
    assert cut.has_cut_seconds
    assert ChunkRefs.concat([cut, ours]).sort().has_cut_seconds
