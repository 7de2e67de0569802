"""Blame: the commit that wrote each chunk of an array."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.diff import load_logs
from icechunk_async.engine.versions.differences import reading
from icechunk_async.engine.versions.pictures import draw_authors, html_image
from icechunk_async.engine.versions.plans import chunk_shape
from icechunk_async.errors import FormatError, InvalidInputError
from icechunk_async.format.manifest.row_index import rows_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from icechunk_async.engine.open import Engine
    from icechunk_async.format.manifest.chunk import Coordinates
    from icechunk_async.format.repo_info import SnapshotInfo
    from icechunk_async.format.snapshot import Node, Snapshot

__all__ = ["Blame", "blame"]

UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Blame:
    """The commit that wrote each chunk of an array, as columns."""

    path: str
    coords: npt.NDArray[np.uint32]
    """The chunks that exist, ``(n, rank)``, ascending."""
    commits: tuple[SnapshotInfo, ...]
    """Every commit that wrote one of them last, newest first."""
    written_by: npt.NDArray[np.int64]
    """For each chunk the index of its commit in ``commits``, ``(n,)``; -1 if that is not known any
    more, because it expired."""

    def of(self, coords: Coordinates) -> SnapshotInfo | None:
        """Return the commit that wrote one chunk; None if there is no chunk, or it expired."""
        rows = np.flatnonzero((self.coords == np.array(coords, np.uint32)).all(axis=1))
        if not len(rows) or self.written_by[rows[0]] == UNKNOWN:
            return None
        return self.commits[int(self.written_by[rows[0]])]

    def picture(self, *, dark: bool = False) -> bytes:
        """Draw the chunks along the last two axes, coloured by their commits, as PNG.

        It blocks while it draws. Of several chunks at one place of these axes the one that was
        written last is drawn.

        Args:
            dark: light on dark.

        Raises:
            MissingDriverError: matplotlib is not installed.
        """
        names = [
            f"{it.written_at:%Y-%m-%d %H:%M}  {it.message.partition(chr(10))[0]}"
            for it in self.commits
        ]
        return draw_authors(self._title(), self.coords, self.written_by, names, dark=dark)

    def _title(self) -> str:
        chunks, commits = len(self.coords), len(self.commits)
        return f"{self.path}: {chunks:,} chunks, written by {commits:,} commits"

    def _repr_html_(self) -> str:
        """Show in a notebook: the picture, if matplotlib is installed."""
        drawn = html_image(lambda it: self.picture(dark=it), self._title())
        return drawn or f"<b>{escape(self._title())}</b>"


async def blame(
    engine: Engine, snapshot: Snapshot, path: str, region: Sequence[slice] | None
) -> Blame:
    """Find the commits that wrote the chunks of an array; see `Repository.blame`."""
    side = reading(engine, snapshot)
    node = side.array(path)
    coords = (await side.all_refs(path)).coords
    if region is not None:
        coords = coords[_inside(coords, node, region)]
    written_by, known = np.full(len(coords), UNKNOWN, np.int64), np.zeros(len(coords), bool)
    commits: list[SnapshotInfo] = []
    async for info in engine.history.ancestry(snapshot.id):
        # The first snapshot holds no chunks, and in format 1 it has no log.
        if known.all() or info.parent_id is None:
            break
        try:
            # One commit at a time: most chunks were written lately, and the walk ends when all are
            # known.
            *expired, own = await load_logs(engine.assets, [info])
        except FormatError:  # a log is missing: nothing older can be told
            break
        # Newest first. What an expired commit wrote is known to be its work, but nobody can name
        # it.
        for log in (own, *reversed(expired)):
            rows = np.flatnonzero(~known)
            rows = rows[rows_in(coords[rows], log.chunks_of(node.id, coords.shape[1]))]
            known[rows] = True
            if len(rows) and log is own:
                written_by[rows] = len(commits)
                commits.append(info)
        if any(node.id in log.new_arrays for log in (own, *expired)):
            break  # older commits did not know the array
    return Blame(path, coords, tuple(commits), written_by)


def _inside(
    coords: npt.NDArray[np.uint32], node: Node, region: Sequence[slice]
) -> npt.NDArray[np.bool_]:
    """Return which chunks a region of elements meets."""
    assert node.array is not None
    dimensions, sizes = node.array.dimensions, chunk_shape(node)
    if len(region) != len(dimensions):
        raise InvalidInputError(
            f"{node.path!r} has {len(dimensions)} axes, and the region has {len(region)} slices."
        )
    inside = np.ones(len(coords), bool)
    for axis, (part, dimension, size) in enumerate(zip(region, dimensions, sizes, strict=True)):
        start, stop, step = part.indices(dimension.array_length)
        if step != 1:
            raise InvalidInputError(f"A region is given with step 1, not {step}.")
        column = coords[:, axis].astype(np.int64)
        inside &= (column >= start // size) & (column < -(-stop // size))
    return inside
