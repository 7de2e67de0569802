"""Names of tables that SQL takes without quotes, for the groups of a repository. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["free_name", "group_name", "word"]


def word(text: str) -> str:
    """Return text as a part of a name that SQL takes without quotes."""
    found = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return f"_{found}" if found[:1].isdigit() else found


def group_name(start: str, group: str, dims: Sequence[str], *, first: bool) -> str:
    """Return the name of a table of a group, of those of its arrays that have some dimensions.

    Args:
        start: what names begin with, and the name of the root group.
        group: path of the group; empty for the root.
        dims: the dimensions of the arrays.
        first: whether they are those with the most dimensions, which are named like the group.
    """
    name = "_".join(it for it in (start, word(group)) if it)
    return name if first else f"{name}_by_{'_'.join(map(word, dims)) or 'nothing'}"


def free_name(name: str, taken: Collection[str] | Iterable[str]) -> str:
    """Return a name, with a number if it is taken; SQL knows no upper and lower case of names."""
    known = {it.lower() for it in taken}
    number, found = 1, name
    while found.lower() in known:
        number += 1
        found = f"{name}_{number}"
    return found
