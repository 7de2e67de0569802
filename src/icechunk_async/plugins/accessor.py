"""The accessor of xarray: ``dataset.icechunk`` tells where a dataset comes from and writes back."""

# xarray is only partly typed.
# pyright: basic

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self

import xarray

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import ConflictError, InvalidInputError
from icechunk_async.sync.errors import translated

if TYPE_CHECKING:
    from icechunk_async.sync.repository import Repository
    from icechunk_async.sync.session import Session
    from icechunk_async.sync.snapshots import SnapshotInfo
    from icechunk_async.zarr.datasets import Mode

__all__ = ["IcechunkAccessor", "Origin"]

_KEY: Final = "icechunk_async_origin"
"""In `Dataset.encoding`, which selections and computations keep, and files do not get."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a dataset was opened. It pickles as plain data, credentials of the storage included."""

    url: str
    """For people: without secrets."""
    repository: Repository
    session: Session
    group: str
    branch: str | None
    """The branch that was named at opening; None for a tag or a snapshot."""

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<opened from {self.url}>"

    def __deepcopy__(self, memo: object) -> Self:
        """Copies of a dataset share the repository."""
        return self


class IcechunkAccessor:
    """Tells the repository, snapshot and history of a dataset, and writes it back.

    Datasets have it as ``dataset.icechunk``, or ``dataset.icechunk_async`` where another package
    uses the first name, if they were opened with ``engine="icechunk-async"``.
    """

    def __init__(self, dataset: xarray.Dataset) -> None:
        """Use ``dataset.icechunk``."""
        self._dataset = dataset

    @staticmethod
    def mark(dataset: xarray.Dataset, origin: Origin) -> xarray.Dataset:
        """Note on a dataset where it was opened, and return it."""
        dataset.encoding[_KEY] = origin
        return dataset

    @property
    def _origin(self) -> Origin:
        origin = self._dataset.encoding.get(_KEY)
        if not isinstance(origin, Origin):
            with translated():
                raise InvalidInputError(
                    "The dataset does not know its repository: it was not opened with "
                    "engine='icechunk-async', or an operation made a new one without its encoding. "
                    "Ask the dataset that was opened, or write it with "
                    "icechunk_async.sync.xarray.to_icechunk."
                )
        return origin

    @property
    def repository(self) -> Repository:
        """The open repository."""
        return self._origin.repository

    @property
    def session(self) -> Session:
        """The session that the dataset reads."""
        return self._origin.session

    @property
    def group(self) -> str:
        """Path of the group; empty for the root."""
        return self._origin.group

    @property
    def branch(self) -> str | None:
        """The branch that was named when the dataset was opened; None for other refs."""
        return self._origin.branch

    @property
    def snapshot_id(self) -> str:
        """The snapshot that the dataset reads, whatever is committed later."""
        return self._origin.session.snapshot_id

    @property
    def snapshot(self) -> SnapshotInfo:
        """When and why the snapshot was made; one request."""
        return self.repository.lookup_snapshot(self.snapshot_id)

    def history(self, limit: int | None = None) -> list[SnapshotInfo]:
        """Return the snapshot and those before it, newest first; ``limit`` at most."""
        found = self.repository.ancestry(snapshot_id=self.snapshot_id)
        return list(islice(found, limit))

    def commit(
        self,
        message: str,
        *,
        branch: str | None = None,
        group: str | None = None,
        mode: Mode = "a",
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Write the dataset back to its group and commit; return the id of the snapshot.

        Chunks that did not change are not uploaded. The branch must be where the dataset was read:
        if somebody else committed meanwhile, nothing is written. The dataset still reads
        its old snapshot; open it again to read the new one.

        Args:
            message: of the commit.
            branch: where to commit, by default the branch that was named at opening.
            group: path of the group, by default the one that was opened.
            mode: ``"a"`` writes or replaces variables; others as of
                `icechunk_async.sync.xarray.to_icechunk`.
            metadata: properties of the commit.

        Raises:
            ConflictError: the branch is at another snapshot than the dataset; nothing was written.
            InvalidInputError: no branch was named, neither here nor at opening.
            NothingToCommitError: nothing differs from what is stored.

        Cost: variables that were not computed or loaded are read whole and compared with what is
        stored. To add or change a few, select them first:
        ``dataset[["rain"]].icechunk.commit(...)``.
        """
        from icechunk_async.sync.xarray import to_icechunk  # noqa: PLC0415 -- loaded when it is used

        origin = self._origin
        chosen = origin.branch if branch is None else branch
        if chosen is None:
            with translated():
                raise InvalidInputError(
                    f"The dataset was opened at snapshot {self.snapshot_id}, not at a branch. Name "
                    "where to commit: commit(message, branch='main')."
                )
        session = self.repository.writable_session(chosen, deduplicate=True)
        # The commit below refuses if the branch moves after this look, so that no commit of others
        # is overwritten unseen.
        if session.snapshot_id != self.snapshot_id:
            with translated():
                raise ConflictError(
                    f"Branch {chosen!r} is at snapshot {session.snapshot_id}, and the dataset was "
                    f"opened at {self.snapshot_id}: another writer was first. Nothing was written; "
                    "open the dataset again and repeat the change.",
                    branch=chosen,
                    expected_parent=self.snapshot_id,
                    actual_parent=session.snapshot_id,
                )
        # In the mode `w` arrays are made anew, and chunks and codecs are those of the values, not
        # of the arrays that were read.
        plain = self._dataset.drop_encoding() if mode == "w" else self._dataset.copy(deep=False)
        plain.encoding = {}
        where = origin.group if group is None else group
        to_icechunk(plain, session, group=where or None, mode=mode)
        return session.commit(message, metadata=metadata)

    def __repr__(self) -> str:
        """Show the repository, the group and the snapshot."""
        origin = self._origin
        return f"<Icechunk dataset of {origin.url}, snapshot {self.snapshot_id}>"


def _register() -> None:
    names = ["icechunk_async"]
    if not hasattr(xarray.Dataset, "icechunk"):  # another package may have it
        names.append("icechunk")
    for name in names:
        register: Any = xarray.register_dataset_accessor  # has no types
        register(name)(IcechunkAccessor)


_register()
