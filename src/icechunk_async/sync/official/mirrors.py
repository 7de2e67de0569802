"""Which class of the facade mirrors which class of the engine, and conversion both ways.

Classes of the facade convert themselves (`to_native`, `from_native`). The registry here finds the
class for a value of the engine.
"""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from icechunk_async.sync.official.display import Choice

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["from_native", "mirror_of", "mirrors", "to_native"]

_MIRRORS: Final[dict[type, type]] = {}
_CONFIGURATION: Final = "icechunk_async.format.config."
_HOMES: Final = tuple(
    f"icechunk_async.sync.official.{name}"
    for name in ("conditions", "configuration", "containers", "sections")
)
"""The mirrors of the configuration; imported when one is looked up."""
_NATIVE_CHOICES: Final[dict[type[Choice], type[Enum]]] = {}


def mirrors[T](native_class: type) -> Callable[[type[T]], type[T]]:
    """Register the decorated class as the mirror of a native one; choices share their names."""

    def note(cls: type[T]) -> type[T]:
        _MIRRORS[native_class] = cls
        if issubclass(cls, Choice) and issubclass(native_class, Enum):
            _NATIVE_CHOICES[cls] = native_class
        return cls

    return note


def mirror_of(native_class: type) -> type:
    """Return the mirror of a native class, or the class itself if it has none."""
    return _find(native_class) or native_class


def _find(native_class: type) -> type | None:
    found = _MIRRORS.get(native_class)
    if found is None and native_class.__module__.startswith(_CONFIGURATION):
        for name in _HOMES:
            import_module(name)
        found = _MIRRORS.get(native_class)
    return found


def to_native(value: object) -> Any:
    """Return the engine's counterpart of a value of the facade; plain values are returned as is.

    Raises:
        InvalidConfigError: the engine cannot store the value.
    """
    if isinstance(value, Choice):
        return _NATIVE_CHOICES[type(value)][value.name]
    if isinstance(value, tuple | list):
        return tuple(map(to_native, cast("list[object]", value)))
    convert: Callable[[], object] | None = getattr(value, "to_native", None)
    # A class, where one of its objects is meant, is refused by whom it is given to.
    return value if convert is None or isinstance(value, type) else convert()


def from_native(value: object) -> Any:
    """Return the facade's counterpart of a value of the engine; plain values are returned as is."""
    if isinstance(value, tuple):
        return tuple(map(from_native, cast("tuple[object, ...]", value)))
    mirror: Any = _find(type(value))
    if mirror is None:
        return value
    if isinstance(value, Enum):
        return mirror[value.name]
    return mirror.from_native(value)
