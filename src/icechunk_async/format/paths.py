"""Node paths: absolute, ``/`` for the root, no empty, ``.`` or ``..`` segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icechunk_async.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ancestors", "check_path", "check_selection", "is_within", "join", "name_of"]


def check_path(path: str) -> str:
    """Return a path given by a user as an absolute one: ``a/b`` and ``/a/b/`` are ``/a/b``.

    Raises:
        InvalidInputError: a segment is empty, ``.`` or ``..``, or it is not valid Unicode.
    """
    inner = path.strip("/")
    segments = inner.split("/") if inner else []
    if any(segment in {"", ".", ".."} for segment in segments) or "\0" in inner:
        raise InvalidInputError(
            f"{path!r} is not a node path: a segment is empty, '.', '..' or holds a NUL. Use "
            "names joined by '/'.",
            path=path,
        )
    try:
        inner.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{path!r} is not a node path: it is not valid Unicode.") from None
    return f"/{inner}"


def check_selection(paths: Iterable[str]) -> list[str]:
    """Return the paths of arrays and groups that a user chose, as absolute ones.

    Raises:
        InvalidInputError: no path is given, or one text where several belong, an empty or
            invalid path.
    """
    given = [] if isinstance(paths, str) else list(paths)
    if not given:
        raise InvalidInputError(
            f"Arrays and groups are chosen by a collection of paths, not by {paths!r}. To choose "
            "all of them, leave the argument out."
        )
    if "" in given:
        # From a script whose variable is not set it would choose everything.
        raise InvalidInputError(
            "An empty text is not the path of an array or group. The root, and with it all of "
            "them, is '/'."
        )
    return [check_path(path) for path in given]


def is_within(path: str, top: str) -> bool:
    """Return whether a node is another one, or below it."""
    return path == top or path.startswith("/" if top == "/" else f"{top}/")


def join(parent: str, name: str) -> str:
    """Return the path of a child."""
    return f"{parent}{name}" if parent == "/" else f"{parent}/{name}"


def name_of(path: str) -> str | None:
    """Return the last segment; the root has none."""
    return path.rsplit("/", 1)[1] or None


def ancestors(path: str) -> list[str]:
    """Return the paths above a node, nearest first; none for the root."""
    found: list[str] = []
    while path != "/":
        path = path.rsplit("/", 1)[0] or "/"
        found.append(path)
    return found
