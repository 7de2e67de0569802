"""Which manifests a session fetches before anybody asks for them: a hint to readers.

Regular expressions are searched anywhere in the text. The official engine uses Rust's syntax,
this library Python's ``re``: keep to what both share (no look-around, no back references, no
set operations, flags at the start only). A pattern that does not compile matches nothing. One
that backtracks without end blocks its caller: accept patterns only from people you trust with
the repository's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, override

from icechunk_async.format.config._fields import (
    U32,
    Effective,
    Section,
    check_integer,
    check_text,
    of_type,
)
from icechunk_async.format.config._regex import check_conditions, last_segment, search

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DEFAULT_PRELOAD_CONDITION",
    "ManifestPreloadCondition",
    "ManifestPreloadConfig",
    "PreloadAll",
    "PreloadAlways",
    "PreloadAny",
    "PreloadName",
    "PreloadNever",
    "PreloadPath",
    "PreloadRefs",
]


class ManifestPreloadCondition:
    """Decides whether a manifest is fetched when a session begins."""

    __slots__ = ()

    def matches(self, path: str, num_refs: int) -> bool:
        """Say whether the manifest of an array is to be preloaded.

        Args:
            path: the array's absolute path.
            num_refs: chunk references in the manifest.
        """
        raise NotImplementedError

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if any of the conditions does."""
        return PreloadAny(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if all conditions do."""
        return PreloadAll(tuple(conditions))

    @staticmethod
    def path_matches(regex: str) -> ManifestPreloadCondition:
        """Match if the expression is found in the array's absolute path."""
        return PreloadPath(regex)

    @staticmethod
    def name_matches(regex: str) -> ManifestPreloadCondition:
        """Match if the expression is found in the last segment of the array's path."""
        return PreloadName(regex)

    @staticmethod
    def num_refs(from_refs: int | None, to_refs: int | None) -> ManifestPreloadCondition:
        """Match manifests of ``from_refs`` references or more, and fewer than ``to_refs``."""
        return PreloadRefs(from_refs, to_refs)

    @staticmethod
    def true() -> ManifestPreloadCondition:
        """Match every manifest."""
        return PreloadAlways()

    @staticmethod
    def false() -> ManifestPreloadCondition:
        """Match no manifest."""
        return PreloadNever()

    def __or__(self, other: ManifestPreloadCondition) -> ManifestPreloadCondition:
        left = self.conditions if isinstance(self, PreloadAny) else (self,)
        return PreloadAny((*left, other))

    def __and__(self, other: ManifestPreloadCondition) -> ManifestPreloadCondition:
        left = self.conditions if isinstance(self, PreloadAll) else (self,)
        return PreloadAll((*left, other))


@dataclass(frozen=True, slots=True)
class PreloadPath(ManifestPreloadCondition):
    """The expression is found in the absolute path."""

    regex: str

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        check_text("PreloadPath.regex", self.regex)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return search(self.regex, path)


@dataclass(frozen=True, slots=True)
class PreloadName(ManifestPreloadCondition):
    """The expression is found in the last segment of the path; the root has none."""

    regex: str

    def __post_init__(self) -> None:
        """Refuse what is no text."""
        check_text("PreloadName.regex", self.regex)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        name = last_segment(path)
        return name is not None and search(self.regex, name)


@dataclass(frozen=True, slots=True)
class PreloadRefs(ManifestPreloadCondition):
    """The number of references is in ``[from_refs, to_refs)``; None leaves a side open."""

    from_refs: int | None
    to_refs: int | None

    def __post_init__(self) -> None:
        """Refuse bounds of more than 32 bits."""
        for name, bound in (("from_refs", self.from_refs), ("to_refs", self.to_refs)):
            if bound is not None:
                check_integer(f"PreloadRefs.{name}", bound, 0, 2**32 - 1)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        above = self.from_refs is None or self.from_refs <= num_refs
        return above and (self.to_refs is None or num_refs < self.to_refs)


@dataclass(frozen=True, slots=True)
class PreloadAlways(ManifestPreloadCondition):
    """Every manifest."""

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class PreloadNever(ManifestPreloadCondition):
    """No manifest."""

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PreloadAny(ManifestPreloadCondition):
    """At least one of the conditions."""

    conditions: tuple[ManifestPreloadCondition, ...]

    def __post_init__(self) -> None:
        """Refuse what is no condition, and deep nesting."""
        check_conditions("PreloadAny", self.conditions, ManifestPreloadCondition)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return any(condition.matches(path, num_refs) for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class PreloadAll(ManifestPreloadCondition):
    """All of the conditions."""

    conditions: tuple[ManifestPreloadCondition, ...]

    def __post_init__(self) -> None:
        """Refuse what is no condition, and deep nesting."""
        check_conditions("PreloadAll", self.conditions, ManifestPreloadCondition)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return all(condition.matches(path, num_refs) for condition in self.conditions)


# Names of coordinate axes, as cf-xarray guesses them.
_COORDINATE_NAMES: Final = (
    r"^\bt\b$|^(time|min|hour|day|week|month|year)[0-9]*$",
    r"^(z|nav_lev|gdep|lv_|[o]*lev|bottom_top|sigma|h(ei)?ght|altitude|depth|isobaric|pres|isotherm)[a-z_]*[0-9]*$",
    r"^(y|j|nlat|rlat|nj)$",
    r"^y?(nav_lat|lat|gphi)[a-z0-9]*$",
    r"^x?(nav_lon|lon|glam)[a-z0-9]*$",
    r"^(x|i|nlon|rlon|ni)$",
)

DEFAULT_PRELOAD_CONDITION: Final = PreloadAll(
    (PreloadAny(tuple(map(PreloadName, _COORDINATE_NAMES))), PreloadRefs(0, 1001))
)
"""Arrays named like coordinates, with at most 1000 references: small and wanted by every reader."""


@dataclass(frozen=True, slots=True)
class ManifestPreloadConfig(Section):
    """How much is preloaded. Merging replaces it as a unit.

    Attributes:
        max_total_refs: chunk references preloaded by one session (10,000).
        preload_if: which manifests (small ones of arrays named like coordinates).
        max_arrays_to_scan: arrays looked at in search of such manifests (50).
    """

    merges_whole: ClassVar[bool] = True

    max_total_refs: int | None = field(default=None, metadata=U32)
    preload_if: ManifestPreloadCondition | None = field(
        default=None, metadata=of_type(ManifestPreloadCondition)
    )
    max_arrays_to_scan: int | None = field(default=None, metadata=U32)

    effective_max_total_refs = Effective("max_total_refs", 10_000)
    effective_preload_if = Effective[ManifestPreloadCondition](
        "preload_if", DEFAULT_PRELOAD_CONDITION
    )
    effective_max_arrays_to_scan = Effective("max_arrays_to_scan", 50)
