"""Branch and tag files of spec 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.ids import INITIAL_SNAPSHOT_ID, SnapshotId
from icechunk_async.format.refs import decode_ref, encode_ref
from tests.unit.format.samples import SNAPSHOT_IDS

OFFICIAL = b'{"snapshot":"1CECHNKREP0F1RSTCMT0"}'


def test_a_ref_is_written_as_the_official_engine_does() -> None:
    """Compact JSON of 35 bytes, without a newline."""
    assert encode_ref(INITIAL_SNAPSHOT_ID) == OFFICIAL
    assert len(OFFICIAL) == 35


@given(SNAPSHOT_IDS)
def test_refs_read_back(identifier: SnapshotId) -> None:
    """This holds for every id."""
    assert decode_ref(encode_ref(identifier)) == identifier


@pytest.mark.parametrize(
    "data",
    [
        memoryview(OFFICIAL),
        b'{ "snapshot" : "1CECHNKREP0F1RSTCMT0" }\n',
        b'{"snapshot":"1cechnkrep0f1rstcmt0","later":[1,{}]}',
    ],
)
def test_other_spellings_are_read(data: bytes | memoryview) -> None:
    """Space, further keys, lower case."""
    assert decode_ref(data) == INITIAL_SNAPSHOT_ID


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b"3", b'"snapshot"', b"\xff", OFFICIAL[:-1], OFFICIAL + b"}",
        b'{"snapshot":null}', b'{"snapshot":5}', b'{"snapshot":["1CECHNKREP0F1RSTCMT0"]}',
        b'{"snapshot":""}', b'{"snapshot":"1CECHNKREP0F1RSTCMT"}',
        b'{"snapshot":"1CECHNKREP0F1RSTCMTU"}', b'{"Snapshot":"1CECHNKREP0F1RSTCMT0"}',
        b"[" * 4000, b'{"a":' * 800, b"9" * 4096, b'{"snapshot":"\\ud800"}', b"NaN",
        '{"snapshot":"\uff11CECHNKREP0F1RSTCMT0"}'.encode(),
    ],
)  # fmt: skip
def test_other_contents_are_refused(data: bytes) -> None:
    """All invalid contents raise the same error."""
    with pytest.raises(FormatError, match="does not name a snapshot"):
        decode_ref(data)


def test_a_large_file_is_no_ref() -> None:
    """It is not even parsed."""
    with pytest.raises(FormatError, match="5000000 bytes"):
        decode_ref(b" " * 5_000_000)


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    """With no other error."""
    with pytest.raises(FormatError):
        decode_ref(data)
