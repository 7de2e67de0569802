"""The references of a repository at one moment, and the note of what copies have put at a place.

The note tells a copy, which may be replaced by a newer one, from a repository that somebody works
with. It is written before the references, so that it also knows those of a copy that was
interrupted while it wrote them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.concurrency import bounded_map
from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.history.outcomes import read_if_there
from icechunk_async.engine.history.repo_info.file import read_info
from icechunk_async.engine.upkeep.copying.derivation import AS_IT_IS
from icechunk_async.engine.upkeep.sweep import pages
from icechunk_async.format.json.values import is_list, is_object
from icechunk_async.format.layout import BRANCH_PREFIX, CONFIG, REFS, REPO_INFO, TAG_PREFIX
from icechunk_async.format.refs import decode_ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from icechunk_async.format.ids import SnapshotId
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.storage import Storage, Version

__all__ = ["Mark", "References", "Refs", "changes_since", "read_references"]

_AT_ONCE: Final = 32
_FILE: Final = "/ref.json"
_TOMBSTONE: Final = f"{_FILE}.deleted"


@dataclass(frozen=True, slots=True)
class Refs:
    """The branches and tags of a repository."""

    branches: Mapping[str, SnapshotId]
    tags: Mapping[str, SnapshotId]

    def named(self) -> Iterator[tuple[tuple[str, str], SnapshotId]]:
        """Iterate over the kind and name of each, and where it points."""
        for kind, refs in (("branch", self.branches), ("tag", self.tags)):
            for name in sorted(refs):
                yield (kind, name), refs[name]


@dataclass(frozen=True)
class References:
    """The objects of a repository that change, as they were at one moment."""

    objects: Mapping[str, bytes]
    versions: Mapping[str, Version] = field(default_factory=dict[str, "Version"])

    @property
    def spec_version(self) -> int:
        """The format version."""
        return 2 if REPO_INFO in self.objects else 1

    @cached_property
    def sums(self) -> dict[str, str]:
        """A sum of each object; equal for equal states."""
        return {key: hashlib.sha256(data).hexdigest() for key, data in self.objects.items()}

    @cached_property
    def info(self) -> RepoInfo:
        """The repo info; format version 2.

        Raises:
            FormatError: it is damaged.
        """
        from icechunk_async.storage import Retrieved, Version  # noqa: PLC0415 -- for annotations

        data = self.objects[REPO_INFO]
        return read_info(Retrieved(data, Version(""), len(data))).info

    @cached_property
    def refs(self) -> Refs:
        """The branches, and the tags that were not deleted.

        Raises:
            FormatError: one is damaged.
        """
        if self.spec_version > 1:
            return Refs(self.info.branches, self.info.tags)
        branches = {
            name: decode_ref(self.objects[key]) for key, name in self._named(BRANCH_PREFIX, _FILE)
        }
        deleted = {name for _, name in self._named(TAG_PREFIX, _TOMBSTONE)}
        tags = {
            name: decode_ref(self.objects[key])
            for key, name in self._named(TAG_PREFIX, _FILE)
            if name not in deleted
        }
        return Refs(branches, tags)

    def _named(self, prefix: str, suffix: str) -> Iterator[tuple[str, str]]:
        beginning = f"{REFS}{prefix}"
        for key in self.objects:
            if key.startswith(beginning) and key.endswith(suffix):
                yield key, key[len(beginning) : -len(suffix)]


async def read_references(storage: Storage) -> References | None:
    """Return the references of a repository; None if the storage holds no repository.

    Cost: one request; for format version 1 also a listing, and one for each branch and tag.
    """
    info = await read_if_there(storage, REPO_INFO)
    if info is not None:
        return References({REPO_INFO: bytes(info.data)}, {REPO_INFO: info.version})
    keys = [CONFIG]
    async for page in pages(storage, REFS):
        keys += [it.key for it in page]
    found = await bounded_map(lambda key: read_if_there(storage, key), keys, limit=_AT_ONCE)
    there = {key: it for key, it in zip(keys, found, strict=True) if it is not None}
    # A configuration alone is what a copy leaves that ended before its first reference.
    if not any(key != CONFIG for key in there):
        return None
    return References(
        {key: bytes(it.data) for key, it in there.items()},
        {key: it.version for key, it in there.items()},
    )


def _digest_of_rest(info: RepoInfo) -> str:
    """Return a sum of what a repo info says besides history, refs and the operations log.

    Upkeep of the copy changes only those: it does not make the copy a repository that is used.
    """
    rest = [
        [[name, value.hex()] for name, value in info.raw_metadata],
        None if info.raw_config is None else info.raw_config.hex(),
        [int(info.status.availability), info.status.set_at, info.status.reason],
        info.enabled_flags,
        info.disabled_flags,
    ]
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def _summary(shown: References) -> dict[str, Any]:
    """Return the refs of a state, and a sum of the rest but its history."""
    refs = {f"{kind} {name}": str(target) for (kind, name), target in shown.refs.named()}
    rest = shown.sums.get(CONFIG, "") if shown.spec_version == 1 else _digest_of_rest(shown.info)
    return {"refs": refs, "rest": rest}


@dataclass(frozen=True)
class Mark:
    """The note of what copies have put at a place."""

    references: Mapping[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Sums of each reference that the last copy found, and of what it puts there."""
    summaries: tuple[Mapping[str, Any], ...] = ()
    """The same as refs. Collecting garbage in the copy changes the sums and not these."""
    source: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sums of the references of the source that were copied last."""
    selection: tuple[Any, ...] = ()
    """The part of the source that was copied last."""
    refs: frozenset[str] | None = None
    """The refs that were selected."""
    shown: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sums of the references that show it."""

    @classmethod
    def decode(cls, data: bytes | memoryview | None) -> Mark:
        """Read a note; an empty one if it cannot be read."""
        if data is None:
            return cls()
        try:
            noted = json.loads(bytes(data))
            refs = noted["refs"]
            return cls(
                {str(key): [str(it) for it in sums] for key, sums in noted["references"].items()},
                tuple(
                    {"refs": dict(it["refs"]), "rest": str(it["rest"])} for it in noted["summaries"]
                ),
                dict(noted["source"]),
                _selection_of(noted["selection"]),
                None if refs is None else frozenset(map(str, refs)),
                dict(noted["shown"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls()

    def encode(self) -> bytes:
        """Return the note as JSON."""
        return json.dumps(
            {
                "references": self.references,
                "summaries": self.summaries,
                "source": self.source,
                "selection": self.selection,
                "refs": None if self.refs is None else sorted(self.refs),
                "shown": self.shown,
            }
        ).encode()

    def before(self, there: References | None, wanted: References) -> Mark:
        """Return the note to leave before a state is shown in place of another."""
        states = [it for it in (there, wanted) if it is not None]
        references: dict[str, list[str]] = {}
        # Both: where a copy of format 1 ends between two references, some are old and some new.
        for state in states:
            for key, it in state.sums.items():
                sums = references.setdefault(key, [])
                if it not in sums:
                    sums.append(it)
        summaries = tuple(_summary(it) for it in states)
        return replace(self, references=references, summaries=summaries, shown=wanted.sums)

    @property
    def derivation(self) -> Mapping[str, Any]:
        """How the snapshots that were copied last differ from those of the source."""
        return self.selection[2] if len(self.selection) > 2 else AS_IT_IS.describe()

    def interrupted(self, there: References | None) -> bool:
        """Return whether a copy ended before it showed what it was to bring."""
        return bool(self.shown) and (there is None or there.sums != self.shown)


def _selection_of(noted: object) -> tuple[Any, ...]:
    """Return the selection in a note: names, a time, and perhaps how snapshots differ.

    Raises:
        ValueError: it says something else.
    """
    if not is_list(noted) or len(noted) not in (0, 2, 3):
        raise ValueError("no selection")
    if len(noted) == 3:
        derivation: object = noted[2]
        if not is_object(derivation) or derivation.keys() != AS_IT_IS.describe().keys():
            raise ValueError("no derivation")
        if derivation["paths"] is not None and not is_list(derivation["paths"]):
            raise ValueError("no paths")
    return tuple(noted)


def changes_since(mark: Mark, there: References) -> list[str]:
    """Return the changes of somebody else at a place, in words; none if a copy put all of it.

    What upkeep of the copy drops does not count: the next copy brings it again.
    """
    if all(it in mark.references.get(key, ()) for key, it in there.sums.items()):
        return []
    if not mark.summaries:
        return ["it was not put there by a copy"]
    # Collection and expiration in the copy change its bytes and neither refs nor the rest.
    now = _summary(there)
    words: list[str] = []
    for ref, target in now["refs"].items():
        kind, _, name = ref.partition(" ")
        # In format version 1 some refs may be old and some new, where a copy was interrupted.
        known = [it["refs"][ref] for it in mark.summaries if ref in it["refs"]]
        if not known:
            words.append(f"{kind} {name!r} was created, at {target}")
        elif target not in known:
            words.append(f"{kind} {name!r} was moved from {known[-1]} to {target}")
    if now["rest"] not in {it["rest"] for it in mark.summaries}:
        words.append("its configuration, metadata, status or flags were changed")
    return words
