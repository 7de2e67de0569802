"""Conditions: which manifests are preloaded, and how references are divided among manifests.

Regular expressions are searched anywhere in the text; see ``icechunk_async.format.config`` for
their syntax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Self, override

from icechunk_async.format.config import ManifestSplitDimCondition as NativeDim
from icechunk_async.format.config import conditions as preload
from icechunk_async.format.config import conditions as splitting
from icechunk_async.sync._display import public
from icechunk_async.sync._mirrors import mirrors
from icechunk_async.sync._variants import Items, Kinds, Variant, kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ManifestPreloadCondition", "ManifestSplitCondition", "ManifestSplitDimCondition"]

_HOME: Final = "icechunk_async.sync.config"


class _Condition(Variant):
    """A condition; displayed as the call that makes it."""

    _named: ClassVar = False
    _made_by: ClassVar[str] = ""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse to make one that decides nothing."""
        del args, kwargs
        if _Condition in cls.__bases__:
            raise TypeError(f"{cls.__name__} has no instances of its own; use its functions.")
        return object.__new__(cls)

    @property
    @override
    def _maker(self) -> str:
        return f"{_HOME}.{type(self).__mro__[1].__name__}.{self._made_by}"


@mirrors(preload.ManifestPreloadCondition)
@public("config")
class ManifestPreloadCondition(_Condition):
    """Decides whether a manifest is fetched when a session begins. Made by its functions."""

    Or: ClassVar[type[_PreloadOr]]
    And: ClassVar[type[_PreloadAnd]]
    PathMatches: ClassVar[type[_PreloadPath]]
    NameMatches: ClassVar[type[_PreloadName]]
    NumRefs: ClassVar[type[_PreloadRefs]]

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if any of the conditions does."""
        return _PreloadOr(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestPreloadCondition]) -> ManifestPreloadCondition:
        """Match if all conditions do."""
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

    def __or__(self, value: ManifestPreloadCondition, /) -> ManifestPreloadCondition:
        """Match if one of both does."""
        return _PreloadOr((self, value))

    def __and__(self, value: ManifestPreloadCondition, /) -> ManifestPreloadCondition:
        """Match if both do."""
        return _PreloadAnd((self, value))


@mirrors(splitting.ManifestSplitCondition)
@public("config")
class ManifestSplitCondition(_Condition):
    """Decides which arrays a splitting rule is for. Made by its functions."""

    Or: ClassVar[type[_SplitOr]]
    And: ClassVar[type[_SplitAnd]]
    PathMatches: ClassVar[type[_SplitPath]]
    NameMatches: ClassVar[type[_SplitName]]
    AnyArray: ClassVar[type[_SplitAnyArray]]

    @staticmethod
    def or_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if any of the conditions does."""
        return _SplitOr(tuple(conditions))

    @staticmethod
    def and_conditions(conditions: Iterable[ManifestSplitCondition]) -> ManifestSplitCondition:
        """Match if all conditions do."""
        return _SplitAnd(tuple(conditions))

    @staticmethod
    def path_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the array's absolute path."""
        return _SplitPath(regex)

    @staticmethod
    def name_matches(regex: str) -> ManifestSplitCondition:
        """Match if the expression is found in the last segment of the array's path."""
        return _SplitName(regex)

    def __or__(self, value: ManifestSplitCondition, /) -> ManifestSplitCondition:
        """Match if one of both does."""
        return _SplitOr((self, value))

    def __and__(self, value: ManifestSplitCondition, /) -> ManifestSplitCondition:
        """Match if both do."""
        return _SplitAnd((self, value))


def _kind[T: _Condition](name: str) -> Callable[[type[T]], type[T]]:
    """Make a class one of the kinds of its base: an attribute of it, and found there by pickle."""

    def place(cls: type[T]) -> type[T]:
        family = cls.__mro__[1]
        setattr(family, name, public("config", family.__name__, name)(cls))
        return cls

    return place


@_kind("Or")
@dataclass(frozen=True, repr=False)
class _PreloadOr(ManifestPreloadCondition, Items):
    native_class: ClassVar = preload.PreloadAny
    _made_by: ClassVar = "or_conditions"
    _0: tuple[ManifestPreloadCondition, ...]


@_kind("And")
@dataclass(frozen=True, repr=False)
class _PreloadAnd(ManifestPreloadCondition, Items):
    native_class: ClassVar = preload.PreloadAll
    _made_by: ClassVar = "and_conditions"
    _0: tuple[ManifestPreloadCondition, ...]


@_kind("PathMatches")
@dataclass(frozen=True, repr=False)
class _PreloadPath(ManifestPreloadCondition):
    native_class: ClassVar = preload.PreloadPath
    _made_by: ClassVar = "path_matches"
    regex: str


@_kind("NameMatches")
@dataclass(frozen=True, repr=False)
class _PreloadName(ManifestPreloadCondition):
    native_class: ClassVar = preload.PreloadName
    _made_by: ClassVar = "name_matches"
    regex: str


@_kind("NumRefs")
@dataclass(frozen=True, repr=False)
class _PreloadRefs(ManifestPreloadCondition):
    native_class: ClassVar = preload.PreloadRefs
    _made_by: ClassVar = "num_refs"
    from_refs: int | None
    to: int | None


# "from" can be no name in a class body; the official class has it, so it can be asked for.
setattr(_PreloadRefs, "from", property(lambda self: self.from_refs))


@_kind("True")
@dataclass(frozen=True, repr=False)
class _PreloadTrue(ManifestPreloadCondition, Items):
    native_class: ClassVar = preload.PreloadAlways
    _made_by: ClassVar = "true"


@_kind("False")
@dataclass(frozen=True, repr=False)
class _PreloadFalse(ManifestPreloadCondition, Items):
    native_class: ClassVar = preload.PreloadNever
    _made_by: ClassVar = "false"


@_kind("Or")
@dataclass(frozen=True, repr=False)
class _SplitOr(ManifestSplitCondition, Items):
    native_class: ClassVar = splitting.SplitAny
    _made_by: ClassVar = "or_conditions"
    _0: tuple[ManifestSplitCondition, ...]


@_kind("And")
@dataclass(frozen=True, repr=False)
class _SplitAnd(ManifestSplitCondition, Items):
    native_class: ClassVar = splitting.SplitAll
    _made_by: ClassVar = "and_conditions"
    _0: tuple[ManifestSplitCondition, ...]


@_kind("PathMatches")
@dataclass(frozen=True, repr=False)
class _SplitPath(ManifestSplitCondition):
    native_class: ClassVar = splitting.SplitPath
    _made_by: ClassVar = "path_matches"
    regex: str


@_kind("NameMatches")
@dataclass(frozen=True, repr=False)
class _SplitName(ManifestSplitCondition):
    native_class: ClassVar = splitting.SplitName
    _made_by: ClassVar = "name_matches"
    regex: str


@_kind("AnyArray")
@dataclass(frozen=True, repr=False)
class _SplitAnyArray(ManifestSplitCondition, Items):
    native_class: ClassVar = splitting.SplitAnyArray
    _made_by: ClassVar = "any_array"


class _Dim(Items):
    """A condition on dimensions; displayed as the official ones are."""

    _made_by: ClassVar[str]

    @property
    @override
    def _maker(self) -> str:
        return f"{_HOME}.ManifestSplitDimCondition.{self._made_by}"


@kinds("config")
class ManifestSplitDimCondition(Kinds):
    """Decides which dimensions of an array a number of chunks is for."""

    @dataclass(frozen=True, repr=False)
    class Axis(_Dim):
        """The dimension with this index, counted from 0."""

        native_class: ClassVar = NativeDim.Axis
        _made_by: ClassVar = "axis"

        _0: int

    @dataclass(frozen=True, repr=False)
    class DimensionName(_Dim):
        """Dimensions in whose name the expression is found; unnamed ones never."""

        native_class: ClassVar = NativeDim.DimensionName
        _made_by: ClassVar = "dimension_name"

        _0: str

    @dataclass(frozen=True, repr=False)
    class Any(_Dim):
        """Every dimension."""

        native_class: ClassVar = NativeDim.Any
        _made_by: ClassVar = "any"
