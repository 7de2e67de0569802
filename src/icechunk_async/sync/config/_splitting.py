"""How the references of one array are divided among manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, override

from icechunk_async.format import config as native
from icechunk_async.sync._display import public
from icechunk_async.sync._mirrors import from_native, to_native
from icechunk_async.sync._section import Section

if TYPE_CHECKING:
    from icechunk_async.sync.config._conditions import (
        ManifestSplitCondition,
        ManifestSplitDimCondition,
    )

    type _Dim = (
        ManifestSplitDimCondition.Axis
        | ManifestSplitDimCondition.DimensionName
        | ManifestSplitDimCondition.Any
    )
    type SplitSizes = Sequence[tuple[ManifestSplitCondition, Sequence[tuple[_Dim, int]]]]
    type SplitSizesDict = dict[ManifestSplitCondition, dict[_Dim, int]]

__all__ = ["ManifestSplittingConfig"]


@public("config")
@dataclass(repr=False)
class ManifestSplittingConfig(Section):
    """The splitting rules.

    Attributes:
        split_sizes: the rules, as pairs of a condition on arrays and pairs of a condition on
            dimensions and a number of chunks; None means one manifest per array. The first rule
            that matches array and dimension decides that dimension.
    """

    native_class: ClassVar = native.ManifestSplittingConfig
    _shown_as_is: ClassVar = frozenset({"split_sizes"})

    split_sizes: SplitSizes | None = None

    @staticmethod
    def from_dict(split_sizes: SplitSizesDict) -> ManifestSplittingConfig:
        """Make rules from nested dicts, whose order counts."""
        return ManifestSplittingConfig(
            tuple((arrays, tuple(sizes.items())) for arrays, sizes in split_sizes.items())
        )

    def to_dict(self) -> SplitSizesDict:
        """Return the rules as nested dicts; of equal conditions the last remains.

        Raises:
            TypeError: there are none.
        """
        return {arrays: dict(sizes) for arrays, sizes in cast("SplitSizes", self.split_sizes)}

    @override
    def _checked(self, name: str, value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError(
                f"ManifestSplittingConfig.split_sizes is of type {type(value).__name__}; allowed: "
                "pairs of ManifestSplitCondition and sizes, or None."
            )
        rules = cast("SplitSizes", value)
        return [(arrays, list(sizes)) for arrays, sizes in rules]

    @override
    def to_native(self) -> Any:
        rules = self.split_sizes
        return native.ManifestSplittingConfig(None if rules is None else to_native(rules))

    @classmethod
    @override
    def from_native(cls, value: object) -> Self:
        rules = cast("native.ManifestSplittingConfig", value).split_sizes
        return cls(from_native(rules))
