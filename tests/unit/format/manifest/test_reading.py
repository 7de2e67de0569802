"""Manifests of more references than are decoded at a time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers import reading as repeats
from icechunk_async.format.flatbuffers.buffer import Buffer
from icechunk_async.format.flatbuffers.reading import Tables, differ
from icechunk_async.format.manifest import reading as manifest
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.manifest.reading import Room, decode_manifest
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.forge import Forge
from tests.unit.format.other_writer import OtherManifest
from tests.unit.format.samples import manifest_id, node_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    import numpy.typing as npt

BLOCK = 1 << 12
COUNT = 10_000
"""Three blocks."""
NODE = node_id(1)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    """Decode in blocks small enough that a test has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "_BLOCK", BLOCK)
        yield


def mixed() -> ChunkRefs:
    """Return references of every kind in every block; ETags and times only in the last two."""
    rows = np.arange(COUNT)
    kinds = (rows % 3).astype(np.uint8)
    late = (rows > COUNT - 3001) & (kinds == Kind.VIRTUAL)
    ids = np.zeros((COUNT, 12), np.uint8)
    ids[:, :4] = rows.astype(np.uint32)[:, None].view(np.uint8)
    return ChunkRefs.build(
        np.stack([rows // 200, rows % 200], axis=1).astype(np.uint32),
        kinds,
        objects=np.where(kinds == Kind.VIRTUAL, rows // 10 % 700, rows).astype(np.uint32),
        offsets=np.where(kinds == Kind.INLINE, rows, rows * 7).astype(np.uint64),
        lengths=np.where(kinds == Kind.INLINE, 1, rows + 1).astype(np.uint64),
        etags=np.where(late, rows % 5, -1).astype(np.int32),
        modified=np.where(late, rows, 0).astype(np.uint32),
        chunk_ids=ids,
        locations=Strings(tuple(f"s3://bucket/{number}" for number in range(700))),
        etag_pool=Strings(tuple("abcde")),
        inline=memoryview(rows.astype(np.uint8).tobytes()),
    )


def test_all_blocks_are_joined() -> None:
    """Each reference is what it was, wherever a block ends."""
    refs = mixed()
    payload = encode_manifest(manifest_id(1), {NODE: refs})
    found = decode_manifest(payload).refs(NODE, 2)
    assert found.coords.tolist() == refs.coords.tolist()
    for row in [*range(0, COUNT, 211), *range(BLOCK - 4, BLOCK + 6), *range(COUNT - 1100, COUNT)]:
        assert found.ref(row) == refs.ref(row), row
    again = encode_manifest(manifest_id(1), {NODE: found})
    assert len(again) == len(payload)


@pytest.mark.parametrize("damaged", [100, COUNT - 100])
def test_damage_in_any_block_is_refused(damaged: int) -> None:
    """The first block and the last one."""
    refs = mixed()
    payload = bytearray(encode_manifest(manifest_id(1), {NODE: refs}))
    tables = Tables.root(Buffer(bytes(payload))).vector(1, 4, 4).tables().vector(1, 4, 4).tables()
    place = int(tables.positions[damaged])
    payload[place : place + 4] = b"\xff\xff\xff\x7f"
    with pytest.raises(FormatError):
        decode_manifest(bytes(payload))


def test_order_is_checked_from_one_block_to_the_next() -> None:
    """Each block by itself is in order."""
    refs = mixed()
    swapped = np.arange(COUNT)
    swapped[[BLOCK - 1, BLOCK]] = BLOCK, BLOCK - 1
    payload = encode_manifest(manifest_id(1), {NODE: refs.take(swapped)})
    with pytest.raises(FormatError, match="not in ascending order"):
        decode_manifest(payload)


def test_locations_in_runs_are_kept_once() -> None:
    """Also where a writer stores them anew for each chunk; but not where only the size agrees."""
    other = OtherManifest()
    names = [f"s3://bucket/{row // 100}" for row in range(1000)]
    refs = [other.ref((row,), {5: other.out.string(name)}) for row, name in enumerate(names)]
    other.array(NODE, refs)
    found = decode_manifest(other.finish(manifest_id(1))).refs(NODE, 1)
    assert len(found.locations) == 10
    assert [found.locations.get(at) for at in found.objects.tolist()] == names


def test_blocks_of_too_many_axes_are_passed_over() -> None:
    """They are nobody's, also where a whole block has no others."""
    other = OtherManifest()
    far = [other.native((1,) * 65) for _ in range(BLOCK)]
    other.array(NODE, [*far, other.native((3,))])
    found = decode_manifest(other.finish(manifest_id(1)))
    assert found.refs(NODE, 1).coords.tolist() == [[3]]


@cache
def with_strays(stray: int) -> bytes:
    """Return a manifest of references of two axes, and two of one axis among them."""
    other = OtherManifest()
    refs = [
        other.native(
            (row,) if row in {stray, COUNT - 100} else (row // 100, row % 100),
            row.to_bytes(12),
            length=row + 1,
        )
        for row in range(COUNT)
    ]
    other.array(NODE, refs)
    return other.finish(manifest_id(1))


@cache
def of_two_ranks() -> tuple[dict[int, tuple[int, ...]], bytes]:
    """Return a manifest in which one rank is as common as the other; and the coordinates."""
    other = OtherManifest()
    places = dict[int, tuple[int, ...]]()
    for row in range(COUNT):
        places[row] = (row,) if row % 3 else (0, row)
    refs = [
        other.ref(place, {5: other.out.string(f"file {row}"), 6: other.out.string(f"etag {row}")})
        for row, place in places.items()
    ]
    other.array(NODE, refs)
    return places, other.finish(manifest_id(1))


@pytest.mark.parametrize("stray", [0, BLOCK - 1, BLOCK, COUNT - 1])
def test_a_stray_in_any_block_leaves_no_gap(stray: int) -> None:
    """Coordinates of another rank come to others of theirs, and all the rest stay together."""
    strays = {stray: (stray,), COUNT - 100: (COUNT - 100,)}
    found = decode_manifest(with_strays(stray))
    rows = [row for row in range(COUNT) if row not in strays]
    usual = found.refs(NODE, 2)
    assert usual.coords.tolist() == [[row // 100, row % 100] for row in rows]
    assert usual.lengths.tolist() == [row + 1 for row in rows]
    assert usual.chunk_ids[usual.objects].tolist() == [list(row.to_bytes(12)) for row in rows]
    assert (found.refs(NODE, 1).lengths - 1).tolist() == sorted(strays)


def test_no_room_is_made_that_the_file_cannot_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reference is a stray with many axes."""
    other = OtherManifest()
    far = {0: (1,) * 64}
    refs = [other.native(far.get(row, (row,)), length=row + 1) for row in range(5000)]
    other.array(NODE, refs)
    payload = other.finish(manifest_id(1))
    made: list[int] = []

    class Watched(Room):
        def __init__(self, rank: int, count: int) -> None:
            made.append(count * (25 + 4 * rank))
            super().__init__(rank, count)

    monkeypatch.setattr(manifest, "Room", Watched)
    monkeypatch.setattr(manifest, "_BLOCK", 1 << 10)
    found = decode_manifest(payload)
    assert (found.refs(NODE, 1).lengths == np.arange(2, 5001)).all()
    assert found.refs(NODE, 64).lengths.tolist() == [1]
    assert 0 < max(made) < 2 * len(payload)


def test_a_stray_in_front_leaves_no_room_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns for all references are not kept alive by a single one."""
    monkeypatch.setattr(manifest, "_BLOCK", 1 << 10)
    other = OtherManifest()
    refs = [other.native((row,) if row else (0, 0), length=row + 1) for row in range(5000)]
    other.array(NODE, refs)
    found = decode_manifest(other.finish(manifest_id(1)))
    assert len(found.refs(NODE, 1)) == 4999
    for column in (found.refs(NODE, 2).coords, found.refs(NODE, 2).lengths):
        assert column.base is None or column.base.size < 10


def test_of_ranks_that_are_as_common_the_lower_one_counts() -> None:
    """However many blocks there are."""
    for count in (100, COUNT):
        other = OtherManifest()
        refs = [other.native((row // 2, 0) if row % 2 else (row // 2,)) for row in range(count)]
        other.array(NODE, refs)
        assert decode_manifest(other.finish(manifest_id(1))).arrays[NODE].rank == 1


def test_strays_may_have_strings_of_their_own() -> None:
    """Locations and ETags are numbered for each rank, over all blocks."""
    places, payload = of_two_ranks()
    found = decode_manifest(payload)
    for rank in (1, 2):
        some = found.refs(NODE, rank)
        rows = [row for row, place in places.items() if len(place) == rank]
        assert [some.locations.get(at) for at in some.objects.tolist()] == [
            f"file {row}" for row in rows
        ]
        assert [some.etag_pool.get(at) for at in some.etags.tolist()] == [
            f"etag {row}" for row in rows
        ]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 31])
@pytest.mark.parametrize("beyond", [0, 40])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_pieces_that_differ_in_any_byte_are_told(size: int, every: int, beyond: int) -> None:
    """Whether most are asked about or few, up to the last byte of the data, and not beyond."""
    data = np.full(1 + size * 50 + beyond, 7, np.uint8)
    starts: npt.NDArray[Any] = 1 + size * np.random.default_rng(1).permutation(50)
    rows = np.arange(every, 50, every)
    sizes = np.full(len(rows), size)
    assert not differ(data, starts, rows, sizes).any()
    for place in range(size):
        for row in (0, 1, 25, 49):
            data[starts[row] + place] ^= 1
            expected = [at for at in rows.tolist() if row in {at, at - 1}]
            assert rows[differ(data, starts, rows, sizes)].tolist() == expected
            data[starts[row] + place] ^= 1


@pytest.mark.parametrize("small_bytes", [2, 4])
def test_pieces_of_different_sizes_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    """Each by its own size, whether sizes are counted or sorted."""
    monkeypatch.setattr(repeats, "_SMALL_BYTES", small_bytes)
    data = np.frombuffer(b"abcdabcx", np.uint8)
    starts, rows = np.array([0, 4] * 4), np.array([1, 3, 5, 7])
    sizes = np.array([3, 4, 0, 1])
    assert differ(data, starts, rows, sizes).tolist() == [False, True, False, False]


def test_many_pieces_are_compared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left out where one lot ends and the next begins."""
    monkeypatch.setattr(repeats, "_COMPARED_BYTES", 100)
    data = np.zeros(1000, np.uint8)
    starts = np.arange(0, 960, 10)
    data[starts[::3]] = 1
    found = differ(data, starts, np.arange(1, 96), np.full(95, 10))
    assert found.tolist() == [row % 3 != 2 for row in range(1, 96)]


@pytest.mark.parametrize("shapes", [1, 2, 7, 8, 9, 20])
def test_tables_of_several_shapes_keep_their_fields(shapes: int) -> None:
    """Few shapes are looked at once each, many by table; with the same result."""
    forge = Forge()
    fill = range(shapes)
    vtables = [forge.vtable({1: 4 + 4 * it} if it % 3 else {}, 8 + 4 * shapes) for it in fill]
    tables = [
        forge.table(
            vtables[row % shapes], b"".join(bytes([row, 0, 0, it]) for it in range(shapes + 1))
        )
        for row in range(40)
    ]
    rows = Tables(Buffer(forge.finish(tables[0])), np.array(tables, np.int64))
    wanted = [(row % shapes) % 3 > 0 for row in range(40)]
    assert rows.has(1).tolist() == wanted
    values = [row | (row % shapes) << 24 if there else 5 for row, there in enumerate(wanted)]
    assert rows.scalar(1, 4, 5).tolist() == values


def test_coordinates_of_all_blocks_count_towards_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot unfold without bound by spreading its references over blocks."""
    refs = mixed()
    payload = encode_manifest(manifest_id(1), {NODE: refs})
    check, sizes = Buffer.check_unfolded, list[int]()

    def note(self: Buffer, size_bytes: int, *sharing: int) -> None:
        sizes.append(size_bytes)
        check(self, size_bytes, *sharing)

    monkeypatch.setattr(Buffer, "check_unfolded", note)
    decode_manifest(payload)
    assert max(sizes) == refs.coords.nbytes
