"""What the values of a chunk are like: a few numbers, so that queries need not load the values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["STATISTICS", "statistics_of"]

STATISTICS: Final = pa.struct(
    [
        ("valid", pa.int64()),
        ("missing", pa.int64()),
        ("minimum", pa.float64()),
        ("maximum", pa.float64()),
        ("mean", pa.float64()),
    ]
)
_ORDERED: Final = "biufmM"


def statistics_of(values: npt.NDArray[Any]) -> dict[str, int | float | None]:
    """Sum up values as rows show them; NaN and what is no time is missing.

    Times are in seconds since 1970, durations in seconds. What has no order, such as text and
    complex numbers, has no minimum, maximum or mean, and neither have chunks without valid values.
    """
    kind = values.dtype.kind
    flat = values.reshape(-1)
    if kind in "mM":
        flat = flat[~np.isnat(flat)].astype(f"{kind}8[us]").astype(np.int64) / 1e6
    elif kind in "fc":
        flat = flat[~np.isnan(flat)]
    found: dict[str, int | float | None] = {
        "valid": len(flat),
        "missing": values.size - len(flat),
        "minimum": None,
        "maximum": None,
        "mean": None,
    }
    if len(flat) and kind in _ORDERED:
        found |= {
            "minimum": float(flat.min()),
            "maximum": float(flat.max()),
            "mean": float(flat.mean(dtype=np.float64)),
        }
    return found
