"""Settings of a repository that only this library has.

They are an item of the repository's metadata: the format's configuration has no field for them, and
the official engine drops unknown fields when it writes the configuration. Format version 1 has no
such metadata, so there they are given at each opening.

Among them are the branches that change only by proposals. That is decided in the same atomic step
as the change that it refuses. The official engine and earlier versions of this library do not
know it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.engine.files.packing import Packing
from icechunk_async.errors import BranchProtectedError, FormatError, IcechunkError
from icechunk_async.format.json.metadata import decode_value, encode_items

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from icechunk_async.format.json.metadata import JSON, RawMetadata
    from icechunk_async.format.repo_info import RepoInfo

__all__ = [
    "METADATA_NAME",
    "OwnSettings",
    "check_unprotected",
    "item_with",
    "item_without",
    "keeping_protection",
    "protections_in",
    "stored_item",
]

_log = logging.getLogger(__name__)

METADATA_NAME: Final = "icechunk-async"
"""The item of a repository's metadata for settings that only this library has."""
_PACKING: Final = "packing"
_SUMS: Final = "sums"
_STATISTICS: Final = "statistics"
_PROTECTED: Final = "protected"
_CHECKS: Final = "checks"
_MOST_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Settings that were given, or are stored; None where one was not."""

    packing: Packing | None = None
    sums: bool | None = None
    """Whether checksums of chunks are kept."""
    statistics: bool | None = None
    """Whether statistics of chunks are made as they are written."""

    def raw(self) -> RawMetadata:
        """Return the metadata of a new repository."""
        if self == OwnSettings():
            return ()
        return tuple(encode_items({METADATA_NAME: self.laid_over(None)}, 2))

    def laid_over(self, item: JSON) -> JSON:
        """Return the item of a repository's metadata with what was given here in it."""
        merged: dict[str, JSON] = {**item} if isinstance(item, dict) else {}
        if self.packing is not None:
            merged[_PACKING] = self.packing.to_json()
        if self.sums is not None:
            merged[_SUMS] = self.sums
        if self.statistics is not None:
            merged[_STATISTICS] = self.statistics
        return merged

    @staticmethod
    def stored_in(info: RepoInfo) -> OwnSettings:
        """Return the settings that a repository stores, without unusable ones."""
        try:
            item = stored_item(info)
        except IcechunkError as error:
            _log.warning("the stored settings cannot be used, so none is: %s", error)
            return OwnSettings()
        if not isinstance(item, dict):
            return OwnSettings()
        sums, statistics = item.get(_SUMS), item.get(_STATISTICS)
        return OwnSettings(
            _packing(item.get(_PACKING)),
            sums if isinstance(sums, bool) else None,
            statistics if isinstance(statistics, bool) else None,
        )


def stored_item(info: RepoInfo) -> JSON:
    """Return the item of a repository's metadata that is this library's; None without one.

    Raises:
        FormatError: it is damaged.
    """
    raw = dict(info.raw_metadata).get(METADATA_NAME)
    return None if raw is None else decode_value(raw, 2)


def _packing(stored: Any) -> Packing | None:
    try:
        # A later version may add fields; they are ignored.
        return (
            None if stored is None else Packing(stored["target_bytes"], stored["max_chunk_bytes"])
        )
    except (IcechunkError, KeyError, TypeError) as error:
        _log.warning("the stored setting of packing cannot be used, so none is: %s", error)
        return None


def protections_in(info: RepoInfo) -> dict[str, frozenset[str]]:
    """Return the protected branches, and the checks that each asks for.

    Raises:
        FormatError: the setting is damaged. Then no branch may be taken for unprotected.
    """
    if all(name != METADATA_NAME for name, _ in info.raw_metadata):
        return {}  # nearly always: nothing is decoded
    item = stored_item(info)
    if not isinstance(item, dict) or _PROTECTED not in item:
        return {}
    stored = item[_PROTECTED]
    found: dict[str, frozenset[str]] = {}
    if not isinstance(stored, dict):
        raise _damaged()
    for branch, rule in stored.items():
        checks = rule.get(_CHECKS, []) if isinstance(rule, dict) else None
        if not isinstance(checks, list):
            raise _damaged()
        names = [it for it in checks if isinstance(it, str)]
        # Not ignored: a check that cannot be read might be the one that would not pass.
        if len(names) != len(checks):
            raise _damaged()
        found[branch] = frozenset(names)
    return found


def _damaged() -> FormatError:
    return FormatError(
        f"The setting of protected branches, {_PROTECTED!r} in the item {METADATA_NAME!r} of the "
        "repository's metadata, is not what this library writes, so no branch is changed. Set it "
        "anew, with Repository.protect_branch or unprotect_branch."
    )


def check_unprotected(info: RepoInfo, branch: str, approved: frozenset[str] | None = None) -> None:
    """Refuse a change of a protected branch that no proposal makes.

    Args:
        info: the state that is about to be replaced.
        branch: the branch.
        approved: the checks that passed on the new state, if a proposal makes the change.

    Raises:
        BranchProtectedError: the branch is protected, or asks for other checks.
        FormatError: the setting is damaged.
    """
    needed = protections_in(info).get(branch)
    if needed is None:
        return
    if approved is None:
        raise BranchProtectedError(
            f"Branch {branch!r} is protected: it changes only by proposals. Nothing was published. "
            "Commit to another branch, Repository.propose that one, and accept the proposal; or "
            "lift the protection with Repository.unprotect_branch.",
            branch=branch,
        )
    if missing := sorted(needed - approved):
        names = ", ".join(map(repr, missing[:_MOST_SHOWN]))
        raise BranchProtectedError(
            f"Branch {branch!r} asks for checks that did not pass on this state or were not run: "
            f"{names}. Nothing was published. Pass them as checks= to the proposal's accept.",
            branch=branch,
            checks=missing,
        )


def item_with(info: RepoInfo, branch: str, checks: Collection[str]) -> dict[str, JSON]:
    """Return this library's item of the metadata with a branch protected."""
    protected = _others(info, branch)
    protected[branch] = {_CHECKS: sorted(set(checks))}
    return {**_item(info), _PROTECTED: protected}


def item_without(info: RepoInfo, branch: str) -> dict[str, JSON]:
    """Return this library's item of the metadata with a branch unprotected.

    Where no other branch is protected, a damaged setting goes as well.
    """
    kept: dict[str, JSON] = {name: it for name, it in _item(info).items() if name != _PROTECTED}
    protected = _others(info, branch)
    return {**kept, _PROTECTED: protected} if protected else kept


def keeping_protection(info: RepoInfo, metadata: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return metadata that replace those of a repository, with its protected branches kept."""
    item = _item(info)
    if _PROTECTED not in item:
        return metadata
    given = metadata.get(METADATA_NAME)
    own: dict[str, JSON] = {**given} if isinstance(given, dict) else {}
    # What is given wins, so that protection can be changed on purpose, and is not lost by mistake.
    return {**metadata, METADATA_NAME: {_PROTECTED: item[_PROTECTED], **own}}


def _others(info: RepoInfo, branch: str) -> dict[str, JSON]:
    try:
        protected = protections_in(info)
    # To set a branch anew is the way out of damage, see `_damaged`, so it must not fail by it.
    except FormatError:
        protected = {}
    return {it: {_CHECKS: sorted(names)} for it, names in protected.items() if it != branch}


def _item(info: RepoInfo) -> dict[str, JSON]:
    try:
        item = stored_item(info)
    except FormatError:  # nothing in it can be kept
        return {}
    return {**item} if isinstance(item, dict) else {}
