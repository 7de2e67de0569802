"""What this library is: versions, and what it calls itself."""

from __future__ import annotations

import platform
from importlib import metadata

from icechunk_async._version import __version__
from icechunk_async.sync._states import SpecVersion

__all__ = [
    "__version__",
    "print_debug_info",
    "spec_version",
    "supported_spec_versions",
    "user_agent",
]


def print_debug_info() -> None:
    """Print the versions of the platform, Python, this library and those that it works with."""
    print(f"platform:  {platform.platform()}")  # noqa: T201 - what it is for
    print(f"python:  {platform.python_version()}")  # noqa: T201 - what it is for
    print(f"icechunk-async:  {__version__}")  # noqa: T201 - what it is for
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
    """Return what this library calls itself. Its backends do not send it with requests."""
    return f"icechunk-async-{__version__}"
