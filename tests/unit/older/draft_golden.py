"""A golden first draft: every kind of reference, attribute, type and manifest."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.older.draft_writer import (
    DraftWriter,
    array,
    group,
    inventory,
    metadata,
    row,
)
from tests.unit.older.golden import SOURCE, VIRTUAL_URL

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["COMMITS", "EXPECTED", "SOURCE", "VIRTUAL_URL", "golden_draft"]

COMMITS = 5
"""Snapshots of ``main``."""
_TITLE = '{"title": "Gölden", "list": [1, 2.5, null, {"deep": true}]}'

EXPECTED: dict[str, npt.NDArray[Any]] = {
    "a/packed": np.array([[1, 2, 3, 4], [5, 6, 7, 8], [-1, -1, -1, -1]], "i2"),
    "a/two": np.array([0.5, 1.5, 2.5, 7.0, 4.5, 5.5], "f4"),
    "complex": np.array([1 + 2j, 0.5 - 1j], "c8"),
    "truth": np.array([True, False, True]),
    "raw": np.array([b"\x01\x02\x03", b"\xff\x00\xff"], "V3"),
    "scalar": np.array(-(2**40), "i8"),
    "virtual": np.arange(10, 20, dtype="u1"),
    "half": np.array([np.nan, 1.0], "f2"),
    "long": np.concatenate([np.full(65520, 7, "u1"), np.arange(15, dtype="u1")]),
}


@cache
def golden_draft(root: str = "") -> DraftWriter:
    """Return the repository; files other than the state file are below ``root``."""
    it = DraftWriter(root=root)
    packed = EXPECTED["a/packed"]
    pack = it.chunk(b"header" + packed[0].tobytes() + packed[1].tobytes())
    half = EXPECTED["half"][1:].tobytes()
    first = it.manifest(
        [
            row(4, (0,), inline_data=EXPECTED["a/two"][:2].tobytes()),
            row(3, (1, 0), chunk_file=pack, offset=14, length=8),
            row(3, (0, 0), chunk_file=pack, offset=6, length=8),
            row(65535, (1,), inline_data=half),
        ]
    )
    whole = it.chunk(EXPECTED["a/two"][4:].tobytes())
    second = it.manifest([row(4, (2,), chunk_file=whole, length=8)], write_statistics=False)
    # It has the chunk between those two, but the array says that it has none there.
    third = it.manifest([row(4, (1,), inline_data=EXPECTED["a/two"][2:4].tobytes())])
    rest = it.manifest(
        [
            row(5, (0,), inline_data=EXPECTED["complex"].tobytes()),
            row(6, (0,), inline_data=EXPECTED["truth"].tobytes()),
            row(7, (0,), inline_data=EXPECTED["raw"].tobytes()),
            row(8, (), inline_data=EXPECTED["scalar"].tobytes()),
            row(9, (0,), chunk_file=f"{VIRTUAL_URL}/data", offset=10, length=10),
            row(10, (6552,), inline_data=bytes(range(10))),
            row(10, (6553,), inline_data=bytes(range(10, 20))),
        ],
        row_group_size=2,
        compression="snappy",
    )
    stored = it.attributes([{"first": 1}, {"units": "m", "long": "x" * 100}])
    nan = struct.pack("<e", float("nan"))
    everywhere = [
        group(0, "/", inline_attrs=_TITLE.encode()),
        group(2, "a"),
        array(
            3,
            "a/packed",
            metadata([3, 4], [1, 4], "int16", b"\xff\xff", dimension_names=["y", None]),
            [inventory(first, [0, 3], [0, 1])],
            attrs_reference={"attrs_file": stored, "row": 1, "flags": None},
        ),
        array(
            4,
            "/a/two",
            metadata([6], [2], "float32", struct.pack("<f", 7)),
            [inventory(first, [0, 1]), inventory(second, [2, 3]), inventory(third, [1, 2])],
            inline_attrs=b'{"units": "K"}',
        ),
        array(5, "complex", metadata([2], [2], "complex64", bytes(8)), [inventory(rest, [0, 1])]),
        array(6, "truth", metadata([3], [3], "bool", b"\x01"), [inventory(rest, [0, 1])]),
        array(7, "raw", metadata([2], [2], "r24", b"\1\2\3"), [inventory(rest, [0, 1])]),
        array(8, "scalar", metadata([], [], "int64", None), [inventory(rest)]),
        array(9, "virtual", metadata([10], [10], "uint8", b"\0"), [inventory(rest, [0, 1])]),
        array(10, "long", metadata([65535], [10], "uint8", b"\7"), [inventory(rest, [0, 6554])]),
        array(65535, "half", metadata([2], [1], "float16", nan), [inventory(first, [0, 2])]),
        array(11, "empty", metadata([0], [1], "float16", nan, codecs=[]), None),
    ]
    without = [node for node in everywhere if node["path"] != "half"]
    lost = [dict(node) for node in without]
    lost[3]["inventories"] = [inventory(first, [0, 1])]
    parent: str | None = None
    for number, nodes in enumerate([[], without, lost, without, everywhere]):
        parent = it.snapshot(nodes, parent, {"message": f"commit {number}", "number": number})
        if number == 1:
            it.ref("v1", "tag", parent)
            it.ref("old", "branch", parent)
    assert parent is not None
    it.ref("main", "branch", parent)
    it.state(**({"store_root": root.rstrip("/")} if root else {}))
    return it
