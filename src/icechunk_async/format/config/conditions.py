"""Conditions on paths, names and sizes: manifests to preload, and how arrays are split.

Regular expressions are searched anywhere in the text. The official engine uses Rust's syntax,
this library Python's ``re``: keep to what both share (no look-around, no back references, no
set operations, flags at the start only). A pattern that does not compile matches nothing.

Preloading is a hint that every reader follows, also of a repository that somebody else wrote. It
passes over patterns that could take long on a path: those in which something that is repeated has
quantifiers or alternatives itself, and those with several quantifiers on long paths. Splitting
decides how a commit is stored, so it tries all patterns, and one that backtracks without end blocks
the writer: commit only to repositories whose configuration you trust.

For the syntax of regular expressions see ``preload``.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, Final, cast, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidConfigError
from icechunk_async.format.config.fields import (
    U32,
    Effective,
    Section,
    check_conditions,
    check_integer,
    check_text,
    last_segment,
    most_steps,
    of_type,
    search,
    search_briefly,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "DEFAULT_PRELOAD_CONDITION",
    "DEFAULT_SPLIT_SIZES",
    "ManifestPreloadCondition",
    "ManifestPreloadConfig",
    "ManifestSplitCondition",
    "ManifestSplitDimCondition",
    "ManifestSplittingConfig",
    "PreloadAll",
    "PreloadAlways",
    "PreloadAny",
    "PreloadName",
    "PreloadNever",
    "PreloadPath",
    "PreloadRefs",
    "SplitAll",
    "SplitAny",
    "SplitAnyArray",
    "SplitDimCondition",
    "SplitName",
    "SplitPath",
    "SplitSizes",
]


class ManifestPreloadCondition:
    """A condition on manifests to fetch when a session starts."""

    __slots__ = ()

    def matches(self, path: str, num_refs: int) -> bool:
        """Return whether the manifest of an array should be preloaded.

        Args:
            path: the array's absolute path.
            num_refs: chunk references in the manifest.
        """
        raise NotImplementedError

    def may_match(self, path: str) -> bool:
        """Return whether any manifest of the array at this path may match; False is certain."""
        del path
        return True

    def most_steps(self, path: str) -> int:
        """Return the most steps that it takes to match a path once."""
        del path
        return 1

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
        """Validate the text."""
        check_text("PreloadPath.regex", self.regex)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return self.may_match(path)

    @override
    def may_match(self, path: str) -> bool:
        return search_briefly(self.regex, path)

    @override
    def most_steps(self, path: str) -> int:
        return most_steps(self.regex, path) or 1


@dataclass(frozen=True, slots=True)
class PreloadName(ManifestPreloadCondition):
    """The expression is found in the last segment of the path; the root has none."""

    regex: str

    def __post_init__(self) -> None:
        """Validate the text."""
        check_text("PreloadName.regex", self.regex)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return self.may_match(path)

    @override
    def may_match(self, path: str) -> bool:
        name = last_segment(path)
        if name is None:
            return False
        # The patterns of the default have several quantifiers, and none of them backtracks far.
        find = search if self.regex in _COORDINATE_NAMES else search_briefly
        return find(self.regex, name)

    @override
    def most_steps(self, path: str) -> int:
        name = last_segment(path) or ""
        return most_steps(self.regex, name) or len(name) + 1


# Bounds have 32 bits because the counts in a snapshot's list of manifests have (spec, "Snapshot
# files").
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

    @override
    def may_match(self, path: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PreloadAny(ManifestPreloadCondition):
    """At least one of the conditions."""

    conditions: tuple[ManifestPreloadCondition, ...]

    def __post_init__(self) -> None:
        """Validate the conditions and their nesting."""
        check_conditions("PreloadAny", self.conditions, ManifestPreloadCondition)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return any(condition.matches(path, num_refs) for condition in self.conditions)

    @override
    def may_match(self, path: str) -> bool:
        return any(condition.may_match(path) for condition in self.conditions)

    @override
    def most_steps(self, path: str) -> int:
        return 1 + sum(condition.most_steps(path) for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class PreloadAll(ManifestPreloadCondition):
    """All of the conditions."""

    conditions: tuple[ManifestPreloadCondition, ...]

    def __post_init__(self) -> None:
        """Validate the conditions and their nesting."""
        check_conditions("PreloadAll", self.conditions, ManifestPreloadCondition)

    @override
    def matches(self, path: str, num_refs: int) -> bool:
        return all(condition.matches(path, num_refs) for condition in self.conditions)

    @override
    def may_match(self, path: str) -> bool:
        return all(condition.may_match(path) for condition in self.conditions)

    @override
    def most_steps(self, path: str) -> int:
        return 1 + sum(condition.most_steps(path) for condition in self.conditions)


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
    # The official default says "from 0 to 1000, both included"; the end is exclusive here.
    (PreloadAny(tuple(map(PreloadName, _COORDINATE_NAMES))), PreloadRefs(0, 1001))
)
"""Arrays named like coordinates, with at most 1000 references: small and wanted by every reader."""


@dataclass(frozen=True, slots=True)
class ManifestPreloadConfig(Section):
    """Limits of preloading. Merging replaces the section as a unit.

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

    effective_max_total_refs = Effective(10_000)
    effective_preload_if = Effective[ManifestPreloadCondition](DEFAULT_PRELOAD_CONDITION)
    effective_max_arrays_to_scan = Effective(50)


# The stored form holds the number of chunks in 32 bits. No axis has more chunks, so the largest
# number stands for "the whole axis".
_MAX_U32: Final = 2**32 - 1


class ManifestSplitCondition:
    """A condition on the arrays that a splitting rule applies to."""

    __slots__ = ()

    def matches(self, path: str) -> bool:
        """Return whether the rule applies to the array at this absolute path."""
        raise NotImplementedError

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if any of the conditions does."""
        return SplitAny(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if all conditions do."""
        return SplitAll(tuple(conditions))

    @staticmethod
    def path_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the array's absolute path."""
        return SplitPath(regex)

    @staticmethod
    def name_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the last segment of the array's path."""
        return SplitName(regex)

    @staticmethod
    def any_array() -> ManifestSplitCondition:
        """Match every array."""
        return SplitAnyArray()

    AnyArray = any_array  # as the official class spells it

    def __or__(self, other: ManifestSplitCondition) -> ManifestSplitCondition:
        left = self.conditions if isinstance(self, SplitAny) else (self,)
        return SplitAny((*left, other))

    def __and__(self, other: ManifestSplitCondition) -> ManifestSplitCondition:
        left = self.conditions if isinstance(self, SplitAll) else (self,)
        return SplitAll((*left, other))


@dataclass(frozen=True, slots=True)
class SplitPath(ManifestSplitCondition):
    """The expression is found in the absolute path."""

    regex: str

    def __post_init__(self) -> None:
        """Validate the text."""
        check_text("SplitPath.regex", self.regex)

    @override
    def matches(self, path: str) -> bool:
        return search(self.regex, path)


@dataclass(frozen=True, slots=True)
class SplitName(ManifestSplitCondition):
    """The expression is found in the last segment of the path; the root has none."""

    regex: str

    def __post_init__(self) -> None:
        """Validate the text."""
        check_text("SplitName.regex", self.regex)

    @override
    def matches(self, path: str) -> bool:
        name = last_segment(path)
        return name is not None and search(self.regex, name)


@dataclass(frozen=True, slots=True)
class SplitAnyArray(ManifestSplitCondition):
    """Every array."""

    @override
    def matches(self, path: str) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class SplitAny(ManifestSplitCondition):
    """At least one of the conditions."""

    conditions: tuple[ManifestSplitCondition, ...]

    def __post_init__(self) -> None:
        """Validate the conditions and their nesting."""
        check_conditions("SplitAny", self.conditions, ManifestSplitCondition)

    @override
    def matches(self, path: str) -> bool:
        return any(condition.matches(path) for condition in self.conditions)


@dataclass(frozen=True, slots=True)
class SplitAll(ManifestSplitCondition):
    """All of the conditions."""

    conditions: tuple[ManifestSplitCondition, ...]

    def __post_init__(self) -> None:
        """Validate the conditions and their nesting."""
        check_conditions("SplitAll", self.conditions, ManifestSplitCondition)

    @override
    def matches(self, path: str) -> bool:
        return all(condition.matches(path) for condition in self.conditions)


class ManifestSplitDimCondition:
    """Conditions on the dimensions of an array."""

    @dataclass(frozen=True, slots=True)
    class Axis:
        """The dimension with this index, counted from 0."""

        axis: int

        def __post_init__(self) -> None:
            """Validate the index."""
            # The official type is as wide as a pointer. An axis that no array has is legal, and
            # matches none.
            check_integer("ManifestSplitDimCondition.Axis.axis", self.axis, 0, 2**64 - 1)

        def matches(self, axis: int, name: str | None) -> bool:
            """Compare the index."""
            return self.axis == axis

    @dataclass(frozen=True, slots=True)
    class DimensionName:
        """Dimensions in whose name the expression is found; unnamed ones never."""

        regex: str

        def __post_init__(self) -> None:
            """Validate the text."""
            check_text("ManifestSplitDimCondition.DimensionName.regex", self.regex)

        def matches(self, axis: int, name: str | None) -> bool:
            """Search the name."""
            return name is not None and search(self.regex, name)

    @dataclass(frozen=True, slots=True)
    class Any:
        """Every dimension."""

        def matches(self, axis: int, name: str | None) -> bool:
            """Match."""
            return True


type SplitDimCondition = (
    ManifestSplitDimCondition.Axis
    | ManifestSplitDimCondition.DimensionName
    | ManifestSplitDimCondition.Any
)
type SplitSizes = tuple[
    tuple[ManifestSplitCondition, tuple[tuple[SplitDimCondition, int], ...]], ...
]
"""Rules in order: for which arrays, and per dimension how many chunks a manifest spans."""

_DIM_CONDITIONS: Final = (
    ManifestSplitDimCondition.Axis,
    ManifestSplitDimCondition.DimensionName,
    ManifestSplitDimCondition.Any,
)

DEFAULT_SPLIT_SIZES: Final[SplitSizes] = (
    (SplitPath(".*"), ((ManifestSplitDimCondition.Any(), _MAX_U32),)),
)
"""One manifest per array, worded as the official engine words it."""


@dataclass(frozen=True, slots=True)
class ManifestSplittingConfig(Section):
    """The splitting rules. Merging replaces them as a unit.

    Attributes:
        split_sizes: the rules; None means one manifest per array. The first rule that matches
            array and dimension decides that dimension; later rules decide what is left.
    """

    merges_whole: ClassVar[bool] = True

    split_sizes: SplitSizes | None = field(default=None, metadata=of_type(tuple))

    def __post_init__(self) -> None:
        """Validate the rules; each must span at least one chunk."""
        if self.split_sizes is not None:
            _check_rules(self.split_sizes)

    @property
    def effective_split_sizes(self) -> SplitSizes:
        """The rules in effect."""
        return DEFAULT_SPLIT_SIZES if self.split_sizes is None else self.split_sizes

    @staticmethod
    def from_dict(
        split_sizes: Mapping[ManifestSplitCondition, Mapping[SplitDimCondition, int]],
    ) -> ManifestSplittingConfig:
        """Build rules from nested dicts, in their order."""
        return ManifestSplittingConfig(
            tuple((arrays, tuple(sizes.items())) for arrays, sizes in split_sizes.items())
        )

    def to_dict(self) -> dict[ManifestSplitCondition, dict[SplitDimCondition, int]]:
        """Return the effective rules as nested dicts; of equal conditions the last remains."""
        return {arrays: dict(sizes) for arrays, sizes in self.effective_split_sizes}


def _check_rules(rules: object) -> None:
    for arrays, sizes in _pairs(rules, "a pair of ManifestSplitCondition and sizes"):
        if not isinstance(arrays, ManifestSplitCondition):
            raise _bad_rules("the first of each pair must be a ManifestSplitCondition")
        for dimension, num_chunks in _pairs(sizes, "a pair of dimension condition and number"):
            if not isinstance(dimension, _DIM_CONDITIONS):
                raise _bad_rules(
                    "sizes are for ManifestSplitDimCondition.Axis, .DimensionName, .Any"
                )
            check_integer(
                "ManifestSplittingConfig.split_sizes, num_chunks", num_chunks, 1, _MAX_U32
            )


def _pairs(value: object, what: str) -> list[tuple[object, object]]:
    pairs: list[tuple[object, object]] = []
    for item in cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,):
        pair = cast("tuple[object, ...]", item) if isinstance(item, tuple) else ()
        if len(pair) != 2:
            raise _bad_rules(f"each entry must be {what}, and all in a tuple")
        pairs.append((pair[0], pair[1]))
    return pairs


def _bad_rules(problem: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"ManifestSplittingConfig.split_sizes cannot be used: {problem}.",
        field="ManifestSplittingConfig.split_sizes",
    )
