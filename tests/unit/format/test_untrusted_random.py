"""Bytes that never were a file: they raise ``FormatError`` or, rarely, read."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import Envelope, FileType, unpack
from icechunk_async.format.refs import decode_ref
from tests.helpers import examples
from tests.unit.format.damage import look_at, look_at_file

EVERY_TYPE = pytest.mark.parametrize("file_type", list(FileType))
SPECS = st.sampled_from([1, 2])

_SMALL = st.integers(0, 64) | st.integers(0, 16).map(lambda word: 4 * word)
_FAR = st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32 - 8, 65_536, 0x00080004, 0x000C0008])
WORDS = st.lists(_SMALL | _FAR, max_size=60).map(
    lambda words: struct.pack(f"<{len(words)}I", *words)
)
"""Small words make offsets, counts and vtables that lead somewhere."""


@EVERY_TYPE
@examples(300)
@given(payload=st.binary(max_size=300), spec=SPECS)
def test_random_contents_are_refused(file_type: FileType, payload: bytes, spec: int) -> None:
    """They are refused as files of every type."""
    look_at(Envelope(spec, payload), file_type)


@EVERY_TYPE
@examples(1000)
@given(payload=WORDS, spec=SPECS)
def test_random_words_are_refused(file_type: FileType, payload: bytes, spec: int) -> None:
    """Words that look like those of a FlatBuffer."""
    look_at(Envelope(spec, payload), file_type)


@EVERY_TYPE
@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_random_files_are_refused(file_type: FileType, data: bytes) -> None:
    """They would have to begin with the right twelve bytes."""
    assert not look_at_file(data, file_type)


@EVERY_TYPE
@settings(deadline=None)
@given(
    stamp=st.binary(min_size=24, max_size=24),
    numbers=st.tuples(*[st.integers(0, 7)] * 3),
    frame=st.binary(max_size=200).map(lambda tail: b"\x28\xb5\x2f\xfd" + tail),
)
def test_random_frames_are_refused(
    file_type: FileType, stamp: bytes, numbers: tuple[int, int, int], frame: bytes
) -> None:
    """Behind a header that may be right."""
    data = b"ICE\xf0\x9f\xa7\x8aCHUNK" + stamp + bytes(numbers) + frame
    with suppress(FormatError):
        unpack(data, file_type)


@examples(300)
@given(st.text(max_size=60))
def test_random_json_is_no_ref(text: str) -> None:
    """Invalid ids are refused too."""
    for document in (text, f'{{"snapshot":{text}}}', f'{{"snapshot":"{text}"}}'):
        with suppress(FormatError):
            decode_ref(document.encode())
