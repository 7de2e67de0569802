"""Random hierarchies and edits of them, as plain data from a seed.

The model knows just enough of the hierarchy to make every edit a valid one. What the hierarchy
must look like afterwards is not said here: Zarr's memory store is the oracle for that.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from math import ceil, prod
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.interop.edits import DTYPES, FILLS, Edit, array, group, write

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JSON_KINDS", "SOURCE_BYTES", "SOURCE_FILES", "Hierarchy", "samples", "seeded"]

SOURCE_FILES: Final = ("grid.bin", "deep/more data.bin")
SOURCE_BYTES: Final = 4096

JSON_KINDS: Final[dict[str, Any]] = {
    "null": None,
    "bool": [True, False],
    "ints": [0, 1, -1, 255, 256, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**64 - 1],
    "floats": [0.0, -0.5, 1.5, 1e300, 0.1, 3.0],
    "texts": ["", "é", "数据 🧊", 'quote " and \\', "line\nline"],
    "mixed": [1, "a", None, 2.5, [], {}],
    "ünïcode": {"z": 1, "a": {"m": [{"deep": None}], "b": ""}},
    "one": 1,
    "long": "x" * 2000,
}
"""Commit properties of every kind, by name."""

_NAMES: Final = (
    *("a", "a-b", "a.b", "a b", "a!", "ab", "A", "c", "0", "zarr", "cc0"),
    *("größe", "数据", "🧊", "e\u0301", "x" * 60),
)
_ATTRIBUTES: Final[tuple[Any, ...]] = (
    *(None, True, 0, -5, 1.5, "é", [], [1, 2, 300], {"b": [1, None], "a": {"deep": "er"}}),
    "long " * 300,
)
_PLAIN: Final = ("i1", "<i2", "<f4", ">f8", "<u8", "<c8")


def seeded(seed: object) -> Random:
    """Return a source of randomness that gives the same for the same seed."""
    return Random(str(seed))


@dataclass
class ArrayModel:
    """The properties of an array that an edit needs."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Of the stored grid: shards, where there are any."""
    item_bytes: int | None = None
    """For arrays without compression, whose chunks can be virtual."""

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(ceil(a / b) for a, b in zip(self.shape, self.chunks, strict=True))


@dataclass
class Hierarchy:
    """Groups and arrays by path, and a source of random edits of them."""

    random: Random
    virtual: bool = False
    """Whether chunks may refer to the source files."""
    dtypes: tuple[str, ...] = tuple(DTYPES)
    """The data types of new arrays."""
    groups: set[str] = field(default_factory=set)
    arrays: dict[str, ArrayModel] = field(default_factory=dict)

    def edits(self, count: int) -> list[Edit]:
        """Return about ``count`` valid edits, and remember their effects."""
        made: list[Edit] = []
        while len(made) < count:
            actions, weights = zip(*_ACTIONS, strict=True)
            action: Callable[[Hierarchy], list[Edit]] = self.random.choices(actions, weights)[0]
            made += action(self)
        return made

    def _free_path(self) -> str | None:
        """Return a path where nothing is, below a group, with no array above it."""
        parent = self.random.choice([*sorted(self.groups), ""])
        name = self.random.choice(_NAMES)
        path = f"{parent}/{name}" if parent else name
        taken = path in self.groups or path in self.arrays or path.count("/") > 3
        return None if taken or self._below_array(path) else path

    def _below_array(self, path: str) -> bool:
        return any(path.startswith(f"{it}/") for it in self.arrays) or "" in self.arrays

    def _above_array(self, path: str) -> bool:
        return any(it.startswith(f"{path}/") for it in self.arrays)

    def _add_parents(self, path: str) -> None:
        parts = path.split("/")[:-1] if path else []
        self.groups.update("/".join(parts[:end]) for end in range(len(parts) + 1) if path)

    def _drop(self, path: str) -> None:
        """Forget a node and all below it."""
        prefix = f"{path}/" if path else ""
        self.groups = {it for it in self.groups if it != path and not it.startswith(prefix)}
        self.arrays = {
            it: model
            for it, model in self.arrays.items()
            if it != path and not it.startswith(prefix)
        }

    def _attributes(self) -> dict[str, Any]:
        names = self.random.sample(string.ascii_lowercase, self.random.randrange(3))
        return {name: self.random.choice(_ATTRIBUTES) for name in names}

    def _new_array(self, path: str) -> tuple[ArrayModel, dict[str, Any]]:
        pick = self.random
        rank = pick.choices(range(6), (1, 4, 4, 2, 1, 1))[0]
        longest = (40, 40, 14, 8, 5, 4)[rank]
        shape = [pick.choice((0, *range(1, longest + 1), longest)) for _ in range(rank)]
        chunks = [pick.randint(1, longest // 2) for _ in range(rank)]
        detail: dict[str, Any] = {"shape": shape, "chunks": chunks, "attributes": {}}
        dtypes = [it for it in self.dtypes if rank or it != "vbytes"]  # Zarr cannot
        model = ArrayModel(pick.choice(dtypes), tuple(shape), tuple(chunks))
        if pick.random() < 0.3:
            model.dtype = pick.choice(_PLAIN)
            model.item_bytes = int(model.dtype[-1])
            detail["plain"] = True
        elif rank and pick.random() < 0.25:
            model.chunks = tuple(size * pick.randint(1, 3) for size in chunks)
            detail["shards"] = list(model.chunks)
        if model.dtype in FILLS and pick.random() < 0.5:
            detail["filled"] = True
        if pick.random() < 0.5:
            names = (None, "x", "y", "time", "größe", "")
            detail["dimension_names"] = [pick.choice(names) for _ in shape]
        detail["dtype"] = model.dtype
        detail["attributes"] = self._attributes()
        self._drop(path)
        self.arrays[path] = model
        return model, detail

    def new_group(self) -> list[Edit]:
        """Create a group, and the groups above it."""
        path = self._free_path()
        if path is None:
            return []
        self._add_parents(path)
        self.groups.add(path)
        return [Edit("group", path, {"attributes": self._attributes()})]

    def new_array(self) -> list[Edit]:
        """Create an array with some chunks, and the groups above it."""
        path = self._free_path()
        if path is None or self._above_array(path):
            return []
        self._add_parents(path)
        _, detail = self._new_array(path)
        return [Edit("array", path, detail), *self._fill(path)]

    def new_orphan(self) -> list[Edit]:
        """Create an array without the groups above it."""
        path = f"{self.random.choice(_NAMES)}/lost/{self.random.choice(_NAMES)}"
        if path in self.groups or path in self.arrays or self._below_array(path):
            return []
        _, detail = self._new_array(path)
        return [Edit("orphan", path, detail), *self._fill(path)]

    def recreate(self) -> list[Edit]:
        """Put a new array where a node is."""
        nodes = sorted(self.groups - {""}) + sorted(self.arrays)
        if not nodes:
            return []
        path = self.random.choice(nodes)
        if self._above_array(path):
            return []
        self._add_parents(path)
        _, detail = self._new_array(path)
        return [Edit("array", path, {**detail, "overwrite": True}), *self._fill(path)]

    def _array(self) -> tuple[str, ArrayModel] | None:
        return self.random.choice(sorted(self.arrays.items())) if self.arrays else None

    def _fill(self, path: str) -> list[Edit]:
        return self._write(path, self.arrays[path]) if self.random.random() < 0.8 else []

    def _write(self, path: str, model: ArrayModel) -> list[Edit]:
        if 0 in model.shape:
            return []
        start = [self.random.randrange(size) for size in model.shape]
        stop = [
            self.random.randint(a + 1, size) for a, size in zip(start, model.shape, strict=True)
        ]
        if self.random.random() < 0.3:
            start, stop = [0] * len(start), list(model.shape)
        seed = None if self.random.random() < 0.15 else self.random.getrandbits(32)
        return [write(path, start, stop, seed, model.dtype)]

    def write(self) -> list[Edit]:
        """Write a region of an array: arbitrary values, or its fill value."""
        found = self._array()
        return [] if found is None else self._write(*found)

    def resize(self) -> list[Edit]:
        """Make an array larger or smaller; sometimes smaller and then larger again."""
        found = self._array()
        if found is None or not found[1].shape:
            return []
        path, model = found
        old = model.shape
        smaller = tuple(self.random.randint(0, size) for size in old)
        larger = tuple(size + self.random.randint(0, 4) for size in old)
        mixed = tuple(self.random.choice(pair) for pair in zip(smaller, larger, strict=True))
        shapes = self.random.choice(([smaller], [larger], [mixed], [smaller, larger]))
        model.shape = shapes[-1]
        return [Edit("resize", path, {"shape": list(shape)}) for shape in shapes]

    def attributes(self) -> list[Edit]:
        """Change the attributes of a node."""
        nodes = sorted(self.groups) + sorted(self.arrays)
        if not nodes:
            return []
        return [Edit("attributes", self.random.choice(nodes), {"attributes": self._attributes()})]

    def delete_chunk(self) -> list[Edit]:
        """Delete a chunk that exists or could."""
        found = self._array()
        if found is None or 0 in found[1].shape:
            return []
        coords = [self.random.randrange(size) for size in found[1].grid]
        return [Edit("delete_chunk", found[0], {"coords": coords})]

    def delete_node(self) -> list[Edit]:
        """Delete an array, or a group and all below it."""
        nodes = sorted(self.groups - {""}) + sorted(self.arrays)
        if self.random.random() < 0.05 and "" in self.groups:
            nodes = [""]
        if not nodes:
            return []
        path = self.random.choice(nodes)
        self._drop(path)
        return [Edit("delete_node", path)]

    def virtual_chunks(self) -> list[Edit]:
        """Make chunks of an uncompressed array refer to a source file."""
        candidates = [
            (path, model)
            for path, model in sorted(self.arrays.items())
            if model.item_bytes is not None and 0 not in model.shape
        ]
        if not (self.virtual and candidates):
            return []
        path, model = self.random.choice(candidates)
        assert model.item_bytes is not None
        length = prod(model.chunks) * model.item_bytes
        if length > SOURCE_BYTES:
            return []
        count = self.random.randint(1, 4)
        chosen = {tuple(self.random.randrange(size) for size in model.grid) for _ in range(count)}
        detail = {
            "coords": [list(coords) for coords in sorted(chosen)],
            "file": self.random.choice(SOURCE_FILES),
            "offsets": [self.random.randint(0, SOURCE_BYTES - length) for _ in chosen],
            "length": length,
        }
        return [Edit("virtual", path, detail)]


_ACTIONS: Final[tuple[tuple[Callable[[Hierarchy], list[Edit]], int], ...]] = (
    (Hierarchy.new_group, 8),
    (Hierarchy.new_array, 16),
    (Hierarchy.new_orphan, 2),
    (Hierarchy.recreate, 3),
    (Hierarchy.write, 16),
    (Hierarchy.resize, 8),
    (Hierarchy.attributes, 6),
    (Hierarchy.delete_chunk, 6),
    (Hierarchy.delete_node, 3),
    (Hierarchy.virtual_chunks, 8),
)


def samples(dtypes: tuple[str, ...] = tuple(DTYPES)) -> list[Edit]:
    """Return edits that make one array of each data type, of each rank, empty ones, and more."""
    made = [group("types"), group("empty", why=None)]
    for index, dtype in enumerate(dtypes):
        path = f"types/t{index}"
        made.append(array(path, [7], [3], dtype, filled=dtype in FILLS))
        made.append(write(path, [1], [6], index, dtype))
    for rank in range(6):
        path, ends = f"ranks/r{rank}", [3] * rank
        made += [array(path, ends, [2] * rank), write(path, [0] * rank, ends, rank)]
    made.append(array("ranks/nothing", [0, 3], [1, 2]))
    made.append(array("ranks/unwritten", [4, 4], [1, 2]))
    for size in (511, 512, 513):  # around the threshold for inline chunks
        path = f"sizes/s{size}"
        made.append(array(path, [size], [size], "u1", plain=True))
        made.append(write(path, [0], [size], size, "u1"))
    return made
