"""Data classes whose methods are made when the first instance is.

`dataclass` stands for `dataclasses.dataclass`, and type checkers take it for just that. The one of
the standard library writes and compiles the code of `__init__`, `__eq__`, `__repr__` and others
while a module is imported: nearly a millisecond for each class, a third of what short commands
ran. A program uses a third of the classes that it imports. Here a class that nobody uses
costs little more than a plain class. One that is used gets the same code as there, compiled when an
instance first needs it.

What holds as there: fields with defaults, `field` with all its arguments, fields of base classes,
methods that the class has by itself, `__post_init__`, `__match_args__`, pickles, copies, `replace`,
`fields`, `asdict` and `is_dataclass`. Such a class may have a data class of the standard library as
its base, or be the base of one.

What does not:

* `order`, `unsafe_hash`, `match_args`, `weakref_slot`, `init`, `InitVar` and `KW_ONLY` are missing.
  A class that needs one takes the decorator of the standard library.
* Annotations have to be text, as `from __future__ import annotations` makes them.
* A field without a default after one that has one is found by type checkers, and else not before
  the first instance.
* A plain class that derives from a frozen one cannot add attributes.
* `super()` without arguments fails in methods of a class with slots, as there before Python 3.14.
"""

from __future__ import annotations

import dataclasses
from copy import copy
from dataclasses import MISSING, Field, FrozenInstanceError
from functools import cache, partial
from inspect import get_annotations
from itertools import chain
from reprlib import recursive_repr
from types import MemberDescriptorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from dataclasses import dataclass

__all__ = ["dataclass"]

_OURS: Final = "__declared_fields__"
"""Attribute of a class with its fields by name, those of its bases included."""

_THEIRS: Final = "__dataclass_fields__"
"""Attribute that `dataclasses` looks for."""

_SAID: Final = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata")
"""Arguments of `dataclasses.field`, but for `kw_only`."""

_NO_FIELDS: Final = ("ClassVar", "typing.ClassVar")
_OTHER_KINDS: Final = ("InitVar", "KW_ONLY", "dataclasses.")


class _Declared(NamedTuple):
    """A field as its class declares it."""

    annotation: str
    default: Any
    """`MISSING`, a value, or what `dataclasses.field` returned."""
    kw_only: bool


def _refuse_to_assign(_self: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    # Not those declared here alone: a class of the standard library may have added some.
    return [getattr(self, it.name) for it in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for it, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, it.name, value)


_FROZEN: Final = {"__setattr__": _refuse_to_assign, "__delattr__": _refuse_to_delete}
_PICKLED: Final = {"__getstate__": _state, "__setstate__": _restore}
"""Those of Python would assign to the slots of frozen instances."""


class _Late:
    """An attribute of a class that is made in its own place when it is looked up."""

    __slots__ = ("_make", "_name", "_owner")

    def __init__(self, make: Callable[[type, Mapping[str, _Declared]], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        made = self._make(self._owner, self._owner.__dict__[_OURS])
        if callable(made):
            made.__name__ = self._name
            made.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
            made.__module__ = self._owner.__module__
        # Two threads may both come here, and make the same.
        setattr(self._owner, self._name, made)
        return made.__get__(instance, owner) if callable(made) else made


def _dataclass(
    cls: type | None = None,
    /,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,  # noqa: A002 -- as the standard library names it
    kw_only: bool = False,
) -> Any:
    """Make a data class of a class, as `dataclasses.dataclass` does.

    Raises:
        TypeError: a field is of a kind that is missing here, or the class has what is to be added.
        ValueError: a default can be changed, as a list can.
    """
    if cls is None:
        return partial(_dataclass, frozen=frozen, slots=slots, eq=eq, repr=repr, kw_only=kw_only)
    declared = _declared(cls, kw_only=kw_only)
    own = dict(cls.__dict__)
    added: dict[str, Any] = {
        _OURS: declared,
        _THEIRS: _Late(_fields),
        "__dataclass_params__": SimpleNamespace(
            init=True, repr=repr, eq=eq, order=False, unsafe_hash=False, frozen=frozen
        ),
        "__match_args__": tuple(
            name for name, it in declared.items() if not it.kw_only and _says(it, "init")
        ),
        "__init__": _Late(_init),
        "__replace__": dataclasses.replace,
    }
    if repr:
        added["__repr__"] = _Late(_repr)
    if eq:
        added |= {"__eq__": _Late(_eq), "__hash__": _Late(_hash) if frozen else None}
        if "__eq__" in own and own.get("__hash__") is None:
            own.pop("__hash__", None)  # Python put it there, as there is an `__eq__`
    if frozen:
        if "__setattr__" in own or "__delattr__" in own:
            raise TypeError(f"{cls.__qualname__} cannot be frozen: it sets attributes its own way.")
        added |= _FROZEN
        if slots and own.keys().isdisjoint(_PICKLED):
            added |= _PICKLED
    added = {name: it for name, it in added.items() if name not in own}
    return _with_slots(cls, own | added, declared) if slots else _with(cls, added)


if not TYPE_CHECKING:
    dataclass = _dataclass


def _declared(cls: type, *, kw_only: bool) -> dict[str, _Declared]:
    """Return the fields of a class and its bases; defaults are left on the class."""
    found: dict[str, _Declared] = {}
    # From the one above `object` down: fields keep their first place, and a nearer class gives the
    # default.
    for base in cls.__mro__[-2:0:-1]:
        if _OURS in base.__dict__:
            found |= base.__dict__[_OURS]
        elif _THEIRS in base.__dict__:
            theirs: Any = dataclasses.fields(base)  # without variables of the class
            found |= {it.name: _Declared(it.type, it, it.kw_only) for it in theirs}
    for name, annotation in get_annotations(cls).items():
        if not isinstance(annotation, str) or annotation.startswith(_OTHER_KINDS):
            raise TypeError(
                f"{cls.__qualname__}.{name}: {annotation!r} cannot be a field of this kind of data "
                "class. Take the one of the standard library."
            )
        if not annotation.startswith(_NO_FIELDS):
            found[name] = _own_field(cls, name, annotation, kw_only=kw_only)
    return found


def _own_field(cls: type, name: str, annotation: str, *, kw_only: bool) -> _Declared:
    default = cls.__dict__.get(name, MISSING)
    if _is_field(default):
        if default.kw_only is not MISSING:
            kw_only = default.kw_only
        if default.default is MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, default.default)
    value = _value(default)
    if value.__class__.__hash__ is None:
        raise ValueError(
            f"{cls.__qualname__}.{name}: a {type(value).__name__} can be changed, and all "
            "instances would share it. Use default_factory."
        )
    return _Declared(annotation, default, kw_only)


def _is_field(default: object) -> TypeGuard[Field[Any]]:
    return isinstance(default, Field)


def _value(default: Any) -> Any:
    return default.default if _is_field(default) else default


def _with(cls: type, added: Mapping[str, Any]) -> type:
    for name, it in added.items():
        setattr(cls, name, it)
        if isinstance(it, _Late):
            it.__set_name__(cls, name)
    return cls


def _with_slots(cls: type, content: dict[str, Any], names: Iterable[str]) -> type:
    """Return a class with slots for its fields: they cannot be added to a class that is there."""
    if "__slots__" in content:
        raise TypeError(f"{cls.__qualname__} has __slots__ already.")
    taken = set(chain.from_iterable(_slots_of(base) for base in cls.__mro__[1:-1]))
    content["__slots__"] = tuple(name for name in names if name not in taken)
    # Defaults stay in the declared fields: a class variable of the name would be in the way of the
    # slot.
    for name in (*names, "__dict__", "__weakref__"):
        content.pop(name, None)
    content["__qualname__"] = cls.__qualname__
    return type(cls)(cls.__name__, cls.__bases__, content)


def _slots_of(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


class _Anew:
    """Shown as the default of a parameter whose value is made for each instance."""

    def __repr__(self) -> str:
        return "<factory>"


_ANEW: Final = _Anew()


def _init(cls: type, declared: Mapping[str, _Declared]) -> Any:
    # Names that no field has: the parameters have those of the fields.
    known: dict[str, Any] = {"_ANEW_": _ANEW, "_set_": object.__setattr__}
    positional, named = ["self"], list[str]()
    lines: list[str] = []
    for name, it in declared.items():
        default, factory = _value(it.default), getattr(it.default, "default_factory", MISSING)
        value = name
        if factory is not MISSING:
            known[f"_make_{name}_"] = factory
            default, value = _ANEW, f"_make_{name}_()"
        if default is not MISSING:
            known[f"_default_{name}_"] = default
        if _says(it, "init"):
            text = name if default is MISSING else f"{name}=_default_{name}_"
            (named if it.kw_only else positional).append(text)
            if factory is not MISSING:
                value = f"{value} if {name} is _ANEW_ else {name}"
        elif factory is MISSING:
            if default is MISSING or not _is_slot(getattr(cls, name, None)):
                continue  # `__post_init__` sets it, or the class has the value
            value = f"_default_{name}_"
        lines.append(_assignment(cls, name, value, known))
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    if named:
        positional += ["*", *named]
    made = _compiled(cls, f"__init__({', '.join(positional)})", lines or ["pass"], known)
    made.__annotations__ = {
        **{name: it.annotation for name, it in declared.items() if _says(it, "init")},
        "return": None,
    }
    return made


def _assignment(cls: type, name: str, value: str, known: dict[str, Any]) -> str:
    if vars(cls).get("__setattr__") is not _refuse_to_assign:
        return f"self.{name} = {value}"
    slot = getattr(cls, name, None)
    if not _is_slot(slot):
        return f"_set_(self, {name!r}, {value})"
    # Twice as quick as object.__setattr__, which looks the slot up.
    known[f"_set_{name}_"] = slot.__set__
    return f"_set_{name}_(self, {value})"


def _is_slot(found: object) -> TypeGuard[MemberDescriptorType]:
    return isinstance(found, MemberDescriptorType)


def _eq(cls: type, declared: Mapping[str, _Declared]) -> Any:
    names = [name for name, it in declared.items() if _says(it, "compare")]
    lines = [
        "if other.__class__ is self.__class__:",
        f" return {_tuple_of('self', names)} == {_tuple_of('other', names)}",
        "return NotImplemented",
    ]
    return _compiled(cls, "__eq__(self, other)", lines, {})


def _hash(cls: type, declared: Mapping[str, _Declared]) -> Any:
    names = [
        name
        for name, it in declared.items()
        if _says(it, "compare" if getattr(it.default, "hash", None) is None else "hash")
    ]
    return _compiled(cls, "__hash__(self)", [f"return hash({_tuple_of('self', names)})"], {})


def _repr(_cls: type, declared: Mapping[str, _Declared]) -> Any:
    names = [name for name, it in declared.items() if _says(it, "repr")]

    @recursive_repr()
    def __repr__(self: object) -> str:  # noqa: N807
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({shown})"

    return __repr__


def _says(declared: _Declared, what: str) -> bool:
    """Return an argument of `dataclasses.field`, or True, which is the default of all of them."""
    return not _is_field(declared.default) or getattr(declared.default, what)


def _tuple_of(owner: str, names: Iterable[str]) -> str:
    return f"({''.join(f'{owner}.{name}, ' for name in names)})"


def _compiled(cls: type, head: str, lines: Iterable[str], known: Mapping[str, Any]) -> Any:
    """Return a function whose only globals are these: a third cheaper than one in a closure.

    They say the module of the class, by which tracebacks are told from those of callers.
    """
    names = {"__name__": cls.__module__, **known}
    exec(f"def {head}:\n  " + "\n  ".join(lines), names)  # noqa: S102 -- made of names of fields
    return names[head[: head.index("(")]]


def _fields(_cls: type, declared: Mapping[str, _Declared]) -> dict[str, Field[Any]]:
    """Return the fields as `dataclasses` makes them, but without a class for them."""
    pattern = _pattern()
    return {name: _field(pattern, name, it) for name, it in declared.items()}


@cache
def _pattern() -> Field[Any]:
    """Return a field that belongs to a class, which only `dataclasses` can make."""
    return dataclasses.fields(dataclasses.make_dataclass("Pattern", ["it"]))[0]


def _field(pattern: Field[Any], name: str, declared: _Declared) -> Field[Any]:
    made, given = copy(pattern), declared.default
    made.name, made.type, made.kw_only = name, declared.annotation, declared.kw_only
    if _is_field(given):
        for said in _SAID:
            setattr(made, said, getattr(given, said))
    else:
        made.default = given
    return made
