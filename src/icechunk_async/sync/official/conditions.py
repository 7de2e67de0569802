"""Conditions: which manifests are preloaded, and how references are divided among manifests.

Regular expressions are searched anywhere in the text; see `icechunk_async.format.config` for their
syntax.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast, override

from icechunk_async.format.config import ManifestSplitDimCondition as NativeDim
from icechunk_async.format.config import conditions as native
from icechunk_async.sync.official.display import public
from icechunk_async.sync.official.mirrors import mirrors
from icechunk_async.sync.official.variants import Items, Kinds, Variant, kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AnyDim",
    "ManifestPreloadCondition",
    "ManifestSplitCondition",
    "ManifestSplitDimCondition",
    "ManifestSplitValues",
    "SplitSizesDict",
]

_HOME: Final = "icechunk_async.sync.config"
_KINDS: Final = {
    "Any": ("Or", "or_conditions"),
    "All": ("And", "and_conditions"),
    "Path": ("PathMatches", "path_matches"),
    "Name": ("NameMatches", "name_matches"),
    "Refs": ("NumRefs", "num_refs"),
    "Always": ("True", "true"),
    "Never": ("False", "false"),
    "AnyArray": ("AnyArray", "any_array"),
}
"""The names of kinds: at the end of the native classes, in the family, and of its functions."""


class _Condition[F](Variant):
    """A condition of the family `F`; displayed as the call that makes it."""

    _named: ClassVar = False
    _made_by: ClassVar[str] = ""

    def __init_subclass__(cls, *, of: type | None = None) -> None:
        """Make a kind an attribute of its family, where pickle finds it."""
        super().__init_subclass__(of=of)
        if of is not None:
            family = cls.__mro__[1]
            name, cls._made_by = _KINDS[re.sub("^Preload|^Split", "", of.__name__)]
            setattr(family, name, public("config", family.__name__, name)(cls))

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise an error for the family itself, which decides nothing."""
        del args, kwargs
        # The official families cannot be made either; only their kinds have instances.
        if _Condition in cls.__bases__:
            raise TypeError(f"{cls.__name__} has no instances; use its functions.")
        return object.__new__(cls)

    @property
    @override
    def _maker(self) -> str:
        return f"{_HOME}.{type(self).__mro__[1].__name__}.{self._made_by}"

    def __or__(self, value: F, /) -> F:
        """Match if one of both matches."""
        return cast("F", cast("Any", self).or_conditions((self, value)))

    def __and__(self, value: F, /) -> F:
        """Match if both match."""
        return cast("F", cast("Any", self).and_conditions((self, value)))


@mirrors(native.ManifestPreloadCondition)
@public("config")
class ManifestPreloadCondition(_Condition["ManifestPreloadCondition"]):
    """Decides whether a manifest is fetched when a session begins. Made by its functions."""

    Or: ClassVar[type[_PreloadOr]]
    And: ClassVar[type[_PreloadAnd]]
    PathMatches: ClassVar[type[_PreloadPath]]
    NameMatches: ClassVar[type[_PreloadName]]
    NumRefs: ClassVar[type[_PreloadRefs]]

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if any of the conditions matches."""
        return _PreloadOr(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if all conditions match."""
        return _PreloadAnd(tuple(conditions))

    @staticmethod
    def path_matches(regex: str) -> ManifestPreloadCondition:
        """Match if the expression is found in the array's absolute path."""
        return _PreloadPath(regex)

    @staticmethod
    def name_matches(regex: str) -> ManifestPreloadCondition:
        """Match if the expression is found in the last segment of the array's path."""
        return _PreloadName(regex)

    @staticmethod
    def num_refs(from_refs: int | None, to_refs: int | None) -> ManifestPreloadCondition:
        """Match manifests of ``from_refs`` references or more, and fewer than ``to_refs``."""
        return _PreloadRefs(from_refs, to_refs)

    @staticmethod
    def true() -> ManifestPreloadCondition:
        """Match every manifest."""
        return _PreloadTrue()

    @staticmethod
    def false() -> ManifestPreloadCondition:
        """Match no manifest."""
        return _PreloadFalse()


@mirrors(native.ManifestSplitCondition)
@public("config")
class ManifestSplitCondition(_Condition["ManifestSplitCondition"]):
    """Decides which arrays a splitting rule applies to. Made by its functions."""

    Or: ClassVar[type[_SplitOr]]
    And: ClassVar[type[_SplitAnd]]
    PathMatches: ClassVar[type[_SplitPath]]
    NameMatches: ClassVar[type[_SplitName]]
    AnyArray: ClassVar[type[_SplitAnyArray]]

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if any of the conditions matches."""
        return _SplitOr(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if all conditions match."""
        return _SplitAnd(tuple(conditions))

    @staticmethod
    def path_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the array's absolute path."""
        return _SplitPath(regex)

    @staticmethod
    def name_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the last segment of the array's path."""
        return _SplitName(regex)


class _PreloadOr(ManifestPreloadCondition, Items, of=native.PreloadAny):
    _0: tuple[ManifestPreloadCondition, ...]


class _PreloadAnd(ManifestPreloadCondition, Items, of=native.PreloadAll):
    _0: tuple[ManifestPreloadCondition, ...]


class _PreloadPath(ManifestPreloadCondition, of=native.PreloadPath):
    regex: str


class _PreloadName(ManifestPreloadCondition, of=native.PreloadName):
    regex: str


class _PreloadRefs(ManifestPreloadCondition, of=native.PreloadRefs):
    from_refs: int | None
    to: int | None


# "from" is a keyword, but a field of the official class.
setattr(_PreloadRefs, "from", property(lambda self: self.from_refs))


class _PreloadTrue(ManifestPreloadCondition, Items, of=native.PreloadAlways):
    pass


class _PreloadFalse(ManifestPreloadCondition, Items, of=native.PreloadNever):
    pass


class _SplitOr(ManifestSplitCondition, Items, of=native.SplitAny):
    _0: tuple[ManifestSplitCondition, ...]


class _SplitAnd(ManifestSplitCondition, Items, of=native.SplitAll):
    _0: tuple[ManifestSplitCondition, ...]


class _SplitPath(ManifestSplitCondition, of=native.SplitPath):
    regex: str


class _SplitName(ManifestSplitCondition, of=native.SplitName):
    regex: str


class _SplitAnyArray(ManifestSplitCondition, Items, of=native.SplitAnyArray):
    pass


class _Dim(Items):
    """A condition on dimensions; displayed as the official ones are."""

    _made_by: ClassVar[str] = ""

    @property
    @override
    def _maker(self) -> str:
        return f"{_HOME}.ManifestSplitDimCondition.{self._made_by}"


@kinds("config")
class ManifestSplitDimCondition(Kinds):
    """Decides which dimensions of an array a number of chunks is for."""

    class Axis(_Dim, of=NativeDim.Axis):
        _made_by: ClassVar = "axis"
        _0: int

    class DimensionName(_Dim, of=NativeDim.DimensionName):
        _made_by: ClassVar = "dimension_name"
        _0: str

    class Any(_Dim, of=NativeDim.Any):
        _made_by: ClassVar = "any"


type AnyDim = (
    ManifestSplitDimCondition.Axis
    | ManifestSplitDimCondition.DimensionName
    | ManifestSplitDimCondition.Any
)
type ManifestSplitValues = dict[AnyDim, int]
"""Numbers of chunks by dimension, for `ManifestSplittingConfig.from_dict`."""
type SplitSizesDict = dict[ManifestSplitCondition, ManifestSplitValues]
"""Such numbers by array."""
