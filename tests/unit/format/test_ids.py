"""Identifiers: text form, order, strict lengths, lenient letters."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async._runtime import clock
from icechunk_async.errors import InvalidInputError
from icechunk_async.format.ids import (
    INITIAL_SNAPSHOT_ID,
    BackupId,
    ChunkId,
    ManifestId,
    NodeId,
    SnapshotId,
)

COUNTING = SnapshotId(bytes(range(12)))
WIDE = [SnapshotId, ManifestId, ChunkId, BackupId]


@pytest.mark.parametrize(
    ("identifier", "text"),
    [
        (COUNTING, "000G40R40M30E209185G"),
        (INITIAL_SNAPSHOT_ID, "1CECHNKREP0F1RSTCMT0"),
        (SnapshotId(bytes(12)), "0" * 20),
        (SnapshotId(b"\xff" * 12), "Z" * 19 + "G"),
        (NodeId(bytes(range(8))), "000G40R40M30E"),
        (NodeId(b"\xff" * 8), "Z" * 12 + "Y"),
    ],
)
def test_text_is_crockford_base32(identifier: SnapshotId | NodeId, text: str) -> None:
    """Most significant bit first, zero bits to the right, upper case, no padding."""
    assert str(identifier) == text
    assert type(identifier).parse(text) == identifier


@given(st.binary(min_size=12, max_size=12))
def test_text_reads_back(raw: bytes) -> None:
    """Every id is its text and the other way round."""
    assert SnapshotId.parse(str(SnapshotId(raw))) == raw


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=2))
def test_text_order_is_byte_order(pair: list[bytes]) -> None:
    """Sorting names of objects sorts ids."""
    one, two = map(NodeId, pair)
    assert (one < two) == (str(one) < str(two))


@pytest.mark.parametrize("alias", ["1cechnkrep0f1rstcmt0", "ICECHNKREPoFLrstCMTO"])
def test_lower_case_and_aliases_are_read(alias: str) -> None:
    """O is 0, I and L are 1, as Crockford has it."""
    assert SnapshotId.parse(alias) == INITIAL_SNAPSHOT_ID


@pytest.mark.parametrize("last", "123456789ABCDEF")
def test_bits_behind_the_last_byte_are_not_looked_at(last: str) -> None:
    """The official engine ignores them, too; they are written as zeros."""
    found = SnapshotId.parse("1CECHNKREP0F1RSTCMT" + last)
    assert found == INITIAL_SNAPSHOT_ID
    assert str(found) == "1CECHNKREP0F1RSTCMT0"


@pytest.mark.parametrize(
    "text",
    ["", "0" * 19, "0" * 21, "0" * 13, "U" + "0" * 19, "0" * 19 + "=", "é" * 20, "0" * 19 + "\n"],
)
def test_other_texts_are_refused(text: str) -> None:
    """Wrong length, U, padding, anything outside of the alphabet."""
    with pytest.raises(InvalidInputError, match="Crockford base32"):
        SnapshotId.parse(text)


def test_excess_bits_of_the_last_letter_are_ignored() -> None:
    """Four bits of the twentieth letter belong to no byte."""
    assert SnapshotId.parse("000G40R40M30E209185H") == COUNTING


@pytest.mark.parametrize("cls", WIDE)
def test_object_ids_have_twelve_bytes_or_the_sixteen_of_older_layouts(
    cls: type[SnapshotId],
) -> None:
    """Other lengths are refused, and new ids have twelve."""
    assert len(cls.random()) == 12
    for length in (0, 8, 11, 13, 15, 17):
        with pytest.raises(InvalidInputError, match=f"has 12( or 16)? bytes, not {length}"):
            cls(bytes(length))


def test_node_ids_have_eight_bytes() -> None:
    """Other lengths are refused."""
    for length in (0, 7, 9, 12):
        with pytest.raises(InvalidInputError, match="8 bytes"):
            NodeId(bytes(length))


@pytest.mark.parametrize("cls", [*WIDE, NodeId])
def test_random_ids_differ(cls: type[SnapshotId]) -> None:
    """A thousand ids are a thousand different ones, of the right type."""
    ids = {cls.random() for _ in range(1000)}
    assert len(ids) == 1000
    assert {type(identifier) for identifier in ids} == {cls}


def test_random_ids_come_from_the_clock_module() -> None:
    """Tests can replace the source of randomness."""

    class Fixed(clock.SystemClock):
        def random_bytes(self, size_bytes: int) -> bytes:
            return bytes(range(size_bytes))

    with clock.use_clock(Fixed()):
        assert SnapshotId.random() == COUNTING


def test_ids_show_their_text() -> None:
    """In messages and in debuggers."""
    assert repr(COUNTING) == "SnapshotId('000G40R40M30E209185G')"
    assert f"{COUNTING!s}" == "000G40R40M30E209185G"


def test_ids_pickle_as_themselves() -> None:
    """They travel between processes."""
    again = pickle.loads(pickle.dumps(COUNTING))
    assert again == COUNTING
    assert type(again) is SnapshotId
