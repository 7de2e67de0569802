"""References of the alpha: numbered branch files, and tags (its spec, "Reference Files").

Nothing of a branch is ever written over or removed. It moves, is deleted, created again or closed
by the next entry of its sequence, so that the protocol needs nothing but creation if absent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.numbers import Numbered
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.errors import FormatError, InvalidRefNameError
from icechunk_async.format.alpha.references import (
    REFS,
    SUFFIX,
    BranchState,
    RefData,
    branch_prefix,
    decode_ref,
    encode_ref,
    tag_key,
)
from icechunk_async.storage import CommonPrefix

if TYPE_CHECKING:
    from icechunk_async._runtime.backoff import Backoff
    from icechunk_async.storage import Storage

__all__ = ["AlphaRefs", "Seen", "SeenEntries", "check_name", "is_open"]

_CONCURRENT_REFS: Final = 32
# Some stores percent-encode other characters in keys. A branch whose name ends in ``.json`` would
# be a folder where a tag's file is.
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Seen:
    """An entry of a branch's sequence."""

    number: int
    ref: RefData


class SeenEntries(dict[str, Seen]):
    """The newest entry seen of each branch, by name; see `way.Known`."""


class AlphaRefs:
    """Branches and tags as they are in the storage; the newest entry seen of each is kept."""

    def __init__(self, storage: Storage, seen: SeenEntries | None = None) -> None:
        """Keep in ``seen`` what is read; by default it has read nothing."""
        self._storage = storage
        self.seen = SeenEntries() if seen is None else seen

    def numbered(self, branch: str) -> Numbered:
        """Return the numbered files of a branch."""
        return Numbered(self._storage, branch_prefix(branch), SUFFIX)

    async def newest(self, branch: str) -> Seen | None:
        """Return the newest entry of a branch as of now; None if it never had one.

        Raises:
            FormatError: its numbers have a gap, or the entry is damaged.

        Cost: one request, and one for an entry that was not seen yet.
        """
        numbered = self.numbered(branch)
        number = await numbered.newest()
        if number is None:
            self.seen.pop(branch, None)
            return None
        known = self.seen.get(branch)
        # An entry never changes, so its number is enough to know it again.
        if known is None or known.number != number:
            known = Seen(number, await self.entry(branch, number))
            self.seen[branch] = known
        return known

    async def entry(self, branch: str, number: int) -> RefData:
        """Return an entry of a branch.

        Raises:
            FormatError: it is missing or damaged.
        """
        numbered = self.numbered(branch)
        retrieved = await numbered.read(number)
        if retrieved is None:
            raise FormatError(
                f"{numbered.key(number)!r} is missing: branch {branch!r} has a gap in its numbers."
            )
        return decode_ref(retrieved.data)

    async def append(self, branch: str, after: int | None, ref: RefData, backoff: Backoff) -> bool:
        """Add an entry to a branch's sequence; return False if another writer was first.

        Args:
            branch: the branch.
            after: the newest number; None for the first entry.
            ref: the entry.
            backoff: see `Numbered.append`.
        """
        number = 0 if after is None else after + 1
        # Two writers have the same bytes only for the same snapshot at the same microsecond, and
        # then one entry serves both.
        landed = await self.numbered(branch).append(number, encode_ref(ref), backoff)
        if landed:
            self.seen[branch] = Seen(number, ref)
        return landed

    async def branches(self) -> dict[str, Seen]:
        """Return every branch with its newest entry, deleted ones included.

        Cost: a listing; for each branch another, and a request for an entry not seen yet.
        """
        names = [name for name, is_branch in await self.names() if is_branch]
        found = await bounded_map(self.newest, names, limit=_CONCURRENT_REFS)
        return {name: it for name, it in zip(names, found, strict=True) if it is not None}

    async def tags(self) -> dict[str, RefData]:
        """Return every tag. Cost: a listing, and a request for each."""
        names = [name for name, is_branch in await self.names() if not is_branch]
        found = await bounded_map(self.tag, names, limit=_CONCURRENT_REFS)
        return {name: it for name, it in zip(names, found, strict=True) if it is not None}

    async def names(self) -> list[tuple[str, bool]]:
        """Return the name of every reference, and whether it is a branch."""
        found: list[tuple[str, bool]] = []
        async for entry in self._storage.list_prefix(REFS, delimiter="/"):
            if isinstance(entry, CommonPrefix):
                found.append((entry.prefix.removeprefix(REFS).removesuffix("/"), True))
            elif entry.key.endswith(SUFFIX):
                found.append((entry.key.removeprefix(REFS).removesuffix(SUFFIX), False))
        return found

    async def tag(self, name: str) -> RefData | None:
        """Return a tag; None if there is no such tag."""
        retrieved = await read_if_there(self._storage, tag_key(name))
        return None if retrieved is None else decode_ref(retrieved.data)


def is_open(seen: Seen | None) -> bool:
    """Return whether there is a branch with this newest entry."""
    return seen is not None and seen.ref.state is not BranchState.DELETED


def check_name(name: str) -> None:
    """Refuse names that some storage would not keep.

    Raises:
        InvalidRefNameError: it is one.
    """
    if not _SAFE_NAME.fullmatch(name) or name.endswith(SUFFIX):
        raise InvalidRefNameError(
            f"{name!r} cannot name a branch or tag in a repository of the alpha layout: use "
            f"letters, digits, '.', '_' and '-', begin with a letter, a digit or '_', and do not "
            f"end with {SUFFIX!r}.",
            name=name,
        )
