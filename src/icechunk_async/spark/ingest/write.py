"""Write scanned files to a session: nodes, references in columns, and copied arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zarr

from icechunk_async._runtime.blocking.portal import run
from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import NodeExistsError
from icechunk_async.format.json.reading import parse_json
from icechunk_async.format.manifest.chunk import Kind
from icechunk_async.format.manifest.refs import ChunkRefs
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.format.zarr_document import parse_document
from icechunk_async.spark.ingest.plan import Template, to_units, with_shape
from icechunk_async.spark.ingest.scan import attributes_of, chunk_shape, encode_document, grid
from icechunk_async.spark.shared import workspace_of
from icechunk_async.zarr.documents import array_members
from icechunk_async.zarr.virtual.zarr2 import group_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.spark.ingest.catalog import Catalog, Entry
    from icechunk_async.spark.ingest.plan import Placed, Plan
    from icechunk_async.spark.ingest.scan import Document, Guard, Scanned, ScannedArray
    from icechunk_async.sync import Session

__all__ = [
    "existing_groups",
    "existing_template",
    "has_output",
    "missing_arrays",
    "write_concatenated",
    "write_groups",
]

_AT_ONCE: Final = 32
# Thousands of files may have one time each: with chunks as long as a file, each would be an object
# of a few bytes.
_COPIED_STEPS: Final = 4096
"""Chunk length of copied arrays along the dimension of concatenation."""


def existing_groups(session: Session, catalog: Catalog) -> tuple[Entry, ...]:
    """Return the entries of a catalog whose groups still exist."""
    workspace = workspace_of(session)
    nodes = [(it, workspace.node(check_path(it.group))) for it in catalog.entries]
    return tuple(it for it, node in nodes if node is not None and node.array is None)


def missing_arrays(session: Session, catalog: Catalog, group: str) -> dict[str, str]:
    """Return the files of which an array was deleted since, and the path of one such array.

    Args:
        session: of the present state of the branch.
        catalog: without entries whose groups do not exist.
        group: that of the output.
    """
    workspace = workspace_of(session)

    def first_missing(root: str, paths: Iterable[str]) -> str | None:
        for path in paths:
            place = check_path(f"{root}/{path}")
            node = workspace.node(place)
            if node is None or node.array is None:
                return place
        return None

    if catalog.concat_dim is None:
        found = {it.location: first_missing(it.group, it.arrays or ()) for it in catalog.entries}
    else:
        found = dict.fromkeys(catalog.by_location, first_missing(group, catalog.arrays))
    return {location: place for location, place in found.items() if place is not None}


def has_output(session: Session, catalog: Catalog, group: str) -> bool:
    """Return whether any array to which files were concatenated still exists."""
    nodes = (workspace_of(session).node(check_path(f"{group}/{it}")) for it in catalog.arrays)
    return any(node is not None and node.array is not None for node in nodes)


def existing_template(session: Session, catalog: Catalog, group: str) -> Template | None:
    """Return the arrays to which files were concatenated; None unless all of them still exist.

    Raises:
        FormatError: the metadata document of one is damaged.
    """
    workspace = workspace_of(session)
    documents: dict[str, Document] = {}
    for path in catalog.arrays:
        node = workspace.node(check_path(f"{group}/{path}"))
        if node is None or node.array is None:
            return None
        # By the arrays, not by the catalog: users may have changed attributes, and these stay.
        rank = len(node.array.dimensions)
        documents[path] = array_members(node.user_data, node.path, rank)
    if not documents or catalog.concat_dim is None:
        return None
    return Template(catalog.concat_dim, documents, frozenset(catalog.loaded))


def write_concatenated(
    session: Session,
    plan: Plan,
    catalog: Catalog,
    group: str,
    *,
    fresh: bool,
    guard: Guard,
) -> Mapping[str, Sequence[str]]:
    """Write the files of a plan to the arrays of a group.

    Args:
        session: a writable session.
        plan: the place of each file.
        catalog: the files ingested so far.
        group: absolute path of the group.
        fresh: whether to create the arrays; otherwise existing ones are resized.
        guard: what references record, so that readers notice a changed source.

    Returns:
        The names of the attributes that groups got from the files, by path.

    Raises:
        NodeExistsError: another node is in the place of an array. Nothing was written.
        VirtualContainerError: no container covers a location.
    """
    template = plan.template
    assert template is not None  # there is a file to write
    writing = _Writing(session, guard)
    if fresh:
        writing.clear(group, catalog, template.documents)
    # Arrays without the dimension, and attributes, are those of the first file, and change with it
    # alone.
    first = plan.placed[0].scanned if plan.placed else None
    groups: Mapping[str, Mapping[str, Any]] = {} if first is None else first.groups
    writing.make_groups(group, groups, {} if first is None else catalog.attributes)
    old_total = 0 if fresh else sum(it.count for it in catalog.entries)
    for path in template.documents:
        if template.axis(path) is not None:
            writing.concatenate(group, path, template, plan.placed, old_total=old_total)
        elif first is not None:
            writing.place(group, path, first, first.arrays[path])
    writing.finish()
    if first is None:
        return catalog.attributes
    return {path: sorted(it) for path, it in groups.items()}


def write_groups(session: Session, plan: Plan, guard: Guard) -> None:
    """Write each file of a plan to its group, replacing what was ingested of it before.

    Raises:
        NodeExistsError: a node that was not ingested is in the place of a group. Nothing was
            written.
        VirtualContainerError: no container covers a location.
    """
    writing = _Writing(session, guard)
    changed = [it for it in plan.placed if it.scanned is not None]
    for placed in changed:
        if placed.old is None or placed.old.group != placed.group:
            writing.check_free(placed.group)
    # Delete all before creating any: a new group may lie within a former one.
    for gone in (*plan.removed, *(it.old for it in changed if it.old is not None)):
        writing.workspace.delete_node(check_path(gone.group))
    for placed in changed:
        scanned = placed.scanned
        assert scanned is not None  # by the selection of changed files
        writing.make_groups(placed.group, scanned.groups, {})
        for path, array in scanned.arrays.items():
            writing.place(placed.group, path, scanned, array)
    writing.finish()


class _Writing:
    """Writes to one session; inline and copied chunks are stored at the end."""

    def __init__(self, session: Session, guard: Guard) -> None:
        self._session = session
        self._guard: Guard = guard
        self.workspace = workspace_of(session)
        self._normalize = self.workspace.virtual.locations.normalize
        self._inline: list[tuple[str, Coordinates, bytes]] = []
        self._copied: list[tuple[str, tuple[slice, ...], Any]] = []

    def check_free(self, path: str) -> None:
        """Raise NodeExistsError if a node is in this place."""
        node = self.workspace.node(check_path(path))
        if node is not None:
            raise NodeExistsError(
                f"{path!r} exists and was not ingested. Delete it, or ingest into another group. "
                "Nothing was changed.",
                path=path,
            )

    def clear(self, group: str, catalog: Catalog, paths: Mapping[str, Any]) -> None:
        """Delete the arrays of earlier ingests; refuse if other nodes are in the way."""
        for path in paths:
            # Only what an ingest made is replaced. Checked for all, before the first is deleted.
            if path not in catalog.arrays:
                self.check_free(f"{group}/{path}")
        for path in catalog.arrays:
            self.workspace.delete_node(check_path(f"{group}/{path}"))

    def make_groups(
        self,
        group: str,
        groups: Mapping[str, Mapping[str, Any]],
        given: Mapping[str, Sequence[str]],
    ) -> None:
        """Create missing groups and their ancestors, and set their attributes.

        Attributes `given` by an earlier ingest are removed; others may belong to users, and stay.
        """
        for path in sorted({"", *groups, *given}):
            place = check_path(f"{group}/{path}")
            if path in groups or not path:
                # From the root down, since a node needs its parent.
                for above in (*reversed(ancestors(place)), place):
                    self.workspace.set_node(above, group_document({}), None, if_absent=True)
            old = self._group_attributes(place)
            rest = {name: it for name, it in old.items() if name not in given.get(path, ())}
            if old != (new := {**rest, **groups.get(path, {})}):
                self.workspace.set_node(place, group_document(new), None)

    def _group_attributes(self, path: str) -> dict[str, Any]:
        node = self.workspace.node(path)
        if node is None:
            return {}
        # Of any writer, and what cannot be read must not be replaced.
        document = parse_json(node.user_data, f"metadata document of {path!r}")
        return document.json_object("attributes") if document.has("attributes") else {}

    def place(self, group: str, path: str, scanned: Scanned, array: ScannedArray) -> None:
        """Write an array that comes from a single file."""
        place = check_path(f"{group}/{path}")
        # Chunks of the earlier file may lie beyond those of the new one.
        self.workspace.delete_node(place)
        if array.values is not None:
            self._set_node(place, _copied(array.document, None))
            self._copied.append((place, (), array.values))
            return
        self._set_node(place, array.document)
        if len(array.places):
            refs = scanned.refs(array.places, self._normalize, self._guard)
            self.workspace.set_refs(place, refs.sort())
        self._inline += [(place, coords, data) for coords, data in array.inline.items()]

    def concatenate(
        self, group: str, path: str, template: Template, files: Sequence[Placed], *, old_total: int
    ) -> None:
        """Make an array as long as all files together, and write the changed files to it."""
        place = check_path(f"{group}/{path}")
        axis = template.concatenated()[path]
        total = sum(it.count for it in files)
        document = with_shape(template.documents[path], axis, total)
        document = {**document, "attributes": _common(document)}
        is_copied = path in template.loaded
        if is_copied:
            document = _copied(document, axis)
        self._set_node(place, document)
        parts: list[ChunkRefs] = []
        for file in files:
            if file.scanned is None:
                continue
            array = file.scanned.arrays[path]
            if is_copied:
                where = [slice(None)] * len(array.shape)
                where[axis] = slice(file.start, file.start + file.count)
                self._copied.append((place, tuple(where), to_units(array, document)))
                continue
            first = [0] * len(array.shape)
            # The plan has checked that files begin at chunks.
            first[axis] = file.start // chunk_shape(document)[axis]
            # A changed file may have fewer chunks than it had: its place is emptied first.
            if file.start < old_total:
                parts.append(_deletions(array.document, first, grid(document)))
            parts.append(file.scanned.refs(array.places, self._normalize, self._guard, first))
            for coords, data in array.inline.items():
                at = tuple(a + b for a, b in zip(coords, first, strict=True))
                self._inline.append((place, at, data))
        if any(map(len, parts)):
            # Of references to one chunk the last counts after sorting, so that deletions come
            # before what replaces them.
            self.workspace.set_refs(place, ChunkRefs.concat(parts).sort())

    def finish(self) -> None:
        """Store inline chunks and copied arrays."""
        run(bounded_map(lambda it: self.workspace.write_chunk(*it), self._inline, limit=_AT_ONCE))
        # Last: Zarr writes them by the metadata, which has its final shape by now.
        for path, where, values in self._copied:
            place = path.strip("/")
            array = zarr.open_array(self._session.store, path=place, mode="r+")  # pyright: ignore[reportUnknownMemberType]
            array[where or ...] = values

    def _set_node(self, path: str, document: Document) -> None:
        data = encode_document(document)
        self.workspace.set_node(path, data, parse_document(data, path).array)


def _copied(document: Document, axis: int | None) -> Document:
    """Return the metadata of an array that is copied into the repository."""
    # Zarr has no chunk of length 0, also for an array of that length.
    chunks = [max(1, size) for size in document["shape"]]
    if axis is not None:
        chunks[axis] = _COPIED_STEPS
    kept = {**document, "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}}
    if not isinstance(kept["data_type"], str) or kept["data_type"] in ("string", "bytes"):
        return kept
    return {
        **kept,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 0, "checksum": False}},
        ],
    }


def _common(document: Document) -> dict[str, Any]:
    """Return the attributes of a concatenated array, without those of a single file."""
    return {name: it for name, it in attributes_of(document).items() if name != "grib_messages"}


def _deletions(document: Document, first: Sequence[int], limits: Sequence[int]) -> ChunkRefs:
    """Return deletions of all chunks in the place of a file, within the array."""
    counts = grid(document)
    coords = np.stack(
        np.meshgrid(
            *(np.arange(a, a + n) for a, n in zip(first, counts, strict=True)), indexing="ij"
        ),
        axis=-1,
    ).reshape(-1, len(counts))
    within = np.all(coords < np.array(limits), axis=1)
    return ChunkRefs.build(coords[within].astype(np.uint32), Kind.DELETED)
