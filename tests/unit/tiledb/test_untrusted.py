"""Damaged files of every kind are read or raise ``FormatError``, within bounds.

Half of the damage is to the stored bytes. The other half is to the contents of generic tiles, which
are packed again, since compressed bytes hide most of their contents from damage.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard

from icechunk_async.errors import FormatError
from icechunk_async.tiledb.format.commits import decode_consolidated, decode_footers, decode_lines
from icechunk_async.tiledb.format.conditions import Comparison, Operator, decode_condition
from icechunk_async.tiledb.format.filters.pipeline import Filter, FilterCode
from icechunk_async.tiledb.format.fragment import (
    decode_conditions_block,
    decode_extremes,
    decode_footer,
    decode_offsets,
    decode_rtree,
    decode_sums,
    dense_tile_box,
    read_footer_head,
)
from icechunk_async.tiledb.format.metadata import apply_metadata, decode_group, decode_metadata
from icechunk_async.tiledb.format.schema import (
    Enumeration,
    Schema,
    decode_enumeration,
    decode_schema,
)
from icechunk_async.tiledb.format.tiles import TileForm, decode_generic, generic_length
from icechunk_async.tiledb.format.types import VAR, Datatype
from tests.unit.format.damage import damaged, within_bounds
from tests.unit.tiledb.archives import ARCHIVES, load
from tests.unit.tiledb.encoders import generic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    type Look = Callable[[bytes], object]

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "30"))
CASES = 4 * ROUNDS
"""Damaged files of each kind."""
SEED = os.environ.get("FUZZ_SEED", "1")
pytestmark = pytest.mark.timeout(300 + 5 * ROUNDS)


@pytest.fixture(autouse=True)
def _memory_is_traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _is_schema(name: str) -> bool:
    folder, _, last = name.rpartition("/")
    return folder.endswith("/__schema") or last == "__array_schema.tdb"


def _schemas() -> dict[str, list[tuple[bytes, Schema]]]:
    """Return the schemas of each archive, with their bytes."""
    return {
        archive: [
            (data, decode_schema(data)) for name, data in load(archive).items() if _is_schema(name)
        ]
        for archive in ARCHIVES
    }


SCHEMAS = _schemas()


_BY_PLACE: dict[str, tuple[str, Look]] = {
    "__meta/": ("metadata", lambda it: _values(decode_metadata(it))),
    "__group/": ("group", decode_group),
    "__enumerations/": ("enumeration", lambda it: decode_enumeration(it).items()),
}
_BY_SUFFIX: dict[str, tuple[str, Look]] = {
    "con": ("consolidated commits", decode_consolidated),
    "vac": ("lines", decode_lines),
    "ign": ("lines", decode_lines),
    "meta": ("consolidated footers", decode_footers),
    "del": ("condition", lambda it: list(decode_condition(it).fields())),
}


def _kind_of(name: str) -> tuple[str, Look] | None:
    """Return the kind of a file, and how to look at all that is in one; None of other kinds."""
    found = _BY_SUFFIX.get(name.rpartition(".")[2])
    if found is not None:
        return found
    return next((it for place, it in _BY_PLACE.items() if place in name), None)


def _samples() -> dict[str, list[tuple[bytes, Look]]]:
    """Return files of each kind, and how to look at each."""
    found: dict[str, list[tuple[bytes, Look]]] = {}
    for archive in (*ARCHIVES, "group"):
        for name, data in load(archive).items():
            kind = _kind_of(name)
            if kind is not None and data:
                found.setdefault(kind[0], []).append((data, kind[1]))
    for archive, schemas in SCHEMAS.items():
        found.setdefault("schema", []).extend((data, _look_at_schema) for data, _ in schemas)
        for name, data in load(archive).items():
            if not name.endswith("__fragment_metadata.tdb"):
                continue
            for _, schema in schemas:
                with suppress(FormatError):
                    _look_at_metadata(data, schema)
                    look = partial(_look_at_metadata, schema=schema)
                    found.setdefault("fragment", []).append((data, look))
                    break
    return found


def _values(changes: object) -> object:
    return [it.plain() for it in apply_metadata([changes]).values()]  # type: ignore[list-item]


def _look_at_schema(data: bytes) -> None:
    schema = decode_schema(data)
    for it in schema.fields.values():
        schema.slot(it.name)
        with suppress(FormatError):
            schema.value_form(it, 22)
    if not schema.is_sparse:
        assert schema.tile_cells > 0


def _look_at_metadata(data: bytes, schema: Schema) -> None:
    """Read the footer and every block that it points to, as `Fragment` does."""
    view = memoryview(data)
    length = int.from_bytes(data[-8:], "little") + 8
    head = read_footer_head(view[-length:] if length <= len(data) else view)
    footer = decode_footer(view[len(data) - length :], schema)
    assert footer.version == head.version
    if footer.is_dense:
        assert footer.non_empty is not None
        assert all(low < high for low, high in dense_tile_box(schema, footer.non_empty))
    tree = view[footer.rtree :]
    _unless_damaged(lambda: decode_rtree(tree, footer.version, schema))
    lists = (
        footer.tile_offsets, footer.variable_offsets, footer.variable_sizes, footer.validity_offsets
    )  # fmt: skip
    for position in {it for positions in lists for it in positions.tolist()}:
        _unless_damaged(partial(decode_offsets, view[position:], "offsets"))
    for position in footer.mins.tolist():
        _unless_damaged(partial(_look_at_extremes, view[position:]))
    for it, position in zip(schema.attributes, footer.sums.tolist(), strict=False):
        _unless_damaged(partial(decode_sums, view[position:], it))
    if footer.conditions is not None:
        names = view[footer.conditions :]
        _unless_damaged(lambda: decode_conditions_block(names))


def _look_at_extremes(data: memoryview) -> None:
    extremes = decode_extremes(data)
    extremes.items()
    extremes.numbers(np.dtype("<f8"))


def _unless_damaged(work: Callable[[], object]) -> None:
    with suppress(FormatError):
        work()


SAMPLES = _samples()
_HEAD = b"\x04\x01" + bytes(8) + b"\x12\0\0\0"
"""A part of the header of a generic tile that TileDB writes always alike."""


def packed_again(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Damage the contents of a generic tile, or of one somewhere in a file of many."""
    starts = [0, *(at for at in range(len(data) - 34) if data[at + 20 : at + 34] == _HEAD)]
    start = rng.choice(starts)
    try:
        length = generic_length(data[start:], "sample")
        body = decode_generic(data[start : start + length], "sample")
    except FormatError:
        return damaged(rng, data, others)
    return data[:start] + generic(damaged(rng, body, [body, *others])) + data[start + length :]


def test_a_list_of_no_footers_has_none() -> None:
    """Their number is taken as it stands."""
    assert decode_footers(generic(bytes(4))) == []


def test_an_enumeration_of_no_texts_has_no_items() -> None:
    """TileDB allows enumerations that get their values later."""
    empty = Enumeration("e", Datatype.STRING_UTF8, VAR, is_ordered=False, data=b"", offsets=())
    assert empty.items() == []


def test_an_enumeration_with_values_and_no_offsets_is_damaged() -> None:
    """None of its values could be told from the next."""
    head = bytes(12) + bytes([Datatype.STRING_UTF8]) + b"\xff" * 4 + b"\0"
    with pytest.raises(FormatError, match="no offsets"):
        decode_enumeration(generic(head + (2).to_bytes(8, "little") + b"ab" + bytes(8)))
    assert decode_enumeration(generic(head + bytes(16))).items() == []


def test_a_condition_with_values_and_no_offsets_is_damaged() -> None:
    """Without values either it is a comparison with nothing."""
    head = b"\x01" + bytes([Operator.IN]) + (1).to_bytes(4, "little") + b"a"
    with pytest.raises(FormatError, match="no offsets"):
        decode_condition(generic(head + (3).to_bytes(8, "little") + b"xyz" + bytes(8)))
    found = decode_condition(generic(head + bytes(8) + bytes(8)))
    assert found == Comparison("a", Operator.IN, b"", ())


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_damaged_files_read_or_raise_format_errors(kind: str) -> None:
    """Of every kind, from every version that has it."""
    samples = SAMPLES[kind]
    others = [data for data, _ in samples]
    for number in range(0, len(samples), max(1, len(samples) // ROUNDS)):
        data, look = samples[number]
        within_bounds(partial(look, data), len(data), base_bytes=8 << 20)
        for turn in range(max(2, CASES // len(samples))):
            case = f"{SEED}/{kind}/{number}/{turn}"
            rng = random.Random(case)
            bad = packed_again(rng, data, others) if turn % 2 else damaged(rng, data, others)
            try:
                within_bounds(
                    partial(_unless_damaged, partial(look, bad)), len(bad), base_bytes=8 << 20
                )
            except Exception as error:
                error.add_note(f"case {case!r}")
                raise


def test_every_kind_of_file_is_damaged() -> None:
    """So that none is left out by mistake."""
    assert set(SAMPLES) >= {
        "schema", "fragment", "metadata", "group", "enumeration", "consolidated commits", "lines",
        "consolidated footers", "condition",
    }  # fmt: skip


@dataclass(frozen=True)
class _Tile:
    """A tile of a field of fixed length, and what decodes it."""

    data: bytes
    form: TileForm
    plain: int

    def look(self, data: bytes) -> None:
        with suppress(FormatError), np.errstate(all="ignore"):
            self.form.decode(data, self.plain)


def _tiles() -> list[_Tile]:
    """Return files that are one tile of a field of the golden arrays."""
    found: list[_Tile] = []
    for archive in ARCHIVES:
        files = load(archive)
        for name, data in files.items():
            stem = name.rpartition("/")[2].removesuffix(".tdb")
            forms = _forms(archive, name.partition("/")[0]) if data else {}
            if stem not in forms:
                continue
            form, cells = forms[stem]
            for plain in (it * form.cell_bytes for it in (*cells, 1, 7, 40)):
                with suppress(FormatError):
                    form.decode(data, plain)
                    found.append(_Tile(data, form, plain))
                    break
    return found


@cache
def _forms(archive: str, array: str) -> dict[str, tuple[TileForm, tuple[int, int]]]:
    """Return how the values of fields of an array are stored, by the name of their file."""
    found: dict[str, tuple[TileForm, tuple[int, int]]] = {}
    for path, stored in load(archive).items():
        if path.startswith(f"{array}/") and _is_schema(path):
            schema = decode_schema(stored)
            for number, it in enumerate(schema.attributes):
                stem = f"a{number}" if schema.version >= 9 else it.name
                if not it.is_variable:
                    form = schema.value_form(it, schema.version)
                    found[stem] = form, (schema.tile_cells, schema.capacity)
    return found


def test_damaged_tiles_decode_or_raise_format_errors() -> None:
    """With the filters of the golden arrays."""
    samples = _tiles()
    assert len(samples) > 20
    others = [it.data for it in samples]
    for number, tile in enumerate(samples):
        for turn in range(max(2, CASES // len(samples))):
            case = f"{SEED}/tile/{number}/{turn}"
            bad = damaged(random.Random(case), tile.data, others)
            size = max(len(bad), tile.plain)
            try:
                within_bounds(partial(tile.look, bad), size, base_bytes=8 << 20)
            except Exception as error:
                error.add_note(f"case {case!r}")
                raise


def test_tile_that_claims_too_much_is_refused() -> None:
    """Before memory is reserved."""
    schema, it = next(
        (schema, it)
        for _, schema in SCHEMAS[ARCHIVES[-1]]
        for it in schema.attributes
        if not it.is_variable
    )
    huge = b"\xff" * 8
    many = (2**20).to_bytes(8, "little") + b"\xff" * 60
    for tile in (huge, many, b"", b"\0" * 7, (1).to_bytes(8, "little") + b"\xff" * 12):
        with pytest.raises(FormatError):
            schema.value_form(it, 22).decode(tile, 10**15)


def _strings_tile(meta: bytes, data: bytes, size: int) -> bytes:
    """Return a tile of one chunk of strings, compressed with Zstandard after their filter."""
    parts = [zstandard.compress(it) for it in (meta, data)]
    sizes = (len(meta), len(parts[0]), len(data), len(parts[1]))
    head = struct.pack("<6I", 1, 1, *sizes)
    body = b"".join(parts)
    return struct.pack("<Q3I", 1, size, len(body), len(head)) + head + body


@pytest.mark.parametrize("kind", ["entries", "runs", "cells"])
def test_strings_of_few_bytes_that_claim_many_are_refused(kind: str) -> None:
    """Entries that no cell has, runs of no cells, and cells by the hundred millions."""
    size, many = 64 << 10, 1 << 20
    code, cells = FilterCode.DICTIONARY, 8
    if kind == "runs":
        code, data = FilterCode.RLE, bytes(2 * many // 2)
        meta = struct.pack("<5I2B", 0, 1, size, len(data), 8 * cells, 1, 1)
    else:
        entries = many if kind == "entries" else 1
        data = bytes(cells if kind == "entries" else many)
        cells = len(data)
        about = struct.pack("<5I2BI", 0, 1, size, len(data), 8 * cells, 1, 1, entries)
        meta = about + bytes(entries)
        cells = cells if kind == "entries" else 1 << 40
    tile = _strings_tile(meta, data, size)
    filters = (Filter(code), Filter(FilterCode.ZSTD))
    form = TileForm(filters, Datatype.STRING_ASCII, 1, 20, is_variable=True)

    def look() -> None:
        with pytest.raises(FormatError):
            form.decode_strings(tile, size, cells)

    assert len(tile) < 1000
    within_bounds(look, len(tile), base_bytes=16 << 20)


def test_a_tile_of_many_equal_cells_is_read() -> None:
    """Runs of runs: ten million letters in some kilobytes, as dense text that is all alike."""
    size, many = 64 << 10, 150
    run = (size - 1, 1)  # cells of one letter
    data = struct.pack(">HBc", size - 1, 1, b"x")
    meta = struct.pack("<5I2B", 0, 1, size - 1, len(data), 8 * run[0], 2, 1)
    one = _strings_tile(meta, data, size - 1)[8:]
    tile = struct.pack("<Q", many) + one * many
    form = TileForm(
        (Filter(FilterCode.RLE), Filter(FilterCode.ZSTD)),
        Datatype.STRING_ASCII,
        1,
        20,
        is_variable=True,
    )
    values, offsets = form.decode_strings(tile, many * run[0], many * run[0])
    assert len(tile) < 1 << 15
    assert (len(values), len(offsets), set(values.tolist())) == (many * run[0],) * 2 + ({ord("x")},)
