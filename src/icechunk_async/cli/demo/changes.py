"""Change the data as several people would: correct a few values, and add yearly means."""
# Zarr's annotations of stores name optional packages.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from zarr.api.asynchronous import open_array, open_group

from icechunk_async._runtime.dataclasses import dataclass

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async import Repository, Session, SnapshotId

__all__ = [
    "CORRECTED_YEAR",
    "HUDSON_BAY",
    "MEANS",
    "OFFSET_KELVIN",
    "Correction",
    "Region",
    "area_means",
    "correct",
    "make_room_for_means",
    "read",
    "write_means",
]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of cells; degrees north and degrees east, both ends inclusive."""

    south: float
    north: float
    west: float
    east: float


HUDSON_BAY: Final = Region(52.5, 60.0, 268.0, 282.0)
CORRECTED_YEAR: Final = 2050
OFFSET_KELVIN: Final = -2.0
MEANS: Final = "analysis/mean_temperature"


@dataclass(frozen=True, slots=True)
class Correction:
    """The result of `correct`."""

    snapshot_id: SnapshotId
    path: str
    index: tuple[int, int, int]
    """One of the corrected cells: year, latitude, longitude."""
    cells: int


async def read(session: Session, path: str, selection: Any = ...) -> npt.NDArray[Any]:
    """Read an array, or a part of it."""
    array = await open_array(store=session.store, path=path, mode="r")
    return np.asarray(await array.getitem(selection))


async def correct(repository: Repository, group: str, years: list[int]) -> Correction:
    """Make the cells around Hudson Bay colder in one year, and commit that."""
    session = await repository.writable_session("main")
    rows = _inside(await read(session, f"{group}/latitude"), HUDSON_BAY.south, HUDSON_BAY.north)
    columns = _inside(await read(session, f"{group}/longitude"), HUDSON_BAY.west, HUDSON_BAY.east)
    region = (years.index(CORRECTED_YEAR), rows, columns)
    path = f"{group}/air_temperature"
    temperature = await open_array(store=session.store, path=path, mode="r+")
    cells = np.asarray(await temperature.getitem(region))
    await temperature.setitem(region, cells + np.float32(OFFSET_KELVIN))
    snapshot_id = await session.commit(
        f"{group}: correct Hudson Bay in {CORRECTED_YEAR} by {OFFSET_KELVIN} K",
        metadata={"reason": "made up for the demonstration"},
    )
    middle = (rows.start + rows.stop) // 2, (columns.start + columns.stop) // 2
    return Correction(snapshot_id, path, (region[0], *middle), cells.size)


def _inside(coordinates: npt.NDArray[Any], low: float, high: float) -> slice:
    """Return the part of an ascending coordinate that lies in ``[low, high]``."""
    start, stop = np.searchsorted(coordinates, [low, high], side="left").tolist()
    # `searchsorted` gives the place before a coordinate that is equal; the box includes its ends.
    return slice(start, stop + bool(coordinates[min(stop, len(coordinates) - 1)] == high))


async def area_means(session: Session, group: str) -> npt.NDArray[np.float64]:
    """Return the mean temperature of each year in kelvin; cells count by their area."""
    latitude = await read(session, f"{group}/latitude")
    temperature = await read(session, f"{group}/air_temperature")
    by_latitude = temperature.mean(axis=2, dtype=np.float64)
    weights = np.cos(np.deg2rad(latitude.astype(np.float64)))
    means: npt.NDArray[np.float64] = np.average(by_latitude, axis=1, weights=weights)
    return means


async def make_room_for_means(repository: Repository, years: int, scenarios: list[str]) -> None:
    """Create an array for the yearly means of each scenario; each scenario is one chunk."""
    session = await repository.writable_session("main")
    root = await open_group(store=session.store, mode="r+")
    await root.create_array(
        MEANS,
        shape=(len(scenarios), years),
        chunks=(1, years),
        dtype="float64",
        fill_value=np.nan,
        dimension_names=("scenario", "time"),
        attributes={"units": "K", "scenarios": list(scenarios)},
    )
    await session.commit("Make room for yearly means")


async def write_means(session: Session, row: int, means: npt.NDArray[np.float64]) -> None:
    """Write the means of one scenario; nobody sees them before the session's commit."""
    array = await open_array(store=session.store, path=MEANS, mode="r+")
    await array.setitem((row, slice(None)), means)
