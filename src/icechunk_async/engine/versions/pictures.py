"""Pictures of what changed, as PNG: sizes of changes, and who wrote which chunk.

Needs ``matplotlib``, which is imported when a picture is drawn.
"""

# Matplotlib is only partly typed.
# pyright: basic

from __future__ import annotations

import base64
import io
import warnings
from html import escape
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from icechunk_async._runtime.dataclasses import dataclass
from icechunk_async.errors import MissingDriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

__all__ = ["ChangeMap", "draw_authors", "draw_changes", "html_image"]

_LARGEST: Final = 256
"""The most cells of a map along an axis."""
_MOST_ARRAYS: Final = 6
_MOST_NAMED: Final = 12
_DARK: Final = "#1b1d21", "#e6e6e6", "#4a4d52"
_LIGHT: Final = "#ffffff", "#1b1d21", "#d4d6da"


@dataclass(frozen=True, slots=True)
class ChangeMap:
    """Changes over the last two axes of an array, in bins; over all other axes the largest."""

    change: npt.NDArray[np.float64]
    """The change of greatest size in each bin, ``(height, width)``; NaN if none has a size."""
    changed: npt.NDArray[np.bool_]
    """Whether a cell changed in each bin, ``(height, width)``."""
    shape: tuple[int, int]
    """Cells of the array along these axes; the first is 1 for an array of one axis."""

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> ChangeMap:
        """Begin a map of an array without changes."""
        height, width = (1, 1, *shape)[-2:]
        bins = min(max(height, 1), _LARGEST), min(max(width, 1), _LARGEST)
        return cls(np.full(bins, np.nan), np.zeros(bins, bool), (height, width))

    def add(self, indices: npt.NDArray[np.int64], steps: npt.NDArray[np.float64] | None) -> None:
        """Add changed cells, ``(n, rank)``, and by how much; not finite where that is unknown."""
        some = np.zeros((len(indices), 2), np.int64)
        last = indices[:, -2:]
        some[:, 2 - last.shape[1] :] = last
        # Cell 511 of 1000 is in bin 130 of 256: 511 * 256 // 1000.
        bins = some * np.array(self.changed.shape) // np.maximum(self.shape, 1)
        flat = np.ravel_multi_index((bins[:, 0], bins[:, 1]), self.changed.shape)
        self.changed.ravel()[flat] = True
        if steps is None:
            return
        finite = np.isfinite(steps)
        flat, steps = flat[finite], steps[finite]
        order = np.argsort(np.abs(steps), kind="stable")  # of several, the last one stays
        flat, steps = flat[order], steps[order]
        old = self.change.ravel()
        found = np.full(old.shape, np.nan)
        found[flat] = steps
        # The sign counts in the picture, so the largest change is kept and not a sum, in which up
        # and down would cancel.
        larger = np.isnan(old) | (np.abs(found) > np.abs(old))
        old[larger & ~np.isnan(found)] = found[larger & ~np.isnan(found)]


def draw_changes(maps: Sequence[tuple[str, ChangeMap]], *, dark: bool = False) -> bytes:
    """Draw maps of changes below each other, at most six.

    Red is more than before, blue is less, and white is no change. Grey cells changed without a
    size: text, or from and to NaN.

    Args:
        maps: titles and maps.
        dark: light on dark.

    Raises:
        MissingDriverError: matplotlib is not installed.
    """
    shown = maps[:_MOST_ARRAYS]

    def draw(axes: Any, title: str, it: ChangeMap, colours: tuple[str, str, str]) -> None:
        from matplotlib.colors import ListedColormap, Normalize  # noqa: PLC0415

        height, width = it.shape
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        grey = np.where(it.changed & np.isnan(it.change), 1.0, np.nan)
        largest = float(np.nanmax(np.abs(it.change))) if np.isfinite(it.change).any() else 0.0
        options: dict[str, Any] = {
            "extent": extent,
            "aspect": "auto",
            "interpolation": "nearest",
        }
        axes.imshow(grey, cmap=ListedColormap([colours[2]]), **options)
        if largest:
            # Both are diverging; the middle is the colour of the page.
            colour_map = "berlin" if dark else "RdBu_r"
            image = axes.imshow(
                it.change, cmap=colour_map, norm=Normalize(-largest, largest), **options
            )
            bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
            # A row is too low for more than a word.
            bar.set_label("change" if height == 1 else "change (after - before)", color=colours[1])
            _tint(bar.ax, colours)
        axes.set_title(title, color=colours[1], loc="left", fontsize=10, parse_math=False)
        axes.set_xlabel("index along the last axis")
        axes.set_ylabel("" if height == 1 else "index along the axis before")
        if height == 1:
            axes.set_yticks([])

    heights = [1.5 if it.shape[0] == 1 else 3.6 for _, it in shown]
    panels = [
        lambda axes, colours, title=title, it=it: draw(axes, title, it, colours)
        for title, it in shown
    ]
    return _png(panels, heights, dark=dark)


def draw_authors(
    title: str,
    coords: npt.NDArray[np.uint32],
    written_by: npt.NDArray[np.int64],
    names: Sequence[str],
    *,
    dark: bool = False,
) -> bytes:
    """Draw the chunks of an array, coloured by the commit that wrote each.

    Args:
        title: above the picture.
        coords: the chunks, ``(n, rank)``. The last two axes are drawn; of several chunks at one
            place, the one that was written last.
        written_by: for each the number of its commit, newest first; -1 if it is unknown.
        names: of the commits.
        dark: light on dark.

    Raises:
        MissingDriverError: matplotlib is not installed.
    """
    last = np.zeros((len(coords), 2), np.int64)
    if coords.shape[1]:
        last[:, -min(coords.shape[1], 2) :] = coords[:, -2:]
    low = last.min(axis=0) if len(last) else np.zeros(2, np.int64)
    high = last.max(axis=0) + 1 if len(last) else np.ones(2, np.int64)
    step = np.maximum(1, -(-(high - low) // _LARGEST))
    grid = np.full(tuple(-(-(high - low) // step)), np.nan)
    order = np.argsort(-np.where(written_by < 0, len(names), written_by), kind="stable")
    places = (last - low) // step
    # Of equal places numpy keeps the last, so the order is from the oldest, and unknown ones first.
    grid[places[order, 0], places[order, 1]] = written_by[order]

    def draw(axes: Any, colours: tuple[str, str, str]) -> None:
        import matplotlib as mpl  # noqa: PLC0415 -- optional
        from matplotlib.colors import ListedColormap, Normalize, to_rgba_array  # noqa: PLC0415
        from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

        count = max(len(names), 1)
        # The newest stands out most from the page.
        ends = (0.95, 0.25) if dark else (0.0, 0.85)
        tones = mpl.colormaps["viridis"](np.linspace(*ends, count))
        all_tones = ListedColormap(np.vstack([to_rgba_array(colours[2]), tones]))
        extent = (low[1] - 0.5, high[1] - 0.5, high[0] - 0.5, low[0] - 0.5)
        axes.imshow(
            grid,
            cmap=all_tones,
            # Each number in the middle of its tone; -1, which is unknown, has the first one.
            norm=Normalize(-1.5, count - 0.5),
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_title(title, color=colours[1], loc="left", fontsize=10, parse_math=False)
        axes.set_xlabel("chunk along the last axis")
        axes.set_ylabel("chunk along the axis before" if coords.shape[1] > 1 else "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if coords.shape[1] < 2:
            axes.set_yticks([])
        named: list[tuple[str, Any]] = [
            (_short(name), tuple(tone)) for name, tone in zip(names, tones, strict=False)
        ]
        if len(names) > _MOST_NAMED:
            older = f"{len(names) - _MOST_NAMED} older commits"
            named[_MOST_NAMED:] = [(older, tuple(tones[-1]))]
        if (written_by < 0).any():
            named.append(("unknown: it expired", colours[2]))
        _add_legend(axes, named, colours[1])

    return _png([draw], [2.6 if coords.shape[1] < 2 else 3.8], dark=dark)


def _add_legend(axes: Any, named: Sequence[tuple[str, Any]], ink: str) -> None:
    """Show names and their colours beside a picture."""
    from matplotlib.patches import Patch  # noqa: PLC0415 -- optional

    legend = axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in named],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=8,
        labelcolor=ink,
    )
    legend.set_in_layout(True)
    for text in legend.get_texts():
        text.set_parse_math(False)  # messages are not formulas


def html_image(draw: Callable[[bool], bytes], text: str) -> str:
    """Return HTML of a picture for light and dark pages; empty if it cannot be drawn.

    Args:
        draw: draws it; given whether it is dark.
        text: in its place, for those who do not see it.
    """
    try:
        light, dark = (base64.b64encode(draw(it)).decode() for it in (False, True))
    except MissingDriverError:
        return ""
    prefix = "data:image/png;base64,"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{prefix}{dark}">'
        f'<img alt="{escape(text)}" style="max-width: 100%" src="{prefix}{light}"></picture>'
    )


def _png(
    panels: Sequence[Callable[[Any, tuple[str, str, str]], None]],
    heights: Sequence[float],
    *,
    dark: bool,
) -> bytes:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 -- optional, and slow to import
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            "Pictures need matplotlib, which is not installed. Install it with: pip install "
            "'icechunk-async[demo]'",
            module=error.name,
        ) from error
    colours = _DARK if dark else _LIGHT
    figure = Figure(figsize=(8, sum(heights) or 1.0), layout="constrained", facecolor=colours[0])
    rows = figure.subplots(max(len(panels), 1), 1, squeeze=False, height_ratios=heights or [1])
    for axes, panel in zip(rows[:, 0], panels, strict=False):
        panel(axes, colours)
        _tint(axes, colours)
    if not panels:
        rows[0, 0].set_axis_off()
        rows[0, 0].text(0.5, 0.5, "No values changed.", ha="center", color=colours[1])
    found = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks are drawn as boxes
        figure.savefig(found, format="png", dpi=120)
    return found.getvalue()


def _short(name: str) -> str:
    shown = "".join(it if it.isprintable() else "?" for it in name)
    return shown if len(shown) < 48 else shown[:45] + "..."


def _tint(axes: Any, colours: tuple[str, str, str]) -> None:
    background, ink, line = colours
    axes.set_facecolor(background)
    axes.tick_params(colors=ink, labelsize=8)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    for spine in axes.spines.values():
        spine.set_color(line)
