"""JSON values: the type, and the check that a value is one before it is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

from icechunk_async.errors import InvalidInputError, WrongTypeError

__all__ = [
    "JSON",
    "MAX_DEPTH",
    "SignedInt",
    "check_text",
    "checked_json",
    "is_list",
    "is_object",
    "utf8",
]

type JSON = bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None
"""The values that metadata can hold. Sequences are lists or tuples and are read back as lists."""

MAX_DEPTH: Final = 128
"""Lists and maps inside one another, on writing and on reading; common JSON parsers stop here."""

_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1


class SignedInt(int):
    """An integer written as signed even where it is not negative.

    Metadata have none; fields of the configuration that are signed in the official engine do.
    """

    __slots__ = ()


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether a parsed value is a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether a parsed value is a JSON list."""
    return isinstance(value, list)


class _NotJSONError(Exception):
    """Carries the path upwards; each container on the way puts its step in front."""

    def __init__(self, problem: str, kind: type[InvalidInputError] = InvalidInputError) -> None:
        super().__init__(problem)
        self.problem = problem
        self.kind = kind
        self.steps: list[str] = []


def checked_json(value: object, name: str, *, nul_in_keys: bool = True) -> JSON:
    """Return the value in its plainest form: exact types, lists, dicts in key order.

    Args:
        value: anything; subclasses of the JSON types become the types themselves.
        name: what the value is called in the message, such as ``metadata['author']``.
        nul_in_keys: whether keys may contain the NUL character.

    Raises:
        WrongTypeError: something in it has another type; names the path to it.
        InvalidInputError: a number or text in it has no JSON form, or it is nested too deeply.
    """
    try:
        return _plain(value, MAX_DEPTH, nul_in_keys=nul_in_keys)
    except _NotJSONError as error:
        path = name + "".join(reversed(error.steps))
        raise error.kind(
            f"{path} {error.problem}. Allowed: None, bool, finite float, str, int from -2^63 to "
            f"2^64-1, and lists and str-keyed dicts of them, at most {MAX_DEPTH} deep.",
            path=path,
        ) from None


def utf8(text: str) -> bytes | None:
    """Encode text; return None for lone surrogates, which have no UTF-8 form."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def check_text(text: str, name: str) -> None:
    """Refuse text that no file can hold.

    Args:
        text: the text.
        name: its name in the message of the error, such as ``The message``.

    Raises:
        InvalidInputError: it has lone surrogates; a `WrongTypeError` if it is no text.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may
        raise WrongTypeError(f"{name} is text, not a {type(text).__name__}: {text!r:.100}")
    if utf8(text) is None:
        raise InvalidInputError(
            f"{name} {text!r:.100} has lone surrogates, which have no UTF-8 form."
        )


def _plain(value: object, depth: int, *, nul_in_keys: bool) -> JSON:
    if not isinstance(value, (list, tuple, Mapping)):
        return _plain_scalar(value)
    if depth == 0:
        raise _NotJSONError("is nested too deeply")
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return _plain_dict(entries, depth - 1, nul_in_keys=nul_in_keys)
    items: list[JSON] = []
    for index, item in enumerate(cast("Sequence[object]", value)):
        try:
            items.append(_plain(item, depth - 1, nul_in_keys=nul_in_keys))
        except _NotJSONError as error:
            error.steps.append(f"[{index}]")
            raise
    return items


def _plain_scalar(value: object) -> bool | int | float | str | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not _MIN_INT <= value <= _MAX_INT:
            raise _NotJSONError("is an integer of more than 64 bits")
        # Of a subclass, such as an enumeration, the plain number: another process may not have the
        # class.
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NotJSONError(f"is {value}, which JSON cannot express")
        return float(value)
    if isinstance(value, str):
        return _plain_text(value)
    raise _NotJSONError(f"is of type {type(value).__name__}", WrongTypeError)


def _plain_text(text: str) -> str:
    encoded = utf8(text)
    if encoded is None:
        raise _NotJSONError("is text with lone surrogates, which has no UTF-8 form")
    # As integers: a subclass may even say something else by `str()`.
    return text if type(text) is str else encoded.decode()


def _plain_key(key: object, *, nul_in_keys: bool) -> str:
    if not isinstance(key, str):
        raise _NotJSONError("is under a key that is no str", WrongTypeError)
    if "\0" in key and not nul_in_keys:
        # FlexBuffers ends keys at NUL: the rest of the name would be lost.
        raise _NotJSONError("is under a key with NUL, which FlexBuffers cannot hold")
    return _plain_text(key)


def _plain_dict(
    entries: Mapping[object, object], depth: int, *, nul_in_keys: bool
) -> dict[str, JSON]:
    plain: dict[str, JSON] = {}
    for key, item in entries.items():
        try:
            name = _plain_key(key, nul_in_keys=nul_in_keys)
            plain[name] = _plain(item, depth, nul_in_keys=nul_in_keys)
        except _NotJSONError as error:
            error.steps.append(f"[{key!r:.64}]")
            raise
    # Code point order is the order of the UTF-8 bytes.
    return dict(sorted(plain.items()))
