"""A writer of first drafts, straight from the document; it imports nothing of the library.

It writes what the specification leaves to a writer in other ways than the library does: names of
files, ids of snapshots, paths without a slash at the beginning, manifests that serve several arrays
in no order, attributes in files, packed chunks.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

type Document = dict[str, Any]

U16 = pa.uint16()
ARRAY_METADATA = pa.struct(
    [
        pa.field("shape", pa.list_(U16), nullable=False),
        pa.field("data_type", pa.string(), nullable=False),
        pa.field("fill_value", pa.binary()),
        pa.field("dimension_names", pa.list_(pa.string())),
        pa.field(
            "chunk_grid",
            pa.struct(
                [
                    pa.field("name", pa.string(), nullable=False),
                    pa.field(
                        "configuration",
                        pa.struct([pa.field("chunk_shape", pa.list_(U16), nullable=False)]),
                        nullable=False,
                    ),
                ]
            ),
            nullable=False,
        ),
        pa.field(
            "chunk_key_encoding",
            pa.struct(
                [
                    pa.field("name", pa.string(), nullable=False),
                    pa.field(
                        "configuration",
                        pa.struct([pa.field("separator", pa.string(), nullable=False)]),
                        nullable=False,
                    ),
                ]
            ),
            nullable=False,
        ),
        pa.field(
            "codecs",
            pa.list_(
                pa.struct(
                    [
                        pa.field("name", pa.string(), nullable=False),
                        pa.field("configuration", pa.binary()),
                    ]
                )
            ),
        ),
    ]
)
STRUCTURE = pa.schema(
    [
        pa.field("id", U16, nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("array_metadata", ARRAY_METADATA),
        pa.field("inline_attrs", pa.binary()),
        pa.field(
            "attrs_reference",
            pa.struct(
                [
                    pa.field("attrs_file", pa.string(), nullable=False),
                    pa.field("row", U16, nullable=False),
                    pa.field("flags", U16),
                ]
            ),
        ),
        pa.field(
            "inventories",
            pa.list_(
                pa.struct(
                    [
                        pa.field("inventory_file", pa.string(), nullable=False),
                        pa.field("row", U16, nullable=False),
                        pa.field("extent", pa.list_(pa.list_(U16, 2)), nullable=False),
                        pa.field("flags", U16),
                    ]
                )
            ),
        ),
    ]
)
"""The Arrow schema in the document, "Structure Files"."""
MANIFEST = pa.schema(
    [
        pa.field("id", pa.uint32(), nullable=False),
        pa.field("array_id", pa.uint32(), nullable=False),
        pa.field("coord", pa.binary(), nullable=False),
        pa.field("inline_data", pa.binary()),
        pa.field("chunk_file", pa.string()),
        pa.field("offset", pa.uint64()),
        pa.field("length", pa.uint32(), nullable=False),
    ]
)
"""The Arrow schema in the document, "Chunk Manifest Files"."""


def coord(*chunk: int) -> bytes:
    """Return coordinates, of which each is at most 67823, as the reference page says."""
    raw = b""
    for it in chunk:
        if it <= 240:
            raw += bytes([it])
        elif it <= 2287:
            raw += bytes([241 + (it - 240) // 256, (it - 240) % 256])
        else:
            raw += bytes([249, (it - 2288) // 256, (it - 2288) % 256])
    return raw


def parquet(table: pa.Table, **options: Any) -> bytes:
    """Return the file of a table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


class DraftWriter:
    """Collects the objects of a repository."""

    def __init__(self, seed: int = 1, root: str = "") -> None:
        """Begin without any; ``root`` is where all but the state file are."""
        self.objects: dict[str, bytes] = {}
        self.snapshots: list[Document] = []
        self.refs: dict[str, Document] = {}
        self._root = root
        self._random = random.Random(seed)
        self._names = 0

    def name(self, beginning: str) -> str:
        """Return the name of a new file."""
        self._names += 1
        return f"{beginning}-{self._names}"

    def chunk(self, data: bytes) -> str:
        """Write a chunk file; return its name."""
        name = self.name("some chunks") + ".nc"
        self.objects[f"{self._root}c/{name}"] = data
        return name

    def manifest(self, rows: list[Document], **options: Any) -> str:
        """Write a manifest; return its name."""
        name = self.name("inventory") + ".pq"
        whole = [{"id": at, **row} for at, row in enumerate(rows)]
        table = pa.Table.from_pylist(whole, schema=MANIFEST)
        self.objects[f"{self._root}i/{name}"] = parquet(table, **options)
        return name

    def attributes(self, rows: list[Document]) -> str:
        """Write a file of attributes; return its name."""
        name = self.name("attributes")
        table = pa.table({"attrs": [json.dumps(row).encode() for row in rows]})
        self.objects[f"{self._root}a/{name}"] = parquet(table, compression="none")
        return name

    def snapshot(
        self, nodes: list[Document], parent: str | None, properties: Document | None = None
    ) -> str:
        """Write a structure file and note a snapshot; return its id, which is a UUID."""
        raw = self._random.randbytes(16).hex()
        uid = "-".join([raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]])
        name = self.name("structure") + ".parquet"
        table = pa.Table.from_pylist(nodes, schema=STRUCTURE)
        self.objects[f"{self._root}s/{name}"] = parquet(table)
        document: Document = {
            "snapshot-id": uid,
            "timestamp-ms": 1_720_000_000_000 + 60_000 * len(self.snapshots),
            "structure-file": name,
        }
        if parent is not None:
            document["parent-snapshot-id"] = parent
        if properties is not None:
            document["properties"] = properties
        self.snapshots.append(document)
        return uid

    def ref(self, name: str, kind: str, uid: str) -> None:
        """Note a branch or a tag."""
        self.refs[name] = {"name": name, "snapshot-id": uid, "type": kind}

    def state(self, **more: Any) -> None:
        """Write the state file."""
        document: Document = {
            "id": "9b2f6a1e-first-draft",
            "generation": len(self.snapshots),
            "snapshots": self.snapshots,
            **({"refs": self.refs} if self.refs else {}),
            **more,
        }
        self.objects["state.json"] = json.dumps(document, indent=1).encode()


def array(
    number: int,
    path: str,
    metadata: Document,
    inventories: list[Document] | None,
    **attributes: Any,
) -> Document:
    """Return an array."""
    return {
        "id": number,
        "type": "array",
        "path": path,
        "array_metadata": metadata,
        "inventories": inventories,
        **attributes,
    }


def group(number: int, path: str, **attributes: Any) -> Document:
    """Return a group; ``inline_attrs`` or ``attrs_reference``."""
    return {"id": number, "type": "group", "path": path, **attributes}


def metadata(
    shape: list[int], chunks: list[int], data_type: str, fill: bytes | None, **more: Any
) -> Document:
    """Return the metadata of an array; bytes are little-endian and not compressed."""
    return {
        "shape": shape,
        "data_type": data_type,
        "fill_value": fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": b'{"endian": "little"}'}],
        **more,
    }


def inventory(name: str, *extent: list[int]) -> Document:
    """Return a manifest of an array."""
    return {"inventory_file": name, "row": 3, "extent": list(extent), "flags": 0}


def row(number: int, chunk: tuple[int, ...], **where: Any) -> Document:
    """Return a row of a manifest: ``inline_data``, or ``chunk_file``, ``offset`` and ``length``."""
    if "inline_data" in where:
        where["length"] = len(where["inline_data"])
    return {"array_id": number, "coord": coord(*chunk), **where}
