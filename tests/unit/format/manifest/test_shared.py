"""Small arrays that share a manifest are decoded together: the same as alone, refusals included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.manifest import reading
from icechunk_async.format.manifest.chunk import InlineChunk
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.samples import (
    NODE_IDS,
    as_dict,
    manifest_id,
    node_id,
    ref_maps,
    refs_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import NodeId
    from icechunk_async.format.manifest.refs import ChunkRefs

ARRAYS = st.dictionaries(
    NODE_IDS,
    st.integers(0, 3).flatmap(lambda rank: ref_maps(rank).map(lambda refs: refs_of(rank, refs))),
    min_size=2,
    max_size=5,
)


@settings(deadline=None)
@given(ARRAYS)
def test_arrays_decoded_together_are_those_decoded_alone(
    arrays: Mapping[NodeId, ChunkRefs],
) -> None:
    """Of any ranks and kinds of references; each has the ids of no other chunk objects."""
    data = encode_manifest(manifest_id(1), arrays)
    together = decode_manifest(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_decode_small_arrays", lambda *_: None)
        alone = decode_manifest(data)
    assert list(together.arrays) == list(alone.arrays)
    for node, refs in alone.arrays.items():
        found = together.arrays[node]
        assert as_dict(found) == as_dict(refs)
        assert found.coords.shape == refs.coords.shape
        assert set(map(bytes, found.chunk_ids)) == set(map(bytes, refs.chunk_ids))
        for coords in as_dict(refs):
            assert together.lookup(node, coords) == alone.lookup(node, coords)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("order", [[0, 2, 1], [0, 0, 1], [2, 1, 0]])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_references_out_of_order_are_refused_in_any_array(
    rank: int, order: list[int], place: int
) -> None:
    """Lookups would miss them, or find either of two."""
    refs = refs_of(rank, {(0,) * (rank - 1) + (it,): InlineChunk(b"x") for it in range(3)})
    arrays = {node_id(it): refs for it in range(1, 4)}
    decode_manifest(encode_manifest(manifest_id(1), arrays))
    arrays[node_id(place)] = refs.take(np.array(order))
    with pytest.raises(FormatError, match="not in ascending order, or repeat"):
        decode_manifest(encode_manifest(manifest_id(1), arrays))


def test_an_array_that_is_listed_twice_is_refused() -> None:
    """Which of both would count is not for a reader to choose."""
    refs = refs_of(1, {(0,): InlineChunk(b"x")})
    data = bytes(encode_manifest(manifest_id(1), {node_id(1): refs, node_id(2): refs}))
    place = data.rindex(node_id(2))
    twice = data[:place] + node_id(1) + data[place + 8 :]
    assert twice != data
    with pytest.raises(FormatError, match="twice"):
        decode_manifest(twice)
