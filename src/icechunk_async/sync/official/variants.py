"""Values of several kinds, as the official classes with nested classes."""

from __future__ import annotations

from abc import ABCMeta
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, dataclass_transform, override

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.sync.official.display import literal, public, title_of
from icechunk_async.sync.official.mirrors import from_native, mirrors, to_native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Items", "Kinds", "Variant", "kinds"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Variant:
    """One kind; each subclass is a frozen dataclass. The repr leaves out secrets.

    `class Kind(Variant, of=native.Kind)` names the engine's class with the same fields in the same
    order, and takes its docstring. A field with `repr=False` is a secret.
    """

    native_class: ClassVar[type | None] = None
    _named: ClassVar[bool] = True
    """Whether the repr has the names of fields."""

    def __init_subclass__(cls, *, of: type | None = None) -> None:
        """Make a dataclass, and note which native class it mirrors."""
        super().__init_subclass__()
        if of is not None and cls.__doc__ is None:
            cls.__doc__ = of.__doc__
        dataclass(frozen=True, repr=False)(cls)
        if of is not None:
            cls.native_class = of
            mirrors(of)(cls)

    @property
    def _maker(self) -> str:
        """The expression that is called to make the value."""
        return title_of(type(self))

    @override
    def __repr__(self) -> str:
        values = [
            (f"{spec.name}=" if self._named else "") + _listed(getattr(self, spec.name))
            for spec in self._fields()
            if spec.repr
        ]
        hidden = ["****"] if any(not spec.repr for spec in self._fields()) else []
        return f"{self._maker}({', '.join(values + hidden)})"

    @classmethod
    def _fields(cls) -> tuple[Any, ...]:
        return fields(cast("Any", cls))

    def values(self) -> tuple[Any, ...]:
        """Return the values of all fields, secrets included."""
        return tuple(getattr(self, spec.name) for spec in self._fields())

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
    """A kind whose fields have positions instead of names."""

    _named: ClassVar = False

    def __getitem__(self, key: int, /) -> Any:
        return self.values()[key]

    def __len__(self) -> int:
        return len(self.values())


class Kinds(metaclass=ABCMeta):  # noqa: B024 - for register() only
    """A class with nested kinds, which count as its subclasses."""

    def __new__(cls) -> Self:
        """Raise an error: only the nested classes have instances."""
        raise TypeError(f"{cls.__qualname__} has no instances; use one of its kinds.")


def kinds[T: Kinds](home: str) -> Callable[[type[T]], type[T]]:
    """Place a class as `public` does, and count its nested classes as subclasses."""

    def place(cls: type[T]) -> type[T]:
        for inner in vars(cls).values():
            if isinstance(inner, type) and issubclass(inner, Variant):
                # The official kinds are subclasses of their family, and programs ask with
                # `isinstance`.
                cls.register(inner)
        return public(home)(cls)

    return place
