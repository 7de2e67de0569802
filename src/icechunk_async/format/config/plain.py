"""The documents of the configuration, before they become YAML or FlexBuffers, or after.

Apart from the reader of YAML, which only version 1 needs and which takes long to import.
"""

from __future__ import annotations

import re
from typing import Final

from icechunk_async._runtime.dataclasses import dataclass

__all__ = ["Document", "Plain", "Scalar", "Variant"]

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS: Final = {"true": True, "True": True, "TRUE": True} | dict.fromkeys(
    ("false", "False", "FALSE"), False
)
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,30})|0o[0-7]{1,30}|0x[0-9a-fA-F]{1,30}")


class Plain(str):
    """A scalar written without quotes: text, number, boolean or null as the reader needs it."""

    __slots__ = ()

    def resolved(self) -> int | bool | str | None:
        """Return the YAML 1.2 value; numbers with a fraction stay text."""
        if self in _NULLS:
            return None
        if self in _BOOLS:
            return _BOOLS[self]
        return int(self, 0) if _INTEGER.fullmatch(self) else str(self)


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice that carries a value: a tag in YAML, a map of one entry elsewhere."""

    name: str
    value: Document


type Scalar = bool | int | str | None
type Document = Scalar | list[Document] | dict[str, Document] | Variant
