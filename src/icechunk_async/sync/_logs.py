"""The official package's calls for logs and telemetry, on Python's ``logging``."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

__all__ = ["initialize_logs", "set_logs_filter", "shutdown_telemetry"]

_VARIABLE: Final = "ICECHUNK_LOG"
_LEVELS: Final = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}
_LIBRARY: Final = "icechunk_async"


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that ``initialize_logs`` installed; there is at most one."""


def initialize_logs() -> None:
    """Write the library's log to standard error, if the variable ``ICECHUNK_LOG`` is set.

    Its value is a filter as :func:`set_logs_filter` takes it. ``ICECHUNK_LOG_TO_STDOUT`` sends
    the log to standard output instead, and ``ICECHUNK_NO_LOGS`` suppresses all of this. Without
    it the library logs to Python's ``logging`` as any library does, and this call does nothing.
    """
    if os.environ.get(_VARIABLE) and not os.environ.get("ICECHUNK_NO_LOGS"):
        set_logs_filter(None)


def set_logs_filter(log_filter_directive: str | None) -> None:
    """Write the library's log to standard error, filtered.

    Args:
        log_filter_directive: a level (``trace``, ``debug``, ``info``, ``warn``, ``error``,
            ``off``), or several ``logger=level`` separated by commas, where ``icechunk`` stands
            for this library and other names are those of Python's loggers. None reads the
            variable ``ICECHUNK_LOG``, and means ``warn`` where that is not set. Filters on
            spans and fields are not understood here, and are ignored.
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
    top, dot, rest = name.replace("::", ".").partition(".")
    return f"{_LIBRARY}{dot}{rest}" if top in {"", "icechunk"} else name


def shutdown_telemetry() -> None:
    """Do nothing: this library starts no exporter of its own, so there is none to shut down."""
