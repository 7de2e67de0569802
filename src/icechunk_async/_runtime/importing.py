"""Import what was asked for by name, as fast as the interpreter allows."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["import_quickly"]


def import_quickly(name: str) -> ModuleType:
    """Import a module, and collect no garbage meanwhile.

    What an import makes stays, so collections only walk it again and again, a tenth of the time.
    Whether collecting is on is the same afterwards, also where the import raises. Threads may
    import at the same time: only those that found collecting on switch it on again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            gc.enable()
