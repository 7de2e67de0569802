"""A golden repository of the alpha: every kind of reference, attribute, type and manifest."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.unit.older.alpha_writer import (
    AlphaWriter,
    array,
    group,
    inline,
    manifest_ref,
    metadata,
    native,
    virtual,
)

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["COMMITS", "EXPECTED", "SOURCE", "VIRTUAL_URL", "golden"]

VIRTUAL_URL = "s3://golden/source"
SOURCE = bytes(range(200))
"""The object ``data`` below `VIRTUAL_URL`, which any storage can stand for."""
COMMITS = 33
"""Snapshots of ``main``, of which each lists at most ten ancestors."""

EXPECTED: dict[str, npt.NDArray[Any]] = {
    "a/packed": np.array([[1, 2, 3, 4], [5, 6, 7, 8], [-1, -1, -1, -1]], "i2"),
    "a/two": np.array([0.5, 1.5, 2.5, 7.0, 4.5, 5.5], "f4"),
    "complex": np.array([1 + 2j, 0.5 - 1j], "c8"),
    "truth": np.array([True, False, True]),
    "raw": np.array([b"\x01\x02\x03", b"\xff\x00\xff"], "V3"),
    "scalar": np.array(-(2**40), "i8"),
    "virtual": np.arange(10, 20, dtype="u1"),
    "half": np.array([np.nan, 1.0], "f2"),
}


@cache
def golden() -> AlphaWriter:
    """Return the repository; its tip is number 32 of ``main``."""
    it = AlphaWriter()
    pack = it.chunk(
        b"header" + EXPECTED["a/packed"][0].tobytes() + EXPECTED["a/packed"][1].tobytes()
    )
    first = it.manifest(
        {
            (3, 0, 0): native(pack, 6, 8),
            (3, 1, 0): native(pack, 14, 8),
            (4, 0): inline(EXPECTED["a/two"][:2].tobytes()),
        }
    )
    second = it.manifest({(4, 2): native(it.chunk(EXPECTED["a/two"][4:].tobytes()), 0, 8)})
    # Its name is that of the chunk between those two, but it is of no array in this place.
    third = it.manifest({(4, 1): inline(EXPECTED["a/two"][2:4].tobytes())})
    rest = it.manifest(
        {
            (5, 0): inline(EXPECTED["complex"].tobytes()),
            (6, 0): inline(EXPECTED["truth"].tobytes()),
            (7, 0): inline(EXPECTED["raw"].tobytes()),
            (8,): inline(EXPECTED["scalar"].tobytes()),
            (9, 0): virtual(f"{VIRTUAL_URL}/data", 10, 10),
            (4294967295, 1): inline(EXPECTED["half"][1:].tobytes()),
        }
    )
    stored = it.attributes([{"first": 1}, {"units": "m", "long": "x" * 100}])
    elsewhere = {"Ref": {"object_id": list(stored), "location": 1, "flags": []}}
    everywhere = [
        group(1, "/", {"Inline": {"title": "Gölden", "list": [1, 2.5, None, {"deep": True}]}}),
        group(2, "/a"),
        array(
            3,
            "/a/packed",
            metadata([3, 4], [1, 4], "int16", {"Int16": -1}, dimension_names=["y", None]),
            [manifest_ref(first, [0, 0], [2, 0])],
            elsewhere,
        ),
        array(
            4,
            "/a/two",
            metadata([6], [2], "float32", {"Float32": 7}, storage_transformers=None),
            [manifest_ref(first, [0]), manifest_ref(second), manifest_ref(third, [1], [1])],
            {"Inline": {"units": "K"}},
        ),
        array(
            5,
            "/complex",
            metadata([2], [2], "complex64", {"Complex64": [0, -0.0]}),
            [manifest_ref(rest)],
        ),
        array(6, "/truth", metadata([3], [3], "bool", {"Bool": True}), [manifest_ref(rest)]),
        array(
            7,
            "/raw",
            metadata([2], [2], {"rawbits": 24}, {"RawBits": [1, 2, 3]}),
            [manifest_ref(rest)],
        ),
        array(8, "/scalar", metadata([], [], "int64", {"Int64": 5}), [manifest_ref(rest)]),
        array(9, "/virtual", metadata([10], [10], "uint8", {"UInt8": 0}), [manifest_ref(rest)]),
        array(
            4294967295,
            "/half",
            metadata([2], [1], "float16", {"RawBits": list(struct.pack("<e", float("nan")))}),
            [manifest_ref(rest)],
        ),
    ]
    without = [node for node in everywhere if node["path"] != "/half"]
    history: list[dict[str, Any]] = []
    for number in range(COMMITS):
        last = number == COMMITS - 1
        nodes = [] if number == 0 else everywhere if last else without
        if number == 15:  # an array loses its second manifest for one commit
            nodes = [dict(node) for node in without]
            nodes[3]["node_data"] = {
                "Array": [nodes[3]["node_data"]["Array"][0], [manifest_ref(first)]]
            }
        made = it.snapshot(
            f"commit {number}", nodes, history, kept=10, properties={"number": number}
        )
        it.branch("main", number, made)
        history.insert(0, made)
        if number == 10:
            it.tag("v10", made)
            it.branch("old", 0, made)
    return it
