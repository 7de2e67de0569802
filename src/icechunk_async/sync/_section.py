"""What the sections of the configuration share: checked fields, merging, display, conversion.

Each is the mutable counterpart of one frozen class of ``icechunk_async.config``, with fields of
the same names. What a field may hold, and its default value, is read from there.
"""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, override

from icechunk_async.format.config.fields import Effective, Instance, Integer
from icechunk_async.format.config.fields import Section as NativeSection
from icechunk_async.sync._display import Displayed, expression, literal, title_of
from icechunk_async.sync._mirrors import from_native, mirror_of, mirrors, to_native

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Section"]


class Section(Displayed):
    """Fields that are checked when assigned; compares by value, and is changed in place."""

    native_class: ClassVar[type[NativeSection]]
    _display_order: ClassVar[tuple[str, ...]] = ()
    """All fields, where the display has another order than the constructor."""
    _shown_as_is: ClassVar[frozenset[str]] = frozenset()
    """Fields whose default is not shown in place of None."""

    _kinds: ClassVar[Mapping[str, tuple[Integer | Instance, bool]]]
    """For each field what it may hold, and whether None is allowed."""

    def __init_subclass__(cls) -> None:
        """Note which native class it stands for, and what its fields may hold."""
        mirrors(cls.native_class)(cls)
        cls._kinds = {
            spec.name: (spec.metadata["kind"], spec.default is None)
            for spec in fields(cls.native_class)
            if spec.name in cls.__annotations__
        }

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Check the value.

        Raises:
            AttributeError: there is no such field.
            TypeError: it is of another type than the field.
            OverflowError: it is a number that the field cannot hold.
            ValueError: it is 0 where that has no meaning.
        """
        if name not in self._kinds:
            raise AttributeError(
                f"{type(self).__name__} has no field {name!r}. Fields: {', '.join(self._kinds)}."
            )
        object.__setattr__(self, name, self._checked(name, value))

    def _checked(self, name: str, value: object) -> object:
        kind, optional = self._kinds[name]
        if value is None and optional:
            return None
        where = f"{type(self).__name__}.{name}"
        if isinstance(kind, Integer):
            return _integer(where, value, kind)
        expected = mirror_of(kind.cls)
        if not isinstance(value, expected):
            raise TypeError(
                f"{where} is of type {type(value).__name__}; allowed: {expected.__name__}"
                f"{' or None' * optional}."
            )
        return value

    def to_native(self) -> Any:
        """Return the engine's counterpart.

        Raises:
            InvalidConfigError: a value cannot be stored.
        """
        values = {name: to_native(getattr(self, name)) for name in self._kinds}
        return self.native_class(**values)

    @classmethod
    def from_native(cls, value: object) -> Self:
        """Return the counterpart of a native section."""
        return cls(**{name: from_native(getattr(value, name)) for name in cls._kinds})

    def _names(self) -> tuple[str, ...]:
        return self._display_order or tuple(self._kinds)

    @override
    def __repr__(self) -> str:
        return expression(
            title_of(type(self)), [(name, getattr(self, name)) for name in self._names()]
        )

    @override
    def _rows(self) -> list[tuple[str, object]]:
        return [(name, self._effective(name)) for name in self._names()]

    def _effective(self, name: str) -> object:
        value = getattr(self, name)
        if value is None and name not in self._shown_as_is:
            default = _defaults(self.native_class).get(name)
            if default is not None:
                shown = from_native(default)
                return shown if isinstance(shown, Displayed) else f"{literal(shown)} (default)"
        return value if isinstance(value, Displayed) else literal(value)


def _integer(where: str, value: object, kind: Integer) -> int:
    try:
        number = operator.index(cast("Any", value))
    except TypeError:
        raise TypeError(
            f"{where} is of type {type(value).__name__}; allowed: {kind.allowed}, or None."
        ) from None
    if kind.accepts(number):
        return number
    problem = f"{where} is {number}; allowed: {kind.allowed}, or None."
    raise ValueError(problem) if number == 0 else OverflowError(problem)


def _defaults(cls: type[NativeSection]) -> Mapping[str, object]:
    """Return what None stands for, by field."""
    unset = cls()
    names = [spec.name for spec in fields(cls)]
    return {
        name: getattr(unset, f"effective_{name}")
        for name in names
        if isinstance(getattr(cls, f"effective_{name}", None), Effective | property)
    }
