"""Golden files, damaged: they read or raise ``FormatError``, within bounds.

Some thousand cases by default. ``FUZZ_ROUNDS`` sets how often each file is damaged, and
``FUZZ_SEED`` what the damage is; a failure names both.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING

import pytest

from icechunk_async.errors import FormatError
from icechunk_async.format.envelope import HEADER_BYTES, Envelope, FileType, pack, unpack
from icechunk_async.format.refs import decode_ref
from tests.unit.format.damage import damaged, look_at, look_at_file, within_bounds
from tests.unit.format.golden_files import REPOSITORIES, golden_files
from tests.unit.format.own_files import own_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.format.golden_files import GoldenFile

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "9"))
SEED = os.environ.get("FUZZ_SEED", "1")
FILES = [*golden_files(), *own_files()]
EVERY = pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])

pytestmark = pytest.mark.timeout(300 + ROUNDS)


@pytest.fixture(autouse=True)
def _memory_is_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def rounds_for(size: int) -> int:
    """Large files are slower to read, so they are damaged less often by default."""
    return ROUNDS if size < 20_000 or ROUNDS > 1000 else ROUNDS // 3


def payloads_like(file: GoldenFile) -> list[bytes]:
    """Return the contents of all files of one type."""
    return [bytes(it.envelope.payload) for it in FILES if it.file_type is file.file_type]


@EVERY
def test_undamaged_files_are_within_bounds(file: GoldenFile) -> None:
    """Otherwise the bounds would say nothing about damaged ones."""
    envelope = file.envelope

    def work() -> None:
        assert look_at(envelope, file.file_type)

    work()
    within_bounds(work, len(envelope.payload))


@EVERY
def test_damaged_contents_read_or_raise_format_errors(file: GoldenFile) -> None:
    """The envelope is sound; the contents are laid out by the official engine or by us."""
    envelope = file.envelope
    others = payloads_like(file)
    layouts = (bytes(envelope.payload), file.rewritten())
    for number in range(rounds_for(len(envelope.payload))):
        case = f"{SEED}/{file.name}/{number}"
        payload = damaged(random.Random(case), layouts[number % 2], others)
        try:
            within_bounds(
                partial(look_at, Envelope(envelope.spec_version, payload), file.file_type),
                len(payload),
            )
        except Exception as error:
            error.add_note(f"damaged contents, case {case!r}")
            raise


@EVERY
def test_damaged_files_read_or_raise_format_errors(file: GoldenFile) -> None:
    """The damage is anywhere: header, zstd frame, or both."""
    others = [it.data for it in FILES if it.file_type is file.file_type]
    for number in range(rounds_for(len(file.data)) // 2):
        case = f"{SEED}/{file.name}/{number}/raw"
        rng = random.Random(case)
        data = damaged(rng, file.data, others)
        if number % 2:
            data = file.data[:HEADER_BYTES] + damaged(rng, file.data[HEADER_BYTES:], others)
        try:
            within_bounds(
                partial(look_at_file, data, file.file_type), len(data), base_bytes=70 << 20
            )
        except Exception as error:
            error.add_note(f"damaged file, case {case!r}")
            raise


@EVERY
def test_files_read_as_another_type_raise_format_errors(file: GoldenFile) -> None:
    """Contents of one type under the header of another."""
    envelope = file.envelope
    for file_type in FileType:
        for spec in (1, 2):
            data = pack(envelope.payload, file_type, spec)
            within_bounds(partial(look_at_file, data, file_type), len(envelope.payload))


@EVERY
def test_every_prefix_of_a_small_file_raises_format_errors(file: GoldenFile) -> None:
    """Of the contents and of the file; of larger files only some."""
    envelope = unpack(file.data, file.file_type)
    payload = envelope.payload
    for length in range(0, len(payload), max(1, len(payload) // ROUNDS)):
        cut = Envelope(envelope.spec_version, payload[:length])
        within_bounds(partial(look_at, cut, file.file_type), length)
    for length in range(0, len(file.data), max(1, len(file.data) // ROUNDS)):
        assert not look_at_file(file.data[:length], file.file_type)


def test_damaged_refs_read_or_raise_format_errors() -> None:
    """Branch and tag files of spec 1."""
    refs = [data for golden in REPOSITORIES.values() for data in golden.refs().values()]
    for number in range(ROUNDS * 20):
        rng = random.Random(f"{SEED}/refs/{number}")
        data = damaged(rng, rng.choice(refs), refs)
        try:
            decode_ref(data)
        except FormatError:
            continue
