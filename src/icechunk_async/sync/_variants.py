"""Values that are one of several kinds, as the official classes with nested classes are."""

from __future__ import annotations

from abc import ABCMeta
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, override

from icechunk_async.sync._display import literal, public, title_of
from icechunk_async.sync._mirrors import from_native, mirrors, to_native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Items", "Kinds", "Variant", "kinds"]


@dataclass(frozen=True, repr=False)
class Variant:
    """One kind. Fields that are not for the repr are secrets, and are left out of it."""

    native_class: ClassVar[type | None] = None
    """The engine's class with the same fields in the same order, if there is one."""

    def __init_subclass__(cls) -> None:
        """Note which native class it stands for."""
        if cls.native_class is not None:
            mirrors(cls.native_class)(cls)

    _named: ClassVar[bool] = True
    """Whether the repr has the names of fields."""

    @property
    def _maker(self) -> str:
        """What is called to make it."""
        return title_of(type(self))

    @override
    def __repr__(self) -> str:
        values = [
            (f"{spec.name}=" if self._named else "") + _listed(getattr(self, spec.name))
            for spec in fields(self)
            if spec.repr
        ]
        hidden = ["****"] if any(not spec.repr for spec in fields(self)) else []
        return f"{self._maker}({', '.join(values + hidden)})"

    def values(self) -> tuple[Any, ...]:
        """Return the values of all fields, secrets as well."""
        return tuple(getattr(self, spec.name) for spec in fields(self))

    def to_native(self) -> Any:
        """Return the engine's counterpart.

        Raises:
            InvalidConfigError: a value cannot be stored.
        """
        assert self.native_class is not None
        return self.native_class(*map(to_native, self.values()))

    @classmethod
    def from_native(cls, value: Any) -> Self:
        """Return the counterpart of a value of the engine."""
        return cls(*(from_native(getattr(value, spec.name)) for spec in fields(value)))


def _listed(value: object) -> str:
    return literal(list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value)


class Items(Variant):
    """A kind whose fields have no names, only positions."""

    _named: ClassVar = False

    def __getitem__(self, key: int, /) -> Any:
        """Return a field by its position."""
        return self.values()[key]

    def __len__(self) -> int:
        """Return how many fields there are."""
        return len(fields(self))


class Kinds(metaclass=ABCMeta):  # noqa: B024 - for register() only
    """What kinds are nested in; each counts as an instance of it."""

    def __new__(cls) -> Self:
        """Refuse: only the nested classes have instances."""
        raise TypeError(f"{cls.__qualname__} has no instances of its own; use one of its kinds.")


def kinds[T: Kinds](home: str) -> Callable[[type[T]], type[T]]:
    """Place a class, as ``public`` does, and count its nested classes as subclasses."""

    def place(cls: type[T]) -> type[T]:
        for inner in vars(cls).values():
            if isinstance(inner, type) and issubclass(inner, Variant):
                cls.register(inner)
        return public(home)(cls)

    return place
