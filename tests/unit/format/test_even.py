"""Records at equal distances: read without an index for each, to the same effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.flatbuffers.buffer import FEWEST, Buffer, Even, as_array, evenly
from icechunk_async.format.flatbuffers.reading import Tables, Vectors
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.reading import decode_manifest
from icechunk_async.format.manifest.writing import encode_manifest
from tests.unit.format.samples import manifest_id, node_id
from tests.unit.format.seekable import natives, virtuals

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async.format.manifest.refs import ChunkRefs

DATA = np.random.default_rng(1).integers(0, 256, 8000, np.uint8).tobytes()
MANY = st.integers(FEWEST, 3 * FEWEST)


@given(st.integers(0, 999), st.integers(-99, 99), MANY, st.integers(0, 3 * FEWEST))
def test_only_evenly_spaced_positions_become_even(
    start: int, step: int, count: int, other: int
) -> None:
    """A single position elsewhere shows, wherever it is, and so does one that is repeated."""
    positions = start + step * np.arange(count, dtype=np.int64)
    found = evenly(positions)
    assert isinstance(found, Even) == (step != 0)
    assert as_array(found).tolist() == positions.tolist()
    if isinstance(found, Even):
        assert found.bounds() == (int(positions.min()), int(positions.max()))
        assert found.plus(7).array().tolist() == (positions + 7).tolist()
        assert len(found) == count
    assert not isinstance(evenly(positions[: FEWEST - 1]), Even)
    positions[other % count] += 1
    assert evenly(positions) is positions


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [-40, -8, 8, 16, 24])
def test_words_and_rows_are_the_same_either_way(width: int, step: int) -> None:
    """In both directions, up to the ends of the buffer."""
    buffer = Buffer(DATA)
    for start in (0 if step > 0 else 80 * -step, len(DATA) - 8 if step < 0 else 4000):
        even = Even(start, step, 81 if start + 80 * step <= len(DATA) - 8 else 100)
        one_by_one = even.array()
        for words in (buffer.words, buffer.aligned_words):
            assert words(even, width).tolist() == words(one_by_one, width).tolist()
        assert buffer.rows(even, width).tolist() == buffer.rows(one_by_one, width).tolist()


@pytest.mark.parametrize(
    "even",
    [
        Even(-8, 8, 40),
        Even(7960, 8, 40),
        Even(7992, 8, 2),
        Even(8 * 38, -8, 40),
        Even(8000, -8, 40),
        Even(1 << 62, 1 << 55, 100),
    ],
)
def test_out_of_range_positions_are_refused(even: Even) -> None:
    """At both ends, in both directions."""
    buffer = Buffer(DATA)
    for read in (
        buffer.words,
        buffer.aligned_words,
        buffer.rows,
        lambda it, n: buffer.check(it, n, 1),
    ):
        with pytest.raises(FormatError, match="outside"):
            read(even, 8)


@pytest.mark.parametrize("even", [Even(4, 8, 40), Even(8, 12, 40), Even(8, -4, 2)])
def test_misaligned_words_are_refused(even: Even) -> None:
    """Whether it is where they begin or how far they are apart."""
    buffer = Buffer(DATA)
    for read in (buffer.words, buffer.aligned_words):
        with pytest.raises(FormatError, match="misaligned"):
            read(even, 8)
    assert len(buffer.rows(even, 8)) == len(even)


def test_offsets_that_are_all_the_same_stay_even() -> None:
    """Others are followed one by one, and one of 0 is refused."""
    words = np.full(100, 40, np.uint32)
    even = Even(0, 4, 100)
    assert Buffer(words.tobytes()).targets(even) == Even(40, 4, 100)
    words[50] = 44
    found = Buffer(words.tobytes()).targets(even)
    assert as_array(found).tolist() == [4 * at + int(word) for at, word in enumerate(words)]
    for wrong in ([50], range(100)):
        words[wrong] = 0
        with pytest.raises(FormatError, match="points at itself"):
            Buffer(words.tobytes()).targets(even)


@pytest.mark.parametrize("refs", [natives(5000, 2), virtuals(5000, 7), virtuals(5000, 5000)])
def test_our_own_references_are_read_without_an_index(
    refs: ChunkRefs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only locations that differ from the previous one are gathered."""
    payload = encode_manifest(manifest_id(1), {node_id(1): refs})
    gathered: list[int] = []
    read = Buffer._read

    def note(self: Buffer, positions: npt.NDArray[np.int64] | Even, width: int) -> object:
        if not isinstance(positions, Even):
            gathered.append(len(positions))
        return read(self, positions, width)

    monkeypatch.setattr(Buffer, "_read", note)
    found = decode_manifest(payload).refs(node_id(1), refs.rank)
    assert sum(gathered) <= 100 + len(found.locations)
    assert all(found.ref(row) == refs.ref(row) for row in range(0, 5000, 37))


def test_columns_of_a_manifest_are_its_own() -> None:
    """They are no views of the file, which would stay in memory for them."""
    payload = bytes(encode_manifest(manifest_id(1), {node_id(1): natives(5000)}))
    columns = decode_manifest(payload).refs(node_id(1), 1)
    raw = np.frombuffer(payload, np.uint8)
    for column in (columns.coords, columns.offsets, columns.lengths, columns.chunk_ids):
        assert not np.shares_memory(column, raw)
        assert column.flags.c_contiguous or column.strides == (0,)
    assert columns.kinds.tolist() == [Kind.NATIVE] * 5000


def test_one_row_of_many_is_found_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over rows would else take time in proportion to their square."""
    payload = bytes(encode_manifest(manifest_id(1), {node_id(1): natives(5000)}))
    tables = Tables.root(Buffer(payload)).vector(1, 4, 4).tables().vector(1, 4, 4).tables()
    index = tables.vector(0, 4, 4)
    lengths, coords = tables.scalar(3, 8).tolist(), index.words().tolist()

    array = Even.array

    def refuse(self: Even) -> npt.NDArray[np.int64]:
        assert len(self) == 1, "all positions were asked for"
        return array(self)

    monkeypatch.setattr(Even, "array", refuse)
    for row in (0, 77, 4999):
        assert tables.row(row).scalar(3, 8).tolist() == [lengths[row]]
        assert index.row(row).words().tolist() == [coords[row]]
        assert bytes(index.raw(row)) == coords[row].to_bytes(4, "little")


@pytest.mark.parametrize("item_size", [1, 4])
def test_vectors_of_one_size_are_refused_behind_the_end(item_size: int) -> None:
    """The last one may reach it, and no further; the same where one has another size."""
    places, end = Even(0, 16, 40), 16 * 39 + 4
    for size, fits in ((8, True), (9, False), (1 << 31, False)):
        for other in (size, 0):
            words = np.full(4 * 50, size, np.uint32)
            words[0] = other
            buffer = Buffer(words.tobytes()[: end + 8 * item_size])
            if fits:
                found = Vectors.at(buffer, places, item_size, 1)
                assert found.counts.tolist() == [other, *[size] * 39]
                assert isinstance(found.places, Even) == (other == size)
                assert found.starts.tolist() == [*range(4, end + 1, 16)]
            else:
                with pytest.raises(FormatError, match="outside"):
                    Vectors.at(buffer, places, item_size, 1)


def test_a_damaged_vtable_of_even_tables_is_refused() -> None:
    """One distance to the vtable is changed, of many that follow from each other."""
    payload = bytearray(encode_manifest(manifest_id(1), {node_id(1): natives(5000)}))
    tables = Tables.root(Buffer(bytes(payload))).vector(1, 4, 4).tables().vector(1, 4, 4).tables()
    for row in (0, 1, 2500, 4999):
        place = int(tables.positions[row])
        damaged = bytearray(payload)
        damaged[place : place + 4] = (-1_000_000).to_bytes(4, "little", signed=True)
        with pytest.raises(FormatError):
            decode_manifest(bytes(damaged))
