"""Manifest files of the alpha (schema ``Manifest``): chunk references by the names of chunks.

The specification leaves the names open. Here they are the number of the array and the coordinates,
joined by slashes: ``7/0/12`` is chunk (0, 12) of array 7, ``7`` the one chunk of an array without
axes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.alpha.parts import MAX_U32, read_bytes, read_id
from icechunk_async.format.alpha.snapshots import node_number
from icechunk_async.format.ids import ChunkId, NodeId
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.manifest import MAX_RANK
from icechunk_async.format.manifest.chunk import InlineChunk, NativeChunk, VirtualChunk
from icechunk_async.format.manifest.reading import Manifest
from icechunk_async.format.manifest.refs import ChunkRefs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from icechunk_async.format.ids import ManifestId
    from icechunk_async.format.json.reading import Part
    from icechunk_async.format.manifest.chunk import ChunkRef, Coordinates

__all__ = ["decode_manifest", "encode_manifest"]

# No leading zeros: "07" and "7" would be one chunk of two names.
_NAME: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})(?:/(?:0|[1-9][0-9]{0,9}))*", re.ASCII)
_MAX_PLACE: Final = 1 << 62
_NUMBERS: Final = [str(number) for number in range(256)]


def decode_manifest(manifest_id: ManifestId, data: bytes | memoryview) -> Manifest:
    """Read a manifest.

    Args:
        manifest_id: the id that it is stored under, which its file does not have.
        data: its file.

    Raises:
        FormatError: it is damaged.

    Cost: some microseconds for each reference; memory in proportion to the file.
    """
    chunks = parse_json(data, f"manifest, {manifest_id},").part("chunks")
    by_array: dict[tuple[int, int], dict[Coordinates, ChunkRef | None]] = {}
    for name, value in chunks.members.items():
        if not _NAME.fullmatch(name):
            raise chunks.fault(f"has the name {name!r:.60}, which names no chunk")
        number, *coords = map(int, name.split("/"))
        # Coordinates are kept in 32 bits, as in the later formats.
        if max(number, *coords, 0) >= MAX_U32 or len(coords) > MAX_RANK:
            raise chunks.fault(f"has the name {name!r:.60}, which is out of range")
        refs = by_array.setdefault((number, len(coords)), {})
        refs[tuple(coords)] = _read(chunks.as_part(value, f"A manifest, at {name},"))
    arrays: dict[NodeId, ChunkRefs] = {}
    strays: dict[tuple[NodeId, int], ChunkRefs] = {}
    # The commonest rank of an array first, as in `manifest.reading`: others are strays.
    ordered = sorted(by_array.items(), key=lambda it: (it[0][0], -len(it[1]), it[0][1]))
    for (number, rank), refs in ordered:
        node_id = NodeId(number.to_bytes(NodeId.size_bytes))
        # Names of a JSON object have no order, and parsers keep that of the file.
        columns = ChunkRefs.from_mapping(rank, refs).sort()
        if arrays.setdefault(node_id, columns) is not columns:
            strays[node_id, rank] = columns
    return Manifest(manifest_id, arrays, strays)


def _read(part: Part) -> ChunkRef:
    # With two places it would depend on the reader which bytes a chunk has.
    if len(part.members) != 1:
        raise part.fault(f"has {len(part.members)} references in place of one")
    ((kind, value),) = part.members.items()
    match kind:
        case "Inline":
            return InlineChunk(read_bytes(part, value))
        case "Virtual":
            it = part.part("Virtual")
            return VirtualChunk(it.text("location"), *_place(it))
        case "Ref":
            it = part.part("Ref")
            return NativeChunk(ChunkId(read_id(it, "id")), *_place(it))
        case _:
            raise part.fault(f"has a reference of the unknown kind {kind!r:.60}")


def _place(part: Part) -> tuple[int, int]:
    """Return offset and length."""
    return part.natural("offset", _MAX_PLACE), part.natural("length", _MAX_PLACE)


def encode_manifest(arrays: Mapping[NodeId, ChunkRefs]) -> bytes:
    """Return the file of a manifest.

    Args:
        arrays: references of each array, sorted by coordinates, without deletions or checksums of
            virtual chunks.

    Raises:
        InvalidInputError: an array's id is no number.

    Cost: some microseconds for each reference.
    """
    entries: list[str] = []
    for node_id, refs in sorted(arrays.items()):
        number = node_number(node_id)
        if number is None:
            raise InvalidInputError(f"The array {node_id} has an id that is no number.")
        entries += _entries(number, refs)
    return b"".join([b'{"chunks":{', ",".join(entries).encode(), b"}}"])


def _entries(number: int, refs: ChunkRefs) -> Iterator[str]:
    for row, coords in enumerate(refs.coords.tolist()):
        name = "/".join(map(str, (number, *coords)))
        yield f'"{name}":{_write(refs.ref(row))}'


def _write(ref: Any) -> str:
    match ref:
        case NativeChunk(chunk_id, offset, length):
            return f'{{"Ref":{{"id":[{_numbers(chunk_id)}],"offset":{offset},"length":{length}}}}}'
        case InlineChunk(data):
            return f'{{"Inline":[{_numbers(bytes(data))}]}}'
        case VirtualChunk(location, offset, length):
            return (
                f'{{"Virtual":{{"location":{json.dumps(location)},"offset":{offset},'
                f'"length":{length}}}}}'
            )
        case _:
            raise FormatError(f"A manifest of the alpha cannot hold {ref!r:.60}.")


def _numbers(raw: bytes) -> str:
    return ",".join([_NUMBERS[byte] for byte in raw])
