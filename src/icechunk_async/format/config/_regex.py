"""Searching paths and names with the expressions of the configuration."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Final, cast

from icechunk_async.errors import InvalidConfigError

__all__ = ["MAX_CONDITION_DEPTH", "check_conditions", "last_segment", "search"]

MAX_CONDITION_DEPTH: Final = 48
"""Combinations inside one another: the stored form nests twice as deep and has a limit too."""


def search(regex: str, text: str) -> bool:
    """Say whether the expression is found in the text; one that is invalid never is."""
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


def last_segment(path: str) -> str | None:
    """Answer the name of the node at an absolute path; the root has none."""
    return path.rpartition("/")[2] or None


def check_conditions(name: str, conditions: object, member: type) -> None:
    """Refuse what is no tuple of conditions, or one that nests too deeply."""
    level = list(cast("tuple[object, ...]", conditions)) if isinstance(conditions, tuple) else [0]
    if not all(isinstance(item, member) for item in level):
        raise InvalidConfigError(
            f"{name}.conditions holds something else; allowed: a tuple of {member.__name__}.",
            field=name,
        )
    for _ in range(MAX_CONDITION_DEPTH):
        level = [inner for item in level for inner in getattr(item, "conditions", ())]
        if not level:
            return
    raise InvalidConfigError(
        f"{name}.conditions nests more than {MAX_CONDITION_DEPTH} deep; combine more conditions "
        "on one level.",
        field=name,
    )
