"""Metadata, status and feature flags of a repository as values (spec 2, "Repo info file")."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from icechunk_async.errors import FeatureDisabledError, InvalidInputError, UnsupportedBySpecError
from icechunk_async.format.metadata import encode_items
from icechunk_async.format.updates import FeatureFlagChanged, MetadataChanged, RepoStatusChanged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from icechunk_async.format.metadata import JSON
    from icechunk_async.format.repo_info import RepoInfo
    from icechunk_async.format.updates import RepoStatus, UpdateDetail
    from icechunk_async.repository.history.edits import Edit

__all__ = [
    "CREATE_TAG",
    "DELETE_TAG",
    "MOVE_NODE",
    "FeatureFlag",
    "change_status",
    "check_feature",
    "feature_flags",
    "merge_metadata",
    "replace_metadata",
    "set_feature_flag",
    "unsupported_by_spec_1",
]

_SPEC: Final = 2
MOVE_NODE: Final = "move_node"
CREATE_TAG: Final = "create_tag"
DELETE_TAG: Final = "delete_tag"
# Name -> id and default. The official engine reserves the ids 1 and 2.
_FEATURES: Final = {MOVE_NODE: (3, True), CREATE_TAG: (4, True), DELETE_TAG: (5, True)}


@dataclass(frozen=True, slots=True)
class FeatureFlag:
    """Whether a repository allows an operation."""

    id: int
    name: str
    default_enabled: bool
    setting: bool | None
    """None where nobody decided, so that the default counts."""

    @property
    def enabled(self) -> bool:
        """Whether the operation is allowed."""
        return self.default_enabled if self.setting is None else self.setting


def feature_flags(info: RepoInfo) -> list[FeatureFlag]:
    """Answer every flag that this library knows; others in the file are carried along."""
    return [_flag(info, name) for name in _FEATURES]


def _flag(info: RepoInfo, name: str) -> FeatureFlag:
    number, default = _FEATURES[name]
    setting = None
    if number in (info.enabled_flags or ()):
        setting = True
    elif number in (info.disabled_flags or ()):
        setting = False
    return FeatureFlag(number, name, default, setting)


def check_feature(info: RepoInfo, name: str) -> None:
    """Refuse an operation whose feature flag is off.

    Raises:
        FeatureDisabledError: it is.
    """
    if not _flag(info, name).enabled:
        raise FeatureDisabledError(
            f"The repository's feature flag {name!r} is off, so this operation is not allowed. "
            f"Whoever runs the repository allows it with set_feature_flag({name!r}, True).",
            feature=name,
            code="feature-flag-disabled",
        )


def set_feature_flag(name: str, setting: bool | None) -> Edit:  # noqa: FBT001
    """Answer the edit that switches a feature on (True), off (False), or to its default (None).

    Raises:
        InvalidInputError: there is no such flag.
    """
    if name not in _FEATURES:
        raise InvalidInputError(
            f"There is no feature flag {name!r}. The flags are: {', '.join(_FEATURES)}.",
            code="invalid-feature-flag",
        )
    number, _ = _FEATURES[name]

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        changed = replace(
            info,
            enabled_flags=_listed(info.enabled_flags, number, setting is True),
            disabled_flags=_listed(info.disabled_flags, number, setting is False),
        )
        return changed, FeatureFlagChanged(number, bool(setting), setting is not None)

    return edit


def _listed(flags: tuple[int, ...] | None, number: int, present: bool) -> tuple[int, ...] | None:  # noqa: FBT001
    """Answer a list with a flag or without it; one that never held any stays absent."""
    if flags is None and not present:
        return None
    others = {*(flags or ())} - {number}
    return tuple(sorted({*others, number} if present else others))


def replace_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Answer the edit that replaces the repository's own metadata."""
    items = tuple(encode_items(metadata, _SPEC))

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        return replace(info, raw_metadata=items), MetadataChanged()

    return edit


def merge_metadata(metadata: Mapping[str, JSON]) -> Edit:
    """Answer the edit that lays items over the repository's own metadata, name by name."""
    items = encode_items(metadata, _SPEC)

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        merged = {**dict(info.raw_metadata), **dict(items)}
        return replace(info, raw_metadata=tuple(sorted(merged.items()))), MetadataChanged()

    return edit


def change_status(status: RepoStatus) -> Edit:
    """Answer the edit that replaces the repository's status."""

    def edit(info: RepoInfo) -> tuple[RepoInfo, UpdateDetail]:
        return replace(info, status=status), RepoStatusChanged(status)

    return edit


def unsupported_by_spec_1(what: str) -> UnsupportedBySpecError:
    """Answer the error for what only format version 2 can express."""
    return UnsupportedBySpecError(
        f"A repository of format version 1 has no {what}. Format version 2 has: migrate the "
        "repository with icechunk_async.repository.migrate.upgrade.",
        what=what,
    )
