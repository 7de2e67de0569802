"""The looks of values: as expressions, as lines of text, and as HTML in notebooks."""

from __future__ import annotations

import json
from enum import IntEnum
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast, override

from icechunk_async._runtime.text import printable
from icechunk_async.format.config.secrets import veiled_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from icechunk_async._display.cards import Card

    type Rows = Sequence[tuple[str, object]]

__all__ = ["Choice", "Displayed", "Group", "Record", "expression", "literal", "public", "title_of"]

_INDENT: Final = "    "


def public[T](home: str, *names: str) -> Callable[[type[T]], type[T]]:
    """Declare the module of the facade in which users find a class with its nested classes.

    Pickles, tracebacks and displays then show that module instead of the one with the source.

    Args:
        home: the module below `icechunk_async.sync`; empty for that package itself.
        names: the names of both classes, if one is an attribute of the other.
    """
    module = ".".join(filter(None, ("icechunk_async.sync", home)))

    def place(cls: type[T]) -> type[T]:
        if names:
            cls.__qualname__ = ".".join(names)
            cls.__name__ = names[-1]
        _place(cls, module)
        return cls

    return place


def _place(cls: type, module: str) -> None:
    cls.__module__ = module
    for inner in vars(cls).values():
        if isinstance(inner, type) and inner.__qualname__.startswith(f"{cls.__qualname__}."):
            _place(inner, module)


def title_of(cls: type) -> str:
    """Return the name under which users find a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


class Displayed:
    """A value that is displayed as its class and some rows of names and values."""

    __slots__ = ()

    def _rows(self) -> Rows:
        """Return names, and plain values or other displayed ones. No secrets."""
        raise NotImplementedError

    def _title(self) -> str:
        return title_of(type(self))

    @override
    def __repr__(self) -> str:
        return text(self._title(), self._rows())

    @override
    def __str__(self) -> str:
        return text(self._title(), self._rows())

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """Let rich print names and values, folded and in colour."""
        yield from self._rows()

    def _repr_html_(self) -> str:
        """Show the value in a notebook."""
        return self.as_card().html()

    def as_card(self) -> Card:
        """Return title and rows, in which displayed values are folded away."""
        return _card(self._title(), self._rows())


class Record(Displayed):
    """A dataclass whose rows are its fields; the engine's counterpart has fields of these names."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @override
    def _rows(self) -> Rows:
        values = [(name, getattr(self, name)) for name in self.__dataclass_fields__]
        return [(name, getattr(it, "isoformat", lambda it=it: it)()) for name, it in values]

    @classmethod
    def from_native(cls, value: Any) -> Self:
        """Return the counterpart of the engine's."""
        return cls(*(getattr(value, name) for name in cls.__dataclass_fields__))


class Group:
    """Displayed values by name, as one value of a row."""

    def __init__(self, members: Mapping[str, Displayed]) -> None:
        """Show `members`."""
        self.members = members

    @override
    def __str__(self) -> str:
        return _lines(self.rows())

    def rows(self) -> Rows:
        """Return names and values. Names may be URLs, whose users and passwords are veiled."""
        return [(veiled_url(name), value) for name, value in self.members.items()]


def text(title: str, rows: Rows) -> str:
    """Return a title and a line for each row, with displayed values indented below."""
    return f"<{title}>\n{_lines(rows)}"


def _lines(rows: Rows) -> str:
    lines: list[str] = []
    for name, value in rows:
        if isinstance(value, Displayed | Group):
            lines += [f"{printable(name)}:", indent(str(value), _INDENT).rstrip("\n")]
        else:
            lines.append(f"{printable(name)}: {_shown(value)}")
    return "".join(f"{line}\n" for line in lines)


def _card(title: str, rows: Rows) -> Card:
    from icechunk_async._display.cards import Card  # noqa: PLC0415 -- rarely needed

    def folded(value: object) -> object:
        if isinstance(value, Displayed):
            return value.as_card()
        return _card("", value.rows()) if isinstance(value, Group) else value

    return Card(title, [(name, folded(value)) for name, value in rows])


def _shown(value: object) -> str:
    """Return text that cannot do harm on a terminal; messages keep their lines."""
    return printable(str(value), keep="\n")


class Choice(IntEnum):
    """An enum of named choices that are numbers, as the official ones are."""

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @override
    def __str__(self) -> str:
        return repr(self)


def literal(value: object) -> str:
    """Return a value as part of an expression."""
    if isinstance(value, str):
        return printable(json.dumps(veiled_url(value), ensure_ascii=False))
    if isinstance(value, Choice):
        return value.name
    if isinstance(value, dict):
        items = cast("Mapping[object, object]", value).items()
        lines = [f"{literal(key)}: {literal(item)}," for key, item in items]
        if any("\n" in line for line in lines):
            return "{\n" + indent("\n".join(lines), _INDENT) + "\n}"
        return "{" + " ".join(lines).removesuffix(",") + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, cast("list[object]", value))) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, cast("tuple[object, ...]", value))) + ")"
    return repr(value)


def expression(title: str, fields: Iterable[tuple[str, object]]) -> str:
    """Return the call that makes a value, with a line for each argument."""
    lines = [f"{name}={literal(value)}," for name, value in fields]
    if not lines:
        return f"{title}()"
    return f"{title}(\n{indent('\n'.join(lines), _INDENT)}\n)"
