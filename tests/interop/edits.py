"""Edits of a Zarr hierarchy as plain data, and applying them to any store.

The same edits on the official engine's store, on ours and on Zarr's own memory store must give
the same hierarchy. Nothing here knows an engine, and the code also runs on Python 3.11 with the
older Zarr that wheel 1.x goes with.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr.api.asynchronous as zarr_async
from zarr.core.array import AsyncArray
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from zarr.abc.store import Store

__all__ = [
    "DTYPES",
    "FILLS",
    "Edit",
    "Sources",
    "apply",
    "array",
    "attributes",
    "contents",
    "delete_chunk",
    "delete_node",
    "dumps",
    "group",
    "loads",
    "read_arrays",
    "resize",
    "values",
    "write",
]

DTYPES: dict[str, Any] = {
    **{
        name: name for name in ("bool", "i1", "<i2", "<i4", ">i4", "<i8", "u1", "<u2", ">u4", "<u8")
    },
    **{name: name for name in ("<f2", "<f4", "<f8", ">f8", "<c8", "<c16", "<U5", "S7", "V6")},
    **{name: name for name in ("<M8[ns]", "<M8[10s]", "<m8[us]")},
    "string": "string",
    "vbytes": "variable_length_bytes",
    "struct": [("a", "<i4"), ("b", "<f8"), ("c", "?")],
}
"""Every kind of data type that Zarr has, by the name that edits use."""

FILLS: dict[str, Any] = {
    "bool": True,
    "i1": -3,
    ">i4": 77,
    "<u8": 2**64 - 1,
    "<f2": float("nan"),
    ">f8": float("-inf"),
    "<c8": complex(1, -2),
    "<U5": "né",
    "string": "unset",
}
"""Fill values other than the default, for the types that get one."""

_SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45)
_WORDS = ["", "a", "köln", "数据", "🧊", "long " * 40, "x\ty", "plain"]


@dataclass(frozen=True)
class Edit:
    """One change of a hierarchy; everything in it is JSON."""

    kind: str
    path: str
    """Without a leading slash; empty for the root."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sources:
    """A directory of files that virtual chunks refer to, and the URL it is known by."""

    directory: Path
    url: str


def group(path: str, **attributes: Any) -> Edit:
    """Return the edit that creates a group."""
    return Edit("group", path, {"attributes": attributes})


def array(
    path: str, shape: Sequence[int], chunks: Sequence[int], dtype: str = "<i4", **detail: Any
) -> Edit:
    """Return the edit that creates an array."""
    base = {"shape": list(shape), "chunks": list(chunks), "dtype": dtype, "attributes": {}}
    return Edit("array", path, {**base, **detail})


def write(
    path: str, start: Sequence[int], stop: Sequence[int], seed: int | None = 0, dtype: str = "<i4"
) -> Edit:
    """Return the edit that writes a region; without a seed, the fill value."""
    detail = {"start": list(start), "stop": list(stop), "seed": seed, "dtype": dtype}
    return Edit("write", path, detail)


def resize(path: str, *shape: int) -> Edit:
    """Return the edit that resizes an array."""
    return Edit("resize", path, {"shape": list(shape)})


def attributes(path: str, **attributes: Any) -> Edit:
    """Return the edit that sets attributes of a node."""
    return Edit("attributes", path, {"attributes": attributes})


def delete_chunk(path: str, *coords: int) -> Edit:
    """Return the edit that deletes a chunk."""
    return Edit("delete_chunk", path, {"coords": list(coords)})


def delete_node(path: str) -> Edit:
    """Return the edit that deletes a node and all below it."""
    return Edit("delete_node", path)


def dumps(edits: Iterable[Edit]) -> str:
    """Return edits as JSON."""
    return json.dumps([asdict(edit) for edit in edits])


def loads(text: str) -> list[Edit]:
    """Read the text that `dumps` made."""
    return [Edit(**item) for item in json.loads(text)]


def values(dtype: str, shape: Sequence[int], seed: int) -> Any:
    """Return an array of arbitrary values; the same seed gives the same ones everywhere."""
    rng = np.random.Generator(np.random.PCG64(seed))
    count = prod(shape)
    raw = rng.bytes(max(1, count))
    if dtype == "string":
        words = [_WORDS[byte % len(_WORDS)] for byte in raw[:count]]
        return np.array(words, np.dtypes.StringDType()).reshape(tuple(shape))
    if dtype == "vbytes":
        column = np.empty(count, object)
        column[:] = [_WORDS[byte % len(_WORDS)].encode() for byte in raw[:count]]
        return column.reshape(tuple(shape))
    if dtype in ("<U5", "S7"):
        words = [_WORDS[byte % 4] for byte in raw[:count]]
        texts = words if dtype == "<U5" else [word.encode()[:7] for word in words]
        return np.array(texts, dtype).reshape(tuple(shape))
    kind = np.dtype(DTYPES[dtype])
    if dtype == "struct":
        columns = np.zeros(count, kind)
        columns["a"], columns["c"] = np.frombuffer(raw, "i1", count), False
        columns["b"] = rng.random(count)
        return columns.reshape(tuple(shape))
    if kind.kind in "fc":
        parts = rng.random((count, 2)) * 200 - 100
        numbers = parts[:, 0] if kind.kind == "f" else parts[:, 0] + 1j * parts[:, 1]
        for place, special in enumerate(_SPECIAL if kind.kind == "f" else _SPECIAL[3:]):
            numbers[place::17] = special
        return numbers.astype(kind).reshape(tuple(shape))
    data = rng.bytes(count * kind.itemsize)
    if dtype == "bool":
        return (np.frombuffer(data, "u1") & 1).astype(bool).reshape(tuple(shape))
    return np.frombuffer(data, kind).reshape(tuple(shape))


async def apply(store: Store, edits: Iterable[Edit], sources: Sources | None = None) -> None:
    """Make the edits, one after the other."""
    for edit in edits:
        await _ACTIONS[edit.kind](store, edit.path, edit.detail, sources)


async def _group(store: Store, path: str, detail: Mapping[str, Any], _: Sources | None) -> None:
    await zarr_async.open_group(
        store=store, path=path, mode="a", zarr_format=3, attributes=dict(detail["attributes"])
    )


async def _array(store: Store, path: str, detail: Mapping[str, Any], _: Sources | None) -> None:
    options: dict[str, Any] = {
        name: detail[name] for name in ("shards", "dimension_names", "attributes") if name in detail
    }
    if detail.get("plain"):
        options |= {"compressors": None, "filters": None}
    if detail.get("filled"):
        options["fill_value"] = FILLS[detail["dtype"]]
    await zarr_async.create_array(
        store=store,
        name=path or None,
        shape=tuple(detail["shape"]),
        chunks=tuple(detail["chunks"]),
        dtype=DTYPES[detail["dtype"]],
        overwrite=detail.get("overwrite", False),
        **options,
    )


async def _orphan(store: Store, path: str, detail: Mapping[str, Any], _: Sources | None) -> None:
    """Create a node without the groups above it."""
    scratch = MemoryStore()
    await (_array if "shape" in detail else _group)(scratch, path, detail, None)
    key = f"{path}/zarr.json"
    document = await scratch.get(key, default_buffer_prototype())
    assert document is not None
    await store.set(key, document)


async def _open(store: Store, path: str) -> AsyncArray[Any]:
    return await zarr_async.open_array(store=store, path=path, mode="r+")


async def _write(store: Store, path: str, detail: Mapping[str, Any], _: Sources | None) -> None:
    array = await _open(store, path)
    start, stop = detail["start"], detail["stop"]
    region = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    if detail["seed"] is None:
        await array.setitem(region or Ellipsis, array.metadata.fill_value)
        return
    shape = [b - a for a, b in zip(start, stop, strict=True)]
    await array.setitem(region or Ellipsis, values(detail["dtype"], shape, detail["seed"]))


async def _resize(store: Store, path: str, detail: Mapping[str, Any], _: Sources | None) -> None:
    await (await _open(store, path)).resize(tuple(detail["shape"]))


async def _attributes(
    store: Store, path: str, detail: Mapping[str, Any], _: Sources | None
) -> None:
    node = await zarr_async.open(store=store, path=path, mode="r+")
    await node.update_attributes(dict(detail["attributes"]))


def _chunk_key(path: str, coords: Sequence[int]) -> str:
    return "/".join([*([path] if path else []), "c", *map(str, coords)])


async def _delete_chunk(
    store: Store, path: str, detail: Mapping[str, Any], _: Sources | None
) -> None:
    await store.delete(_chunk_key(path, detail["coords"]))


async def _delete_node(store: Store, path: str, _d: Mapping[str, Any], _: Sources | None) -> None:
    await (store.delete_dir(path) if path else store.clear())


async def _virtual(
    store: Any, path: str, detail: Mapping[str, Any], sources: Sources | None
) -> None:
    assert sources is not None
    for coords, offset in zip(detail["coords"], detail["offsets"], strict=True):
        key, length = _chunk_key(path, coords), detail["length"]
        if isinstance(store, MemoryStore):
            data = (sources.directory / detail["file"]).read_bytes()[offset : offset + length]
            await store.set(key, default_buffer_prototype().buffer.from_bytes(data))
        else:
            url = f"{sources.url}{detail['file']}"
            store.set_virtual_ref(key, url, offset=offset, length=length)


_ACTIONS = {
    "group": _group,
    "array": _array,
    "orphan": _orphan,
    "write": _write,
    "resize": _resize,
    "attributes": _attributes,
    "delete_chunk": _delete_chunk,
    "delete_node": _delete_node,
    "virtual": _virtual,
}


async def contents(store: Store, *, ghosts: bool = False) -> dict[str, bytes]:
    """Return every key of a store and its value; with ``ghosts`` keys without one are skipped."""
    found: dict[str, bytes] = {}
    async for key in store.list():
        value = await store.get(key, default_buffer_prototype())
        if value is None and ghosts:
            continue
        assert value is not None, key
        assert key not in found, f"{key} is listed twice"
        found[key] = value.to_bytes()
    return found


async def read_arrays(
    store: Store, *, unknown: tuple[type[Exception], ...] = ()
) -> dict[str, tuple[str, tuple[int, ...], str, bytes]]:
    """Return type, shape, attributes and the bytes of the values of every array.

    Arrays that Zarr refuses to open with one of the ``unknown`` errors are left out.
    """
    found: dict[str, tuple[str, tuple[int, ...], str, bytes]] = {}
    keys = [key async for key in store.list()]
    for key in sorted(key for key in keys if key.endswith("zarr.json")):
        path = key.removesuffix("zarr.json").rstrip("/")
        try:
            node = await zarr_async.open(store=store, path=path, mode="r")
        except unknown:
            continue
        if not isinstance(node, AsyncArray):
            continue
        data = np.asarray(await node.getitem(Ellipsis))
        plain = data.dtype.kind not in "TO"
        raw = data.tobytes() if plain else repr(data.tolist()).encode()
        attributes = json.dumps(node.metadata.attributes, sort_keys=True)
        found[path] = (str(data.dtype), data.shape, attributes, raw)
    return found
