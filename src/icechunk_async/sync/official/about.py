"""Versions and logs, with the functions of the official package."""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib import metadata
from typing import Final

from icechunk_async._version import __version__ as _own_version
from icechunk_async.sync.official.states import SpecVersion

__all__ = [
    "__version__",
    "initialize_logs",
    "print_debug_info",
    "set_logs_filter",
    "shutdown_telemetry",
    "spec_version",
    "supported_spec_versions",
    "user_agent",
]

__version__: Final = "2.3.0"
"""The release of the official package whose names these are: programs that work with several
releases of it compare this. The version of this library is `icechunk_async.__version__`."""
_VARIABLE: Final = "ICECHUNK_LOG"
_LEVELS: Final = {
    # Python's logging has nothing below debug.
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LIBRARY: Final = "icechunk_async"


def print_debug_info() -> None:
    """Print the versions of the platform, of Python, and of this library and its companions."""
    print(f"platform:  {platform.platform()}")  # noqa: T201 - what it is for
    print(f"python:  {platform.python_version()}")  # noqa: T201 - what it is for
    print(f"icechunk-async:  {_own_version}, with the names of icechunk {__version__}")  # noqa: T201 - what it is for
    for name in ("zarr", "numcodecs", "numpy", "xarray", "dask", "virtualizarr"):
        try:
            print(f"{name}:  {metadata.version(name)}")  # noqa: T201 - what it is for
        except metadata.PackageNotFoundError:
            continue


def spec_version() -> SpecVersion:
    """Return the version of the format that new repositories are created in."""
    return SpecVersion.current()


def supported_spec_versions() -> list[SpecVersion]:
    """Return the versions of the format that can be read and written, newest first."""
    return [SpecVersion.v2, SpecVersion.v1]


def user_agent() -> str:
    """Return the name and version of this library. Its backends do not send it with requests."""
    return f"icechunk-async-{_own_version}"


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that `initialize_logs` installs; there is at most one."""


def initialize_logs() -> None:
    """Write the library's log to standard error, if the variable `ICECHUNK_LOG` is set.

    Its value is a filter, see `set_logs_filter`. `ICECHUNK_LOG_TO_STDOUT` sends the log to
    standard output instead, and `ICECHUNK_NO_LOGS` makes this call do nothing. The library logs
    to Python's `logging` in any case.
    """
    if os.environ.get(_VARIABLE) and not os.environ.get("ICECHUNK_NO_LOGS"):
        set_logs_filter(None)


def set_logs_filter(log_filter_directive: str | None) -> None:
    """Write the library's log to standard error, filtered.

    Args:
        log_filter_directive: a level (`trace`, `debug`, `info`, `warn`, `error`, `off`), or
            several `logger=level` separated by commas. The logger `icechunk` is this library;
            others are Python's loggers. None reads the variable `ICECHUNK_LOG`, and means
            `warn` if that is not set. Filters on spans and fields are ignored.
    """
    directive = log_filter_directive or os.environ.get(_VARIABLE) or "warn"
    for part in directive.split(","):
        name, equals, level = part.strip().rpartition("=")
        logger = name.split("[")[0].strip() if equals else "icechunk"
        number = _LEVELS.get(level.strip().lower())
        if number is not None:
            logging.getLogger(_own_name(logger)).setLevel(number)
    library = logging.getLogger(_LIBRARY)
    if not any(isinstance(handler, _OwnHandler) for handler in library.handlers):
        to_stdout = os.environ.get("ICECHUNK_LOG_TO_STDOUT")
        handler = _OwnHandler(sys.stdout if to_stdout else sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        library.addHandler(handler)


def _own_name(name: str) -> str:
    # Filters that were written for the official package name modules as Rust does.
    top, dot, rest = name.replace("::", ".").partition(".")
    return f"{_LIBRARY}{dot}{rest}" if top in {"", "icechunk"} else name


def shutdown_telemetry() -> None:
    """Do nothing: this library starts no exporter that could be shut down."""
