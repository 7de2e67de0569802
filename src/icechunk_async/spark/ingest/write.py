"""Putting what was scanned into a session: nodes, references in columns, and what is copied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zarr

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async.errors import NodeExistsError
from icechunk_async.format.manifest.refs import ChunkRefs, Kind
from icechunk_async.format.paths import ancestors, check_path
from icechunk_async.format.zarr_document import parse_document
from icechunk_async.spark.datasets import workspace_of
from icechunk_async.spark.ingest.plan import Template, to_units, with_shape
from icechunk_async.spark.ingest.scan import attributes_of, chunk_shape, encode_document, grid
from icechunk_async.sync.portal import run
from icechunk_async.zarr.virtual.zarr2 import group_document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from icechunk_async.format.manifest.refs import Coordinates
    from icechunk_async.spark.ingest.catalog import Catalog, Entry
    from icechunk_async.spark.ingest.plan import Placed, Plan
    from icechunk_async.spark.ingest.scan import Document, Guard, Scanned, ScannedArray
    from icechunk_async.sync import Session

__all__ = ["existing_groups", "existing_template", "write_concatenated", "write_groups"]

_AT_ONCE: Final = 32
_COPIED_STEPS: Final = 4096
"""Steps of the dimension of concatenation in a chunk of an array that is copied."""


def existing_groups(session: Session, catalog: Catalog) -> tuple[Entry, ...]:
    """Return the files of a catalog whose groups are there still."""
    workspace = workspace_of(session)
    nodes = [(it, workspace.node(check_path(it.group))) for it in catalog.entries]
    return tuple(it for it, node in nodes if node is not None and node.array is None)


def existing_template(session: Session, catalog: Catalog, group: str) -> Template | None:
    """Return what the files of a catalog were concatenated to; None if it is not there whole."""
    workspace = workspace_of(session)
    documents: dict[str, Document] = {}
    for path in catalog.arrays:
        node = workspace.node(check_path(f"{group}/{path}"))
        if node is None or node.array is None:
            return None
        documents[path] = json.loads(node.user_data)
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
    """Put the files of a plan into the arrays of a group.

    Answers the names of the attributes that its groups have of the files.

    Args:
        session: a writable one.
        plan: where each file lies.
        catalog: what was ingested so far.
        group: absolute path of the group.
        fresh: make the arrays anew; else they are made longer or shorter.
        guard: what references are guarded with.

    Raises:
        NodeExistsError: an array is to be made where something else is; nothing was written.
        VirtualContainerError: no container covers a location.
    """
    template = plan.template
    assert template is not None  # there is a file to write
    writing = _Writing(session, guard)
    if fresh:
        writing.clear(group, catalog, template.documents)
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
    """Put each file of a plan into its group, in place of what was there of it.

    Raises:
        NodeExistsError: there is something in a group's place that was not ingested; nothing was
            written.
        VirtualContainerError: no container covers a location.
    """
    writing = _Writing(session, guard)
    changed = [it for it in plan.placed if it.scanned is not None]
    for placed in changed:
        if placed.old is None or placed.old.group != placed.group:
            writing.check_free(placed.group)
    # All before any is made: one may come to lie within what another was.
    for gone in (*plan.removed, *(it.old for it in changed if it.old is not None)):
        writing.workspace.delete_node(check_path(gone.group))
    for placed in changed:
        scanned = placed.scanned
        assert scanned is not None  # see above
        writing.make_groups(placed.group, scanned.groups, {})
        for path, array in scanned.arrays.items():
            writing.place(placed.group, path, scanned, array)
    writing.finish()


class _Writing:
    """One session that is written to; encoded and copied data is stored at the end."""

    def __init__(self, session: Session, guard: Guard) -> None:
        self._session = session
        self._guard: Guard = guard
        self.workspace = workspace_of(session)
        self._normalize = self.workspace.virtual.locations.normalize
        self._inline: list[tuple[str, Coordinates, bytes]] = []
        self._copied: list[tuple[str, tuple[slice, ...], Any]] = []

    def check_free(self, path: str) -> None:
        """Raise NodeExistsError if there is a node."""
        node = self.workspace.node(check_path(path))
        if node is not None:
            raise NodeExistsError(
                f"{path!r} is there already and was not ingested. Delete it, or ingest into "
                "another group. Nothing was changed.",
                path=path,
            )

    def clear(self, group: str, catalog: Catalog, paths: Mapping[str, Any]) -> None:
        """Delete the arrays of earlier ingests; what is in the way otherwise is refused."""
        for path in paths:
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
        """Make groups that are not there, and all above them, and give them their attributes.

        Of other attributes those go that were ``given`` before; the rest may be somebody else's.
        """
        for path in sorted({"", *groups, *given}):
            place = check_path(f"{group}/{path}")
            if path in groups or not path:
                for above in (*reversed(ancestors(place)), place):
                    self.workspace.set_node(above, group_document({}), None, if_absent=True)
            old = self._group_attributes(place)
            rest = {name: it for name, it in old.items() if name not in given.get(path, ())}
            if old != (new := {**rest, **groups.get(path, {})}):
                self.workspace.set_node(place, group_document(new), None)

    def _group_attributes(self, path: str) -> dict[str, Any]:
        node = self.workspace.node(path)
        return {} if node is None else attributes_of(json.loads(node.user_data))

    def place(self, group: str, path: str, scanned: Scanned, array: ScannedArray) -> None:
        """Make an array that is of one file alone."""
        place = check_path(f"{group}/{path}")
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
        """Make an array as long as all files together, and put those into it that changed."""
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
            first[axis] = file.start // chunk_shape(document)[axis]
            if file.start < old_total:
                parts.append(_deletions(array.document, first, grid(document)))
            parts.append(file.scanned.refs(array.places, self._normalize, self._guard, first))
            for coords, data in array.inline.items():
                at = tuple(a + b for a, b in zip(coords, first, strict=True))
                self._inline.append((place, at, data))
        if any(map(len, parts)):
            self.workspace.set_refs(place, ChunkRefs.concat(parts).sort())

    def finish(self) -> None:
        """Store what is no reference."""
        run(bounded_map(lambda it: self.workspace.write_chunk(*it), self._inline, limit=_AT_ONCE))
        for path, where, values in self._copied:
            place = path.strip("/")
            array = zarr.open_array(self._session.store, path=place, mode="r+")  # pyright: ignore[reportUnknownMemberType]
            array[where or ...] = values

    def _set_node(self, path: str, document: Document) -> None:
        data = encode_document(document)
        self.workspace.set_node(path, data, parse_document(data, path).array)


def _copied(document: Document, axis: int | None) -> Document:
    """Return the metadata of an array that is stored in the repository itself."""
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
    """Return the attributes of an array of many files, without those that are of the first."""
    return {name: it for name, it in attributes_of(document).items() if name != "grib_messages"}


def _deletions(document: Document, first: Sequence[int], limits: Sequence[int]) -> ChunkRefs:
    """Return deletions of all chunks that a file covers, but for those beyond the array."""
    counts = grid(document)
    coords = np.stack(
        np.meshgrid(
            *(np.arange(a, a + n) for a, n in zip(first, counts, strict=True)), indexing="ij"
        ),
        axis=-1,
    ).reshape(-1, len(counts))
    within = np.all(coords < np.array(limits), axis=1)
    return ChunkRefs.build(coords[within].astype(np.uint32), Kind.DELETED)
