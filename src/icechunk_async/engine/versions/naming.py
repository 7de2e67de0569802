"""Find the snapshot that a text names: a branch, a tag, an id, and steps back from there."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import closing, gather
from icechunk_async.errors import (
    InvalidInputError,
    NotFoundError,
    SnapshotNotFoundError,
)
from icechunk_async.format.ids import ALPHABET, SnapshotId

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.engine.open import Engine
    from icechunk_async.format.repo_info import RepoInfo

__all__ = ["find_ref", "known_ref"]

_FEWEST_LETTERS: Final = 4
_LETTERS: Final = 20
_SHOWN: Final = 5
# At most six digits: each step is one commit of the ancestry.
_STEPS: Final = re.compile(r"(?P<ref>.+?)~(?P<count>\d{0,6})")
_PREFIX: Final = re.compile(f"[{ALPHABET}]{{{_FEWEST_LETTERS},{_LETTERS}}}")


async def find_ref(engine: Engine, ref: SnapshotId | str) -> SnapshotId:
    """Return the snapshot that a ref names, as of now.

    A text is looked for among branches, then tags, then snapshot ids; the first letters of an id,
    four or more, name it if no other id begins with them. ``main~2`` is the snapshot two before the
    tip of ``main``, ``main~`` the one before.

    Args:
        engine: of the repository.
        ref: the text, or an id, which is returned.

    Raises:
        NotFoundError: it names nothing, or more than one snapshot; nearby names are in the message.
        SnapshotNotFoundError: the history does not go back that far.

    Cost: one request for the branches and tags, which format 1 lists and reads one by one; for an
    id one listing of the snapshots that begin with its letters.
    """
    if isinstance(ref, SnapshotId):
        return ref
    state = engine.history.state
    if state is not None:
        info = await state.info()
        branches, tags = info.branches, info.tags
    else:
        branches, tags = await gather(engine.history.branches(), engine.history.tags())
    found = branches.get(ref, tags.get(ref))
    if found is not None:
        return found
    # Names come first: the format allows `main~2` and twenty letters of base32 as a branch.
    steps = _STEPS.fullmatch(ref)
    if steps is not None:
        start = await _find(engine, steps["ref"], branches, tags)
        return await _before(engine, start, int(steps["count"] or 1), ref)
    return await _find(engine, ref, branches, tags)


def known_ref(
    info: RepoInfo, branch: str | None, tag: str | None, snapshot_id: str | None, ref: str | None
) -> SnapshotId | None:
    """Return the listed snapshot that one of these names in a state of the repository.

    None also for a ref that only `find_ref` understands.
    """
    for name, kinds in (
        (branch, (info.branches,)),
        (tag, (info.tags,)),
        (ref, (info.branches, info.tags)),
    ):
        if name is not None:
            # A name that is not there may still be the beginning of an id, which takes a listing.
            return next((it[name] for it in kinds if name in it), None)
    try:
        found = SnapshotId.parse(snapshot_id or "")
    except InvalidInputError:
        return None
    return found if found in info.snapshots else None


async def _find(
    engine: Engine, ref: str, branches: Mapping[str, SnapshotId], tags: Mapping[str, SnapshotId]
) -> SnapshotId:
    found = branches.get(ref, tags.get(ref))
    if found is not None:
        return found
    letters = ref.upper()
    if _PREFIX.fullmatch(letters):
        ids = await _beginning_with(engine, letters)
        if len(ids) == 1:
            return ids[0]
        if len(ids) > 1:
            some = ", ".join(map(str, ids[:_SHOWN])) + (", ..." if len(ids) > _SHOWN else "")
            raise NotFoundError(
                f"{ref!r} begins the ids of {len(ids)} snapshots: {some}. Give more letters.",
                ref=ref,
            )
    elif len(ref) == _LETTERS:
        try:  # in lower case, or with letters that are read as others
            return SnapshotId.parse(ref)
        except InvalidInputError:
            pass
    raise NotFoundError(
        f"{ref!r} is not a branch, a tag or a snapshot id, nor the first {_FEWEST_LETTERS} or more "
        f"letters of an id.{_near(ref, branches, tags)} Branches here: {_some(branches)}. Tags "
        f"here: {_some(tags)}.",
        ref=ref,
    )


async def _beginning_with(engine: Engine, letters: str) -> list[SnapshotId]:
    """Return the ids of stored snapshots that begin with some letters."""
    if len(letters) == _LETTERS:
        return [SnapshotId.parse(letters)]
    found: list[SnapshotId] = []
    async for it in engine.storage.list_prefix(f"snapshots/{letters}"):
        key = getattr(it, "key", "")
        try:
            found.append(SnapshotId.parse(key.removeprefix("snapshots/")))
        except InvalidInputError:  # somebody else's object
            continue
    return found


async def _before(engine: Engine, start: SnapshotId, count: int, ref: str) -> SnapshotId:
    left = count
    infos = engine.history.ancestry(start)
    async with closing(infos):
        async for info in infos:
            if left == 0:
                return info.id
            left -= 1
    raise SnapshotNotFoundError(
        f"{ref!r} goes back {count} snapshots, and {ref.rpartition('~')[0]!r} has only "
        f"{count - left - 1} before it.",
        ref=ref,
    )


def _near(ref: str, branches: Mapping[str, SnapshotId], tags: Mapping[str, SnapshotId]) -> str:
    kinds = {**dict.fromkeys(tags, "tag"), **dict.fromkeys(branches, "branch")}
    near = get_close_matches(ref, list(kinds), 1)
    return f" Is the {kinds[near[0]]} {near[0]!r} meant?" if near else ""


def _some(names: Mapping[str, SnapshotId]) -> str:
    more = ", ..." if len(names) > 4 * _SHOWN else ""
    return (", ".join(sorted(names)[: 4 * _SHOWN]) or "none") + more
