"""The official engine's names, for code that blocks: change one import to use this library.

    import icechunk_async.sync as icechunk

Scripts, notebooks and Spark tasks call these as plain functions. The modules of this package have
the official names and hold the public classes and functions; `errors` is in addition. Two rooms are
inside: `official` has what all values share, and `storage` the places of repositories; `opening` is
how they are opened. What runs asynchronous code for blocking code is in
`icechunk_async._runtime.blocking`, and what it opens is kept by `icechunk_async.handles`.

The public names are listed in `__init__.pyi`, and each is imported at its first use.
"""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Final

_LISTED: Final = re.findall(
    r"^from (\S+) import \(?\s*(\w+) as \w+",
    Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"),
    re.MULTILINE,
)
_HOMES: Final = {name: home for home, name in _LISTED if home != __name__}
_MODULES: Final = frozenset(name for home, name in _LISTED if home == __name__)

__all__ = sorted(_HOMES)  # noqa: PLE0605 -- type checkers read the stub  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name, or a module with public names."""
    if name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__, *_MODULES})


if os.environ.get("ICECHUNK_LOG"):  # the official package reads it at its import, too
    import_module(f"{__name__}.official.about").initialize_logs()
