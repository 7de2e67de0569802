"""Leases as bytes: what is read is what was written, and damage is noticed."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields, replace

import msgpack
import pytest
import zstandard

from icechunk_async.engine.leases.record import (
    LeaseRecord,
    LeaseState,
    decode_lease,
    encode_document,
    encode_lease,
)
from icechunk_async.errors import FormatError
from icechunk_async.format.ids import SessionId, SnapshotId

RECORD = replace(
    LeaseRecord.begin(SessionId.random(), "somebody", "main", SnapshotId.random(), 3_600_000_000),
    began_us=1_700_000_000_000_000,
    turn=3,
    state=LeaseState.COMMITTED,
    snapshot_id=SnapshotId.random(),
    spilled=("A", "B"),
    shared=1,
    taken={b"fork-1": 3, b"fork-2": -1},
    serials={b"fork-1": b"serial"},
    clock=1_700_000_000_000_001,
    generation=4,
    since=2,
    decided=3,
    accepted={b"fork-3": 1},
    sealed=True,
)


def test_a_lease_is_read_as_it_was_written() -> None:
    """Every field, and those that are unknown at first."""
    first = LeaseRecord.begin(SessionId.random(), "", "a/b", SnapshotId.random(), 60_000_000)
    for record in (RECORD, first):
        assert decode_lease(encode_lease(record), record.session_id, "leases/x") == record
    plain = {it.name: getattr(first, it.name) for it in fields(first)}
    assert not [name for name, value in plain.items() if getattr(RECORD, name) == value]


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_a_format_error(seed: int) -> None:
    """Any changed bit, any cut, another session's lease, and a newer version."""
    data, chance, spare = encode_lease(RECORD), random.Random(seed), 0
    for _ in range(50):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with suppress(FormatError):
            # A bit that nothing depends on, such as a window larger than needed.
            assert decode_lease(bytes(damaged), RECORD.session_id, "leases/x") == RECORD
            spare += 1
        with pytest.raises(FormatError):
            decode_lease(data[: chance.randrange(len(data))], RECORD.session_id, "leases/x")
    assert spare < 5
    with pytest.raises(FormatError, match="is the lease of session"):
        decode_lease(data, SessionId.random(), "leases/x")
    newer = data[:8] + b"\x02" + data[9:]
    with pytest.raises(FormatError, match="version 2"):
        decode_lease(newer, RECORD.session_id, "leases/x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session", b"short"),
        ("session", "text"),
        ("base", None),
        ("duration", -1),
        ("duration", 1 << 62),
        ("duration", True),
        ("began", -5),
        ("turn", "1"),
        ("state", "asleep"),
        ("snapshot", 7),
        ("spilled", [1]),
        ("spilled", None),
        ("owner", 5),
        ("shared", 3),
        ("shared", -1),
        ("taken", None),
        ("taken", [[b"short", 1]]),
        ("taken", [[b"fork-1", -2]]),
        ("serials", [[b"fork-1"]]),
        ("serials", [[1, b"serial"]]),
        ("clock", 1 << 63),
        ("generation", "4"),
        ("since", -1),
        ("decided", True),
        ("accepted", 7),
        ("sealed", 1),
    ],
)
def test_values_that_cannot_be_are_format_errors(name: str, value: object) -> None:
    """Also with a right checksum."""
    view = encode_lease(RECORD)[9:]
    document = msgpack.unpackb(zstandard.decompress(view))
    with pytest.raises(FormatError):
        decode_lease(encode_document("lease", {**document, name: value}), RECORD.session_id, "x")


def test_another_kind_of_file_is_not_a_lease() -> None:
    """Each kind says which it is."""
    for data in (encode_document("spill", {}), encode_document("lease", {}), b"ICALEASE\x01"):
        with pytest.raises(FormatError):
            decode_lease(data, RECORD.session_id, "leases/x")
