"""The base of all sections of the configuration: checks, defaults, merging, path expressions."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast, overload

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import InvalidConfigError
from icechunk_async.format.json.values import utf8

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BOOL",
    "MAX_CONDITION_DEPTH",
    "TEXT",
    "U8",
    "U16",
    "U32",
    "U64",
    "Effective",
    "Instance",
    "Integer",
    "Section",
    "at_least_one",
    "check_conditions",
    "check_integer",
    "check_text",
    "last_segment",
    "merge",
    "most_steps",
    "of_type",
    "optional_integer",
    "search",
    "search_briefly",
]


MAX_CONDITION_DEPTH: Final = 48
"""Combinations inside one another: the stored form nests twice as deep and has a limit too."""


def search(regex: str, text: str) -> bool:
    """Return whether the expression matches somewhere; an invalid one never does."""
    pattern = _compiled(regex)
    return pattern is not None and pattern.search(text) is not None


@lru_cache(maxsize=256)
def _compiled(regex: str) -> re.Pattern[str] | None:
    with warnings.catch_warnings():
        # Python warns of syntax that it may read differently one day; stored text cannot mend it.
        warnings.simplefilter("ignore")
        try:
            return re.compile(regex)
        except (re.error, OverflowError, RecursionError):
            return None


_MAX_STEPS: Final = 1 << 18
"""Steps of a search, which take some milliseconds at most."""
_MAX_REGEX: Final = 1000
_TOKEN: Final = re.compile(
    r"(?P<refused>\\[1-9]|\(\?(?!:|P<))"  # references back; flags, look-around and others
    r"|(?P<plain>\\.|\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<open>\((?:\?(?:P<\w+>|:))?)|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<times>(?:[*+?]|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\})[?+]?)"
    r"|(?P<other>.)",
    re.DOTALL,
)


class _Group:
    """A group of an expression."""

    def __init__(self) -> None:
        self.ways = 1
        """The number of its alternatives."""
        self.varies = False
        """Whether it can match one text in several ways, so that repeating it multiplies them."""


def search_briefly(regex: str, text: str) -> bool:
    """Return as `search`, but False for an expression that might take long on this text.

    Expressions come from the stored configuration, and a repository may be hostile. Python's
    matcher tries every way to divide a text among quantifiers, without letting others run.
    """
    return most_steps(regex, text) is not None and search(regex, text)


def most_steps(regex: str, text: str) -> int | None:
    """Return the most steps that `search_briefly` takes; None where it does not search."""
    growth = _growth(regex)
    if growth is None:
        return None
    factor, power = growth
    steps: int = factor * (len(text) + 1) ** power
    return steps if steps <= _MAX_STEPS else None


@lru_cache(maxsize=256)
def _growth(regex: str) -> tuple[int, int] | None:
    """Return how the steps of a search grow: a factor, and a power of the length of the text.

    None if they may grow faster, as where what is repeated has quantifiers or alternatives itself,
    or where the expression has what this function does not know.
    """
    regex = regex.removeprefix("(?i)")
    if len(regex) > _MAX_REGEX:
        return None
    # A search may begin anywhere, and each quantifier without an end may stop anywhere.
    factor, power = 1, 1
    whole = _Group()
    groups, before = [whole], _Group()
    for token in _TOKEN.finditer(regex):
        repeated, before = before, _Group()
        kind = token.lastgroup
        if kind == "refused" or (kind == "close" and len(groups) == 1):
            return None
        if kind == "open":
            groups.append(_Group())
        elif kind == "close":
            before = groups.pop()
            factor *= before.ways
            groups[-1].varies |= before.varies
        elif kind == "bar":
            groups[-1].ways += 1
            groups[-1].varies = True
        elif kind == "times":
            ways = _ways(token)
            if repeated.varies and token["times"][0] != "?":
                return None
            factor, power = factor * (ways or 1), power + (ways is None)
            groups[-1].varies = True
    is_anchored = regex.startswith("^") and whole.ways == 1
    return factor * whole.ways, power - is_anchored


def _ways(times: re.Match[str]) -> int | None:
    """Return how often a quantifier may repeat, in different numbers; None for any."""
    if times["times"][0] == "?":
        return 2
    if times["high"]:
        return max(1, int(times["high"]) - int(times["low"] or 0) + 1)
    return None if times["comma"] or times["low"] is None else 1


def last_segment(path: str) -> str | None:
    """Return the name of the node at an absolute path; the root has none."""
    return path.rpartition("/")[2] or None


def check_conditions(name: str, conditions: object, member: type) -> None:
    """Raise an error unless this is a tuple of conditions of limited depth."""
    # A 0 is no condition, so what is no tuple fails the check below as well.
    level = list(cast("tuple[object, ...]", conditions)) if isinstance(conditions, tuple) else [0]
    if not all(isinstance(item, member) for item in level):
        raise InvalidConfigError(
            f"{name}.conditions holds something else; allowed: a tuple of {member.__name__}.",
            field=name,
        )
    # Level by level: a recursive walk would itself overflow the stack on the nesting it looks for.
    for _ in range(MAX_CONDITION_DEPTH):
        level = [inner for item in level for inner in getattr(item, "conditions", ())]
        if not level:
            return
    raise InvalidConfigError(
        f"{name}.conditions nests more than {MAX_CONDITION_DEPTH} deep; combine more conditions "
        "on one level.",
        field=name,
    )


@dataclass(frozen=True, slots=True)
class Integer:
    """A field that holds an integer from ``low`` to ``high``."""

    low: int
    high: int

    @property
    def allowed(self) -> str:
        """The range in messages."""
        return f"an integer from {self.low} to {self.high}"

    def accepts(self, value: object) -> bool:
        """Return whether the field can hold the value."""
        # Not isinstance: True and False are integers of Python, and would be stored as 1 and 0.
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Instance:
    """A field that holds an instance of ``cls``."""

    cls: type[object]
    allowed: str

    def accepts(self, value: object) -> bool:
        """Return whether the field can hold the value."""
        return isinstance(value, self.cls)


def optional_integer(low: int, high: int) -> dict[str, Integer]:
    """Return the metadata of a dataclass field that holds an integer or None."""
    return {"kind": Integer(low, high)}


def of_type(cls: type[object], allowed: str | None = None) -> dict[str, Instance]:
    """Return the metadata of a dataclass field that holds an instance of ``cls`` or None."""
    return {"kind": Instance(cls, allowed or f"an instance of {cls.__name__}")}


U8: Final = optional_integer(0, 2**8 - 1)
U16: Final = optional_integer(0, 2**16 - 1)
U32: Final = optional_integer(0, 2**32 - 1)
U64: Final = optional_integer(0, 2**64 - 1)
BOOL: Final = of_type(bool, "True or False")
TEXT: Final = of_type(str, "text")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the configuration; every field may be None, which stands for its default."""

    merges_whole: ClassVar[bool] = False
    """Whether merging replaces the section as a unit instead of field by field."""

    def __post_init__(self) -> None:
        """Validate that the stored form can hold the values."""
        cls: Any = type(self)
        for name, kind, optional in _declared(cls):
            value = getattr(self, name)
            if value is None and optional:
                continue
            where = f"{cls.__name__}.{name}"
            if not kind.accepts(value):
                _refuse(where, value, kind.allowed + ", or None" * optional)
            if isinstance(value, str):
                check_text(where, value)


@cache
def _declared(cls: type[Any]) -> tuple[tuple[str, Integer | Instance, bool], ...]:
    """Return name and kind of each field, and whether it may be None."""
    return tuple((it.name, it.metadata["kind"], it.default is None) for it in fields(cls))


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise an error unless this is an integer from ``low`` to ``high``."""
    kind = Integer(low, high)
    if not kind.accepts(value):
        _refuse(name, value, kind.allowed)


def check_text(name: str, value: object) -> None:
    """Raise an error unless this is text with a UTF-8 form."""
    if not isinstance(value, str) or utf8(value) is None:
        _refuse(name, value, "text that has a UTF-8 form")


def _refuse(name: str, value: object, allowed: str) -> None:
    plain = value is None or isinstance(value, (bool, int, float, str))
    found = f"{value!r:.64}" if plain else f"of type {type(value).__name__}"
    raise InvalidConfigError(f"{name} is {found}; allowed: {allowed}.", field=name)


class Effective[T]:
    """The value in effect of a field: what is set, or the default if the field is None."""

    def __init__(self, default: T, adjust: Callable[[T], T] | None = None) -> None:
        """Declare the default of the field ``x`` in an attribute named ``effective_x``.

        Args:
            default: the value that None stands for.
            adjust: applied to a value that was set, for values that are legal but meaningless.
        """
        self._field = ""
        self._default = default
        self._adjust = adjust

    def __set_name__(self, owner: type, name: str) -> None:
        """Derive the field from the attribute, so that each name is written once."""
        self._field = name.removeprefix("effective_")

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | Self:
        """Return the value in effect."""
        if instance is None:
            return self
        value = getattr(instance, self._field)
        if value is None:
            return self._default
        found = cast("T", value)
        return self._adjust(found) if self._adjust else found


def at_least_one(value: int) -> int:
    """Replace the 0 that the stored form permits, which would mean to wait for ever."""
    return max(value, 1)


def merge[S: Section](weaker: S, stronger: S) -> S:
    """Lay one section over another of the same class.

    A field that is set in ``stronger`` wins, field by field down to the smallest section.
    Replaced as units: the preload section, the splitting section, the containers.
    """
    cls: Any = type(stronger)
    merged: S = cls(
        **{
            name: _merge_values(getattr(weaker, name), getattr(stronger, name))
            for name, _, _ in _declared(cls)
        }
    )
    return merged


def _merge_values(weak: object, strong: object) -> object:
    # A field cannot be reset by merging: None is how both stored forms spell "not set here".
    if strong is None:
        return weak
    if isinstance(strong, Section) and isinstance(weak, Section) and not strong.merges_whole:
        return merge(weak, strong)
    return strong
