"""Arrays with all kinds of values, and what NumPy says about them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr.api.asynchronous as za

if TYPE_CHECKING:
    import numpy.typing as npt

    from icechunk_async import Repository, Session

DTYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i4", ">f4", "?")
TIMES = ("M8[s]", "M8[ns]", "m8[s]")


@dataclass(frozen=True)
class Decoded:
    """The values of an array, and which of them are there."""

    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_]

    def chosen(self, mask: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[Any]:
        """Return the values that are there, and in a mask."""
        return self.values[self.valid if mask is None else self.valid & mask]


def decoded(raw: npt.NDArray[Any], attributes: dict[str, Any]) -> Decoded:
    """Decode stored values by the rules of CF, written down once more."""
    values = raw.astype(raw.dtype.newbyteorder("="))
    if attributes.get("_Unsigned") == "true" and values.dtype.kind == "i":
        values = values.view(f"u{values.dtype.itemsize}")
    valid = np.ones(values.shape, bool)
    if values.dtype.kind == "f":
        valid &= ~np.isnan(values)
    if values.dtype.kind in "mM":
        valid &= ~np.isnat(values)
    for name in ("_FillValue", "missing_value"):
        if name in attributes:
            fill = np.array(attributes[name]).astype(raw.dtype.newbyteorder("="))
            valid &= values != fill.view(values.dtype)
    scale, offset = attributes.get("scale_factor"), attributes.get("add_offset")
    if scale is not None or offset is not None:
        values = values.astype("f8")
        with np.errstate(over="ignore", invalid="ignore"):
            values = values * (1.0 if scale is None else scale)
            values = values + (0.0 if offset is None else offset)
    return Decoded(values, valid)


def expected(function: str, values: npt.NDArray[Any]) -> Any:
    """Return an aggregate of values that are all there."""
    if function == "count":
        return values.size
    if function == "sum":
        if values.dtype.kind in "iub":
            return sum(map(int, values.tolist()))
        if values.dtype.kind == "m":
            # NumPy refuses sums whose parts overflow, also where the whole does not.
            total = sum(values.view(np.int64).tolist())
            return np.array(total, np.int64).view(values.dtype)[()]
        return exact_sum(values)
    if not values.size:
        return None
    if function in {"min", "max"}:
        found = values.min() if function == "min" else values.max()
        return found if values.dtype.kind in "mM" else found.item()
    if values.dtype.kind in "mM":
        return None
    if values.dtype.kind in "iub" and function == "mean":
        return sum(map(int, values.tolist())) / values.size
    doubles = values.astype("f8")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(getattr(doubles, function)())


def exact_sum(values: npt.NDArray[Any]) -> float:
    """Return the sum of doubles, rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        rough = float(values.astype("f8").sum())
    return math.fsum(values.tolist()) if math.isfinite(rough) else rough


def agrees(found: Any, wanted: Any, values: npt.NDArray[Any]) -> bool:
    """Return whether two aggregates of values are equal, sums and what is made of them nearly."""
    if found is None or wanted is None or values.dtype.kind in "mM":
        return bool(found is wanted or found == wanted)
    if isinstance(wanted, float) and not math.isfinite(wanted):
        return math.isnan(found) if math.isnan(wanted) else bool(found == wanted)
    doubles = values.astype("f8")
    largest = float(np.abs(doubles).max()) if len(doubles) else 0.0
    slack = 1e-9 * max(largest * max(len(doubles), 1), 1e-300)
    return bool(math.isclose(found, wanted, rel_tol=1e-9, abs_tol=max(slack, slack * largest)))


async def put_array(
    session: Session,
    path: str,
    raw: npt.NDArray[Any],
    chunks: tuple[int, ...],
    *,
    attributes: dict[str, Any] | None = None,
    names: tuple[str, ...] | None = None,
    fill: Any = None,
    **more: Any,
) -> None:
    """Create an array with values."""
    array = await za.create_array(
        session.store,
        name=path.strip("/"),
        shape=raw.shape,
        chunks=chunks,
        dtype=raw.dtype,
        attributes=attributes or {},
        dimension_names=names,
        fill_value=fill,
        **more,
    )
    await array.setitem(..., raw)


async def commit_array(
    repository: Repository,
    raw: npt.NDArray[Any],
    chunks: tuple[int, ...],
    path: str = "/a",
    **more: Any,
) -> None:
    """Commit an array with values to ``main``."""
    session = await repository.writable_session("main")
    await put_array(session, path, raw, chunks, **more)
    await session.commit(f"array {path}")
