"""The ref files of spec 1 as a migration sees them: read all at once, closed, opened again.

A branch is closed by putting, in one atomic step, contents in the place of its file that name no
snapshot. Whoever would move the branch afterwards stops, and whoever moved it before is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from icechunk_async._concurrency import bounded_map
from icechunk_async.errors import (
    ConflictError,
    ObjectNotFoundError,
    OutcomeUnknownError,
    PreconditionFailedError,
)
from icechunk_async.format.refs import (
    decode_closed_ref,
    decode_ref,
    encode_closed_ref,
    encode_ref,
)
from icechunk_async.repository.history.edits import MAIN
from icechunk_async.repository.history.migration import OldRefs
from icechunk_async.repository.layout import (
    BRANCH_PREFIX,
    REFS,
    TAG_PREFIX,
    branch_key,
    tag_key,
    tombstone_key,
)
from icechunk_async.repository.retry import Backoff
from icechunk_async.storage import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.storage import Retrieved, Storage, Version

__all__ = [
    "OldBranch",
    "RefFiles",
    "close_branches",
    "open_branches",
    "read_if_there",
    "read_refs",
    "swap",
]

_CONCURRENT_REFS: Final = 32
_SWAP: Final = Backoff(max_tries=10, initial_ms=50, max_ms=5000)


@dataclass(frozen=True, slots=True)
class OldBranch:
    """A branch file, and the version of the object that it was read from."""

    target: SnapshotId
    version: Version
    closed: bool


@dataclass(frozen=True, slots=True)
class RefFiles:
    """All objects below ``refs/`` at one moment."""

    branches: Mapping[str, OldBranch] = field(default_factory=dict[str, OldBranch])
    tags: Mapping[str, SnapshotId] = field(default_factory=dict[str, "SnapshotId"])
    deleted_tags: Mapping[str, SnapshotId | None] = field(
        default_factory=dict[str, "SnapshotId | None"]
    )
    keys: tuple[str, ...] = ()

    @property
    def refs(self) -> OldRefs:
        """Where branches and tags are, closed or not."""
        targets = {name: branch.target for name, branch in self.branches.items()}
        return OldRefs(targets, self.tags, self.deleted_tags)

    @property
    def any_closed(self) -> bool:
        """Whether a migration closed a branch."""
        return any(branch.closed for branch in self.branches.values())


async def read_refs(storage: Storage) -> RefFiles:
    """Read every ref file. Cost: a listing, and a request a ref."""
    entries = storage.list_prefix(REFS)
    keys = tuple([entry.key async for entry in entries if isinstance(entry, ObjectInfo)])
    present = set(keys)
    branches = _names(keys, BRANCH_PREFIX)
    tags = _names(keys, TAG_PREFIX)
    found = await bounded_map(
        lambda key: read_if_there(storage, key),
        [*map(branch_key, branches), *map(tag_key, tags)],
        limit=_CONCURRENT_REFS,
    )
    files = found[: len(branches)]
    old = {
        name: _branch(file) for name, file in zip(branches, files, strict=True) if file is not None
    }
    targets = {
        name: None if file is None else decode_ref(file.data)
        for name, file in zip(tags, found[len(branches) :], strict=True)
    }
    deleted = {name for name in tags if tombstone_key(name) in present}
    return RefFiles(
        old,
        {name: it for name, it in targets.items() if it is not None and name not in deleted},
        {name: targets[name] for name in sorted(deleted)},
        keys,
    )


def _names(keys: tuple[str, ...], prefix: str) -> list[str]:
    start = f"{REFS}{prefix}"
    return sorted({key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)})


def _branch(file: Retrieved) -> OldBranch:
    closed = decode_closed_ref(file.data)
    target = decode_ref(file.data) if closed is None else closed
    return OldBranch(target, file.version, closed is not None)


async def close_branches(storage: Storage, files: RefFiles) -> None:
    """Close every branch where it was read, ``main`` first.

    Raises:
        ConflictError: a branch was moved or deleted since; those before it are closed.
    """
    for name, branch in sorted(files.branches.items(), key=lambda item: (item[0] != MAIN, item)):
        if not branch.closed:
            data = encode_closed_ref(branch.target)
            await swap(storage, branch_key(name), data, branch.version)


async def open_branches(storage: Storage, files: RefFiles) -> None:
    """Open every branch that is closed, where it was.

    Raises:
        ConflictError: another migration is at work on them.
    """
    for name, branch in files.branches.items():
        if branch.closed:
            await swap(storage, branch_key(name), encode_ref(branch.target), branch.version)


async def swap(storage: Storage, key: str, data: bytes, version: Version) -> Version:
    """Replace an object that must still be at ``version``, settling lost answers.

    Raises:
        ConflictError: it is neither at this version nor what was to be written.
        OutcomeUnknownError: the storage never answered.
    """
    doubt: OutcomeUnknownError | None = None
    for attempt in range(1, _SWAP.max_tries + 1):
        try:
            return await storage.put(key, data, if_version=version)
        except PreconditionFailedError:
            doubt = None
        except OutcomeUnknownError as error:
            doubt = error
        found = await read_if_there(storage, key)
        if found is not None and bytes(found.data) == data:
            return found.version
        if found is None or found.version != version:
            state = "is gone" if found is None else "was changed"
            raise ConflictError(f"{key!r} {state}: somebody else is writing to the repository.")
        await _SWAP.wait(attempt)
    raise doubt or ConflictError(f"{key!r} could not be replaced: others keep writing it.")


async def read_if_there(storage: Storage, key: str) -> Retrieved | None:
    """Read an object; answer None if there is none."""
    try:
        return await storage.get(key)
    except ObjectNotFoundError:
        return None
