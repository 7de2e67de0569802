"""A writer of alpha repositories, straight from the schemas; it imports nothing of the library.

It writes what the specification leaves to a writer in other ways than the library does: attribute
files, packed chunks, manifests that serve two arrays, arrays with two manifests, extents or none.
"""

from __future__ import annotations

import json
import random
from typing import Any

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

type Document = dict[str, Any]


def base32(raw: bytes) -> str:
    """Return bytes in Crockford base32, zero bits at the end."""
    bits = "".join(f"{byte:08b}" for byte in raw)
    bits += "0" * (-len(bits) % 5)
    return "".join(ALPHABET[int(bits[at : at + 5], 2)] for at in range(0, len(bits), 5))


def sequence(number: int) -> str:
    """Return the name of a branch file."""
    rest = 1099511627775 - number
    text = ""
    while rest:
        text, rest = ALPHABET[rest % 32] + text, rest // 32
    return f"{text:0>8}.json"


class AlphaWriter:
    """Collects the objects of a repository."""

    def __init__(self, seed: int = 1) -> None:
        """Begin without any."""
        self.objects: dict[str, bytes] = {}
        self._random = random.Random(seed)
        self._minutes = 0

    def new_id(self) -> bytes:
        """Return a random id."""
        return self._random.randbytes(16)

    def now(self) -> str:
        """Return the next minute."""
        self._minutes += 1
        return f"2024-10-15T{self._minutes // 60:02}:{self._minutes % 60:02}:00.123456789Z"

    def put(self, key: str, document: Document) -> None:
        """Write a document."""
        self.objects[key] = json.dumps(document, allow_nan=False, indent=1).encode()

    def chunk(self, data: bytes) -> bytes:
        """Write a chunk object; return its id."""
        raw = self.new_id()
        self.objects[f"c/{base32(raw)}"] = data
        return raw

    def manifest(self, chunks: dict[tuple[int, ...], Document]) -> bytes:
        """Write a manifest; keys are the number of an array and coordinates. Return its id."""
        raw = self.new_id()
        named = {"/".join(map(str, name)): payload for name, payload in chunks.items()}
        self.put(f"m/{base32(raw)}", {"chunks": named})
        return raw

    def attributes(self, rows: list[Document]) -> bytes:
        """Write a file of attributes; return its id."""
        raw = self.new_id()
        self.put(f"a/{base32(raw)}", {"attributes": rows})
        return raw

    def snapshot(
        self,
        message: str,
        nodes: list[Document],
        history: list[Document],
        *,
        kept: int = 1000,
        properties: Document | None = None,
    ) -> Document:
        """Write a snapshot on top of ``history``, newest first; return its metadata."""
        raw = self.new_id()
        metadata = {"id": list(raw), "message": message, "written_at": self.now()}
        document = {
            "metadata": metadata,
            "started_at": metadata["written_at"],
            "properties": properties or {},
            "short_term_history": history[:kept],
            "short_term_parents": len(history[:kept]),
            "total_parents": len(history),
            "nodes": {node["path"]: node for node in nodes},
        }
        self.put(f"s/{base32(raw)}", document)
        return metadata

    def branch(self, name: str, number: int, snapshot: Document) -> None:
        """Write a branch file."""
        self._ref(f"r/{name}/{sequence(number)}", snapshot)

    def tag(self, name: str, snapshot: Document) -> None:
        """Write a tag."""
        self._ref(f"r/{name}.json", snapshot)

    def _ref(self, key: str, snapshot: Document) -> None:
        document = {"properties": {}, "snapshot": snapshot["id"], "timestamp": self.now()}
        self.put(key, document)


def group(number: int, path: str, attributes: Document | None = None) -> Document:
    """Return a group; ``attributes`` as the schema has them."""
    return {"id": number, "path": path, "node_data": "Group", "user_attributes": attributes}


def array(
    number: int,
    path: str,
    metadata: Document,
    manifests: list[Document],
    attributes: Document | None = None,
) -> Document:
    """Return an array."""
    node = {"id": number, "path": path, "node_data": {"Array": [metadata, manifests]}}
    if attributes is not None:
        node["user_attributes"] = attributes
    return node


def metadata(
    shape: list[int], chunks: list[int], data_type: Any, fill: Document, **more: Any
) -> Document:
    """Return the metadata of an array; bytes are little-endian and not compressed."""
    return {
        "shape": shape,
        "chunk_shape": chunks,
        "data_type": data_type,
        "fill_value": fill,
        "chunk_key_encoding": "Default",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        **more,
    }


def manifest_ref(raw: bytes, *extents: list[int]) -> Document:
    """Return a manifest of an array."""
    return {"object_id": list(raw), "flags": [], "extents": list(extents)}


def native(raw: bytes, offset: int, length: int) -> Document:
    """Return the reference of a native chunk."""
    return {"Ref": {"id": list(raw), "offset": offset, "length": length}}


def inline(data: bytes) -> Document:
    """Return the reference of an inline chunk."""
    return {"Inline": list(data)}


def virtual(location: str, offset: int, length: int) -> Document:
    """Return the reference of a virtual chunk."""
    return {"Virtual": {"location": location, "offset": offset, "length": length}}
