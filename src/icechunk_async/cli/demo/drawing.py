"""Open the result with xarray and draw it. All of this blocks, so it runs on a thread."""
# Matplotlib's and xarray's annotations leave keyword arguments open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, StrMethodFormatter

from icechunk_async.cli.demo.changes import CORRECTED_YEAR, HUDSON_BAY, OFFSET_KELVIN
from icechunk_async.cli.demo.data import COPIED, REFERRED

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

    from icechunk_async import IcechunkStore

__all__ = ["draw", "open_scenario", "yearly_means"]

_ZERO_CELSIUS: Final = 273.15
_SMOOTH_YEARS: Final = 11
_HISTORY, _WARM, _COOL = "#4a5568", "#c2452d", "#2b6cb0"


def open_scenario(store: IcechunkStore, group: str) -> xr.Dataset:
    """Open a scenario without reading its temperatures; times are decoded as CF says."""
    scenario: xr.Dataset = xr.open_zarr(
        store, group=group, consolidated=False, chunks=None, decode_timedelta=False
    )
    return scenario


def yearly_means(scenario: xr.Dataset) -> xr.DataArray:
    """Return the mean temperature of each year in degrees Celsius; cells count by their area."""
    weights = np.cos(np.deg2rad(scenario.latitude))
    means: xr.DataArray = scenario.air_temperature.weighted(weights).mean(("latitude", "longitude"))
    return means.assign_coords(time=means.time.dt.year) - _ZERO_CELSIUS


def draw(release: IcechunkStore, latest: IcechunkStore, path: Path) -> None:
    """Draw both scenarios by year, and one year before and after its correction, as PNG."""
    copied, referred = open_scenario(latest, COPIED), open_scenario(latest, REFERRED)
    before, after = _corrected_year(open_scenario(release, COPIED)), _corrected_year(copied)

    figure = Figure(figsize=(12, 8.8))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    figure.suptitle(
        "Air temperature of North America in two climate projections", fontsize=16, weight="bold"
    )
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    _draw_curves(parts[0].subplots(), yearly_means(copied), yearly_means(referred))

    left, middle, right = parts[1].subplots(1, 3, sharey=True)
    limits = float(before.min()), float(before.max())
    title = f"{COPIED}, {CORRECTED_YEAR}"
    _draw_map(left, before, limits, f"{title}: as released (tag v1)")
    mesh = _draw_map(middle, after, limits, f"{title}: corrected (main)")
    bar = {"location": "bottom", "aspect": 40, "pad": 0.03}
    parts[1].colorbar(mesh, ax=[left, middle], label="air temperature (°C)", **bar)
    reach = abs(OFFSET_KELVIN)
    change = _draw_map(right, after - before, (-reach, reach), "the correction", "RdBu_r")
    parts[1].colorbar(change, ax=right, label="main minus v1 (K)", **bar | {"aspect": 20})
    figure.savefig(path, dpi=110)


def _corrected_year(scenario: xr.Dataset) -> xr.DataArray:
    """Read one year in degrees Celsius; of all the chunks only this one is read."""
    is_year = scenario.time.dt.year.to_numpy() == CORRECTED_YEAR
    kelvin: xr.DataArray = scenario.air_temperature[is_year].squeeze("time").load()
    return kelvin - _ZERO_CELSIUS


def _draw_curves(axes: Axes, copied: xr.DataArray, referred: xr.DataArray) -> None:
    """Draw the common history once, and the two futures."""
    parting = int(np.argmax(copied.to_numpy() != referred.to_numpy()))
    first = int(copied.time[parting])
    curves = [
        (copied, slice(None, parting + 1), _HISTORY, f"until {first - 1}, the same in both"),
        (copied, slice(parting, None), _WARM, f"{COPIED}, medium emissions (copied)"),
        (referred, slice(parting, None), _COOL, f"{REFERRED}, strong mitigation (in its file)"),
    ]
    for means, part, colour, label in curves:
        smooth = means.rolling(time=_SMOOTH_YEARS, center=True).mean()
        axes.plot(means.time[part], means[part], color=colour, linewidth=0.8, alpha=0.45)
        axes.plot(means.time[part], smooth[part], color=colour, linewidth=2.4, label=label)
    axes.set_title(f"mean of each year, weighted by area (bold: over {_SMOOTH_YEARS} years)")
    axes.set_xlabel("year")
    axes.set_ylabel("air temperature (°C)")
    axes.set_xlim(float(copied.time[0]), float(copied.time[-1]) + 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)


def _draw_map(
    axes: Axes,
    values: xr.DataArray,
    limits: tuple[float, float],
    title: str,
    colours: str = "RdYlBu_r",
) -> QuadMesh:
    longitude, latitude = values.longitude - 360, values.latitude
    mesh = axes.pcolormesh(
        longitude, latitude, values, vmin=limits[0], vmax=limits[1], cmap=colours
    )
    axes.add_patch(_frame(longitude.to_numpy(), latitude.to_numpy()))
    axes.set_title(title, fontsize=11)
    axes.set_aspect(1 / float(np.cos(np.deg2rad(latitude.mean()))))
    axes.xaxis.set_major_formatter(FuncFormatter(_degrees_west))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}°N"))
    return mesh


def _degrees_west(east: float, _position: object = None) -> str:
    return f"{-east:.0f}°W"


def _frame(longitude: Any, latitude: Any) -> Rectangle:
    """Frame the cells that were corrected."""
    box = HUDSON_BAY
    columns = longitude[(longitude >= box.west - 360) & (longitude <= box.east - 360)]
    rows = latitude[(latitude >= box.south) & (latitude <= box.north)]
    width, height = longitude[1] - longitude[0], latitude[1] - latitude[0]
    corner = float(columns[0] - width / 2), float(rows[0] - height / 2)
    return Rectangle(corner, len(columns) * width, len(rows) * height, fill=False, linewidth=1.4)
