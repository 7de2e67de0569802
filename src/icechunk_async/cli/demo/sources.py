"""The sample files, and what must be known about them before anything is copied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import cftime
import iris_sample_data

from icechunk_async.cli.demo.netcdf import NetCDF, read_data, read_netcdf

__all__ = ["COPIED", "REFERRED", "Sources", "find_sources"]

COPIED: Final = "A1B"
"""The scenario that is copied."""
REFERRED: Final = "E1"
"""The scenario that stays in its file."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Two climate projections of the UK Met Office, yearly means on the same grid."""

    copied: NetCDF
    referred: NetCDF
    years: list[int]
    """The year of each step of the time axis; the same for both."""

    @property
    def container(self) -> str:
        """URL prefix of the directory with the file that is referred to."""
        return f"{self.referred.path.parent.as_uri()}/"


def find_sources() -> Sources:
    """Find the files of the package ``iris-sample-data`` and read their headers."""
    directory = Path(iris_sample_data.path).resolve()
    copied, referred = (
        read_netcdf(directory / f"{name}_north_america.nc") for name in (COPIED, REFERRED)
    )
    return Sources(copied, referred, _years(copied))


def _years(file: NetCDF) -> list[int]:
    """Decode the time axis, which counts hours in a calendar of twelve months of 30 days."""
    attributes = file.variables["time"].attributes
    times: list[cftime.datetime] = cftime.num2date(
        read_data(file.path, "time"),
        units=str(attributes["units"]),
        calendar=str(attributes["calendar"]),
    ).tolist()
    return [moment.year for moment in times]
