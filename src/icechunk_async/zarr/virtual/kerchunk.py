"""Write kerchunk's references into a session, in columns."""

from __future__ import annotations

import json
import re
from array import array
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

import anyio.to_thread
import numpy as np

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidInputError, NodeExistsError
from icechunk_async.format.manifest.locations import Strings
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.format.zarr_document import parse_document
from icechunk_async.zarr.virtual.references import column_refs
from icechunk_async.zarr.virtual.zarr2 import array_document, group_document

if TYPE_CHECKING:
    from datetime import datetime

    import numpy.typing as npt

    from icechunk_async.engine.tree.workspace import Workspace
    from icechunk_async.format.manifest.refs import ChunkRefs
    from icechunk_async.format.snapshot import ArrayData
    from icechunk_async.zarr.store import Hierarchy

__all__ = [
    "ArrayReferences",
    "NodeReferences",
    "References",
    "location_of",
    "read_references",
    "write_kerchunk_references",
]


_META: Final = (".zgroup", ".zarray", ".zattrs", ".zmetadata")
_TEMPLATE: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LITERAL: Final = "/!$&'()*+,;=:@~"
"""Characters that are literal in the path of a URL, besides letters, digits and ``-._``."""


@dataclass(slots=True)
class ArrayReferences:
    """Where the chunks of one array are, a row a chunk."""

    rank: int
    separator: str
    coords: array[int] = field(default_factory=lambda: array("Q"))
    # Arrays of machine numbers: files of references have millions of rows, and lists of integers
    # take several times as much.
    codes: array[int] = field(default_factory=lambda: array("I"))
    """Index into ``References.urls``."""
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    whole: list[int] = field(default_factory=list[int])
    """Rows that are whole objects, of unknown length."""
    inline: dict[tuple[int, ...], bytes] = field(default_factory=dict[tuple[int, ...], bytes])

    def coordinates(self) -> npt.NDArray[np.uint64]:
        """Return the coordinates, ``(n, rank)``."""
        count = len(self.codes)
        return (
            np.frombuffer(self.coords, np.uint64).reshape(count, self.rank)
            if count
            else (np.empty((0, self.rank), np.uint64))
        )


@dataclass(frozen=True, slots=True)
class NodeReferences:
    """A group or an array."""

    path: str
    document: bytes = field(repr=False)
    array: ArrayData | None
    chunks: ArrayReferences | None


@dataclass(frozen=True, slots=True)
class References:
    """The hierarchy that a document of references describes."""

    nodes: list[NodeReferences]
    """Ascending by path."""
    urls: tuple[str, ...]


def read_references(document: object, *, path: str) -> References:
    """Read a document of references, version 0 or 1, and put its hierarchy below ``path``.

    Args:
        document: a mapping, or its JSON.
        path: absolute.

    Raises:
        InvalidInputError: it cannot be understood, or names chunks of arrays that are not in it.
        InvalidMetadataError: an array cannot be expressed in Zarr format 3.
    """
    try:
        return _read(document, path)
    except InvalidInputError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInputError(f"The references cannot be understood: {error!r:.200}.") from error


def _read(document: object, path: str) -> References:
    refs, templates = _open(document)
    metadata: dict[str, dict[str, Any]] = {}
    for key in refs:
        node, _, name = key.rpartition("/")
        if name in _META:
            metadata.setdefault(node, {})[name] = _json(key, refs[key])
    arrays: dict[str, ArrayReferences] = {}
    nodes: list[NodeReferences] = []
    for node, parts in sorted(metadata.items()):
        if ".zarray" not in parts and ".zgroup" not in parts:
            continue
        place = check_path(f"{path}/{node}")
        attributes = parts.get(".zattrs", {})
        if ".zarray" not in parts:
            nodes.append(NodeReferences(place, group_document(attributes), None, None))
            continue
        old = parts[".zarray"]
        text = array_document(place, old, attributes)
        chunks = ArrayReferences(len(old["shape"]), old.get("dimension_separator") or ".")
        arrays[node] = chunks
        nodes.append(NodeReferences(place, text, parse_document(text, place).array, chunks))
    urls = _fill(refs, arrays, templates)
    if not nodes:
        raise InvalidInputError(
            "The references name no group and no array: there is neither '.zgroup' nor '.zarray' "
            "among their keys. Give those that kerchunk made."
        )
    nodes.sort(key=lambda it: it.path)
    _check_grids(nodes)
    return References(nodes, urls)


def _open(document: object) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return the references, and the templates that their URLs use."""
    if isinstance(document, str | bytes | bytearray):
        try:
            document = json.loads(document)
        except ValueError as error:
            raise InvalidInputError(
                f"The references are no JSON: {error}. Give a mapping or the text of a file, not "
                "its name."
            ) from error
    if not isinstance(document, Mapping):
        raise InvalidInputError(
            f"The references are a {type(document).__name__}. Give a mapping, or its JSON, such as "
            "the text of a file."
        )
    whole = cast("Mapping[str, Any]", document)
    if not isinstance(whole.get("refs"), Mapping):
        return whole, {}
    # Expanding it runs templates of Jinja, and so code of the file's author.
    if whole.get("gen"):
        raise InvalidInputError(
            "The references have a 'gen' section, which generates references when it is read. "
            "Expand it first, and give the result."
        )
    return whole["refs"], whole.get("templates") or {}


def _json(key: str, value: object) -> dict[str, Any]:
    found: object = value
    if isinstance(value, str | bytes):
        try:
            found = json.loads(_inline(value))
        except ValueError as error:
            raise InvalidInputError(f"{key!r} in the references is no JSON: {error}.") from error
    if not isinstance(found, Mapping):
        raise InvalidInputError(
            f"{key!r} in the references is no JSON object. Metadata must stand in the references "
            "themselves."
        )
    return dict(cast("Mapping[str, Any]", found))


def _inline(value: str | bytes) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    return b64decode(value[7:]) if value.startswith(b"base64:") else value


def _fill(
    refs: Mapping[str, Any], arrays: Mapping[str, ArrayReferences], templates: Mapping[str, str]
) -> tuple[str, ...]:
    """Sort references into the columns of their arrays; return the distinct URLs."""
    codes: dict[str, int] = {}
    for key, value in refs.items():
        node, _, name = key.rpartition("/")
        if name in _META:
            continue
        # With slashes between coordinates, what is before the last one need not be the array, and
        # may be another array by chance.
        found = arrays.get(node)
        if found is None or found.separator == "/":
            node, name = _array_of(key, arrays)
            found = arrays[node]
        coords = _coordinates(key, name, found)
        match value:
            case [url, offset, length]:
                found.offsets.append(_number(key, offset))
                found.lengths.append(_number(key, length))
            case [url]:
                found.whole.append(len(found.codes))
                found.offsets.append(0)
                found.lengths.append(0)
            case str() | bytes():
                found.inline[coords] = _inline(value)
                continue
            case _:
                raise InvalidInputError(
                    f"{key!r} in the references is neither text nor [url] nor [url, offset, "
                    "length]."
                )
        found.coords.extend(coords)
        found.codes.append(codes.setdefault(url, len(codes)))
    return tuple(location_of(url, templates) for url in codes)


def _array_of(key: str, arrays: Mapping[str, ArrayReferences]) -> tuple[str, str]:
    """Return the array that a key belongs to, and what follows it."""
    node, _, name = key.rpartition("/")
    while node not in arrays or (arrays[node].separator != "/" and "/" in name):
        if not node:
            raise InvalidInputError(
                f"{key!r} in the references belongs to no array: no '.zarray' is above it."
            )
        node, _, last = node.rpartition("/")
        name = f"{last}/{name}"
    return node, name


def _coordinates(key: str, name: str, found: ArrayReferences) -> tuple[int, ...]:
    # Format 2 calls the only chunk of an array without axes 0.
    if found.rank == 0 and name == "0":
        return ()
    try:
        coords = tuple(map(int, name.split(found.separator)))
    except ValueError:
        coords = (-1,)
    if len(coords) != found.rank or min(coords) < 0:
        raise InvalidInputError(
            f"{key!r} in the references names no chunk of an array of {found.rank} axes."
        )
    return coords


def _number(key: str, value: object) -> int:
    # Below 2**62, so that the end of a chunk fits 64 bits with a sign.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise InvalidInputError(
            f"{key!r} in the references has {value!r:.50}, which is no offset or length."
        )
    return value


def location_of(url: object, templates: Mapping[str, str]) -> str:
    """Return a location for a URL of fsspec, whose paths are literal but for web servers."""
    if not isinstance(url, str) or not url:
        raise InvalidInputError(f"{url!r:.200} in the references is no URL.")
    whole = _TEMPLATE.sub(lambda match: templates.get(match[1], match[0]), url)
    if "{{" in whole:
        raise InvalidInputError(
            f"{url[:200]!r} in the references uses a template that is not given, or more than a "
            "name. Expand the templates first."
        )
    match = _SCHEME.match(whole)
    if match is None or match[0] == "file://":
        path = whole if match is None else whole[len(match[0]) :]
        if not PurePath(path).is_absolute():
            raise InvalidInputError(
                f"{whole[:200]!r} in the references is relative. Give absolute paths or URLs."
            )
        return f"file://{quote(path)}"
    if match[0] in ("http://", "https://", "vcc://"):
        return whole
    # fsspec takes keys literally, and locations in a repository are URLs.
    bucket, slash, key = whole[match.end() :].partition("/")
    return f"{match[0]}{bucket}{slash}{quote(key, safe=_LITERAL)}"


def _check_grids(nodes: list[NodeReferences]) -> None:
    """Raise if chunks are outside of their arrays, before anything is stored."""
    for node in nodes:
        if node.chunks is None or node.array is None:
            continue
        grid = np.array(node.array.grid, np.uint64)
        inline = np.array(list(node.chunks.inline), np.uint64).reshape(-1, grid.size or 1)
        for some in (node.chunks.coordinates(), inline) if grid.size else ():
            outside = (some >= grid).any(axis=1)
            if outside.any():
                first = some[np.argmax(outside)].tolist()
                raise InvalidInputError(
                    f"The references have a chunk {first} of {node.path!r}, whose grid has "
                    f"{grid.tolist()} chunks."
                )


_AT_ONCE: Final = 32


async def write_kerchunk_references(
    session: Hierarchy,
    references: Mapping[str, Any] | str | bytes,
    *,
    path: str = "/",
    checksum: str | datetime | None = None,
    validate_containers: bool = True,
) -> int:
    """Write a hierarchy that kerchunk described into a session; chunks stay where they are.

    Groups are made or get other attributes; arrays take the place of arrays of the same path.
    Metadata is turned from Zarr format 2 to 3, and inline data is copied. Templates that are
    plain names are filled in.

    Args:
        session: a writable session, or a fork of one.
        references: version 0 or 1, as a mapping or JSON; for each chunk text, ``[url]`` or
            ``[url, offset, length]``. URLs are those of fsspec: for files absolute paths.
        path: group below which the hierarchy is put; made where it is missing.
        checksum: guards all sources: a time after which none of them was modified, or the ETag
            of the only one.
        validate_containers: refuse locations that no container covers.

    Returns:
        The number of virtual chunks written.

    Raises: each before anything was changed.
        InvalidInputError: the references cannot be understood.
        InvalidMetadataError: Zarr format 3 does not have an array's codec or data type.
        VirtualContainerError: no container covers a location.
        VirtualChunkError, StorageError: the length of a ``[url]`` could not be read, which needs
            access to its container.
        NodeExistsError: a group exists in place of an array, or the other way round.

    Cancellation: some nodes may have been written.

    Cost: a request for each distinct object in a ``[url]``, and one for each inline chunk above
    the inline threshold. No object is made per reference, beyond those in ``references``.
    """
    workspace = session.workspace
    # Early, since reading references takes long; and once more under the lock, as the session may
    # be committed meanwhile.
    workspace.check_writable()
    root = check_path(path)
    # On a thread: with many entries parsing would hold up the event loop.
    found = await anyio.to_thread.run_sync(partial(read_references, references, path=root))
    columns = await _columns(
        workspace, found, checksum=checksum, validate_containers=validate_containers
    )
    with workspace.lock:  # no await: readers of this session see all or nothing, but inline chunks
        workspace.check_writable()
        _check_places(workspace, found, root)
        for group in _groups(found, root):
            workspace.set_node(group, group_document({}), None, if_absent=True)
        for node in found.nodes:
            if node.chunks is not None:
                # With its chunks: the new array may have none in their places.
                workspace.delete_node(node.path)
            workspace.set_node(node.path, node.document, node.array)
            refs = columns.get(node.path)
            if refs is not None:
                workspace.set_refs(node.path, refs)
    inline = [
        (node.path, coords, data)
        for node in found.nodes
        if node.chunks is not None
        for coords, data in node.chunks.inline.items()
    ]
    await bounded_map(lambda it: workspace.write_chunk(*it), inline, limit=_AT_ONCE)
    return sum(map(len, columns.values()))


async def _columns(
    workspace: Workspace,
    found: References,
    *,
    checksum: str | datetime | None,
    validate_containers: bool,
) -> dict[str, ChunkRefs]:
    """Return the references of each array that has any."""
    locations = workspace.virtual.locations
    whole: set[int] = set()
    for node in found.nodes:
        if node.chunks is not None:
            codes = node.chunks.codes
            whole.update(codes[row] for row in node.chunks.whole)
    for code in whole:  # ask nobody whom the repository does not know
        locations.normalize(found.urls[code])
    # One request an object, not a reference.
    order = sorted(whole)
    sizes = dict(
        zip(
            order,
            await bounded_map(
                lambda code: workspace.virtual.size(found.urls[code]), order, limit=_AT_ONCE
            ),
            strict=True,
        )
    )
    columns: dict[str, ChunkRefs] = {}
    for node in found.nodes:
        chunks = node.chunks
        if chunks is None or not chunks.codes:
            continue
        for row in chunks.whole:
            chunks.lengths[row] = sizes[chunks.codes[row]]
        lengths = np.frombuffer(chunks.lengths, np.uint64)
        # Chunks of no bytes are refused by the official engine, too; no codec makes them.
        if not lengths.all():
            row = int(np.argmin(lengths != 0))
            raise InvalidInputError(
                f"The references have a chunk of {node.path!r} without any bytes, in "
                f"{found.urls[chunks.codes[row]]!r}."
            )
        columns[node.path] = column_refs(
            locations,
            chunks.coordinates().astype(np.uint32),
            Strings(found.urls),
            np.frombuffer(chunks.codes, np.uint32),
            offsets=np.frombuffer(chunks.offsets, np.uint64),
            lengths=lengths,
            checksum=checksum,
            validate_containers=validate_containers,
        )
    return columns


def _groups(found: References, root: str) -> list[str]:
    """Return the groups that must be there and are not among the references, upper ones first."""
    groups = {root, *ancestors(root)}
    for node in found.nodes:
        groups.update(ancestors(node.path))
    return sorted(groups - {node.path for node in found.nodes})


def _check_places(workspace: Workspace, found: References, root: str) -> None:
    """Raise NodeExistsError if a group is in place of an array, or the other way round."""
    new = {node.path: node.chunks is not None for node in found.nodes}
    for path in (*_groups(found, root), *new):
        node = workspace.node(path)
        is_array = new.get(path, False)
        if node is not None and (node.array is not None) != is_array:
            there = "an array" if node.array is not None else "a group"
            raise NodeExistsError(
                f"The references have {'an array' if is_array else 'a group'} {path!r}, where "
                f"there is {there} already. Delete that, or give another path. Nothing was "
                "changed.",
                path=path,
            )
