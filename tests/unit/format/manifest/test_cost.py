"""A reference costs bytes in columns: no Python object, no call, no entry of a dictionary."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.row_index import RowIndex, rows_in
from icechunk_async.format.manifest.writing import encode_manifest
from icechunk_async.format.transaction_log import (
    TransactionLog,
    decode_transaction_log,
    encode_transaction_log,
)
from tests.unit.format.samples import manifest_id, node_id, snapshot_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

COUNT = 50_000
NODE = node_id(1)
FEW = 2000
"""Objects and calls that do not depend on the number of references."""
FEW_PER_BLOCK = 10_000
"""Calls for references that are read in blocks of thousands."""


@dataclass
class Cost:
    """Objects and memory that a piece of work took."""

    calls: int = 0
    """Calls of Python functions and of C functions, as the profiler sees them."""
    objects: int = 0
    """The most small blocks of memory that were in use at once, beyond those before."""
    peak_bytes: int = 0
    """The most memory that was in use at once, beyond that before."""


def cost_of(work: Callable[[], Any]) -> Cost:
    """Run a piece of work twice: once to count, once to weigh."""
    work()  # what is made once, such as caches of NumPy, is not counted
    cost = Cost()
    gc.collect()
    before = sys.getallocatedblocks()

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        cost.calls += event in {"call", "c_call"}
        # Not when calls of C return: counting takes long in a process that has many blocks.
        if event != "c_return":
            cost.objects = max(cost.objects, sys.getallocatedblocks() - before)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        work()
        cost.peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return cost


def columns(**more: Any) -> dict[str, Any]:
    """Return columns that every kind has."""
    rows = np.arange(COUNT, dtype=np.uint32)
    return {"lengths": np.full(COUNT, 20, np.uint64), "objects": rows} | more


def samples() -> dict[str, ChunkRefs]:
    """Return many references of each kind, in a grid of three axes."""
    rows = np.arange(COUNT, dtype=np.uint32)
    coords = np.stack([rows // 10_000, rows // 100 % 100, rows % 100], axis=1)
    ids = np.zeros((COUNT, 12), np.uint8)
    ids[:, :4] = rows[:, None].view(np.uint8)
    far = coords * np.array([1 << 28, 1 << 25, 1 << 25], np.uint32)
    starts = rows.astype(np.uint64) * np.uint64(20)
    virtual = columns(objects=rows % 5, offsets=starts, locations=Strings(tuple("abcde")))
    return {
        "native": ChunkRefs.build(coords, Kind.NATIVE, **columns(chunk_ids=ids)),
        "sparse": ChunkRefs.build(coords * 3, Kind.NATIVE, **columns(chunk_ids=ids)),
        "far": ChunkRefs.build(far, Kind.NATIVE, **columns(chunk_ids=ids)),
        "virtual": ChunkRefs.build(coords, Kind.VIRTUAL, **virtual),
        "inline": ChunkRefs.build(
            coords,
            Kind.INLINE,
            **columns(offsets=starts, inline=memoryview(bytes(20 * COUNT))),
        ),
    }


REFS = samples()
KINDS = pytest.mark.parametrize("name", list(REFS))


@KINDS
def test_decoding_makes_no_object_per_reference(name: str) -> None:
    """Decoding needs few calls of NumPy and little memory."""
    payload = bytes(encode_manifest(manifest_id(1), {NODE: REFS[name]}))
    cost = cost_of(lambda: decode_manifest(payload))
    assert cost.calls < FEW_PER_BLOCK
    assert cost.objects < FEW
    assert cost.peak_bytes < 150 * COUNT


@KINDS
def test_encoding_makes_no_object_per_reference(name: str) -> None:
    """From fresh columns, and from those of another manifest."""
    first = bytes(encode_manifest(manifest_id(1), {NODE: REFS[name]}))
    for arrays in ({NODE: REFS[name]}, decode_manifest(first).arrays):
        cost = cost_of(partial(encode_manifest, manifest_id(1), arrays))
        assert cost.calls < FEW
        assert cost.objects < FEW
        assert cost.peak_bytes < 300 * COUNT


@pytest.mark.parametrize("name", sorted(REFS.keys() - {"inline"}))
def test_writing_takes_little_more_memory_than_what_is_written(name: str) -> None:
    """New memory is what a large commit waits for: a machine finds a megabyte in a millisecond."""
    refs = REFS[name]
    parts = [refs.take(slice(0, COUNT // 3)), refs.take(slice(COUNT // 3, None))]
    columns_bytes = sum(getattr(refs, it.name).nbytes for it in fields(refs)[:8])
    assert cost_of(lambda: ChunkRefs.concat(parts)).peak_bytes < 1.4 * columns_bytes

    encode = partial(encode_manifest, manifest_id(1), {NODE: refs})
    assert cost_of(encode).peak_bytes < 1.15 * len(encode())

    log = TransactionLog(snapshot_id(1), updated_chunks={NODE: refs.coords})
    encode_log = partial(encode_transaction_log, log, 2)
    assert cost_of(encode_log).peak_bytes < 1.3 * len(encode_log())


@KINDS
def test_changing_makes_no_object_per_reference(name: str) -> None:
    """Cutting out, joining and sorting."""
    refs = REFS[name]
    even = refs.take(np.arange(COUNT) % 2 == 0)

    def change() -> None:
        ChunkRefs.concat([refs, even]).sort().compact()

    cost = cost_of(change)
    assert cost.calls < FEW
    assert cost.objects < FEW
    assert cost.peak_bytes < 800 * COUNT


@KINDS
def test_lookups_build_no_dictionary(name: str) -> None:
    """The first makes a number per reference at most, the next ones nothing."""
    payload = bytes(encode_manifest(manifest_id(1), {NODE: REFS[name]}))
    coords = tuple(REFS[name].coords[777].tolist())
    found: list[int | None] = []

    def look_up() -> None:
        found.append(decode_manifest(payload).arrays[NODE].find(coords))

    cost = cost_of(look_up)
    assert set(found) == {777}
    assert cost.objects < FEW
    refs = decode_manifest(payload).arrays[NODE]
    again = cost_of(lambda: refs.find(coords))
    assert again.calls < 200
    assert again.objects < 50
    assert again.peak_bytes < 4096


def test_a_full_grid_needs_no_index() -> None:
    """If the references fill their box, no lookup table is kept."""
    coords = REFS["native"].coords
    index = RowIndex.of(coords)
    assert index.full
    assert index.keys is None
    assert index.coords is coords


def test_sets_of_coordinates_are_compared_without_objects() -> None:
    """In a small grid and in one beyond 63 bits."""
    for name in ("native", "far"):
        coords = REFS[name].coords
        cost = cost_of(partial(rows_in, coords, coords[::2]))
        assert cost.calls < FEW
        assert cost.objects < FEW


def test_transaction_logs_make_no_object_per_chunk() -> None:
    """This holds for writing and for reading."""
    log = TransactionLog(snapshot_id(1), updated_chunks={NODE: REFS["native"].coords})
    payload = bytes(encode_transaction_log(log, 2))
    for work in (lambda: encode_transaction_log(log, 2), lambda: decode_transaction_log(payload)):
        cost = cost_of(work)
        assert cost.calls < FEW
        assert cost.objects < FEW
        assert cost.peak_bytes < 300 * COUNT


def test_one_reference_is_made_on_demand() -> None:
    """No other reference is made."""
    refs = REFS["native"]
    cost = cost_of(lambda: refs.ref(500))
    assert cost.calls < 100
    assert cost.objects < 50
